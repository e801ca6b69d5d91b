"""Whether an adapter fits a base model, and what it does to each of its tensors: one judgement, for `apply` and
`validate --base`.

The measure is what peft computes with the adapter beside the model. Where merged weights cannot say the same, or what
they would have to be cannot be told from the files, the adapter is refused.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fedlora.adapters.agreement import base_weights
from fedlora.adapters.architecture import Architecture, Tie
from fedlora.adapters.base_model import BaseFiles
from fedlora.adapters.base_names import KNOWN_WEIGHTS, is_path
from fedlora.adapters.module_names import plain, saved_modules
from fedlora.adapters.open_targets import check_with_base
from fedlora.adapters.orientation import is_transposed
from fedlora.adapters.reader import AdapterFile
from fedlora.adapters.same_steps import same_value
from fedlora.adapters.stored_names import StoredNames
from fedlora.adapters.weight_changes import Added, Replaced, Rows, Step, Update
from fedlora.core.echo import quoted
from fedlora.errors import AdapterFormatError

_TOKENS, _BIAS = ".token_adapter.trainable_tokens_delta", ".lora_B.bias"
_USUAL = ("embed_tokens", "lm_head")  # the names by which peft knows embeddings


@dataclass(frozen=True)
class Change:
    """One tensor of the result. source: the stored tensor that it begins from; None: it is the adapter's."""

    name: str
    source: str | None
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class Plan:
    """What becomes of the base model's tensors; all others stay, bit for bit.

    changes: by name. added: those that the base model does not have. untied: tie_word_embeddings must become false.
    notes: what a reader should know, a line each.
    """

    changes: Mapping[str, Change]
    added: Mapping[str, Change]
    untied: bool
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Wanted:
    """A step on the weight of that name, as the adapter's model calls it. shared: on all that are tied with it too."""

    name: str
    step: Step
    shared: bool = False


def planned(file: AdapterFile, base: BaseFiles) -> Plan:
    """What the adapter does to the base model.

    Raises:
        AdapterFormatError: it does not fit, in a line.
    """
    if file.config.get("layer_replication"):
        raise AdapterFormatError(f"{file.directory}: layer_replication makes another model, which is not written here.")
    return _Planning(file, base).plan()


