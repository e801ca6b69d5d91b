"""Strangers' words in a README.md: in a table's cell, and in the front matter. Neither can break out of its place."""

from __future__ import annotations

import os
import re

from fedlora.adapters.base_names import is_path
from fedlora.core.echo import MOST, markdown_cell, yaml_string


def cell(text: str) -> str:
    """Text in a Markdown table: a plain name as it is, anything else as code, so that no markup acts."""
    return text if len(text) <= MOST and re.fullmatch(r"[A-Za-z0-9_.\[\] -]+", text) else markdown_cell(text)


def base_line(base: str | None) -> str:
    """The line `base_model: ...` of a front matter; "" for a base that is not named, or a path of this machine."""
    if not base or len(base) > MOST or is_path(base) or not base.isprintable() or os.path.lexists(base):
        return ""
    return f"base_model: {yaml_string(base)}\n"
