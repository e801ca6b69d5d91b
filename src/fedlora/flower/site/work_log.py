"""What a site's trainer has done, a line each, for the one who looks at the site: SITE/state/logs/work.jsonl.

The process of each message writes it, and says the same on stderr, where the site's node does. It never leaves the
site.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from fedlora.errors import ConfigError
from fedlora.flower.ownership import opened_here
from fedlora.flower.places import SiteFolder

NAME = "work.jsonl"
_MOST = 4 * 2**20  # bytes; then the file begins anew
_LONGEST = 2_000  # letters of an error


@dataclass(frozen=True)
class Work:
    """One message's work. did: "train" or "evaluate"; "told": `error` is why earlier work did not count.

    loss: None where there is none. error: "" where all went well."""

    did: str
    round: int
    examples: int = 0
    seconds: float = 0.0
    loss: float | None = None
    error: str = ""

    def line(self) -> str:
        """In words, for a screen.

        Example:
            >>> Work("train", 3, 120, 14.21, 0.412).line()
            'round 3: trained 120 examples in 14.2 s, loss 0.4120'
        """
        if self.did == "told":
            return f"the server says: {self.error}"
        if self.error:
            return f"round {self.round}: {self.did} failed after {self.seconds:.1f} s: {self.error}"
        did = {"train": "trained", "evaluate": "measured"}.get(self.did, self.did)
        loss = "" if self.loss is None else f", loss {self.loss:.4f}"
        return f"round {self.round}: {did} {self.examples} examples in {self.seconds:.1f} s{loss}"


def write(site: Path, work: Work) -> None:
    """Append a line, and say it. `site`: the site's folder. What the disk refuses is not written: the round counts
    without it."""
    print(work.line(), file=sys.stderr, flush=True)
    facts = asdict(work)
    if work.loss is not None and not math.isfinite(work.loss):
        facts |= {"loss": None, "error": work.error or f"the loss is {work.loss}"}
    facts["error"] = facts["error"][:_LONGEST]
    facts["at"] = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    path = SiteFolder(site).logs / NAME
    with suppress(OSError, ConfigError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path.is_file() and path.stat().st_size > _MOST:
            os.replace(path, path.with_suffix(".jsonl.1"))
        descriptor = opened_here(path, os.O_WRONLY | os.O_APPEND)
        try:
            os.write(descriptor, (json.dumps(facts, ensure_ascii=False) + "\n").encode())  # one write: lines stay whole
        finally:
            os.close(descriptor)


__all__ = ["NAME", "Work", "write"]
