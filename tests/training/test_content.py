"""The digest that identifies a model. Kind of evidence: oracle (hashlib over all bytes), contract (which reads)."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
from pathlib import Path

import pytest
from huggingface_hub.constants import HF_HUB_CACHE

from fedlora.errors import ConfigError
from fedlora.runs.sections import ModelSection
from fedlora.training import content
from fedlora.training.digests import check_weights, file_digest, model_commit, model_content, model_place

FILES = (
    "model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
    "additional_chat_templates/tool_use.jinja", "vocab.txt", "merges.txt", "spiece.model", "special_tokens_map.json",
)  # fmt: skip


def test_every_file_that_transformers_may_read_counts(tmp_path: Path) -> None:
    """Weights, configurations, tokenizers of either kind, chat templates; not a readme, nor a pickle
    beside other weights."""
    for name in (*FILES, "README.md", "pytorch_model.bin"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert model_content(tmp_path) == {name: hashlib.sha256(name.encode()).hexdigest() for name in FILES}
    for name in FILES:
        before = model_content(tmp_path)
        (tmp_path / name).write_text("another")
        changed = {file for file, digest in model_content(tmp_path).items() if digest != before[file]}
        assert changed == {name}


@pytest.mark.parametrize("name", [".w.safetensors", "consolidated.safetensors", "run/x.safetensors"])
def test_what_the_index_names_counts_whatever_it_is_called(name: str, tmp_path: Path) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / "run").mkdir(exist_ok=True)
    (tmp_path / "run" / "manifest.json").write_text("{}")  # as of a run's folder, of which nothing else counts
    (tmp_path / name).write_bytes(b"weights")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": name}}))
    assert model_content(tmp_path)[name] == hashlib.sha256(b"weights").hexdigest()


def test_a_pinned_revision_is_its_own_snapshot(encoder: Path, request: pytest.FixtureRequest) -> None:
    """In the cache of all tests (conftest.py), where `main` has moved on; a revision that is not there is refused."""
    cache = Path(HF_HUB_CACHE) / "models--org--pinned"
    request.addfinalizer(lambda: shutil.rmtree(cache))
    old, new = "a" * 40, "b" * 40
    for commit in (old, new):
        shutil.copytree(encoder, cache / "snapshots" / commit)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text(new)
    assert model_place("org/pinned").name == new and model_place("org/pinned", old).name == old
    place = ModelSection(path="org/pinned", revision=old).location()
    assert model_commit(place) == old and model_commit("org/pinned") == new and model_commit(encoder) is None
    check_weights("org/pinned", old)
    (cache / "snapshots" / old / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"no weights"):
        check_weights("org/pinned", old)
    with pytest.raises(ConfigError, match=r"org/pinned"):
        check_weights("org/pinned", "c" * 40)


def test_a_gguf_file_is_one_file_and_a_hub_id_has_none_here(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"weights")
    assert model_content(tmp_path / "m.gguf") == {"m.gguf": hashlib.sha256(b"weights").hexdigest()}
    assert model_content("owner/name") == {}


def test_a_file_is_read_in_pieces_once_and_again_when_it_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No read asks for more than a small part of the file; a modification time that was set back deceives nobody."""
    file, asked, opened = tmp_path / "model.safetensors", [0], []

    class Watched(io.FileIO):
        def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
            asked.append(len(buffer))
            return super().readinto(buffer)  # type: ignore[return-value]

        def readall(self) -> bytes:
            raise AssertionError("the whole file at once")

    def watched(path: str, mode: str) -> Watched:
        opened.append(path)
        return Watched(path, mode)

    monkeypatch.setattr(content, "open", watched, raising=False)
    file.write_bytes(bytes(4 << 20))
    assert file_digest(file) == file_digest(file) == hashlib.sha256(bytes(4 << 20)).hexdigest()
    assert len(opened) == 1 and 0 < max(asked) <= 1 << 20
    before = file.stat()
    file.write_bytes(b"\1" + bytes((4 << 20) - 1))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file_digest(file) == hashlib.sha256(b"\1" + bytes((4 << 20) - 1)).hexdigest() and len(opened) == 2
