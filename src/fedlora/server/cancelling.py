"""Uploads whose columns are huge beside what they add up to: a round is not theirs to wipe out.

Columns of 2^20 that cancel are a small update, and a large rounding error of everybody's mean: the next state was 0 or
1e9 of them. So in every round, with a rule or without, each upload is looked at before it counts:

* little cancels: it goes on as it came, bit for bit.
* float64 cannot tell the update from rounding of its terms: it is refused by name, and counts for nothing. The measure
  is the round's: rounding of more than 1e-3 of its own norm and of the lower median one (`changes.measurable`).
* between the two, methods that take products get it as it came, for they add up in float64. The others get the same
  update as a pair of orthogonal columns (`linalg.shortest`), and the log names the client.

Only where both factors travel: one factor beside a common one has no terms of the client's own making. A diagonal
gauge, columns of 1e6 beside rows of 1e-6, has no terms that cancel, and averages of factors stay open to it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from fedlora.core.lora import LoRA
from fedlora.core.messages import Upload
from fedlora.core.multiplied import multiplied_how, plain_pair
from fedlora.linalg.cancelling import ARITHMETIC, may_cancel, terms_and_size
from fedlora.linalg.parallel import Each
from fedlora.server.changes import measurable
from fedlora.server.terms import Terms

log = logging.getLogger("fedlora.server")

# Over the size of an update, from which on its columns are not handed over. "terms" averages them in float32 too; an
# average of factors is moved by the root of 1e4, and coordinates of condition 1e3 are an audit's own.
_BORNE = {"products": math.inf, "terms": 1e2, "factors": 1e4}
_SHOWN = 4


@dataclass(frozen=True, eq=False)
class Cancelling:
    """What to do about a round's uploads. plain: module -> clients whose pair is handed on in place of their columns.
    refused: client -> why its update cannot be told from rounding."""

    plain: Mapping[str, Container[str]] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)

    def handed_on(self, module: str, client: str, lora: LoRA) -> LoRA:
        """The factors that a method gets."""
        return plain_pair(lora) if client in self.plain.get(module, ()) else lora


def cancelling(terms: Terms, uploads: Sequence[Upload], each: Each) -> Cancelling:
    """Looks at each module of each upload. Cost: r^2 (d_out + d_in) each, and a QR of both sides where terms cancel."""
    if not terms.roles.both_shared or not uploads:
        return Cancelling()
    held = [(name, k) for name in terms.state.modules for k, u in enumerate(uploads) if name in u.adapter.modules]
    pairs = [uploads[k].adapter.modules[name].factors for name, k in held]
    looked = may_cancel(pairs, each=each)
    suspects = [at for at, (suspect, _) in enumerate(looked) if suspect]
    if not suspects:
        return Cancelling()
    measured = dict(zip(suspects, each(lambda at: terms_and_size(*pairs[at]), suspects), strict=True))
    borne = _BORNE[multiplied_how(terms.method)]
    squares, noises = [0.0] * len(uploads), [0.0] * len(uploads)
    plain: dict[str, set[str]] = {}
    worst: dict[str, tuple[float, str]] = {}
    for at, (name, k) in enumerate(held):
        size_of_terms, size = measured.get(at, (0.0, looked[at][1]))
        rounding = ARITHMETIC * size_of_terms
        squares[k] += size * size
        noises[k] += rounding * rounding
        if borne < math.inf and size_of_terms > borne * size:
            client = uploads[k].client.id
            plain.setdefault(name, set()).add(client)
            worst[client] = max(worst.get(client, (0.0, "")), (size_of_terms / max(size, 1e-300), name))
    norms, noise = (torch.tensor(x, dtype=torch.float64).sqrt() for x in (squares, noises))
    norms = torch.where(norms > noise, norms, 0.0)
    sound, middle = measurable(norms, noise).tolist(), float(norms.median())
    refused = {
        u.client.id: f"its update cannot be measured: the terms of its factors cancel, and their rounding in float64 "
        f"is {float(noise[k]):.2g}, while the round's median update is {middle:.2g}; that rounding would enter "
        f"everybody's mean. Send the same update in other coordinates: balanced factors, or the subspace form"
        for k, u in enumerate(uploads)
        if not sound[k]
    }
    _say(terms.number, {client: facts for client, facts in worst.items() if client not in refused})
    return Cancelling(plain, refused)


def _say(number: int, worst: Mapping[str, tuple[float, str]]) -> None:
    if worst:
        shown = [f"{client} ({times:.1e} times in {name})" for client, (times, name) in sorted(worst.items())[:_SHOWN]]
        more = f" and {len(worst) - _SHOWN} more" if len(worst) > _SHOWN else ""
        log.warning(
            "round %d: terms of the factors of %s%s are larger than their sum: the method gets the same updates as "
            "orthogonal columns. The cause is bad coordinates, or a hostile client.",
            number, ", ".join(shown), more,
        )  # fmt: skip


__all__ = ["Cancelling", "cancelling"]
