"""Adapters from strangers: damaged, contradicting and malicious files. Kinds of evidence: by hand and property.

Every file is made here byte by byte, by the safetensors format's own description and json, so no library can soften it.
What must come out follows from the contract alone: an `AdapterFormatError` of one line that names the place and the
reason, within seconds, with exit code 2 and nothing written on the command line. The drawn cases (hypothesis) ask that
nothing else than success or such an error ever comes out.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import re
import shutil
import struct
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from fedlora.adapters.beside import averaged
from fedlora.adapters.collection import Collection
from fedlora.adapters.limits import Limits
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError

from fedlora import read_adapter, write_adapter
from fedlora.adapters import reader
from fedlora.adapters.reader import CONFIG_FILE, WEIGHTS_FILE, AdapterFile
from fedlora.errors import AdapterFormatError, FedLoRAError
from support.command_line import Said

pytestmark = pytest.mark.timeout(60)  # what blocks, as on a pipe, ends as a failure of its test
SECONDS = 5.0
PREFIX = "base_model.model."
Header = dict[str, Any]


@contextmanager
def quick(seconds: float = SECONDS) -> Iterator[None]:
    """It may not take longer than this, however it ends."""
    begun = time.process_time()  # not by the clock: other work on the machine is not our fault
    yield
    assert time.process_time() - begun < seconds


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the real time for patterns: there are many of these tests."""
    monkeypatch.setattr(reader, "Limits", partial(Limits, pattern_seconds=1))


# ---- files by hand ---------------------------------------------------------------------------------------------------

_NUMBERS = {"F64": "d", "F32": "f", "F16": "e", "I64": "q", "I32": "i", "I8": "b", "U8": "B", "BOOL": "?"}


def tensors(shapes: Mapping[str, tuple[int, ...]], dtype: str = "F32", value: float = 0.5) -> tuple[Header, bytes]:
    """A header and the bytes that it tells of."""
    header, data = {}, b""
    for key, shape in shapes.items():
        count = math.prod(shape)
        block = struct.pack(f"<{count}{_NUMBERS[dtype]}", *[type(value)(value)] * count)
        header[key] = {"dtype": dtype, "shape": list(shape), "data_offsets": [len(data), len(data) + len(block)]}
        data += block
    return header, data


