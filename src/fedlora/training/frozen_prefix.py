"""Computes an encoder's layers before the first adapted one once per text instead of at every step.

If LoRA is only in later layers, the embeddings and first layers of a model are the same function of a text in every
step, round and client. `remember` replaces them by a table: text -> the first adapted layer's input. Nothing in them is
trained or changed, so training is the same up to rounding in padded batches.
"""

from __future__ import annotations

import hashlib
import re
from typing import Any

import torch
from torch import Tensor, nn

from fedlora.errors import ConfigError
from fedlora.training.settings import Targets
from fedlora.training.targets import adapted

_BLOCK = re.compile(r"^(?P<stack>.*\.layer)\.(?P<number>\d+)\.")
MOST = 2**30  # bytes remembered per process; beyond it the oldest tables go, and what does not fit is recomputed
_SLAB = 2**26  # bytes per allocation, large enough to be returned to the system when freed

# A text's token ids and segments, and the precision of its computation: None, or autocast's.
Key = tuple[tuple[int, ...], torch.dtype | None]


class Table:
    """Text -> output of the remembered layers, (tokens, width), in slabs of memory."""

    def __init__(self) -> None:
        self.known: dict[Key, Tensor] = {}
        self.slabs: list[Tensor] = []
        self._used = 0

    def add(self, key: Key, value: Tensor) -> None:
        """Remember the value, if there is room."""
        size = value.numel()
        if not self.slabs or self._used + size > self.slabs[-1].numel() or self.slabs[-1].dtype != value.dtype:
            if size * value.element_size() > _SLAB or not self._has_room():
                return
            self.slabs.append(torch.empty(_SLAB // value.element_size(), dtype=value.dtype, device=value.device))
            self._used = 0
        place = self.slabs[-1][self._used : self._used + size].view_as(value)
        self.known[key] = place.copy_(value)
        self._used += size

    def _has_room(self) -> bool:
        """Whether there is room for one more slab, after dropping the oldest other tables."""
        while (sum(len(table.slabs) for table in tables.values()) + 1) * _SLAB > MOST:
            oldest = next((content for content, table in tables.items() if table is not self), None)
            if oldest is None:
                return False
            del tables[oldest]
        return True


tables: dict[str, Table] = {}  # by the layers' content: a process may make many runs on one model, with the same texts


class Remembered(nn.Module):
    """Replaces the embeddings, and returns the output of the last remembered layer.

    Texts are keyed by their token ids and segments, without padding; each takes 4 bytes x tokens x width of memory for
    the life of the process, up to `MOST` in total. The modules that compute the output are not submodules, so nothing
    adapts, moves or stores them.
    """

    def __init__(self, embeddings: nn.Module, layers: list[nn.Module], pad: int) -> None:
        super().__init__()
        self._compute = (embeddings, layers)  # in a tuple, so that torch does not register them
        self._pad = pad
        content = _content([embeddings, *layers])
        self._table = tables.pop(content) if content in tables else Table()
        tables[content] = self._table  # re-inserted at the end: the most recently used

    def forward(self, input_ids: Tensor, token_type_ids: Tensor | None = None, **_: Any) -> Tensor:
        kind = input_ids.device.type
        precision = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        rows = [self._of((key, precision)) for key in self._keys(input_ids, token_type_ids)]
        whole = nn.utils.rnn.pad_sequence(rows, batch_first=True)
        missing = input_ids.shape[1] - whole.shape[1]
        return nn.functional.pad(whole, (0, 0, 0, missing)) if missing else whole

    def _keys(self, input_ids: Tensor, segments: Tensor | None) -> list[tuple[int, ...]]:
        """Each row's ids without padding, followed by its segments."""
        ids = input_ids.tolist()
        kinds = [[0] * len(row) for row in ids] if segments is None else segments.tolist()
        lengths = [len(row) - next((k for k, i in enumerate(reversed(row)) if i != self._pad), 0) for row in ids]
        return [(*row[:n], *kind[:n]) for row, kind, n in zip(ids, kinds, lengths, strict=True)]

    @torch.no_grad()
    def _of(self, key: Key) -> Tensor:
        """Each text is computed alone, so its bits do not depend on who asks or when."""
        found = self._table.known.get(key)
        if found is not None:
            return found
        hidden = self.compute(key[0])
        self._table.add(key, hidden)
        return hidden

    def compute(self, ids_and_segments: tuple[int, ...]) -> Tensor:
        """One text's output, (tokens, width)."""
        embeddings, layers = self._compute
        device = next(embeddings.parameters()).device
        ids, kinds = torch.tensor(ids_and_segments, device=device).view(2, 1, -1)
        embeddings.eval()
        hidden: Tensor = embeddings(input_ids=ids, token_type_ids=kinds)
        for layer in layers:
            hidden = layer.eval()(hidden, None)
        return hidden[0]


class PassedOver(nn.Module):
    """Replaces a remembered layer."""

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden_states


def _content(parts: list[nn.Module]) -> str:
    """Identifies a prefix: the bits of its weights, and their device."""
    digest = hashlib.sha256()
    for part in parts:
        for name, tensor in part.state_dict().items():
            digest.update(f"{name} {tensor.dtype} {tensor.device} {tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()


def remember(network: Any, targets: Targets, pad: int | None) -> int:
    """Replace the embeddings and all layers before the first adapted one by their output. Returns how many layers.

    Args:
        network: a transformers model without adapters.
        targets: where LoRA will go.
        pad: the id of the padding token.

    Raises:
        ConfigError: the network is no encoder with `embeddings` and `encoder.layer`, has dropout there, has LoRA before
            its second layer, or its layers need more than the previous layer's output.
    """
    backbone: Any = getattr(network, getattr(network, "base_model_prefix", ""), None)
    layers: Any = getattr(getattr(backbone, "encoder", None), "layer", None)
    if not isinstance(layers, nn.ModuleList) or not isinstance(getattr(backbone, "embeddings", None), nn.Module):
        raise ConfigError(
            f"model.remember_prefix is for encoders with embeddings and encoder.layer, like BERT; "
            f"{type(network).__name__} is not one. Leave it out."
        )
    paths = adapted(network, targets)
    numbers = [int(found["number"]) for path in paths if (found := _BLOCK.match(f"{path}.")) is not None]
    first = min(numbers, default=0) if len(numbers) == len(paths) else 0
    if first == 0 or pad is None:
        raise ConfigError(
            "model.remember_prefix has nothing to remember: LoRA is in the first layer, or outside the layers. Put it "
            "into later ones (lora.targets), or leave remember_prefix out."
        )
    prefix = [backbone.embeddings, *layers[:first]]
    rate = max((m.p for part in prefix for m in part.modules() if isinstance(m, nn.Dropout)), default=0.0)
    if rate:
        raise ConfigError(
            f"model.remember_prefix stores a layer's output, but dropout {rate:g} changes it each time. Set "
            f"model.dropout = 0."
        )
    remembered = Remembered(backbone.embeddings, list(layers[:first]), pad)
    _check_same(network, layers[first], remembered, pad)
    backbone.embeddings = remembered
    for k in range(first):
        layers[k] = PassedOver()
    return first


@torch.no_grad()
def _check_same(network: Any, layer: nn.Module, remembered: Remembered, pad: int) -> None:
    """Raise `ConfigError` if `layer` would get another input than in the whole model, tested on a short padded text."""
    ids = [k for k in range(1, 8) if k != pad]
    batch = torch.tensor([[*ids, pad, pad]], device=next(layer.parameters()).device)
    read: list[Tensor] = []

    def note(_: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        read.append(given[0] if given else named["hidden_states"])

    hook = layer.register_forward_pre_hook(note, with_kwargs=True)
    try:
        with torch.random.fork_rng(devices=[]):
            network(input_ids=batch, attention_mask=(batch != pad).long())
        whole, ours = read[0][0, : len(ids)].double(), remembered.compute((*ids, *(0 for _ in ids))).double()
        if ours.shape != whole.shape:
            raise TypeError("a layer returns more than one tensor")
        apart = float((whole - ours).norm() / whole.norm())
    except Exception as error:  # other kinds of layers may fail in any way
        apart, why = 1.0, f"{type(error).__name__}: {error}"
    else:
        why = f"inputs to the first adapted layer differ by {apart:.1e}"
    finally:
        hook.remove()
    if not apart < 1e-2:  # bfloat16's precision
        raise ConfigError(
            f"model.remember_prefix computes a {type(network).__name__}'s layers one by one, but they need more than "
            f"the previous layer's output ({why}). Leave it out."
        )


__all__ = ["MOST", "PassedOver", "Remembered", "remember", "tables"]
