"""What config.json of a full model says of the classification head that came with an adapter.

The base model's file says nothing of it: an encoder has no classes, and loading it for two where the head has three
fails. Knows no transformers: which class has such a head is asked of a function that does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fedlora.adapters.labels import labels_of
from fedlora.adapters.reader import AdapterFile
from fedlora.core.echo import quoted, shown

Shapes = Mapping[str, tuple[int, ...]]
FindClass = Callable[[Mapping[str, Any], str, Shapes, int], str | None]
"""(config, task, shapes of the head's tensors, number of classes) -> the class that has such a head, where it is
known."""

AUTO = {"SEQ_CLS": "AutoModelForSequenceClassification", "TOKEN_CLS": "AutoModelForTokenClassification"}
_LISTED = 8  # classes, in a line


@dataclass(frozen=True)
class HeadFacts:
    """fields: of config.json. auto: the class of transformers that loads the result, "" where there is no head. labels:
    names of the classes. notes: lines for a reader."""

    fields: Mapping[str, Any] = field(default_factory=dict)
    auto: str = ""
    labels: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def head_facts(file: AdapterFile, config: Mapping[str, Any], heads: Shapes, added: bool, find: FindClass) -> HeadFacts:
    """What the head makes of the base model's config.

    Args:
        heads: name in the model in memory -> shape, of the tensors that were trained in full. added: the base model
            lacks some of them.
    """
    named = labels_of(file.directory, file.limits)
    task = file.config.get("task_type") or ("SEQ_CLS" if named else "")
    if task not in AUTO or not heads:
        return HeadFacts()
    auto = AUTO[task]
    rows = sorted({shape[0] for shape in heads.values() if len(shape) == 2})
    notes = []
    if named and len(named) not in rows:
        notes.append(
            f"the adapter names {len(named)} classes, and its head {shown(next(iter(heads)))} has other sizes "
            f"({', '.join(map(str, rows))}): the names are left out."
        )
        named = ()
    fits = {n: name for n in ([len(named)] if named else rows) if (name := find(config, task, heads, n))}
    count = len(named) or (next(iter(fits)) if len(fits) == 1 else rows[0] if len(rows) == 1 else 0)
    if not count:
        notes.append(
            f"how many classes the head has cannot be told from its tensors ({', '.join(map(shown, heads))}): load the "
            f"model with {auto}.from_pretrained(..., num_labels=...)."
        )
        return HeadFacts(auto=auto, notes=tuple(notes))
    fields: dict[str, Any] = {}
    before = config.get("id2label")
    if named or added or len(before if isinstance(before, dict) else (0, 1)) != count:
        own = named or tuple(f"LABEL_{k}" for k in range(count))
        fields = {"num_labels": count, "id2label": {str(k): name for k, name in enumerate(own)},
                  "label2id": {name: k for k, name in enumerate(own)}}  # fmt: skip
        rest = f", ... ({count})" if count > _LISTED else ""
        notes.append(f"config.json has its classes: {', '.join(quoted(n, 40) for n in own[:_LISTED])}{rest}.")
    if count in fits:
        fields["architectures"] = [fits[count]]
    elif added:
        notes.append(
            f"which class of transformers has this head cannot be told here, so config.json keeps the base model's "
            f"architectures: load the model with {auto}, and name the class to programs that read architectures."
        )
    return HeadFacts(fields, auto, named, tuple(notes))


def unknown(config: Mapping[str, Any], task: str, heads: Shapes, count: int) -> str | None:
    """A `FindClass` that knows none."""
    return None