class _Planning:
    def __init__(self, file: AdapterFile, base: BaseFiles) -> None:
        self.file, self.base = file, base
        self.architecture = Architecture(base.config, file.config)
        self.stored_as = StoredNames(file.layouts, base, self.architecture)
        self.added: dict[str, Change] = {}
        self._token_heads = sum(1 for head in file.heads if file.kind(head) == "tokens")
        self.notes: list[str] = []
        self.untied = False

    def plan(self) -> Plan:
        self._check_open_targets()
        self._check_saved_modules()
        wanted = [*self._updates(), *self._heads()]
        by_name: dict[str, list[_Wanted]] = {}
        for want in wanted:
            by_name.setdefault(want.name, []).append(want)
        changes: dict[str, Change] = {}
        done: set[str] = set()
        for name in by_name:
            if name in done:
                continue
            tie = self._tie(name)
            names = tie.names if tie is not None else (name,)
            done.update(names)
            found = self._alone(name, by_name[name]) if tie is None else self._tied(tie, by_name)
            for change in found:
                if change.name in changes:
                    raise self._refused(f"two of its modules are the one stored weight {change.name!r}")
                changes[change.name] = change
        extra = {name: change for name, change in changes.items() if name not in self.base} | self.added
        notes = [*self._relation(), *self.notes]
        for name, change in sorted(self.added.items()):
            shape = tuple(self.file.head(_head(change)).shape)
            notes.append(f"{name} {shape} is added: the base model has no such tensor.")
        if self.untied:
            more = sorted(self._end_ties(changes, extra))
            notes.append(
                "the head and the embedding, one tensor in the base model, become two: tie_word_embeddings = false."
                + (f" That ends all its ties: {', '.join(more)} stand by themselves too." if more else "")
            )
        return Plan({n: c for n, c in changes.items() if n in self.base}, extra, self.untied, tuple(notes))

    def _end_ties(self, changes: Mapping[str, Change], extra: dict[str, Change]) -> Iterator[str]:
        """tie_word_embeddings = false ends every tie of the model: what a tie gave a value is written by itself, or
        loading would make numbers up. Adds to `extra`; yields the names of it.
        """
        if self.stored_as.moved:
            raise self._refused(
                f"it changes one of several uses of one tensor, and the base model is stored without, or within, "
                f"{self.stored_as.moved!r}: which other tensors are tied there cannot be told"
            )
        written, grown = {*map(self.stored_as.in_memory, self.base.names), *extra}, True
        while grown:
            grown = False
            for one, other in self.architecture.pairs:
                if (one in written) is not (other in written):
                    given, lacking = (one, other) if one in written else (other, one)
                    stored = self.stored_as.find(given) or given
                    same = changes.get(stored) or extra.get(given) or Change(given, stored, ())
                    extra[lacking] = Change(self.stored_as.new(lacking), same.source, same.steps)
                    written.add(lacking)
                    grown = True
                    yield lacking

    def _updates(self) -> Iterator[_Wanted]:
        """The pairs."""
        nested: dict[str, list[str]] = {}
        for path, layout in self.file.layouts.items():
            if layout.kind == "parameter":
                nested.setdefault(plain(path), []).append(path)
                continue
            name = self.stored_as.weight_of(path)
            transposed = self._transposed(path, name)
            self._refuse_read_past(name)
            shared = self._together(name)
            twice = name.endswith(".out_proj.weight") and self._of_attention(name)
            if twice:
                self.notes.append(
                    f"{path}: peft counts the update of an nn.MultiheadAttention's out_proj twice; so does the result."
                )
            yield _Wanted(name, Update(self.file, path, layout, transposed, 2.0 if twice else 1.0), shared)
        for module, paths in nested.items():
            yield from self._parameters(module, sorted(paths, key=len))

    def _refuse_read_past(self, name: str) -> None:
        if self.architecture.reads_weight(name.rpartition(".")[0].rpartition(".")[2]):
            raise self._refused(
                f"it changes {name!r}, which {self.architecture} uses past its layer: beside the model, peft's adapter "
                f"has no part in it, and merged it would have"
            )

    def _parameters(self, module: str, paths: Sequence[str]) -> Iterator[_Wanted]:
        """The pairs of one module's parameters. peft nests them in the order in which the model registered them, which
        no file tells: their shapes must."""
        names = [self.file.layouts[path].pattern for path in paths]
        if len(paths) == 1:
            found = [(paths[0], names[0])]
        else:
            for name in names:
                if self._stored(name) is None:
                    raise self.stored_as.missing(name)
            fits = {path: [name for name in names if self._fits(path, name)] for path in paths}
            orders = _matchings(paths, fits)
            if not orders:
                raise self._refused(
                    f"its pairs of {module!r} fit no order of {', '.join(map(repr, sorted(names)[:6]))}"
                )
            if len(orders) > 1:
                raise self._refused(
                    f"which of its nested pairs is whose of {', '.join(map(repr, sorted(names)[:6]))}, neither the "
                    f"file nor their shapes tell. Merge this adapter with peft's merge_and_unload"
                )
            found = orders[0]
        for path, name in found:
            yield _Wanted(name, Update(self.file, path, self.file.layouts[path], self._transposed(path, name)))

    def _fits(self, path: str, name: str) -> bool:
        try:
            self._transposed(path, name)
        except AdapterFormatError:
            return False
        return True

    def _transposed(self, path: str, name: str) -> bool:
        """Whether the pair's update must be turned. Raises `AdapterFormatError` where it does not fit the weight."""
        layout, stored = self.file.layouts[path], self._stored(name)
        if stored is None:
            raise self.stored_as.missing(name)
        update = self.file.update_shape(path)
        sure = self._of_attention(name)
        return is_transposed(self.architecture, name, layout, update, self.base.shape(stored), surely_linear=sure)

    def _of_attention(self, name: str) -> bool:
        """Whether a weight is of PyTorch's nn.MultiheadAttention, which keeps a joint projection beside out_proj."""
        module = name.removesuffix(".out_proj.weight").removesuffix(".in_proj_weight")
        return module != name and self.stored_as.find(f"{module}.in_proj_weight") is not None

    def _heads(self) -> Iterator[_Wanted]:
        """The tensors beside the pairs."""
        for head in self.file.heads:
            kind = self.file.kind(head)
            if kind == "tokens":
                yield self._tokens(head)
                continue
            name = f"{plain(head.removesuffix(_BIAS))}.bias" if kind == "added" else head
            if kind == "added" and self._of_attention(self.stored_as.weight_of(head.removesuffix(_BIAS))):
                raise self._refused(
                    f"{head!r} is the bias of an update of nn.MultiheadAttention, which peft leaves out"
                )
            stored = self._stored(name)
            if stored is None and kind == "head":
                self.added[name] = Change(self.stored_as.new(name), None, (Replaced(self.file, head),))
                continue
            if stored is None:
                raise self._refused(f"{head!r} changes {name!r}, which the base model does not have")
            shape = self._shape(head)
            if shape != self.base.shape(stored):
                raise self._refused(
                    f"{head!r} has shape {shape}, the base model's {stored!r} {self.base.shape(stored)}: the "
                    f"vocabulary or the labels were changed. Save the base model so, and apply to that"
                )
            if kind == "added":
                yield _Wanted(name, Added(self.file, head))
            else:
                # peft copies a bias or a base weight into the parameter itself; a saved module is a copy beside it.
                shared = kind != "head" or self._together(name)
                yield _Wanted(name, Replaced(self.file, head), shared)

    def _check_open_targets(self) -> None:
        """Modules of which the base model decides whether they are targets."""
        modules = {name: self.stored_as.weight_of(path) for path, name in self.file.left_to_base.items()}
        try:
            check_with_base(self.file.config, modules, self.base.config, self.architecture, self._tie)
        except AdapterFormatError as error:
            raise AdapterFormatError(f"{self.file.directory}: {error}") from error

    def _check_saved_modules(self) -> None:
        """A module that is saved is saved whole: peft asks the file for each of its tensors."""
        ends = tuple(str(name) for name in self.file.config.get("modules_to_save") or () if name)
        if not ends:
            return
        heads = [head for head in self.file.heads if self.file.kind(head) == "head"]
        given = set(heads)
        self.file.limits.check(
            "questions", len(ends) * len(self.base), f"{len(ends):,} names for {len(self.base):,} tensors are too many"
        )
        of_base: dict[str, list[str]] = {}
        for stored in self.base.names:
            name = stored if stored in given else self.stored_as.in_memory(stored)
            for module in saved_modules(name, ends)[:1]:
                of_base.setdefault(module, []).append(name)
        for module, names in of_base.items():
            missing = [name for name in names if name not in given]
            if missing and self._tie(missing[0]) is None:
                raise self._refused(
                    f"modules_to_save names {module!r}, which the base model has with {len(names)} tensors, and the "
                    f"file lacks {missing[0]!r}: peft could not load it"
                )
        for name in given:
            module = next(iter(saved_modules(name, ends)), "")
            if module in of_base and name not in of_base[module] and self._tie(name) is None:
                raise self._refused(f"{name!r} is saved, and the base model's {module!r} has no such tensor")

    def _together(self, name: str) -> bool:
        """Whether peft gives all uses of a tied weight one adapter (ensure_weight_tying). It does for an embedding and
        a head of the usual names, targeted by name."""
        if not self.file.config.get("ensure_weight_tying"):
            return False
        tie = self._tie(name)
        if tie is None:
            return False
        usual = {other.removesuffix(".weight").rpartition(".")[2] for other in tie.names} == {"embed_tokens", "lm_head"}
        fields = [self.file.config.get(field) or [] for field in ("modules_to_save", "target_modules")]
        saved, targeted = ([str(n).rpartition(".")[2] in _USUAL for n in names] for names in fields)
        if not usual or isinstance(fields[1], str) or (any(saved) and any(targeted)) or not any(saved + targeted):
            raise self._refused(
                f"it changes {name!r}, which is tied, with ensure_weight_tying, and what peft ties of it cannot be told"
            )
        return True

    def _tokens(self, head: str) -> _Wanted:
        name = f"{plain(head.removesuffix(_TOKENS))}.weight"
        stored = self._stored(name)
        if stored is None:
            raise self._refused(f"{head!r} changes {name!r}, which the base model does not have")
        bias = self._stored(f"{name.removesuffix('.weight')}.bias")
        if bias is not None:
            raise self._refused(
                f"{head!r} trains rows of a layer with a bias, {bias!r}, which peft leaves out as long as the adapter "
                f"lies beside the model: merged, it would compute something else"
            )
        tie = self._tie(name)
        for other in tie.others(name) if tie is not None else ():
            if self._stored(f"{other.removesuffix('.weight')}.bias") is not None:
                raise self._refused(
                    f"{head!r} trains rows of {name!r}, which is tied to {other!r}, a layer with a bias: peft leaves "
                    f"that bias out as long as the adapter lies beside the model, and merged it would not"
                )
        self._refuse_read_past(name)
        indices, shared = self._token_indices(name, head)
        weight, shape = self.base.shape(stored), self._shape(head)
        if len(weight) != 2 or shape != (len(indices), weight[1]):
            raise self._refused(
                f"{head!r} has shape {shape}; its {len(indices)} tokens of {name!r} {weight} need "
                f"{(len(indices), *weight[1:])}"
            )
        odd = [row for row in indices if not 0 <= row < weight[0]]
        if odd:
            raise self._refused(f"trainable_token_indices names token {odd[0]}, {name!r} has 0 to {weight[0] - 1}")
        return _Wanted(name, Rows(self.file, head, tuple(indices)), shared)

    def _token_indices(self, weight: str, head: str) -> tuple[list[int], bool]:
        """The rows of a weight that were trained, and whether the same are trained in what it is tied with."""
        said: Any = self.file.config.get("trainable_token_indices")
        by_name = isinstance(said, Mapping)
        if by_name:
            module = weight.removesuffix(".weight")
            keys = [key for key in said if isinstance(key, str) and f".{module}".endswith(f".{key}")]
            found = said[keys[0]] if len(keys) == 1 else None
        else:
            found = said if self._token_heads == 1 else None
        whole = isinstance(found, list) and all(isinstance(row, int) and not isinstance(row, bool) for row in found)
        if not isinstance(found, list) or not whole:
            raise self._refused(f"trainable_token_indices does not say which rows of {weight!r} were trained")
        if len(set(found)) < len(found):
            twice = Counter(found).most_common(1)[0][0]
            raise self._refused(f"trainable_token_indices names token {twice} of {weight!r} twice")
        if any(row < 0 for row in found):
            raise self._refused(f"trainable_token_indices names token {min(found)} of {weight!r}")
        tie = self._tie(weight)
        if tie is None:
            return found, False
        if self.architecture.is_composite:
            raise self._refused(f"{head!r} trains tokens of a tied weight in a model of several parts")
        if not self.architecture.ties_by_itself or (len(tie.names) > 2 and not self.architecture.ties_always):
            raise self._refused(
                f"{head!r} trains tokens of {weight!r}, one tensor with {len(tie.names) - 1} others: in which of them "
                f"peft trains them too, the files do not tell"
            )
        is_source = weight not in self.architecture.targets
        if not is_source and not weight.endswith("lm_head.weight"):
            raise self._refused(f"{head!r} trains tokens of {weight!r}, which is tied to a head: not told apart here")
        lists = [rows for rows in said.values() if isinstance(rows, list)] if by_name else [found]
        return found, is_source and all(rows == found for rows in lists)

    def _alone(self, name: str, wanted: Sequence[_Wanted]) -> Iterator[Change]:
        stored = self._stored(name)
        assert stored is not None
        yield Change(stored, stored, self._in_order(name, [want.step for want in wanted]))

    def _tied(self, tie: Tie, by_name: Mapping[str, Sequence[_Wanted]]) -> Iterator[Change]:
        """What becomes of a tensor that several modules use: one still, where all change alike; else two."""
        stored = {name: found for name in tie.names if (found := self._stored(name, tied=False)) is not None}
        self._check_alike(stored)
        steps: dict[str, list[Step]] = {name: [] for name in tie.names}
        for name in tie.names:
            for want in by_name.get(name, ()):
                for other in tie.names if want.shared else (name,):
                    if want.step not in steps[other]:
                        steps[other].append(want.step)
        per = {name: self._in_order(name, self._without_copies(found)) for name, found in steps.items()}
        first = next(iter(per.values()))
        if all(self._alike(found, first) for found in per.values()):
            yield from (Change(kept, kept, first) for kept in stored.values())
            return
        if not tie.plain:
            raise self._refused(
                f"it changes one of {', '.join(map(repr, tie.names[:4]))}, which are one tensor in "
                f"{self.architecture}: merged, the others would change too, and this type cannot be untied"
            )
        self.untied = True
        any_stored = next(iter(stored.values()))
        for name, its_steps in per.items():
            if its_steps or name not in stored:
                its_name = stored[name] if name in stored else self.stored_as.new(name)
                yield Change(its_name, stored.get(name, any_stored), its_steps)

    def _check_alike(self, stored: Mapping[str, str]) -> None:
        """A tied tensor may be stored under each of its names: then it must be the same."""
        names = list(stored.values())
        for other in names[1:]:
            if not torch.equal(self.base.tensor(names[0]), self.base.tensor(other)):
                raise self._refused(
                    f"it changes {names[0]!r} or {other!r}, which the base model's config ties and its files store "
                    f"with different numbers: which of the two it means is not known"
                )

    def _without_copies(self, steps: Sequence[Step]) -> list[Step]:
        """One of several steps that do the same, as peft stores what it ties under each of its names."""
        kept: list[Step] = []
        for step in steps:
            if not any(self._alike((step,), (other,)) for other in kept):
                kept.append(step)
        return kept

    def _alike(self, one: Sequence[Step], other: Sequence[Step]) -> bool:
        if len(one) != len(other):
            return False
        return all(a is b or same_value(a, b) for a, b in zip(one, other, strict=True))

    def _in_order(self, name: str, steps: Sequence[Step]) -> tuple[Step, ...]:
        """First what replaces, then what adds. A module saved in full is a copy, whatever its original became. Refused:
        two of one kind, and rows of a tensor that changes otherwise."""
        saved = [s for s in steps if isinstance(s, Replaced) and self.file.kind(s.head) == "head"]
        if saved:
            steps = [s for s in steps if s in saved or not isinstance(s, Replaced)]
        kinds = [type(step) for step in steps]
        twice = len(set(kinds)) < len(kinds)
        if twice or (Rows in kinds and (Update in kinds or Added in kinds)) or (saved and len(kinds) > 1):
            raise self._refused(f"{name!r} is changed in two ways that exclude each other")
        return tuple(sorted(steps, key=lambda step: not isinstance(step, Replaced)))

    def _tie(self, name: str) -> Tie | None:
        try:
            return self.architecture.tie_of(name)
        except LookupError as error:
            raise self._refused(f"it changes {name!r}, and {error}") from error

    def _stored(self, name: str, *, tied: bool = True) -> str | None:
        """The stored name of a weight: its own, or of one that it is tied with."""
        found = self.stored_as.find(name)
        if found is None and tied:
            tie = self._tie(name)
            others = [self.stored_as.find(other) for other in (tie.others(name) if tie else ())]
            found = next((other for other in others if other is not None), None)
        return found

    def _shape(self, head: str) -> tuple[int, ...]:
        return self.file.stored_head(head).shape

    def _relation(self) -> Iterator[str]:
        """Whether the adapter's base is this one, as far as names tell, and where they do not, digests."""
        said, own = self.file.base_model, self.base.config.get("_name_or_path")
        own = own if isinstance(own, str) and own else self.base.repository
        if said and own and _last(said) != _last(own) and not self._surely_one(said):
            yield (
                f"warning: the adapter was trained on {quoted(said, 120)}, and this base model calls itself "
                f"{quoted(own, 120)}: shapes fit, but it may be another model."
            )

    def _surely_one(self, said: str) -> bool:
        """Whether a base model of another name is this one all the same: this directory, or the same weights."""
        if is_path(said) and Path(os.path.realpath(said)) == self.base.home:
            return True
        trained_on, here = base_weights(self.file), self.base.digests()
        known = KNOWN_WEIGHTS.get(next(iter(here.values()))) if len(here) == 1 else None
        return trained_on == here if trained_on else known is not None and _last(known) == _last(said)

    def _refused(self, why: str) -> AdapterFormatError:
        return AdapterFormatError(f"{self.file.directory}: {why}.")


def _matchings(paths: Sequence[str], fits: Mapping[str, Sequence[str]]) -> list[list[tuple[str, str]]]:
    """Ways to give each path a name of its own that fits it; two at most are looked for."""
    found: list[list[tuple[str, str]]] = []

    def extend(chosen: list[tuple[str, str]]) -> None:
        if len(found) > 1:
            return
        if len(chosen) == len(paths):
            found.append(chosen)
            return
        path = paths[len(chosen)]
        for name in fits[path]:
            if all(name != taken for _, taken in chosen):
                extend([*chosen, (path, name)])

    extend([])
    return found


def _last(name: str) -> str:
    return name.rstrip("/\\").replace("\\", "/").rpartition("/")[2].lower()


def _head(change: Change) -> str:
    step = change.steps[0]
    assert isinstance(step, Replaced)
    return step.head
