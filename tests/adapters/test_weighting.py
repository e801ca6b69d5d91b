"""Weights of a merge: of all modules and of some. Kinds of evidence: by hand, refusals."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedlora.adapters.weighting import fits, read_weight_map, weighting
from fedlora.errors import ConfigError


def test_weights_of_modules_by_hand() -> None:
    """The first key that fits decides; a mean divides by the sum, a sum does not."""
    keys = {"layer.0.q": (1, 0), "layer.0.*": (1, 1), "*.v": (0, 2)}
    mean = weighting(2, [1, 3], keys)
    assert [mean.of(f"layer.{n}") for n in ("0.q", "0.v", "1.v", "1.q")] == [(1, 0), (0.5, 0.5), (0, 1), (0.25, 0.75)]
    signed = weighting(2, [1, -3], keys, sum=True)
    assert [signed.of(f"layer.{n}") for n in ("0.q", "0.v", "1.q")] == [(1, 0), (1, 1), (1, -3)]
    assert weighting(3).of("x") == (1 / 3, 1 / 3, 1 / 3) and weighting(3, sum=True).of("x") == (1, 1, 1)
    assert weighting(2, None, {"default": [1, 3]}).of("x") == (0.25, 0.75)


def test_a_key_is_a_name_or_a_shell_pattern() -> None:
    """No regular expression: a dot is a dot. An expert's name is a name, though it looks like a pattern."""
    assert fits("a.b", "a.b") and not fits("a.b", "a_b") and not fits("a.b", "x.a.b") and not fits("q$", "q")
    assert fits("experts[0]", "experts[0]") and fits("experts[[]*", "experts[12]") and fits("?.q", "a.q")
    assert not fits("(a+)+b", "a" * 50_000) and not fits("*a" * 20, "a" * 19)


@pytest.mark.parametrize(
    ("weights", "sum", "said"),
    [
        ([1, 2, 3], False, "3 weights for 2 adapters"),
        ([1, float("nan")], True, "finite"),
        ([1, float("inf")], False, "finite"),
        ([1e308, 1e308], False, "from 1e-12 to 1e[+]12"),
        ([10**400, 1], False, "from 1e-12 to 1e[+]12"),
        ([5e-324, 1], False, "from 1e-12 to 1e[+]12"),
        ([1e-9, 1e9], True, "too far apart"),
        ([-1, 2], False, "--sum"),
        ([0, 0], False, "not all zero"),
        ([0, 0], True, "not all zero"),
        (["1", 2], False, "weights are numbers"),
        ([True, 2], False, "weights are numbers"),
    ],
)
def test_absurd_weights_are_refused(weights: list[float], sum: bool, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        weighting(2, weights, sum=sum)
    if len(weights) == 2 and said != "not all zero":
        with pytest.raises(ConfigError, match=said):
            weighting(2, None, {"*.q": weights}, sum=sum)


def test_a_key_that_decides_nothing_is_an_error() -> None:
    weights = weighting(1, [1], {"*.q": [1], "a.q": [2]})
    with pytest.raises(ConfigError, match=r"'a\.q' would decide nothing"):
        weights.check_used(["a.q", "b.q"])
    weighting(1, [1], {"a.q": [2], "*.q": [1]}).check_used(["a.q", "b.q"])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "0 keys"),
        ("x", "not TOML"),
        ("a.q = [1]", "write it in quotes"),
        ("'a' = 1", "lines KEY ="),
        ("'a' = []", "lines KEY ="),
        ("'a' = ['1']", "lines KEY ="),
        ("'a' = [true]", "lines KEY ="),
    ],
)
def test_a_file_that_is_no_weight_map(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "w.toml").write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_weight_map(tmp_path / "w.toml")


def test_two_defaults_are_an_error() -> None:
    with pytest.raises(ConfigError, match="has a default"):
        weighting(2, [1, 1], {"default": [1, 2]})
