"""Methods by name: the built-in ones, those of installed packages, and any class as "module:Class"."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
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
from fedlora.methods.glora_paper import GLoRAPaper
from fedlora.methods.hetlora import HetLoRA
from fedlora.methods.lora_fair import LoRAFAIR
from fedlora.methods.padded_average import PaddedAverage
from fedlora.methods.raflora import RaFLoRA
from fedlora.methods.rolora import RoLoRA
from fedlora.methods.svd import SVD

_BUILT_IN: tuple[type[Method[Any]], ...] = (
    FedExLoRA, FedIT, FedRotLoRA, FedSALoRA, FedSVD, FFALoRA, FlexLoRA, FLoRA, GLoRA, GLoRAPaper, HetLoRA, LoRAFAIR,
    PaddedAverage, RaFLoRA, RoLoRA, SVD,
)  # fmt: skip
METHODS: Mapping[str, type[Method[Any]]] = ReadOnly({cls.name: cls for cls in _BUILT_IN})


def build(name: str, **hparams: object) -> Method[Any]:
    """A method with its hyper-parameters: a built-in or installed one by its name, or a class as "module:Class".

    Raises:
        HyperparameterError: an unknown name or hyper-parameter (the message suggests the nearest), an impossible value,
            or a class that is not a method (the message says what it lacks).

    Example:
        >>> build("glora", rho=0.5).rho
        0.5
    """
    cls = find(name)
    names = [f.name for f in fields(cls)]
    for key in hparams:
        if key not in names:
            listed = ", ".join(names) or "none"
            raise HyperparameterError(f"{name} has no hyper-parameter {key!r}{_nearest(key, names)} It has: {listed}.")
    try:
        method: Method[Any] = cls(**hparams)
    except TypeError as error:
        types = {f.name: f.type for f in fields(cls)}
        each = ", ".join(f"{key} is {types[key]}, got {value!r}" for key, value in hparams.items())
        raise HyperparameterError(f"{name}: a hyper-parameter has a wrong type: {each}.") from error
    except FedLoRAError:
        raise
    except Exception as error:  # a stranger's class can raise anything
        raise HyperparameterError(f"{name} cannot be made: {type(error).__name__}: {error}. Got {hparams}.") from error
    return method


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
    cls: type[Any] = _loaded(f"{installed[0].module}:{installed[0].attr}" if installed else name, name)
    _require_method(cls, name)
    return cls


def _loaded(place: str, name: str) -> Any:
    """The object at "module:Class".

    If a module is not installed, it is searched for in the working directory last, because a console script does not
    have that directory on its path. The directory stays on the path, so that other processes find the class too.
    """
    module, _, path = place.partition(":")
    try:
        _reach(module.partition(".")[0])
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (Exception, SystemExit) as error:  # a stranger's module can raise anything on import
        hint = ""
        if isinstance(error, ModuleNotFoundError):
            hint = f" fedlora looks on the Python path and in {Path.cwd()}: go to its folder, or install it."
        raise HyperparameterError(
            f"the method {name!r} cannot be made: {type(error).__name__}: {error}. A class is given as "
            f"package.module:Class, and its module must be importable from here.{hint}"
        ) from error
    return found


def _reach(top: str) -> None:
    """Append the working directory to the path if only it has the module or package `top`."""
    here = Path.cwd()
    beside = (here / f"{top}.py").is_file() or (here / top / "__init__.py").is_file()
    if beside and importlib.util.find_spec(top) is None:
        sys.path.append(str(here))


def _require_method(cls: Any, name: str) -> None:
    """Raises `HyperparameterError` unless `cls` is a frozen dataclass that derives from `Method` and lacks nothing.

    Each of these would else fail as late as in a round's aggregate or its checkpoint, in words of Python's own. The
    message lists all that is wrong, because the class is a stranger's.
    """
    if not isinstance(cls, type) or not issubclass(cls, Method):
        raise HyperparameterError(f"{name!r} is not a method: a class that derives from fedlora.Method.")
    wrong = [f"it has no {attribute}" for attribute in ("name", "paper") if not hasattr(cls, attribute)]
    wrong += [f"it has no {function}" for function in sorted(cls.__abstractmethods__)]
    for part, what in ((cls, "it"), (cls.State, f"its State, {cls.State.__name__},")):
        if not getattr(getattr(part, "__dataclass_params__", None), "frozen", False):
            wrong.append(f"{what} is no @dataclass(frozen=True)")
    if wrong:
        raise HyperparameterError(
            f"{name!r} is not a method: {'; '.join(wrong)}. fedlora.core.method is the protocol, and `fedlora methods "
            f"check {name}` tests all of it."
        )


def plugins() -> list[EntryPoint]:
    """Methods that installed packages offer; they cannot replace a built-in name."""
    return [point for point in _offered() if point.name not in METHODS]


def _offered() -> list[EntryPoint]:
    return sorted(entry_points(group="fedlora.methods"), key=lambda point: (point.name, package_of(point)))


def package_of(point: EntryPoint) -> str:
    """The distribution that defines an entry point."""
    return point.dist.name if point.dist is not None else "an unnamed package"


@dataclass(frozen=True)
class Listed:
    """A method in a list. package: a plugin's; None: built in. error: why it cannot be used."""

    name: str
    package: str | None = None
    paper: str = ""
    defaults: Mapping[str, object] = field(default_factory=dict)
    error: str | None = None


def listed() -> list[Listed]:
    """All methods by name, the built-in ones first. A plugin that cannot be used shows its error and hides no other."""
    rows = {name: _described(name, cls) for name, cls in METHODS.items()}
    for point in _offered():
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
        plain = made is None or isinstance(made, bool | int | float | str)
        defaults[f.name] = "required" if made is MISSING else made if plain else repr(made)
    return Listed(name, None, str(cls.paper), ReadOnly(defaults))


def _nearest(word: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else "."
