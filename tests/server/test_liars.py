"""What a liar gets under each robust rule: never more than docs/how-to/robust-rules.md says. Kind of evidence: *bound*.

A table of (rule x weighting x liars x who holds a module). In each cell the configuration is refused where
the page says so. Else every attack of a few (far away, just inside, nothing at all, terms that cancel, no numbers; the
liars together, with claims of 1e7 examples) is played in a round of 2 f + 3 clients on a real server: the round closes
whatever the liars do, and its result keeps the page's bound.

The expected values: geometry by hand, below, in dense float64.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fedlora import Adapter, Client, LoRA, Server, Upload, build
from fedlora.errors import QuorumNotMet, UploadRefused
from fedlora.server.robust_rules import CentredClipping, Clip, GeometricMedian, Krum, Mixing, MultiKrum, Rule
from fedlora.server.state import ServerState
from support.federations import noise

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "robust-rules.md").read_text(encoding="utf-8")
D, HONEST, CLAIM = 5, 100.0, 1e7
NORM, STEPS = 0.8, 3  # of the fixed thresholds; iterations of centred clipping
RULES: dict[str, Callable[[int], Rule]] = {
    "clip, a norm": lambda f: Clip(threshold=NORM),
    "clip, median": lambda f: Clip(liars=f),
    "centred-clipping, a norm": lambda f: CentredClipping(tau=NORM, iterations=STEPS),
    "centred-clipping, median": lambda f: CentredClipping(liars=f, iterations=STEPS),
    "geometric-median": lambda f: GeometricMedian(liars=f),
    "krum": lambda f: Krum(liars=f),
    "multi-krum": lambda f: MultiKrum(liars=f),
    "mixing, geometric-median": lambda f: Mixing(GeometricMedian(liars=f), f),
    "mixing, multi-krum": lambda f: Mixing(MultiKrum(liars=f), f),
}
ATTACKS = ("far", "inside", "nothing", "one cancels", "no numbers")


@dataclass(frozen=True)
class Cell:
    """rule: of RULES. claims: whether examples weigh. f: liars, of 2 f + 3 clients. v: how many honest clients hold the
    module v beside the liars; None: all."""

    rule: str
    claims: bool
    f: int
    v: int | None

    @property
    def n(self) -> int:
        return 2 * self.f + 3

    def share(self, clients: int) -> float:
        """The most that one client can weigh among so many."""
        return 1.0 if self.claims else 1 / clients

    @property
    def refused(self) -> bool:
        """As the page says: half of the weight decides a geometric median."""
        return self.rule.endswith("geometric-median") and self.f * self.share(self.n) >= 0.5


def cells(rule: str) -> Iterator[Cell]:
    yield from (Cell(rule, claims, f, v) for f in (1, 2) for claims in (False, True) for v in (None, 1, 0)[: 4 - f])


def the_server(cell: Cell) -> Server:
    rule = RULES[cell.rule](cell.f)
    return Server(build("svd", energy=1.0), rule=rule, quorum=1, weighting="examples" if cell.claims else None)


def honest_changes(cell: Cell) -> list[dict[str, Tensor]]:
    """Near one another: a common step of norm 1, and 0.3 of each one's own."""
    made = []
    for k in range(cell.n - cell.f):
        both = noise((2 * D, D), "common") / 7 + 0.3 * noise((2 * D, D), "own", k) / 7
        made.append({"q": both[:D], "v": both[D:]} if cell.v is None or k < cell.v else {"q": both[:D]})
    return made


def lies(cell: Cell, attack: str, honest: list[dict[str, Tensor]]) -> list[Adapter]:
    """What each liar sends. All of them the same, but of "one cancels": one is refused, the others lie inside."""
    a, r = centre(honest)
    away = flat({name: noise((D, D), "away", name) * (3 if name == "v" else 1) for name in ("q", "v")})
    away = away / away.norm()
    at = {
        "far": 1e5 * away, "inside": a + 3 * r * away, "nothing": 0 * a, "no numbers": a * math.nan,
        "one cancels": a + 3 * r * away,
    }  # fmt: skip
    sent = adapter({"q": at[attack][: D * D].view(D, D), "v": at[attack][D * D :].view(D, D)})
    B, A = torch.eye(D, dtype=torch.float64), torch.eye(D, dtype=torch.float64)
    B[:, 0], B[:, 1], A[0], A[1] = 2.0**40, -(2.0**40), 1.0, 1.0
    cancels = Adapter({name: LoRA(B, A) for name in "qv"})
    return [cancels if attack == "one cancels" and k == 0 else sent for k in range(cell.f)]


