"""Writes tensors as safetensors bytes. The library's own writer needs numpy, which the core does not install."""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch
from torch import Tensor

from fedlora.linalg.stored import stored_bytes

# safetensors' names of data types: https://huggingface.co/docs/safetensors
TYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip


def tensor_file(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> list[bytes | memoryview]:
    """The content of a safetensors file, in pieces: views of the tensors, of which nothing is copied where they lie on
    the CPU in order. The widest types come first, so that every tensor is aligned.

    Raises `KeyError` for a data type that safetensors lacks.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    pieces, at = list[memoryview](), 0
    for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])):
        pieces.append(stored_bytes(tensor))
        spans = [at, at := at + len(pieces[-1])]
        header[name] = {"dtype": TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": spans}
    said = json.dumps(header, separators=(",", ":")).encode()
    said += b" " * (-len(said) % 8)
    return [len(said).to_bytes(8, "little"), said, *pieces]
