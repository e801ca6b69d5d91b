"""Methods by name: the built-in ones, those of installed packages, and any class as "module:Class"."""

from __future__ import annotations

import difflib
import inspect
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass, replace
from importlib.metadata import EntryPoint
from numbers import Integral, Real
from types import SimpleNamespace, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from fedlora.core.method import Method
from fedlora.core.read_only import ReadOnly
from fedlora.core.text import quoted
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
from fedlora.methods.plugins import loaded, offered, package_of
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
        HyperparameterError: an unknown name, preset or hyper-parameter (the message suggests the nearest), an
            impossible value, or a class that is not a method (the message says what it lacks).

    Example:
        >>> build("glora", rho=0.5).rho
        0.5
        >>> build("flexlora", preset="raflora").name
        'flexlora'
    """
    cls = find(name)
    given = dict(hparams)
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
    hparams |= _typed(cls, name, given)
    try:
        method: Method[Any] = cls(**hparams)
    except TypeError as error:
        raise HyperparameterError(f"{name}: a hyper-parameter has a wrong type: {error}. Got {hparams}.") from error
    except FedLoRAError:
        raise
    except Exception as error:
        raise HyperparameterError(f"{name} cannot be made: {type(error).__name__}: {error}. Got {hparams}.") from error
    return method


_IN_WORDS = {
    bool: "true or false", int: "a whole number", float: "a number", str: "a word", type(None): "none",
}  # fmt: skip


@dataclass(frozen=True)
class _Word:
    """One value of a `Literal`."""

    word: object


def _typed(cls: type[Any], name: str, hparams: Mapping[str, object]) -> dict[str, object]:
    """The hyper-parameters, checked against their fields' types as in a configuration: true and "3" are not numbers,
    and 3.0 is a whole number. Infinity is valid where it is the default.

    Raises:
        HyperparameterError: a value has another type; the message says what is expected.
    """
    wrong, typed = [], dict(hparams)
    for f in fields(cls):
        options = _options(_hint(cls, f)) if f.name in hparams else []
        value = hparams.get(f.name)
        if not options or value is f.default or (isinstance(value, float) and value == f.default):
            continue
        if isinstance(value, float) and value.is_integer() and int in options and float not in options:
            typed[f.name] = int(value)
        elif any(_fits(value, option) for option in options):
            continue
        elif isinstance(value, bool) or not all(isinstance(option, _Word) for option in options):
            wrong.append(f"{f.name} is {_in_words(options, value)}; got {quoted(value)}.")
        # for words alone, each method's own error lists them
    if wrong:
        raise HyperparameterError(f"{name}: a hyper-parameter has a wrong type: {' '.join(wrong)}")
    return typed


def _hint(cls: type[Any], field: Field[Any]) -> Any:
    """A field's type. None if it cannot be resolved: a stranger's class may name types that do not exist, and reports
    bad values itself. Each field is resolved alone, so that one such name hides no other field's type."""
    owner = [base for base in cls.__mro__ if vars(base).get("__dataclass_fields__", {}).get(field.name) is field][-1]
    written = SimpleNamespace(__annotations__={field.name: field.type})
    try:
        return get_type_hints(written, vars(sys.modules[owner.__module__]), dict(vars(owner)))[field.name]
    except Exception:
        return None


def _options(wanted: Any) -> list[Any]:
    """The plain types that a value may have; empty if it may also have another type."""
    if get_origin(wanted) in (Union, UnionType):
        each = [_options(option) for option in get_args(wanted)]
        return [option for options in each for option in options] if all(each) else []
    if get_origin(wanted) is Literal:
        return [_Word(word) for word in get_args(wanted)]
    return [wanted] if wanted in _IN_WORDS else []


def _fits(value: object, option: Any) -> bool:
    if isinstance(option, _Word):
        return value == option.word and isinstance(value, bool) == isinstance(option.word, bool)
    if option is bool or isinstance(value, bool):
        return option is bool and isinstance(value, bool)
    if option is int:
        return isinstance(value, Integral)
    if option is float:
        return isinstance(value, Integral) or (isinstance(value, Real) and math.isfinite(value))
    return isinstance(value, option)


def _in_words(options: Sequence[Any], value: object) -> str:
    words = dict.fromkeys(quoted(o.word) if isinstance(o, _Word) else _IN_WORDS[o] for o in options)
    finite = "a finite number" if isinstance(value, float) else "a number"
    return " or ".join(finite if word == "a number" else word for word in words)