def weights(header: object, data: bytes, length: int | None = None) -> bytes:
    """The safetensors file."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def pair(path: str, d_out: int = 6, r: int = 2, d_in: int = 5) -> dict[str, tuple[int, ...]]:
    return {f"{PREFIX}{path}.lora_A.weight": (r, d_in), f"{PREFIX}{path}.lora_B.weight": (d_out, r)}


Q, V = "layers.0.q_proj", "layers.0.v_proj"
SHAPES = {**pair(Q), **pair(V, 4)}
QA, QB = pair(Q)
CONFIG: dict[str, Any] = {
    "peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"], "rank_pattern": {},
    "alpha_pattern": {}, "use_rslora": False, "init_lora_weights": True, "bias": "none", "modules_to_save": None,
    "task_type": "CAUSAL_LM", "base_model_name_or_path": "some/base", "revision": None, "inference_mode": True,
}  # fmt: skip


def put(folder: Path, config: object = CONFIG, content: bytes | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    raw = config if isinstance(config, bytes) else json.dumps(config).encode()
    (folder / CONFIG_FILE).write_bytes(raw)
    (folder / WEIGHTS_FILE).write_bytes(weights(*tensors(SHAPES)) if content is None else content)
    return folder


@pytest.fixture
def good(tmp_path: Path) -> Path:
    return put(tmp_path / "good")


def used(folder: Path, out: Path) -> None:
    """All that is done with one adapter: opened, read whole, written again, and merged with itself."""
    file = AdapterFile(folder)
    for module in file.modules:
        file.lora(module)
        file.scale(module)
    for path in file.heads:
        file.head(path)
    write_adapter(out, *read_adapter(folder))
    both = Collection.of([file, file], [0.7, 0.3])
    _ = both.modules, both.layouts, both.spec(), averaged(both, "average"), file.stored


def refused(folder: Path, why: str, main: Callable[..., Said], *, validate: bool = True) -> None:
    """The whole contract of a refusal."""
    root = folder.parent
    put(root / "sound")
    with pytest.raises(AdapterFormatError, match=why) as caught, quick():
        used(folder, root / "again")
    said = str(caught.value)
    assert "\n" not in said and str(folder) in said, said
    assert not (root / "again").exists()
    merge = ["merge", root / "sound", folder, "-o", root / "out"]
    for args in [merge, ["validate", folder]] if validate else [merge]:
        with quick():
            done = main(*args)
        assert done.code == 2 and done.err.count("\n") == 1 and re.search(why, done.err), done.err
        assert "Traceback" not in done.err and len(done.err) < 3000
    assert not (root / "out").exists()


def test_the_sound_file_is_sound(good: Path, main: Callable[..., Said], tmp_path: Path) -> None:
    """So that what the other tests refuse is refused for what they changed."""
    used(good, tmp_path / "again")
    assert main("validate", good).code == 0
    assert main("merge", good, good, "-o", tmp_path / "m").code == 0
    assert float(AdapterFile(good).lora(Q).delta()[0, 0]) == 4 / 2 * 2 * 0.25  # alpha / r times r products


# ---- weights ---------------------------------------------------------------------------------------------------------

HEADER, DATA = tensors(SHAPES)
WHOLE = weights(HEADER, DATA)


def changed(key: str = QA, **fields: object) -> bytes:
    """The sound file with another line for one tensor in its header."""
    return weights({**HEADER, key: {**HEADER[key], **fields}}, DATA)


def without(key: str, field: str) -> bytes:
    return weights({**HEADER, key: {k: v for k, v in HEADER[key].items() if k != field}}, DATA)


def renamed(old: str, new: str) -> bytes:
    """Factors under another name, in the order of the file."""
    return weights({key.replace(old, new): line for key, line in HEADER.items()}, DATA)


def shaped(shapes: Mapping[str, tuple[int, ...]], dtype: str = "F32", value: float = 0.5) -> bytes:
    return weights(*tensors(shapes, dtype, value))


def ten(dtype: str) -> Header:
    """One tensor of ten bytes."""
    return {QA: {"dtype": dtype, "shape": [2, 5], "data_offsets": [0, 10]}}


def with_gap() -> bytes:
    header, data = tensors(SHAPES)
    for line in list(header.values())[1:]:
        line["data_offsets"] = [offset + 8 for offset in line["data_offsets"]]
    return weights(header, data + bytes(8))


def first_offset(text: str) -> bytes:
    """The sound file with other letters in place of its first 0."""
    return weights(json.dumps(HEADER).replace('"data_offsets": [0,', f'"data_offsets": [{text},').encode(), DATA)


def twice(text: str) -> bytes:
    """A header that says `text` again at its end."""
    return weights(json.dumps(HEADER).encode()[:-1] + b", " + text.encode() + b"}", DATA)


DAMAGED = r"adapter_model\.safetensors is damaged"
# what -> (content of adapter_model.safetensors, what the refusal says)
WEIGHTS: dict[str, tuple[Callable[[], bytes], str]] = {
    "empty": (lambda: b"", DAMAGED),
    "seven bytes": (lambda: bytes(7), DAMAGED),
    "zeros": (lambda: bytes(4096), DAMAGED),
    "header only": (lambda: WHOLE[: -len(DATA)], f"{DAMAGED}.*header announces"),
    "cut in the header": (lambda: WHOLE[:100], DAMAGED),
    "cut in the last tensor": (lambda: WHOLE[:-4], f"{DAMAGED}.*header announces"),
    "trailing bytes": (lambda: WHOLE + b"PK\x03\x04", f"{DAMAGED}.*header announces"),
    "giant header length": (lambda: weights(HEADER, DATA, 2**63), f"{DAMAGED}.*9,223,372,036,854,775,808"),
    "header one byte too long": (lambda: weights(HEADER, b"", 10**6), DAMAGED),
    "header length 0": (lambda: weights(HEADER, DATA, 0), DAMAGED),
    "header cut short": (lambda: weights(HEADER, DATA, 50), f"{DAMAGED}: its header is not JSON"),
    "bad JSON": (lambda: weights(b"{'a': 1}", DATA), "its header is not JSON"),
    "not UTF-8": (lambda: weights(b'{"\xff\xfe": 1}', DATA), "its header is not JSON"),
    "UTF-16": (lambda: weights(json.dumps(HEADER).encode("utf-16"), DATA), "its header is not JSON"),
    "header is a list": (lambda: weights([1, 2], DATA), "no JSON object"),
    "header is null": (lambda: weights(b"null", b""), "no JSON object"),
    "deep header": (lambda: weights(b"[" * 100_000, b""), "header is not JSON.*nested too deeply"),
    "deep object": (lambda: weights(b'{"a":' * 100_000 + b"1" + b"}" * 100_000, b""), "header is not JSON"),
    "a key twice": (lambda: twice(json.dumps(QA) + ": " + json.dumps(HEADER[QA])), "occurs twice"),
    "a field twice": (
        lambda: weights(json.dumps(HEADER).replace('"dtype"', '"dtype": "F16", "dtype"', 1).encode(), DATA),
        "'dtype' occurs twice",
    ),
    "overlap": (lambda: changed(QB, data_offsets=[36, 84]), "overlap at byte"),
    "the same bytes twice": (lambda: changed(QB, shape=[5, 2], data_offsets=[0, 40]), "overlap at byte"),
    "gap": (with_gap, "leave a gap at byte"),
    "gap at the start": (
        lambda: weights(
            {k: {**line, "data_offsets": [o + 4 for o in line["data_offsets"]]} for k, line in HEADER.items()},
            bytes(4) + DATA,
        ),
        "leave a gap at byte",
    ),
    "shape too large for its bytes": (lambda: changed(shape=[2, 50]), "should have 400 bytes"),
    "shape too small for its bytes": (lambda: changed(shape=[2, 1]), "should have 8 bytes"),
    "dtype of another size": (lambda: changed(dtype="F64"), "should have 80 bytes"),
    "offsets backwards": (lambda: changed(data_offsets=[40, 0]), "an impossible shape or place"),
    "negative offsets": (lambda: changed(data_offsets=[-40, 0]), "impossible shape or place"),
    "negative shape": (lambda: changed(shape=[-2, -5]), "impossible shape or place"),
    "huge shape": (lambda: changed(shape=[2**62, 2**62]), "impossible shape or place"),
    "huge shape times 0": (lambda: changed(shape=[2**62, 0]), "impossible shape or place"),
    "many dimensions": (lambda: changed(shape=[1] * 50_000 + [2, 5]), "50,002 dimensions"),
    "shape of floats": (lambda: changed(shape=[2.0, 5.0]), "impossible shape or place"),
    "shape of words": (lambda: changed(shape=["2", "5"]), "impossible shape or place"),
    "shape of booleans": (lambda: changed(shape=[True, True]), "impossible shape or place"),
    "shape is a word": (lambda: changed(shape="25"), "impossible shape or place"),
    "shape is null": (lambda: changed(shape=None), "impossible shape or place"),
    "one offset": (lambda: changed(data_offsets=[40]), "data_offsets"),
    "three offsets": (lambda: changed(data_offsets=[0, 40, 80]), "data_offsets"),
    "offsets is an object": (lambda: changed(data_offsets={"0": 0, "1": 40}), "impossible shape or place"),
    "offset of 10 000 digits": (lambda: first_offset("9" * 10_000), "header is not JSON"),
    "offset 1e400": (lambda: first_offset("1e400"), "1e400, which is beyond every float"),
    "offset NaN": (lambda: first_offset("NaN"), "NaN, which JSON does not have"),
    "no dtype": (lambda: without(QA, "dtype"), "lacks dtype"),
    "no shape": (lambda: without(QA, "shape"), "lacks dtype"),
    "no offsets": (lambda: without(QA, "data_offsets"), "lacks dtype"),
    "a line that is a list": (lambda: weights({**HEADER, QA: [1]}, DATA), "lacks dtype"),
    "a line that is null": (lambda: weights({**HEADER, QA: None}, DATA), "lacks dtype"),
    "a line that is a word": (lambda: weights({**HEADER, QA: "F32"}, DATA), "lacks dtype"),
    "unknown dtype": (lambda: changed(dtype="F99"), "is of type F99"),
    "fp8": (lambda: weights(ten("F8_E4M3"), bytes(10)), "F8_E4M3"),
    "fp8, the other": (
        lambda: weights(ten("F8_E5M2"), bytes(10)), "F8_E5M2"
    ),
    "complex": (lambda: weights(ten("C64"), bytes(10)), "type C64"),
    "dtype is a list": (lambda: changed(dtype=["F32"]), "type"),
    "dtype is an object": (lambda: changed(dtype={"F32": 1}), "type"),
    "dtype is null": (lambda: changed(dtype=None), "is of type None"),
    **{
        f"factors of type {dtype}": ((lambda d=dtype: shaped(SHAPES, d, 1)), f"type {dtype}; updates must be floating")
        for dtype in ("I64", "I32", "I8", "U8", "BOOL")
    },
    "NaN": (lambda: shaped(SHAPES, value=math.nan), "holds NaN or Inf"),
    "Inf": (lambda: shaped(SHAPES, value=math.inf), "holds NaN or Inf"),
    "-Inf in the last number": (lambda: WHOLE[:-4] + struct.pack("<f", -math.inf), r"v_proj.*holds NaN or Inf"),
    "Inf in float16": (lambda: shaped(SHAPES, "F16", math.inf), "holds NaN or Inf"),
    "no tensors": (lambda: weights({}, b""), "holds no lora_A / lora_B pair"),
    "factors without dimensions": (lambda: shaped({QA: (), QB: ()}), "q_proj.* no LoRA"),
    "one factor without dimensions": (lambda: shaped({**SHAPES, QB: ()}), "q_proj.* no LoRA"),
    "factors of one dimension": (lambda: shaped({QA: (2,), QB: (2,)}), "q_proj.* no LoRA"),
    "no rank": (lambda: shaped({**SHAPES, **pair(Q, r=0)}), "q_proj"),
    "no inputs": (lambda: shaped({**SHAPES, **pair(Q, d_in=0)}), "q_proj.* is empty"),
    "no outputs": (lambda: shaped({**SHAPES, **pair(Q, d_out=0)}), "q_proj.* is empty"),
    "not gathered": (lambda: shaped(dict.fromkeys(SHAPES, (0,))), "is empty.*ZeRO-3.*zero_to_fp32"),
    "A and B swapped": (lambda: shaped({QA: (6, 2), QB: (2, 5), **pair(V)}), "q_proj"),
    "A and B swapped and turned": (lambda: shaped({QA: (2, 6), QB: (5, 3), **pair(V)}), "q_proj"),
    "no B": (lambda: shaped({k: s for k, s in SHAPES.items() if k != QB}), "q_proj' lacks lora_B"),
    "no A": (lambda: shaped({k: s for k, s in SHAPES.items() if k != QA}), "q_proj' lacks lora_A"),
    "only As": (lambda: shaped({k: s for k, s in SHAPES.items() if "_A" in k}), "lacks lora_B"),
    "two ranks": (lambda: shaped({**SHAPES, QA: (3, 5)}), "q_proj"),
    "another rank": (lambda: shaped({**SHAPES, **pair(Q, r=3)}), "q_proj' has rank 3, but its config says 2"),
    "an extra tensor": (lambda: shaped({**SHAPES, f"{PREFIX}norm.weight": (4,)}), "norm.weight' is neither"),
    "an extra weight of the base": (lambda: shaped({**SHAPES, f"{PREFIX}{Q}.weight": (6, 5)}), "q_proj.weight' is nei"),
    "a magnitude": (lambda: shaped({**SHAPES, f"{PREFIX}{Q}.lora_magnitude_vector": (6,)}), "magnitude_vector' is nei"),
    "an unasked bias": (lambda: shaped({**SHAPES, f"{PREFIX}{Q}.lora_B.bias": (6,)}), "bias' is neither"),
    "an E without AdaLoRA": (lambda: shaped({**SHAPES, f"{PREFIX}{Q}.lora_E": (2, 1)}), "lora_E"),
    "both kinds of keys": (lambda: shaped({**SHAPES, f"{PREFIX}{Q}.lora_embedding_A": (2, 5)}), "q_proj"),
    "no prefix": (lambda: renamed(PREFIX, ""), "does not start with 'base_model.model.'"),
    "the prefix alone": (lambda: shaped({**SHAPES, "base_model.model": (1,)}), "does not start with"),
    "no module": (lambda: renamed(f"{Q}.", ""), "base_model.model.lora_A.weight"),
    "the adapter's name in keys": (lambda: renamed("lora_A.weight", "lora_A.default.weight"), "is neither"),
    **{
        f"name {name!r}": ((lambda n=name: renamed(Q, n)), "has an impossible name")
        for name in ("../../etc", "..", "a..b", ".a", "a/b", "/etc/passwd", "a\\b", "a\nb", "a\rb", "a\x00b",
                     "a\x1b[31mb", "a b", "a\u2028b", "a" * 600, "a." * 400 + "b")
    },
    "an empty name": (lambda: shaped({**SHAPES, "": (1,)}), "has an impossible name"),
    "a name of a megabyte": (lambda: renamed(Q, "a" * 10**6), "has an impossible name"),
    "a pickle of torch": (lambda: _torch_pickle(), DAMAGED),
    "a plain pickle": (lambda: pickle.dumps({"a": list(range(1000))}), DAMAGED),
    "a zip": (lambda: b"PK\x03\x04" + bytes(5000), DAMAGED),
    "a git lfs pointer": (
        lambda: b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"a" * 64 + b"\nsize 12345\n", DAMAGED
    ),
    "a web page": (lambda: b"<!DOCTYPE html><html><body>404</body></html>", DAMAGED),
}  # fmt: skip


def _torch_pickle() -> bytes:
    import io

    file = io.BytesIO()
    torch.save({QA: torch.ones(2, 5), QB: torch.ones(6, 2)}, file)
    return file.getvalue()


@pytest.mark.parametrize("what", list(WEIGHTS))
def test_weights_that_are_refused(what: str, main: Callable[..., Said], tmp_path: Path) -> None:
    make, why = WEIGHTS[what]
    refused(put(tmp_path / "bad", content=make()), why, main, validate=False)


@pytest.mark.parametrize(("count", "why"), [(110_000, "110,000 tensors.* 100,000 "), (30_000, "m0' lacks lora_B")])
def test_very_many_empty_tensors(count: int, why: str, tmp_path: Path) -> None:
    line = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    header = {f"{PREFIX}m{k}.lora_A.weight": line for k in range(count)}
    folder = put(tmp_path / "bad", content=weights(header, b""))
    with pytest.raises(AdapterFormatError, match=why), quick():
        AdapterFile(folder)


@pytest.mark.parametrize("metadata", [{}, None, {"format": "tf"}], ids=str)
def test_metadata_are_not_looked_at(metadata: object, tmp_path: Path) -> None:
    """They say nothing about the update."""
    folder = put(tmp_path / "odd", content=weights({"__metadata__": metadata, **HEADER}, DATA))
    assert only_refused(folder, tmp_path / "again") is None


@pytest.mark.parametrize("metadata", [[1], {"a": 1}, "pt", {"a": None}], ids=str)
def test_metadata_that_safetensors_does_not_take(metadata: object, tmp_path: Path) -> None:
    """So that what is sound here is sound for peft: the library is asked, too."""
    folder = put(tmp_path / "odd", content=weights({"__metadata__": metadata, **HEADER}, DATA))
    with pytest.raises(SafetensorError):
        safetensors.torch.load_file(folder / WEIGHTS_FILE)
    with pytest.raises(AdapterFormatError, match="__metadata__"):
        AdapterFile(folder)


def test_limits_are_checked_before_anything_is_read(main: Callable[..., Said], tmp_path: Path) -> None:
    """A header of 33 MiB and a file of 65 GiB, both holes on the disk; and limits of one's own."""
    folder = put(tmp_path / "bad")
    with (folder / WEIGHTS_FILE).open("wb") as file:
        file.write(struct.pack("<Q", 33 * 2**20))
        file.truncate(40 * 2**20)
    refused(folder, "has a header of 34,603,008 bytes, more than the 33,554,432 allowed", main)
    with (folder / WEIGHTS_FILE).open("wb") as file:
        file.truncate(65 * 2**30)
    refused(folder, "has 69,793,218,560 bytes, more than the 68,719,476,736 allowed", main)
    with (folder / CONFIG_FILE).open("wb") as file:
        file.truncate(9 * 2**20)
    refused(folder, "has 9,437,184 bytes, more than the 8,388,608", main)
    put(folder)
    for limits in (Limits(header=10), Limits(json=10), Limits(tensors=3), Limits(total=99), Limits(name=20)):
        with pytest.raises(AdapterFormatError, match=r"more than the|an impossible name"):
            AdapterFile(folder, limits=limits)
    for option in (["--max-bytes", "99"], ["--max-tensors", "3"]):
        done = main("validate", folder, *option)
        assert done.code == 2 and "more than the" in done.err and done.err.count("\n") == 1


