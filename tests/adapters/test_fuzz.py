"""Hostile adapters, drawn by grammar: each is refused in one line, or right. Kinds of evidence: property and oracle.

Asked of every operation on every case: an error of ours in one line of at most 3,000 letters, exit code 2, no control
characters, no traceback; or a result that peft loads and that is what peft's own updates of the inputs say, in float64.
At most 3 s of CPU time and 500 MB beyond what the process begins with. The inputs unchanged, nothing left beside the
result. `support.hostile` draws the cases, `support.hostile_judge` judges them in a process of its own.

    FEDLORA_FUZZ_SECONDS=3600 pytest tests/adapters/test_fuzz.py     an hour; without it the first 100 cases
    FEDLORA_FUZZ_SEED=7                                              other cases; without it always the same ones
    FEDLORA_FUZZ_KEEP=failures                                       where failing folders are kept
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings

from support import hostile_judge
from support.command_line import Said
from support.hostile import (
    CONFIG_FILE,
    KINDS,
    PREFIX,
    WEIGHTS_FILE,
    Asked,
    Block,
    Case,
    Draft,
    beside,
    cases,
    pair,
    sound,
)
from support.hostile_judge import Done, Judge, Verdict, build, by_peft, faults, measured, unseemly

SECONDS = float(os.environ.get("FEDLORA_FUZZ_SECONDS", "0"))
SEED = int(os.environ.get("FEDLORA_FUZZ_SEED", "16"))
ROUND = 25  # cases that hypothesis draws from one seed
ALWAYS = 4  # rounds that are played whatever time they take
pytestmark = pytest.mark.timeout(SECONDS * 2 + 900)


# What the fuzzer finds still, by the words of the judge, and why it is not mended. To be empty.
DRAWN_DEFECTS: dict[str, str] = {}


@pytest.fixture(scope="module")
def judge(forked: Any) -> Iterator[Judge]:
    found = Judge(forked)
    yield found
    found.stop()


def verdict_of(judge: Judge, case: Case, home: Path) -> Verdict:
    home.mkdir()
    for draft in case.drafts:
        draft.write(home)
    return judge(home, case.asked)


@pytest.mark.exhaustive
def test_nothing_drawn_is_accepted_that_is_wrong(judge: Judge, tmp_path: Path) -> None:
    """The first rounds, of one seed each, and as many more as the time allows. A failure is made smaller by hypothesis,
    and its folders are kept."""
    keep = Path(os.environ.get("FEDLORA_FUZZ_KEEP") or Path(tempfile.gettempdir()) / "fedlora-fuzz")
    until, first = time.monotonic() + SECONDS, SEED * 1_000_000
    number = first
    total = Verdict()
    failed = False

    def over() -> bool:
        return number >= first + ALWAYS and time.monotonic() >= until

    while not over():

        @seed(number)
        @settings(
            max_examples=ROUND, deadline=None, database=None, suppress_health_check=list(HealthCheck),
            phases=[Phase.generate, Phase.shrink],
        )  # fmt: skip
        @given(case=cases())
        def one_round(case: Case) -> None:
            nonlocal failed
            if not failed and over():
                return
            home = tmp_path / "home"
            try:
                verdict = verdict_of(judge, case, home)
                total.accepted += verdict.accepted
                total.refused += verdict.refused
                total.compared += verdict.compared
                broken = [what for what in verdict.broken if not any(re.search(x, what) for x in DRAWN_DEFECTS)]
                if broken:
                    failed = True
                    shutil.rmtree(keep, ignore_errors=True)
                    shutil.move(home, keep)
                    said = "\n  ".join(broken)
                    raise AssertionError(
                        f"{case}\n  {said}\nThe folders are in {keep}; again by FEDLORA_FUZZ_SEED={SEED}."
                    )
            finally:
                shutil.rmtree(home, ignore_errors=True)

        one_round()
        number += 1
    # A fuzzer that only sees refusals, or only sound files, says nothing.
    assert total.accepted and total.refused and total.compared, total


# ---- that the judge sees what is wrong -------------------------------------------------------------------------------


def drafts(kind: str, *changes: Callable[[Draft], object]) -> Case:
    made = []
    for k, change in enumerate(changes):
        draft = sound(KINDS[kind], k + 1)
        draft.name = "abc"[k]
        change(draft)
        made.append(draft)
    return Case(made, Asked(kind, tuple(draft.name for draft in made)))


def as_it_is(draft: Draft) -> None:
    pass


@pytest.mark.quick(5)
@pytest.mark.parametrize("kind", KINDS)
def test_sound_adapters_are_accepted_and_right(kind: str, judge: Judge, tmp_path: Path) -> None:
    """Two of each kind: what the fuzzer changes is sound before. One operation may say no: `export` does not
    write what it cannot tell."""
    verdict = verdict_of(judge, drafts(kind, as_it_is, as_it_is), tmp_path / "home")
    assert not verdict.broken, verdict.broken
    assert verdict.compared >= 3 and verdict.accepted >= 2 * 5 + 1, verdict


def config(**fields: object) -> Callable[[Draft], object]:
    return lambda draft: draft.config.update(fields)


def tensors(shapes: dict[str, tuple[int, ...]]) -> Callable[[Draft], object]:
    return lambda draft: draft.tensors.update({k: Block(s, "F64") for k, s in shapes.items()})


def renamed(old: str, new: str) -> Callable[[Draft], object]:
    def change(draft: Draft) -> None:
        draft.tensors = {k.replace(old, new): block for k, block in draft.tensors.items()}
        draft.config["target_modules"] = [*draft.config["target_modules"], new]

    return change


def full_of(value: float, dtype: str = "F64") -> Callable[[Draft], object]:
    def change(draft: Draft) -> None:
        for block in draft.tensors.values():
            block.dtype, block.numbers = dtype, torch.full(block.shape, value, dtype=torch.float64).numpy()

    return change


def called(name: str) -> Callable[[Draft], object]:
    return lambda draft: setattr(draft, "name", name)


# Attacks by hand, of which each broke a promise once: what -> (kind, the change of the first of two adapters).
NAMED: dict[str, tuple[str, Callable[[Draft], object]]] = {
    "a pair that no target names": ("linear", tensors(pair("model.layers.1.k_proj", 6, 5))),
    "a module that is excluded": ("linear", config(exclude_modules=["v_proj"])),
    "a layer that is not transformed": ("linear", config(layers_to_transform=[1])),
    "saved in full and adapted": ("linear", config(modules_to_save=["v_proj"])),
    "a saved module that is a pattern": ("linear", config(modules_to_save=["v.proj"])),
    "a saved module of no letters": ("linear", config(modules_to_save=[""])),
    "a saved module that is no pattern": ("linear", config(modules_to_save=["v_proj("])),
    "a convolution among all linear layers": ("convolutions", config(target_modules="all-linear")),
    "an embedding among all linear layers": ("embedding", config(target_modules="All-Linear")),
    "all linear layers but one": ("linear", config(target_modules="all-linear", exclude_modules=["v_proj"])),
    "all linear layers, one saved": ("linear", config(target_modules="all-linear", modules_to_save=["v_proj"])),
    "AdaLoRA's words for numbers": ("AdaLoRA", config(orth_reg_weight="false")),
    "AdaLoRA's patterns": ("AdaLoRA", config(alpha_pattern={"(?i)q_proj": 2})),
    "AdaLoRA's ranks as a list": ("AdaLoRA", config(rank_pattern=[1])),
    "classes that re does not know": ("linear", config(alpha_pattern={r"model\.layers\.0\.[[:alpha:]]_proj": 400})),
    "a fuzzy pattern": ("linear", config(alpha_pattern={"(?:q_prxj){e<=1}": 400})),
    "flags at the end": ("linear", config(alpha_pattern={"q_proj(?i)": 8})),
    "flags at the start of a key": ("linear", config(alpha_pattern={"(?i)q_proj": 8})),
    "a pattern that hangs": ("linear", config(alpha_pattern={"(([a-z_.0-9])+)+$x": 8})),
    "a pattern that does not compile in memory": ("linear", config(rank_pattern={"((a{1,999}){1,999}){1,999}": 2})),
    "an added bias of no module": (
        "added bias", tensors({f"{PREFIX}zzz.lora_B.bias": (4,)})),
    "an added bias of another length": (
        "added bias", tensors({f"{PREFIX}model.layers.0.v_proj.lora_B.bias": (1,)})),
    "an expert's name for a layer": ("experts", tensors(pair("model.layers.0.experts[0]", 6, 5))),
    "a sequence of colours in a name": ("linear", renamed("v_proj", "v\x9b31mproj")),
    "letters from right to left": ("linear", renamed("v_proj", "v\u202eproj")),
    "half a pair of letters": ("linear", renamed("v_proj", "v\ud800proj")),
    "markup in a name": ("linear", renamed("v_proj", "[blink]v")),
    "half a pair in the base's name": ("linear", config(base_model_name_or_path="a\ud800b")),
    "lines in the base's name": ("linear", config(base_model_name_or_path="a\nlicense: mit\n---\n")),
    "YAML in the base's name": ("linear", config(base_model_name_or_path="x: [y")),
    "a terminal's code in the base's name": ("linear", config(base_model_name_or_path="a\x1b[2Jb")),
    "a base's name of a megabyte": ("linear", config(base_model_name_or_path="a" * 10**6)),
    "an unknown value of a megabyte": ("linear", config(new_thing="x" * 10**6)),
    "an unknown name of 100,000 letters": ("linear", config(**{"n" * 10**5: 1})),
    "ten thousand unknown fields": ("linear", config(**{f"x{k}": None for k in range(10**4)})),
    "a dropout that is no number": ("linear", config(lora_dropout=float("nan"))),
    "a dropout of 7": ("linear", config(lora_dropout=7.0)),
    "a mapping to other classes": (
        "linear", config(auto_mapping={"base_model_class": "system", "parent_library": "os"})),
    "a type in small letters": ("linear", config(peft_type="lora")),
    "patterns of nothing": ("linear", config(rank_pattern=None)),
    "layers a billion times": ("linear", config(layer_replication=[[0, 10**9]])),
    "numbers as large as float32 has": ("linear", full_of(3e38, "F32")),
    "numbers that overflow in float64": ("linear", full_of(1e200)),
    "numbers next to nothing": ("linear", full_of(1e-310)),
    "metadata that safetensors refuses": ("linear", lambda draft: setattr(draft, "metadata", [1])),
    "a folder that closes a tag": ("linear", called("[/red]")),
    "a folder that is no UTF-8": ("linear", called(os.fsdecode(b"a\xffb"))),
    "a folder of two lines": ("linear", called("a\nb")),
    "a folder with a terminal's code": ("linear", called("a\x1b[31mb")),
    "an upload that is no JSON": ("linear", lambda draft: draft.more.append(beside("upload.json", b"{"))),
    "tokens twice": ("tokens", config(trainable_token_indices={"embed_tokens": [1, 1]})),
    "tokens beyond the vocabulary": ("tokens", config(trainable_token_indices={"embed_tokens": [1, 99]})),
}  # fmt: skip

# What still breaks one of the promises, and whose part of issue 16 mends it: the day that it holds, its line must go.
DEFECTS: dict[str, str] = {}


def known(name: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.xfail(strict=True, reason=DEFECTS[name])] if name in DEFECTS else []


@pytest.mark.quick(12)
@pytest.mark.parametrize("what", [pytest.param(name, marks=known(name)) for name in NAMED])
def test_a_named_attack_is_refused_in_a_line_or_right(what: str, judge: Judge, tmp_path: Path) -> None:
    """Beside a sound adapter of the same base."""
    kind, change = NAMED[what]
    verdict = verdict_of(judge, drafts(kind, change, as_it_is), tmp_path / "home")
    assert not verdict.broken, "\n".join(verdict.broken)


# ---- files that change while they are read ---------------------------------------------------------------------------


class Meddler:
    """Changes a file when a file of an adapter is opened for the nth time."""

    def __init__(self) -> None:
        self.opened, self.at, self.change = 0, -1, lambda: None
        self.home: Path | None = None
        sys.addaudithook(self._hear)

    def _hear(self, event: str, args: tuple[object, ...]) -> None:
        if event != "open" or self.home is None or not isinstance(args[0], str | os.PathLike):
            return
        if Path(args[0]).parent == self.home:
            self.opened += 1
            if self.opened == self.at:
                home, self.home = self.home, None
                self.change()
                self.home = home


@pytest.fixture(scope="module")
def meddler() -> Meddler:
    return Meddler()  # a hook cannot be taken away again


WAYS: dict[str, Callable[[Path, bytes], object]] = {
    "another file in its place": lambda path, new: (path.with_name("new").write_bytes(new),
                                                    path.with_name("new").replace(path)),
    "other bytes in it": lambda path, new: path.write_bytes(new),
    "cut": lambda path, new: os.truncate(path, path.stat().st_size - 8),
    "longer": lambda path, new: path.write_bytes(path.read_bytes() + bytes(8)),
}  # fmt: skip


@pytest.mark.quick(4)
@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("file", [CONFIG_FILE, WEIGHTS_FILE])
def test_a_file_that_changes_while_it_is_read(
    file: str, way: str, meddler: Meddler, main: Callable[..., Said], tmp_path: Path
) -> None:
    """At every moment that a file is opened: refused in a line, or the result of what was there before, or after."""
    a, b, other = (sound(KINDS["linear"], k) for k in (1, 2, 3))
    a.name, b.name, other.name = "a", "b", "other"
    a, b, other = (draft.write(tmp_path) for draft in (a, b, other))
    other_config = json.loads((other / CONFIG_FILE).read_text()) | {"lora_alpha": 6}
    (other / CONFIG_FILE).write_text(json.dumps(other_config))
    before, new = (a / file).read_bytes(), (other / file).read_bytes()
    (a / "untouched").touch()

    def merged(out: str) -> bytes | None:
        done = main("merge", a, b, "-o", tmp_path / out)
        if done.code:
            assert len(done.complaint().splitlines()) == 1
            return None
        return (tmp_path / out / WEIGHTS_FILE).read_bytes()

    old = merged("old")
    WAYS[way](a / file, new)
    sound_results = {old, merged("after"), None}
    (a / file).write_bytes(before)
    meddler.home, meddler.opened, meddler.at = a, 0, -1
    merged("count")
    moments, refusals = meddler.opened, 0
    for moment in range(1, moments + 1):
        meddler.opened, meddler.at, meddler.change = 0, moment, lambda: WAYS[way](a / file, new)
        found = merged(f"at{moment}")
        refusals += found is None
        assert found in sound_results, f"changed at the opening {moment} of {moments}"
        meddler.at = -1
        (a / file).write_bytes(before)
    meddler.home = None
    assert moments > 3 and refusals


# ---- that the judge itself is sound ----------------------------------------------------------------------------------


def test_the_oracle_is_the_product_of_the_factors(tmp_path: Path) -> None:
    """peft's update of one layer, by hand: alpha / r times B A, of what was drawn."""
    draft = sound(KINDS["linear"], 3)
    folder = draft.write(tmp_path)
    layers = KINDS["linear"].layers
    path = "model.layers.0.q_proj"
    keys = list(draft.tensors)
    names = [f"{PREFIX}{path}.lora_{factor}.weight" for factor in "AB"]
    A, B = (draft.tensors[name].content(3000 + keys.index(name)) for name in names)
    want = (
        4
        / 2
        * torch.frombuffer(bytearray(B), dtype=torch.float64).reshape(6, 2)
        @ torch.frombuffer(bytearray(A), dtype=torch.float64).reshape(2, 5)
    )
    got = by_peft(folder, layers)[f"{path}.weight"] - build(layers).state_dict()[f"{path}.weight"]
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


