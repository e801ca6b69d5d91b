"""The files of examples/deploy with their variables filled in, as compose reads them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

PLACE = Path(__file__).parents[2] / "examples" / "deploy"


def services(file: str, **said: object) -> dict[str, Any]:
    """The services of server.yaml or site.yaml; a variable that is neither given nor has a default is an error."""
    import yaml  # transformers brings it

    def value(found: re.Match[str]) -> str:
        return str(said[found[1]] if found[1] in said or not found[2] else found[2])

    text = re.sub(r"\$\{(\w+)(?::[?][^}]*|:-([^}]*))?\}", value, (PLACE / file).read_text(encoding="utf-8"))
    found: dict[str, Any] = yaml.safe_load(text)["services"]
    return found
