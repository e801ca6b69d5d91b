"""Names that embeddings and heads have in some model: without a base model, nothing else tells what may be tied."""

from __future__ import annotations

import re

_EMBEDDING = re.compile(
    r"(.*\.)?(\w*emb\w*|wte|wpe|shared|\w*lm_head\w*|\w*vocab\w*|word\w*|tok\w*|decoder|output|head|proj_out"
    r"|\w*predict\w*)",
    re.IGNORECASE,
)


def may_be_embedding(module: str) -> bool:
    """Whether a module has a name that an embedding or a head has in some model."""
    return _EMBEDDING.fullmatch(module) is not None
