"""What lies before the first adapted layer of an encoder, computed once for each text instead of at every step.

The embeddings and the first layers of a model whose LoRA sits in later ones are the same function of a text in every
step, round and client. `remember` replaces them by a table: text -> what the first adapted layer reads. Nothing
that is trained or changed lies there, so that training is the same up to the rounding of padded batches.
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
MOST = 2**30  # bytes that a process remembers: then the oldest tables go, and what does not fit is computed each time
_SLAB = 2**26  # bytes that are asked for at once: so large that they go back to the system when they are let go of

# A text's token ids and segments, and in which precision it is computed: None, or that of autocast.
Key = tuple[tuple[int, ...], torch.dtype | None]


class Table:
    """Text -> what the remembered layers give, (tokens, width), in slabs of memory."""

    def __init__(self) -> None:
        self.known: dict[Key, Tensor] = {}
        self.slabs: list[Tensor] = []
        self._used = 0

    def add(self, key: Key, value: Tensor) -> None:
        """Remember it, where there is room."""
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
        """For one more slab, when the oldest of the other tables are forgotten."""
        while (sum(len(table.slabs) for table in tables.values()) + 1) * _SLAB > MOST:
            oldest = next((content for content, table in tables.items() if table is not self), None)
            if oldest is None:
                return False
            del tables[oldest]
        return True


tables: dict[str, Table] = {}  # by content of the layers: one process makes many runs on one model, with the same texts


class Remembered(nn.Module):
    """Stands where the embeddings stood, and gives what the last remembered layer gives.

    Texts are remembered by their token ids and segments, without their padding: 4 bytes x tokens x width of memory for
    each text, as long as the process lives, up to `MOST` of all. The modules that compute it are no submodules: nothing
    adapts, moves or stores them.
    """

    def __init__(self, embeddings: nn.Module, layers: list[nn.Module], pad: int) -> None:
        super().__init__()
        self._compute = (embeddings, layers)  # in a tuple, so that torch does not register them
        self._pad = pad
        content = _content([embeddings, *layers])
        self._table = tables.pop(content) if content in tables else Table()
        tables[content] = self._table  # at the end stands the one that was asked for last

    def forward(self, input_ids: Tensor, token_type_ids: Tensor | None = None, **_: Any) -> Tensor:
        kind = input_ids.device.type
        precision = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        rows = [self._of((key, precision)) for key in self._keys(input_ids, token_type_ids)]
        whole = nn.utils.rnn.pad_sequence(rows, batch_first=True)
        missing = input_ids.shape[1] - whole.shape[1]
        return nn.functional.pad(whole, (0, 0, 0, missing)) if missing else whole

    def _keys(self, input_ids: Tensor, segments: Tensor | None) -> list[tuple[int, ...]]:
        """Of each row: its ids without the padding, and behind them its segments."""
        ids = input_ids.tolist()
        kinds = [[0] * len(row) for row in ids] if segments is None else segments.tolist()
        lengths = [len(row) - next((k for k, i in enumerate(reversed(row)) if i != self._pad), 0) for row in ids]
        return [(*row[:n], *kind[:n]) for row, kind, n in zip(ids, kinds, lengths, strict=True)]

    @torch.no_grad()
    def _of(self, key: Key) -> Tensor:
        """Each text is computed by itself, so that its bits are the same whoever asks, and when."""
        found = self._table.known.get(key)
        if found is not None:
            return found
        hidden = self.compute(key[0])
        self._table.add(key, hidden)
        return hidden

    def compute(self, ids_and_segments: tuple[int, ...]) -> Tensor:
        """Of one text, (tokens, width)."""
        embeddings, layers = self._compute
        device = next(embeddings.parameters()).device
        ids, kinds = torch.tensor(ids_and_segments, device=device).view(2, 1, -1)
        embeddings.eval()
        hidden: Tensor = embeddings(input_ids=ids, token_type_ids=kinds)
        for layer in layers:
            hidden = layer.eval()(hidden, None)
        return hidden[0]


class PassedOver(nn.Module):
    """Stands where a remembered layer stood."""

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden_states


def _content(parts: list[nn.Module]) -> str:
    """What tells two prefixes apart: the bits of their weights, and where these are."""
    digest = hashlib.sha256()
    for part in parts:
        for name, tensor in part.state_dict().items():
            digest.update(f"{name} {tensor.dtype} {tensor.device} {tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()


def remember(network: Any, targets: Targets, pad: int | None) -> int:
    """Replace embeddings and all layers before the first adapted one by what they give. Returns how many layers.

    Args:
        network: a transformers model without adapters.
        targets: where LoRA will go.
        pad: the id of the padding token.

    Raises:
        ConfigError: no encoder with `embeddings` and `encoder.layer`, dropout there, LoRA before its second layer, or a
            model whose layers need more than what the layer before gives.
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
            "model.remember_prefix has nothing to remember: LoRA is in the first layer, or outside of the layers. Put "
            "it into later ones (lora.targets), or leave remember_prefix out."
        )
    prefix = [backbone.embeddings, *layers[:first]]
    rate = max((m.p for part in prefix for m in part.modules() if isinstance(m, nn.Dropout)), default=0.0)
    if rate:
        raise ConfigError(
            f"model.remember_prefix remembers a layer's output, and dropout {rate:g} changes it each time. Set "
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
    """Raises `ConfigError` where `layer` would read something else than in the whole model: of a short padded text."""
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
            raise TypeError("a layer gives more than one tensor")
        apart = float((whole - ours).norm() / whole.norm())
    except Exception as error:  # whatever layers of another kind need
        apart, why = 1.0, f"{type(error).__name__}: {error}"
    else:
        why = f"inputs of the first adapted layer differ by {apart:.1e}"
    finally:
        hook.remove()
    if not apart < 1e-2:  # of bfloat16
        raise ConfigError(
            f"model.remember_prefix computes the layers of a {type(network).__name__} one by one, and they need more "
            f"than the layer before gives ({why}). Leave it out."
        )


__all__ = ["MOST", "PassedOver", "Remembered", "remember", "tables"]
