"""Checkpoints: whole or absent, bit for bit, and nothing in a file can name code. Kind of evidence: contract, property.

Expected values are the values that were saved, compared byte by byte, and the next round run from them instead of from
the file. Damage is done to real files; a full disk is an OSError(ENOSPC) from the call that would meet it.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor

from fedlora import LoRA
from fedlora.core import files
from fedlora.core.checkpoint import load_newest, save
from fedlora.core.read_only import ReadOnly
from fedlora.errors import CheckpointError
from support.federations import noise
from support.states import content


@dataclass(frozen=True, eq=False)
class Box:
    """Anything at all, so that one type can hold every value under test."""

    value: Any


def loaded(directory: Path, kind: type[Any] = Box, *extra: type) -> Any:
    found = load_newest(directory, kind, *extra)
    assert found is not None
    return found[1]


def round_trip(directory: Path, value: object) -> Any:
    save(directory, 1, Box(value))
    return loaded(directory).value


def names(directory: Path) -> list[str]:
    return sorted(p.name for p in directory.iterdir())


# ----------------------------------------------------------------------------------------------------- whole runs


@dataclass(frozen=True, eq=False)
class Moment:
    velocity: Tensor
    notes: tuple[str, ...]
    count: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "count", len(self.notes))


@dataclass(frozen=True, eq=False)
class OwnState:
    """What `Method` allows: tensors, LoRAs, numbers, strings, None, other such dataclasses, tuples, mappings."""

    pair: LoRA
    moment: Moment | None
    scores: Mapping[str, tuple[float, ...]]
    best: float


def test_a_state_of_ones_own_round_trips(tmp_path: Path) -> None:
    """Its class is all that the reader needs: dataclasses inside it are found through annotations, and a field that no
    __init__ takes (init=False) is computed anew. Mappings are read-only: what was loaded cannot change."""
    pair = LoRA(noise((3, 2), "B"), noise((2, 4), "A"))
    state = OwnState(pair, Moment(noise((3,), "v"), ("a", "b")), {"a": (0.5, math.nan)}, -math.inf)
    save(tmp_path, 2, state)
    again = loaded(tmp_path, OwnState)
    assert content(again) == content(state) and isinstance(again.moment, Moment) and isinstance(again.scores, ReadOnly)


# --------------------------------------------------------------------------------------------------- single values


VALUES: dict[str, Any] = {
    "plain": (None, True, False, 0, 2**200, -1, 0.1, 1.0, "", 'Zürich / 日本 \n \x00 " \\'),
    "floats": (-0.0, 5e-324, 1.7976931348623157e308, math.nan, math.inf, -math.inf),
    "empty": ((), {}),
    "the newest last": {"zed": 1, "amy": {"z": 2, "a": 3}},
    "a mapping that looks like a node": {"tensor": "/value", "float": "nan", "dataclass": "Box", "fields": {}},
    "nan deep inside": {"a": (math.nan, {"b": -math.inf})},
}
TENSORS: dict[str, Tensor] = {
    "float64": noise((3, 4), "t"),
    "float16": noise((3, 4), "t", dtype=torch.float16),
    "bfloat16": noise((3, 4), "t", dtype=torch.bfloat16),
    "bool": torch.tensor([True, False]),
    "nan and inf": torch.tensor([math.nan, math.inf, -math.inf, -0.0, 5e-324]),
    "a scalar": torch.tensor(2.5),
    "of no elements": torch.zeros(3, 0),
    "transposed": noise((3, 4), "t").mT,
    "every other column": noise((3, 8), "t")[:, ::2],
    "expanded": torch.tensor([[1.0], [2.0]]).expand(2, 3),
    "a parameter": torch.nn.Parameter(torch.ones(2)),
}


def test_plain_values_round_trip_with_their_types(tmp_path: Path) -> None:
    for label in VALUES:
        assert content(round_trip(tmp_path, VALUES[label])) == content(VALUES[label]), label


def test_tensors_round_trip_bit_for_bit(tmp_path: Path) -> None:
    """Also where the stored one is a view: what comes back is its content, contiguous, without a graph."""
    for label in TENSORS:
        got = round_trip(tmp_path, TENSORS[label])
        assert content(got) == content(TENSORS[label]), label
        assert got.is_contiguous()
        assert not got.requires_grad


def test_a_tensor_begins_at_64_bytes_as_torch_lays_it_out(tmp_path: Path) -> None:
    """Where it begins elsewhere, BLAS rounds its products otherwise, and a resumed run would have other bits."""
    for tensor in round_trip(tmp_path, tuple(torch.ones(k, 3) for k in range(1, 8))):
        assert tensor.data_ptr() % 64 == 0


def test_names_with_slashes_are_kept_apart(tmp_path: Path) -> None:
    """Client ids and module paths are any strings: {"a/b": x} beside {"a": {"b": y}} must not share one place."""
    value = {"a/b": torch.zeros(2), "a": {"b": torch.ones(2)}, "": torch.full((2,), 2.0), "/": torch.full((2,), 3.0)}
    assert content(round_trip(tmp_path, value)) == content(value)


NOT_STORED: tuple[tuple[object, str], ...] = (
    ([1], "list at /value "),
    (b"bytes", "bytes at /value "),
    (np.float32(1), "float32 at /value "),
    (Box, "a type at /value "),
    ({1: 2}, "mapping at /value has keys"),
    ({"a": (1, {"b": [2]})}, "list at /value/a/1/b "),
    (torch.Size([2]), "Size at /value "),
    (HTTPStatus.OK, "HTTPStatus at /value "),
    (Box(Box({"deep": Path("x")})), r"a \w*Path at /value/value/value/deep "),
    (torch.zeros(2, dtype=torch.complex128), "/value"),
    ({"deep": torch.eye(2).to_sparse()}, "/value/deep"),
    (torch.zeros(2, device="meta"), "/value"),
)


def test_what_cannot_be_stored_is_refused_with_its_place(tmp_path: Path) -> None:
    """Before anything is written."""
    for value, message in NOT_STORED:
        with pytest.raises(CheckpointError, match=message):
            save(tmp_path / "new", 1, Box(value))
        assert not (tmp_path / "new").exists(), message


# --------------------------------------------------------------------------------------------------------- damage


def series(directory: Path, rounds: Sequence[int] = (1, 2, 3), keep: int = 9) -> list[Path]:
    return [save(directory, t, Box({"round": t, "x": torch.full((40,), float(t))}), keep=keep) for t in rounds]


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


@pytest.mark.parametrize("damage", [lambda p: flip(p, -1), shorten], ids=["a bit", "truncated"])
def test_a_damaged_newest_one_warns_and_the_one_before_it_is_used(
    damage: Callable[[Path], None], tmp_path: Path
) -> None:
    *_, newest = series(tmp_path)
    damage(newest)
    with pytest.warns(UserWarning, match=rf"{newest.name} is damaged: .* Trying") as caught:
        found = load_newest(tmp_path, Box)
    assert found is not None
    assert (found[0], found[1].value["round"], len(caught)) == (2, 2, 1)
    assert len(names(tmp_path)) == 3  # nothing is deleted: it may still be looked at


def rewritten(directory: Path, tree: object, tensors: Mapping[str, Tensor] | None = None) -> None:
    """A file with a right digest and a tree of one's own."""
    facts = tree if isinstance(tree, str) else json.dumps({"tree": tree, "run": ""})
    data = safetensors.torch.save(dict(tensors or {}), metadata={"checkpoint": facts})
    digest = hashlib.sha256(data).hexdigest()[:16]
    directory.mkdir(exist_ok=True)
    (directory / f"round-00009.{digest}.safetensors").write_bytes(data)


