"""Some 230 kinds of adapters in every order of saving and loading. Kinds of evidence: oracle and end-to-end.

Expected values come from peft alone: the state dicts of its dense models in float64, and their means. What a kind is,
and what is measured of it, stands in support/peft_kinds.py; docs/reference/adapter-kinds.md is the table of these
numbers.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import adapter_kinds
from support.peft_kinds import FEATURES, KINDS, LAYERS, REFUSED, judged, refusal

pytestmark = pytest.mark.filterwarnings("ignore")  # of peft's, of much that these kinds are about

# What fails, and whose part of issue 16 mends it: the day that it passes, its line must go.
DEFECTS: dict[str, str] = {
    "AdaLoRA, convolution": "AdaLoRA stores a convolution's A flat; written as LoRA's, peft cannot load it",
}


def known(name: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.xfail(strict=True, reason=DEFECTS[name])] if name in DEFECTS else []


@pytest.mark.quick(15)
@pytest.mark.parametrize("name", [pytest.param(name, marks=known(name)) for name in KINDS])
def test_a_kind_in_every_order_of_saving_and_loading(name: str, tmp_path: Path) -> None:
    """By peft, fedlora, peft, fedlora; merged, and merged again: 1e-12 in float64, narrow types by their rounding."""
    found = judged(KINDS[name], tmp_path)
    assert found.within(max(KINDS[name].tolerance, 1e-12)), found


@pytest.mark.parametrize("name", ["bfloat16", "linear: bfloat16", "experts: bfloat16", "bfloat16 and float32"])
def test_narrow_types_merge_to_float32_on_request(name: str, tmp_path: Path) -> None:
    """The numbers are those of 16 bit; their mean is not rounded to them."""
    found = judged(KINDS[name], tmp_path, "float32")
    assert found.rounding == 1e-6 and found.within(3e-6), found


@pytest.mark.parametrize("name", REFUSED)
def test_a_kind_that_is_refused(name: str, tmp_path: Path) -> None:
    """By name and in one line, alone or when it meets the other one."""
    case, words = REFUSED[name]
    line = refusal(case, tmp_path)
    assert words in line and "\n" not in line, line
    assert not (tmp_path / "m").exists()


def test_the_table_is_as_wide_as_it_says() -> None:
    assert len(KINDS) + len(REFUSED) >= 150
    assert all(f"{layer}: {feature}" in KINDS for layer in LAYERS for feature in FEATURES)


def test_the_page_names_every_kind() -> None:
    """Numbers move with machines; which kinds there are, and which are refused, does not."""
    page = adapter_kinds.PAGE.read_text(encoding="utf-8")
    read = re.findall(r"^\| [^|]+ \| [^|]* \| ([^|]+) \|$", page, flags=re.MULTILINE)
    assert {name for row in read for name in row.split("; ")} == {*KINDS, "adapters"}
    refused = dict(re.findall(r"^\| ([^|]+?) \| `([^|]*?)` \|$", page, flags=re.MULTILINE))
    assert refused == {name: words for name, (_, words) in REFUSED.items()}
