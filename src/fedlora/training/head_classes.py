"""Which class of transformers a model of a type has to be, so that it has the head that an adapter brought."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fedlora.adapters.head_config import AUTO, Shapes

# Of a config.json, what describes no layer, or is given anew.
_NOT_OF_LAYERS = {
    "model_type", "architectures", "num_labels", "id2label", "label2id", "auto_map", "transformers_version",
    "_name_or_path", "torch_dtype", "dtype",
}  # fmt: skip


def class_with_head(config: Mapping[str, Any], task: str, heads: Shapes, count: int) -> str | None:
    """The class for `task` of the config's type, built without weights for `count` classes, if it has all of these
    tensors in these shapes; else None, also where there is no such class, or no transformers."""
    try:
        import transformers

        layers = {key: value for key, value in config.items() if key not in _NOT_OF_LAYERS}
        described = transformers.AutoConfig.for_model(config["model_type"], **layers, num_labels=count)
        kind = getattr(transformers, AUTO[task])._model_mapping[type(described)]
        with torch.device("meta"):
            built = kind(described)
    except (ImportError, LookupError, ValueError, TypeError, AttributeError, RuntimeError):  # no such class: said by it
        return None
    has = {name: tuple(tensor.shape) for name, tensor in built.state_dict().items()}
    return kind.__name__ if all(has.get(name) == shape for name, shape in heads.items()) else None
