"""One thing that leaves a private run's server, or could, and the reason for its fate: the entries of the lists."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Fate = Literal["released", "privatised", "if-public", "secret", "dropped"]


@dataclass(frozen=True)
class Item:
    """One thing at one place. name: with dots between nested tables. reason: for its fate."""

    place: str
    name: str
    fate: Fate
    reason: str


PUBLIC = "a public constant: configuration, code, base model or plan"
MADE = "made of public things and noised sums alone (post-processing)"
PAID = "the mechanism's output: charged in the ledger"
LEDGER = "the ledger is public"
TESTED = "a released model on held-out examples, which must be no client's"
LOSS = "a function of one client's data, not noised"
COUNT = "how many examples a client has is the client's; the weight uses min(n_i, n_max), and never shows it"
WHO = "who took part, failed or was refused: amplification needs it secret, and a refusal is a client's own"
UPLOADS = "computed from the uploads themselves, not from the noised sum"
TRAFFIC = "sizes and times tell who took part and how much data it has"
RESUME = "needed to continue after a crash; records what clients did"
ITSELF = "a client's own upload"
OWN = "what one client gets by its own history is private towards others only if it reaches that client alone"
CHOICE = "a choice among states by a measurement: public if the measurement is"
REFUSED = "it tells what single clients did or how they were judged; [privacy] excludes attacks and robust rules"
PLACES = "the names of clients' files can say who they are and what is in there"
DATA = "facts about clients' data; a digest confirms a correct guess of the data"


def as_items(place: str, fate: Fate, reason: str, *names: str) -> tuple[Item, ...]:
    return tuple(Item(place, name, fate, reason) for name in names)
