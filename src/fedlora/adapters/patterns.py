r"""Which patterns of a config match which names, as peft's `re` decides it, in bounded time and memory.

Names, escaped or not, are patterns too, and nearly all that files hold: those are looked up. What is left is matched by
the same `re` in a child process with limits of its own (`pattern_child`), all questions about one file at once. What
does not end there would not end in peft either, which matches without a limit when it loads the adapter.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Literal

from fedlora.adapters.pattern_child import BROKEN, OUT_OF_MEMORY
from fedlora.errors import AdapterFormatError

# How peft 0.21 asks: rank_pattern and alpha_pattern for the end of a name; target_modules and exclude_modules for the
# whole of it; modules_to_save for some words of it; layers_pattern for the words before the number of a layer.
Kind = Literal["end", "whole", "inside", "layer"]
_WRAPPED: Mapping[Kind, str] = {
    "end": r"(.*\.)?({})$", "whole": "{}", "inside": r"(^|.*\.){}($|\..*)", "layer": r"(?:^|.*?\.){}\.(?P<idx>\d+)\.",
}  # fmt: skip
_SPECIAL = frozenset(r".^$*+?{}[]\|()")
Spots = tuple[int, ...]
_Table = dict[int, dict[Spots, dict[str, int]]]


@dataclass(frozen=True)
class PatternLimits:
    """What the patterns of one file may be and cost.

    length: letters of one; real ones for whole models have up to a thousand. total: letters of all, for some hundred
    thousand names. groups: opening brackets of one, so no parser gets deeper. patterns: those that are no plain names;
    files have a few. counts: the product of nested counts, such as 6 of (a{2}b){3}; names have 512 letters. seconds: of
    processor time in the child; sane patterns take milliseconds. clock: seconds by the clock, where other work keeps
    the machine busy. memory: bytes of the child. lookups: steps in looking up plain names, of some 50 ns each.
    """

    length: int = 4_000
    total: int = 8_000_000
    groups: int = 200
    patterns: int = 1_000
    counts: int = 1_000
    seconds: int = 2
    clock: int = 20
    memory: int = 128 * 2**20
    lookups: int = 25_000_000


@dataclass(frozen=True)
class Question:
    """Patterns, or exact names, of one field of a config, asked of all names or (first) of the first so many."""

    field: str
    kind: Kind
    patterns: tuple[str, ...]
    exact: bool = False
    first: int | None = None


def matches(
    questions: Sequence[Question], names: Sequence[str], limits: PatternLimits | None = None
) -> list[list[int | None]]:
    """For each question, for each name that it concerns: the number of the first pattern that matches, or None.

    Of kind "layer", the number of the layer, by the first pattern that matches.

    Raises:
        AdapterFormatError: a pattern beyond `limits` or that `re` does not take; matching that does not end; no child
            process on this machine.

    Example:
        >>> ranks = Question("rank_pattern", "end", ("q_proj", r"^model\\.layers\\.1\\.v_proj"))
        >>> matches([ranks], ["model.layers.0.q_proj", "model.layers.1.v_proj", "x.model.layers.1.v_proj"])
        [[0, 1, None]]
    """
    limits = limits or PatternLimits()
    odd = any("\n" in name for name in names)  # $ and . are special about that letter
    budget = [limits.lookups]
    answers: list[list[int | None]] = []
    left: list[tuple[int, list[int], Question]] = []  # which question, which of its patterns
    for q, question in enumerate(questions):
        if not question.exact:
            _check_size(question, limits)
        asked = names if question.first is None else names[: question.first]
        if question.kind == "layer":
            plain = None if odd and question.patterns else _words(question.patterns)
            found: list[int | None] = [None] * len(asked) if plain is None else [_layer(name, plain) for name in asked]
            others = [] if plain is not None else list(range(len(question.patterns)))
        else:
            table = _Names(question.kind, budget, question.field)
            others = [k for k, pattern in enumerate(question.patterns)
                      if not table.take(k, pattern, exact=question.exact, odd=odd)]  # fmt: skip
            found = [table.first(name) for name in asked]
        answers.append(found)
        if others and asked:
            left.append((q, others, question))
    if not left:
        return answers
    _check_number([(question, others) for _, others, question in left], limits)
    for (q, others, question), told in zip(left, _told(left, names, limits), strict=True):
        for n, answer in enumerate(told[: len(answers[q])]):
            if answer is None:
                continue
            before = answers[q][n]
            if question.kind == "layer":
                answers[q][n] = int(answer)
            elif before is None or others[int(answer)] < before:
                answers[q][n] = others[int(answer)]
    return answers


# --------------------------------------------------------------------------------------------------- sizes, by the text


def _check_size(question: Question, limits: PatternLimits) -> None:
    """Bounds that need no parser."""
    total = 0
    for pattern in question.patterns:
        total += len(pattern)
        if len(pattern) > limits.length:
            raise _refusal(
                question.field, pattern, f"has {len(pattern):,} letters, more than the {limits.length:,} allowed"
            )
        if pattern.count("(") > limits.groups:
            raise _refusal(
                question.field, pattern, f"opens {pattern.count('('):,} brackets, more than the {limits.groups} allowed"
            )
    if total > limits.total:
        raise AdapterFormatError(
            f"{question.field}: its patterns have {total:,} letters, more than the {limits.total:,} allowed."
        )


def _check_number(asked: Iterable[tuple[Question, Sequence[int]]], limits: PatternLimits) -> None:
    for question, others in asked:
        if len(others) > limits.patterns:
            raise AdapterFormatError(
                f"{question.field}: {len(others):,} of its patterns are more than names, and {limits.patterns:,} are "
                f"allowed."
            )


def _refusal(where: str, pattern: str, why: str) -> AdapterFormatError:
    return AdapterFormatError(f"{where}: the pattern {pattern[:80]!r} {why}.")


# -------------------------------------------------------------------------------------------------- patterns of letters


def literal(pattern: str) -> tuple[str, Spots, bool] | None:
    r"""What a pattern without choices matches: (its letters, the spots of any letter, whether only from the start).

    None for any other pattern. A dot that is not escaped stands for any letter: a.b -> ("a.b", (1,), False).
    """
    letters: list[str] = []
    spots: list[int] = []
    anchored = pattern.startswith("^")
    rest = iter(pattern[anchored:])
    for letter in rest:
        if letter == "\\":
            letter = next(rest, "")
            if not letter or (letter.isascii() and letter.isalnum()):
                return None
        elif letter == ".":
            spots.append(len(letters))
        elif letter in _SPECIAL:
            return None
        letters.append(letter)
    return "".join(letters), tuple(spots), anchored


def is_name(pattern: str) -> bool:
    """Whether it holds no sign that means something to `re`, but dots."""
    found = literal(pattern)
    return found is not None and found[0] == pattern


def every_one_alone(names: Sequence[str]) -> bool:
    """Whether each name, taken as a pattern for the end of names, means itself and no other one."""
    if not all(map(is_name, names)):
        return False
    limits = PatternLimits(lookups=10**9)  # of our own making
    ways = [Question("names", "end", tuple(names)), Question("names", "end", tuple(reversed(names)))]
    first, last = matches(ways, names, limits)
    return all(k == first[k] and last[k] == len(names) - 1 - k for k in range(len(names)))


@dataclass
class _Names:
    """Patterns that are names, found by their length and by where any letter may stand in them."""

    kind: Kind
    budget: list[int]
    where: str
    _whole: _Table = field(default_factory=dict)  # by length
    _parts: _Table = field(default_factory=dict)

    def take(self, number: int, pattern: str, *, exact: bool, odd: bool) -> bool:
        """Whether it is such a pattern, which is kept then."""
        if exact:
            known: tuple[str, Spots, bool] | None = (pattern, (), False)
        else:
            known = None if odd else literal(pattern)
        if known is None or (known[2] and self.kind == "inside"):
            return False
        letters, spots, anchored = known
        table = self._whole if anchored or self.kind == "whole" else self._parts
        table.setdefault(len(letters), {}).setdefault(spots, {}).setdefault(letters, number)
        return True

    def first(self, name: str) -> int | None:
        """The smallest number of those that match."""
        best: int | None = None
        for letters, found in self._lying_in(name):
            for spots, numbers in found.items():
                self.budget[0] -= 6 + len(letters) // 32 + (len(letters) // 8 + len(spots) if spots else 0)
                number = numbers.get(_blanked(letters, spots))
                if number is not None and (best is None or number < best):
                    best = number
        return best

    def _lying_in(self, name: str) -> Iterator[tuple[str, dict[Spots, dict[str, int]]]]:
        """The parts of a name that a pattern of this kind may be, with the patterns of that length."""
        if len(name) in self._whole:
            yield name, self._whole[len(name)]
        inside = self.kind == "inside"
        cost = 1 + 4 * len(self._parts) * inside
        begin = 0 if self._parts else len(name) + 1
        while begin <= len(name):
            self.budget[0] -= cost
            for length in self._parts if inside else (len(name) - begin,):
                end = begin + length
                if length in self._parts and (end == len(name) or name[end : end + 1] == "."):
                    yield name[begin:end], self._parts[length]
            begin = name.find(".", begin) + 1 or len(name) + 1
            if self.budget[0] < 0:
                raise AdapterFormatError(
                    f"{self.where}: more comparisons of its names with those of the file than are made here; peft, "
                    f"which tries each with each, would take hours."
                )


def _blanked(letters: str, spots: Spots) -> str:
    """With dots where any letter may stand."""
    if not spots:
        return letters
    several = list(letters)
    for spot in spots:
        several[spot] = "."
    return "".join(several)


def _words(patterns: Sequence[str]) -> list[str | None] | None:
    """Names of lists of layers, any (None) where there are none; None where one of them is more than a word."""
    if not all(pattern.replace("_", "a").isalnum() and pattern.isascii() for pattern in patterns) or len(patterns) > 8:
        return None
    return list(patterns) or [None]


def _layer(name: str, lists: Sequence[str | None]) -> int | None:
    """The number after the name of a list of layers, as (?:^|.*?\\.)LIST\\.(\\d+)\\. finds it; after any but the first
    word, where there is no name."""
    words = name.split(".")
    for known in lists:
        for k in range(2 if known is None else 1, len(words) - 1):
            if words[k].isdecimal() and known in (None, words[k - 1]):
                return int(words[k])
    return None


# ------------------------------------------------------------------------------------------------------------ the child


def _told(
    left: Sequence[tuple[int, Sequence[int], Question]], names: Sequence[str], limits: PatternLimits
) -> list[list[str | int | None]]:
    """For each question that is left, the child's answer for each name."""
    asked = [
        {"kind": question.kind, "patterns": [_WRAPPED[question.kind].replace("{}", question.patterns[k]) for k in some]}
        for _, some, question in left
    ]
    firsts = [question.first for _, _, question in left]
    most = len(names) if None in firsts else max(first or 0 for first in firsts)
    lines = [json.dumps(asked), *(json.dumps(name) for name in names[:most])]
    code, said = _run("\n".join(lines).encode() + b"\n", limits)
    fields = ", ".join(dict.fromkeys(question.field for _, _, question in left))
    if said and said[-1].startswith("{"):
        refused = json.loads(said[-1])
        _, some, question = left[refused["question"]]
        raise _refusal(question.field, question.patterns[some[refused["pattern"]]], _printable(refused["refused"]))
    if code == BROKEN or not said or said[0] != str(sys.hexversion):
        raise _no_child(f"the process ended with code {code}")
    if said[-1] != "done" or len(said) != most + 2:
        what = (
            f"takes more than {limits.memory >> 20} MB"
            if code == OUT_OF_MEMORY
            else f"does not end within {limits.seconds} s (--limit pattern_seconds)"
        )
        example = max((question.patterns[k] for _, some, question in left for k in some), key=len)
        raise AdapterFormatError(
            f"{fields}: matching its patterns, such as {example[:80]!r}, with the file's names {what}; peft, which has "
            f"no such limit, would hang on them when it loads the adapter. Modules can be named instead."
        )
    rows = [json.loads(line) for line in said[1:-1]]
    return [[row[q] for row in rows] for q in range(len(left))]


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _run(questions: bytes, limits: PatternLimits) -> tuple[int, list[str]]:
    """(exit code, lines) of a Python that has nothing but its own library, and ends at its limits whoever waits."""
    bounds = (limits.seconds, limits.clock, limits.memory, limits.counts)
    command = [sys.executable, "-I", "-S", "-W", "ignore", "-c", _program(), *map(str, bounds)]
    try:
        child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            cwd=os.path.abspath(os.sep), creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
        )  # fmt: skip
    except (OSError, ValueError, TypeError) as error:  # TypeError: no sys.executable
        raise _no_child(str(error)) from error
    with child:
        try:
            said, _ = child.communicate(questions, timeout=limits.clock + 5)
        except subprocess.TimeoutExpired:
            return -1, []
        finally:
            child.kill()
    return child.returncode, said.decode("ascii", "replace").split("\n")[:-1]


def _program() -> str:
    """The child's text: also of a package within an archive."""
    return files("fedlora.adapters").joinpath("pattern_child.py").read_text(encoding="utf-8")


def _no_child(why: str) -> AdapterFormatError:
    return AdapterFormatError(
        f"the config has patterns that are more than names, which are matched in a process of their own, and none can "
        f"be started here ({_printable(why)[:200]}). Write the modules' names in place of the patterns."
    )
