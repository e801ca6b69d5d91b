"""All contracts by name, for `fedlora methods check` and for your own tests.

CONTRACTS["rank"](Server(MyMethod()))                                returns what it measured
CONTRACTS["exact"](Server(MyMethod()), claim, ranks, participants)   raises ContractBroken if the claim fails
"""

from __future__ import annotations

from collections.abc import Mapping

from fedlora.core.read_only import ReadOnly
from fedlora.testing.basics import alive, order, protocol, purity, rank, weights
from fedlora.testing.contract import PLAYS, Claim, Contract, Unasked
from fedlora.testing.federations import EQUAL, FULL, MIXED, Ranks
from fedlora.testing.promises import exact, gauge, global_model, halves, mixed, state

_ONCE = {"equal ranks, all there": (EQUAL, FULL)}
_MIXED = {"mixed ranks, all there": (MIXED, FULL)}


def _exact(claim: Claim, ranks: Ranks) -> bool:
    return len(set(ranks.values())) == 1 if claim.exact == "equal" else claim.exact


def _halves(claim: Claim, ranks: Ranks) -> bool | Unasked:
    return True if claim.exact else "unasked"


CONTRACTS: Mapping[str, Contract] = ReadOnly(
    {
        contract.name: contract
        for contract in (
            Contract(
                "protocol", protocol, None,
                "fedlora.core.method.Method is the protocol.", _ONCE,
            ),
            Contract(
                "rank", rank, None,
                "`readout(state, client, rank)` returns `rank` slots in the seed's dtype, for any client.",
                PLAYS,
            ),
            Contract(
                "alive", alive, None,
                "Such a slot never trains: give it a fresh row of A (`core.lora.revive`).", PLAYS,
            ),
            Contract(
                "order", order, None,
                "A mean has no order: do not pick updates by their place, and draw no global random numbers.", PLAYS,
            ),
            Contract(
                "purity", purity, None,
                "Make new tensors instead of changing those you get, draw by (key, round, client), and keep in the "
                "state only what a checkpoint can hold.", PLAYS,
            ),
            Contract(
                "mixed", mixed, lambda claim, _: claim.mixed,
                "Serve every rank, or raise fedlora.errors.RankMismatch in `aggregate` and `readout`.", _MIXED,
            ),
            Contract(
                "global model", global_model, lambda claim, _: claim.global_model,
                "`effective` returns the server's update in every state, or None in every state.", _ONCE,
            ),
            Contract(
                "exact", exact, _exact,
                "Average products, not factors; add the base change in `effective`; or claim exact=False.", PLAYS,
            ),
            Contract(
                "weights", weights, lambda claim, _: claim.weights,
                "Use `u.weight`; or claim weights=False, where the method has weights of its own.", _ONCE,
            ),
            Contract(
                "halves", halves, _halves,
                "Use `u.weight` and nothing that counts clients.", PLAYS,
            ),
            Contract(
                "gauge", gauge, lambda claim, _: claim.gauge,
                "Use B_i and A_i through their product or its subspaces only; or claim gauge=False.", PLAYS,
            ),
            Contract(
                "state", state, lambda claim, _: claim.state,
                "Read out of what the product determines; fix signs and ties; or claim state=False.", PLAYS,
            ),
        )
    }
)  # fmt: skip
