"""The list of everything that leaves the server of a private run, or could: data, read by `released`.

A star stands for any one name. Where a table is not named further inside, it goes or stays as a whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Fate = Literal["released", "privatised", "if-public", "secret", "dropped"]


@dataclass(frozen=True)
class Item:
    """One thing at one place. name: with dots between the tables that it is in. reason: of its fate."""

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
UPLOADS = "computed of the uploads themselves, not of the noised sum"
TRAFFIC = "sizes and times tell who took part and how much data it has"
RESUME = "needed to go on after a crash; holds what clients did"
ITSELF = "a client's own upload"
OWN = "what one client gets by its own history is private towards the others only where it reaches that client alone"
CHOICE = "a choice among states by what was measured: public where the measurement is"
REFUSED = "it tells what single clients did or were taken for; attacks and robust rules are refused beside [privacy]"
PLACES = "the names of clients' files can say who they are and what is in there"
DATA = "facts about clients' data; a digest lets whoever guesses the data confirm it"


def _items(place: str, fate: Fate, reason: str, *names: str) -> tuple[Item, ...]:
    return tuple(Item(place, name, fate, reason) for name in names)


RELEASES: tuple[Item, ...] = (
    # what a client is sent
    *_items("download", "privatised", PAID, "adapter.modules", "adapter.heads"),
    *_items("download", "released", PUBLIC, "client", "round", "roles", "start"),
    *_items("download", "released", MADE, "base"),
    # RUN/metrics.jsonl: `runs.execution.describe`
    *_items("metrics.jsonl", "released", PUBLIC, "round"),
    *_items("metrics.jsonl", "released", MADE, "server_rank"),
    *_items("metrics.jsonl", "released", LEDGER, "privacy"),
    *_items("metrics.jsonl", "if-public", TESTED, "metrics"),
    *_items("metrics.jsonl", "dropped", LOSS, "losses"),
    *_items("metrics.jsonl", "dropped", WHO, "weights", "refused"),
    *_items("metrics.jsonl", "dropped", TRAFFIC, "seconds", "bytes"),
    *_items("metrics.jsonl", "dropped", UPLOADS, "padded_error", "gauge_drift", "gauge_drift_as_sent"),
    *_items("metrics.jsonl", "dropped", REFUSED, "attack", "defence"),
    # RUN/summary.json: `runs.execution._finish`
    *_items("summary.json", "released", PUBLIC, "method", "rounds", "clients", "target", "metric"),
    *_items("summary.json", "released", PUBLIC, "withheld"),
    *_items("summary.json", "released", MADE, "server_rank"),
    *_items("summary.json", "released", LEDGER, "privacy"),
    *_items("summary.json", "if-public", TESTED, "validation", "test", "confusion", "probes"),
    *_items("summary.json", "if-public", CHOICE, "best_round", "stopped_early"),
    *_items("summary.json", "dropped", LOSS, "clients_at_end", "clients_at_end_common"),
    *_items("summary.json", "dropped", TRAFFIC, "seconds", "bytes"),
    *_items("summary.json", "dropped", UPLOADS, "padded_error", "gauge_drift", "gauge_drift_as_sent"),
    *_items("summary.json", "dropped", WHO, "refused"),
    *_items("summary.json", "dropped", REFUSED, "attack", "defence"),
    *_items(
        "summary.json",
        "released",
        MADE,
        "diagnostics.*.rank",
        "diagnostics.*.components",
        "diagnostics.*.server_rank",
        "diagnostics.*.singular_values",
        "diagnostics.*.approximation",
    ),
    *_items("summary.json", "released", PUBLIC, "diagnostics.*.deviations"),
    *_items(
        "summary.json",
        "dropped",
        UPLOADS,
        "diagnostics.*.total_rank",
        "diagnostics.*.union_rank",
        "diagnostics.*.full_rank",
        "diagnostics.*.gap",
        "diagnostics.*.tied",
        "diagnostics.*.captured",
        "diagnostics.*.kept",
        "diagnostics.*.error",
        "diagnostics.*.dropped",
        "diagnostics.*.rounding",
    ),
    *_items("summary.json", "dropped", WHO, "diagnostics.*.client_ranks", "diagnostics.*.weights"),
    *_items("diagnostics", "released", MADE, "rank", "components", "server_rank", "singular_values", "approximation"),
    *_items("diagnostics", "released", PUBLIC, "deviations"),
    *_items(
        "diagnostics",
        "dropped",
        UPLOADS,
        "total_rank",
        "union_rank",
        "full_rank",
        "gap",
        "tied",
        "captured",
        "kept",
        "error",
        "dropped",
        "rounding",
    ),
    *_items("diagnostics", "dropped", WHO, "client_ranks", "weights"),
    # RUN/manifest.json: `runs.manifest`, `runs.preparation`
    *_items(
        "manifest.json",
        "released",
        PUBLIC,
        "config_digest",
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
        "digest",
        "version",
        "commit",
        "labels",
    ),
    *_items("card", "released", LEDGER, "privacy"),
    *_items("card", "if-public", TESTED, "metrics", "classes.recall"),
    *_items("card", "dropped", COUNT, "examples"),
    *_items("card", "dropped", DATA, "classes.counts"),
    *_items("card", "dropped", REFUSED, "attack", "attack_row", "attack_tag", "defence"),
    # RUN/config.json, and the configuration that trackers get: `runs.private_outputs.shown_config`
    *_items("config.json", "dropped", PLACES, "data.clients.*", "data.train"),
    # the run's folder: each entry as a whole
    *_items("folder", "released", PUBLIC, "config.json", "manifest.json"),
    *_items("folder", "released", MADE, "metrics.jsonl", "summary.json", "adapter", "plots", "tensorboard"),
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
    *_items("screen", "dropped", WHO, "client", "refused", "weights", "abstained"),
    *_items("screen", "dropped", TRAFFIC, "seconds", "bytes"),
    *_items("screen", "dropped", REFUSED, "attacked"),
    # TensorBoard, trackio, wandb: `runs.tracking.numbers`
    *_items("tracker", "released", MADE, "server_rank"),
    *_items("tracker", "released", LEDGER, "privacy"),
    *_items("tracker", "if-public", TESTED, "metrics", "test", "test_best"),
    *_items("tracker", "dropped", LOSS, "loss"),
    *_items("tracker", "dropped", TRAFFIC, "seconds", "bytes", "clients"),
    *_items("tracker", "dropped", UPLOADS, "padded_error", "norms"),
    *_items("tracker", "dropped", REFUSED, "change", "weight_after"),
    # a federation on Flower: FED/server/rounds.jsonl. Who takes part is public there (q = 1); what came of it is not
    *_items("rounds.jsonl", "released", PUBLIC, "round"),
    *_items("rounds.jsonl", "released", LEDGER, "privacy"),
    *_items("rounds.jsonl", "released", MADE, "server_rank"),
    *_items("rounds.jsonl", "if-public", TESTED, "metrics"),
    *_items(
        "rounds.jsonl",
        "dropped",
        LOSS,
        "losses",
        "norms",
        "far",
        "site_metrics",
        "site_mean",
        "site_unmeasured",
        "site_counts",
        "site_share",
        "site_capped",
    ),
    *_items("rounds.jsonl", "dropped", WHO, "weights", "refused", "fates", "attempt"),
    *_items("rounds.jsonl", "dropped", COUNT, "capped"),
    *_items("rounds.jsonl", "dropped", TRAFFIC, "seconds", "bytes"),
    # FED/server/events.jsonl
    *_items(
        "events.jsonl", "released", PUBLIC, "at", "event", "round", "asked", "deadline", "added", "removed", "changed"
    ),
    *_items("events.jsonl", "dropped", LOSS, "loss", "norm"),
    *_items("events.jsonl", "dropped", COUNT, "examples"),
    *_items("events.jsonl", "dropped", WHO, "attempt", "client", "fate", "why", "not_asked", "line"),
    *_items("events.jsonl", "dropped", TRAFFIC, "seconds", "bytes"),
    # FED/server/summary.json: `flower.rounds.finishing`
    *_items(
        "federation summary.json",
        "released",
        PUBLIC,
        "federation",
        "finished",
        "method",
        "rounds",
        "of",
        "metric",
        "measured_by",
        "adapter",
        "versions",
        "settings",
    ),
    *_items("federation summary.json", "released", LEDGER, "privacy"),
    *_items(
        "federation summary.json",
        "released",
        MADE,
        "diagnostics.*.rank",
        "diagnostics.*.components",
        "diagnostics.*.server_rank",
        "diagnostics.*.singular_values",
        "diagnostics.*.approximation",
    ),
    *_items("federation summary.json", "released", PUBLIC, "diagnostics.*.deviations"),
    *_items(
        "federation summary.json",
        "dropped",
        UPLOADS,
        "diagnostics.*.total_rank",
        "diagnostics.*.union_rank",
        "diagnostics.*.full_rank",
        "diagnostics.*.gap",
        "diagnostics.*.tied",
        "diagnostics.*.captured",
        "diagnostics.*.kept",
        "diagnostics.*.error",
        "diagnostics.*.dropped",
        "diagnostics.*.rounding",
    ),
    *_items(
        "federation summary.json",
        "dropped",
        WHO,
        "diagnostics.*.client_ranks",
        "diagnostics.*.weights",
        "sites",
        "refusals",
    ),
    *_items("federation summary.json", "if-public", TESTED, "validation", "test", "confusion"),
    *_items("federation summary.json", "if-public", CHOICE, "best_round", "stopped_early"),
    *_items("federation summary.json", "dropped", LOSS, "site_test"),
    *_items("federation summary.json", "dropped", TRAFFIC, "seconds"),
    # Prometheus, without the prefix fedlora_: `flower.serving.metrics`
    *_items(
        "prometheus",
        "released",
        PUBLIC,
        "round",
        "rounds",
        "ended",
        "database_bytes",
        "disk_free_bytes",
        "nodes_online",
        "node_online",
    ),
    *_items("prometheus", "released", LEDGER, "privacy"),
    *_items("prometheus", "if-public", TESTED, "metric"),
    *_items("prometheus", "dropped", LOSS, "loss", "client_loss", "client_norm"),
    *_items("prometheus", "dropped", WHO, "client_fate"),
    *_items("prometheus", "dropped", TRAFFIC, "round_seconds", "upload_bytes", "last_event_timestamp_seconds"),
    # FED/: each entry of the server's folder as a whole
    *_items("federation folder", "released", MADE, "adapter", "rounds.jsonl", "summary.json", "events.jsonl"),
    *_items("federation folder", "if-public", CHOICE, "best"),
    *_items("federation folder", "secret", RESUME, "checkpoints", "private", "journal", "logs", "superlink.db"),
    *_items("federation folder", "dropped", OWN, "clients"),
)
