"""The metrics: one table, `METRICS`, that says which direction is better, and pure functions of plain lists.

A config names a metric with hyphens (evaluate.metric = "macro-f1"); scores and files use underscores (`macro_f1`). A
score with a "/" in its name is a detail of another ("group/NAME"). Classes are counted here: scikit-learn takes 2 ms.
Every score of an empty set is NaN ("nothing was measured"), which is never better than anything.
"""

from __future__ import annotations

import functools
import math
import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from fedlora.errors import ConfigError

if TYPE_CHECKING:
    from fedlora.training.settings import Task

MetricName = Literal[
    "accuracy", "macro-f1", "loss", "perplexity", "rouge-l", "exact-match", "rouge-l-teacher-forced",
]  # fmt: skip
Labels = Sequence[int]
Item = TypeVar("Item")


@dataclass(frozen=True)
class Metric:
    """One kind of score.

    measure: its function. of: that function's input. "labels": (true, predicted), class indices, or response tokens;
    "losses": (losses, counts), each batch's mean cross entropy and number of labels; "texts": (answer, references), one
    answer at a time, averaged for the report. Metrics of labels and losses are always measured, those of texts only if
    a config asks. tasks: where it is measured. larger_is_better: the direction.
    """

    measure: Callable[..., float]
    of: Literal["labels", "losses", "texts"]
    tasks: tuple[Task, ...] = ("sequence-classification", "causal-lm")
    larger_is_better: bool = True


def by_guessing(metric: str, classes: int) -> float | None:
    """The score of guessing each of K classes with probability 1 / K: log-loss ln K, accuracy 1 / K. None for other
    metrics, and without classes."""
    return {"loss": math.log(classes), "accuracy": 1 / classes}.get(metric) if classes > 1 else None


def accuracy(labels: Labels, predicted: Labels) -> float:
    """The share of correct predictions."""
    return _right(labels, predicted).total() / len(labels) if len(labels) else math.nan


def macro_f1(labels: Labels, predicted: Labels) -> float:
    """The mean of F1 = 2 TP / (2 TP + FP + FN) over the classes among the labels or the predictions, as in
    scikit-learn: predicting a class that does not occur adds an F1 of 0."""
    found, true, guessed = _right(labels, predicted), Counter(labels), Counter(predicted)
    each = [2 * found[y] / (true[y] + guessed[y]) for y in sorted({*true, *guessed})]
    return math.fsum(each) / len(each) if each else math.nan


def _right(labels: Labels, predicted: Labels) -> Counter[int]:
    """Class -> the number of its examples predicted as that class."""
    return Counter(y for y, guessed in zip(labels, predicted, strict=True) if y == guessed)


def mean_loss(losses: Sequence[float], counts: Sequence[int]) -> float:
    """The labels' mean cross entropy, never weighted by class. losses, counts: per batch."""
    total = sum(counts)
    return sum(loss * count for loss, count in zip(losses, counts, strict=True)) / total if total else math.nan


def perplexity(means: Sequence[float], counts: Sequence[int]) -> float:
    """exp of `mean_loss`: the number of equally likely tokens that would leave a model as unsure."""
    loss = mean_loss(means, counts)
    return math.exp(loss) if not loss > 700 else math.inf  # NaN stays NaN


def rouge_l(answer: str, references: Sequence[str]) -> float:
    """ROUGE-L F-measure in [0, 1] for the best-matching reference, with Porter stemming (Lin, 2004)."""
    return max(float(_scorer().score(reference, answer)["rougeL"].fmeasure) for reference in references)


def exact_match(answer: str, references: Sequence[str]) -> float:
    """1 if the answer equals a reference, otherwise 0, after SQuAD's normalisation: lower case, no punctuation, no
    articles (a, an, the), single spaces (Rajpurkar et al., 2016)."""
    plain = _normalised(answer)
    return float(any(plain == _normalised(reference) for reference in references))


def _normalised(text: str) -> str:
    bare = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", bare).split())


@functools.cache
def _scorer() -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(["rougeL"], use_stemmer=True)


_CLASSES: tuple[Task, ...] = ("sequence-classification",)
_LANGUAGE: tuple[Task, ...] = ("causal-lm",)
METRICS: Mapping[str, Metric] = {
    "accuracy": Metric(accuracy, "labels"),  # of a language model: of the response's tokens
    "macro-f1": Metric(macro_f1, "labels", _CLASSES),
    "loss": Metric(mean_loss, "losses", larger_is_better=False),
    "perplexity": Metric(perplexity, "losses", _LANGUAGE, larger_is_better=False),
    "exact-match": Metric(exact_match, "texts", _LANGUAGE),
    "rouge-l": Metric(rouge_l, "texts", _LANGUAGE),
    "rouge-l-teacher-forced": Metric(rouge_l, "texts", _LANGUAGE),  # of `generate.teacher_forced`
}


def generates(metric: str) -> bool:
    """Whether a metric scores answers that the model generates token by token."""
    return METRICS[metric].of == "texts" and metric != "rouge-l-teacher-forced"


def score_name(metric: str) -> str:
    """A metric's name in scores and files: "macro-f1" -> "macro_f1"."""
    return metric.replace("-", "_")


def find_metric(name: str) -> Metric:
    """The metric with this name, as spelled in configs or in scores. Raises `ConfigError` if the table lacks it."""
    for known, metric in METRICS.items():
        if score_name(known) == score_name(name):
            return metric
    raise ConfigError(f"no metric is called {name!r}; there are {', '.join(METRICS)}.")


def is_better(metric: str, new: float | None, old: float | None, *, by: float = 0.0) -> bool:
    """Whether `new` is better than `old` by more than `by`. None and NaN are never better, and always worse."""
    if new is None or math.isnan(new):
        return False
    if old is None or math.isnan(old):
        return True
    return (new - old if find_metric(metric).larger_is_better else old - new) > by


def worst_of(metric: str, items: Sequence[Item], value: Callable[[Item], float | None]) -> Item | None:
    """The item with the worst value, the first among equals. An item without a number (None, NaN) is worst of all."""
    return functools.reduce(lambda a, b: b if is_better(metric, value(a), value(b)) else a, items) if items else None
