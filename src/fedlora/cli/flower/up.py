"""`fedlora flower up`: a federation's folder played on this machine."""

from __future__ import annotations

from fedlora.cli.flower.common import Folder, ending_for_systemd, needed, say


def up(folder: Folder) -> None:
    """A trial on loopback: SuperLink, a node for each site, all rounds; then everything is taken down again.

    What dies ends all of it, with exit code 1. Called again it goes on after the last finished round, and says so where
    all are played. Ctrl-C ends it in order.
    """
    needed()
    from fedlora.cli.flower.serve import stopping, tell_end
    from fedlora.flower.serving.trial import Trial

    with ending_for_systemd(), stopping() as stop:
        now = Trial(folder, say, stop=stop).play()
    tell_end(folder, now, stop, "up")
