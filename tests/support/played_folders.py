"""A federation's folder without a model, and what a ServerApp writes of rounds: for `serve` and `status`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from fedlora.flower.server.journal import Journal
from fedlora.flower.terms.settings import FederationSettings

CLIENTS = {"acme": 8, "berlin": 4, "cork": 2}


def federation_folder(home: Path, rounds: int = 3, quorum: int = 2) -> Path:
    """federation.toml, policy.toml and a key file for each client."""
    (home / "keys").mkdir(parents=True)
    (home / "federation.toml").write_text(
        'id = "fed-1"\n[data]\nlabel_names = ["no", "yes"]\n[lora]\ntarget_modules = ["query"]\n'
        f"[run]\nrounds = {rounds}\n[server]\nquorum = {quorum}\n"
    )
    (home / "policy.toml").write_text("[clients]\n" + "".join(f"{n} = {r}\n" for n, r in CLIENTS.items()))
    for name in CLIENTS:
        (home / "keys" / f"{name}.pub").write_text(f"key of {name}")
    return home


def play_round(home: Path, number: int, fates: Mapping[str, str] | None = None) -> None:
    """What a ServerApp writes of a round."""
    fates = {**dict.fromkeys(CLIENTS, "trained"), **(fates or {})}
    losses = {name: 1 / number + k / 10 for k, name in enumerate(fates) if fates[name] == "trained"}
    line = {
        "round": number, "seconds": 2.5, "loss": sum(losses.values()) / len(losses) if losses else None,
        "losses": losses, "weights": dict.fromkeys(losses, 1 / max(len(losses), 1)),
        "fates": {name: {"fate": fate, "why": "" if fate == "trained" else "so"} for name, fate in fates.items()},
    }  # fmt: skip
    scores = {name: {"accuracy": 0.75, "examples": 8} for name in losses}
    told = Journal(home / "server")
    told.asked(number, "train", list(fates))
    told.played(json.dumps(line))
    told.scored(number, {"site_metrics": scores, "site_mean": {"accuracy": 0.75, "examples": 24}})
    (home / "state" / "logs").mkdir(parents=True, exist_ok=True)
    with (home / "state" / "logs" / "serverapp.log").open("a") as file:
        file.write(f"2026-01-31 12:00:00,000 round {number} is played\n")


def end_rounds(home: Path, number: int) -> None:
    """What a ServerApp writes when it ends well."""
    Journal(home / "server").ended("complete", "")
    settings = FederationSettings.load(home / "federation.toml").agreed()
    summary = {"rounds": number, "stopped_early": None, "settings": settings}
    (home / "server" / "summary.json").write_text(json.dumps(summary))
