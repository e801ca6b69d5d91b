"""Guards a round against uploads with columns that are huge but almost cancel.

Columns of 2^20 that cancel are a small update, but they put a large rounding error into everybody's mean: the next
state was 0, or 1e9 times the mean. So every round, with a rule or without, checks each upload before it counts:

* little cancels: the upload stays as it came, bit for bit.
* float64 cannot separate the update from rounding of its terms: the server refuses it by name. The limit is relative to
  the round: rounding of more than 1e-3 of both its own norm and the lower median norm (`changes.measurable`).
* in between, methods that take products get it as it came, because they add up in float64. The others get the same
  update as a pair of orthogonal columns (`linalg.shortest`), and the log names the client.

A product that is not zero but too small for the server's dtype (`checks.LEAST`) is refused by name, too: its mean would
be lost where it is stored, and that ends a round.

This applies only if both factors travel: one factor with a common one has no terms of the client's own. A diagonal
gauge, columns of 1e6 with rows of 1e-6, has no terms that cancel, so averages of factors stay exposed to it.
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
from fedlora.server.checks import LEAST, kept_dtype, too_small
from fedlora.server.terms import Terms

log = logging.getLogger("fedlora.server")

# Columns go to the method if their terms are at most this many times the update. "terms" averages them in float32 too.
# Terms of 1e4 move an average of factors by 1e2, and audits themselves use coordinates of condition 1e3.
_BORNE = {"products": math.inf, "terms": 1e2, "factors": 1e4}
_SHOWN = 4


@dataclass(frozen=True, eq=False)
class Cancelling:
    """What happens to a round's uploads. plain: module -> clients whose columns are replaced by an orthogonal pair.
    refused: client -> why its update cannot be separated from rounding."""

    plain: Mapping[str, Container[str]] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)

    def handed_on(self, module: str, client: str, lora: LoRA) -> LoRA:
        """The factors that the method gets."""
        return plain_pair(lora) if client in self.plain.get(module, ()) else lora


def cancelling(terms: Terms, uploads: Sequence[Upload], each: Each) -> Cancelling:
    """Check each module of each upload. Cost: r^2 (d_out + d_in) each, and a QR of both sides if terms cancel."""
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
    vanishing: dict[str, str] = {}
    for at, (name, k) in enumerate(held):
        size_of_terms, size = measured.get(at, (0.0, looked[at][1]))
        if why := _vanishes(terms, name, uploads[k], (size_of_terms, size)):
            vanishing.setdefault(uploads[k].client.id, why)
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
        f"everybody's mean. Send the same update in other coordinates, such as balanced factors"
        for k, u in enumerate(uploads)
        if not sound[k]
    } | vanishing
    _say(terms.number, {client: facts for client, facts in worst.items() if client not in refused})
    return Cancelling(plain, refused)


def _vanishes(terms: Terms, module: str, upload: Upload, sizes: tuple[float, float]) -> str:
    """Why the update of that module is too small, or "". sizes: of its terms, and of their sum; 0 is no update."""
    dtype = kept_dtype(upload.adapter.modules[module], terms.state.start.modules[module])
    small = [size for size in sizes if 0 < size < LEAST[dtype]]
    return too_small(f"the update of module {module!r}", min(small), dtype) if small else ""


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