def test_a_pickle_beside_the_weights_is_not_opened(good: Path, main: Callable[..., Said], tmp_path: Path) -> None:
    """Alone it is refused; beside a safetensors it is ignored. Opening it would make a directory."""

    class Trap:
        def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
            return os.mkdir, (str(tmp_path / "sprung"),)

    (good / "adapter_model.bin").write_bytes(pickle.dumps(Trap()))
    used(good, tmp_path / "again")
    shutil.rmtree(tmp_path / "again")
    assert main("merge", good, good, "-o", tmp_path / "m").code == 0
    (good / WEIGHTS_FILE).unlink()
    refused(good, "is not a PEFT adapter: it has no", main)
    shutil.copyfile(good / "adapter_model.bin", good / WEIGHTS_FILE)
    refused(good, DAMAGED, main)
    assert not (tmp_path / "sprung").exists()


# ---- kinds of files --------------------------------------------------------------------------------------------------


def linked(folder: Path, name: str, target: str | Path) -> None:
    (folder / name).unlink()
    (folder / name).symlink_to(target)


def outside(folder: Path, name: str) -> None:
    shutil.copy(folder / name, folder.parent / "elsewhere")
    linked(folder, name, folder.parent / "elsewhere")


def made_fifo(folder: Path, name: str) -> None:
    (folder / name).unlink()
    os.mkfifo(folder / name)


