"""The files of base models, and what of them goes into a result. Kind of evidence: example-based (folders that are
wrong in one way)."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from peft import LoraConfig, get_peft_model

from support.command_line import Said
from support.known_warnings import FUTURE_NAMES, LORA_BIAS
from support.tiny_models import llama

pytestmark = [FUTURE_NAMES, LORA_BIAS]

# ---- files -----------------------------------------------------------------------------------------------------------


def small(folder: Path, *, shards: bool = False) -> tuple[Path, Path]:
    """A base model, and an adapter of it."""
    model: Any = llama()
    model.save_pretrained(folder / "base", max_shard_size="20KB" if shards else "1GB")
    peft_model = get_peft_model(model, LoraConfig(r=2, lora_alpha=5, target_modules=["q_proj"]))
    peft_model.get_parameter("base_model.model.model.layers.0.self_attn.q_proj.lora_B.default.weight").data.fill_(0.1)
    peft_model.save_pretrained(folder / "adapter")
    return folder / "adapter", folder / "base"


def listed(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.filterwarnings("ignore")
def test_what_lies_beside_the_weights_is_copied_or_named(tmp_path: Path, main: Callable[..., Said]) -> None:
    """Tokenizers and code are copied, byte for byte, the card is kept below the result's own; pickles, other
    weights, pipes, folders are named."""
    adapter, base = small(tmp_path)
    copied = {
        "tokenizer.json": "{}", "vocab.txt": "a", "merges.txt": "b", "spiece.model": "c", "README.md": "d",
        "LICENSE": "e",
        "chat_template.jinja": "f", "modeling_mine.py": "g", "special_tokens_map.json": "{}",
    }  # fmt: skip
    left = ("pytorch_model.bin", "model.pt", "model.pth", "last.ckpt", "a.pkl", "flax_model.msgpack", "tf_model.h5",
            "model.gguf", "model.onnx", "consolidated.00.safetensors", "odd\x1b[2J.txt", "unknown.xyz")  # fmt: skip
    for name, text in copied.items():
        (base / name).write_text(text)
    for name in left:
        (base / name).write_bytes(b"x")
    os.mkfifo(base / "pipe.json")
    (base / "onnx").mkdir()
    (base / "nowhere.json").symlink_to(base / "missing")
    done = main("export", "--for", "merged", adapter, "--base", base, "-o", tmp_path / "full", "--json")
    assert done.code == 0, done.err
    told = json.loads(done.out)["left_out"]
    assert len(told) == len(left) + 3 and "\x1b" not in done.out
    for name in (*left, "pipe.json", "onnx", "nowhere.json"):
        assert any(line.startswith(name.replace("\x1b", "\\x1b")) for line in told), name
    assert listed(tmp_path / "full") == {*copied, "config.json", "generation_config.json", "model.safetensors"}
    for name, text in copied.items():
        written = (tmp_path / "full" / name).read_text()
        assert written == text if name != "README.md" else written.endswith(f"of another model:\n\n{text}\n")
    again = main("export", "--for", "merged", adapter, "--base", base, "-o", tmp_path / "full", "--force")
    assert again.code == 0 and "of the base model: " in again.err


@pytest.mark.filterwarnings("ignore")
def test_folders_of_further_modules_are_copied(tmp_path: Path, main: Callable[..., Said]) -> None:
    """sentence-transformers: poolings and dense layers, by modules.json; nothing else of their folders."""
    adapter, base = small(tmp_path)
    modules = [{"path": path} for path in ("", "1_Pooling", "2_Dense", "../outside", "/etc", "3_Missing", 7)]
    (base / "modules.json").write_text(json.dumps(modules))
    for name in ("1_Pooling", "2_Dense"):
        (base / name).mkdir()
        (base / name / "config.json").write_text("{}")
    (base / "2_Dense" / "model.safetensors").write_bytes(b"weights")
    (base / "2_Dense" / "pytorch_model.bin").write_bytes(b"pickle")
    done = main("export", "--for", "merged", adapter, "--base", base, "-o", tmp_path / "full")
    assert done.code == 0, done.err
    assert "2_Dense/pytorch_model.bin" in done.err
    assert {"1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors"} <= listed(tmp_path / "full")
    assert "2_Dense/pytorch_model.bin" not in listed(tmp_path / "full")


@pytest.mark.parametrize(
    "what", ["config.json", "tokenizer.json", "1_Pooling", "model.safetensors", "1_Pooling/a.json"]
)
@pytest.mark.filterwarnings("ignore")
def test_no_link_leads_out_of_the_base_model(what: str, tmp_path: Path, main: Callable[..., Said]) -> None:
    """What a link to another place leads to is neither read nor published."""
    adapter, base = small(tmp_path)
    secret = tmp_path / "secret"
    (secret / "1_Pooling").mkdir(parents=True)
    (secret / what).parent.mkdir(exist_ok=True)
    if what != "1_Pooling":
        (secret / what).write_text('{"secret": "word"}')
    (base / "modules.json").write_text('[{"path": "1_Pooling"}]')
    if "/" in what:
        (base / "1_Pooling").mkdir()
    (base / what).unlink(missing_ok=True)
    (base / what).symlink_to(secret / what)
    for command in (["export", "--for", "merged", adapter, "-o", tmp_path / "full"], ["validate", adapter]):
        done = main(*command, "--base", base)
        assert done.code == 2 and "link to another place" in done.err and done.err.count("\n") == 1
    assert not (tmp_path / "full").exists()


@pytest.mark.filterwarnings("ignore")
def test_a_model_in_the_hubs_cache_is_applied_to(tmp_path: Path, main: Callable[..., Said]) -> None:
    """models--a--b/snapshots/REVISION of links into models--a--b/blobs: what they lead to is copied, no link."""
    adapter, plain = small(tmp_path)
    (plain / "1_Pooling").mkdir()
    (plain / "1_Pooling" / "config.json").write_text("{}")
    (plain / "modules.json").write_text('[{"path": "1_Pooling"}]')
    home = tmp_path / "models--a--b" / "snapshots" / "0123"
    (tmp_path / "models--a--b" / "blobs").mkdir(parents=True)
    for k, name in enumerate(sorted(listed(plain))):
        blob = tmp_path / "models--a--b" / "blobs" / f"{k:040x}"
        shutil.copy(plain / name, blob)
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).symlink_to(os.path.relpath(blob, (home / name).parent))
    assert main("export", "--for", "merged", adapter, "--base", plain, "-o", tmp_path / "x").code == 0
    assert main("export", "--for", "merged", adapter, "--base", home, "-o", tmp_path / "y").code == 0
    assert listed(tmp_path / "x") == listed(tmp_path / "y")
    for name in listed(tmp_path / "x"):
        assert not (tmp_path / "y" / name).is_symlink()
        assert (tmp_path / "y" / name).read_bytes() == (tmp_path / "x" / name).read_bytes(), name


def _index(base: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = base / "model.safetensors.index.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a file elsewhere": (
        lambda base: _index(base, lambda x: x["weight_map"].update({"lm_head.weight": "../model.safetensors"})),
        "not a file of weights",
    ),
    "a file that is missing": (lambda base: sorted(base.glob("model-*"))[1].unlink(), "is missing"),
    "an index of a list": (lambda base: _index(base, lambda x: x.update(weight_map=["a"])), "weight_map"),
    "no index": (lambda base: (base / "model.safetensors.index.json").unlink(), "is not a model directory"),
    "only a pickle": (
        lambda base: ([path.unlink() for path in base.glob("model*")], (base / "pytorch_model.bin").write_bytes(b"")),
        r"pickles.*save_pretrained\(.*safe_serialization",
    ),
    "a shard twice": (
        lambda base: (shutil.copy(min(base.glob("model-*")), base / "model-again.safetensors"),
                      _index(base, lambda x: x["weight_map"].update({"z": "model-again.safetensors"}))),
        "both hold",
    ),
    "a config that is a pipe": (
        lambda base: ((base / "config.json").unlink(), os.mkfifo(base / "config.json")), "not an ordinary file",
    ),
    "an adapter's folder": (lambda base: (base / "adapter_config.json").write_text("{}"), "but an adapter's"),
    "bitsandbytes, by config": (
        lambda base: _config(base, quantization_config={"load_in_4bit": True}), r"quantised \(.*bitsandbytes",
    ),
    "GPTQ, by config": (lambda base: _config(base, quantization_config={"quant_method": "gptq"}), r"quantised .*gptq"),
}  # fmt: skip


def _config(base: Path, **more: Any) -> None:
    path = base / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | more))


@pytest.mark.parametrize("what", BROKEN)
@pytest.mark.filterwarnings("ignore")
def test_a_base_model_that_contradicts_itself_is_refused(what: str, tmp_path: Path, main: Callable[..., Said]) -> None:
    adapter, base = small(tmp_path, shards=True)
    breaking, why = BROKEN[what]
    breaking(base)
    for command in (["export", "--for", "merged", adapter, "-o", tmp_path / "full"], ["validate", adapter]):
        done = main(*command, "--base", base)
        assert done.code == 2 and re.search(why, done.err) and done.err.count("\n") == 1, done.err
    assert not (tmp_path / "full").exists()


def test_a_quantised_base_is_refused_by_its_kind(tmp_path: Path, main: Callable[..., Said]) -> None:
    """By config.json, or by weights that are whole numbers."""
    adapter, base = small(tmp_path)
    tensors = safetensors.torch.load_file(base / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    safetensors.torch.save_file(tensors | {name: torch.zeros(32, 32, dtype=torch.int8)}, base / "model.safetensors")
    done = main("export", "--for", "merged", adapter, "--base", base, "-o", tmp_path / "full")
    assert done.code == 2 and "is quantised (" in done.err and f"{name}' is of type I8" in done.err, done.err
    assert done.err.count("\n") == 1 and not (tmp_path / "full").exists()


@pytest.mark.filterwarnings("ignore")
def test_several_files_of_weights_are_one_model(tmp_path: Path, main: Callable[..., Said]) -> None:
    """Shards by the index are read as one file is: the same result, byte for byte."""
    adapter, base = small(tmp_path, shards=True)
    assert len(list(base.glob("model-*.safetensors"))) > 2
    small(tmp_path / "whole")
    for place, model in (("x", base), ("y", tmp_path / "whole" / "base")):
        assert main("export", "--for", "merged", adapter, "--base", model, "-o", tmp_path / place).code == 0
    assert (tmp_path / "x" / "model.safetensors").read_bytes() == (tmp_path / "y" / "model.safetensors").read_bytes()


@pytest.mark.filterwarnings("ignore")
def test_the_result_may_not_lie_in_its_inputs(tmp_path: Path, main: Callable[..., Said]) -> None:
    adapter, base = small(tmp_path)
    before = listed(tmp_path)
    for out in (base, base / "full", adapter / "full", adapter, tmp_path):
        done = main("export", "--for", "merged", adapter, "--base", base, "-o", out, "--force")
        assert done.code == 2 and done.err.count("\n") == 1, out
    done = main("export", "--for", "merged", adapter, "--base", adapter, "-o", tmp_path / "full")
    assert done.code == 2 and "but an adapter's" in done.err
    assert listed(tmp_path) == before


@pytest.mark.filterwarnings("ignore")
def test_a_base_of_another_name_is_told(tmp_path: Path, main: Callable[..., Said]) -> None:
    adapter, base = small(tmp_path)
    config = adapter / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": "meta/one"}))
    _config(base, _name_or_path="mine/two")
    for command in (["export", "--for", "merged", adapter, "-o", tmp_path / "full"], ["validate", adapter]):
        done = main(*command, "--base", base)
        assert done.code == 0 and re.search("^warning: .*'meta/one'", done.err, re.M)
        assert "calls itself 'mine/two'" in done.err
    assert "base_model: mine/two\n" in (tmp_path / "full" / "README.md").read_text()
    config.write_text(json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": str(base)}))
    assert "mine/two" not in main("validate", adapter, "--base", base).err


@pytest.mark.filterwarnings("ignore")
def test_a_base_of_no_name_is_told(tmp_path: Path, main: Callable[..., Said]) -> None:
    """transformers writes no name into config.json; any repository of the hub may be in a folder of any name."""
    adapter, base = small(tmp_path)
    config = adapter / "adapter_config.json"
    _config(base, _name_or_path="")
    config.write_text(json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": "meta/one"}))
    done = main("validate", adapter, "--base", base)
    assert done.code == 0 and "'meta/one'" in done.err and "compared" in done.err


WATCHED: list[Path] = []
OPENED: list[tuple[str, str]] = []  # (file, code that opens it)


@pytest.fixture(scope="module")
def watch() -> list[Path]:
    """Files below a folder in it are noted as they are opened, with whose code does it."""

    def hear(event: str, args: tuple[object, ...]) -> None:
        if event == "open" and WATCHED and str(args[0]).startswith(f"{WATCHED[0]}/"):
            OPENED.append((Path(str(args[0])).name, sys._getframe(1).f_code.co_filename))

    sys.addaudithook(hear)  # which cannot be taken away again
    return WATCHED


@pytest.mark.filterwarnings("ignore")
def test_only_we_open_files_of_the_base(watch: list[Path], tmp_path: Path, main: Callable[..., Said]) -> None:
    """transformers is handed a config and tensors: pickles, checkpoints and code beside them are nothing to it."""
    adapter, base = small(tmp_path)
    for name in ("pytorch_model.bin", ".metadata", "__0_0.distcp", "adapter_model.bin"):
        (base / name).write_bytes(b"\x80\x04cos\nsystem\n")
    watch.append(base)
    done = main("export", "--for", "merged", adapter, "--base", base, "-o", tmp_path / "full")
    watch.clear()
    assert done.code == 0, done.err
    assert {name for name, _ in OPENED} == {"config.json", "model.safetensors", "generation_config.json"}
    assert {Path(code).name for _, code in OPENED} == {"given_files.py"}, OPENED
