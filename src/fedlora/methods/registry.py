"""Methods by name: the built-in ones, those of installed packages, and any class as "module:Class"."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from fedlora.core.method import Method
from fedlora.core.read_only import ReadOnly
from fedlora.errors import FedLoRAError, HyperparameterError
from fedlora.methods.fedex_lora import FedExLoRA
from fedlora.methods.fedit import FedIT
from fedlora.methods.fedrot_lora import FedRotLoRA
from fedlora.methods.fedsa_lora import FedSALoRA
from fedlora.methods.fedsvd import FedSVD
from fedlora.methods.ffa_lora import FFALoRA
from fedlora.methods.flexlora import FlexLoRA
from fedlora.methods.flora import FLoRA
from fedlora.methods.glora import GLoRA
from fedlora.methods.hetlora import HetLoRA
from fedlora.methods.lora_fair import LoRAFAIR
from fedlora.methods.padded_average import PaddedAverage
from fedlora.methods.rolora import RoLoRA
from fedlora.methods.svd import SVD

METHODS: Mapping[str, type[Method[Any]]] = ReadOnly(
    {
        "fedex-lora": FedExLoRA,
        "fedit": FedIT,
        "fedrot-lora": FedRotLoRA,
        "fedsa-lora": FedSALoRA,
        "fedsvd": FedSVD,
        "ffa-lora": FFALoRA,
        "flexlora": FlexLoRA,
        "flora": FLoRA,
        "glora": GLoRA,
        "hetlora": HetLoRA,
        "lora-fair": LoRAFAIR,
        "padded-average": PaddedAverage,
        "rolora": RoLoRA,
        "svd": SVD,
    }
)


def build(name: str, *, preset: str | None = None, **hparams: object) -> Method[Any]:
    """A method with its hyper-parameters: a built-in or installed one by its name, or a class as "module:Class".

    Args:
        preset: sets several hyper-parameters at once; `hparams` win over it.

    Raises:
        HyperparameterError: unknown name, preset or hyper-parameter (naming the nearest), an impossible value, or a
            class that is no method, with what it lacks.
    """
    cls = find(name)
    if preset is not None:
        known = presets_of(cls)
        if preset not in known:
            listed = f"known presets: {', '.join(known)}" if known else "it has none"
            raise HyperparameterError(f"{name} has no preset {preset!r}; {listed}.")
        hparams = {**known[preset], **hparams}
    names = [f.name for f in fields(cls)]
    for key in hparams:
        if key not in names:
            listed = ", ".join(names) or "none"
            raise HyperparameterError(f"{name} has no hyper-parameter {key!r}{_nearest(key, names)} It has: {listed}.")
    try:
        method: Method[Any] = cls(**hparams)
    except TypeError as error:
        raise HyperparameterError(f"{name}: a hyper-parameter has a wrong type: {error}. Got {hparams}.") from error
    except FedLoRAError:
        raise
    except Exception as error:
        raise HyperparameterError(f"{name} cannot be made: {type(error).__name__}: {error}. Got {hparams}.") from error
    return method


def find(name: str) -> type[Any]:
    """The class behind a name: built in, of an installed package (entry points of group "fedlora.methods"), or
    "module:Class".

    Raises:
        HyperparameterError: there is none, it cannot be imported, or it is no method.
    """
    if name in METHODS:
        return METHODS[name]
    installed = {point.name: point for point in plugins()}
    if name not in installed and ":" not in name:
        known = [*METHODS, *installed]
        raise HyperparameterError(
            f"no method is called {name!r}{_nearest(name, known)} Known: {', '.join(known)}; or module:Class."
        )
    place = installed[name].value if name in installed else name
    module, _, path = place.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except Exception as error:  # a stranger's module can raise anything while it is imported
        raise HyperparameterError(
            f"the method {name!r} cannot be made: {type(error).__name__}: {error}. A class is given as "
            f"package.module:Class, and its module must be importable from here."
        ) from error
    require_method(found, name)
    cls: type[Any] = found
    return cls


def plugins() -> list[EntryPoint]:
    """Methods that installed packages offer; a name that is built in stays ours."""
    return [point for point in entry_points(group="fedlora.methods") if point.name not in METHODS]


def presets_of(cls: type[Any]) -> Mapping[str, Mapping[str, object]]:
    """Preset -> the hyper-parameters that it sets."""
    found: Mapping[str, Mapping[str, object]] = getattr(cls, "PRESETS", {})
    return found


def require_method(cls: Any, name: str) -> None:
    """Raises `HyperparameterError` unless `cls` follows the `Method` protocol, with all that it lacks."""
    if not isinstance(cls, type):
        raise HyperparameterError(f"the method {name!r} is a {type(cls).__name__}, and a class is needed.")
    wrong = [] if is_dataclass(cls) else ["it is no dataclass, whose fields are the hyper-parameters"]
    wrong += [f"it has no {attribute}" for attribute in ("name", "paper", "State") if not hasattr(cls, attribute)]
    state = getattr(cls, "State", None)
    if state is not None and not (isinstance(state, type) and is_dataclass(state)):
        wrong.append("its State is no dataclass, so that no checkpoint could hold it")
    for function, arguments in _PROTOCOL.items():
        found = getattr(cls, function, None)
        if not callable(found):
            wrong.append(f"it has no {function}({', '.join(arguments)})")
            continue
        try:
            inspect.signature(found).bind(None, *arguments)
        except TypeError as error:
            wrong.append(f"{function}({', '.join(arguments)}) cannot be called so: {error}")
        except ValueError:  # no signature to be had, as of a builtin
            continue
    if wrong:
        raise HyperparameterError(
            f"{name!r} is no method: {'; '.join(wrong)}. fedlora.core.method.Method is the protocol, and `fedlora "
            f"methods check {name}` tests all of it."
        )


_PROTOCOL = {
    "init": ("seed", "key"), "roles": ("round",), "aggregate": ("state", "updates"),
    "readout": ("state", "client", "rank"), "effective": ("state",), "diagnostics": ("state",),
}  # fmt: skip


def _nearest(word: str, known: Any) -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else "."
