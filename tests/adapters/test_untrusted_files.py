"""Files that change while they are read, links, JSON's bounds, and the sizes of numbers read in pieces.

What is expected follows from what was done to the files, from json and torch themselves, and from plain loops.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedlora import Adapter, LoRA, read_adapter, write_adapter
from fedlora.adapters import untrusted_files
from fedlora.adapters.io import AdapterSpec
from fedlora.adapters.limits import Limits
from fedlora.adapters.reader import CONFIG_FILE, WEIGHTS_FILE, AdapterFile
from fedlora.adapters.untrusted_files import StrangersFile, header_of, largest_of_each
from fedlora.errors import AdapterFormatError
from fedlora.given_files import parse_json
from support.command_line import Said

drawn = settings(
    max_examples=100, deadline=None, derandomize=True, database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)  # fmt: skip
SPEC = AdapterSpec({"peft_type": "LORA", "target_modules": ["q", "v"], "modules_to_save": ["head"]}, 2.0)


def saved(folder: Path, value: float = 1.0, modules: tuple[str, ...] = ("q", "v")) -> Path:
    pairs = {name: LoRA(torch.full((6, 2), value), torch.full((2, 5), value)) for name in modules}
    write_adapter(folder, Adapter(pairs, {"head.weight": torch.full((3, 6), value)}), SPEC)
    return folder


# ---- files that change while they are read -------------------------------------------------------------------------


def rewritten(path: Path) -> None:
    """Other bytes in the same file, of the same length, and the old time put back."""
    facts, content = path.stat(), bytearray(path.read_bytes())
    content[-1] ^= 1
    with path.open("r+b") as file:
        file.write(content)
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))


def replaced(path: Path) -> None:
    """Another file of the same bytes in its place."""
    shutil.copy2(path, path.with_name("beside"))
    path.with_name("beside").replace(path)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def grown(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"x")


def made_link(path: Path) -> None:
    path.rename(path.with_name("beside"))
    path.symlink_to("beside")


def made_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


NOTICED = r"has changed|ordinary file|cannot be read"
CHANGES = (rewritten, replaced, cut, grown, made_link, made_fifo)


@pytest.mark.parametrize("change", CHANGES)
def test_weights_that_change_after_they_were_opened(change: Callable[[Path], None], tmp_path: Path) -> None:
    file = AdapterFile(saved(tmp_path / "a"))
    file.lora("q")
    change(tmp_path / "a" / WEIGHTS_FILE)
    for read in (lambda: file.lora("v"), lambda: file.head("head.weight"), file.check, file.sha256):
        with pytest.raises(AdapterFormatError, match=NOTICED):
            read()


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", [CONFIG_FILE, WEIGHTS_FILE])
def test_a_file_that_changes_within_a_read(
    change: Callable[[Path], None], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the first and the second half of its bytes: what was read is of no file that there was."""
    folder = saved(tmp_path / "a")
    fill = StrangersFile._fill

    def slow(self: StrangersFile, file: Any, begin: int, into: memoryview) -> None:
        half = len(into) // 2
        fill(self, file, begin, into[:half])
        if self.path.name == name:
            monkeypatch.setattr(StrangersFile, "_fill", fill)
            change(self.path)
        fill(self, file, begin + half, into[half:])

    monkeypatch.setattr(StrangersFile, "_fill", slow)
    with pytest.raises(AdapterFormatError, match=NOTICED):
        AdapterFile(folder)