BOX = f"{Box.__module__}.Box"
FOREIGN: dict[str, object] = {
    "an unknown dataclass": {"dataclass": "Popen", "fields": {"args": "true"}},
    "an unknown dataclass inside": {"dataclass": BOX, "fields": {"value": {"dataclass": "Path", "fields": {}}}},
    "a field too many": {"dataclass": BOX, "fields": {"value": 1, "other": 2}},
    "an unknown node": {"dataclass": BOX, "fields": {"value": {"code": "1 + 1"}}},
    "a tensor that is not there": {"dataclass": BOX, "fields": {"value": {"tensor": "/nowhere"}}},
    "no number": {"dataclass": BOX, "fields": {"value": {"float": "__import__('os')"}}},
    "no JSON": "{",
}  # fmt: skip


def test_a_sound_file_of_something_else_is_refused(tmp_path: Path) -> None:
    """The types come from the reader. A file can only name dataclasses that the reader's own annotations reach."""
    for k, tree in enumerate(FOREIGN.values()):
        rewritten(tmp_path / str(k), tree)
        with (
            pytest.warns(UserWarning, match="does not hold a Box"),
            pytest.raises(CheckpointError, match="none of the 1 checkpoints"),
        ):
            load_newest(tmp_path / str(k), Box)


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 3, Box(1), of="mine")
    with (
        pytest.warns(UserWarning, match="of another run .*'mine', and this one is 'yours'"),
        pytest.raises(CheckpointError),
    ):
        load_newest(tmp_path, Box, of="yours")


# ---------------------------------------------------------------------------------------------------------- files


def test_other_files_are_ignored_and_left_alone(tmp_path: Path) -> None:
    """A file of another name, a digest that is none: neither read nor pruned. What a killed save left goes."""
    [path] = series(tmp_path, [1])
    files.unfinished(path).write_text("half")
    others = ["round-00008.safetensors", "round-00008.0123456789ABCDEF.safetensors", "notes.txt"]
    for name in others:
        (tmp_path / name).write_text("x")
    series(tmp_path, [2, 3], keep=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert loaded(tmp_path).value["round"] == 3
    assert set(others) < set(names(tmp_path))
    assert len(names(tmp_path)) == len(others) + 1


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_only_the_newest_are_kept(keep: int, tmp_path: Path) -> None:
    paths = series(tmp_path, range(1, 6), keep=keep)
    assert names(tmp_path) == [p.name for p in paths[-keep:]]
    again = save(tmp_path, 5, Box({"round": 5}), keep=keep)  # a round stored again takes no other's place
    assert names(tmp_path) == [p.name for p in [*paths[-keep:-1], again]]
    assert content(loaded(tmp_path)) == content(Box({"round": 5})), "the newer value, of another digest"


# ------------------------------------------------------------------------------------------------------- full disk


def refuse(*_: object, **__: object) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("owner", "name"),
    [(files, "open"), (os, "fsync"), (os, "replace")],
    ids=["open", "fsync", "replace"],
)
def test_a_full_disk_leaves_the_older_ones_and_no_part(owner: Any, name: str, tmp_path: Path) -> None:
    """Each call that can meet it. The error names round, size and cause; what was there stays, and loads."""
    series(tmp_path, [1, 2])
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(owner, name, refuse, raising=False)
        with pytest.raises(CheckpointError, match=r"round 3 \([\d,]+ bytes\) .*No space left"):
            save(tmp_path, 3, Box(3), keep=1)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before
    assert loaded(tmp_path).value["round"] == 2


def test_what_was_just_written_is_never_removed(tmp_path: Path) -> None:
    """Also where rounds of an abandoned trajectory lie there, which are later ones."""
    for round in (5, 6):
        save(tmp_path, round, Box(round))
    assert save(tmp_path, 2, Box(2), keep=1).exists()
