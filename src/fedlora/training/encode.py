"""Text examples as token ids, and token ids as padded batches: classes, and prompts with an answer.

A prompt is put into the model's own chat template, or into a text with {prompt}. The loss of a language model is on the
last answer and the token that ends it. What is too long is cut by one rule: the characters in `TextData.droppable` from
their end, then the prompt from its start, never the template. For packing, several turns, other templates or other
cuts, keep your trainer (`fedlora.hf`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedlora.data.text import TextData
from fedlora.doing import stepped
from fedlora.errors import ConfigError, DataError, counted
from fedlora.training.templates import BARE, Template, conversation, find_template, token_ids

Example = dict[str, Any]
Encoded = list[Example]

IGNORED = -100  # the loss skips this label


def encode(data: TextData, tokenizer: Any, *, max_length: int, template: str | None = None) -> Encoded:
    """One dict per example: input_ids, labels, and token_type_ids if the tokenizer marks the parts of a pair.

    "cut" counts the tokens that an example lost. A response that alone fills `max_length` keeps its first half of that,
    without an end token, and the example has the key "short".

    Args:
        template: the key data.chat_template: None or "chat" for the tokenizer's own chat template, or a text with
            {prompt}. Unused for classes.

    Raises:
        ConfigError: no such template, or special tokens alone fill `max_length` (classes). DataError: a conversation
            does not fit or cannot be rendered; the message names the example's place.
    """
    if len(data) == 0:
        return []
    if data.kind == "classification":
        return _classes(data, tokenizer, max_length)
    return _each(data, tokenizer, template, lambda asked: _answered(asked, tokenizer, max_length))


def cut_prompts(data: TextData, tokenizer: Any, *, max_length: int, template: str | None = None) -> Encoded:
    """The prompts alone, cut as in `encode`, for generation: input_ids, which end with the opening of the answer, and
    "cut", the number of tokens lost."""

    def made(asked: _Asked) -> Example:
        kept = _fitted(asked, tokenizer, max_length)
        return {"input_ids": kept, "cut": len(asked.ids) - len(kept)}

    return _each(data, tokenizer, template, made) if len(data) else []


def _each(data: TextData, tokenizer: Any, template: str | None, made: Callable[[_Asked], Example]) -> Encoded:
    """What is made of each instruction. A `DataError` names its place."""
    around, found = find_template(template, tokenizer), []
    for k in stepped(range(len(data)), "tokenizing"):
        try:
            found.append(made(_asked(data, around, k)))
        except DataError as error:
            raise DataError(f"{data.place(k)}: {error}") from error
    return found


def _classes(data: TextData, tokenizer: Any, max_length: int) -> Encoded:
    assert data.labels is not None
    pair = list(data.pair) if data.pair is not None else None
    special = tokenizer.num_special_tokens_to_add(pair=pair is not None)
    least = special + (1 if pair is None else 2)
    if max_length < least:  # transformers would cut nothing, or everything
        raise ConfigError(
            f"max_length = {max_length} leaves no room for text beside {counted(special, 'special token')}: set "
            f"data.max_length to {least} or more."
        )
    encoded = tokenizer(list(data.text), pair, truncation=True, max_length=max_length)
    fields = ["input_ids"] + (["token_type_ids"] if pair and "token_type_ids" in encoded else [])
    examples = [{name: encoded[name][k] for name in fields} | {"labels": y} for k, y in enumerate(data.labels)]
    for k, example in enumerate(examples):
        if len(example["input_ids"]) == max_length:
            whole = tokenizer(data.text[k], pair and pair[k], verbose=False)["input_ids"]
            example |= {"cut": len(whole) - max_length} if len(whole) > max_length else {}
    return examples


@dataclass(frozen=True)
class _Asked:
    """What the model reads before the answer: as text and as ids, special: with the tokens that begin a text. spare:
    the characters to cut first, from their end; front: those to cut then, from their start. answer: with its end."""

    text: str
    special: bool
    ids: list[int]
    spare: tuple[int, int]
    front: tuple[int, int]
    answer: list[int]


def _answered(asked: _Asked, tokenizer: Any, max_length: int) -> Example:
    answer = asked.answer if len(asked.answer) < max_length else asked.answer[: max_length // 2]
    prompt = _fitted(asked, tokenizer, max_length - len(answer))
    lost = len(asked.ids) + len(asked.answer) - len(prompt) - len(answer)
    made: Example = {"input_ids": prompt + answer, "labels": [IGNORED] * len(prompt) + answer}
    return made | ({"cut": lost} if lost else {}) | ({"short": True} if len(answer) < len(asked.answer) else {})


def _asked(data: TextData, template: Template, k: int) -> _Asked:
    assert data.responses is not None
    messages, tokenizer = data.messages(k), template.tokenizer
    prompt = messages[-2][1]
    first, last = data.droppable[k] if data.droppable is not None else (0, 0)
    if template.chat:
        text, response = conversation(template, messages)
        ids, whole = token_ids(tokenizer, text), token_ids(tokenizer, text + response)
        # A token may span the border. Then each side is tokenized alone, as the model sees the prompt alone later.
        answer = whole[len(ids) :] if whole[: len(ids)] == ids else token_ids(tokenizer, response)
        lead, prompt = len(prompt) - len(prompt.lstrip()), prompt.strip()
        begins = text.rfind(prompt)
        first, last = first - lead, last - lead
    else:
        if len(messages) > 2:
            raise DataError(
                "it is a conversation of several messages, and only a chat template can separate these: set "
                "data.chat_template = 'chat'."
            )
        head, _, tail = template.text.partition(BARE)
        text, begins = head + prompt + tail, len(head)
        ids = _unended(tokenizer, text)
        answer = [*token_ids(tokenizer, data.responses[k]), tokenizer.eos_token_id]
    spare, front = (begins + first, begins + last), (begins, begins + len(prompt))
    return _Asked(text, not template.chat, ids, spare, front, answer)


def _fitted(asked: _Asked, tokenizer: Any, room: int) -> list[int]:
    """The prompt in at most `room` tokens. Raises `DataError` if what is never cut has more."""
    surplus = len(asked.ids) - room
    if surplus <= 0:
        return asked.ids
    found = tokenizer(asked.text, return_offsets_mapping=True, verbose=False, add_special_tokens=asked.special)
    spare, front = (
        [at for at, (a, b) in enumerate(found["offset_mapping"]) if start <= a < b <= end]
        for start, end in (asked.spare, asked.front)
    )
    gone = set(spare[-surplus:])
    gone |= set([at for at in front if at not in gone][: surplus - len(gone)])
    if len(gone) < surplus:
        raise DataError(
            f"what is never cut (the template and the messages before) has {len(asked.ids) - len(gone)} tokens, more "
            f"than the {room} left beside the answer. Raise data.max_length."
        )
    return [token for at, token in enumerate(asked.ids) if at not in gone]


def _unended(tokenizer: Any, text: str) -> list[int]:
    """A text's tokens with those that begin it, and without an end: some tokenizers end every text, but here the answer
    follows."""
    ids, around = (tokenizer(one, verbose=False)["input_ids"] for one in (text, ""))
    return list(ids[:-1] if ids[-1:] == around[-1:] == [tokenizer.eos_token_id] else ids)


@dataclass(frozen=True)
class Cut:
    """What did not fit into max_length: how many of `examples` were cut, the tokens lost in total, and in how many
    `responses` the answer itself was cut."""

    examples: int
    cut: int
    tokens: int
    responses: int = 0


def cut_of(examples: Sequence[Example]) -> Cut:
    """How much was cut from these examples."""
    lost = [example.get("cut", 0) for example in examples]
    return Cut(len(lost), sum(map(bool, lost)), sum(lost), sum("short" in example for example in examples))


def check_length(examples: Encoded, longest: int | None) -> None:
    """Raise `ConfigError` if an example has more tokens than the model can read (None: no limit)."""
    most = max((len(example["input_ids"]) for example in examples), default=0)
    if longest is not None and most > longest:
        raise ConfigError(
            f"an example has {most} tokens, but the model has only {longest} positions: set data.max_length (in "
            f"Python max_length, of the evaluator too) to {longest} or less; longer examples are then cut."
        )


def batches(texts: Sequence[Sequence[int]], size: int, what: str) -> Iterator[list[int]]:
    """Indices of `size` texts at a time, of similar lengths, which need little padding. what: for `doing`."""
    order = sorted(range(len(texts)), key=lambda k: len(texts[k]))
    for first in stepped(range(0, len(order), size), what):
        yield order[first : first + size]


def collate(examples: Sequence[Example], tokenizer: Any, device: torch.device) -> dict[str, Tensor]:
    """A batch, padded on the right to its longest example: input_ids, attention_mask, labels, token_type_ids."""
    longest = max(len(e["input_ids"]) for e in examples)

    def padded(rows: Sequence[list[int]], value: int) -> Tensor:
        return torch.tensor([row + [value] * (longest - len(row)) for row in rows], device=device)

    ids = [e["input_ids"] for e in examples]
    labels = [e["labels"] for e in examples]
    segments = {}
    if "token_type_ids" in examples[0]:
        segments["token_type_ids"] = padded([e["token_type_ids"] for e in examples], 0)
    return segments | {
        "input_ids": padded(ids, tokenizer.pad_token_id),
        "attention_mask": padded([[1] * len(i) for i in ids], 0),
        "labels": padded(labels, IGNORED) if isinstance(labels[0], list) else torch.tensor(labels, device=device),
    }


def scored(example: Example) -> int:
    """How many of an example's labels count in the loss: one for a class, the answer's tokens for a language model."""
    labels = example["labels"]
    return sum(label != IGNORED for label in labels[1:]) if isinstance(labels, list) else 1