def made_directory(folder: Path, name: str) -> None:
    (folder / name).unlink()
    (folder / name).mkdir()


def in_a_cache_of_links(folder: Path, name: str) -> None:
    """As in the hub's cache, but the blob is a link to somewhere else."""
    blobs = folder.parent.parent / "blobs"
    blobs.mkdir()
    shutil.copy(folder / name, blobs.parent / "elsewhere")
    (blobs / "abc").symlink_to(blobs.parent / "elsewhere")
    linked(folder, name, "../../blobs/abc")


# what -> (what is done to one of the files, what the refusal says)
PLACES: dict[str, tuple[Callable[[Path, str], None], str]] = {
    "a link to the outside": (outside, "is a link to another place"),
    "a relative link to the outside": (
        lambda f, n: (outside(f, n), linked(f, n, "../elsewhere"))[0], "is a link to another place"),
    "a link to a device": (lambda f, n: linked(f, n, "/dev/zero"), "is a link to another place"),
    "a link to nothing": (lambda f, n: linked(f, n, "nothing"), "cannot be read"),
    "a link to itself": (lambda f, n: linked(f, n, n), "cannot be read"),
    "a link to its directory": (lambda f, n: linked(f, n, "."), "."),
    "a pipe": (made_fifo, "not an ordinary file"),
    "a directory": (made_directory, "not an ordinary file"),
    "a link to a pipe": (
        lambda f, n: (os.mkfifo(f / "pipe"), linked(f, n, "pipe"))[0], "not an ordinary file"),
    "a blob that is a link": (in_a_cache_of_links, "is a link to another place"),
    "missing": (lambda f, n: (f / n).unlink(), "is not a PEFT adapter: it has no"),
}  # fmt: skip


