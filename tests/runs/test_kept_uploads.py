"""Uploads that a run keeps: what was trained, whole rounds, the same after a kill.

Kinds of evidence: *end-to-end* (real runs; peft loads what was kept), *oracle* (dense products in a plain model).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import fedlora.runs.storing
from fedlora import read_adapter
from fedlora.adapters.uploads import write_upload
from fedlora.runs.folder import RunFolder
from support.known_warnings import FUTURE_NAMES, NOT_ON_THE_HUB
from support.local_training import bits
from support.peft_models import dense_logits, peft_layers
from support.projects import configured, contents, peft_model, ran
from support.recorded import recording
from support.tiny_models import bert, logits

pytestmark = [FUTURE_NAMES, NOT_ON_THE_HUB]
SETS = ("run.rounds=2", "train.max_steps=2", "evaluate.every=2")


@pytest.mark.parametrize("method", ["glora", "ffa-lora"])
def test_a_kept_upload_is_what_the_client_trained_and_peft_loads_it(project: Path, tmp_path: Path, method: str) -> None:
    """`Trained.adapter` of the real trainer bit for bit, ffa-lora's frozen factor included, and beside it whose, of how
    many examples and of which round. peft's model is W0 + scaling B A dense in a plain model, with the trained head."""
    with recording() as calls:
        folder = ran(configured(project, *SETS, f"method.name={method}", "run.keep_uploads=all"), tmp_path / "run")
    examples = {c: p["examples"] for c, p in folder.read_json("manifest.json")["data"]["train"].items()}
    assert len(calls) == 2 * 3
    for call in calls:
        directory = folder.uploads(call.round) / call.client
        adapter, spec = read_adapter(directory, scaling=2.0)
        assert bits(adapter) == bits(call.trained.adapter) and spec.scaling == 2.0
        facts = json.loads((directory / "upload.json").read_text())
        assert facts == {"client": call.client, "num_examples": examples[call.client], "round": call.round}
    for call in calls[-3:]:
        model = peft_model(project, folder.uploads(2) / call.client).eval()
        updates = {name: 2.0 * lora.delta() for name, lora in call.trained.adapter.modules.items()}
        want = dense_logits(bert, updates, call.trained.adapter.heads)
        torch.testing.assert_close(logits(model), want, rtol=1e-4, atol=1e-5)
        assert {layer.r["default"] for layer in peft_layers(model).values()} == set(call.received.ranks.values())


def test_a_resumed_run_keeps_the_same_uploads(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed while it stores the second of three uploads of round 2: the newest whole round is the first. Gone on with:
    byte for byte the files of the run that was never stopped."""
    config, done = configured(project, *SETS, "run.keep_uploads=all"), []

    def killed(directory: Path, *args: Any, **kwargs: Any) -> None:
        if len(done) == 4:
            raise KeyboardInterrupt
        done.append(directory)
        write_upload(directory, *args, **kwargs)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(fedlora.runs.storing, "write_upload", killed)
        ran(config, tmp_path / "stopped")
    round, folders = RunFolder(tmp_path / "stopped").newest_uploads()
    assert (round, len(folders)) == (1, 3)
    both = ran(config, tmp_path / "stopped", resume=True), ran(config, tmp_path / "whole")
    files = [{k: digest for k, (digest, _) in contents(f.path / "uploads").items()} for f in both]
    assert files[0] == files[1] and len(files[0]) == 2 * 3 * 4
