"""The controls without LoRA: a head alone, trained to its optimum on all clients' data together or by each client.

It is a logistic regression (scikit-learn) on the input of the pre-trained model's head, with its regularisation chosen
on validation. On all data together, that is more than a federation could do with heads alone: an adapter trained over
rounds that does not beat it says nothing about servers. If adapters are trained apart and merged once, the matching
control is heads that are trained apart and averaged: what one exchange can do without an adapter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedlora.core.lora import Adapter, LoRA
from fedlora.data.text import TextData
from fedlora.errors import ConfigError
from fedlora.runs.client_data import Dealt
from fedlora.runs.preparation import Prepared
from fedlora.training.encoding import collate, encode

STRENGTHS = (1e-3, 1e-2, 1e-1, 1.0, 10.0, 100.0, 1000.0)  # scikit-learn's C
# Text -> its features, for the model used last: one process makes many runs with one model.
_known: dict[tuple[str, ...], Tensor] = {}
_of: list[tuple[str, ...]] = []  # that model


def head_alone(
    prepared: Prepared, dealt: Dealt, sets: Sequence[str], *, apart: Mapping[str, float] | None = None
) -> dict[str, Any]:
    """Set ("test", "validation") -> loss (mean log-loss, nats) and accuracy; "strength", the chosen C; and
    "strengths_tried", the ends of its grid.

    apart: client -> weight. Each of them trains a head on its own data, all with one C, and the weighted means of their
    coefficients and intercepts make the result. None: one head on all clients' data.

    Raises:
        ConfigError: the model is not a classifier, there are no validation data for the choice, or a client that trains
            its own head lacks one of the classes.
    """
    from sklearn.metrics import log_loss

    if prepared.config.model.task != "classification" or prepared.validation is None:
        raise ConfigError("the control 'head alone' is for classification with validation data (data.validation).")
    parts = [TextData.concat(list(dealt.parts.values()))] if apart is None else [dealt.parts[name] for name in apart]
    shares = [1.0] if apart is None else list(apart.values())
    classes = list(range(len(parts[0].label_names)))
    for name, part in zip(apart or (), parts, strict=False):
        if lacking := sorted(set(classes) - set(part.labels or ())):
            raise ConfigError(
                f"the control 'heads apart': the client {name} has no example of class {lacking[0]} among its "
                f"{len(part)}, and its head cannot be trained to an optimum. Take less skewed labels, or 'head alone'."
            )
    held = {
        "validation": TextData.concat(list(dealt.validation.values())),
        "test": TextData.concat(list(dealt.test.values())),
    }
    train = [(_features(prepared, part), part.labels or ()) for part in parts]
    features = {name: _features(prepared, data) for name, data in held.items()}
    best: tuple[float, float, Any] = (math.inf, 0.0, None)
    for strength in STRENGTHS:
        model = _mean_head([_head(X, labels, strength) for X, labels in train], shares)
        loss = float(log_loss(held["validation"].labels, model.predict_proba(features["validation"]), labels=classes))
        best = min(best, (loss, strength, model), key=lambda found: found[0])
    _, strength, model = best
    found: dict[str, Any] = {"strength": strength, "strengths_tried": [min(STRENGTHS), max(STRENGTHS)]}
    for name in sets:
        shown = model.predict_proba(features[name])
        loss = float(log_loss(held[name].labels, shown, labels=classes))
        found[name] = {"loss": loss, "accuracy": float(model.score(features[name], held[name].labels))}
    return found


def _head(X: Any, labels: Sequence[Any], strength: float) -> Any:
    from sklearn.linear_model import LogisticRegression

    return LogisticRegression(C=strength, max_iter=1000).fit(X, labels)


def _mean_head(heads: Sequence[Any], shares: Sequence[float]) -> Any:
    """The first head, with the weighted mean of all heads' coefficients and intercepts."""
    mean = heads[0]
    mean.coef_ = np.average([head.coef_ for head in heads], axis=0, weights=shares)
    mean.intercept_ = np.average([head.intercept_ for head in heads], axis=0, weights=shares)
    return mean


def no_adapter(seed: Adapter) -> Adapter:
    """A zero adapter, with the start's heads."""
    nothing = {name: LoRA(m.factors[0][:, :1] * 0, m.factors[1][:1] * 0) for name, m in seed.modules.items()}
    return Adapter(nothing, seed.heads)


def _features(prepared: Prepared, data: TextData) -> Any:
    """The input of the pre-trained model's head, (examples, width), as a float32 array."""
    config, model = prepared.config, prepared.model
    content = ",".join(f"{name}={digest}" for name, digest in sorted(prepared.manifest["model"]["sha256"].items()))
    pairs = data.pair or [""] * len(data)
    told = (content, config.model.path, str(config.data.max_length))
    if _of != [told]:
        _known.clear()
        _of[:] = [told]
    keys = list(zip(data.text, pairs, strict=True))
    new = [k for k, key in enumerate(keys) if key not in _known]
    if new:
        seed = prepared.seed_adapter
        model.activate(no_adapter(seed))
        head = next(iter(seed.heads)).partition(".")[0]
        seen: list[Tensor] = []

        def keep(_: object, inputs: tuple[Tensor, ...]) -> None:
            seen.append(inputs[0][:, 0] if inputs[0].ndim == 3 else inputs[0])

        examples = encode(data.select(new), model.tokenizer, max_length=config.data.max_length)
        order = sorted(range(len(new)), key=lambda k: len(examples[k]["input_ids"]))
        network = model.network.eval()
        handle = network.get_submodule(f"base_model.model.{head}").register_forward_pre_hook(keep)
        try:
            with torch.no_grad():
                for k in range(0, len(order), config.evaluate.batch_size):
                    batch = order[k : k + config.evaluate.batch_size]
                    network(**collate([examples[i] for i in batch], model.tokenizer, model.device))
                    for i, feature in zip(batch, seen.pop(), strict=True):
                        _known[keys[new[i]]] = feature.float().cpu()
        finally:
            handle.remove()
    return torch.stack([_known[key] for key in keys]).numpy()