@pytest.mark.parametrize("name", [CONFIG_FILE, WEIGHTS_FILE])
@pytest.mark.parametrize("what", list(PLACES))
def test_a_file_that_is_no_file_of_the_directory(
    what: str, name: str, main: Callable[..., Said], tmp_path: Path
) -> None:
    change, why = PLACES[what]
    folder = put(tmp_path / "snapshots" / "bad")
    change(folder, name)
    refused(folder, why, main)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
@pytest.mark.parametrize("name", [CONFIG_FILE, WEIGHTS_FILE])
def test_a_file_that_may_not_be_read(name: str, main: Callable[..., Said], tmp_path: Path) -> None:
    folder = put(tmp_path / "bad")
    (folder / name).chmod(0)
    refused(folder, "[Pp]ermission denied", main)


def test_the_cache_of_the_hub_is_read(main: Callable[..., Said], tmp_path: Path) -> None:
    """snapshots/REVISION/FILE is a link to ../../blobs/HASH; links within the directory are fine too."""
    folder = put(tmp_path / "models--some--adapter" / "snapshots" / "0123abcd")
    blobs = folder.parent.parent / "blobs"
    blobs.mkdir()
    for name, blob in ((CONFIG_FILE, "aa11"), (WEIGHTS_FILE, "bb22")):
        shutil.move(folder / name, blobs / blob)
        (folder / name).symlink_to(f"../../blobs/{blob}")
    used(folder, tmp_path / "again")
    assert main("merge", folder, folder, "-o", tmp_path / "m").code == 0
    inside = put(tmp_path / "inside")
    shutil.move(inside / WEIGHTS_FILE, inside / "model.v2")
    (inside / WEIGHTS_FILE).symlink_to("model.v2")
    used(inside, tmp_path / "again")
    (tmp_path / "link").symlink_to(inside)  # the directory itself may be a link
    used(tmp_path / "link", tmp_path / "again")


@pytest.mark.parametrize("what", ["nothing", "a file", "an empty directory"])
def test_a_place_that_is_no_adapter(what: str, main: Callable[..., Said], tmp_path: Path) -> None:
    folder = tmp_path / "bad"
    if what == "a file":
        folder.write_bytes(WHOLE)
    elif what == "an empty directory":
        folder.mkdir()
    refused(folder, "is not a PEFT adapter", main)


# ---- configs ---------------------------------------------------------------------------------------------------------


def config(**fields: object) -> bytes:
    return json.dumps(CONFIG | fields).encode()


def literal(field: str, text: str) -> bytes:
    """The config with a field in the very letters of `text`."""
    return config(**{field: "@@"}).replace(b'"@@"', text.encode())


# what -> (content of adapter_config.json, what the refusal says)
CONFIGS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is not JSON"),
    "cut": (config()[:40], "is not JSON"),
    "trailing text": (config() + b"}", "is not JSON"),
    "not UTF-8": (config(base_model_name_or_path="\xff").decode().encode("latin1") + b"\xff", "is not JSON"),
    "UTF-16": (config().decode().encode("utf-16"), "is not JSON"),
    "a list": (b"[]", "holds no JSON object"),
    "null": (b"null", "holds no JSON object"),
    "a word": (b'"LORA"', "holds no JSON object"),
    "deep": (b"[" * 100_000, "is not JSON.*nested too deeply"),
    "deep in a field": (literal("auto_mapping", "[" * 100_000 + "]" * 100_000), "is not JSON.*nested too deeply"),
    "a key twice": (config()[:-1] + b', "r": 4}', "'r' occurs twice"),
    "a key twice inside": (literal("rank_pattern", '{"q_proj": 2, "q_proj": 3}'), "'q_proj' occurs twice"),
    "no fields": (b"{}", "peft_type = None"),
    "no r": (json.dumps({k: v for k, v in CONFIG.items() if k != "r"}).encode(), r"\br = None"),
    "no alpha": (json.dumps({k: v for k, v in CONFIG.items() if k != "lora_alpha"}).encode(), "lora_alpha = None"),
    "r contradicts": (config(r=4), "q_proj' has rank 2, but its config says 4"),
    "a pattern contradicts": (config(rank_pattern={"v_proj": 3}), "v_proj' has rank 2, but its config says 3"),
    **{
        f"{field} = {text[:12]}": (literal(field, text), rf"\b{field} = ")
        for field in ("r", "lora_alpha")
        for text in ("-1", "0", "-0.0", "true", "false", "null", '"2"', "[2]", "{}")
    },
    **{
        f"{field} of {text}": (literal(field, text), "is not JSON: it has ")
        for field in ("r", "lora_alpha", "lora_dropout")
        for text in ("NaN", "Infinity", "-Infinity", "1e400", "-1e400")
    },
    **{
        f"{field} with {text}": (literal(field, '{"q_proj": ' + text + "}"), "is not JSON: it has ")
        for field in ("rank_pattern", "alpha_pattern")
        for text in ("NaN", "Infinity", "1e400")
    },
    **{f"r = {text}": (literal("r", text), r"\br = ") for text in ("2.5", "2.0", "1000001", "9" * 400)},
    **{f"lora_alpha = {text[:9]}": (literal("lora_alpha", text), "lora_alpha = ")
       for text in ("1e9", "1e308", "9" * 400)},
    "r of 10 000 digits": (literal("r", "9" * 10_000), "is not JSON"),
    "alpha of 10 000 digits": (literal("lora_alpha", "9" * 10_000), "is not JSON"),
    "an unknown int of 10 000 digits": (literal("eva_config", "9" * 10_000), "is not JSON"),
    **{
        f"{field} of {text[:9]}": (literal(field, '{"q_proj": ' + text + "}"), f"{field} = ")
        for field in ("rank_pattern", "alpha_pattern")
        for text in ("-1", "0", "true", "null", '"2"', "[2]", "9" * 400)
    },
    "alpha_pattern too large": (config(alpha_pattern={"q_proj": 1e9}), "alpha"),
    "alpha_pattern too large for its rank": (
        config(rank_pattern={"^none": 1}, alpha_pattern={"q_proj": 20_001}), "alpha"),
    **{
        f"{field} = {pattern!r}": (config(**{field: {pattern: 2}}), "Name the modules")
        for field in ("rank_pattern", "alpha_pattern")
        for pattern in ("(", "[", "*", "a{2,1}", "(?P<n>a)(?P<n", "\\", "(?<=a*)(", "(?z)")
    },
    "unknown field": (config(use_something_new=True), "use_something_new = True"),
    "another type": (config(peft_type="LOHA"), "peft_type = 'LOHA'"),
    "AdaLoRA without its factors": (config(peft_type="ADALORA", init_r=2, total_step=9), "lora_E"),
    "AdaLoRA without steps": (config(peft_type="ADALORA", init_r=2), "total_step = None"),
    "AdaLoRA without a phase": (
        config(peft_type="ADALORA", init_r=2, total_step=9, tinit=5, tfinal=4), "total_step = 9"),
    **{  # each fails in peft's loading
        f"AdaLoRA, {field} = {value!r}": (
            config(**{"peft_type": "ADALORA", "init_r": 2, "total_step": 9, field: value}), f"{field} = {value!r}")
        for field, value in (("orth_reg_weight", "false"), ("orth_reg_weight", -1), ("beta1", 1), ("beta2", "x"),
                             ("tinit", "0"), ("total_step", 0))
    },
    "another bias": (config(bias="some"), "bias = 'some'"),
}  # fmt: skip


