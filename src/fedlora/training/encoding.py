"""Text examples to token ids, and token ids to padded batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from fedlora.data.text import TextData
from fedlora.errors import DataError

Example = dict[str, Any]
Encoded = list[Example]

LossOn = Literal["response", "all"]
IGNORED = -100  # a label that the loss skips


def encode(data: TextData, tokenizer: Any, *, max_length: int, loss_on: LossOn = "response") -> Encoded:
    """One dict for each example: input_ids, labels, and token_type_ids where the tokenizer tells a pair apart by them.

    Classification: the text (and its pair), cut at `max_length` tokens. Instructions: prompt, response and an end
    token, with the loss on the response only (loss_on="all": on the prompt too); where they are too long the prompt is
    cut, never the response: first the end of what `data.droppable` names, then from the front.

    Raises:
        DataError: a response alone is longer than `max_length`.
    """
    if len(data) == 0:
        return []
    if data.kind == "classification":
        assert data.labels is not None
        pair = list(data.pair) if data.pair is not None else None
        encoded = tokenizer(list(data.text), pair, truncation=True, max_length=max_length)
        fields = ["input_ids"] + (["token_type_ids"] if pair and "token_type_ids" in encoded else [])
        return [{name: encoded[name][k] for name in fields} | {"labels": y} for k, y in enumerate(data.labels)]
    assert data.responses is not None
    prompts = [_prompt_tokens(data, k, tokenizer) for k in range(len(data))]
    answers = tokenizer(list(data.responses), add_special_tokens=False)["input_ids"]
    examples = []
    for k, ((prompt, spare), answer) in enumerate(zip(prompts, answers, strict=True)):
        answer = [*answer, tokenizer.eos_token_id]
        room = max_length - len(answer)
        if room < 1:
            raise DataError(
                f"example {k}: its response has {len(answer)} tokens and leaves no room for a prompt within "
                f"max_length = {max_length}. Raise max_length, or leave the example out."
            )
        prompt = _cut(prompt, spare, room, tokenizer)
        asked = prompt if loss_on == "all" else [IGNORED] * len(prompt)
        examples.append({"input_ids": prompt + answer, "labels": asked + answer})
    return examples


def encode_prompts(data: TextData, tokenizer: Any, *, max_length: int) -> list[list[int]]:
    """The prompts alone, cut as `encode` cuts them, for generation."""
    return [_cut(*_prompt_tokens(data, k, tokenizer), max_length, tokenizer) for k in range(len(data))]


def _cut(prompt: list[int], spare: list[int], room: int, tokenizer: Any) -> list[int]:
    """At most `room` tokens: the last of the spare places go first, then those at the front, but for a start token."""
    surplus = len(prompt) - room
    if surplus > 0 and spare:
        dropped = set(spare[-surplus:])
        prompt = [token for place, token in enumerate(prompt) if place not in dropped]
    if len(prompt) > room:
        start = prompt[:1] if prompt[0] == tokenizer.bos_token_id and room > 1 else []
        prompt = start + prompt[len(prompt) - room + len(start) :]
    return prompt


def _prompt_tokens(data: TextData, k: int, tokenizer: Any) -> tuple[list[int], list[int]]:
    """A prompt's token ids, and the places in it that may be dropped: those of `data.droppable`."""
    start, end = data.droppable[k] if data.droppable is not None else (0, 0)
    if end <= start:
        return tokenizer(data.text[k])["input_ids"], []
    encoded = tokenizer(data.text[k], return_offsets_mapping=True)
    inside = [place for place, (a, b) in enumerate(encoded["offset_mapping"]) if start <= a < b <= end]
    return encoded["input_ids"], inside


def collate(examples: Sequence[Example], tokenizer: Any, device: torch.device) -> dict[str, Tensor]:
    """A batch padded on the right to its own longest example: input_ids, attention_mask, labels, token_type_ids."""
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


def scored(example: Example, weights: Sequence[float] | None = None) -> float:
    """How many labels of an example the loss counts: one for a class, the response's tokens for a language model.

    weights: of the classes; then what the example's class weighs.
    """
    labels = example["labels"]
    if isinstance(labels, list):
        return float(sum(label != IGNORED for label in labels[1:]))
    return 1.0 if weights is None else weights[int(labels)]
