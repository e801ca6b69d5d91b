"""Text data for clients: reading, splitting and partitioning it; benchmarks; data and models packaged on PyPI.

Needs only numpy. It knows nothing about models, adapters or methods.
"""

from __future__ import annotations

from fedlora.data.demo import demo_data, demo_model, smollm2_model
from fedlora.data.glue import GLUE, read_glue
from fedlora.data.partition import dirichlet, iid
from fedlora.data.readers import read_classification, read_instructions
from fedlora.data.splits import split
from fedlora.data.superni import Task, read_task_lists, read_tasks
from fedlora.data.text import TextData

__all__ = [
    "GLUE", "Task", "TextData", "demo_data", "demo_model", "dirichlet", "iid", "read_classification", "read_glue",
    "read_instructions", "read_task_lists", "read_tasks", "smollm2_model", "split",
]  # fmt: skip
