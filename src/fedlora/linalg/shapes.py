"""Tensor types that carry their shape, for readers and for the tests.

To a type checker `Float[Tensor, "d_out r"]` is a plain `Tensor`. With jaxtyping installed the tests check each shape at
each call (`tests/conftest.py`); elsewhere the annotations cost nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Float
else:
    try:
        from jaxtyping import Float
    except ImportError:

        class Float:
            """Stands in for `jaxtyping.Float`: `Float[Tensor, "..."]` is `Tensor`."""

            def __class_getitem__(cls, item: tuple[Any, str]) -> Any:
                return item[0]


__all__ = ["Float", "Tensor"]
