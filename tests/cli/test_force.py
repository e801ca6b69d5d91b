"""`-o` of `merge` and `export`: what is there stays, unless `--force` is given and it is what the command writes.

Kind of evidence: end to end. Kills, full disks, strangers' files and odd places: tests/core/test_folders.py.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from peft import LoraConfig, get_peft_model

from support.adapter_folders import saved
from support.command_line import Said
from support.projects import contents
from support.tiny_models import llama
from support.training_data import save_model


@pytest.mark.filterwarnings("ignore")
def test_only_what_a_command_writes_is_replaced_and_with_force_alone(tmp_path: Path, main: Callable[..., Said]) -> None:
    """Files decide: an adapter, an upload, a model and an adapter for llama.cpp are never taken for each other; and an
    input is never replaced."""
    base = save_model(tmp_path / "base", llama(), classifies=False)
    trained = tmp_path / "trained"
    config = LoraConfig(r=2, target_modules=["q_proj"])
    get_peft_model(llama(), config).save_pretrained(trained)  # type: ignore[arg-type]
    a, b = (saved(tmp_path / "in", name, 2) for name in "ab")
    outs = {
        "merge": ["merge", a, b],
        "merged": ["export", trained, "--format", "merged", "--model", base],
        "gguf": ["export", trained, "--format", "gguf", "--model", base],
    }
    for name, command in outs.items():
        assert main(*command, "-o", tmp_path / name).code == 0
        before = contents(tmp_path / name)
        assert "is not empty" in main(*command, "-o", tmp_path / name).complaint()
        assert contents(tmp_path / name) == before
        assert main(*command, "-o", tmp_path / name, "--force").code == 0
    shutil.copytree(tmp_path / "merge", tmp_path / "upload")
    (tmp_path / "upload" / "upload.json").write_text("{}")
    before = contents(tmp_path)
    for name, command in outs.items():
        for other in {*outs, "upload"} - {name}:
            main(*command, "-o", tmp_path / other, "--force").complaint()
    for place in (base, base / "new", trained, a):
        assert main(*outs["merge" if place == a else "merged"], "-o", place, "--force").code == 2
    assert contents(tmp_path) == before
