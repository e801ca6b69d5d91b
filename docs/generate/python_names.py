"""The public names of Python, module by module, as directives of autodoc: what `__all__` says, and nothing else."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from importlib import import_module

from generate.markdown import line

MODULES = {  # module -> what a reader looks there for
    "fedlora": "What most programs need. Torch, safetensors and numpy suffice.",
    "fedlora.client": "A client's side of a round.",
    "fedlora.server": "The server and its state.",
    "fedlora.core": "Adapters, messages, and the protocol of a method.",
    "fedlora.simulation": "The loop over rounds in one process.",
    "fedlora.adapters": "PEFT adapters as files: read, written, merged.",
    "fedlora.analysis": "What methods and adapters really do.",
    "fedlora.training": "A client's local work on transformers and peft, or on any module (`fedlora[train]`).",
    "fedlora.runs": "One TOML file to one folder (`fedlora[train]`).",
    "fedlora.data": "Text and tables, and how they are dealt out.",
    "fedlora.privacy": "Differential privacy of what is released (`fedlora[privacy]`).",
    "fedlora.hf": "Scripts with a trainer of their own.",
    "fedlora.attacks": "Byzantine clients, for experiments.",
    "fedlora.flower": "A Flower strategy and a grid that bounds what it takes (`fedlora[flower]`).",
    "fedlora.flower.site.node": "A client of any method, in a ClientApp of yours.",
    "fedlora.testing": "The contracts that a method keeps, to run on one of your own.",
    "fedlora.workers": "Several processes that train a round's clients.",
}


def names() -> list[tuple[str, str]]:
    """(module, name), each name where it is met first."""
    seen: set[int] = set()
    found = []
    for module in MODULES:
        held = import_module(module)
        for name in held.__all__:
            value = getattr(held, name)
            documented = inspect.isclass(value) or inspect.isfunction(value)
            if documented and id(value) in seen:
                continue
            seen.add(id(value))
            found.append((module, name))
    return found


def page() -> str:
    """For readers of the checkout: each module's names with the first sentence of their docstrings."""
    said = []
    for module, about in MODULES.items():
        own = [name for held, name in names() if held == module]
        said += [f"## {module}", about, "\n".join(_row(module, name) for name in own)]
    return "\n\n".join(filter(None, said)) + "\n"


def site_pages() -> dict[str, str]:
    """Module -> its page of the site, with all signatures: Markdown with a block of reStructuredText."""
    found = {}
    for module, about in MODULES.items():
        rst = "\n".join(_directive(module, name) for held, name in names() if held == module)
        found[module] = f"# {module}\n\n{about}\n" + (f"\n````{{eval-rst}}\n{rst}\n````\n" if rst else "")
    return found


def _row(module: str, name: str) -> str:
    value = getattr(import_module(module), name)
    documented = inspect.isclass(value) or inspect.isfunction(value)
    words = (inspect.getdoc(value) or "") if documented else _held(value).replace("``", "`")
    first = re.split(r"(?<=\.)\s", " ".join(words.partition("\n\n")[0].split()), maxsplit=1)[0]
    return f"* `{name}`: {line(first)}"


def _directive(module: str, name: str) -> str:
    value = getattr(import_module(module), name)
    if inspect.isclass(value):
        return f".. autoclass:: {module}.{name}\n   :members:\n"
    if inspect.isfunction(value):
        return f".. autofunction:: {module}.{name}\n"
    return f".. py:data:: {module}.{name}\n\n   {_held(value)}\n"


def _held(value: object) -> str:
    """What a constant holds, in a line."""
    if isinstance(value, Mapping):
        return "A mapping with these keys: " + ", ".join(f"``{key}``" for key in value) + "."
    if isinstance(value, Sequence):
        return "In this order: " + ", ".join(f"``{getattr(one, 'name', one)}``" for one in value) + "."
    return f"``{value}``"