def adapter(change: dict[str, Tensor]) -> Adapter:
    return Adapter({name: LoRA(x, torch.eye(D, dtype=torch.float64)) for name, x in change.items()})


def flat(change: dict[str, Tensor]) -> Tensor:
    """Both modules as one vector: one that is not held is no change."""
    zero = torch.zeros(D, D, dtype=torch.float64)
    return torch.cat([change.get(name, zero).flatten() for name in ("q", "v")])


def centre(honest: list[dict[str, Tensor]]) -> tuple[Tensor, float]:
    """(a, r): the honest mean, and how far from it an honest change is at most."""
    X = torch.stack([flat(x) for x in honest])
    return X.mean(dim=0), float((X - X.mean(dim=0)).norm(dim=1).max())


def played(cell: Cell, attack: str, honest: list[dict[str, Tensor]]) -> tuple[Server, ServerState]:
    server = the_server(cell)
    intake = server.open(server.init(adapter({name: torch.zeros(D, D, dtype=torch.float64) for name in "qv"})))
    for k, x in enumerate(honest):
        intake.add(Upload(Client(f"h{k}", dict.fromkeys(x, D)), HONEST, adapter(x)))
    for k, sent in enumerate(lies(cell, attack, honest)):
        try:
            intake.add(Upload(Client(f"l{k}", D), CLAIM, sent))
        except UploadRefused:
            assert attack == "no numbers"
    return server, intake.close()


def shares(cell: Cell, honest: int, liars: int) -> tuple[float, float]:
    """(of each honest client, of each liar), of equal honest claims and equal larger ones."""
    claimed = CLAIM / HONEST if cell.claims else 1.0
    each = claimed / (liars * claimed + honest) if liars else 0.0
    return (1 - liars * each) / honest if honest else 0.0, each


def faults(cell: Cell) -> Iterator[str]:
    """What a cell does that the page does not say."""
    rule, honest = RULES[cell.rule](cell.f), honest_changes(cell)
    said = rule.overcome([cell.share(cell.n)] * cell.n)
    if cell.refused or said is not None:
        if (said is not None) is not cell.refused:
            yield f"at the start: {said}"
        return
    for attack in ATTACKS if cell.v is None else ATTACKS[:2]:
        try:
            server, after = played(cell, attack, honest)
        except QuorumNotMet as error:
            yield f"{attack}: liars stop the round: {error}"
            continue
        update = server.global_update(after)
        z = {name: update[name].delta() for name in "qv"}
        if not bool(torch.isfinite(flat(z)).all()):
            yield f"{attack}: the result is no number"
            continue
        yield from (f"{attack}: {wrong}" for wrong in unkept(cell, honest, z, after))


def unkept(cell: Cell, honest: list[dict[str, Tensor]], z: dict[str, Tensor], after: ServerState) -> Iterator[str]:
    """Where the result leaves the bounds: in modules that all hold together, and in v where some do not."""
    assert after.tally is not None and after.tally.judged is not None
    judged, (a, r) = after.tally.judged, centre(honest)
    there = [name for name in judged.clients if name.startswith("l")]
    p_h, p_l = shares(cell, len(honest), len(there))
    for name, one in judged.clients.items():
        if abs(one.before - (p_l if name in there else p_h)) > 1e-9:
            yield f"{name} weighs {one.before:.3f}"
    q = min(1.0, cell.f * cell.share(cell.n))
    norms = [float(flat(x).norm()) for x in honest]
    t = judged.facts.get("threshold", judged.facts.get("tau", NORM))
    if "median" in cell.rule and "clip" in cell.rule and not min(norms) * (1 - 1e-9) <= t <= max(norms) * (1 + 1e-9):
        yield f"the threshold is {t:.3g}, not between the honest norms"
    whole = ("q", "v") if cell.v is None else ("q",)
    middle = quiet(cell, honest, p_h, t) if "clip" in cell.rule else a
    off = float((torch.cat([z[name].flatten() for name in whole]) - middle[: len(whole) * D * D]).norm())
    if off > (most := bound(cell, r, q, t)) * (1 + 1e-6):
        yield f"{off:.4g} away, of {most:.4g}"
    if cell.v is not None and not cell.rule.startswith("mixing"):
        s_h, s_l = shares(cell, cell.v, len(there))
        weights = {f"h{k}": s_h for k in range(cell.v)} | dict.fromkeys(there, s_l)
        m = {name: judged.clients[name].after / judged.clients[name].before for name in weights}
        less = max(1.0, sum(weights[name] * m[name] for name in weights))
        own = sum((weights[f"h{k}"] * m[f"h{k}"] / less * honest[k]["v"] for k in range(cell.v)), 0 * z["v"])
        pull, most = float((z["v"] - own).norm()), alone(cell, float(a.norm()), r, q, t)
        if pull > most * (1 + 1e-6):
            yield f"in v, which {cell.v} others hold, {pull:.4g} of {most:.4g}"


