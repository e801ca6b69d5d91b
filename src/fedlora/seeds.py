"""One rule for randomness: each stream's seed is a hash of its purpose, and the hash never changes.

`derive_seed(seed, "train", 3, "site-1")` is the same number on every machine, in every process and Python version, so
running one client alone reproduces its round. fedlora never uses Python's `hash()` or global generators.
"""

from __future__ import annotations

import hashlib
import json


def derive_seed(*parts: str | int) -> int:
    """A 63-bit seed, a stable function of `parts` (strings and integers; their types and order count).

    The first eight bytes of SHA-256 over the JSON list of the parts, without the sign bit, because
    `torch.Generator.manual_seed` and `numpy.random.default_rng` both accept that.
    """
    digest = hashlib.sha256(json.dumps(list(parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
