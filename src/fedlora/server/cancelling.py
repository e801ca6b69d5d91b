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
    names = list(terms.state.modules)
    found = dict(zip(names, each(lambda name: _looked(name, uploads), names), strict=True))
    if not any(one.suspects for one in found.values()):
        return Cancelling()
    borne = _BORNE[multiplied_how(terms.method)]
    norms, noise = torch.zeros(2, len(uploads), dtype=torch.float64)
    plain: dict[str, set[str]] = {}
    worst: dict[str, tuple[float, str]] = {}
    for name, one in found.items():
        squares = one.sizes.square()
        for k in one.suspects:
            client, (size_of_terms, size) = uploads[k].client.id, one.suspects[k]
            squares[k] = size**2
            noise[k] += (ARITHMETIC * size_of_terms) ** 2
            if borne < math.inf and size_of_terms > borne * size:
                plain.setdefault(name, set()).add(client)
                worst[client] = max(worst.get(client, (0.0, "")), (size_of_terms / max(size, 1e-300), name))
        norms += squares
    norms, noise = norms.sqrt(), noise.sqrt()
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


# ------------------------------------------------------------------------------------------------------------- inside


@dataclass(frozen=True, eq=False)
class _Looked:
    """One matrix. sizes (n,): of the updates whose terms do not cancel. suspects: at -> (size of its terms, of the
    update), of all others."""

    sizes: torch.Tensor
    suspects: Mapping[int, tuple[float, float]]


def _looked(name: str, uploads: Sequence[Upload]) -> _Looked:
    sizes = torch.zeros(len(uploads), dtype=torch.float64)
    suspects = {}
    for k, upload in enumerate(uploads):
        lora = upload.adapter.modules.get(name)
        if lora is None:
            continue
        suspect, size = may_cancel(*lora.factors)
        if suspect:
            suspects[k] = terms_and_size(*lora.factors)
        else:
            sizes[k] = size
    return _Looked(sizes, suspects)


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