def find(name: str) -> type[Any]:
    """The class behind a name: built in, from an installed package (entry points in group "fedlora.methods"), or
    "module:Class".

    Raises:
        HyperparameterError: there is none, it cannot be imported, or it is not a method.
    """
    if name in METHODS:
        return METHODS[name]
    installed = [point for point in plugins() if point.name == name]
    if len({point.value for point in installed}) > 1:
        places = ", ".join(f"{point.value} of {package_of(point)}" for point in installed)
        raise HyperparameterError(f"several packages offer a method {name!r}: {places}. Name one as module:Class.")
    if not installed and ":" not in name:
        known = [*METHODS, *(point.name for point in plugins())]
        raise HyperparameterError(
            f"no method is called {name!r}{_nearest(name, known)} Known: {', '.join(known)}; or module:Class."
        )
    cls: type[Any] = loaded(f"{installed[0].module}:{installed[0].attr}" if installed else name, name)
    require_method(cls, name)
    return cls


def plugins() -> list[EntryPoint]:
    """Methods that installed packages offer; they cannot replace a built-in name."""
    return [point for point in offered() if point.name not in METHODS]


@dataclass(frozen=True)
class Listed:
    """A method in a list. package: a plugin's; None: built in. error: why it cannot be used."""

    name: str
    package: str | None = None
    paper: str = ""
    defaults: Mapping[str, object] = field(default_factory=dict)
    presets: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    error: str | None = None


def listed() -> list[Listed]:
    """All methods by name, the built-in ones first. A plugin that cannot be used shows its error and hides no other."""
    rows = {name: _described(name, cls) for name, cls in METHODS.items()}
    for point in offered():
        package = package_of(point)
        if point.name in METHODS:
            error = f"{point.name} is built in and cannot be replaced; this one is {point.value}."
            rows[f"{point.name}@{package}"] = Listed(f"{point.name}@{package}", package, error=error)
            continue
        try:
            rows[point.name] = replace(_described(point.name, find(point.name)), package=package)
        except Exception as error:  # a stranger's class can raise anything when its fields are read
            rows[point.name] = Listed(point.name, package, error=str(error))
    return list(rows.values())


def _described(name: str, cls: type[Any]) -> Listed:
    """A method's row. Fields without a default are "required"; values that are not plain are shown as `repr`."""
    defaults: dict[str, object] = {}
    for f in fields(cls):
        made = f.default if f.default_factory is MISSING else f.default_factory()
        defaults[f.name] = "required" if made is MISSING else made
    presets = {key: _plain(dict(values)) for key, values in presets_of(cls).items()}
    return Listed(name, None, str(cls.paper), ReadOnly(_plain(defaults)), ReadOnly(presets))


def _plain(values: Mapping[str, object]) -> dict[str, object]:
    return {k: v if v is None or isinstance(v, bool | int | float | str) else repr(v) for k, v in values.items()}


def presets_of(cls: type[Any]) -> Mapping[str, Mapping[str, object]]:
    """Preset -> the hyper-parameters that it sets."""
    found: Mapping[str, Mapping[str, object]] = getattr(cls, "PRESETS", {})
    return found


def require_method(cls: Any, name: str) -> None:
    """Raises `HyperparameterError` unless `cls` follows the `Method` protocol; the message lists all that it lacks."""
    if not isinstance(cls, type):
        raise HyperparameterError(f"the method {name!r} is a {type(cls).__name__}, but must be a class.")
    wrong = [] if is_dataclass(cls) else ["it is not a dataclass with its hyper-parameters as fields"]
    wrong += [f"it has no {attribute}" for attribute in ("name", "paper", "State") if not hasattr(cls, attribute)]
    state = getattr(cls, "State", None)
    if state is not None and not (isinstance(state, type) and is_dataclass(state)):
        wrong.append("its State is not a dataclass, so no checkpoint can hold it")
    for function, arguments in _PROTOCOL.items():
        found = getattr(cls, function, None)
        if not callable(found):
            wrong.append(f"it has no {function}({', '.join(arguments)})")
            continue
        try:
            inspect.signature(found).bind(None, *arguments)
        except TypeError as error:
            wrong.append(f"{function}({', '.join(arguments)}) cannot be called so: {error}")
        except ValueError:  # no signature, as for some builtins
            continue
    if wrong:
        raise HyperparameterError(
            f"{name!r} is not a method: {'; '.join(wrong)}. fedlora.core.method.Method is the protocol, and `fedlora "
            f"methods check {name}` tests all of it."
        )


_PROTOCOL = {
    "init": ("seed", "key"), "roles": ("round",), "aggregate": ("state", "updates"),
    "readout": ("state", "client", "rank"), "effective": ("state",), "diagnostics": ("state",),
}  # fmt: skip


def _nearest(word: str, known: Any) -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else "."
