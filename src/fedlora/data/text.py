"""Text examples as plain values: select, join and fingerprint them.

No tokens or tensors here; those are the trainer's.
"""

from __future__ import annotations

import hashlib
import json
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fedlora.errors import DataError

Message = tuple[str, str]  # (role, content)
_EXTRAS = ("references", "droppable", "history")
_PER_EXAMPLE = ("text", "pair", "labels", "responses", *_EXTRAS, "places")
_OF_KIND = {"classification": ("labels", ("pair",)), "instruction": ("responses", _EXTRAS)}
_PLAIN: dict[str, Callable[[Any], tuple[Any, ...]]] = {  # field -> conversion from lists and NumPy numbers
    **dict.fromkeys(("text", "pair", "responses", "label_names", "places"), tuple),
    "labels": lambda labels: tuple(map(operator.index, labels)),
    "references": lambda answers: tuple(map(tuple, answers)),
    "droppable": lambda spans: tuple((int(start), int(end)) for start, end in spans),
    "history": lambda history: tuple(tuple((role, content) for role, content in before) for before in history),
}


@dataclass(frozen=True)
class TextData:
    """N text examples for one task: sentences (or sentence pairs) with a class each, or prompts with a response each.

    Use the readers below for files; build it by hand for anything else. Lists are turned into tuples.

    Args:
        kind: "classification" (then `labels` and `label_names`) or "instruction" (then `responses`).
        text: N strings: the sentence, or the prompt.
        pair: N strings, the second sentence of a pair task (NLI, paraphrase); classification only.
        labels: N class indices, each below len(label_names).
        responses: N strings, the wanted answer to each prompt.
        label_names: the classes, by index.
        references: N tuples of acceptable answers for scoring generated text; default: only the response.
        droppable: N pairs (start, end), the characters of each prompt to cut first if it is too long.
        history: N tuples of (role, content), the messages before each prompt: a system message, earlier turns. A
            conversation is its history, last prompt and last response; default: no history.
        places: N strings that say where each example stands, such as "acme.jsonl, row 3, line 4", for messages alone.

    Raises:
        DataError: lengths differ, a label is not an index into label_names, or a field does not belong to `kind`.

    Example:
        >>> data = TextData(
        ...     kind="classification", text=["dull", "fine", "a joy"], labels=[0, 1, 1], label_names=["bad", "good"]
        ... )
        >>> len(data), data.select([1, 2]).text
        (3, ('fine', 'a joy'))
    """

    kind: Literal["classification", "instruction"]
    text: tuple[str, ...]
    pair: tuple[str, ...] | None = None
    labels: tuple[int, ...] | None = None
    responses: tuple[str, ...] | None = None
    label_names: tuple[str, ...] = ()
    references: tuple[tuple[str, ...], ...] | None = None
    droppable: tuple[tuple[int, int], ...] | None = None
    history: tuple[tuple[Message, ...], ...] | None = None
    places: tuple[str, ...] | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        for name, plain in _PLAIN.items():
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, plain(value))
        lengths = {name: len(values) for name, values in self._columns().items()}
        if len(set(lengths.values())) > 1:
            raise DataError(f"every field of TextData needs one entry per example; got lengths {lengths}.")
        theirs, more = _OF_KIND.get(self.kind, ("?", ()))
        given = {*lengths} - {"text", "places"}
        if theirs not in given or given - {theirs, *more} or bool(self.label_names) != (theirs == "labels"):
            raise DataError(
                f"a TextData is 'classification' with labels and label_names (and pair), or 'instruction' with "
                f"responses (and references, droppable, history); got {self.kind!r} with {sorted(given)} and "
                f"{len(self.label_names)} label_names."
            )
        odd = [k for k, y in enumerate(self.labels or ()) if not 0 <= y < len(self.label_names)]
        if odd:
            raise DataError(f"example {odd[0]} has no label in 0..{len(self.label_names) - 1}, as in label_names.")

    def __len__(self) -> int:
        return len(self.text)

    def _columns(self) -> dict[str, tuple[Any, ...]]:
        """What there is per example, by name."""
        return {name: values for name in _PER_EXAMPLE if (values := getattr(self, name)) is not None}

    def place(self, k: int) -> str:
        """Where example k stands, for messages."""
        return f"example {k}" if self.places is None else self.places[k]

    def of(self, client: str) -> TextData:
        """The same, with its client in the place of each instruction; twice is once."""
        if self.responses is None:
            return self
        who = f"client {client!r}, "
        return replace(self, places=tuple(who + self.place(k).removeprefix(who) for k in range(len(self))))

    def messages(self, k: int) -> tuple[Message, ...]:
        """Instruction k's conversation as (role, content): history, prompt, response."""
        assert self.responses is not None, "a sentence with a class is not a conversation"
        before = self.history[k] if self.history is not None else ()
        return (*before, ("user", self.text[k]), ("assistant", self.responses[k]))

    def select(self, indices: Sequence[int] | NDArray[np.integer]) -> TextData:
        """The examples at `indices`, in that order; repeats are kept. So a client gets its part of a partition.

        Args:
            indices: (n,) whole numbers in [0, N). Not a boolean mask: use np.flatnonzero(mask).

        Raises:
            DataError: `indices` is no list of whole numbers, or one is outside [0, N).
        """
        index = np.asarray(indices)
        whole = index.ndim == 1 and (not index.size or index.dtype.kind in "iu")
        if not whole or not all(0 <= i < len(self) for i in index.tolist()):
            raise DataError(
                f"select takes a list of whole numbers in 0..{len(self) - 1}, of this split of the data; got "
                f"{index.dtype} of shape {index.shape}: {index!s:.60}."
            )
        chosen: list[int] = index.tolist()
        there: dict[str, Any] = {n: tuple(values[i] for i in chosen) for n, values in self._columns().items()}
        return replace(self, **there)

    def digest(self) -> str:
        """SHA-256 (hex) of the content: kind, label names, then every example in order.

        It hashes one JSON line per item (ASCII-escaped): [kind, label_names], then [text, pair, label, response] with
        null for what the task lacks; then references, droppable and history, if there are any.
        """
        hasher = hashlib.sha256((json.dumps([self.kind, self.label_names]) + "\n").encode())
        absent = (None,) * len(self)
        rows = zip(self.text, self.pair or absent, self.labels or absent, self.responses or absent, strict=True)
        for row in rows:
            hasher.update((json.dumps(row) + "\n").encode())
        for name in _EXTRAS:
            if (values := getattr(self, name)) is not None:
                hasher.update((json.dumps([name, values]) + "\n").encode())
        return hasher.hexdigest()

    @staticmethod
    def concat(parts: Sequence[TextData]) -> TextData:
        """All examples of `parts`, which must belong to one task, one part after the other.

        Raises:
            DataError: there is no part, or parts differ in kind, label_names, or whether they have pairs.
        """
        if not parts:
            raise DataError("concat needs at least one part; got none.")
        if any(part.history is not None for part in parts):  # for the others, use an empty history
            parts = [part if part.history is not None else replace(part, history=((),) * len(part)) for part in parts]
        if any(part.places is None for part in parts):
            parts = [replace(part, places=None) for part in parts]
        tasks = {(part.kind, part.label_names, *part._columns()) for part in parts}
        if len(tasks) > 1:
            raise DataError(
                f"concat needs parts of one task; got {len(tasks)} different (kind, names, fields): {sorted(tasks)}."
            )
        columns = [part._columns() for part in parts]
        joined: dict[str, Any] = {name: tuple(x for each in columns for x in each[name]) for name in columns[0]}
        return replace(parts[0], **joined)
