"""What strangers wrote, on a screen: never a control sequence, never markup, never a second line of an error.

Names of folders, modules and base models hold what would act on a terminal or on rich; what is printed is compared with
the letters that may be there.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import fedlora.cli
from fedlora import Adapter, write_adapter
from fedlora.adapters.writer import AdapterSpec
from support.adapter_folders import lora
from support.command_line import Said

MODULE = "layers.0.q_proj"
# Markup, a picture's name, escapes, a change of direction, ends of lines, and what is no UTF-8.
FOLDER = os.fsdecode(b"[red]x[b]:fire: a\x1b[31mb\xc2\x9b31mc\x07\xe2\x80\xaeb\nb\rc\xff b")


def calm(text: str) -> bool:
    """Nothing but letters and the ends of lines."""
    return all(letter.isprintable() or letter == "\n" for letter in text)


@pytest.mark.parametrize("command", ["inspect", "diff", "validate", "merge", "refusal"])
def test_names_are_letters(command: str, main: Callable[..., Said], tmp_path: Path) -> None:
    try:
        a = _one(tmp_path / FOLDER)
    except OSError:
        pytest.skip("this file system does not take such a name")
    b, out = _one(tmp_path / "b"), tmp_path / "out"
    words = {"merge": ["merge", a, b, "-o", out], "refusal": ["validate", a, "--max-bytes", 1]}
    done = main(*words.get(command, [command, a, b]))
    assert done.code == (2 if command == "refusal" else 0), done.err
    assert calm(done.out) and calm(done.err) and done.err.count("\n") <= 1
    if command in ("inspect", "diff", "merge"):
        assert MODULE in done.out
    if command == "merge":
        assert calm((out / "README.md").read_text(encoding="utf-8"))


def _one(folder: Path) -> Path:
    """An adapter of one module, of a base with markup for a name."""
    spec = AdapterSpec({"peft_type": "LORA", "target_modules": [MODULE], "base_model_name_or_path": "[b]:fire:"}, 2.0)
    write_adapter(folder, Adapter({MODULE: lora(6, 2, 5, "x")}), spec)
    return folder


def test_streams_of_a_narrow_encoding_take_codes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables have letters that such streams have not; so may a folder's name. Strict ones, as Python makes them of
    PYTHONIOENCODING, in this process."""
    a, b = _one(tmp_path / "ä日"), _one(tmp_path / "b")
    streams = {name: io.TextIOWrapper(io.BytesIO(), encoding="ascii") for name in ("stdout", "stderr")}
    for name, stream in streams.items():
        monkeypatch.setattr(sys, name, stream)
    monkeypatch.setattr(sys, "argv", ["fedlora", "inspect", str(a), str(b)])
    with pytest.raises(SystemExit) as ended:
        fedlora.cli.main()
    written = b""
    for stream in streams.values():
        stream.flush()
        written += stream.buffer.getvalue()  # type: ignore[attr-defined]
    monkeypatch.undo()
    assert not ended.value.code and b"Error" not in written
    assert rb"\u65e5" in written and written.decode("ascii")
