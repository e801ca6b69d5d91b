"""Digests that identify a base model: SHA-256 of its files, of its weights whatever their file layout, and of its
tokenizer's behaviour.

Nothing is loaded. Files are read in pieces, and read again only if their size or times change.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from fedlora.core import files
from fedlora.doing import doing
from fedlora.errors import ConfigError, FedLoRAError
from fedlora.given_files import parse_json, read_given
from fedlora.training.hub_models import SECONDS, hub_name, source

# Files that no loader of ours reads: hidden files, cards, pictures, other frameworks' weights, data; and PyTorch's
# pickled weights, unless there are no others (`weight_files`). All others count, because each model may read more:
# shards in folders, code, tokenizers of any kind.
NOT_READ = (
    ".*", "*.md", "*.rst", "*.pdf", "LICENSE*", "LICENCE*", "NOTICE*", "USE_POLICY*",
    "*.png", "*.jpg", "*.jpeg", "*.gif", "*.svg", "*.webp", "*.pyc",
    "pytorch_model*.bin*", "openvino_model*", "training_args.bin", "optimizer.*", "consolidated*", "*.pt", "*.pth",
    "*.ckpt", "*.h5", "*.msgpack", "*.onnx", "*.onnx_data", "*.ot", "*.tflite", "*.mlmodel", "*.gguf",
    "*.jsonl", "*.csv", "*.tsv", "*.parquet", "*.toml", "*.log",
)  # fmt: skip
MOST_FILES = 5_000
PICKLED = "pytorch_model.bin"  # read as tensors alone (torch.load with weights_only), where there are no safetensors

# Case, both forms of accents, digits, blanks, line ends, quotes, code, scripts without spaces, an emoji, long words.
_PROBES = (
    "The Quick brown fox-trot isn't over; it's 3.14159 past 12,000!",
    "naïve café: nai\u0308ve cafe\u0301, ﬁnal Straße, İstanbul",
    "  leading and   inner blanks\tand tab\r\nline\n\nend  ",
    "def f(x_1): return {'a': [x_1 ** 2, \"b\"]}  # <s> [CLS] </s> <unk> <|endoftext|>",
    "患者は昨日退院した。 Пациент выписан. المريض خرج. 😀 → ≤ €5",
    "antidisestablishmentarianism electroencephalographically HIV-1 COVID-19 mRNA",
)
_SPECIAL = ("bos", "eos", "unk", "sep", "cls", "mask")  # not pad, which no model attends to


# ---- files -----------------------------------------------------------------------------------------------------------


def file_digest(file: Path) -> str:
    """SHA-256 (hex) of a file. Raises `OSError`."""
    return _of_file(*_facts(file))


def model_files(folder: Path) -> list[Path]:
    """Every file in or below a model's folder that a loader may read, except folders of runs (with a manifest.json).
    Raises `ConfigError` if there are more than `MOST_FILES`."""
    found: list[Path] = []
    seen: set[str] = set()  # links may form a loop
    for place, inner, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(place)
        ours = "manifest.json" in names and Path(place) != folder
        if real in seen or ours:
            inner.clear()
            continue
        seen.add(real)
        inner[:] = sorted(name for name in inner if not _unread(name))
        found += [path for name in names if not _unread(name) and (path := Path(place, name)).is_file()]
        if len(found) > MOST_FILES:
            raise ConfigError(
                f"the model {folder} has more than {MOST_FILES:,} files, and its digest covers them all. "
                f"Is it the model's own folder? Name one that holds only the model."
            )
    with contextlib.suppress(ConfigError):  # reported when the model is loaded
        found += weight_files(folder)  # files named in the index are loaded, whatever they are called
    return sorted(set(found))


@doing("hashing the base model")
def model_content(path: str | os.PathLike[str]) -> dict[str, str]:
    """File name -> SHA-256 for each of `model_files`; for a GGUF file its own; for a hub id those of its cached
    snapshot. Empty if nothing is there."""
    place = Path(path)
    if place.is_file():
        return {place.name: file_digest(place)}
    if not place.exists():
        cached = _cached(os.fspath(path))
        if cached is None:
            return {}
        place = cached
    return {file.relative_to(place).as_posix(): file_digest(file) for file in model_files(place)}


def model_commit(path: str | os.PathLike[str]) -> str | None:
    """The hub's commit of a snapshot, or of a hub id's cached one; None for any other model."""
    place = Path(path) if Path(path).exists() else _cached(os.fspath(path))
    return place.name if place is not None and hub_name(str(place)) and place.parent.name == "snapshots" else None


def _unread(name: str) -> bool:
    return name == "__pycache__" or any(fnmatch.fnmatchcase(name, pattern) for pattern in NOT_READ)


def _cached(model: str) -> Path | None:
    """The cached snapshot that would be loaded for a hub id offline."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(model, "config.json")
    except HFValidationError:
        return None
    return Path(found).parent if isinstance(found, str) else None