@pytest.mark.parametrize("what", list(CONFIGS))
def test_configs_that_are_refused(what: str, main: Callable[..., Said], tmp_path: Path) -> None:
    content, why = CONFIGS[what]
    refused(put(tmp_path / "bad", content), why, main, validate=False)


def test_validate_says_which_of_many_are_sound(main: Callable[..., Said], tmp_path: Path) -> None:
    """All of the above at once, and a sound one in the middle."""
    weights = [make() for make, _ in WEIGHTS.values()]
    folders = [put(tmp_path / f"w{k}", content=content) for k, content in enumerate(weights)]
    folders += [put(tmp_path / "sound")]
    folders += [put(tmp_path / f"c{k}", content) for k, (content, _) in enumerate(CONFIGS.values())]
    done = main("validate", *folders, "--json")
    said = json.loads(done.out)
    assert done.code == 2 and done.err.count("\n") == 1
    assert {name for name, one in said.items() if one["sound"]} == {str(tmp_path / "sound")}
    assert len(said) == len(folders) and said[str(tmp_path / "sound")]["reason"] is None


PATTERN_FIELDS = ("rank_pattern", "alpha_pattern")
TARGET_FIELDS = ("target_modules", "exclude_modules", "layers_pattern")
BOMBS = (
    ("rank_pattern", "(?:a+)+$"), ("alpha_pattern", "(a*)*c"), ("target_modules", "(a|aa)+$"),
    ("exclude_modules", "(.*a){25}"), ("layers_pattern", "([a-z]+)*$"), ("rank_pattern", "^(a+)+b?$|x"),
)  # fmt: skip
LONG = "a" * 40 + "b"


def bombed(field: str, pattern: str, module: str = LONG) -> dict[str, object]:
    """A config in which `pattern` is asked about `module`, which it matches after an age or never."""
    if field in PATTERN_FIELDS:
        return {field: {pattern: 2}, "target_modules": [module]}
    more: dict[str, object] = {} if field == "target_modules" else {"target_modules": [module.rpartition(".")[2]]}
    return {field: pattern, "layers_to_transform": [0] if field == "layers_pattern" else None, **more}


@pytest.mark.parametrize(("field", "pattern"), BOMBS)
def test_a_pattern_that_takes_for_ever(field: str, pattern: str, tmp_path: Path) -> None:
    """Reading and writing end soon: done, or refused. Catastrophic backtracking would take 2^40 steps; all but the last
    do. More patterns, asked without a file: test_patterns.py."""
    folder = put(tmp_path / "bad", CONFIG | bombed(field, pattern), shaped(pair(LONG)))
    with quick():
        try:
            used(folder, tmp_path / "again")
        except AdapterFormatError as error:
            assert "\n" not in str(error) and re.search("Name the modules|does not target", str(error))


def test_a_pattern_that_takes_for_ever_on_the_command_line(main: Callable[..., Said], tmp_path: Path) -> None:
    """One field: what all of them are read by is the same, and test_a_pattern_that_takes_for_ever asks each."""
    folder = put(tmp_path / "bad", CONFIG | bombed("exclude_modules", "(a|aa)+$"), shaped(pair(LONG)))
    with quick():
        done = main("merge", put(tmp_path / "sound", content=shaped(pair(LONG))), folder, "-o", tmp_path / "out")
    assert done.code == 0 or (done.code == 2 and done.err.count("\n") == 1 and not (tmp_path / "out").exists())
    with quick():
        assert main("validate", folder).code in (0, 2)


NO_PATTERNS = ("(", "[", "*", "a{2,1}", "\\", "(?z)", "(?P<n>a)(?P<n")


@pytest.mark.parametrize("field", TARGET_FIELDS)
def test_targets_that_are_no_pattern(field: str, tmp_path: Path) -> None:
    """peft would have refused to train with them."""
    for k, pattern in enumerate(NO_PATTERNS):
        folder = put(tmp_path / f"bad{k}", CONFIG | bombed(field, pattern, "a.0.b"), shaped(pair("a.0.b")))
        with pytest.raises(AdapterFormatError, match="Name the modules"):
            used(folder, tmp_path / "again")


