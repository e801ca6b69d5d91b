"""Bytes of tensors without numpy. Expected: what numpy and safetensors' own writer and reader say."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor

from fedlora.core.tensor_file import TYPES, tensor_file
from fedlora.linalg.stored import stored_bytes

SHAPES = {
    "matrix": torch.randn(3, 4), "turned": torch.randn(3, 4).t(), "steps": torch.arange(20)[::3],
    "number": torch.tensor(3.0), "none": torch.zeros(0, 5), "yes": torch.tensor([True, False]),
    "wide": torch.randn(2, 3, dtype=torch.float64), "learned": torch.randn(2, 2, requires_grad=True),
    "expanded": torch.tensor([[1.0], [2.0]]).expand(2, 3),
}  # fmt: skip


@pytest.mark.parametrize("tensor", SHAPES.values(), ids=SHAPES)
def test_the_bytes_are_numpy_s(tensor: Tensor) -> None:
    assert bytes(stored_bytes(tensor)) == tensor.detach().numpy().tobytes()


def test_the_bytes_stay_when_the_tensor_is_forgotten() -> None:
    tensor = torch.arange(100_000, dtype=torch.float64)
    want, seen = tensor.numpy().tobytes(), stored_bytes(tensor.reshape(100, 1000).t().t())
    del tensor
    gc.collect()
    others = [torch.full((100_000,), 7.0, dtype=torch.float64) for _ in range(20)]
    assert bytes(seen) == want and others


def test_a_file_is_what_the_library_reads(tmp_path: Path) -> None:
    """Names that need escapes, every type of the format, and the metadata."""
    tensors = {f'{name} "x" é': tensor.detach() for name, tensor in SHAPES.items()}
    tensors |= {f"t.{name}": torch.tensor([1, 0, 1]).to(dtype) for dtype, name in TYPES.items()}
    (tmp_path / "x.safetensors").write_bytes(b"".join(tensor_file(tensors, {"tree": json.dumps(["ü", "\n"])})))
    with safetensors.safe_open(tmp_path / "x.safetensors", framework="pt") as file:
        assert json.loads(file.metadata()["tree"]) == ["ü", "\n"]
    found = safetensors.torch.load_file(tmp_path / "x.safetensors")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
        assert bytes(stored_bytes(found[name])) == bytes(stored_bytes(tensor)), name


def test_a_type_that_the_format_lacks_is_an_error() -> None:
    with pytest.raises(KeyError):
        tensor_file({"a": torch.zeros(2, dtype=torch.complex64)}, {})