def _facts(file: Path) -> tuple[str, int, int, int, int]:
    real = file.resolve()
    found = real.stat()
    return str(real), found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino


@functools.cache
def _of_file(path: str, *_: int) -> str:
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


# ---- weights ---------------------------------------------------------------------------------------------------------


def model_place(path: str | os.PathLike[str], revision: str | None = None) -> Path:
    """A model's directory or GGUF file; for a hub id, its cached snapshot, downloaded if missing. revision: of a hub
    id, a commit, tag or branch; by default the main branch.

    Raises:
        ConfigError: there is no such model.
    """
    found = Path(path)
    if found.exists():
        return found
    from huggingface_hub import snapshot_download

    where = source(path, revision)  # explains what is wrong with an unknown id
    try:
        place = Path(snapshot_download(os.fspath(path), ignore_patterns=list(NOT_READ), **where))
        if not any(place.glob("*.safetensors*")):
            place = Path(snapshot_download(os.fspath(path), allow_patterns=[f"{PICKLED}*"], **where))
        return place
    except Exception as error:  # the transport may raise anything
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ConfigError(f"the files of the model {os.fspath(path)!r} are not available: {reason}") from error


def weight_files(place: Path) -> list[Path]:
    """The files that hold the weights: safetensors, or PyTorch's own if there are no others. Raises `ConfigError`."""
    if place.is_file():
        return [place]
    for single in (place / "model.safetensors", place / PICKLED):
        index = place / f"{single.name}.index.json"
        if single.is_file():
            return [single]
        if index.is_file():
            break
    else:
        raise ConfigError(
            f"the model {place} has no weights: it has neither model.safetensors nor {PICKLED}, nor an index of either "
            f"({single.name}.index.json)."
        )
    try:
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        found = sorted({place / str(name) for name in names})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"the index of the model's files, {index}, cannot be read: {error!r}.") from error
    lacks = [file.name for file in found if not file.is_file()]
    if lacks or not found:
        raise ConfigError(f"the model {place} lacks {', '.join(lacks[:3]) or 'its files'}, which its index names.")
    return found


def check_weights(path: str | os.PathLike[str], revision: str | None = None) -> None:
    """Raise `ConfigError` if a model's weights are neither here nor on the hub. Nothing is downloaded."""
    if Path(path).exists():
        weight_files(Path(path))
        return
    if source(path, revision)["local_files_only"]:
        weight_files(model_place(path, revision))
        return
    from huggingface_hub import HfApi

    listed = HfApi().model_info(os.fspath(path), revision=revision, timeout=SECONDS).siblings or []
    if not any(one.rfilename.endswith(".safetensors") or one.rfilename.startswith(PICKLED[:-4]) for one in listed):
        raise ConfigError(f"the model {os.fspath(path)!r} has no weights on the hub: no safetensors, and no {PICKLED}.")


@doing("hashing the base model")
def base_digest(path: str | os.PathLike[str], cache: Path | None = None) -> str:
    """SHA-256 (hex) of a base model's weights: each tensor's name, type, shape and bytes, sorted by name, so that a
    single file and shards of it agree. A GGUF file counts as a whole, with architecture and tokenizer.

    Args:
        cache: a file that remembers digests across processes, by the files' paths, sizes and times.

    Raises:
        ConfigError: no such model, or its files are not weights.
    """
    found = weight_files(model_place(path))
    key = json.dumps([_facts(file) for file in found])
    known = _remembered(cache)
    if key in known:
        return known[key]
    digest = file_digest(found[0]) if found[0].suffix == ".gguf" else _of_tensors(found)
    if cache is not None:
        with contextlib.suppress(OSError):  # on a full disk they are just read again next time
            files.write(cache, json.dumps({**dict(list(known.items())[-7:]), key: digest}, indent=1) + "\n")
    return digest