TARGETS = {"target_modules": [f"m{k}_proj" for k in range(7)]}


@pytest.mark.parametrize("count", [300, 520])
def test_many_patterns_for_many_modules(count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a merge with a rank for each module writes them, anchored and escaped; 80 layers of 7 have 560 modules."""
    names = [f"model.layers.{k // 7}.self_attn.m{k % 7}_proj" for k in range(count)]
    shapes = {key: shape for name in names for key, shape in pair(name).items()}
    patterns = {"^" + name.replace(".", "\\."): 2 for name in names}
    folder = put(tmp_path / "many", CONFIG | TARGETS | {"r": 3, "rank_pattern": patterns}, shaped(shapes))
    monkeypatch.undo()  # the time that files really have
    with quick(3):
        assert set(AdapterFile(folder).ranks.values()) == {2}


# ---- every field, every type -----------------------------------------------------------------------------------------

FULL: dict[str, Any] = CONFIG | {
    "alora_invocation_tokens": None, "arrow_config": None, "auto_mapping": None, "corda_config": None,
    "ensure_weight_tying": False, "eva_config": None, "exclude_modules": None, "fan_in_fan_out": False,
    "kasa_config": None, "layer_replication": None, "layers_pattern": None, "layers_to_transform": None,
    "loftq_config": {}, "lora_bias": False, "lora_dropout": 0.0, "lora_ga_config": None, "megatron_config": None,
    "megatron_core": "megatron.core", "monteclora_config": None, "peft_version": "0.21.2", "qalora_group_size": 16,
    "target_parameters": None, "trainable_token_indices": None, "use_bdlora": None, "use_dora": False,
    "use_qalora": False, "velora_config": None,
}  # fmt: skip
RICH = FULL | {
    "bias": "all", "lora_bias": False, "modules_to_save": ["head"], "trainable_token_indices": [1, 2],
    "target_modules": ["q_proj"], "target_parameters": ["experts.up", "experts.down"], "layers_to_transform": [0],
    "layers_pattern": "layers",
}  # fmt: skip
RICH_SHAPES = {
    **pair(Q), f"{PREFIX}{Q}.base_layer.bias": (6,), f"{PREFIX}head.weight": (3, 6),
    f"{PREFIX}embed_tokens.token_adapter.trainable_tokens_delta": (2, 5),
    **pair("layers.0.experts", r=6), **pair("layers.0.experts.base_layer", r=6),
}  # fmt: skip
ADA = FULL | {
    "peft_type": "ADALORA", "init_r": 3, "target_r": 2, "r": 8, "tinit": 0, "tfinal": 0, "deltaT": 1, "beta1": 0.85,
    "beta2": 0.85, "orth_reg_weight": 0.5, "total_step": 9, "rank_pattern": {f"{Q}.lora_E": [True, True, False]},
}  # fmt: skip
ADA_SHAPES = {f"{PREFIX}{Q}.lora_A": (2, 5), f"{PREFIX}{Q}.lora_B": (6, 2), f"{PREFIX}{Q}.lora_E": (2, 1)}
KINDS: dict[str, tuple[dict[str, Any], dict[str, tuple[int, ...]]]] = {
    "plain": (FULL, SHAPES), "rich": (RICH, RICH_SHAPES), "AdaLoRA": (ADA, ADA_SHAPES),
}  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, 0, 1, -1, 2.5, 10**30, "", "q_proj", [], [1], ["q_proj"], [None], [[0, 1]], [{}], {}, {"q_proj": None},
    {"a": []},
)  # fmt: skip
FEWER: tuple[Any, ...] = (2.5, "q_proj", [1], [[]], {"a": 1})


def only_refused(folder: Path, out: Path) -> str | None:
    """None, or the refusal; any other exception is the test's failure."""
    for file in out.glob("*"):  # to replace them is slow
        file.unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            used(folder, out)
        except FedLoRAError as error:
            assert isinstance(error, AdapterFormatError) and "\n" not in str(error)
            return str(error)
    return None


@pytest.mark.parametrize("kind", KINDS)
def test_the_fuzzed_configs_are_sound(kind: str, tmp_path: Path, main: Callable[..., Said]) -> None:
    fields, shapes = KINDS[kind]
    folder = put(tmp_path / "a", fields, shaped(shapes))
    used(folder, tmp_path / "again")
    assert main("merge", folder, folder, "-o", tmp_path / "m").code == 0


def test_patterns_that_adalora_does_not_use_compile(tmp_path: Path) -> None:
    """peft compiles them all the same, and fails."""
    folder = put(tmp_path / "a", ADA | {"alpha_pattern": {"(?i)q_proj": 2}}, shaped(ADA_SHAPES))
    with pytest.raises(AdapterFormatError, match="alpha_pattern"):
        AdapterFile(folder)


@pytest.mark.quick(23)
@pytest.mark.parametrize("field", sorted({*FULL, *ADA}))
def test_every_field_of_every_type(field: str, tmp_path: Path) -> None:
    """Success or a refusal, for each value in place of the sound one, in three kinds of adapters."""
    failed = []
    for kind, (fields, shapes) in KINDS.items():
        folder = put(tmp_path / kind, fields, shaped(shapes))
        for value in VALUES if kind == "plain" else FEWER:
            (folder / CONFIG_FILE).write_text(json.dumps(fields | {field: value}))
            try:
                only_refused(folder, tmp_path / "again")
            except Exception as error:
                failed.append(f"{kind}: {field} = {value!r}: {type(error).__name__}: {error}")
    assert not failed, "\n".join(failed)


# ---- two adapters ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"base_model_name_or_path": "another/base"}, "different base models"),
        ({"base_model_name_or_path": None}, "different base models"),
        ({"revision": "abc"}, "different base models.*at revision abc"),
        ({"target_parameters": ["a.b"]}, "differ in target_parameters"),
        ({"trainable_token_indices": [1]}, "differ in trainable_token_indices"),
        ({"layer_replication": [[0, 1]]}, "differ in layer_replication"),
    ],
)
def test_adapters_of_different_bases_are_not_merged(
    fields: dict[str, object], why: str, good: Path, main: Callable[..., Said], tmp_path: Path
) -> None:
    rows = {f"{PREFIX}embed_tokens.token_adapter.trainable_tokens_delta": (1, 5)}
    content = weights(*tensors(SHAPES | rows)) if "trainable_token_indices" in fields else None
    done = main("merge", good, put(tmp_path / "other", CONFIG | fields, content), "-o", tmp_path / "out")
    assert done.code == 2 and re.search(why, done.err) and done.err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_adapters_of_other_shapes_are_not_merged(good: Path, main: Callable[..., Said], tmp_path: Path) -> None:
    """Each is sound by itself; the message names the module."""
    other = put(tmp_path / "other", content=shaped({**pair(Q, d_out=7), **pair(V, 4)}))
    for command in (["merge", good, other, "-o", tmp_path / "out"], ["diff", good, other], ["inspect", good, other]):
        done = main(*command)
        assert done.code == 2 and "q_proj" in done.err and done.err.count("\n") == 1
    assert not (tmp_path / "out").exists()


