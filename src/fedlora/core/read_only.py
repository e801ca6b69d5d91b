"""A read-only mapping, so that values that hold one are immutable. It pickles and serialises to JSON."""

from __future__ import annotations

from typing import Any, NoReturn, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class ReadOnly(dict[K, V]):
    """A `dict` that refuses to change. Construct it like one; `|`, `copy` and `dict(...)` give plain dicts."""

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError(
            "this mapping belongs to a value, which cannot change: make a new one, as {**mapping, key: value}."
        )

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[type, tuple[dict[K, V]]]:
        return type(self), (dict(self),)
