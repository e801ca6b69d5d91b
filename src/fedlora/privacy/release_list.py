"""The list of everything that leaves a private run's server, or could: data for `released`.

A star matches any one name. A table without entries for its content goes or stays as a whole.
"""

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


def _items(place: str, fate: Fate, reason: str, *names: str) -> tuple[Item, ...]:
    return tuple(Item(place, name, fate, reason) for name in names)


_OF_STATE = ("rank", "components", "server_rank", "singular_values", "approximation")
_OF_UPLOADS = (
    "total_rank", "union_rank", "full_rank", "gap", "tied", "captured", "error", "dropped", "rounding",
)  # fmt: skip


def _of_modules(*names: str) -> tuple[str, ...]:
    return tuple(f"diagnostics.*.{name}" for name in names)


RELEASES: tuple[Item, ...] = (
    # what the server sends a client
    *_items("download", "privatised", PAID, "adapter.modules", "adapter.heads"),
    *_items("download", "released", PUBLIC, "client", "round", "roles", "start"),
    *_items("download", "released", MADE, "base"),
    # RUN/metrics.jsonl: `runs.observers.describe`
    *_items("metrics.jsonl", "released", PUBLIC, "round"),
    *_items("metrics.jsonl", "released", MADE, "server_rank"),
    *_items("metrics.jsonl", "released", LEDGER, "privacy"),
    *_items("metrics.jsonl", "if-public", TESTED, "metrics"),
    *_items("metrics.jsonl", "dropped", LOSS, "loss", "losses"),
    *_items("metrics.jsonl", "dropped", WHO, "examples", "weights", "refused"),
    *_items("metrics.jsonl", "dropped", TRAFFIC, "seconds", "bytes"),
    *_items("metrics.jsonl", "dropped", UPLOADS, "padded_error", "gauge_drift"),
    *_items("metrics.jsonl", "dropped", REFUSED, "attack", "defence"),
    # RUN/summary.json: `runs.finishing.results` and `_own_results`
    *_items("summary.json", "released", PUBLIC, "method", "rounds", "clients", "target", "metric"),
    *_items("summary.json", "released", PUBLIC, "withheld"),
    *_items("summary.json", "released", MADE, "server_rank", "exports"),
    *_items("summary.json", "released", LEDGER, "privacy"),
    *_items("summary.json", "if-public", TESTED, "validation", "test", "confusion", "probes"),
    *_items("summary.json", "if-public", CHOICE, "best_round", "stopped_early"),
    *_items("summary.json", "dropped", LOSS, "clients_at_end", "clients_at_end_common"),
    *_items("summary.json", "dropped", TRAFFIC, "seconds", "bytes"),
    *_items("summary.json", "dropped", UPLOADS, "padded_error", "gauge_drift"),
    *_items("summary.json", "dropped", WHO, "refused"),
    *_items("summary.json", "dropped", REFUSED, "attack", "defence"),
    *_items("summary.json", "released", MADE, *_of_modules(*_OF_STATE)),
    *_items("summary.json", "released", PUBLIC, "diagnostics.*.deviations"),
    *_items("summary.json", "dropped", UPLOADS, *_of_modules(*_OF_UPLOADS)),
    *_items("summary.json", "dropped", WHO, "diagnostics.*.client_ranks", "diagnostics.*.weights"),
    *_items("diagnostics", "released", MADE, *_OF_STATE),
    *_items("diagnostics", "released", PUBLIC, "deviations"),
    *_items("diagnostics", "dropped", UPLOADS, *_OF_UPLOADS),
    *_items("diagnostics", "dropped", WHO, "client_ranks", "weights"),
    # RUN/manifest.json: `runs.manifest`, `runs.preparation`
    *_items(
        "manifest.json",
        "released",
        PUBLIC,
        "config_digest",
        "run",
        "versions",
        "python",
        "commit",
        "device",
        "threads",
        "seed",
        "model",
        "clients",
        "method",
        "evaluation_target",
        "answer_ends",
        "data.labels",
        "data.template",
    ),
    *_items("manifest.json", "released", LEDGER, "privacy"),
    *_items("manifest.json", "if-public", TESTED, "data.validation", "data.test", "data.probes", "cut_held_out"),
    *_items(
        "manifest.json",
        "dropped",
        DATA,
        "data.train",
        "data.own_test",
        "data.categories",
        "data.label_counts",
        "cut",
        "copies",
    ),
    *_items("manifest.json", "dropped", REFUSED, "attack"),
    # the card of an adapter: README.md
    *_items(
        "card",
        "released",
        PUBLIC,
        "base",
        "base_name",
        "snippet",
        "prompts",
        "source",
        "title",
        "method",
        "method_repr",
        "round",
        "clients",
        "modules",
        "ranks",
        "client_ranks",
        "local",
        "target",
        "on",
        "digest",
        "version",
        "commit",
        "labels",
        "dealt",
        "planned",
        "seed",
    ),
    *_items("card", "released", LEDGER, "privacy"),
    *_items("card", "if-public", TESTED, "metrics", "validation", "classes.recall"),
    *_items("card", "dropped", COUNT, "examples"),
    *_items("card", "dropped", DATA, "classes.counts"),
    *_items("card", "dropped", REFUSED, "attack", "attack_row", "attack_tag", "defence"),
    # the ledger: keys of all kinds of lines, and of NAME.tip
    *_items("ledger", "released", PUBLIC, "kind", "version", "population", "meaning", "id", "number", "before"),
    *_items("ledger", "released", PUBLIC, "mark", "reason", "epsilon", "delta", "run", "round", "rounds", "sampling"),
    *_items("ledger", "released", PUBLIC, "noise_multiplier", "clip", "grid", "size", "sensitivity", "digest"),
    *_items("ledger", "privatised", PAID, "released"),
    *_items("ledger", "dropped", TRAFFIC, "time"),
    # RUN/config.json, and the configuration that trackers get: `runs.private_outputs.shown_config`
    *_items("config.json", "dropped", PLACES, "data.clients.*", "data.train"),
    # the run's folder: each entry as a whole
    *_items("folder", "released", PUBLIC, "config.json", "manifest.json"),
    *_items("folder", "released", MADE, "metrics.jsonl", "summary.json", "adapter", "plots", "tensorboard"),
    *_items("folder", "released", MADE, "summary.before.json"),
    *_items("folder", "if-public", CHOICE, "best"),
    *_items("folder", "if-public", TESTED, "samples.jsonl", "samples.md"),
    *_items("folder", "secret", RESUME, "checkpoints", "private", "journal"),
    *_items("folder", "dropped", ITSELF, "uploads"),
    *_items("folder", "dropped", OWN, "clients"),
    # the screen and its progress bar; logs
    *_items("screen", "released", PUBLIC, "round"),
    *_items("screen", "released", MADE, "server_rank"),
    *_items("screen", "released", LEDGER, "privacy"),
    *_items("screen", "if-public", TESTED, "metrics"),
    *_items("screen", "dropped", LOSS, "loss", "losses"),
    *_items("screen", "dropped", WHO, "client", "refused", "examples", "weights", "abstained"),
    *_items("screen", "dropped", TRAFFIC, "seconds", "bytes"),
    *_items("screen", "dropped", REFUSED, "attacked"),
    # TensorBoard, trackio, wandb: `runs.tracking.numbers`
    *_items("tracker", "released", MADE, "server_rank"),
    *_items("tracker", "released", LEDGER, "privacy"),
    *_items("tracker", "if-public", TESTED, "metrics", "test", "test_best"),
    *_items("tracker", "dropped", LOSS, "loss", "site", "sites"),
    *_items("tracker", "dropped", WHO, "weight", "clients"),
    *_items("tracker", "dropped", TRAFFIC, "seconds", "bytes"),
    *_items("tracker", "dropped", UPLOADS, "padded_error", "norm"),
    *_items("tracker", "dropped", REFUSED, "change", "weight_after"),
    # FED/server/summary.json: `flower.rounds.finishing`
    *_items(
        "federation summary.json",
        "released",
        PUBLIC,
        "federation",
        "method",
        "rounds",
        "of",
        "metric",
        "measured_by",
        "adapter",
        "versions",
        "settings",
        "withheld",
    ),
    *_items("federation summary.json", "released", LEDGER, "privacy"),
    *_items("federation summary.json", "released", MADE, *_of_modules(*_OF_STATE)),
    *_items("federation summary.json", "released", PUBLIC, *_of_modules("deviations")),
    *_items("federation summary.json", "dropped", UPLOADS, *_of_modules(*_OF_UPLOADS)),
    *_items("federation summary.json", "dropped", WHO, *_of_modules("client_ranks", "weights"), "sites"),
    *_items("federation summary.json", "if-public", TESTED, "validation", "test", "confusion"),
    *_items("federation summary.json", "if-public", CHOICE, "best_round", "stopped_early"),
    *_items("federation summary.json", "dropped", LOSS, "site_test"),
    *_items("federation summary.json", "dropped", TRAFFIC, "seconds"),
    *_items("federation summary.json", "dropped", REFUSED, "defence"),
)

__all__ = ["RELEASES", "Fate", "Item"]
