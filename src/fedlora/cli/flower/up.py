"""`fedlora flower up | simulate`: a federation's folder played on this machine."""

from __future__ import annotations

import typer

from fedlora.cli.flower.common import Folder, needed
from fedlora.cli.screen import complain, print_json


def up(folder: Folder) -> None:
    """A trial on loopback: SuperLink, a node for each site, all rounds; then everything is taken down again.

    Started again it goes on after the last finished round, and says so where all are played. Ctrl-C ends it in order.
    """
    needed()
    from fedlora.cli.flower.serve import say, stopping, tell_end
    from fedlora.flower.serving.supervisor import GaveUp
    from fedlora.flower.serving.trial import Trial, TrialFailed

    with stopping() as stop:
        try:
            now = Trial(folder, say, stop=stop).play()
        except (GaveUp, TrialFailed) as error:
            complain(str(error))
            raise typer.Exit(1) from error
    tell_end(folder, now, stop, "up")


def simulate(folder: Folder) -> None:
    """The same federation in Flower's simulation engine (Ray), in place of SuperLink and SuperNodes.

    Started again it goes on after the last finished round.
    """
    needed()
    from fedlora.flower.simulated import simulate_federation

    print_json(simulate_federation(folder))