def _remembered(cache: Path | None) -> dict[str, str]:
    try:
        found = parse_json(read_given(cache)) if cache is not None else {}
    except (OSError, ValueError):
        return {}
    return {k: v for k, v in found.items() if isinstance(v, str)} if isinstance(found, dict) else {}


def _of_tensors(found: list[Path]) -> str:
    tensors: dict[str, str] = {}
    for file in found:
        for name, line in _tensors(file):
            if name in tensors:
                raise ConfigError(f"the tensor {name[:100]!r} is in two of the model's files; {file} is one.")
            tensors[name] = line
    return hashlib.sha256(
        "".join(f"{json.dumps(name)} {tensors[name]}\n" for name in sorted(tensors)).encode()
    ).hexdigest()


def _tensors(file: Path) -> Iterator[tuple[str, str]]:
    """Name, and type, shape and digest, of each tensor in a file of weights. Its bytes are memory-mapped."""
    import torch
    from safetensors import SafetensorError, safe_open

    try:
        if file.suffix == ".bin":
            pickled = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
            each: Iterator[tuple[str, Any]] = iter(pickled.items())
        else:
            stored: Any = safe_open(file, framework="pt")
            each = ((name, stored.get_tensor(name)) for name in stored.keys())  # noqa: SIM118 - no mapping
        for name, tensor in each:
            raw = tensor.reshape(-1).view(torch.uint8).numpy()
            yield name, f"{tensor.dtype} {list(tensor.shape)} {hashlib.sha256(raw).hexdigest()}"
    except (SafetensorError, OSError, UnpicklingError, RuntimeError, AttributeError) as error:
        raise ConfigError(
            f"the weights {file} are not a complete file of tensors alone ({str(error).splitlines()[0]}): fetch the "
            f"model again."
        ) from error


# ---- tokenizers ------------------------------------------------------------------------------------------------------


def tokenizer_of(path: str | os.PathLike[str]) -> Any:
    """A model's tokenizer, without the model. Raises `ConfigError`."""
    from transformers import AutoTokenizer

    place = model_place(path)
    with readable(f"the tokenizer of {os.fspath(path)!r} cannot be loaded"):
        if place.is_file():
            return AutoTokenizer.from_pretrained(place.parent, gguf_file=place.name)
        return AutoTokenizer.from_pretrained(place)


@contextlib.contextmanager
def readable(otherwise: str, hint: str = "") -> Iterator[None]:
    """Raise `ConfigError`, which begins with `otherwise`, for any error in the block: files of a model that are damaged
    or odd fail in many ways, in several libraries."""
    try:
        yield
    except FedLoRAError:
        raise
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(f"{otherwise}: {reason}{hint}") from error


def tokenizer_digest(tokenizer: Any) -> str:
    """SHA-256 (hex) of the vocabulary, merges, special tokens, and token ids of texts chosen to distinguish tokenizers.
    It does not depend on the file layout."""
    facts = {
        "vocabulary": sorted(tokenizer.get_vocab().items()),
        "merges": _merges(tokenizer),
        "special": [str(getattr(tokenizer, f"{name}_token", None)) for name in _SPECIAL],
        "probes": [tokenizer(text)["input_ids"] for text in _PROBES],
        "pair": tokenizer(_PROBES[0], _PROBES[5])["input_ids"],
    }
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def template_digest(tokenizer: Any) -> str:
    """SHA-256 (hex) of the tokenizer's chat template; "" if it has none."""
    found = getattr(tokenizer, "chat_template", None)
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest() if found else ""


def _merges(tokenizer: Any) -> list[list[str]]:
    """A BPE tokenizer's merge pairs, in order; older files write them as "a b"."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return []
    merges = json.loads(backend.to_str())["model"].get("merges") or []
    return [pair.split(" ") if isinstance(pair, str) else list(pair) for pair in merges]


__all__ = [
    "base_digest", "check_weights", "file_digest", "model_commit", "model_content", "model_files", "model_place",
    "readable", "template_digest", "tokenizer_digest", "tokenizer_of", "weight_files",
]  # fmt: skip
