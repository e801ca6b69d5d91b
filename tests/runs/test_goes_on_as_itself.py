"""A run goes on as itself: every file of its folder, replaced by each kind of accident, is told or refused.

Kind of evidence: *enumeration*. The files are those that real runs left, so that a new file is asked here by itself.
For each file and each accident `--resume` either ends in the bytes of the run that was never stopped, and names what it
found, or exits with 2, naming the file. It never hangs, and never believes a file of another run. Oracle: the
uninterrupted run, made apart; digests of files are taken here, by hashlib.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from support.command_line import Said, options
from support.known_warnings import FUTURE_NAMES, NOT_ON_THE_HUB
from support.projects import configured, make_project, ran, without_seconds
from support.training_data import classification, rows

pytestmark = [FUTURE_NAMES, NOT_ON_THE_HUB]

SETS = ("data.validation=valid.jsonl", "data.test=test.jsonl", "train.steps=2", "clients.ranks=[2,2]")
ROUNDS, STOPPED = 4, 3
SECONDS = 60  # a case takes less than one
OWN_TIMES = ("SHA256SUMS",)  # digests of files with times in them
CHECKPOINT = re.compile(r"(round-\d{5,})\.[0-9a-f]{16}(\.safetensors)")
Accident = Callable[[Path, Path, Path], None]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project whose data are the same for each seed, and its runs: whole, stopped, of another seed, shorter."""
    root = make_project(tmp_path_factory.mktemp("itself"))
    for name, seed in (("valid", 7), ("test", 8)):
        (root / f"{name}.jsonl").write_text(rows(classification(40, seed)))
    runs = {
        "finished": (f"run.rounds={ROUNDS}", None), "finished-older": (f"run.rounds={ROUNDS - 1}", None),
        "stopped": (f"run.rounds={ROUNDS}", STOPPED), "stopped-older": (f"run.rounds={ROUNDS}", STOPPED - 1),
    }  # fmt: skip
    for name, (rounds, stop) in runs.items():
        ran(configured(root, *SETS, rounds), root / name, stop)
    for name in ("finished", "stopped"):
        ran(configured(root, *SETS, runs[name][0], "run.seed=5"), root / f"{name}-other", runs[name][1])
    return root


def files_of(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def end_state(folder: Path) -> dict[str, Any]:
    """File -> what it says but for times, the commit, and who wrote the card."""
    found: dict[str, Any] = {}
    for name in sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()):
        path = folder / name
        if path.is_symlink() or not path.is_file():
            found[name] = "special"
        elif name == "metrics.jsonl":
            lines = [without_seconds(json.loads(line)) for line in path.read_text().splitlines()]
            found[name] = [{key: value for key, value in line.items() if key != "digest"} for line in lines]
        elif name.endswith(".json") and "/" not in name:
            said = without_seconds(json.loads(path.read_text()))
            found[name] = {key: value for key, value in said.items() if key not in ("commit", "digest")}
        elif name not in OWN_TIMES:
            kept = [line for line in path.read_bytes().split(b"\n") if not line.startswith(b"| code |")]
            found[name] = hashlib.sha256(b"\n".join(kept)).hexdigest()
    return found


def counterpart(path: Path, folder: Path, source: Path) -> tuple[Path, Path] | None:
    """The file of another run that stands for this one, and the place that it takes. A checkpoint's name goes with its
    content, as in a copy; the round in it is this file's, so that only what the file says inside is wrong."""
    there = source / path.relative_to(folder)
    match = CHECKPOINT.fullmatch(path.name)
    if match is None:
        return (there, path) if there.is_file() else None
    candidates = sorted(there.parent.glob("round-*.safetensors"))
    same = [one for one in candidates if one.name.startswith(match[1])]
    if not candidates:
        return None
    chosen = same[0] if same and same[0].name != path.name else candidates[0]
    digest = hashlib.sha256(chosen.read_bytes()).hexdigest()[:16]
    return chosen, path.with_name(f"{match[1]}.{digest}{match[2]}")


def replaced(path: Path, folder: Path, source: Path) -> bool:
    found = counterpart(path, folder, source)
    if found is None or found[0].read_bytes() == path.read_bytes():
        return False
    path.unlink()
    shutil.copyfile(*found)
    return True


