"""A language model's answers to a few held-out prompts, before and after training, for people to read.

samples.jsonl has a line for each: "of" (whose model), "history", "prompt", "wanted", "before", "after" and "cut":
the number of tokens of history and prompt that did not fit. They are made at the end: the model before training is the
common start, which a resumed run still has.
"""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING

from fedlora.core import files
from fedlora.data import TextData
from fedlora.runs.client_data import Dealt
from fedlora.runs.config import RunConfig
from fedlora.runs.exported import client_adapter, global_adapter
from fedlora.runs.folder import RunFolder
from fedlora.seeds import derive_seed
from fedlora.server.server import start
from fedlora.server.state import RunState
from fedlora.training.encode import Encoded, cut_prompts
from fedlora.training.generate import greedy
from fedlora.training.templates import find_template

if TYPE_CHECKING:
    from fedlora.runs.preparation import Prepared


def drawn_samples(config: RunConfig, data: Dealt) -> TextData | None:
    """Held-out prompts whose answers are kept, drawn by the seed: from the test data, or from validation if there are
    none; None of a classifier, or if there are none at all."""
    held = [[part for part in sets.values() if len(part)] for sets in (data.test, data.validation)]
    filled, count = held[0] or held[1], config.evaluate.samples
    if config.model.task != "causal-lm" or not filled or not count:
        return None
    whole = TextData.concat(filled)
    drawn = random.Random(derive_seed(config.run.seed, "samples")).sample(range(len(whole)), min(count, len(whole)))
    return whole.select(drawn)


def write_samples(prepared: Prepared, folder: RunFolder, state: RunState) -> None:
    """Write samples.jsonl for a run that ends with `state`; without samples, remove an earlier end's."""
    data, table, client = prepared.samples, folder.path / "samples.jsonl", prepared.clients[0]
    if data is None:
        table.unlink(missing_ok=True)
        return
    assert data.responses is not None
    new, asked = _asked(prepared, data)
    prompts = [prompt["input_ids"] for prompt in asked]
    before = _answers(prepared, prompts, new, start(prepared.server, prepared.seed_adapter))
    after = _answers(prepared, prompts, new, state)
    of = "the server's model" if prepared.server.has_global_model(state.server) else f"the model of {client.id}"
    rows = [
        {
            "of": of,
            "history": [list(message) for message in data.messages(k)[:-2]],
            "prompt": data.text[k],
            "cut": asked[k]["cut"],
            "wanted": data.responses[k],
            "before": before[k],
            "after": after[k],
        }
        for k in range(len(data))
    ]
    files.write(table, "".join(json.dumps(row) + "\n" for row in rows))


def _asked(prepared: Prepared, data: TextData) -> tuple[int, Encoded]:
    """The longest answer allowed, and each prompt with the number of tokens it lost.

    An answer has at most evaluate.max_new_tokens, and at most half of the model's positions.
    """
    model, config = prepared.model, prepared.config
    longest = model.positions or config.data.max_length + config.evaluate.max_new_tokens
    new = min(config.evaluate.max_new_tokens, longest // 2)
    room = min(config.data.max_length, longest - new)
    return new, cut_prompts(data, model.tokenizer, max_length=room, template=config.data.prompting())


def _answers(prepared: Prepared, prompts: list[list[int]], new: int, state: RunState) -> list[str]:
    """Greedy answers of the server's model, or of the first client's if there is no server model."""
    model, config, server = prepared.model, prepared.config, prepared.server
    whole = server.has_global_model(state.server)
    adapter = global_adapter(server, state) if whole else client_adapter(server, state, prepared.clients[0])
    model.activate(adapter)  # on the pre-trained base, which stays unchanged: other processes may be using it
    ends = find_template(config.data.prompting(), model.tokenizer).ends
    return greedy(model, prompts, max_new_tokens=new, batch_size=config.evaluate.batch_size, ends=ends)
