"""What each class counts in a client's training loss: by its own counts, or as a table says."""

from __future__ import annotations

from collections import Counter

from fedlora.data.text import TextData
from fedlora.errors import ConfigError
from fedlora.training.settings import ClassWeights


def weigh_classes(data: TextData, weights: ClassWeights | None) -> tuple[float, ...] | None:
    """One client's weight of each class, by index; None where classes are not weighted.

    The loss of a batch is sum_i w(y_i) l_i / sum_i w(y_i), as of torch's CrossEntropyLoss(weight=w).

    Args:
        data: the client's training data, n examples of which n_c are of class c and k classes occur.
        weights: "balanced": w_c = n / (k n_c), scikit-learn's formula, from this client's own counts: all that a client
            knows without telling anybody how many examples of what it holds. So each of *its* classes counts alike for
            it; the federation's classes do not, where some clients lack some. A class that it lacks has weight 0 there,
            and no example to use it on. A table: the same weights for every client; a class that is not named has 1.

    Raises:
        ConfigError: data without classes, or a name that is no class.
    """
    if weights is None:
        return None
    if data.labels is None:
        raise ConfigError(
            "train.class_weights is for classes, and instruction data has none; leave it out for a causal-lm."
        )
    if isinstance(weights, str):
        counts = Counter(data.labels)
        return tuple(len(data) / (len(counts) * counts[c]) if counts[c] else 0.0 for c in range(len(data.label_names)))
    unknown = [name for name in weights if name not in data.label_names]
    if unknown:
        raise ConfigError(
            f"train.class_weights names {', '.join(map(repr, unknown))}, and no example has that class; the "
            f"{len(data.label_names)} classes are {', '.join(map(repr, data.label_names[:20]))}"
            f"{', ...' if len(data.label_names) > 20 else ''}."
        )
    return tuple(float(weights.get(name, 1.0)) for name in data.label_names)
