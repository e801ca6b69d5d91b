"""Closes a round, for every kind of intake: the next state, and a warning if it lacks part of the mean."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from fedlora.core.method import Method
from fedlora.core.read_only import ReadOnly
from fedlora.server.method_faults import checked_diagnostics, checked_state
from fedlora.server.state import ServerState, Tally
from fedlora.server.terms import Terms

log = logging.getLogger("fedlora.server")

# The share of the mean's energy that may be lost, or may be rounding, without a warning. The second is not a loss but a
# coarse bound.
LARGEST_SILENT_SHARE, LARGEST_SILENT_ROUNDING = 1e-3, 1e-2


def closed(terms: Terms, modules: Mapping[str, Any], heads: Mapping[str, Tensor], tally: Tally) -> ServerState:
    """The state after a round. modules, heads: those that the round replaces; all others stay."""
    before = terms.state
    for state in modules.values():
        checked_state(terms.method, "aggregate", state)
    modules = {**before.modules, **modules}
    warn_of_losses(terms.method, terms.number, modules)
    return replace(
        before,
        round=terms.number,
        modules=ReadOnly(modules),
        heads=ReadOnly({**before.heads, **(heads if terms.roles.heads == "shared" else {})}),
        tally=tally,
    )


def shares(counts: Mapping[str, float]) -> dict[str, float]:
    """Client -> its share of the counts; also if their sum is not finite."""
    top = 1.0 if math.isfinite(sum(counts.values())) else max(counts.values())
    scaled = {client: n / top for client, n in counts.items()}
    total = math.fsum(scaled.values())
    return {client: n / total for client, n in scaled.items()}


def largest_shares(counts: Mapping[str, float], clients: int) -> list[float]:
    """The largest share that each of the largest `clients` can have of that many clients, if the rest are the smallest.

    Example:
        >>> largest_shares({"acme": 6, "berlin": 2, "cork": 1, "delft": 1}, 3)
        [0.75, 0.5, 0.25]
    """
    sizes = sorted(counts.values(), reverse=True)
    found = []
    for k, size in enumerate(sizes[:clients]):
        others = (sizes[:k] + sizes[k + 1 :])[len(sizes) - clients :]
        found.append(size / (size + math.fsum(others)) if size else 0.0)
    return found


def warn_of_losses(method: Method[Any], round: int, modules: Mapping[str, Any]) -> None:
    """Logs a warning if a method reports that its result lacks part of the mean update, apart from its rank budget."""
    facts = {name: checked_diagnostics(method, state) for name, state in modules.items()}

    def worst(key: str, least: float) -> tuple[str, float, int] | None:
        """The module with the largest value, that value, and the number of modules above `least`."""
        shares = {name: x for name, f in facts.items() if isinstance(x := f.get(key), float) and x > least}
        name = max(shares, key=lambda n: shares[n], default="")
        return (name, shares[name], len(shares)) if shares else None

    if found := worst("dropped", LARGEST_SILENT_SHARE):
        name, share, count = found
        log.warning(
            "round %d: up to %.2g%% of the mean's energy is lost in %s, more than %g%% in %d of %d modules. Rounding "
            "took it: send float32.",
            round, 100 * share, name, 100 * LARGEST_SILENT_SHARE, count, len(modules),
        )  # fmt: skip
    if found := worst("rounding", LARGEST_SILENT_ROUNDING):
        name, share, count = found
        log.warning(
            "round %d: up to %.2g%% of the mean update's energy in %s (%d of %d modules) lies in directions so weak "
            "beside the clients' factors that storing these could have made them. The server keeps them; readouts hold "
            "some that depend on the clients' coordinates. Send float32.",
            round, 100 * share, name, count, len(modules),
        )  # fmt: skip
