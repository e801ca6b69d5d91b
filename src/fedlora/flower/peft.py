"""Stock PEFT clients (FlowerTune), which exchange `get_peft_model_state_dict` and know nothing of fedlora.

A stock client's update is alpha / r times B A, and the server's is B A: `factor`, alpha / r, stands between the two Bs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from flwr.app import Array, ArrayRecord, MetricRecord, RecordDict
from torch import Tensor

from fedlora.core.lora import Adapter, LoRA
from fedlora.core.messages import Client, Upload
from fedlora.core.text import shown
from fedlora.errors import ConfigError
from fedlora.flower.envelope import RecordError, parts
from fedlora.flower.records import number, to_tensor


def peft_record(adapter: Adapter, factor: float) -> ArrayRecord:
    """The record that `set_peft_model_state_dict` reads, float32. A factor that is absent stays absent."""
    arrays = {}
    for module, lora in adapter.modules.items():
        for name, tensor in lora.tensors().items():
            scaled = tensor.detach().float() / (factor if name == "B" else 1.0)
            arrays[f"base_model.model.{module}.lora_{name}.weight"] = Array(scaled.numpy())
    return ArrayRecord(arrays)


def peft_adapter(arrays: ArrayRecord | None, factor: float) -> Adapter:
    """The common start from a PEFT state dict. Raises `ConfigError` for other tensors than pairs of LoRA factors, and
    for none."""
    if arrays is None:
        raise ConfigError("FedLoRA needs a start: adapter=, or initial_arrays, a PEFT state dict.")
    pairs: dict[str, dict[str, Tensor]] = {}
    for key, array in arrays.items():
        found = _factor(key)
        if found is None:
            raise ConfigError(f"{shown(key)} is no LoRA factor of a linear layer, which initial_arrays must be.")
        pairs.setdefault(found[0], {})[found[1]] = to_tensor(array, [None, None], key).float()
    for module, pair in pairs.items():
        if len(pair) < 2:
            lacks = "B" if "A" in pair else "A"
            raise ConfigError(f"{module!r} has no lora_{lacks}: give get_peft_model_state_dict as a whole.")
    return Adapter({m: LoRA(pair["B"] * factor, pair["A"]) for m, pair in sorted(pairs.items())})


def peft_upload(
    record: RecordDict, client: Client, shapes: Mapping[str, tuple[int, int]], factor: float
) -> tuple[Upload, float | None]:
    """A stock client's upload, and its train_loss, if it reports one: the state dict in an ArrayRecord, num-examples
    and train_loss in a MetricRecord. Each array leaves the record when it is read.

    Args:
        shapes: module -> (d_out, d_in).

    Raises:
        RecordError: keys or shapes that no LoRA of these modules has.
    """
    modules: dict[str, dict[str, Tensor]] = {}
    for arrays, key in [(found, key) for found in parts(record, ArrayRecord).values() for key in found]:
        module, name = _factor(key) or ("", "")
        if module not in shapes:
            raise RecordError(f"{key[:80]!r} is no LoRA factor of this model.")
        (d_out, d_in), r = shapes[module], client.ranks(shapes)[module]
        expected = (d_out, r) if name == "B" else (r, d_in)
        modules.setdefault(module, {})[name] = to_tensor(arrays.pop(key), expected, key[:80])
    lacks = [m for m in shapes if set(modules.get(m, {})) != {"A", "B"}]
    if lacks:
        raise RecordError(f"module {lacks[0]!r} lacks a factor ({len(lacks)} such).")
    pairs = {m: LoRA(pair["B"] * factor if factor != 1 else pair["B"], pair["A"]) for m, pair in modules.items()}
    has_loss = any("train_loss" in metrics for metrics in parts(record, MetricRecord).values())
    upload = Upload(client, number(record, "num-examples"), Adapter(pairs))
    return upload, number(record, "train_loss") if has_loss else None


def ranks_of_clients(clients: Any, rank: int | None) -> dict[str, Any]:
    """Client -> its rank, from a table of them; or, of one rank, from their names or their number. Raises
    `ConfigError`."""
    if isinstance(clients, Mapping):
        return dict(clients)
    names = [f"site-{k + 1}" for k in range(clients)] if isinstance(clients, int) else list(clients)
    if isinstance(clients, str) or len(set(names)) < len(names) or rank is None:
        raise ConfigError(
            f"clients is their number, a list of different names (both with r, or an adapter of that rank), or a table "
            f"name -> rank; got {clients!r:.80}."
        )
    return dict.fromkeys(names, rank)


def _factor(key: str) -> tuple[str, str] | None:
    """(module, "B" or "A") from a key of get_peft_model_state_dict; None if it is not a linear layer's LoRA factor."""
    found = re.fullmatch(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.default)?\.weight", key)
    return (found[1], found[2]) if found is not None else None
