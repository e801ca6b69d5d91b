"""The weight of each class in a client's training loss, from its own counts."""

from __future__ import annotations

from collections import Counter

from fedlora.data.text import TextData
from fedlora.errors import ConfigError
from fedlora.training.settings import ClassWeights


def weigh_classes(data: TextData, weights: ClassWeights | None) -> tuple[float, ...] | None:
    """One client's weight for each class, by index; None if classes are not weighted.

    The loss of a batch is sum_i w(y_i) l_i / sum_i w(y_i), as in torch's CrossEntropyLoss(weight=w).

    Args:
        data: the client's training data: n examples, n_c of class c, k classes that occur.
        weights: "balanced": w_c = n / (k n_c), scikit-learn's formula, from this client's own counts, which it need not
            disclose to anybody. Each of *its* classes then counts equally for it; the federation's classes do not, if
            some clients lack some. A class that it lacks has weight 0, which no example uses.

    Raises:
        ConfigError: the data have no classes.
    """
    if weights is None:
        return None
    if data.labels is None:
        raise ConfigError(
            "train.class_weights needs classes, and instruction data has none; leave it out for a causal-lm."
        )
    counts = Counter(data.labels)
    return tuple(len(data) / (len(counts) * counts[c]) if counts[c] else 0.0 for c in range(len(data.label_names)))
