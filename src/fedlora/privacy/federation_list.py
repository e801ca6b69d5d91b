"""The list of releases for a federation on Flower. Its membership is public, and all members are asked (q = 1); who was
present, and with what outcome, is not released.
"""

from __future__ import annotations

from fedlora.privacy.release_items import (
    CHOICE,
    ITSELF,
    LEDGER,
    LOSS,
    MADE,
    OWN,
    PUBLIC,
    REFUSED,
    RESUME,
    TESTED,
    TRAFFIC,
    UPLOADS,
    WHO,
    Item,
    as_items,
)  # fmt: skip

_OF_STATE = ("rank", "components", "server_rank", "singular_values", "approximation")
_OF_UPLOADS = (
    "total_rank", "union_rank", "full_rank", "gap", "tied", "captured", "error", "dropped", "rounding",
)  # fmt: skip
_SITES = ("site_metrics", "site_mean", "site_unmeasured", "site_counts")


def _of_modules(*names: str) -> tuple[str, ...]:
    return tuple(f"diagnostics.*.{name}" for name in names)


FEDERATION: tuple[Item, ...] = (
    # FED/server/rounds.jsonl
    *as_items("rounds.jsonl", "released", PUBLIC, "round"),
    *as_items("rounds.jsonl", "released", LEDGER, "privacy"),
    *as_items("rounds.jsonl", "if-public", TESTED, "metrics"),
    *as_items("rounds.jsonl", "dropped", LOSS, "loss", "losses", "norms", "far", *_SITES),
    *as_items("rounds.jsonl", "dropped", WHO, "weights", "missing", "fates", "attempt"),
    *as_items("rounds.jsonl", "dropped", TRAFFIC, "seconds", "measure_seconds", "bytes"),
    *as_items("rounds.jsonl", "dropped", REFUSED, "defence"),
    # FED/server/events.jsonl: KIND.FIELD. `asked` names all members, online or not; `done` holds a line of
    # rounds.jsonl, which has its own list. Two times would show that the server waited for an absent member in between:
    # `public_event` takes them away, also that of `done`
    *as_items("events.jsonl", "released", PUBLIC, *(f"began.{n}" for n in ("round", "attempt", "asked", "deadline"))),
    *as_items("events.jsonl", "dropped", TRAFFIC, *(f"{kind}.at" for kind in ("began", "policy", "ended"))),
    *as_items("events.jsonl", "dropped", WHO, "began.not_asked"),
    *as_items("events.jsonl", "released", PUBLIC, "done"),
    *as_items(
        "events.jsonl",
        "released",
        PUBLIC,
        *(f"policy.{n}" for n in ("round", "added", "removed", "changed", "why")),
    ),
    *as_items("events.jsonl", "released", PUBLIC, *(f"ended.{n}" for n in ("round", "why"))),
    *as_items("events.jsonl", "dropped", WHO, "fate", "awaited", "again"),
    # FED/server/summary.json: `flower.rounds.finishing`
    *as_items(
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
    *as_items("federation summary.json", "released", LEDGER, "privacy"),
    *as_items("federation summary.json", "released", MADE, *_of_modules(*_OF_STATE)),
    *as_items("federation summary.json", "released", PUBLIC, *_of_modules("deviations")),
    *as_items("federation summary.json", "dropped", UPLOADS, *_of_modules(*_OF_UPLOADS)),
    *as_items("federation summary.json", "dropped", WHO, *_of_modules("client_ranks", "weights"), "sites", "refusals"),
    *as_items("federation summary.json", "if-public", TESTED, "validation", "test", "confusion"),
    *as_items("federation summary.json", "if-public", CHOICE, "best_round", "stopped_early"),
    *as_items("federation summary.json", "dropped", LOSS, "site_test"),
    *as_items("federation summary.json", "dropped", TRAFFIC, "seconds"),
    *as_items("federation summary.json", "dropped", REFUSED, "defence"),
    # FED/server/settings.json: `flower.rounds.settings_history`
    *as_items("settings.json", "released", PUBLIC, "rounds", "settings", "held_out", "changed"),
    # fedlora flower status, and --json, from which Prometheus' numbers are taken; a round of its last_rounds
    *as_items(
        "status",
        "released",
        PUBLIC,
        "name",
        "round",
        "rounds",
        "finished",
        "settings",
        "served_by",
        "superlink",
        "ended",
        "last_rounds",
        "playing.round",
        "playing.asked",
        "sites.*.rank",
    ),
    *as_items("status", "released", LEDGER, "privacy"),
    *as_items(
        "status",
        "dropped",
        WHO,
        "needed",
        "playing.attempt",
        "playing.fates",
        "sites.*.node",
        "sites.*.last_seen",
        "sites.*.fate",
        "sites.*.why",
        "sites.*.fates",
    ),
    *as_items("status", "dropped", LOSS, "sites.*.loss", "sites.*.norm"),
    *as_items("status", "dropped", TRAFFIC, "began", "last_event", "playing.since"),
    *as_items("status", "dropped", TRAFFIC, "database_bytes", "disk_free_bytes", "sites.*.upload_bytes"),
    *as_items("status round", "released", PUBLIC, "round"),
    *as_items("status round", "released", LEDGER, "privacy"),
    *as_items("status round", "if-public", TESTED, "metrics"),
    *as_items("status round", "dropped", LOSS, "loss", "site_mean"),
    *as_items("status round", "dropped", WHO, "fates"),
    *as_items("status round", "dropped", REFUSED, "defence"),
    *as_items("status round", "dropped", TRAFFIC, "seconds", "measure_seconds"),
    # FED/server/: each entry as a whole, and parts of FED/ itself that reveal who was present
    *as_items(
        "federation folder",
        "released",
        MADE,
        "adapter",
        "rounds.jsonl",
        "summary.json",
        "events.jsonl",
        "settings.json",
    ),
    *as_items("federation folder", "released", MADE, "tensorboard"),
    *as_items("federation folder", "if-public", CHOICE, "best"),
    *as_items("federation folder", "secret", RESUME, "checkpoints", "private", "journal", "state", ".lock"),
    *as_items("federation folder", "dropped", OWN, "clients"),
    *as_items("federation folder", "dropped", ITSELF, "uploads"),
)

__all__ = ["FEDERATION"]
