"""Names of base models: what is recognised as one, and what is not. Kind of evidence: a table."""

from __future__ import annotations

import pytest

from fedlora.adapters.base_names import Base, check_same_base, is_path, is_same_base, public_name
from fedlora.errors import AdapterFormatError

SAME = [
    ("org/Name", "org/Name/"),
    ("org/Name", "ORG/name"),
    ("unsloth/Llama-3.2-1B-Instruct", "unsloth/Llama-3.2-1B-Instruct-bnb-4bit"),
    ("/data/model", "/data/model/"),
    ("tiny", "tiny"),
]
OTHER = [
    ("org/Name", "another/Name"),
    ("org/Name-7B", "org/Name-7B-Instruct"),
    ("/data/Llama-3.1-8B", "/data/llama-3.1-8b"),
    ("meta-llama/Llama-3.1-8B", "/data/Llama-3.1-8B"),
    (None, "org/Name"),
    ("tiny", "org/tiny"),
]


@pytest.mark.parametrize(("one", "two"), SAME, ids=str)
def test_one_model_under_two_names(one: str, two: str) -> None:
    for a, b in ((one, two), (two, one)):
        assert is_same_base(Base(a), Base(b)) and is_same_base(Base(a), Base(a))
        notes = check_same_base([Base(a), Base(b), Base(a)])
        assert len(notes) == (one != two)  # taken for granted, and said


@pytest.mark.parametrize(("one", "two"), OTHER, ids=str)
def test_what_may_be_two_models_is_refused_and_can_be_declared(one: str | None, two: str) -> None:
    for a, b in ((one, two), (two, one)):
        with pytest.raises(AdapterFormatError, match=r"different base models.*--same-base"):
            check_same_base([Base(a), Base(b)])
        assert "(--same-base)" in check_same_base([Base(a), Base(b)], declared=True)[0]


def test_revisions() -> None:
    """main is the default; two that are said and differ are two models, whatever a user declares."""
    assert not check_same_base([Base("a/b"), Base("a/b", "main"), Base("a/b", "")])
    assert not is_same_base(Base("a/b", "abc"), Base("a/b"))
    with pytest.raises(AdapterFormatError, match="two revisions"):
        check_same_base([Base("a/b", "abc"), Base("a/b", "abd")], declared=True)
    check_same_base([Base("a/b", "abc"), Base("a/b")], declared=True)


def test_the_name_that_is_handed_on_is_no_path() -> None:
    assert public_name([Base("/data/X-7B"), Base("one/X-7B")]) == "one/X-7B"
    assert public_name([Base(None), Base("/data/X-7B")]) == "/data/X-7B" and public_name([Base(None)]) is None
    assert [is_path(name) for name in ("a/b", "a", "./a", "~/a", "/a", "a/b/c", "C:\\a", "a/b/")] == [
        False, False, True, True, True, True, True, False,
    ]  # fmt: skip
