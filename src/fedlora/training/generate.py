"""A language model's answers to prompts.

There are two ways to get an answer, and they measure different things: `greedy` generates; `teacher_forced` takes the
most likely token at each position of the wanted response, given the wanted tokens before it, like the FlexLoRA code.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fedlora.training.encode import IGNORED, Example, batches, collate
from fedlora.training.models import AdaptedModel


@torch.no_grad()
def greedy(
    model: AdaptedModel, prompts: Sequence[list[int]], *, max_new_tokens: int, batch_size: int, ends: Sequence[int] = ()
) -> list[str]:
    """The most likely continuation of each prompt, token by token up to an end token, as text.

    ends: the tokens that end an answer, from `Template.ends`; by default the tokenizer's own.

    Prompts are padded on the left, so that every continuation directly follows its prompt.
    """
    network: Any = model.network
    tokenizer, device = model.tokenizer, model.device
    stops = list(ends) or [tokenizer.eos_token_id]
    network.eval()
    answers = [""] * len(prompts)
    for batch in batches(prompts, batch_size, "answering"):
        longest = max(len(prompts[k]) for k in batch)
        pads = [longest - len(prompts[k]) for k in batch]
        rows = [[tokenizer.pad_token_id] * pad + prompts[k] for k, pad in zip(batch, pads, strict=True)]
        mask = [[0] * pad + [1] * (longest - pad) for pad in pads]
        made = network.generate(
            input_ids=torch.tensor(rows, device=device), attention_mask=torch.tensor(mask, device=device),
            max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=tokenizer.pad_token_id, eos_token_id=stops,
        )  # fmt: skip
        for k, ids in zip(batch, made[:, longest:].tolist(), strict=True):
            end = next((place for place, token in enumerate(ids) if token in stops), len(ids))
            answers[k] = tokenizer.decode(ids[:end], skip_special_tokens=True)
    return answers


@torch.no_grad()
def teacher_forced(model: AdaptedModel, examples: Sequence[Example], *, batch_size: int) -> list[str]:
    """The most likely token at each position of the response, as text."""
    network, tokenizer = model.network, model.tokenizer
    network.eval()
    answers = [""] * len(examples)
    for batch in batches([example["input_ids"] for example in examples], batch_size, "answering"):
        inputs = collate([examples[k] for k in batch], tokenizer, model.device)
        best = network(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits.argmax(dim=-1)
        for row, k in enumerate(batch):
            asked = inputs["labels"][row, 1:] != IGNORED
            answers[k] = tokenizer.decode(best[row, :-1][asked].tolist(), skip_special_tokens=True)
    return answers
