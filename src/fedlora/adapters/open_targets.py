"""Modules of which the config leaves to the base model whether peft targets them.

Three configs do: target_modules = null (peft takes what its table says for the model's type), "all-linear" (every
linear layer but the output's), and ensure_weight_tying (also what is tied to a targeted embedding). peft itself saves
names instead of the first two, so a file that has them was written by hand. With the base model there, peft is asked
(`fedlora.applying`). Without it, what the file alone tells is: null is refused, all-linear means nothing but linear
layers without a head. Of the rest a reader is told.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedlora.adapters.resolved import ALL_LINEAR, left_to_the_base
from fedlora.core.echo import quoted
from fedlora.errors import AdapterFormatError

_OUTPUTS = ("lm_head", "embed_out", "generator_lm_head")  # heads of language models, which "all-linear" leaves out


def check_kinds(config: Mapping[str, Any], kinds: Mapping[str, str]) -> None:
    """Raises `AdapterFormatError` where no base model makes peft target one of the modules.

    Args:
        kinds: name of each module that the base model decides on -> the kind of layer that its pair is of.
    """
    if left_to_the_base(config) == ALL_LINEAR:
        for name, kind in kinds.items():
            if kind not in ("linear", "adalora") or name.rpartition(".")[2] in _OUTPUTS:
                raise _left_out(name, "all-linear means linear layers, without the output's")


def check_without_base(config: Mapping[str, Any], kinds: Mapping[str, str]) -> tuple[str, ...]:
    """What a reader must know of modules that only the base model decides on; nothing where there are none.

    Args:
        kinds: name of each such module -> the kind of layer that its pair is of.

    Raises:
        AdapterFormatError: it depends on the base model's type.
    """
    if not kinds:
        return ()
    said = left_to_the_base(config)
    if said == "null":
        raise _left_out(
            next(iter(kinds)),
            "target_modules is null, so that the type of the base model decides, and there is none here to ask (apply "
            "and validate --base have one)",
            "may",
        )
    why = "ensure_weight_tying" if said is None else f"target_modules = {said}"
    return (
        f"with {why}, the base model decides whether peft loads {quoted(next(iter(kinds)), 120)}"
        f"{f' and {len(kinds) - 1:,} other modules' if len(kinds) > 1 else ''}; all are taken here. "
        f"fedlora validate --base asks a base model.",
    )


def _left_out(name: str, why: str, may: str = "would") -> AdapterFormatError:
    return AdapterFormatError(
        f"holds factors of {quoted(name)}, which peft {may} leave out: {why}. Name the modules in target_modules."
    )
