r"""Which of a config's patterns match which names, exactly as peft's `re` does, in bounded time for any author.

Most patterns in files are plain names, escaped or not; these are looked up. Any other pattern is screened before `re`
sees it: it must follow the grammar that people and training tools use, and `re` must need few steps on the file's
longest name. Then `re` matches it in the same way as peft.

    a  \.  \d  [a-z_]  [^.]  .              one letter, one of a set, any
    .*  \d+  [^.]{2,}  a?  a{1,3}  .*?      a repeated letter, greedy or lazy
    (...)  (?:...)  a|b  (ab)?  (ab){2}     words, and words repeated a counted number of times
    ^  $  \b  \B  \A  \Z                    places
    (?=...)  (?!...)                        lookaheads, which ms-swift and Unsloth write in each config

Everything else is refused: groups that repeat without end, back references, lookbehinds, named groups, flags.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import comb
from typing import Literal

from fedlora.errors import AdapterFormatError

# How peft 0.21 matches: lists in target_modules and exclude_modules with a name's end, letter by letter ("names");
# rank_pattern and alpha_pattern with its end; a pattern in target_modules or exclude_modules with all of it;
# modules_to_save with some words in it; layers_pattern with the words before a layer's number.
Kind = Literal["names", "end", "whole", "inside", "layer"]
_WRAPPED: Mapping[Kind, str] = {
    "end": r"(.*\.)?({})$", "whole": "{}", "inside": r"(^|.*\.){}($|\..*)", "layer": r"(?:^|.*?\.){}\.(?P<idx>\d+)\.",
}  # fmt: skip
_ANY_LAYER = re.compile(r".*?\.[^.]*\.(?P<idx>\d+)\.")  # used without a layers_pattern
_SPECIAL = frozenset(r".^$*+?{}[]\|()")
_LONGEST, _DEEPEST, _MOST = 4_000, 20, 1_000  # letters in a pattern, nested brackets, patterns in one field
_MOST_STEPS, _MOST_PARTS = 200_000_000, 20_000  # for one pattern on one name: at most a second (tests measure it)
_OF_A_MODEL = 100  # longest module name in transformers' models, which peft matches as well (`export`)
Spots = tuple[int, ...]


@dataclass(frozen=True)
class Question:
    """Patterns or names from one field of a config, to match with all names or only the `first` ones."""

    field: str
    kind: Kind
    patterns: tuple[str, ...]
    first: int | None = None


def matches(questions: Sequence[Question], names: Sequence[str], seconds: float = 60.0) -> list[list[int | None]]:
    """For each question and each of its names: the number of the first pattern that matches, or None.

    For kind "layer": the layer's number, by the first pattern that matches. seconds: processor time for all.

    Raises:
        AdapterFormatError: a pattern fails the screen, `re` rejects it, or it could take long; or the time is up.

    Example:
        >>> ranks = Question("rank_pattern", "end", ("q_proj", r"^model\\.layers\\.1\\.v_proj"))
        >>> matches([ranks], ["model.layers.0.q_proj", "model.layers.1.v_proj", "x.model.layers.1.v_proj"])
        [[0, 1, None]]
    """
    until = time.thread_time() + seconds
    return [
        _answers(question, names[: question.first], _Clock(question.field, seconds, until)) for question in questions
    ]


@dataclass(frozen=True)
class _Clock:
    """Checked before each step; the steps are bounded individually, so this bounds the total."""

    field: str
    seconds: float
    until: float

    def check(self) -> None:
        if time.thread_time() > self.until:
            raise AdapterFormatError(
                f"{self.field}: matching its patterns with the file's names takes more than {self.seconds:g} s "
                f"(--limit pattern_seconds). Name the modules in full, and use few patterns."
            )


def _answers(question: Question, names: Sequence[str], clock: _Clock) -> list[int | None]:
    if not question.patterns and question.kind != "layer":
        return [None] * len(names)
    endings = _Endings()
    others: list[tuple[int, str]] = []
    for number, pattern in enumerate(question.patterns):
        if question.kind == "names":
            endings.add(number, pattern, (), anchored=False)
        elif question.kind == "end" and (known := literal(pattern)) is not None:
            endings.add(number, *known)
        else:
            others.append((number, pattern))
    compiled = _compiled(question, others, max([_OF_A_MODEL, *map(len, names)]), clock)
    found: list[int | None] = []
    for name in names:
        clock.check()
        best = endings.first(name)
        for number, asked in compiled:
            clock.check()
            if best is not None and number > best:
                break
            match = asked.fullmatch(name) if question.kind == "whole" else asked.match(name)
            if match is not None:
                best = int(match["idx"]) if question.kind == "layer" else number
                break
        found.append(best)
    return found


# ----------------------------------------------------------------------------------------------------- literal patterns


def literal(pattern: str) -> tuple[str, Spots, bool] | None:
    r"""What a pattern without choices matches: (its letters, positions where any letter fits, whether anchored).

    None for any other pattern. An unescaped dot matches any letter: a.b -> ("a.b", (1,), False).
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
    """Whether dots are the only characters in it with a meaning to `re`."""
    found = literal(pattern)
    return found is not None and found[0] == pattern


