"""`fedlora merge --method` and `--robust`: one round of a federated method, on adapters that arrive as files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fedlora.adapters.collection import Collection
from fedlora.adapters.merge_report import MergeReport
from fedlora.adapters.merging import Wanted, in_type, write_result
from fedlora.adapters.truncation import against_mean, combine
from fedlora.adapters.uploads import check_one_each, read_facts
from fedlora.core.lora import Adapter, LoRA
from fedlora.core.messages import Client, Upload
from fedlora.core.method import Method
from fedlora.core.text import shown
from fedlora.doing import stepped
from fedlora.errors import ConfigError, counted
from fedlora.methods import build
from fedlora.server.judged import Judged, in_words
from fedlora.server.kept import Kept
from fedlora.server.rules import Rule
from fedlora.server.server import Server


def merge_round(
    given: Collection,
    method: Method[Any],
    label: str,
    wanted: Wanted,
    rule: Rule | None,
) -> MergeReport:
    """Write a method's server update of these adapters like any merge.

    Args:
        given: a module that an adapter lacks counts as a pair of zeros. label: the method as
            typed. rule: a robust rule, which weighs the clients' changes; the report's remarks say what it did, and its
            error is relative to the rule's exact weighted mean, not to the plain one that includes byzantine clients.

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
    wide, dtype = wanted.type_for(given, wide=True), wanted.type_for(given)
    of, notes = "the mean of the adapters", []
    exact: Mapping[str, LoRA] = {}
    rules: dict[str, Any] = {}
    if judged is not None:
        all_of_it = build("svd", energy=1.0)
        exact = updates if method == all_of_it else _played(given, clients, all_of_it, rule)[0]
        of_each = [judged.clients.get(name) for name in clients]  # an adapter of weight 0 abstains
        rules = {"rule": judged.rule, "counts": tuple(one.coefficient if one else 0.0 for one in of_each)}
        notes = [in_words(judged.plain()) or f"{judged.rule}: all changes count in full"]
        label, of = f"{label}, weighed by {judged.rule}", f"the mean that {judged.rule} weighs"
    parts = {}
    for module in stepped(given.modules, "merging"):
        cut = combine(module, [updates[module]], [1.0], wide).cut(wanted.rule)
        mean = combine(module, [exact[module]], [1.0], wide) if exact else given.combined(module, wide)
        parts[module] = in_type(against_mean(*cut, mean.cut()), dtype)
    return write_result(given, wanted, parts, of, by=label, notes=notes, **rules)


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
    check_one_each(clients)
    pairs = [{module: file.lora(module) for module in file.modules} for file in given.files]
    start = _zero_start(pairs)
    zero = {name: lora.map(torch.zeros_like) for name, lora in start.modules.items()}
    adapters = [Adapter({**zero, **one}) for one in pairs]
    uploads = [
        Upload(Client(name, adapter.ranks), count, adapter)
        for name, count, adapter in zip(clients, given.weights, adapters, strict=True)
    ]
    server = Server(method, heads="frozen", round=Kept(rule, weighting="examples"))
    after = server.aggregate(server.init(start), uploads)
    return server.global_update(after), after.tally.judged if after.tally is not None else None


def _zero_start(adapters: Sequence[Mapping[str, LoRA]]) -> Adapter:
    """An adapter that changes nothing, with every module at its largest rank: B = 0, A from the largest one."""
    start: dict[str, LoRA] = {}
    for name, lora in (item for pairs in adapters for item in pairs.items()):
        if name not in start or lora.rank > start[name].rank:
            B, A = lora.factors
            start[name] = LoRA(torch.zeros_like(B), A)
    return Adapter(start)
