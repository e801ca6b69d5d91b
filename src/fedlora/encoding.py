"""Text examples to token ids, and token ids to padded batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fedlora.data.text import TextData
from fedlora.errors import DataError

Example = dict[str, Any]
Encoded = list[Example]

IGNORED = -100  # a label that the loss skips


def encode(data: TextData, tokenizer: Any, *, max_length: int) -> Encoded:
    """One dict for each example: input_ids, labels, and token_type_ids where the tokenizer tells a pair apart by them.

    Classification: the text (and its pair), cut at `max_length` tokens. Instructions: prompt, response and an end
    token, with the loss on the response only; where they are too long the prompt is cut from its front, never the
    response.

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
    prompts = tokenizer(list(data.text))["input_ids"]
    answers = tokenizer(list(data.responses), add_special_tokens=False)["input_ids"]
    examples = []
    for k, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        answer = [*answer, tokenizer.eos_token_id]
        room = max_length - len(answer)
        if room < 1:
            raise DataError(
                f"example {k}: its response has {len(answer)} tokens and leaves no room for a prompt within "
                f"max_length = {max_length}. Raise max_length, or leave the example out."
            )
        if len(prompt) > room:
            start = prompt[:1] if prompt[0] == tokenizer.bos_token_id and room > 1 else []
            prompt = start + prompt[len(prompt) - room + len(start) :]
        examples.append({"input_ids": prompt + answer, "labels": [IGNORED] * len(prompt) + answer})
    return examples


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


def scored(example: Example) -> int:
    """How many labels of an example the loss counts: one for a class, the response's tokens for a language model."""
    labels = example["labels"]
    return sum(label != IGNORED for label in labels[1:]) if isinstance(labels, list) else 1