def test_a_config_that_changes_before_the_weights_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The two files belong together: half a folder of yesterday and half of today is no adapter."""
    folder, other = saved(tmp_path / "a"), saved(tmp_path / "b", 2.0)

    def swap(file: StrangersFile, limits: Limits) -> Any:
        for name in (CONFIG_FILE, WEIGHTS_FILE):
            shutil.copy(other / name, folder / name)
        return header_of(StrangersFile(file.path), limits)

    monkeypatch.setattr("fedlora.adapters.reader.header_of", swap)
    with pytest.raises(AdapterFormatError, match=r"adapter_config\.json has changed"):
        AdapterFile(folder)


# ---- what is no file of the directory ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [CONFIG_FILE, WEIGHTS_FILE])
def test_a_socket(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved(tmp_path / "a")
    (folder / name).unlink()
    monkeypatch.chdir(folder)  # the names of sockets are short
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(name)
        with pytest.raises(AdapterFormatError, match="not an ordinary file"):
            AdapterFile(folder)


def test_the_hub_s_cache_below_a_snapshot(tmp_path: Path) -> None:
    """An adapter in a folder of its repository links to ../../../blobs."""
    cache = tmp_path / "models--some--one"
    folder = saved(cache / "snapshots" / "abc" / "checkpoint-5")
    (cache / "blobs").mkdir()
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        (folder / name).rename(cache / "blobs" / name[:9])
        (folder / name).symlink_to(f"../../../blobs/{name[:9]}")
    AdapterFile(folder).check()


@pytest.mark.parametrize("how", ["another name", "blobs is a link", "a folder in blobs", "another repository"])
def test_a_cache_that_is_none(how: str, tmp_path: Path) -> None:
    """A stranger's folders may be called as the cache's are; a secret beside them stays one."""
    cache = tmp_path / ("repository" if how == "another name" else "models--some--one")
    folder = saved(cache / "snapshots" / "abc")
    secret = saved(tmp_path / "secret") / WEIGHTS_FILE
    blobs = cache / "blobs"
    if how == "blobs is a link":
        blobs.symlink_to(secret.parent)
        target = blobs / secret.name
    else:
        place = {"a folder in blobs": blobs / "deep", "another repository": tmp_path / "models--x--y" / "blobs"}
        target = place.get(how, blobs) / "abc"
        target.parent.mkdir(parents=True)
        shutil.copy(secret, target)
    (folder / WEIGHTS_FILE).unlink()
    (folder / WEIGHTS_FILE).symlink_to(target)
    with pytest.raises(AdapterFormatError, match="is a link"):
        AdapterFile(folder)


# ---- JSON ----------------------------------------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from('[]{}",\\'), max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=40,
)  # fmt: skip


def depth(value: Any) -> int:
    if not isinstance(value, list | dict):
        return 0
    return 1 + max(map(depth, value.values() if isinstance(value, dict) else value), default=0)


@drawn
@given(JSON, st.integers(1, 6), st.booleans())
def test_json_means_what_json_says_up_to_the_depth(value: Any, most: int, ascii_only: bool) -> None:
    raw = json.dumps(value, ensure_ascii=ascii_only).encode()
    if depth(value) > most:
        with pytest.raises(ValueError, match="nested too deeply"):
            parse_json(raw, depth=most)
    else:
        assert parse_json(raw, depth=most) == value


PARTS = (b"[", b"]", b"{", b"}", b'"', b",", b":", b"\\", b"1e", b"-", b"n", b"null", b"[]", b'"a":', b"NaN", b"\xff")


@drawn
@given(st.lists(st.sampled_from(PARTS), max_size=40))
def test_anything_is_json_or_refused(parts: list[bytes]) -> None:
    raw = b"".join(parts)
    try:
        found = parse_json(raw)
    except ValueError as error:
        assert str(error).isprintable()
    else:
        assert found == json.loads(raw)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b'\xef\xbb\xbf{"a": 1}', "byte order mark"), (b'{"a": "\xff"}', "not UTF-8 at byte 7"),
        (b'{"a": "\\ud800"}', "half a letter"), (b'{"\\udfff": 1}', "half a letter"),
        (b'["\\ud83d\\ud83d"]', "half a letter"),
        (b"[NaN]", "NaN"),
        (b"[Infinity]", "Infinity"), (b"[-Infinity]", "Infinity"), (b"[1e999]", "beyond every float"),
        (b"[" + b"1" * 600 + b"]", "500 digits"), (b'{"a": 1, "b": 2, "a": 1}', "'a' occurs twice"),
        (b'{"x": {"\\u0061": 1, "a": 2}}', "'a' occurs twice"), (b"", "Expecting value"), (b"[1,]", ""),
        (b'["a\nb"]', "control character"),
    ],
)  # fmt: skip
def test_json_that_is_refused(text: bytes, why: str) -> None:
    with pytest.raises(ValueError, match=rf"(?i){why}"):
        parse_json(text)


def test_whole_letters_in_halves_are_letters() -> None:
    assert parse_json(b'"\\ud83d\\ude00"') == "\U0001f600"


@pytest.mark.parametrize("where", ["base_model_name_or_path", "target_modules", "task_type", "a new field", "upload"])
def test_half_a_letter_anywhere(where: str, main: Callable[..., Said], tmp_path: Path) -> None:
    folder = saved(tmp_path / "a")
    path = folder / ("upload.json" if where == "upload" else CONFIG_FILE)
    found = {"client": "x\ud800", "num_examples": 1} if where == "upload" else json.loads(path.read_text())
    if where != "upload":
        found[where] = ["q\udc00"] if where == "target_modules" else "\ud800"
    path.write_text(json.dumps(found))
    other = saved(tmp_path / "b")
    (other / "upload.json").write_text('{"client": "b", "num_examples": 1}')
    more = ["--weights-from", "num_examples"] if where == "upload" else []
    said = main("merge", other, folder, "-o", tmp_path / "out", *more).complaint()
    assert "half a letter" in said and not (tmp_path / "out").exists()


# ---- numbers -------------------------------------------------------------------------------------------------------

NUMBERS = st.sampled_from([0.0, -0.0, 1.0, -2.5, 99.0, 101.0, -3e4, 6e4, 1e-7, math.inf, -math.inf, math.nan])


TENSORS = st.tuples(st.sampled_from(["F32", "F16", "BF16", "F64", "I32"]), st.lists(NUMBERS, max_size=5))


@drawn
@given(made=st.lists(TENSORS, max_size=12))
def test_the_largest_number_of_each_tensor(made: list[tuple[str, list[float]]], tmp_path: Path) -> None:
    """A bound for each, of up to 100; above, the number itself; Inf and NaN as such. Pieces are of 16 bytes here."""
    header, data, values = {}, b"", {}
    for k, (dtype, numbers) in enumerate(made):
        tensor = torch.tensor([0.0 if dtype == "I32" else x for x in numbers]).to(untrusted_files._TYPES[dtype])
        block = tensor.view(torch.uint8).numpy().tobytes() if numbers else b""
        header[f"t{k}"] = {"dtype": dtype, "shape": [len(numbers)], "data_offsets": [len(data), len(data) + len(block)]}
        data += block
        if dtype != "I32":
            values[f"t{k}"] = tensor
    raw = json.dumps(header).encode()
    (tmp_path / "w").write_bytes(struct.pack("<Q", len(raw)) + raw + data)
    file, before = StrangersFile(tmp_path / "w"), untrusted_files._PIECE
    untrusted_files._PIECE = 16
    try:
        found = largest_of_each(file, header_of(file, Limits()))
    finally:
        untrusted_files._PIECE = before
    assert set(found) == set(values)
    for key, tensor in values.items():
        want = float(tensor.abs().max()) if tensor.numel() else 0.0
        if math.isfinite(want) and want <= 100:
            assert want <= found[key] <= 100
        else:
            assert found[key] == want or (math.isnan(found[key]) and math.isnan(want))


@pytest.mark.parametrize(
    ("B", "A", "sound"),
    [(1.0, 1.0, True), (1e6, 1e-6, True), (1e6, 1e6, True), (1e-40, 1e-40, True), (-0.0, 1.0, True), (3e38, 1.0, False),
     (1.0, -3e38, False), (1e10, 1e10, False), (math.inf, 0.0, False), (0.0, math.nan, False)],
)  # fmt: skip
def test_numbers_that_no_update_has(B: float, A: float, sound: bool, main: Callable[..., Said], tmp_path: Path) -> None:
    """validate, merge and reading judge alike; what is taken is finite in every result."""
    folder = tmp_path / "a"
    saved(folder)
    raw = (folder / WEIGHTS_FILE).read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + length])
    data = bytearray(raw[8 + length :])
    for key, value in (("base_model.model.q.lora_B.weight", B), ("base_model.model.q.lora_A.weight", A)):
        begin, end = header[key]["data_offsets"]
        data[begin:end] = struct.pack("<f", value) * ((end - begin) // 4)
    (folder / WEIGHTS_FILE).write_bytes(raw[: 8 + length] + bytes(data))
    commands: list[list[object]] = [
        ["validate", folder], ["merge", folder, saved(tmp_path / "b"), "-o", tmp_path / "out"],
                                    ["inspect", folder], ["diff", folder, folder]]  # fmt: skip
    for command in commands:
        done = main(*command)
        assert done.code == (0 if sound else 2), (command, done.err)
        if not sound:
            assert "NaN or Inf" in done.complaint() or "1e+15" in done.complaint()
    if sound:
        both = read_adapter(tmp_path / "out")[0]
        assert all(bool(torch.isfinite(t).all()) for lora in both.modules.values() for t in _all(lora))


def _all(lora: LoRA) -> list[Tensor]:
    return [*lora.factors, lora.delta()]


@pytest.mark.parametrize("place", [0, 4096, 2**21, 2**22 - 4, 2**22, 2**23 - 4])
def test_a_number_between_two_holes_is_seen(place: int, tmp_path: Path) -> None:
    """Holes of a sparse file are left out, and what lies between them is not."""
    sizes = {"A": [1, 2**20], "B": [2**20, 1]}
    entries = [
        {"dtype": "F32", "shape": shape, "data_offsets": [k << 22, (k + 1) << 22]}
        for k, shape in enumerate(sizes.values())
    ]
    header = {f"base_model.model.q.lora_{side}.weight": entry for side, entry in zip(sizes, entries, strict=True)}
    raw = json.dumps(header).encode()
    with (tmp_path / WEIGHTS_FILE).open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        file.truncate(8 + len(raw) + 2**23)
        file.seek(8 + len(raw) + place)
        file.write(struct.pack("<f", math.inf))
    (tmp_path / CONFIG_FILE).write_text('{"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["q"]}')
    with pytest.raises(AdapterFormatError, match="NaN or Inf"):
        AdapterFile(tmp_path).check()
