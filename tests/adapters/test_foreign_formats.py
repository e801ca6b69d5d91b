"""What is no adapter of peft is refused by the name of what it is, with the way out.

The keys and names of files are those that the other tools write, made here by hand.
"""

from __future__ import annotations

import json
import re
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from peft.utils.peft_types import PeftType

from fedlora.adapters.foreign_formats import check_keys
from fedlora.adapters.reader import CONFIG_FILE, WEIGHTS_FILE
from fedlora.errors import AdapterFormatError
from support.command_line import Said

PEFT = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q"], "task_type": "CAUSAL_LM"}
MLX = {"fine_tune_type": "lora", "num_layers": 16, "lora_parameters": {"rank": 8, "scale": 20.0, "dropout": 0.0}}


def weights(*keys: str) -> bytes:
    """Tensors of two numbers."""
    header = {key: {"dtype": "F32", "shape": [2, 1], "data_offsets": [8 * k, 8 * k + 8]} for k, key in enumerate(keys)}
    raw = json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + bytes(8 * len(keys))


def put(folder: Path, **files: object) -> Path:
    """Files by name; a config as an object. Underscores for dots."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        raw = content if isinstance(content, bytes) else json.dumps(content).encode()
        (folder / name.replace("__", ".")).write_bytes(raw)
    return folder


def adapter(folder: Path, *keys: str, config: object = PEFT) -> Path:
    return put(folder, adapter_config__json=config, adapter_model__safetensors=weights(*keys))


def sound(folder: Path) -> Path:
    header = {
        "base_model.model.q.lora_A.weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "base_model.model.q.lora_B.weight": {"dtype": "F32", "shape": [3, 2], "data_offsets": [24, 48]},
    }
    raw = json.dumps(header).encode()
    return put(
        folder, adapter_config__json=PEFT, adapter_model__safetensors=struct.pack("<Q", len(raw)) + raw + bytes(48)
    )


KOHYA = "lora_unet_down_blocks_0_attentions_0_proj_in"
# keys of adapter_model.safetensors -> what the refusal says
KEYS: dict[str, tuple[tuple[str, ...], str]] = {
    "kohya": ((f"{KOHYA}.alpha", f"{KOHYA}.lora_down.weight", f"{KOHYA}.lora_up.weight"),
              "kohya's sd-scripts.*convert_sd"),
    "kohya, text encoder": (("lora_te1_text_model_encoder_layers_0_mlp_fc1.lora_down.weight",), "kohya's sd-scripts"),
    "LyCORIS": ((f"{KOHYA}.lokr_w1", f"{KOHYA}.lokr_w2"), "LyCORIS"),
    "diffusers": (("unet.down_blocks.0.attn1.to_q.lora_A.weight",), "diffusers.*convert_sd"),
    "diffusers, transformer": (("transformer.blocks.0.attn.to_q.lora_B.weight",), "diffusers"),
    "diffusers, old": (("unet.mid_block.attn1.processor.to_q_lora.down.weight",), "diffusers"),
    "ComfyUI": (("diffusion_model.double_blocks.0.img_attn.qkv.lora_A.weight",), "ComfyUI"),
    "MLX": (("model.layers.0.self_attn.q_proj.lora_a", "model.layers.0.self_attn.q_proj.lora_b"), "MLX.*mlx_lm.fuse"),
    "state_dict": (("base_model.model.q.lora_A.default.weight",), "state_dict.*save_pretrained"),
    "no prefix": (("model.layers.0.q.lora_A.weight",), "without peft's prefix"),
    "full model": (("model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight"), "full model"),
    "GPT-2": (("h.0.attn.c_attn.weight", "wte.weight"), "full model"),
}  # fmt: skip


def test_the_tensor_that_tells_may_stand_behind_others() -> None:
    told = "lora_unet_q.lora_down.weight"
    with pytest.raises(AdapterFormatError, match=told):
        check_keys(["first", "second", "third", "fourth", told])
    check_keys(["first", "second", "third", "fourth"])


@pytest.mark.parametrize("what", list(KEYS))
def test_weights_of_other_tools(what: str, main: Callable[..., Said], tmp_path: Path) -> None:
    keys, why = KEYS[what]
    said = main("validate", adapter(tmp_path / "a", *keys)).complaint()
    _matches(why, said)


def _matches(why: str, said: str) -> None:
    assert re.search(why, said), said


def _zip(folder: Path) -> Path:
    with zipfile.ZipFile(folder.parent / "a.zip", "w") as file:
        file.writestr(CONFIG_FILE, "{}")
    return folder.parent / "a.zip"


def _file(folder: Path, name: str) -> Path:
    return put(folder, **{name.replace(".", "__"): b"GGUF"}) / name


def _checkpoints(folder: Path) -> Path:
    for step in (500, 1000, 90):
        sound(folder / f"checkpoint-{step}")
    return put(folder, all_results__json={}, trainer_state__json={})


def _run(folder: Path) -> Path:
    sound(folder / "adapter")
    sound(folder / "clients" / "acme")
    return put(folder, config__json={}, manifest__json={}, metrics__jsonl=b"", summary__json={})


# what -> (what is made and given, what the refusal says)
PLACES: dict[str, tuple[Callable[[Path], Path | str], str]] = {
    "MLX": (lambda f: put(f, adapter_config__json=MLX, adapters__safetensors=weights("a.lora_a")), "MLX.*mlx_lm.fuse"),
    "MLX, renamed": (lambda f: adapter(f, "a.lora_a", config=MLX), "MLX"),
    "shards": (lambda f: put(f, **{"adapter_config__json": PEFT, "adapter_model__safetensors__index__json": {},
                                   "adapter_model-00001-of-00002__safetensors": b""}), "split over several.*save_file"),
    "a pickle": (lambda f: put(f, adapter_config__json=PEFT, adapter_model__bin=b""), "pickle.*run code"),
    "diffusers": (lambda f: put(f, pytorch_lora_weights__safetensors=b""), "adapter of diffusers.*convert_sd"),
    "GGUF": (lambda f: put(f, **{"my-lora__gguf": b"GGUF"}), "GGUF"),
    "full model": (lambda f: put(f, config__json={}, model__safetensors=b""), "full model"),
    "full model in shards": (
        lambda f: put(f, **{"config__json": {}, "model-00001-of-00002__safetensors": b""}), "full model"),
    "full model, old": (lambda f: put(f, config__json={}, pytorch_model__bin=b""), "full model"),
    "full model's config": (
        lambda f: adapter(f, "q.weight", config={"architectures": ["Llama"], "model_type": "llama"}),
        "config of a full model"),
    "checkpoints": (_checkpoints, "below: checkpoint-1000, checkpoint-500, checkpoint-90"),
    "a run": (_run, "folder of a run; its adapters are adapter, clients/acme"),
    "named adapters": (lambda f: sound(f / "french").parent, "below: french"),
    "archive": (_zip, "it is a file; give a directory"),
    "single file": (lambda f: _file(f, "my_style.safetensors"), "single file, as sd-scripts"),
    "weights file": (lambda f: sound(f) / WEIGHTS_FILE, "one of its files; give the directory"),
    "config file": (lambda f: sound(f) / CONFIG_FILE, "one of its files; give the directory"),
    "another file": (lambda f: _file(f, "notes.txt"), "is a file"),
    "nowhere": (lambda f: f / "nowhere", "no such directory"),
    "a hub id": (lambda f: "someone/some-adapter", "repository of the hub.*someone/some-adapter@main"),
}  # fmt: skip


@pytest.mark.parametrize("what", list(PLACES))
@pytest.mark.parametrize("command", ["validate", "merge"])
def test_places_that_are_no_adapter(
    what: str, command: str, main: Callable[..., Said], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make, why = PLACES[what]
    given = [make(tmp_path / "a"), *([sound(tmp_path / "sound"), "-o", tmp_path / "out"] if command == "merge" else [])]
    said = main(command, *given).complaint()
    _matches(why, said)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", sorted({kind.value for kind in PeftType} - {"LORA", "ADALORA"}))
def test_other_kinds_of_peft_are_refused_by_name(kind: str, main: Callable[..., Said], tmp_path: Path) -> None:
    said = main(
        "validate", adapter(tmp_path / "a", "base_model.model.q.x", config=PEFT | {"peft_type": kind})
    ).complaint()
    assert f"peft_type = '{kind}' is not supported: " in said and "LORA" in said


def test_a_folder_of_very_many_names_is_looked_at_in_part(main: Callable[..., Said], tmp_path: Path) -> None:
    for k in range(3_000):
        (tmp_path / "a" / f"d{k}").mkdir(parents=True)
    assert "is not a PEFT adapter" in main("validate", tmp_path / "a").complaint()
