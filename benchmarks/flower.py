"""What Flower costs: overhead of a round in process, in its simulation engine and deployed; a resident trainer against
loading the model for every message.

    python benchmarks/flower.py [--rounds 3] [--skip-simulation] [--json FILE]

The demo's model with three clients, two optimiser steps a round, so that what is measured is what is around training.
in process: the in-process engine. wire: the same messages through Flower's records and protobuf, both ways. simulation:
Flower's engine on Ray. deployment: SuperLink and three SuperNodes over TLS on this machine. A first round loads models
and starts processes, so it is shown apart.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import shutil
import tempfile
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

from flwr.app import Message, MessageType
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.supercore.task_identity import TaskIdentity

from fedlora.client import receive, send
from fedlora.core.messages import Upload
from fedlora.core.parcels import pack
from fedlora.flower.places import FederationFolder
from fedlora.flower.records import parcel_record, record_parcel, record_upload, upload_record
from fedlora.flower.server.up import make, play
from fedlora.flower.site.trainer import Trainer
from fedlora.flower.terms.joining import JoinFile
from fedlora.runs.config import load_config
from fedlora.runs.preparation import Prepared, prepare
from fedlora.server.server import start
from fedlora.simulation import simulate
from measure import as_json, machine

DEMO = Path(__file__).parent.parent / "src" / "fedlora" / "demo.toml"


def prepared_for(rounds: int) -> Prepared:
    sets = ["clients.count=3", "clients.ranks=[2,4,8]", "train.max_steps=2", "run.threads=1", "server.quorum=2"]
    sets += [f"run.rounds={rounds}", "data.validation=0.01", "data.test=0.01", "evaluate.clients_at_end=false"]
    return prepare(load_config(DEMO, sets))


def in_process(prepared: Prepared, rounds: int) -> tuple[list[float], list[float]]:
    """(seconds of each round, of them training)."""
    seconds, training = [], []
    began = time.perf_counter()
    state = start(prepared.server, prepared.seed_adapter)
    for record in simulate(prepared.server, prepared.clients, prepared.trainer, state, rounds=rounds):
        seconds.append(time.perf_counter() - began)
        training.append(record.seconds["train"])
        began = time.perf_counter()
    return seconds, training


def wire(prepared: Prepared) -> dict[str, float]:
    """Seconds and bytes of one round's messages through Flower's records and protobuf, both ways, without training."""
    TaskIdentity._run_id, TaskIdentity._node_id, TaskIdentity._task_id = 1, 1, 1
    server, state = prepared.server, start(prepared.server, prepared.seed_adapter)
    shapes = {
        m: (lora.factors[0].shape[0], lora.factors[1].shape[1]) for m, lora in prepared.seed_adapter.modules.items()
    }
    sent, counted, began = 0, 0, time.perf_counter()
    for client in prepared.clients:
        download = server.download(state.server, client)
        parcel = pack(download, None)
        raw = message_to_proto(Message(parcel_record(parcel, "b"), 7, MessageType.TRAIN)).SerializeToString()
        came, _ = record_parcel(
            message_from_proto(message_to_proto(Message(parcel_record(parcel, "b"), 7, "train"))).content
        )
        mine = receive(download, None)
        upload = Upload(client, 10, send(mine, download.roles))
        reply = upload_record(upload, run="b", round=0, loss=0.0, kept=[])
        back = message_to_proto(Message(reply, 7, "train"))
        record_upload(
            message_from_proto(back).content, client, run="b", round=0, shapes=shapes, roles=download.roles,
            heads=state.server.heads,
        )  # fmt: skip
        sent += len(raw) + len(back.SerializeToString())
        tensors = [
            *came.tensors().values(),
            *(t for x in upload.adapter.modules.values() for t in x.tensors().values()),
        ]
        counted += sum(t.numel() * t.element_size() for t in [*tensors, *upload.adapter.heads.values()])
    return {"seconds": time.perf_counter() - began, "bytes": sent, "counted": counted}


def resident(prepared: Prepared, folder: Path, repeats: int = 3) -> dict[str, float]:
    """Seconds of one message's work: by a trainer that stays (its first and later ones), and with loading each time."""
    server, state = prepared.server, start(prepared.server, prepared.seed_adapter)
    client = prepared.clients[0]
    site = FederationFolder(folder).site(client.id)
    parcel, join = pack(server.download(state.server, client), None), JoinFile.read(site.join)
    record = parcel_record(parcel, join.federation, join.terms())
    times, stays = [], Trainer(site)
    for _ in range(repeats + 1):
        began = time.perf_counter()
        stays("train", record)
        times.append(time.perf_counter() - began)
    loads = []
    for _ in range(repeats):
        began = time.perf_counter()
        Trainer(site)("train", record)
        loads.append(time.perf_counter() - began)
    return {"first": times[0], "resident": median(times[1:]), "loading": median(loads)}


def rounds_of(folder: Path) -> list[float]:
    return [json.loads(line)["seconds"] for line in (folder / "server" / "rounds.jsonl").read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--skip-simulation", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found: dict[str, Any] = {"machine": machine()}
    prepared = prepared_for(options.rounds)
    seconds, training = in_process(prepared, options.rounds)
    work = median(training)
    rows = {"in process": seconds}
    found["wire"] = wire(prepared)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "f"
        make(folder, prepared.config, 18081)
        found["resident"] = resident(prepared, folder)
        if not options.skip_simulation:
            from flower_simulation import simulate_federation

            with contextlib.redirect_stdout(io.StringIO()):
                simulate_federation(folder)
            rows["simulation (Ray)"] = rounds_of(folder)
            shutil.rmtree(folder / "server")
            for site in (folder / "sites").iterdir():  # what they kept is of rounds that are played anew
                shutil.rmtree(site / "state")
                (site / "state").mkdir(mode=0o700)
        play(folder, lambda line: None, threading.Event())
        rows["deployment (TLS)"] = rounds_of(folder)
    print(f"{'':20}{'first round, s':>16}{'later rounds, s':>17}{'beyond training, s':>20}")
    for name, times in rows.items():
        later = median(times[1:]) if len(times) > 1 else float("nan")
        print(f"{name:20}{times[0]:16.2f}{later:17.2f}{later - work:20.2f}")
    w, r = found["wire"], found["resident"]
    tensors = f"{w['bytes'] / 1e6:.3f} MB, of them tensors {w['counted'] / 1e6:.3f} MB"
    print(f"wire: {w['seconds'] * 1e3:.0f} ms a round; {tensors}")
    stays = f"resident trainer {r['resident']:.2f} s (its first {r['first']:.1f})"
    print(f"one message: {stays}, loading {r['loading']:.2f} s")
    found |= {"rounds": rows, "training": training}
    if options.json:
        options.json.write_text(as_json(found) + "\n")


if __name__ == "__main__":
    main()