def test_the_judge_sees_a_wrong_result(tmp_path: Path) -> None:
    """The truth of one adapter asked for another: the comparison must fail."""
    one, other = tmp_path / "one", tmp_path / "other"
    a = sound(KINDS["linear"], 1).write(one)
    b = sound(KINDS["linear"], 2).write(other)
    layers = KINDS["linear"].layers
    base = {k: t.double() for k, t in hostile_judge.build(layers).state_dict().items()}
    A, B = ({k: t - base[k] for k, t in by_peft(folder, layers).items()} for folder in (a, b))
    size = {k: float(torch.linalg.vector_norm(t)) for k, t in A.items()}
    assert hostile_judge.compared(A, A, size, base, 1e-9) == ""
    assert "is off by" in hostile_judge.compared(B, A, size, base, 1e-9)
    key = "model.layers.0.q_proj.weight"
    assert hostile_judge.cut_well(A[key], A[key], "exact", 1e-9, 0.0) == ""
    assert "is off by" in hostile_judge.cut_well(0.9 * A[key], A[key], "2", 1e-9, 0.0)
    assert "has rank 2" in hostile_judge.cut_well(A[key], A[key], "1", 1e-9, 0.0)


def test_the_judge_sees_what_an_operation_breaks() -> None:
    """Faults of each kind, and a process that did nothing wrong."""
    assert faults(Done("x", 0)) == [] and faults(Done("x", 2, err="error: no.\n")) == []
    assert "exit code 1" in faults(Done("x", 1))[0]
    assert "2 lines" in faults(Done("x", 2, err="a\nb\n"))[0]
    assert "4,000 letters" in faults(Done("x", 2, err="a" * 4000))[0]
    assert "ends in KeyError" in faults(Done("x", 1, fault="KeyError"))[0]
    assert "s of CPU" in faults(Done("x", 0, seconds=3.5))[0] and "MB" in faults(Done("x", 0, megabytes=501))[0]
    for letter in "\x1b\x9b\x07\r\u202e\ud800":
        assert unseemly(f"a{letter}b")
    assert not unseemly("é[red]\n│ ‖B‖ 漢字")
    done = Done("x", 0)
    with measured(done):
        held = torch.ones(40 * 2**20)
        del held
    assert 100 < done.megabytes < 400


def test_a_process_that_hangs_or_dies_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forked: Any) -> None:
    monkeypatch.setattr(hostile_judge, "PATIENCE", 0.5)
    judge = Judge(forked, work=hostile_judge.stuck)
    assert judge(tmp_path, Asked("linear", ())).broken == ["operation merge hangs for 0.5 s"]
    assert "ends the process" in judge(tmp_path, Asked("linear", (), "die")).broken[0]
    judge.stop()
