"""A run's text data: read, split into training, validation and test, and distributed to the clients."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from fedlora.data import (
    TextData,
    demo_data,
    dirichlet,
    iid,
    read_classification,
    read_glue,
    read_instructions,
    read_task_lists,
    read_tasks,
    split,
)
from fedlora.data.labels import given, in_order, look_alike, shown
from fedlora.data.rows import Rows
from fedlora.data.splits import Parts, inputs
from fedlora.errors import ConfigError, DataError
from fedlora.runs.config import RunConfig
from fedlora.runs.data_sections import DataSection
from fedlora.seeds import derive_seed

_DEFAULT_TEST = DataSection.model_fields["test"].default


@dataclass(frozen=True, eq=False)
class Dealt:
    """Training data per client, and held-out sets.

    parts: client -> training data. validation, test: common held-out sets by name (one, "", unless the data have
    several tasks). own_validation, own_test: client -> its own, if clients have some. probes: name -> further test
    sets. categories: task -> category, for superni.
    """

    parts: Mapping[str, TextData]
    validation: Mapping[str, TextData]
    test: Mapping[str, TextData]
    own_validation: Mapping[str, TextData] = field(default_factory=dict)
    own_test: Mapping[str, TextData] = field(default_factory=dict)
    probes: Mapping[str, Mapping[str, TextData]] = field(default_factory=dict)
    categories: Mapping[str, str] = field(default_factory=dict)

    @property
    def classes(self) -> tuple[str, ...]:
        """Empty for a language model."""
        return next(iter(self.parts.values())).label_names


Keep = Callable[[Parts], Parts]  # the parts of one file as drawn -> as they are to be


def deal(config: RunConfig, data_root: Path | None, keep: Keep | None = None) -> Dealt:
    """The run's data.

    Args:
        keep: what is to be held out of each file, where a draw before has decided that.

    Raises:
        ConfigError, DataError: data cannot be read, or not be distributed as configured.
    """
    share = config.clients.test_fraction
    if share is not None and (config.data.clients or config.data.task == "superni"):
        raise ConfigError(
            f"clients.test_fraction = {share:g} is for one file that is dealt out; with data.clients or superni each "
            f"client has a test set by data.test."
        )
    if config.data.task is None:
        dealt = _files(config, keep)
    elif data_root is None:
        raise ConfigError(f"data.task = {config.data.task!r} needs --data-root (or FEDLORA_DATA_ROOT), with its files.")
    elif config.data.task == "superni":
        return _superni(config, data_root)
    else:
        dealt = _glue(config, data_root)
    _check_classes(config, dealt)
    return dealt if share is None else _with_own_tests(dealt, share, config.run.seed)


def _check_classes(config: RunConfig, dealt: Dealt) -> None:
    """Raise `DataError` for a classification with a single class."""
    d = config.data
    if config.model.task == "sequence-classification" and len(dealt.classes) < 2:
        files = dict.fromkeys(f for f in (d.train, *d.clients.values(), d.validation, d.test) if isinstance(f, str))
        raise DataError(
            f"{', '.join(files)}: every example has one class, {dealt.classes[0]!r} (column {d.label!r}), but a "
            f"classifier needs at least two. For text without classes set model.task = 'causal-lm'."
        )


def _with_own_tests(dealt: Dealt, share: float, seed: int) -> Dealt:
    """Turn a share of each client's data into its own test set. Nobody trains on a copy of an example in it.

    Examples with copies at several clients are only trained on; the rest of each part is split. If there is no common
    test set (data.test = 0), all own sets together form it, as with clients' own files.
    """
    holders = Counter(one for part in dealt.parts.values() for one in set(inputs(part)))
    parts, tests = {}, {}
    for client, part in dealt.parts.items():
        alone = [i for i, one in enumerate(inputs(part)) if holders[one] == 1]
        common = sorted(set(range(len(part))) - set(alone))
        wanted = share * len(part)
        try:
            if wanted >= len(alone):
                raise DataError(f"{wanted:.4g} would be more than the examples that only this client has")
            train, _, tests[client] = split(
                part.select(alone), validation=0, test=wanted / len(alone), seed=derive_seed(seed, "own-test", client)
            )
        except DataError as error:
            raise ConfigError(
                f"clients.test_fraction = {share:g} gives {client!r} no test set: it was dealt {len(part)} examples, "
                f"{len(alone)} of which only this client has ({error}). A client needs {math.ceil(1 / share)} or more: "
                f"raise clients.min_examples to that, deal to fewer clients, or raise clients.test_fraction."
            ) from error
        parts[client] = TextData.concat([train, part.select(common)]) if common else train
    common_test = dealt.test if any(map(len, dealt.test.values())) else {"": TextData.concat(list(tests.values()))}
    return replace(dealt, parts=parts, test=common_test, own_test=tests)


def _glue(config: RunConfig, data_root: Path) -> Dealt:
    d, seed = config.data, config.run.seed
    assert d.task is not None and d.task != "superni"  # checked in deal()
    if not isinstance(d.validation, float | int) or d.validation == 0 or d.test != _DEFAULT_TEST:
        raise ConfigError(
            f"data.task = {d.task!r} brings its own test set, and validation is a share of train; leave data.test out."
        )
    if config.model.task != "sequence-classification":
        raise ConfigError(f"data.task = {d.task!r} is a classification task; model.task is {config.model.task!r}.")
    train, tests = read_glue(d.task, data_root)
    train, validation, _ = split(train, validation=d.validation, test=0, seed=seed)
    tests = {name: _at_most(part, d.max_test, seed, "test") for name, part in tests.items()}
    first, *others = tests
    return Dealt(
        parts=_dealt(config, _at_most(train, d.max_train, seed, "train")),
        validation={"": _at_most(validation, d.max_test, seed, "validation")},
        test={"": tests[first]},
        probes={name: {"": tests[name]} for name in others},
    )


def _superni(config: RunConfig, data_root: Path) -> Dealt:
    d, seed = config.data, config.run.seed
    if config.model.task != "causal-lm":
        raise ConfigError("data.task = 'superni' consists of instructions; set model.task = 'causal-lm'.")
    if isinstance(d.validation, str) or isinstance(d.test, str) or not d.task_lists:
        raise ConfigError("data.task = 'superni' needs data.task_lists, two files, and shares to hold out.")
    clients, others = read_task_lists(data_root / d.task_lists[0], data_root / d.task_lists[1])
    if len(clients) < d.tasks or len(others) < d.unseen_tasks:
        raise ConfigError(
            f"data.task_lists name {len(clients)} and {len(others)} tasks, fewer than data.tasks = {d.tasks} and "
            f"data.unseen_tasks = {d.unseen_tasks}."
        )
    train, unseen = clients[: d.tasks], others[: d.unseen_tasks]
    tasks = read_tasks(data_root / "superni", [*train, *unseen])
    pieces = {name: split(tasks[name].data, validation=d.validation, test=d.test, seed=seed) for name in train}
    validation = {name: _at_most(part, d.max_test, seed, name) for name, (_, part, _) in pieces.items()}
    test = {name: _at_most(part, d.max_test, seed, name) for name, (_, _, part) in pieces.items()}
    never = {name: _at_most(tasks[name].data, d.max_test, seed, name) for name in unseen}
    return Dealt(
        parts={name: _at_most(part, d.max_train, seed, name) for name, (part, _, _) in pieces.items()},
        validation=validation,
        test=test,
        own_validation=validation,
        own_test=test,
        probes={"unseen": never} if unseen else {},
        categories={name: task.category for name, task in tasks.items()},
    )


def _at_most(data: TextData, limit: int | None, seed: int, *purpose: str) -> TextData:
    """At most `limit` of the examples, in order."""
    if limit is None or len(data) <= limit:
        return data
    drawn = random.Random(derive_seed(seed, "at-most", *purpose)).sample(range(len(data)), limit)
    return data.select(sorted(drawn))


def _files(config: RunConfig, keep: Keep | None) -> Dealt:
    d, seed = config.data, config.run.seed
    sources = dict(d.clients) if d.clients else {"": d.train or ""}
    held = {part: value for part in ("validation", "test") if isinstance(value := getattr(d, part), str)}
    text = read_files(config, list(dict.fromkeys([*sources.values(), *held.values()])))
    trained: dict[str, TextData] = {}
    own: dict[str, dict[str, TextData]] = {"validation": {}, "test": {}}
    for client, path in sources.items():
        drawn = _split(config, client, text[path].of(client) if client else text[path])
        train, validation, test = drawn if keep is None else keep(drawn)
        trained[client] = _at_most(train, d.max_train, seed, "train", *([client] if d.clients else []))
        own["validation"][client] = _at_most(validation, d.max_test, seed, "validation", client)
        own["test"][client] = _at_most(test, d.max_test, seed, "test", client)
    common = {
        part: _at_most(text[held[part]], d.max_test, seed, part) if part in held else TextData.concat([*each.values()])
        for part, each in own.items()
    }
    theirs = {
        part: {c: data for c, data in each.items() if len(data)} if d.clients and part not in held else {}
        for part, each in own.items()
    }
    parts = trained if d.clients else _dealt(config, trained[""])
    return Dealt(parts, {"": common["validation"]}, {"": common["test"]}, theirs["validation"], theirs["test"])


def _split(config: RunConfig, client: str, data: TextData) -> Parts:
    """One file's parts, by the shares. Raises `DataError` with the file's name."""
    d = config.data
    validation, test = (0.0 if isinstance(share, str) else share for share in (d.validation, d.test))
    try:
        return split(data, validation=validation, test=test, seed=config.run.seed)
    except DataError as error:
        if client not in d.clients:
            raise
        raise DataError(
            f"{d.clients[client]}, the file of {client!r}: {error} (For every file: data.validation = {d.validation}, "
            f"data.test = {d.test}; in a federation the server sets them.)"
        ) from error


def read_files(config: RunConfig, paths: Sequence[str]) -> dict[str, TextData]:
    """Path -> its examples. All files use the same classes: data.label_names, otherwise all that occur in any file."""
    d = config.data

    def read(path: str, names: Sequence[str] | None = None) -> TextData:
        if path == "demo":
            demo = demo_data()
            if d.label_names and tuple(d.label_names) != demo.label_names:
                raise ConfigError(
                    f"data.label_names = {d.label_names}, but the demo's classes are {list(demo.label_names)}."
                )
            return demo
        if config.model.task != "sequence-classification":
            return read_instructions(path, prompt=d.prompt, response=d.response, messages=d.messages)
        return read_classification(
            path, text=d.text, label=d.label, text_pair=d.text_pair, label_names=d.label_names or names
        )  # fmt: skip

    found = {path: read(path) for path in paths}
    if len({data.label_names for data in found.values()}) == 1:
        return found
    names = _all_classes({path: data.label_names for path, data in found.items()})
    return {path: read(path, names) for path in paths}


def _all_classes(found: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """The classes of several files. Raises `ConfigError` if they may be the same classes, written differently."""
    names = in_order(name for classes in found.values() for name in classes)
    cure = f"Write the same class the same way in all files. If they are separate, set {given(names)}."
    if same := look_alike(names):
        holders = [next(path for path, classes in found.items() if spelt in classes) for spelt in same]
        raise ConfigError(
            f"two labels look alike: {holders[0]} has {same[0]!r}, and {holders[1]} has {same[1]!r}. {cure}"
        )
    widest, most = max(found.items(), key=lambda item: len(item[1]))
    for path, classes in found.items():
        if not set(classes) & set(most):
            raise ConfigError(
                f"the files have different label names: {path} has {shown(tuple(classes))}, and {widest} has "
                f"{shown(tuple(most))}, with none in common. {cure}"
            )
    return names


def training_rows(config: RunConfig, parts: Mapping[str, TextData]) -> dict[str, Rows | Path]:
    """Client -> its training examples for a program of its own: its file if nothing of it is held out; otherwise the
    rows that are left, as they are in the file; or, for data that are no file or were changed, plain rows."""
    d, files = config.data, dict(config.data.clients) or dict.fromkeys(parts, config.data.train or "")
    if d.task or config.attack.kind != "none":
        files = {}
    found: dict[str, Rows | Path] = {}
    for client, part in parts.items():
        path = files.get(client, "")
        if not path or path == "demo":
            found[client] = Rows.of(part)
            continue
        whole = read_files(config, [path])[path]
        found[client] = Path(path) if len(whole) == len(part) else Rows.left(Path(path), whole, part)
    return found


def _dealt(config: RunConfig, data: TextData) -> dict[str, TextData]:
    """One file's training data, distributed to site-1, site-2, ..."""
    c = config.clients
    if not (count := c.how_many):
        raise ConfigError("clients.count is missing: how many clients share data.train?")
    if c.partition == "dirichlet" and data.labels is not None:
        dealt = dirichlet(data.labels, count, c.dirichlet_alpha or 1.0, seed=config.run.seed, min_size=c.min_examples)
    elif c.partition == "dirichlet" and c.dirichlet_alpha is not None:
        raise ConfigError("a Dirichlet partition needs labels, but instruction data has none; use partition = 'iid'.")
    else:
        dealt = iid(len(data), count, seed=config.run.seed)
    width = len(str(count))
    return {f"site-{k + 1:0{width}d}": data.select(indices) for k, indices in enumerate(dealt)}
