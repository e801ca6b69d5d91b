"""`fedlora flower up`: play a federation's folder on this machine."""

from __future__ import annotations

from fedlora.cli.flower.common import Folder, ending_for_systemd, needed
from fedlora.cli.screen import say


def up(folder: Folder) -> None:
    """Run a trial on this machine: start the SuperLink and a node for each site, play all rounds, stop everything.

    If one of the processes dies, it stops the others, with exit code 1. Call it again to continue after the last
    finished round; if all rounds are done, it says so. Ctrl-C ends it in order.
    """
    needed()
    from fedlora.cli.flower.serve import stopping, tell_end
    from fedlora.flower.rounds.federation import opening
    from fedlora.flower.serving.trial import Trial

    with ending_for_systemd(), stopping() as stop:
        trial = Trial(folder, say, stop=stop)
        opening(trial.folder.path, say)  # as `serve`: before anything is started
        now = trial.serve()
    tell_end(folder, now, stop, "up")
