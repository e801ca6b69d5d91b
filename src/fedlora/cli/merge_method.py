"""`fedlora merge --method` and `--robust`: one round of a federated method, on adapters that arrive as files."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fedlora.adapters.collection import Collection
from fedlora.adapters.merge_report import MergeReport, Weighed
from fedlora.adapters.merging import Part, Progress, Wanted, in_type, write_result
from fedlora.adapters.truncation import against_mean, combine
from fedlora.adapters.uploads import read_facts
from fedlora.core.lora import Adapter, LoRA, stack
from fedlora.core.messages import Client, Upload
from fedlora.core.method import Method
from fedlora.core.text import shown
from fedlora.errors import AdapterFormatError, ConfigError, counted, repeated
from fedlora.methods import build
from fedlora.server.judged import Judged, in_words
from fedlora.server.kept import Kept
from fedlora.server.rules import Rule
from fedlora.server.server import Server

Against = Callable[[str], Part]


def merge_round(
    given: Collection,
    method: Method[Any],
    label: str,
    wanted: Wanted,
    *,
    rule: Rule | None = None,
    progress: Progress | None = None,
) -> MergeReport:
    """Write a method's server update of these adapters like any merge.

    Args:
        given: with missing = "zero", a module that an adapter lacks counts as a pair of zeros. label: the method as
            typed. rule: a robust rule, which weighs the clients' changes; the report's remarks say what it did.

    Raises:
        ConfigError: the method's clients keep a part, or its base weights move, so an adapter alone is not its result;
            with a rule, saved modules would be averaged without it.
        AdapterFormatError: two of the adapters belong to one client.
        UploadRefused, RankMismatch: as in the server and the method.
    """
    _check_method(method)
    if rule is not None:
        _check_heads(given, wanted.heads)
    clients = [read_facts(file.directory).client for file in given.files]
    updates, judged = _played(given, clients, method, rule)
    notes: list[str] = []
    if judged is not None:
        notes = [in_words(judged.plain()) or f"{judged.rule}: all changes count in full"]
        label = f"{label}, weighed by {judged.rule}"
    wide, dtype = wanted.type_for(given, wide=True), wanted.type_for(given)
    of, against, weighed = _measure(given, clients, method, rule, judged, updates, wide)
    modules = [*(m for m in given.modules if m in updates), *(m for m in updates if m not in set(given.modules))]
    parts = {}
    for module in progress(modules, "merging") if progress else modules:
        cut = combine(module, [updates[module]], [1.0], wide).cut(wanted.rule)
        parts[module] = in_type(against_mean(*cut, against(module)), dtype)
    made = f"The server update of {label}"
    return write_result(given, wanted, parts, made, of, weighed=weighed, notes=notes)


def _check_method(method: Method[Any]) -> None:
    """Raise `ConfigError` if an adapter alone is not the method's result."""
    roles = method.roles(0)
    if not roles.both_shared:
        raise ConfigError(
            f"{method.name} needs clients that keep a part of their adapter or freeze it (B {roles.B}, A "
            f"{roles.A}); with files only, a method must share both factors: glora, fedit, flexlora, svd, ..."
        )
    if method.moves_base:
        raise ConfigError(f"{method.name} moves the base weights, so its result is more than an adapter.")


def _check_heads(given: Collection, heads: str) -> None:
    """Raise `ConfigError` if saved modules would be averaged without the rule."""
    beside = sorted({name for file in given.files for name in file.heads})
    if beside and heads == "average":
        raise ConfigError(
            f"--robust looks only at pairs, but {counted(len(beside), 'tensor')} beside them (such as "
            f"{shown(beside[0])}) would be averaged with the plain weights, byzantine clients included. Add --heads "
            f"drop, or --heads first to take those of the first adapter; rounds of a server (fedlora run, fedlora "
            f"flower) judge heads with the pairs."
        )


def _played(
    given: Collection, clients: Sequence[str], method: Method[Any], rule: Rule | None
) -> tuple[Mapping[str, LoRA], Judged | None]:
    """The server's update for each module after one round that began from no adapter, and what the rule made of it.

    Raises:
        AdapterFormatError: two uploads of one client. UploadRefused, RankMismatch, NoGlobalModel: as in the server.
    """
    twice = repeated(clients)
    if twice:
        raise AdapterFormatError(f"two of the adapters belong to client {twice[0]!r}: give one per client.")
    pairs = [{module: file.lora(module) for module in file.modules} for file in given.files]
    start = _zero_start(pairs)
    zero = {name: lora.map(torch.zeros_like) for name, lora in start.modules.items()}
    adapters = [Adapter({**(zero if given.missing == "zero" else {}), **one}) for one in pairs]
    uploads = [
        Upload(Client(name, adapter.ranks), count, adapter)
        for name, count, adapter in zip(clients, given.weights, adapters, strict=True)
    ]
    server = Server(method, heads="frozen", round=Kept(rule, weighting="examples"))
    after = server.aggregate(server.init(start), uploads)
    return server.global_update(after), after.tally.judged if after.tally is not None else None


def _zero_start(adapters: Sequence[Mapping[str, LoRA]]) -> Adapter:
    """An adapter that changes nothing, with every module at its largest rank: B = 0, A from the largest one."""
    largest: dict[str, LoRA] = {}
    for pairs in adapters:
        for name, lora in pairs.items():
            if name not in largest or lora.rank > largest[name].rank:
                largest[name] = lora
    start = {}
    for name, lora in largest.items():
        B, A = lora.factors
        start[name] = LoRA(torch.zeros_like(B), A)
    return Adapter(start)


def _measure(
    given: Collection, clients: Sequence[str], method: Method[Any], rule: Rule | None,
    judged: Judged | None, updates: Mapping[str, LoRA], wide: torch.dtype,
) -> tuple[str, Against, Weighed | None]:  # fmt: skip
    """(what the result's error is relative to, in words; that reference; what the rule did). With a rule, the reference
    is the rule's exact weighted mean, not the plain one that includes byzantine clients."""

    def plain(module: str) -> Part:
        return given.combined(module, wide).cut()

    if judged is None or rule is None:
        return "the mean of the adapters", plain, None
    robust, exact = updates, build("svd", energy=1.0)
    if method != exact:
        robust, _ = _played(given, clients, exact, rule)
    of_each = [judged.clients.get(name) for name in clients]  # an adapter of weight 0 abstains
    counts = tuple(one.coefficient if one else 0.0 for one in of_each)
    why = tuple(one.reason if one else "weight 0" for one in of_each)
    weighed = Weighed(judged.rule, counts, why, _apart(robust, plain))
    of = f"the mean that {weighed.rule} weighs"
    return of, lambda module: combine(module, [robust[module]], [1.0], wide).cut(), weighed


def _apart(updates: Mapping[str, LoRA], plain: Against) -> float:
    """The relative distance of these updates from the plain mean, over all modules."""
    off, size = [], []
    for module, lora in updates.items():
        mean, report = plain(module)
        off.append(stack([lora.map(torch.Tensor.double), mean.map(torch.Tensor.double)], [1.0, -1.0]).norm())
        size.append(report.norm)
    return math.hypot(*off) / math.hypot(*size) if any(size) else (math.inf if any(off) else 0.0)