def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    where = content.find(b'"lr"') + 1 if path.name == "config.json" else len(content) // 2  # its middle may be a path
    content[where] ^= 4
    path.write_bytes(content)


def instead(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink()
    make(path)


ACCIDENTS: Mapping[str, Callable[[Path, Path], bool | None]] = {
    "missing": lambda path, folder: path.unlink(),
    "another seed's": lambda path, folder: replaced(path, folder, Path(f"{folder}-other")),
    "older": lambda path, folder: replaced(path, folder, Path(f"{folder}-older")),
    "truncated": lambda path, folder: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]) and None,
    "one bit": lambda path, folder: flipped(path),
    "fifo": lambda path, folder: instead(path, os.mkfifo),
    "directory": lambda path, folder: instead(path, Path.mkdir),
    "dangling link": lambda path, folder: instead(path, lambda p: p.symlink_to("nowhere")),
}


@contextmanager
def within(seconds: int) -> Iterator[None]:
    def ring(*_: object) -> None:
        raise TimeoutError(f"nothing came of it in {seconds} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def wrong(kind: str, name: str, said: Said, told: str, folder: Path, whole: Mapping[str, Any]) -> str | None:
    """What the outcome lacks, in words."""
    everything = told + said.err
    plain = CHECKPOINT.sub(r"\1", Path(name).name)
    ended = end_state(folder) if said.code == 0 else {}
    differ = [path for path in sorted({*ended, *whole}) if ended.get(path) != whole.get(path)]
    if "Traceback" in everything:
        return "a traceback"
    if said.code == 0 and not differ and kind == "stopped" and name.startswith("checkpoints/round-00002"):
        return None  # an older state than the newest: it was not read, and is not there at the end
    if plain not in everything and f"{Path(name).parts[0]}/" not in everything.replace(str(folder), ""):
        return f"nothing names it (exit {said.code}): {everything[-200:]!r}"
    if said.code == 2:
        errors = [line for line in said.err.splitlines() if line.startswith("error: ")]
        good = len(errors) == 1 and re.search(r"[Rr]estore|[Pp]ut|[Rr]emove|[Mm]ove|--out", errors[0])
        return None if good else f"a refusal that does not say what to do: {said.err[-200:]!r}"
    if said.code:
        return f"exit {said.code}: {everything[-200:]!r}"
    if kind == "finished" and all(path.startswith("checkpoints/") for path in differ):
        return None  # states that the result does not need: their owner may have made room
    return f"told, and yet another end: {differ}" if differ else None


@pytest.mark.timeout(900)
@pytest.mark.parametrize("every", [8, pytest.param(1, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("kind", ["stopped", "finished"])
def test_each_file_and_each_accident(
    made: Path, kind: str, every: int, tmp_path: Path, main: Callable[..., Said],
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """every: of the table of files and accidents, each so many-th; in `make test` each file meets one of the eight."""
    caplog.set_level(logging.INFO)
    whole, failures, asked = end_state(made / "finished"), [], 0
    for row, name in enumerate([None, *files_of(made / kind)]):
        for accident, happens in list(ACCIDENTS.items())[row % every :: every]:
            for source in tmp_path.glob("*"):
                shutil.rmtree(source)
            for suffix in ("", "-other", "-older"):
                shutil.copytree(made / f"{kind}{suffix}", tmp_path / f"{kind}{suffix}")
            folder = tmp_path / kind
            if name is not None and happens(folder / name, folder) is False:
                continue  # the same bytes in both runs, or no such file there
            caplog.clear()
            asked += 1
            try:
                with within(SECONDS):
                    said = main("run", made / "config.toml", "--out", folder, "--resume",
                                *options([*SETS, f"run.rounds={ROUNDS}"]))  # fmt: skip
            except (Exception, TimeoutError) as error:
                failures.append(f"{name}, {accident}: {type(error).__name__}: {error}")
                continue
            if name is None:  # nothing happened: then the run goes on, and there is nothing to tell
                assert said.code == 0 and end_state(folder) == whole, said.err
                break
            if found := wrong(kind, name, said, caplog.text, folder, whole):
                failures.append(f"{name}, {accident}: {found}")
    print(f"{kind}: {len(failures)} of {asked} failed")
    assert not failures, f"{len(failures)} of {asked}:\n" + "\n".join(failures)
