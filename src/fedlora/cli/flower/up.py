"""`fedlora flower up`: play a federation's folder on this machine."""

from __future__ import annotations

from fedlora.cli.flower.common import Folder, needed


def up(folder: Folder) -> None:
    """Run a trial on this machine: start the SuperLink and a node for each site, play all rounds, stop everything.

    If one of the processes dies, it stops the others, with exit code 1. Call it again to continue after the last
    finished round; if all rounds are done, it says so. Ctrl-C ends it in order.
    """
    needed()
    from fedlora.cli.flower.serve import played
    from fedlora.flower.serving.trial import Trial

    played(Trial, folder, "up")
