"""Files that a person names, through each command that takes one: every kind that is no ordinary file of a sane size is
refused at once, by its name and the reason. What a file may hold is known from POSIX kinds and its size in `stat`."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from fedlora.data.readers import open_table
from fedlora.errors import ConfigError, DataError
from fedlora.given_files import SETTINGS, parse_toml, read_given, read_toml
from support.command_line import Said

RUN = '[model]\nname = "demo"\n[method]\nname = "svd"\n[data]\ntrain = "{}"\n'
COMMANDS: dict[str, tuple[str, ...]] = {
    "run": ("run", "{}"),
    "privacy --plan": ("privacy", "{}", "--plan"),
    "init": ("flower", "init", "fed", "--server-name", "a.b", "--sites", "x=2", "--config", "{}"),
    "site": ("flower", "site", "s", "--name", "x", "--join", "{}", "--data", "d.csv", "--model", "demo"),
    "data": ("run", "run.toml"),
}
NO_FILE = "a folder, a pipe or a device"
KINDS: dict[str, tuple[Callable[[Path], object], str]] = {
    "pipe": (os.mkfifo, NO_FILE),
    "device": (lambda path: path.symlink_to("/dev/zero"), NO_FILE),
    "folder": (Path.mkdir, NO_FILE),
    "holes": (lambda path: os.truncate(path, 2**43) if path.write_bytes(b"") == 0 else None, "bytes"),
    "nothing": (lambda path: None, ""),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.timeout(120)
def test_every_kind_is_refused_at_once(
    command: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, main: Callable[..., Said]
) -> None:
    monkeypatch.chdir(tmp_path)
    make, reason = KINDS[kind]
    given = tmp_path / ("given.csv" if command == "data" else "given.toml")
    make(given)
    (tmp_path / "run.toml").write_text(RUN.format(given))
    said = main(*(word.format(given) for word in COMMANDS[command])).error()
    assert given.name in said or "/dev/zero" in said
    assert reason in said or "the suffix ''" in said  # a link to /dev/zero has no suffix


def test_the_limit_is_of_bytes_there_and_of_bytes_read(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"x" * 10)
    assert read_given(file, 10) == b"x" * 10
    with pytest.raises(OSError, match=r"10 bytes, .*9 "):
        read_given(file, 9)
    with pytest.raises(OSError, match="bytes, and 1 are allowed"):  # its size is 0 by stat
        read_given(Path("/proc/self/maps"), 1)
    with pytest.raises(OSError, match="can have that name"):
        read_given(Path("a\0b"))
    (tmp_path / "big.toml").write_bytes(b"#" * (SETTINGS + 1))
    with pytest.raises(ConfigError, match=r"the map .*big.toml .*: .* 4,194,305 bytes"):
        read_toml(tmp_path / "big.toml", "the map")


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("array.json", b"[" + b'{"text": "a"},' * 1_300_000 + b"]", "JSON array"),
        ("field.csv", b'text,label\n"' + b"a\n" * 9_000_000 + b'",no\n', "field limit"),
        (
            "keys.jsonl",
            b"{" + b",".join(b'"k%d": 1' % (k % 199_999) for k in range(200_000)) + b"}\n",
            "'k0' occurs twice",
        ),
    ],
)
def test_no_row_takes_the_memory_or_the_hour(name: str, content: bytes, reason: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=reason) as caught:
        open_table(tmp_path / name, ["text"])
    assert len(str(caught.value)) < 2_000


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a" + ".a" * 45_000 + " = 1", "more than 32 parts"),
        ("[a" + " . 'a'" * 45_000 + "]", "more than 32 parts"),
        ("a = " + "9" * 100_000, "Exceeds the limit"),
        ("a = " + "[" * 100_000, "nested too deep"),
    ],
)
def test_toml_of_a_stranger_takes_no_memory_by_the_square(text: str, reason: str) -> None:
    """90 KB of dots took 8 GB and 50 seconds in tomllib; a number of 100,000 digits was a traceback."""
    with pytest.raises(ValueError, match=reason):
        parse_toml(text)


def test_toml_of_people_is_taken() -> None:
    parts = ".".join(f"layer{k}" for k in range(32))
    many = "x = [" + ", ".join(f"{k}.{k}" for k in range(20_000)) + "]\n"
    assert parse_toml(f"{parts} = 1\n{many}y = '{'word. ' * 5000}'\nz = '{'a' * 10**6}'")["x"][1] == 1.1
