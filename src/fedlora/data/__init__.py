"""Text data for the clients: read it, split it, deal it out, and the data and model of the demo.

Needs numpy only. It knows nothing of models, adapters or methods.
"""

from __future__ import annotations

from fedlora.data.demo import demo_data, demo_model
from fedlora.data.partition import dirichlet, iid, label_counts
from fedlora.data.splits import split
from fedlora.data.text import TextData, read_classification, read_instructions

__all__ = [
    "TextData",
    "demo_data",
    "demo_model",
    "dirichlet",
    "iid",
    "label_counts",
    "read_classification",
    "read_instructions",
    "split",
]
