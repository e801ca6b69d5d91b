"""`-o` of `merge` and `export`: what is there stays, unless `--force` is given and it is what the command writes.

Kind of evidence: end to end. Kills, full disks and odd places: tests/core/test_folders.py.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from peft import LoraConfig, get_peft_model

from support.adapter_folders import saved
from support.command_line import Said
from support.known_warnings import FUTURE_NAMES, LORA_BIAS
from support.tiny_models import llama
from support.training_data import save_model

pytestmark = [FUTURE_NAMES, LORA_BIAS]
Main = Callable[..., Said]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def forced(main: Main, command: Sequence[object], out: Path, stranger: str, again: Sequence[object] = ()) -> None:
    """The command; again without and with --force; and with somebody's own file in the way."""
    assert main(*command, "-o", out).code == 0
    first = contents(out)
    assert f"{out} is not empty" in main(*command, *again, "-o", out).complaint()
    assert contents(out) == first
    done = main(*command, *again, "-o", out, "--force")
    assert done.code == 0, done.err
    assert (contents(out) == first) == (not again) and contents(out).keys() == first.keys()
    (out / stranger).parent.mkdir(exist_ok=True)
    (out / stranger).write_text("mine")
    before = contents(out)
    assert f"holds '{stranger}'" in main(*command, "-o", out, "--force").complaint()
    assert contents(out) == before and sorted(os.listdir(out.parent)) == [out.name]


def test_merge(tmp_path: Path, main: Main) -> None:
    adapters = [saved(tmp_path, name, 2) for name in "ab"]
    command = ["merge", *adapters]
    forced(main, command, tmp_path / "m" / "out", "notes.txt", ["--weights", "1,2"])


@pytest.mark.filterwarnings("ignore")
def test_apply(tmp_path: Path, main: Main) -> None:
    save_model(tmp_path / "base", llama(), classifies=False)
    get_peft_model(llama(), LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(tmp_path / "adapter")  # type: ignore[arg-type]
    command = ["export", "--format", "merged", tmp_path / "adapter", "--model", tmp_path / "base"]
    forced(main, command, tmp_path / "m" / "full", "sub/notes.txt")
    before = contents(tmp_path)
    for place in ("base", "adapter", "base/new", "adapter/new"):
        assert "the input" in main(*command, "-o", tmp_path / place, "--force").complaint()
    assert contents(tmp_path) == before


@pytest.mark.filterwarnings("ignore")
def test_a_folder_of_another_kind_is_not_replaced(tmp_path: Path, main: Main) -> None:
    """Files decide: an adapter, an upload, a model and an adapter for llama.cpp are never taken for each other."""
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
    shutil.copytree(tmp_path / "merge", tmp_path / "upload")
    (tmp_path / "upload" / "upload.json").write_text("{}")
    for name, command in outs.items():
        for other in {*outs, "upload"} - {name}:
            before = contents(tmp_path / other)
            main(*command, "-o", tmp_path / other, "--force").complaint()
            assert contents(tmp_path / other) == before