def every_one_alone(names: Sequence[str]) -> bool:
    """Whether each name, as a pattern for the end of names, matches itself and no other."""
    if not all(map(is_name, names)):
        return False
    ways = [Question("names", "end", tuple(names)), Question("names", "end", tuple(reversed(names)))]
    first, last = matches(ways, names)
    return all(k == first[k] and last[k] == len(names) - 1 - k for k in range(len(names)))


class _Endings:
    """Literal patterns for the ends of names, indexed by length and by the positions of wildcards."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, bool], dict[Spots, dict[str, int]]] = {}

    def add(self, number: int, letters: str, spots: Spots, anchored: bool) -> None:
        of_length = self._known.setdefault((len(letters), anchored), {})
        of_length.setdefault(spots, {}).setdefault(letters, number)

    def first(self, name: str) -> int | None:
        """The smallest number of a matching pattern; it must match the whole name, or the part after a dot."""
        best: int | None = None
        parts = [(name, True), (name, False)]
        parts += [(name[at + 1 :], False) for at, letter in enumerate(name) if letter == "."]
        for part, anchored in parts:
            for spots, numbers in self._known.get((len(part), anchored), {}).items():
                number = numbers.get(_blanked(part, spots))
                if number is not None and (best is None or number < best):
                    best = number
        return best


def _blanked(letters: str, spots: Spots) -> str:
    """Replace the letters at wildcard positions by dots."""
    if not spots:
        return letters
    several = list(letters)
    for spot in spots:
        several[spot] = "."
    return "".join(several)


# ----------------------------------------------------------------------------------------------------------- the screen

_LETTER = re.compile(
    r"\\[^A-Za-z0-9]|\\[dDwWsS]|\[\^?(?:\w-\w|[\w.*+/]|\\[-.dDwWsS])+-?\]|[^\\^$|?*+()\[\]{}\x00-\x1f]", re.ASCII
)
_PLACE = re.compile(r"\^|\$|\\[bBAZ]")
_GROUP = re.compile(r"\((?:\?[:=!])?")
_REPEAT = re.compile(r"(?:([*+?])|\{(\d{1,3})(?:(,)(\d{0,3}))?\})\??", re.ASCII)
# Number of ways in which matching can reach a place in a pattern: choices before it, and endless repeats before it.
Ways = tuple[int, int]
_BEFORE: Mapping[Kind, Ways] = {"end": (2, 1), "whole": (1, 0), "inside": (2, 1), "layer": (2, 1)}  # from peft's wraps


class _Refused(Exception):
    """Why a pattern is refused, in words."""


def _compiled(
    question: Question, others: Sequence[tuple[int, str]], longest: int, clock: _Clock
) -> list[tuple[int, re.Pattern[str]]]:
    """The patterns wrapped as in peft, each screened first. longest: letters in the longest name to match."""
    if len(others) > _MOST:
        raise AdapterFormatError(
            f"{question.field}: {len(others):,} of its patterns are not plain names; at most {_MOST:,} are allowed."
        )
    found = [(0, _ANY_LAYER)] if question.kind == "layer" and not others else []
    for number, pattern in others:
        clock.check()
        try:
            if len(pattern) > _LONGEST:
                raise _Refused(f"has {len(pattern):,} letters, more than the {_LONGEST:,} allowed")
            _Screen(pattern, longest).walk(_BEFORE[question.kind])
            found.append((number, re.compile(_WRAPPED[question.kind].replace("{}", pattern))))
        except _Refused as why:
            raise AdapterFormatError(
                f"{question.field}: the pattern {pattern[:80]!r} {why}. Name the modules instead."
            ) from None
        except re.error as error:
            raise AdapterFormatError(
                f"{question.field}: the pattern {pattern[:80]!r} is not a regular expression: {str(error)[:200]!r}. "
                f"Name the modules instead."
            ) from error
    return found


class _Screen:
    """Parses a pattern by the grammar, and bounds the steps `re` could take with it on a name of n letters.

    `re` tries each way to a place in the pattern at most once. Choices (alternatives, optional parts, counts) multiply;
    k endless repeats divide the n letters in C(n + k, k) ways. Each part costs as many steps as there are ways to it.
    """

    def __init__(self, pattern: str, longest: int) -> None:
        self._text, self._longest = pattern, longest
        self._at = self._depth = self._parts = self._steps = 0

    def walk(self, before: Ways) -> None:
        """Raise `_Refused`, naming the place outside the grammar, or the number of steps."""
        self._alternatives(before)
        if self._at < len(self._text):
            self._odd()

    def _odd(self) -> None:
        raise _Refused(
            f"has {self._text[self._at : self._at + 8]!r} at letter {self._at + 1}, which fedlora does not accept"
        )

    def _charge(self, ways: Ways, times: int = 1) -> None:
        self._parts += 1
        self._steps += times * ways[0] * comb(self._longest + ways[1], ways[1])
        if self._steps > _MOST_STEPS or self._parts > _MOST_PARTS:
            raise _Refused(
                f"could need more than {_MOST_STEPS:,} steps with a name of {self._longest} letters, because of its "
                f"repeats and choices"
            )

    def _alternatives(self, before: Ways) -> Ways:
        begin = self._at
        ends = [self._sequence(before)]
        while self._text.startswith("|", self._at):
            self._at += 1
            ends.append(self._sequence(before))
        choices = sum(count for count, _ in ends)
        words = [literal(word) for word in self._text[begin : self._at].split("|")]
        if all(word is not None and not word[1] and not word[2] for word in words):
            choices = before[0] * _nested([word[0] for word in words if word is not None])
        return choices, max(endless for _, endless in ends)

    def _sequence(self, ways: Ways) -> Ways:
        if self._text[self._at : self._at + 1] in ("", "|", ")"):  # an empty alternative is a choice too
            self._charge(ways)
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            if place := _PLACE.match(self._text, self._at):
                self._at = place.end()
                self._charge(ways)
            elif opened := _GROUP.match(self._text, self._at):
                ways = self._group(opened, ways)
            elif letter := _LETTER.match(self._text, self._at):
                self._at = letter.end()
                least, most = self._repeat()
                self._charge(ways, most or max(least, 1))
                ways = (ways[0], ways[1] + 1) if most is None else (ways[0] * (most - least + 1), ways[1])
                self._charge(ways)
            else:
                self._odd()
        return ways

    def _group(self, opened: re.Match[str], before: Ways) -> Ways:
        self._depth += 1
        if self._depth > _DEEPEST:
            raise _Refused(f"nests more than {_DEEPEST} brackets")
        self._at = opened.end()
        ways = self._alternatives(before)
        if not self._text.startswith(")", self._at):
            raise _Refused("does not close a bracket")
        self._at += 1
        least, most = self._repeat()
        end = self._at
        if most is None:
            raise _Refused("repeats a group without end")
        if opened[0] in ("(?=", "(?!"):  # tried once at each place, however many ways lead through it
            if (least, most) != (1, 1):
                raise _Refused("repeats a lookahead")
            ways = before
        total = before if least == 0 else (0, 0)
        for turn in range(1, most + 1):
            if turn > 1:
                self._at = opened.end()
                ways = self._alternatives(ways)
            if turn >= least:
                total = (total[0] + ways[0], max(total[1], ways[1]))
        self._at = end
        self._depth -= 1
        return total

    def _repeat(self) -> tuple[int, int | None]:
        """How often the preceding part may repeat: (least, most); None: without end."""
        found = _REPEAT.match(self._text, self._at)
        if found is None:
            return 1, 1
        self._at = found.end()
        sign, low, comma, high = found.groups()
        if sign:
            return {"*": (0, None), "+": (1, None), "?": (0, 1)}[sign]
        most = int(high) if high else None if comma else int(low)
        if most is not None and most < int(low):
            raise _Refused("has a count whose upper end is below its lower end")
        return int(low), most


def _nested(words: Sequence[str]) -> int:
    """How many of these words can match at one place in a name: the longest chain in which each begins the next."""
    chain: list[str] = []
    most = 0
    for word in sorted(words):
        while chain and not word.startswith(chain[-1]):
            chain.pop()
        chain.append(word)
        most = max(most, len(chain))
    return most
