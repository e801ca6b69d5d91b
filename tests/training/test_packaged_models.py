"""A GGUF file is unpacked once, and is then a model like any other.

Kind of evidence: *contract* (stand-in readers: what is read, what is left in the cache). The real file of SmolLM2:
tests/release/test_llama_cpp.py.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fedlora.errors import ConfigError
from fedlora.training.models import AdaptedModel
from fedlora.training.settings import LoRASettings
from support.local_training import logits
from support.tiny_models import llama
from support.training_data import tokenizer, word

LORA = LoRASettings(target_modules=["q_proj", "v_proj"])


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where $FEDLORA_CACHE points; not there yet."""
    monkeypatch.setenv("FEDLORA_CACHE", str(tmp_path / "deep" / "cache"))
    return tmp_path / "deep" / "cache"


def test_a_file_is_unpacked_once(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two loads, one reading, one folder; both times it is the model that was read, by its logits. Another file of the
    same name is another model."""
    file, read = tmp_path / "tiny.gguf", []
    plain = {kind: kind.from_pretrained for kind in (AutoModelForCausalLM, AutoTokenizer)}
    made = {AutoModelForCausalLM: llama, AutoTokenizer: lambda: tokenizer(classifies=False)}

    def reading(kind: Any, path: Any, *args: Any, gguf_file: str | None = None, **options: Any) -> Any:
        if gguf_file is None:
            return plain[kind](path, *args, **options)
        read.append((kind, Path(path, gguf_file).read_bytes()))
        return made[kind]()

    for kind in plain:
        monkeypatch.setattr(kind, "from_pretrained", functools.partial(reading, kind))
    for content in (b"one", b"one", b"two"):
        file.write_bytes(content)
        model, ids = AdaptedModel.load(file, "causal-lm", LORA), [word(k) for k in range(6)]
        torch.testing.assert_close(logits(model.network, ids), logits(llama(), ids), rtol=0, atol=0)
        assert model.tokenizer("w0 w1")["input_ids"] == [word(0), word(1)]
    assert sorted(content for _, content in read) == [b"one", b"one", b"two", b"two"]
    assert len(list(cache.iterdir())) == 2


def test_what_is_no_gguf_leaves_nothing_in_the_cache(cache: Path, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    (tmp_path / "tiny.gguf").write_bytes(b"not a GGUF file")
    with pytest.raises(ConfigError, match=r"tiny\.gguf .* as GGUF: "):
        AdaptedModel.load(tmp_path / "tiny.gguf", "causal-lm", LORA)
    assert not cache.exists()
