"""Strangers' text for a README.md, in table cells and front matter, escaped so that it cannot break out."""

from __future__ import annotations

import os
import re

from fedlora.adapters.base_names import is_path
from fedlora.core.text import MOST, markdown_cell, yaml_string


def cell(text: str) -> str:
    """Text for a Markdown table: a plain name as is, anything else as code, so that no markup takes effect."""
    return text if len(text) <= MOST and re.fullmatch(r"[A-Za-z0-9_.\[\] -]+", text) else markdown_cell(text)


def base_line(base: str | None) -> str:
    """The front matter line `base_model: ...`; "" if the base is not named, or is a path on this machine."""
    if not base or len(base) > MOST or is_path(base) or not base.isprintable() or os.path.lexists(base):
        return ""
    return f"base_model: {yaml_string(base)}\n"
