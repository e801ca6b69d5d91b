"""`-o` of `merge`, `export`, `train`: what is there stays, unless `--force` is given and it is what the command writes.

Kind of evidence: end to end. Kills, full disks and odd places: tests/core/test_folders.py.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

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
    command = ["export", "--for", "merged", tmp_path / "adapter", "--base", tmp_path / "base"]
    forced(main, command, tmp_path / "m" / "full", "sub/notes.txt")
    before = contents(tmp_path)
    for place in ("base", "adapter", "base/new", "adapter/new"):
        for more in ([], ["--force"]):
            said = main(*command, "-o", tmp_path / place, *more).complaint()
            assert "the input" in said or "is the folder of" in said
    assert contents(tmp_path) == before


@pytest.mark.filterwarnings("ignore")
def test_what_only_looks_like_ours_is_not_replaced(tmp_path: Path, main: Main) -> None:
    """Files of the same names, in peft's hand or another command's: the mark of the weights decides, everywhere below.
    A copy is still ours; what peft has trained on in our place is not."""
    base = save_model(tmp_path / "base", llama(), classifies=False)
    trained = tmp_path / "trained"
    config = LoraConfig(r=2, target_modules=["q_proj"])
    get_peft_model(llama(), config).save_pretrained(trained)  # type: ignore[arg-type]
    a, b = (saved(tmp_path / "in", name, 2) for name in "ab")
    outs = {
        "merge": ["merge", a, b],
        "resize": ["resize", a, "--rank", 1],
        "merged": ["export", trained, "--for", "merged", "--base", base],
        "gguf": ["export", trained, "--for", "gguf", "--base", base],
    }
    for name, command in outs.items():
        assert main(*command, "-o", tmp_path / name).code == 0
        for other in outs:
            if (tmp_path / other).is_dir() and other != name:
                before = contents(tmp_path / other)
                main(*command, "-o", tmp_path / other, "--force").complaint()
                assert contents(tmp_path / other) == before
        shutil.copytree(tmp_path / name, tmp_path / "copy")
        assert main(*command, "-o", tmp_path / "copy", "--force").code == 0
        shutil.rmtree(tmp_path / "copy")
    shutil.copytree(trained, tmp_path / "ours")
    (tmp_path / "ours" / "upload.json").write_text("{}")
    for name in ("merge", "resize"):
        said = main(*outs[name], "-o", tmp_path / "ours", "--force").complaint()
        assert "did not write" in said or "upload.json" in said, said
    for path in ("trained", "ours"):
        assert contents(tmp_path / path)["adapter_model.safetensors"] == contents(trained)["adapter_model.safetensors"]
    assert "did not write" in main(*outs["merge"], "-o", trained, "--force").complaint()
    weights = tmp_path / "merge" / "adapter_model.safetensors"  # somebody trains on from there
    save_file(load_file(weights), weights, metadata={"format": "pt"})
    said = main(*outs["merge"], "-o", tmp_path / "merge", "--force").complaint()
    assert "'adapter_model.safetensors'" in said and "did not write" in said
    save_model(tmp_path / "full", llama(), classifies=False)
    (tmp_path / "full" / "generation_config.json").unlink()
    before = contents(tmp_path / "full")
    said = main(*outs["merged"], "-o", tmp_path / "full", "--force").complaint()
    assert "'model.safetensors'" in said and "did not write" in said and contents(tmp_path / "full") == before
