"""One rule for randomness: every stream is derived from what it is for, by a hash that never changes.

`derive_seed(seed, "train", 3, "site-1")` is the same number on every machine, in every process and Python version,
so one client run alone reproduces its round. Python's `hash()` and global generators are never used.
"""

from __future__ import annotations

import hashlib
import json


def derive_seed(*parts: str | int) -> int:
    """A 63-bit seed, a stable function of `parts` (strings and integers; their types and order count).

    The first eight bytes of SHA-256 over the JSON list of the parts, without the sign bit, which is what
    `torch.Generator.manual_seed` and `numpy.random.default_rng` both accept.
    """
    digest = hashlib.sha256(json.dumps(list(parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
