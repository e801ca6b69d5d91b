"""Files for other programs, in their own languages: nginx's, systemd's. @name@ is a placeholder."""

from __future__ import annotations

import re
from importlib.resources import files
from typing import Any


def filled(template: str, **values: Any) -> str:
    """The text of a file in this folder with its placeholders filled in, in one pass, whatever the values contain."""
    text = (files(__name__) / template).read_text(encoding="utf-8")
    return re.sub(r"@(\w+)@", lambda found: str(values[found[1]]), text)


__all__ = ["filled"]
