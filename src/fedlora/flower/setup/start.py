"""The common start of a federation, as a PEFT directory: made from a base model, or given and checked.

It needs no site's data. A given start needs no model here either: each site checks that its modules are those of its
model, before anything is trained.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fedlora.adapters.io import AdapterSpec, spec_of
from fedlora.adapters.reader import AdapterFile
from fedlora.core.lora import Adapter
from fedlora.core.text import quoted
from fedlora.errors import ConfigError
from fedlora.flower.setup.policy_file import Rank
from fedlora.flower.terms.settings import FederationSettings
from fedlora.runs.base_names import base_name
from fedlora.runs.exported import named
from fedlora.runs.sections import ModelSection
from fedlora.training.digests import model_content
from fedlora.training.skeleton import longest_of


@dataclass(frozen=True, eq=False)
class Start:
    """An adapter with which everybody begins, and the other contents of its files."""

    adapter: Adapter
    spec: AdapterSpec

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """Module -> (d_out, d_in)."""
        return {name: (len(lora.factors[0]), lora.factors[1].shape[1]) for name, lora in self.adapter.modules.items()}


def made_start(settings: FederationSettings, model: str, rank: int) -> Start:
    """A fresh start of this rank, drawn from run.seed as in `fedlora run`. Loads the base model.

    Raises:
        ConfigError: the model cannot be loaded, or has no such targets.
    """
    section = ModelSection(path=model, device="cpu", **settings.model.model_dump())
    section.check_targets(settings.lora.targets)
    loaded = section.load(settings.lora, settings.data.labels or (), settings.run.seed)
    adapter, spec = loaded.seed_adapter(rank, seed=settings.run.seed)
    return Start(adapter, named(spec, base_name(model, model_content(section.location())).name))


def given_start(folder: Path, settings: FederationSettings) -> Start:
    """A given PEFT directory as the start. Its alpha / r becomes that of the settings, and its update stays.

    Raises:
        AdapterFormatError: it is not an adapter with W0 + s B A. ConfigError: its targets or classes differ from
            the settings.
    """
    unit = settings.lora.unit
    file = AdapterFile(folder, scaling=unit)
    file.check()
    _check_targets(file, settings)
    _check_head(file, settings)
    modules = {module: file.lora(module) for module in file.modules}
    heads = {path: file.head(path) for path in file.heads}
    return Start(Adapter(modules, heads), spec_of(file.config, unit))


def check_ranks(shapes: Mapping[str, tuple[int, int]], clients: Mapping[str, Rank]) -> None:
    """Raises `ConfigError` for a rank that no update of these shapes can use. shapes: module -> (d_out, d_in)."""
    for name, rank in clients.items():
        of = {module: rank if isinstance(rank, int) else rank.get(module, 1) for module in shapes}
        over = {module: r for module, r in of.items() if r > max(shapes[module])}
        if len(over) == len(shapes):
            module, r = next(iter(over.items()))
            raise ConfigError(
                f"the site {quoted(name)} has rank {r}, and {quoted(module)} of the model is a matrix of "
                f"{' x '.join(map(str, shapes[module]))}: a rank beyond its longer side trains "
                f"nothing. Most LoRA ranks are 2 to 64."
            )


def check_max_length(settings: FederationSettings, model: str, file: str) -> None:
    """Raises `ConfigError` if sites may train on longer texts than the base model reads: every round would fail at a
    site that has one. Says nothing of a model that is not on this machine. file: where the key is set."""
    place, most = Path(ModelSection(path=model).location()), settings.data.max_length
    if place.is_dir() and (longest := longest_of(place, settings.model.task)) is not None and most > longest:
        raise ConfigError(
            f"data.max_length = {most}, but the base model {model} has only {longest} positions: at a site with a "
            f"longer text every round would fail. Set data.max_length to {longest} or less in {file}; longer texts "
            f"are then cut."
        )


def _check_targets(file: AdapterFile, settings: FederationSettings) -> None:
    targets = settings.lora.targets
    if targets == "all-linear":
        return
    if isinstance(targets, str):
        outside = [module for module in file.modules if not re.fullmatch(targets, module)]
        unused: list[str] = []
    else:
        outside = [m for m in file.modules if not any(m == t or m.endswith(f".{t}") for t in targets)]
        unused = [t for t in targets if not any(m == t or m.endswith(f".{t}") for m in file.modules)]
    if outside or unused:
        what = f"adapts {quoted(outside[0])}" if outside else f"adapts no module called {quoted(unused[0])}"
        raise ConfigError(
            f"the start {file.directory} {what}, but the federation has lora.targets = {quoted(targets)}: the sites "
            f"would train other modules than the server has. Make the two agree."
        )


def _check_head(file: AdapterFile, settings: FederationSettings) -> None:
    labels = settings.data.labels or ()
    rows = {path: file.head(path).shape[0] for path in file.heads if file.head(path).ndim}
    if settings.model.task != "classification" or not labels or not rows or len(labels) in rows.values():
        return
    path, found = next(iter(rows.items()))
    raise ConfigError(
        f"the start {file.directory} has a head {quoted(path)} of {found} rows, but there are {len(labels)} classes "
        f"({', '.join(map(str, labels))}): it was trained for others."
    )


__all__ = ["Start", "check_max_length", "check_ranks", "given_start", "made_start"]