def quiet(cell: Cell, honest: list[dict[str, Tensor]], p: float, t: float) -> Tensor:
    """Clipping where the liars pull nowhere."""
    v = torch.zeros(2 * D * D, dtype=torch.float64)
    for _ in range(1 if cell.rule.startswith("clip") else STEPS):
        v = v + sum(p * min(1.0, t / float((flat(x) - v).norm())) * (flat(x) - v) for x in honest)
    return v


def bound(cell: Cell, r: float, q: float, t: float) -> float:
    """The page's bound in modules that all clients hold."""
    krum = r * (1 + 2 * math.sqrt((cell.n - cell.f - 1) / (cell.n - 2 * cell.f)))
    if "clip" in cell.rule:
        return q * t * (1 if cell.rule.startswith("clip") else STEPS)
    one = krum if "krum" in cell.rule else r * (1 - q) / math.sqrt(1 - 2 * q)
    return 3 * one if cell.rule.startswith("mixing") else one


def alone(cell: Cell, size: float, r: float, q: float, t: float) -> float:
    """The page's bound of the liars' part of a module that some clients lack. size: of the honest mean."""
    q_v = min(1.0, cell.f * cell.share(cell.f + (cell.v or 0)))
    if "clip" in cell.rule:
        return q_v * t * (1 if cell.rule.startswith("clip") else STEPS * (STEPS + 1) / 2)
    if "krum" in cell.rule:
        return size + bound(cell, r, q, t)
    C = (1 - q) / math.sqrt(1 - 2 * q)
    return size + r * (C + (1 + C) / (1 - q))


FORMULAS = (
    "`q t`", "`q_v t`", "`q t L`", "`q_v t L (L + 1) / 2`", "`C r`", "`C = (1 - q) / sqrt(1 - 2 q)`",
    "`s + r (C + (1 + C) / (1 - q))`", "`K r`", "`K = 1 + 2 sqrt((n - f - 1) / (n - 2 f))`", "`s + K r`", "`3 C r`",
    "`3 K r`",
)  # fmt: skip


def test_the_page_has_these_bounds_and_no_others() -> None:
    """As `bound` and `alone` above compute them."""
    table = PAGE.partition("| rule | result in modules")[2].partition("\n\n")[0]
    said = [word for word in re.findall("`[^`]*`", table) if word[1:-1] not in "/".join(RULES)]
    assert said == list(FORMULAS)


# A threshold of each kind, and both rules behind mixing; the others alone are in `make exhaustive`.
QUICK = ("clip, a norm", "centred-clipping, median", "mixing, geometric-median", "mixing, multi-krum")


@pytest.mark.parametrize(
    "rule", [pytest.param(rule, marks=() if rule in QUICK else pytest.mark.exhaustive) for rule in RULES]
)
def test_a_liar_gets_no_more_than_the_page_says(rule: str) -> None:
    """Ten cells of each rule."""
    found = [f"{cell}: {fault}" for cell in cells(rule) for fault in faults(cell)]
    assert not found, "\n".join(found[:12]) + f"\n{len(found)} in all"


@pytest.mark.parametrize("rule", ["krum", "geometric-median"])
def test_a_rule_that_bears_no_liar_any_more_says_so(rule: str, caplog: pytest.LogCaptureFixture) -> None:
    """One of 2 f + 3 clients is refused for what it sent: krum needs 2 f + 3 for each liar that it bears, and a
    geometric median 2 f + 1, so that only the first one weighs the others as if none lied."""
    cell = Cell(rule, False, 1, None)
    played(cell, "no numbers", honest_changes(cell))
    told = [line.getMessage() for line in caplog.records if line.levelname == "WARNING" and rule in line.getMessage()]
    assert [bool(re.search(r"\b1 clients? .*refused.*\b4 others", line)) for line in told] == [True] * (rule == "krum")
