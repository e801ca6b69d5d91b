r"""Which patterns of a config match which names, as peft's `re` decides it, in little time whoever wrote them.

Names, escaped or not, are patterns too, and nearly all that files hold: those are looked up. Any other pattern is
screened before `re` sees it. It must be of the grammar that people and training tools write, and the steps that `re`
could take with it on the longest name of the file must be few. Then `re` matches it, asked as peft asks.

    a  \.  \d  [a-z_]  [^.]  .              a letter, one of some, any
    .*  \d+  [^.]{2,}  a?  a{1,3}  .*?      a letter again, greedy or lazy
    (...)  (?:...)  a|b  (ab)?  (ab){2}     words, and words again a counted number of times
    ^  $  \b  \B  \A  \Z                    places
    (?=...)  (?!...)                        what follows, as ms-swift and Unsloth write it in each config

All else is refused: groups that repeat without end, back references, looking behind, names of groups, flags.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import comb
from typing import Literal

from fedlora.errors import AdapterFormatError

# How peft 0.21 asks: target_modules and exclude_modules as lists for the end of a name, letter by letter ("names");
# rank_pattern and alpha_pattern for its end; target_modules and exclude_modules as a pattern for the whole of it;
# modules_to_save for some words of it; layers_pattern for the words before the number of a layer.
Kind = Literal["names", "end", "whole", "inside", "layer"]
_WRAPPED: Mapping[Kind, str] = {
    "end": r"(.*\.)?({})$", "whole": "{}", "inside": r"(^|.*\.){}($|\..*)", "layer": r"(?:^|.*?\.){}\.(?P<idx>\d+)\.",
}  # fmt: skip
_ANY_LAYER = re.compile(r".*?\.[^.]*\.(?P<idx>\d+)\.")  # where no layers_pattern is given
_SPECIAL = frozenset(r".^$*+?{}[]\|()")
_LONGEST, _DEEPEST, _MOST = 4_000, 20, 1_000  # letters of a pattern, brackets in each other, patterns of one field
_MOST_STEPS, _MOST_PARTS = 200_000_000, 20_000  # of one pattern on one name: a second at most (tests measure it)
_OF_A_MODEL = 100  # letters of the longest names that transformers' models have: peft asks these too (`applying`)
Spots = tuple[int, ...]


@dataclass(frozen=True)
class Question:
    """Patterns, or names, of one field of a config, asked of all names or (first) of the first so many."""

    field: str
    kind: Kind
    patterns: tuple[str, ...]
    first: int | None = None


def matches(questions: Sequence[Question], names: Sequence[str], seconds: float = 60.0) -> list[list[int | None]]:
    """For each question, for each name that it concerns: the number of the first pattern that matches, or None.

    Of kind "layer", the number of the layer, by the first pattern that matches. seconds: of processor time for all.

    Raises:
        AdapterFormatError: a pattern that is not screened as one that people write, that `re` does not take, or that
            could take long; more time than `seconds`.

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
    """Asked before each step that is bounded by itself, so that all of them are."""

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
    ways = [Question("names", "end", tuple(names)), Question("names", "end", tuple(reversed(names)))]
    first, last = matches(ways, names)
    return all(k == first[k] and last[k] == len(names) - 1 - k for k in range(len(names)))


class _Endings:
    """Patterns of letters for the ends of names, found by their length and by where any letter may stand in them."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, bool], dict[Spots, dict[str, int]]] = {}

    def add(self, number: int, letters: str, spots: Spots, anchored: bool) -> None:
        of_length = self._known.setdefault((len(letters), anchored), {})
        of_length.setdefault(spots, {}).setdefault(letters, number)

    def first(self, name: str) -> int | None:
        """The smallest number of those that match: the whole name, or what follows one of its dots."""
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
    """With dots where any letter may stand."""
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
# In how many ways a place of a pattern may be reached: choices made before it, and endless repeats before it.
Ways = tuple[int, int]
_BEFORE: Mapping[Kind, Ways] = {"end": (2, 1), "whole": (1, 0), "inside": (2, 1), "layer": (2, 1)}  # by what peft adds


class _Refused(Exception):
    """Why a pattern is not matched, in words."""


def _compiled(
    question: Question, others: Sequence[tuple[int, str]], longest: int, clock: _Clock
) -> list[tuple[int, re.Pattern[str]]]:
    """The patterns as peft asks with them, each screened before. longest: letters of a name that it is asked of."""
    if len(others) > _MOST:
        raise AdapterFormatError(
            f"{question.field}: {len(others):,} of its patterns are more than names, and {_MOST:,} are allowed."
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
    """A pattern read by the grammar, and a bound of the steps that `re` could take with it on a name of n letters.

    `re` tries each way to a place of the pattern at most once. Choices (alternatives, optional parts, counts) multiply;
    k endless repeats share out the n letters in C(n + k, k) ways. Each part is charged with the ways to it.
    """

    def __init__(self, pattern: str, longest: int) -> None:
        self._text, self._longest = pattern, longest
        self._at = self._depth = self._parts = self._steps = 0

    def walk(self, before: Ways) -> None:
        """Raises `_Refused`: with the place that is not of the grammar, or with the steps."""
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
        if self._text[self._at : self._at + 1] in ("", "|", ")"):  # nothing is a choice, too
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
            raise _Refused(f"has more than {_DEEPEST} brackets in each other")
        self._at = opened.end()
        ways = self._alternatives(before)
        if not self._text.startswith(")", self._at):
            raise _Refused("does not close a bracket")
        self._at += 1
        least, most = self._repeat()
        end = self._at
        if most is None:
            raise _Refused("repeats a group without end")
        if opened[0] in ("(?=", "(?!"):  # tried once at each place, whatever ways there are through it
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
        """How often what was read may come: (least, most); None: without end."""
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
    """How many of these words may lie at one place of a name: the longest chain in which each begins the next."""
    chain: list[str] = []
    most = 0
    for word in sorted(words):
        while chain and not word.startswith(chain[-1]):
            chain.pop()
        chain.append(word)
        most = max(most, len(chain))
    return most
