"""All contracts, by name: what `fedlora methods check` runs, and what a test of one's own calls.

CONTRACTS["rank"](Server(MyMethod()))                                returns what it measured
CONTRACTS["exact"](Server(MyMethod()), claim, ranks, participants)   raises ContractBroken where the claim fails
"""

from __future__ import annotations

from collections.abc import Mapping

from fedlora.core.read_only import ReadOnly
from fedlora.testing.basics import alive, dtype, order, pickling, protocol, purity, rank, weights
from fedlora.testing.claims import Claim
from fedlora.testing.contract import PLAYS, Contract, Unasked
from fedlora.testing.delivery import delivery
from fedlora.testing.federations import AWAY, EQUAL, FULL, MIXED, Ranks
from fedlora.testing.promises import exact, gauge, global_model, halves, mixed, state

_ONCE = {"equal ranks, all there": (EQUAL, FULL)}
_MIXED = {"mixed ranks, all there": (MIXED, FULL)}
_FIVE = {"equal ranks, five rounds": (EQUAL, AWAY), "mixed ranks, five rounds": (MIXED, AWAY)}


def _exact(claim: Claim, ranks: Ranks) -> bool:
    return len(set(ranks.values())) == 1 if claim.exact == "equal" else claim.exact


def _halves(claim: Claim, ranks: Ranks) -> bool | Unasked:
    return True if claim.exact else "unasked"


CONTRACTS: Mapping[str, Contract] = ReadOnly(
    {
        contract.name: contract
        for contract in (
            Contract(
                "protocol", "all functions of the protocol; method and state are frozen dataclasses", protocol, None,
                "fedlora.core.method.Method is the protocol.", _ONCE,
            ),
            Contract(
                "rank", "readouts of the asked rank, shape and dtype", rank, None,
                "`readout(state, client, rank)` returns `rank` slots in the seed's dtype, for any client.",
                PLAYS,
            ),
            Contract(
                "dtype", "float32 from uploads of float32 or less, float64 from float64", dtype, None,
                "Compute as wide as you like; give back the dtype of the updates' factors, `u.B.dtype`.", _ONCE,
            ),
            Contract(
                "alive", "no slot with B and A both zero", alive, None,
                "Such a slot never trains: give it a fresh row of A (`core.lora.revive`).", PLAYS,
            ),
            Contract(
                "order", "the order of uploads changes no bit", order, None,
                "A mean has no order: do not pick updates by their place, and draw no global random numbers.", PLAYS,
            ),
            Contract(
                "purity", "inputs unchanged; same inputs, same bits; through a checkpoint, too", purity, None,
                "Make new tensors instead of changing those you get, draw by (key, round, client), and keep in the "
                "state only what a checkpoint can hold.", PLAYS,
            ),
            Contract(
                "pickle", "method, state and download survive pickle", pickling, None,
                "Put the classes at the top level of an importable module, and no open files or functions in them.",
                _ONCE,
            ),
            Contract(
                "delivery", "what clients unpack is what was read out, to the bit", delivery, None,
                "`roles` must say who trains a part; `Readout.base` is made by `base_change.moved`.", _FIVE,
            ),
            Contract(
                "mixed", "clients of different ranks are served, or refused by RankMismatch", mixed,
                lambda claim, _: claim.mixed,
                "Serve every rank, or raise fedlora.errors.RankMismatch in `aggregate` and `readout`.", _MIXED,
            ),
            Contract(
                "global model", "`effective` has an answer", global_model, lambda claim, _: claim.global_model,
                "`effective` returns the server's update in every state, or None in every state.", _ONCE,
            ),
            Contract(
                "exact", "the update is the weighted mean of B_i A_i", exact, _exact,
                "Average products, not factors; add the base change in `effective`; or claim exact=False.", PLAYS,
            ),
            Contract(
                "weights", "clients count by their weights", weights, lambda claim, _: claim.weights,
                "Use `u.weight`; or claim weights=False, where the method has weights of its own.", _ONCE,
            ),
            Contract(
                "halves", "one client as two of half its weight changes nothing", halves, _halves,
                "Use `u.weight` and nothing that counts clients.", PLAYS,
            ),
            Contract(
                "gauge", "the update does not depend on coordinates", gauge, lambda claim, _: claim.gauge,
                "Use B_i and A_i through their product or its subspaces only; or claim gauge=False.", PLAYS,
            ),
            Contract(
                "state", "readouts do not depend on coordinates", state, lambda claim, _: claim.state,
                "Read out of what the product determines; fix signs and ties; or claim state=False.", PLAYS,
            ),
        )
    }
)  # fmt: skip