UPLOADS = {
    "not JSON": b"{", "not UTF-8": b"\xff", "a list": b"[1]", "null": b"null", "deep": b"[" * 100_000,
    "no client": b'{"num_examples": 2}', "no number": b'{"client": "a"}', "client is null": b'{"client": null}',
    "number of 10 000 digits": b'{"client": "a", "num_examples": ' + b"9" * 10_000 + b"}",
    "number is a word": b'{"client": "a", "num_examples": "many"}',
    "number is null": b'{"client": "a", "num_examples": null}',
    "number is a list": b'{"client": "a", "num_examples": [1]}',
    "number is 400 digits": b'{"client": "a", "num_examples": ' + b"9" * 400 + b"}",
    "number is NaN": b'{"client": "a", "num_examples": NaN}',
    "number is negative": b'{"client": "a", "num_examples": -3}',
}  # fmt: skip


@pytest.mark.parametrize("what", list(UPLOADS))
def test_an_upload_that_does_not_say_how_much_it_counts(
    what: str, good: Path, main: Callable[..., Said], tmp_path: Path
) -> None:
    """upload.json beside an adapter, where the weights are to come from it."""
    folder = put(tmp_path / "bad")
    (folder / "upload.json").write_bytes(UPLOADS[what])
    done = main("merge", good, folder, "--weights-from", "num_examples", "-o", tmp_path / "out")
    assert done.code == 2 and done.err.count("\n") == 1
    assert not (tmp_path / "out").exists()


# ---- drawn damage ----------------------------------------------------------------------------------------------------

drawn = settings(
    max_examples=50, deadline=None, derandomize=True, database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)  # fmt: skip


@st.composite
def damage(draw: st.DrawFn, content: bytes) -> bytes:
    """One to three flips, cuts and insertions, half of them in the first 300 bytes, where the structure is."""
    for _ in range(draw(st.integers(1, 3))):
        if not content:
            break
        end = draw(st.sampled_from([min(300, len(content)), len(content)]))
        at = draw(st.integers(0, end - 1))
        how = draw(st.sampled_from(["flip", "cut", "insert", "leave out", "letter"]))
        if how == "flip":
            content = content[:at] + bytes([content[at] ^ (1 << draw(st.integers(0, 7)))]) + content[at + 1 :]
        elif how == "cut":
            content = content[:at]
        elif how == "insert":
            content = content[:at] + draw(st.binary(min_size=1, max_size=8)) + content[at:]
        elif how == "leave out":
            content = content[:at] + content[at + draw(st.integers(1, 8)) :]
        else:
            content = (
                content[:at]
                + draw(st.sampled_from([b'"', b"{", b"[", b"-", b"9", b",", b"e", b"0"]))
                + content[at + 1 :]
            )
    return content


@pytest.mark.parametrize("kind", ["plain", "rich"])
@drawn
@given(data=st.data())
def test_damaged_weights_are_read_or_refused(kind: str, data: st.DataObject, tmp_path: Path) -> None:
    fields, shapes = KINDS[kind]
    folder = put(tmp_path / "bad", fields, data.draw(damage(shaped(shapes))))
    only_refused(folder, tmp_path / "again")


@pytest.mark.parametrize("kind", ["plain", "AdaLoRA"])
@drawn
@given(data=st.data())
def test_a_damaged_config_is_read_or_refused(kind: str, data: st.DataObject, tmp_path: Path) -> None:
    fields, shapes = KINDS[kind]
    folder = put(tmp_path / "bad", data.draw(damage(json.dumps(fields).encode())), shaped(shapes))
    only_refused(folder, tmp_path / "again")


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=5,
)


@drawn
@given(
    key=st.sampled_from([QA, QB, "__metadata__", "x"]),
    field=st.sampled_from(["dtype", "shape", "data_offsets", None]),
    value=JUNK | st.lists(st.integers(-1, 12), max_size=4) | st.sampled_from(["F16", "F8_E4M3", "I64", "BF16"]),
)
def test_a_header_with_anything_in_it_is_read_or_refused(
    key: str, field: str | None, value: object, tmp_path: Path
) -> None:
    header, data = tensors(SHAPES)
    header[key] = value if field is None else {**header.get(key, {}), field: value}
    only_refused(put(tmp_path / "bad", content=weights(header, data)), tmp_path / "again")


@drawn
@given(field=st.sampled_from(sorted({*FULL, *ADA})), value=JUNK, kind=st.sampled_from(sorted(KINDS)))
def test_a_config_with_anything_in_it_is_read_or_refused(field: str, value: object, kind: str, tmp_path: Path) -> None:
    fields, shapes = KINDS[kind]
    only_refused(put(tmp_path / "bad", fields | {field: value}, shaped(shapes)), tmp_path / "again")
