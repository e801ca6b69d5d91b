"""Fits prompts and conversations into a number of tokens: what is cut if they are too long, and what never is.

From a conversation the earliest exchanges go first. From a prompt, the part named by `TextData.droppable` goes first,
from its end; then the prompt from its start, because text nearest to the answer matters most. Responses and templates
are never cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fedlora.data.text import Message, TextData
from fedlora.errors import DataError
from fedlora.training.prompting import Template, converse, last_marker


@dataclass(frozen=True)
class Talk:
    """A conversation as tokens, up to the end of its last turn. turns: (start, end) of the assistant's turns, each
    including its end token. opening: the text before the last turn."""

    ids: list[int]
    turns: tuple[tuple[int, int], ...]
    opening: str

    @property
    def prompt(self) -> list[int]:
        """What the model has read before its last answer."""
        return self.ids[: self.turns[-1][0]]


def talk_of(messages: Sequence[Message], tokenizer: Any, template: Template) -> Talk:
    """A whole conversation as tokens. Raises `DataError` and `ConfigError` like `prompting.converse`."""
    said = converse(template, tokenizer, messages)
    edges = [edge for turn in said.turns for edge in turn]
    *parts, whole = tokenizer(
        [*(said.text[:edge] for edge in edges), said.text], add_special_tokens=False, verbose=False
    )["input_ids"]
    if all(whole[: len(part)] == part for part in parts):
        ids, places = whole, [len(part) for part in parts]
    else:  # a token spans a turn's edge, so tokenize in pieces: the model also sees the prompt separately
        pieces = [said.text[a:b] for a, b in zip([0, *edges], [*edges, len(said.text)], strict=True)]
        ids, places = [], []
        for piece in tokenizer(pieces, add_special_tokens=False, verbose=False)["input_ids"]:
            ids = ids + piece
            places.append(len(ids))
    turns = tuple(
        (start, start + last_marker(ids[start:end], tokenizer) + 1)
        for start, end in zip(places[::2], places[1::2], strict=False)
    )
    return Talk(ids[: turns[-1][1]], turns, said.text[: said.turns[-1][0]])


def fit_talk(data: TextData, k: int, room: int, tokenizer: Any, template: Template) -> Talk:
    """Conversation k, shortened until the part before its last answer fits into `room` tokens.

    Raises:
        DataError: the template and the system message alone are longer.
    """
    messages = data.messages(k)
    talk = talk_of(messages, tokenizer, template)
    while len(talk.prompt) > room and (shorter := _without_first_exchange(messages)) is not None:
        messages = shorter
        talk = talk_of(messages, tokenizer, template)
    surplus = len(talk.prompt) - room
    if surplus <= 0:
        return talk
    prompt = messages[-2][1].strip()
    begins = talk.opening.rfind(prompt)
    if begins < 0:
        raise DataError(
            f"its prompt has {len(talk.prompt)} tokens for {room} places, and the template changes its text, so it "
            f"cannot be cut. Raise max_length, or shorten it."
        )
    lead = len(messages[-2][1]) - len(messages[-2][1].lstrip())
    first, last = data.droppable[k] if data.droppable is not None else (0, 0)
    spare, front = _places(
        talk.opening, tokenizer, (begins + first - lead, begins + last - lead), (begins, begins + len(prompt)),
        add_special_tokens=False,
    )  # fmt: skip
    kept = _shortened(talk.prompt, surplus, spare, front)
    lost = len(talk.prompt) - len(kept)
    answer = talk.ids[talk.turns[-1][0] :]
    return Talk(kept + answer, ((talk.turns[-1][0] - lost, talk.turns[-1][1] - lost),), talk.opening)


def fit_prompt(data: TextData, k: int, room: int, tokenizer: Any, template: Template) -> tuple[list[int], int]:
    """Prompt k without a chat template, in at most `room` tokens, and the number of tokens lost.

    Raises:
        DataError: it has a history, or the template alone is longer.
    """
    if data.history is not None and data.history[k]:
        raise DataError(
            "it is a conversation with a system message or earlier turns, and only a chat template can separate "
            "these. Set data.template = 'chat', or to your own Jinja chat template."
        )
    text, begins = template.around(data.text[k])
    ids: list[int] = tokenizer(text, verbose=False)["input_ids"]
    if ids and ids[-1] == tokenizer.eos_token_id:  # some tokenizers end every text, but here the answer follows
        bare = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        ids = ids[:-1] if not bare or bare[-1] != ids[-1] or len(ids) > len(bare) + 1 else ids
    surplus = len(ids) - room
    if surplus <= 0:
        return ids, 0
    first, last = data.droppable[k] if data.droppable is not None else (0, 0)
    spare: list[int] = []
    front = list(range(1 if ids[0] == tokenizer.bos_token_id and room > 1 else 0, len(ids)))
    if template.kind == "text":
        spare, front = _places(text, tokenizer, (begins + first, begins + last), (begins, begins + len(data.text[k])))
    elif last > first:
        spare, _ = _places(text, tokenizer, (first, last), (0, 0))
    return _shortened(ids, surplus, spare, front), surplus


def _shortened(ids: list[int], surplus: int, spare: list[int], front: list[int]) -> list[int]:
    """Drop the last `surplus` of the spare tokens; if these are too few, also the first of `front`."""
    gone = set(spare[-surplus:])
    gone |= set([place for place in front if place not in gone][: surplus - len(gone)])
    if len(gone) < surplus:
        raise DataError(
            f"the parts that are never cut (the template, the system message, and what precedes the last prompt, "
            f"without an answer) have {len(ids) - len(gone)} tokens, more than the {len(ids) - surplus} left beside "
            f"the answer. Raise max_length."
        )
    return [token for place, token in enumerate(ids) if place not in gone]


def _places(text: str, tokenizer: Any, *spans: tuple[int, int], **options: Any) -> list[list[int]]:
    """For each span of characters, the indices of the tokens that lie entirely within it."""
    encoded = tokenizer(text, return_offsets_mapping=True, verbose=False, **options)
    return [
        [place for place, (a, b) in enumerate(encoded["offset_mapping"]) if start <= a < b <= end]
        for start, end in spans
    ]


def _without_first_exchange(messages: tuple[Message, ...]) -> tuple[Message, ...] | None:
    """Drop the messages up to the first answer, keeping the system's; None if only the last exchange is left."""
    kept = messages[:1] if messages[0][0] == "system" else ()
    rest = messages[len(kept) :]
    answers = [k for k, (role, _) in enumerate(rest) if role == "assistant"]
    return (*kept, *rest[answers[0] + 1 :]) if len(answers) > 1 else None
