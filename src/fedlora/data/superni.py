"""Super-NaturalInstructions: v2 task files as prompts with references, and a choice of tasks as clients.

A task file holds Definition, Categories, Input_language, Output_language and Instances [{input, output: [...]}], as in
the repository allenai/natural-instructions (folder tasks/). A prompt is definition and input in the Alpaca template,
like FlexLoRA's; training uses the first output, scoring all of them.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedlora.data.text import TextData
from fedlora.errors import DataError, repeated
from fedlora.given_files import half_the_memory, parse_json, read_given
from fedlora.seeds import derive_seed

_LANGUAGES = ("Input_language", "Output_language")
_INTRO = "Below is an instruction that describes a task"
_WITH_INPUT = ", paired with an input that provides further context"
_ASK = ". Write a response that appropriately completes the request.\n\n### Instruction:\n"


@dataclass(frozen=True)
class Task:
    """One task: its category, and its instances as prompts.

    Example:
        >>> task = read_tasks(Path("root/superni"), ["task1"])["task1"]
        >>> task.category, task.data.kind
        ('Reasoning', 'instruction')
    """

    name: str
    category: str
    data: TextData


@dataclass(frozen=True)
class Selection:
    """Names of the tasks that are clients, and of those that no client trains on.

    Example:
        >>> Selection(train=("task1", "task2"), unseen=("task3",)).unseen
        ('task3',)
    """

    train: tuple[str, ...]
    unseen: tuple[str, ...]


def list_tasks(folder: Path, *, min_instances: int = 100) -> dict[str, str]:
    """Name -> category of the English tasks in a folder with enough instances.

    Raises:
        DataError: there are no task files, or one does not follow the v2 schema.

    Example:
        >>> list_tasks(Path("root/superni"))
        {'task1': 'Reasoning', 'task2': 'Logic'}
    """
    found = {}
    for path in sorted(folder.glob("task*.json")):
        raw = _load(path)
        languages = {language for key in _LANGUAGES for language in raw.get(key) or ["English"]}
        if languages == {"English"} and len(raw["Instances"]) >= min_instances:
            found[path.stem] = raw["Categories"][0]
    if not found:
        raise DataError(
            f"{folder} holds no task files (task*.json of natural-instructions v2) with {min_instances} English "
            f"instances. Copy the folder tasks/ of allenai/natural-instructions there."
        )
    return found


def select_tasks(tasks: Mapping[str, str], train: int, unseen: int, *, seed: int) -> Selection:
    """Draw `train` tasks as clients and `unseen` tasks of other categories, by the seed.

    We draw `train` categories with one task each, and the unseen tasks from the remaining categories. If there are too
    few categories, some are set aside for the unseen tasks first, and the clients share the others as evenly as
    possible. tasks: name -> category, from `list_tasks`. Raises `DataError` if they are too few.

    Example:
        >>> chosen = select_tasks(list_tasks(Path("root/superni")), train=1, unseen=1, seed=0)
        >>> len(chosen.train), len(chosen.unseen)
        (1, 1)
    """
    generator = random.Random(derive_seed(seed, "tasks"))
    by_category: dict[str, list[str]] = {}
    for name in sorted(tasks):
        by_category.setdefault(tasks[name], []).append(name)
    categories = sorted(by_category)
    generator.shuffle(categories)
    for names in by_category.values():
        generator.shuffle(names)
    sizes = {c: len(names) for c, names in by_category.items()}
    aside: list[str] = []
    least = max(0, len(categories) - train)  # number of categories that no client needs
    while categories and (len(aside) < least or sum(sizes[c] for c in aside) < unseen):
        aside.append(categories.pop())
    others, mine = (
        [name for turn in range(len(tasks)) for c in chosen for name in by_category[c][turn : turn + 1]]
        for chosen in (aside, categories)
    )
    if len(others) < unseen or len(mine) < train:
        raise DataError(
            f"{len(tasks)} tasks in {len(by_category)} categories cannot give {train} clients and {unseen} unseen "
            f"tasks of other categories by this draw. Ask for fewer, bring more task files, or take another seed."
        )
    return Selection(tuple(sorted(mine[:train])), tuple(sorted(others[:unseen])))


def read_selection(train: Path, unseen: Path) -> Selection:
    """A selection from two files with one task name per line. Raises `DataError`.

    Example:
        >>> _ = Path("train.txt").write_text("task1"), Path("unseen.txt").write_text("task2")
        >>> read_selection(Path("train.txt"), Path("unseen.txt"))
        Selection(train=('task1',), unseen=('task2',))
    """
    lists = []
    for path in (train, unseen):
        try:
            names = read_given(path).decode().split()
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(
                f"the task list {path} cannot be read: {getattr(error, 'strerror', None) or error}."
            ) from error
        lists.append(tuple(names))
    if not lists[0]:
        raise DataError(f"the task list {train} is empty: there would be no client.")
    if twice := repeated([*lists[0], *lists[1]]):
        raise DataError(
            f"the task lists {train} and {unseen} name {twice[0]!r} twice: each task is one client, and a task that is "
            f"trained on is not unseen."
        )
    return Selection(*lists)


def read_tasks(folder: Path, names: Sequence[str]) -> dict[str, Task]:
    """Name -> task. Raises `DataError` if a file is missing or does not follow the v2 schema.

    Example:
        >>> list(read_tasks(Path("root/superni"), ["task2"]))
        ['task2']
    """
    tasks = {}
    for name in names:
        raw = _load(folder / f"{name}.json")
        definition = " ".join(raw["Definition"]).strip()
        prompts, spans = zip(*(_prompt(definition, instance["input"]) for instance in raw["Instances"]), strict=True)
        references = tuple(tuple(str(out) for out in instance["output"]) for instance in raw["Instances"])
        data = TextData(
            kind="instruction",
            text=prompts,
            responses=tuple(outputs[0] for outputs in references),
            references=references,
            droppable=spans,
        )
        tasks[name] = Task(name, raw["Categories"][0], data)
    return tasks


def _prompt(definition: str, text: str) -> tuple[str, tuple[int, int]]:
    """The prompt, and the span of its input, which is cut first if the whole is too long."""
    if not text.strip():
        prompt = f"{_INTRO}{_ASK}{definition}\n\n### Response:\n"
        return prompt, (0, 0)
    head = f"{_INTRO}{_WITH_INPUT}{_ASK}{definition}\n\n### Input:\n"
    return f"{head}{text}\n\n### Response:\n", (len(head), len(head) + len(text))


def _load(path: Path) -> dict[str, Any]:
    """A task file, checked."""
    try:
        raw = parse_json(read_given(path, half_the_memory() // 8))
    except (OSError, ValueError) as error:
        raise DataError(f"the task file {path} cannot be read: {getattr(error, 'strerror', None) or error}.") from error
    try:
        lists = [raw["Definition"], raw["Categories"], *(i["output"] for i in raw["Instances"])]
        lists += [found for key in _LANGUAGES if (found := raw.get(key))]  # may be missing or empty
        sound = all(isinstance(each, list) and each and all(isinstance(x, str) for x in each) for each in lists)
        sound = sound and bool(raw["Instances"]) and all(isinstance(i["input"], str) for i in raw["Instances"])
    except (KeyError, TypeError, AttributeError):
        sound = False
    if not sound:
        raise DataError(
            f"{path} is not a task of natural-instructions v2: it needs lists Definition and Categories of "
            f"strings, and Instances [{{input, output: [...]}}]."
        )
    return dict(raw)


__all__ = ["Selection", "Task", "list_tasks", "read_selection", "read_tasks", "select_tasks"]
