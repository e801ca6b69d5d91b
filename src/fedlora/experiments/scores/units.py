"""Scores and numbers in words that a stranger can read: what they are of, and in which unit."""

from __future__ import annotations

from fedlora.experiments.scores.numbers import parse_number
from fedlora.training.metrics import score_name

# A metric, as scores have its name -> what it is, with its unit as it stands in tables of scores.
SCALES = {
    "loss": "log-loss in nats",
    "perplexity": "perplexity (1 is perfect)",
    "matthews": "Matthews correlation (-1 to 1)",
    "accuracy": "accuracy (0 to 1)",
    "balanced_accuracy": "balanced accuracy (0 to 1)",
    "macro_f1": "macro F1 (0 to 1)",
    "exact_match": "share of exact matches (0 to 1)",
    "rouge_l": "ROUGE-L (0 to 1)",
    "rouge_l_teacher_forced": "ROUGE-L, teacher-forced (0 to 1)",
}
_WHERE = {
    "test": "on held-out test data",
    "validation": "on validation data",
    "clients": "on the test data, of the clients' own readouts",
    "unseen": "on tasks that nobody trains on",
    "validation_mismatched": "on MNLI's mismatched test data",
}
_WHEN = {"last": "after the last round", "best": "after the round that is best on validation"}
_OF_SERVER = {
    "error": "relative error of the server's update against the exact mean (0: it is the mean)",
    "gauge drift": "relative change of the server's update when clients write the same uploads in other coordinates "
    "of condition 10 (0: none)",
    "error of factor averages": "relative error that averages of zero-padded factors have against the exact mean of "
    "the same uploads, in the last round",
}


def scale(metric: str) -> str:
    """ "log-loss in nats". metric: as a config or as scores have its name."""
    return SCALES[score_name(metric)]


def explained(which: str, metric: str | None) -> str:
    """A number, as `Result.score` takes its name, in words with its unit. metric: as scores have it; None where nothing
    was run: its name alone."""
    number = parse_number(which)
    if number.where == "server":
        return _OF_SERVER[number.what]
    if metric is None:
        return which
    if number.where == "rounds":
        name = scale(metric).partition(" (")[0].removesuffix(" in nats")
        return f"first evaluated round whose validation {name} reaches {number.amount:g}"
    place = _WHERE[number.where]
    if number.what == "mean of last":
        return f"{scale(metric)} {place}, the mean of the last {int(number.amount)} evaluations"
    if number.what == "largest drop":
        return f"largest change for the worse of {scale(metric)} {place}, from one evaluation to the next"
    if number.what == "jitter":
        return f"standard deviation of the change of {scale(metric)} {place}, from one evaluation to the next"
    return f"{scale(metric)} {place}, {_WHEN[number.what]}"


def capital(words: str) -> str:
    """As a sentence begins."""
    return words[:1].upper() + words[1:]
