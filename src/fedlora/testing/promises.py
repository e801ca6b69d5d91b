"""Measures what a method may promise: the mean update, independence of coordinates, clients of different ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor

from fedlora.analysis.audit import regauge
from fedlora.core.messages import Client, Upload
from fedlora.errors import NoGlobalModel, RankMismatch
from fedlora.server.server import Server
from fedlora.server.state import ServerState
from fedlora.testing.comparing import model_drift, readout_drift, relative
from fedlora.testing.contract import Measured
from fedlora.testing.federations import SHAPES, Ranks, Round, Who, rounds, seed_adapter

# The federations are float64: an exact method is off by rounding only, any other by per cents.
EXACT, SAME_MODEL, SAME_READOUTS = 1e-11, 1e-10, 1e-9
CONDITION = 10.0  # of the random coordinates


def exact(server: Server, ranks: Ranks, who: Who) -> Measured:
    """effective(aggregate(s, us)) - base(s) == sum_i p_i B_i A_i, against the dense float64 sum, in every round."""
    errors = []
    for played in rounds(server, ranks, who):
        if not server.has_global_model(played.after):
            return Measured(False, "there is no global model, so no mean of it")
        update, base = server.global_update(played.after), _base(server, played.before, ranks)
        for m in SHAPES:
            errors.append(relative(update[m].delta() - base[m] if m in base else update[m].delta(), played.mean(m)))
    return _below(EXACT, errors, "off the mean update by")


def gauge(server: Server, ranks: Ranks, who: Who) -> Measured:
    """The server's update stays when each (B_i, A_i) becomes (B_i Q_i, Q_i^-1 A_i); without one, readouts stay."""
    drifts = [
        model_drift(server, moved, played.after)
        if server.has_global_model(played.after)
        else readout_drift(server, moved, played.after, ranks)
        for played, moved in _regauged(server, ranks, who)
    ]
    return _below(SAME_MODEL, drifts, "in other coordinates it moves by") if drifts else _NO_GAUGE


def state(server: Server, ranks: Ranks, who: Who) -> Measured:
    """Readouts stay when each (B_i, A_i) becomes (B_i Q_i, Q_i^-1 A_i)."""
    drifts = [readout_drift(server, moved, played.after, ranks) for played, moved in _regauged(server, ranks, who)]
    return _below(SAME_READOUTS, drifts, "in other coordinates readouts move by") if drifts else _NO_GAUGE


def halves(server: Server, ranks: Ranks, who: Who) -> Measured:
    """Splitting one client into two with half its weight each changes nothing."""
    played = next(rounds(server, ranks, who))
    if not server.has_global_model(played.after):
        return Measured(None, "there is no global model")
    first, *rest = played.uploads
    cut = [
        Upload(replace(first.client, id=f"{first.client.id}-{k}"), first.num_examples / 2, first.adapter)
        for k in (1, 2)
    ]
    drift = model_drift(server, server.aggregate(played.before, [*cut, *rest]), played.after)
    return _below(SAME_MODEL, [drift], "one client as two halves moves it by")


def mixed(server: Server, ranks: Ranks, who: Who) -> Measured:
    """Clients of different ranks are served, or refused with `RankMismatch`."""
    try:
        played = len(list(rounds(server, ranks, who)))
    except RankMismatch as refusal:
        return Measured(False, f"refused: {refusal}")
    return Measured(True, f"ranks {', '.join(str(r) for r in sorted(set(ranks.values())))} served for {played} rounds")


def global_model(server: Server, ranks: Ranks, who: Who) -> Measured:
    """`effective` returns an update in every state or in none; if in none, the server raises and does not guess."""
    states = [server.init(seed_adapter(max(ranks.values()))), *(p.after for p in rounds(server, ranks, who))]
    answers = {server.has_global_model(s) for s in states}
    if len(answers) > 1:
        return Measured(None, "effective is None in some states and an update in others")
    if answers == {True}:
        for s in states:
            for name, lora in server.global_update(s).items():
                shape = tuple(lora.delta().shape)
                if shape != SHAPES[name]:
                    return Measured(None, f"effective of {name!r} has shape {shape}, but its matrix {SHAPES[name]}")
        return Measured(True, f"an update in {len(states)} states")
    try:
        server.global_update(states[-1])
    except NoGlobalModel as refusal:
        return Measured(False, f"the server says: {refusal}")
    return Measured(None, "some modules have an update and others none")


_NO_GAUGE = Measured(None, "one factor travels: no gauge to change")


def _below(tolerance: float, drifts: list[float], what: str) -> Measured:
    most = max(drifts)
    return Measured(most < tolerance, f"{what} {most:.1e}", min(drifts), most)


def _regauged(server: Server, ranks: Ranks, who: Who) -> Iterator[tuple[Round, ServerState]]:
    """Each round in which both factors travel, and the next state with every upload in random coordinates."""
    for t, played in enumerate(rounds(server, ranks, who)):
        sent = [lora for u in played.uploads for lora in u.adapter.modules.values()]
        if sent and all(len(lora.tensors()) == 2 for lora in sent):
            moved = [regauge(u, CONDITION, seed=t) for u in played.uploads]
            yield played, server.aggregate(played.before, moved)


def _base(server: Server, before: ServerState, ranks: Ranks) -> dict[str, Tensor]:
    """Module -> the dense change of the base weight on which this round's clients trained."""
    download = server.download(before, Client("stranger", max(ranks.values())))
    return {name: change.total.delta() for name, change in download.base.items()}
