"""Turns text examples into token ids, and token ids into padded batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedlora.data.text import TextData
from fedlora.doing import stepped
from fedlora.errors import ConfigError, DataError, counted
from fedlora.training.fitting import fit_prompt, fit_talk, talk_of
from fedlora.training.prompting import Template, find_template
from fedlora.training.settings import LongResponses, LossOn

Example = dict[str, Any]
Encoded = list[Example]

IGNORED = -100  # the loss skips this label


def encode(
    data: TextData, tokenizer: Any, *, max_length: int, loss_on: LossOn = "response", template: str | None = None,
    long_responses: LongResponses = "refuse",
) -> Encoded:  # fmt: skip
    """One dict per example: input_ids, labels, and token_type_ids if the tokenizer marks the parts of a pair.

    Classification: the text (and its pair), truncated to `max_length` tokens. Instructions: prompt and response in
    `template`, with the loss on the assistant's turns only, each with its end token (loss_on="all": on everything).
    If they are too long, we drop the earliest exchanges first, then the part in `data.droppable` from its end, then the
    prompt from its start; never the last response or any of the template. "cut" counts the tokens an example lost.
    The exception is a response that alone fills max_length: with long_responses="cut" its first max_length / 2 tokens
    remain, without an end token, and the example has the key "short".

    Args:
        template: as in the key data.template: None or "chat" for the tokenizer's own chat template, "none" for the bare
            prompt, or a text with {prompt}, or a Jinja chat template. See `prompting`. Unused for classification.

    Raises:
        ConfigError: no such template, or special tokens alone fill `max_length` (classification). DataError: a response
            alone is longer than `max_length`, or the template rejects a conversation.
    """
    if len(data) == 0:
        return []
    if data.kind == "classification":
        return _classes(data, tokenizer, max_length)
    assert data.responses is not None
    around = find_template(template, tokenizer)
    examples = []
    for k in stepped(range(len(data)), "tokenizing"):
        with _in_example(k):
            examples.append(_instruction(data, k, tokenizer, around, max_length, loss_on, long_responses == "cut"))
    return examples


def cut_prompts(
    data: TextData, tokenizer: Any, *, max_length: int, template: str | None = None
) -> list[tuple[list[int], int]]:
    """The prompts alone, cut as in `encode`, for generation: each ends with the opening of the answer and comes with
    the number of tokens it lost."""
    if len(data) == 0:
        return []
    around = find_template(template, tokenizer)
    prompts = []
    for k in stepped(range(len(data)), "tokenizing"):
        with _in_example(k):
            if around.kind == "chat":
                whole = talk_of(data.messages(k), tokenizer, around).prompt
                left = whole if len(whole) <= max_length else fit_talk(data, k, max_length, tokenizer, around).prompt
                prompts.append((left, len(whole) - len(left)))
            else:
                prompts.append(fit_prompt(data, k, max_length, tokenizer, around))
    return prompts


@dataclass(frozen=True)
class Cut:
    """What did not fit into max_length: how many of `examples` were cut, the tokens lost in total, and in how many
    `responses` the answer itself was cut."""

    examples: int
    cut: int
    tokens: int
    responses: int = 0


def cut_of(examples: Iterable[Example]) -> Cut:
    """How much was cut from these examples."""
    lost = [(example.get("cut", 0), example.get("short", False)) for example in examples]
    return Cut(len(lost), sum(n > 0 for n, _ in lost), sum(n for n, _ in lost), sum(short for _, short in lost))


def check_length(examples: Iterable[Example], longest: int | None) -> None:
    """Raise `ConfigError` if an example has more tokens than the model can read (None: no limit)."""
    check_tokens(max((len(example["input_ids"]) for example in examples), default=0), longest)


def check_tokens(most: int, longest: int | None) -> None:
    """The same, given the most tokens of any example."""
    if longest is not None and most > longest:
        raise ConfigError(
            f"an example has {most} tokens, but the model has only {longest} positions: set data.max_length to "
            f"{longest} or less (in Python: max_length of TrainSettings and the evaluator; on several machines: "
            f"the server's setting); longer examples are then cut."
        )


def _classes(data: TextData, tokenizer: Any, max_length: int) -> Encoded:
    assert data.labels is not None
    pair = list(data.pair) if data.pair is not None else None
    _check_room(tokenizer, max_length, texts=1 if pair is None else 2)
    encoded = tokenizer(list(data.text), pair, truncation=True, max_length=max_length)
    fields = ["input_ids"] + (["token_type_ids"] if pair and "token_type_ids" in encoded else [])
    examples = [{name: encoded[name][k] for name in fields} | {"labels": y} for k, y in enumerate(data.labels)]
    full = [k for k, example in enumerate(examples) if len(example["input_ids"]) == max_length]
    if full:
        whole = tokenizer([data.text[k] for k in full], [pair[k] for k in full] if pair else None, verbose=False)
        for k, ids in zip(full, whole["input_ids"], strict=True):
            if len(ids) > max_length:
                examples[k]["cut"] = len(ids) - max_length
    return examples


def _check_room(tokenizer: Any, max_length: int, texts: int) -> None:
    """Raise `ConfigError` if max_length leaves no token per text beside the special ones: transformers would then cut
    nothing, or everything."""
    special = tokenizer.num_special_tokens_to_add(pair=texts == 2)
    if max_length < special + texts:
        what = "an example" if texts == 1 else "a pair of texts"
        raise ConfigError(
            f"max_length = {max_length} leaves no room for text: the tokenizer adds "
            f"{counted(special, 'special token')} to {what}. Set data.max_length (of TrainSettings and the "
            f"evaluator, max_length) to {special + texts} or more."
        )


def _instruction(
    data: TextData, k: int, tokenizer: Any, around: Template, max_length: int, loss_on: LossOn, shorten: bool
) -> Example:
    """shorten: cut a response that fills max_length."""
    assert data.responses is not None
    if around.kind == "chat":
        whole = talk = talk_of(data.messages(k), tokenizer, around)
        answer = len(whole.ids) - len(whole.prompt)
        kept = _kept(answer, max_length, shorten)
        if len(whole.ids) > max_length:
            talk = fit_talk(data, k, max_length - kept, tokenizer, around)
        ids = talk.ids if kept == answer else talk.ids[: len(talk.prompt) + kept]
        lost = len(whole.ids) - len(ids)
        turns = tuple((start, min(end, len(ids))) for start, end in talk.turns)
    else:
        response = [*tokenizer(data.responses[k], add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        answer, kept = len(response), _kept(len(response), max_length, shorten)
        prompt, lost = fit_prompt(data, k, max_length - kept, tokenizer, around)
        ids, turns, lost = prompt + response[:kept], ((len(prompt), len(prompt) + kept),), lost + answer - kept
    learned = {place for start, end in turns for place in range(start, end)}
    labels = [token if loss_on == "all" or place in learned else IGNORED for place, token in enumerate(ids)]
    more = {"cut": lost} if lost else {}
    return {"input_ids": ids, "labels": labels} | more | ({"short": True} if kept < answer else {})


def _kept(answer: int, max_length: int, shorten: bool) -> int:
    """How many of a response's tokens remain."""
    if answer < max_length:
        return answer
    if shorten and max_length > 1:
        return max_length // 2
    raise DataError(
        f"its response has {answer} tokens and leaves no room for a prompt within max_length = {max_length}. Raise "
        f"max_length, leave the example out, or have such responses cut (data.long_responses = 'cut' of a run)."
    )


@contextmanager
def _in_example(k: int) -> Iterator[None]:
    """Prefix errors with the example's number."""
    try:
        yield
    except DataError as error:
        raise DataError(f"example {k}: {error}") from error


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


def scored(example: Example, weights: Sequence[float] | None = None) -> float:
    """How many of an example's labels count in the loss: one for a class, the response's tokens for a language model.

    weights: class weights; the result is then the weight of the example's class.
    """
    labels = example["labels"]
    if isinstance(labels, list):
        return float(sum(label != IGNORED for label in labels[1:]))
    return 1.0 if weights is None else weights[int(labels)]
