"""What other programs read, as files in their own language: nginx's, systemd's, Docker's. @name@ is filled in."""

from __future__ import annotations

import re
from importlib.resources import files
from typing import Any


def filled(template: str, **values: Any) -> str:
    """The text of a file of this folder. What is filled in is not looked at again, whatever it holds."""
    text = (files(__name__) / template).read_text(encoding="utf-8")
    return re.sub(r"@(\w+)@", lambda found: str(values[found[1]]), text)


__all__ = ["filled"]
