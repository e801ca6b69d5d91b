"""The place of defences: after all uploads are in, before the method aggregates. One place, whatever engine plays.

A defence sees a round's accepted uploads together, and says which count, as what and for how much. It is a value handed
to `Server(defences=...)`; they are applied in their order, and a robust rule (`Server(rule=...)`, [defence] in a file)
comes after them: it judges what they leave. Where uploads are dropped or never seen (memory, a sketch) there is nothing
to look at, and the server refuses the combination. Privacy and secure sums are other things: they are intakes and
noise, not judgements of uploads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from fedlora.core.messages import Upload
from fedlora.errors import FedLoRAError, HyperparameterError
from fedlora.server.state import ServerState


@dataclass(frozen=True, eq=False)
class Verdict:
    """What a defence makes of a round. uploads: those that count, some perhaps changed. counts: client -> what it
    counts for, of exactly these. refused: client -> why it does not count any more."""

    uploads: Sequence[Upload]
    counts: Mapping[str, float]
    refused: Mapping[str, str] = field(default_factory=dict)


class Defence(Protocol):
    """Looks at a round's uploads together. A pure function of its arguments."""

    def __call__(self, state: ServerState, uploads: Sequence[Upload], counts: Mapping[str, float]) -> Verdict:
        """state: before the round. uploads: checked, in the order of client ids. counts: client -> n_i."""


def defended(
    defences: Sequence[Defence], state: ServerState, uploads: Sequence[Upload], counts: Mapping[str, float]
) -> Verdict:
    """All of them, one after the other.

    Raises:
        HyperparameterError: a defence lost a client without a word (every client is in `counts` or in `refused`
            afterwards), or its counts are no weights.
    """
    refused: dict[str, str] = {}
    for defence in defences:
        try:
            verdict = defence(state, uploads, counts)
        except FedLoRAError:
            raise
        except Exception as error:
            raise HyperparameterError(f"the defence {defence!r} raised {type(error).__name__}: {error}.") from error
        if not isinstance(verdict, Verdict):
            raise HyperparameterError(f"the defence {defence!r} returned {verdict!r:.80}; a Verdict is needed.")
        named = {u.client.id for u in verdict.uploads}
        once = len(named) == len(verdict.uploads) and named <= set(counts)
        if not once or named != set(verdict.counts) or set(counts) - named != set(verdict.refused):
            raise HyperparameterError(
                f"{defence!r} must name every client once: it was given {sorted(counts)}, lets {sorted(named)} count "
                f"(with counts for {sorted(verdict.counts)}) and refuses {sorted(verdict.refused)}."
            )
        if not all(math.isfinite(n) and n > 0 for n in verdict.counts.values()):
            raise HyperparameterError(f"{defence!r}: counts are finite and positive; got {dict(verdict.counts)}.")
        uploads, counts = verdict.uploads, verdict.counts
        refused |= verdict.refused
    return Verdict(uploads, counts, refused)
