"""Answers in words: what a model says, and how the answer is scored, on one held-out set and on several.

Kinds of evidence: *oracle* (greedy answers token by token from the logits of one unpadded example, on a plain model
with the dense update in its weights: no peft, no cache, no batch; ROUGE-L by a longest common subsequence of our own),
*contract* (bad input is one line).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fedlora import Adapter, Server, build
from fedlora.data import TextData
from fedlora.server.server import start
from fedlora.training.encode import encode
from fedlora.training.generate import greedy, teacher_forced
from fedlora.training.measure import ModelEvaluator
from fedlora.training.metrics import METRICS
from fedlora.training.models import AdaptedModel
from fedlora.training.settings import LoRASettings
from support.local_training import dense, drawn, logits
from support.tiny_models import gpt2, llama
from support.training_data import (
    EOS,
    PAD,
    SPECIAL,
    UNK,
    WORDS,
    encode_prompts,
    instructions,
    save_model,
    tokenizer,
    word,
)

SCALING = 2.0
READER = tokenizer(classifies=False)

# ---- the oracles -----------------------------------------------------------------------------------------------------


def said(ids: Sequence[int]) -> str:
    """Token ids as words, without those that the language models' tokenizer calls special."""
    return " ".join((*SPECIAL, *WORDS)[k] for k in ids if k not in (PAD, UNK, EOS))


def continued(network: nn.Module, prompt: Sequence[int], limit: int) -> list[int]:
    """The most likely token after the prompt, then after that one, ... up to the end token or the limit."""
    made: list[int] = []
    while len(made) < limit:
        token = int(logits(network, [*prompt, *made])[-1].argmax())
        if token == EOS:
            break
        made.append(token)
    return made


# ---- models ----------------------------------------------------------------------------------------------------------


def talker() -> Any:
    """The tiny Llama, readier to end: its row of the end token is longer. Longer texts than its 16 places as well."""
    network: Any = llama()
    with torch.no_grad():
        network.lm_head.weight[EOS] *= 3.5
    network.config.max_position_embeddings = 256
    return network


@pytest.fixture(scope="session")
def talking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("talker"), talker(), classifies=False)


def loaded(path: Path, *targets: str) -> AdaptedModel:
    settings = LoRASettings(target_modules=targets or ["q_proj", "v_proj"], scaling=SCALING, lora_dropout=0.1)
    return AdaptedModel.load(path, "causal-lm", settings)


@pytest.fixture
def model(talking: Path) -> AdaptedModel:
    """With LoRA dropout."""
    return loaded(talking)


def prompts_of(count: int, seed: int, longest: int = 8) -> list[list[int]]:
    draw = random.Random(seed)
    return [[word(k) for k in draw.sample(range(len(WORDS)), draw.randint(1, longest))] for _ in range(count)]


def updated(path: Path, adapter: Adapter) -> Any:
    """The plain model with the adapter's update in its weights."""
    return dense(path, llama, {name: SCALING * lora.delta() for name, lora in adapter.modules.items()}, {})


def test_padding_on_the_left_makes_no_difference(tmp_path: Path) -> None:
    """GPT-2's places are learnt numbers: were the padding counted, an answer would change with its batch."""
    counted = save_model(tmp_path, gpt2(), classifies=False)
    prompts, network = prompts_of(30, 2), dense(counted, gpt2, {}, {})
    want = [said(continued(network, prompt, 6)) for prompt in prompts]
    assert greedy(loaded(counted, "c_attn"), prompts, max_new_tokens=6, batch_size=30) == want


def test_an_answer_is_the_most_likely_token_each_time_up_to_the_end_token_or_the_limit(
    talking: Path, model: AdaptedModel
) -> None:
    """Forty prompts of 1 to 8 words, by `continued`; in the asked order, whoever shares a batch. Some end by
    themselves, some at once, some not within twelve tokens. No chance is in it: torch's generator stays."""
    prompts, network = prompts_of(40, 0), dense(talking, llama, {}, {})
    want = [continued(network, prompt, 12) for prompt in prompts]
    assert {0, 12} < {len(ids) for ids in want}
    before = torch.random.get_rng_state()
    for limit, batch_size in ((3, 1), (12, 16)):
        got = greedy(model, prompts, max_new_tokens=limit, batch_size=batch_size)
        assert got == [said(ids[:limit]) for ids in want]
    assert torch.equal(torch.random.get_rng_state(), before)


def test_teacher_forced_is_the_most_likely_token_at_each_place_of_the_response(
    talking: Path, model: AdaptedModel
) -> None:
    """By hand, one unpadded example at a time: the argmax where the true token before it stands, the end included.

    As the FlexLoRA code does, but on the response alone and shifted by one, as a language model predicts.
    """
    adapter = drawn(model.seed_adapter(3, seed=0)[0], 3, 1)
    model.activate(adapter)
    model.network.train()
    data, network = instructions(25, 5), updated(talking, adapter)
    want = []
    for prompt, response in zip(data.text, data.responses or (), strict=True):
        asked, wanted = ([READER.convert_tokens_to_ids(w) for w in text.split()] for text in (prompt, response))
        best = logits(network, [*asked, *wanted, EOS]).argmax(-1).tolist()
        want.append(said([best[k - 1] for k in range(len(asked), len(asked) + len(wanted) + 1)]))
    assert len(set(want)) > 15
    examples = encode(data, READER, max_length=64, template="{prompt}")
    assert teacher_forced(model, examples, batch_size=4) == want
    evaluator = ModelEvaluator(model, data, [], metric="rouge-l-teacher-forced", max_length=64, template="{prompt}")
    fits = [METRICS["rouge-l"].measure(*pair) for pair in zip(want, [(r,) for r in data.responses or ()], strict=True)]
    assert evaluator.measure_adapter(adapter)["rouge_l_teacher_forced"] == pytest.approx(sum(fits) / len(fits))


# ---- answers as scores -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("metric", ["rouge-l", "exact-match"])
def test_a_models_score_is_the_mean_over_a_set_and_then_over_the_sets(
    talking: Path, model: AdaptedModel, metric: Any
) -> None:
    """Two sets of 12 and 5, the first with a second reference: an answer that the model gives. Prompts are cut to
    max_length - max_new_tokens = 4 tokens, and so some lose words."""
    warm = drawn(model.seed_adapter(3, seed=0)[0], 3, 1)
    server = Server(build("glora"))
    state, network = start(server, warm), updated(talking, warm)
    sets: dict[str, TextData] = {"plain": instructions(5, 2), "more": instructions(12, 1)}
    limits: dict[str, Any] = {"max_length": 9, "max_new_tokens": 5, "batch_size": 4, "template": "{prompt}"}
    answers: dict[str, list[str]] = {}
    for name, data in sets.items():
        prompts = encode_prompts(data, READER, max_length=4, template="{prompt}")
        answers[name] = [said(continued(network, ids, 5)) for ids in prompts]
    told = tuple((response, answers["more"][0]) for response in sets["more"].responses or ())
    sets["more"] = replace(sets["more"], references=told)
    measure, means = METRICS[metric].measure, {}
    for name, data in sets.items():
        references = data.references or [(response,) for response in data.responses or ()]
        found = [measure(answer, right) for answer, right in zip(answers[name], references, strict=True)]
        means[name] = sum(found) / len(found)
    got = ModelEvaluator(model, sets, [], metric=metric, **limits).evaluate(server, state)
    assert means["more"] > means["plain"]
    assert got[metric.replace("-", "_")] == pytest.approx(sum(means.values()) / 2)
    assert {name: got[f"group/{name}"] for name in sets} == pytest.approx(means)
