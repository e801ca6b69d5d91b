"""Super-NaturalInstructions: v2 task files as prompts with references; each task is a client.

A task file holds Definition, Categories and Instances [{input, output: [...]}], as in the repository
allenai/natural-instructions (folder tasks/). A prompt is definition and input in the Alpaca template, like FlexLoRA's;
training uses the first output, scoring all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from fedlora.data.text import TextData
from fedlora.errors import DataError, repeated
from fedlora.given_files import RECORDS, parse_json, read_given

_INTRO = "Below is an instruction that describes a task"
_WITH_INPUT = ", paired with an input that provides further context"
_ASK = ". Write a response that appropriately completes the request.\n\n### Instruction:\n"


class Task(NamedTuple):
    """One task: its category, and its instances as prompts.

    Example:
        >>> task = read_tasks(Path("root/superni"), ["task1"])["task1"]
        >>> task.category, task.data.kind
        ('Reasoning', 'instruction')
    """

    category: str
    data: TextData


def read_task_lists(train: Path, unseen: Path) -> tuple[list[str], list[str]]:
    """The tasks that are clients, and those that nobody trains on, from two files with one name per line. Raises
    `DataError`.

    Example:
        >>> _ = Path("train.txt").write_text("task1"), Path("unseen.txt").write_text("task2")
        >>> read_task_lists(Path("train.txt"), Path("unseen.txt"))
        (['task1'], ['task2'])
    """
    try:
        clients, others = (read_given(path).decode().split() for path in (train, unseen))
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"the task lists {train} and {unseen} cannot be read: {error}.") from error
    if twice := repeated([*clients, *others]):
        raise DataError(f"the task lists {train} and {unseen} name {twice[0]!r} twice: each task is one client.")
    return clients, others


def read_tasks(folder: Path, names: Sequence[str]) -> dict[str, Task]:
    """Name -> task. Raises `DataError` if a file is missing or does not follow the v2 schema.

    Example:
        >>> list(read_tasks(Path("root/superni"), ["task2"]))
        ['task2']
    """
    return {name: _read(folder / f"{name}.json") for name in names}


def _read(path: Path) -> Task:
    """A task file, checked."""
    try:
        raw = parse_json(read_given(path, RECORDS))
    except (OSError, ValueError) as error:
        raise DataError(f"the task file {path} cannot be read: {getattr(error, 'strerror', None) or error}.") from error
    try:
        inputs, outputs = zip(*((one["input"], one["output"]) for one in raw["Instances"]), strict=True)
        lists = [[*inputs], raw["Definition"], raw["Categories"], *outputs]
        sound = all(isinstance(each, list) and each and all(isinstance(x, str) for x in each) for each in lists)
    except (KeyError, TypeError, ValueError):
        sound = False
    if not sound:
        raise DataError(
            f"{path} is not a task of natural-instructions v2: it needs lists Definition and Categories of "
            f"strings, and Instances [{{input, output: [...]}}]."
        )
    prompts, spans = zip(*(_prompt(" ".join(raw["Definition"]).strip(), text) for text in inputs), strict=True)
    references = tuple(map(tuple, outputs))
    data = TextData(
        "instruction", prompts, responses=tuple(found[0] for found in references), references=references,
        droppable=spans,
    )  # fmt: skip
    return Task(raw["Categories"][0], data)


def _prompt(definition: str, text: str) -> tuple[str, tuple[int, int]]:
    """The prompt, and the span of its input, which is cut first if the whole is too long."""
    if not text.strip():
        prompt = f"{_INTRO}{_ASK}{definition}\n\n### Response:\n"
        return prompt, (0, 0)
    head = f"{_INTRO}{_WITH_INPUT}{_ASK}{definition}\n\n### Input:\n"
    return f"{head}{text}\n\n### Response:\n", (len(head), len(head) + len(text))
