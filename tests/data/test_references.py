"""What text data knows beside text and labels: references, and spans that may be dropped. Kind of evidence: oracle."""

from __future__ import annotations

import hashlib

import pytest

from fedlora.data import TextData, split
from fedlora.errors import DataError

CHAT = TextData(
    "instruction",
    ("ask a", "ask b", "ask c"),
    responses=("1", "2", "3"),
    references=(("1",), ("2", "two"), ("3", "three", "III")),
    droppable=((4, 5), (0, 0), (0, 3)),
)


class TestScoringFields:
    """`TextData.references` and `.droppable`; the other fields are in test_text.py."""

    @pytest.mark.parametrize("field", ["references", "droppable"])
    def test_they_need_one_entry_for_each_example(self, field: str) -> None:
        """The docstring: N tuples, N pairs."""
        with pytest.raises(DataError, match=rf"'text': 2.*'{field}': 1"):
            TextData("instruction", ("a", "b"), responses=("1", "2"), **{field: ((0, 1),)})

    @pytest.mark.parametrize("field", ["references", "droppable"])
    def test_a_class_has_neither(self, field: str) -> None:
        """They are of generated text; `kind` says which fields belong."""
        with pytest.raises(DataError, match="references, droppable and history"):
            TextData("classification", ("a",), labels=(0,), label_names=("x",), **{field: ((0, 1),)})

    def test_select_takes_them_along(self) -> None:
        """Written out by hand, in the asked order with a repeat."""
        assert CHAT.select([2, 0, 2]) == TextData(
            "instruction",
            ("ask c", "ask a", "ask c"),
            responses=("3", "1", "3"),
            references=(("3", "three", "III"), ("1",), ("3", "three", "III")),
            droppable=((0, 3), (4, 5), (0, 3)),
        )

    def test_concat_undoes_a_cut(self) -> None:
        """The whole from its parts, an empty one among them."""
        assert TextData.concat([CHAT.select([0]), CHAT.select([]), CHAT.select([1, 2])]) == CHAT

    @pytest.mark.parametrize("field", ["references", "droppable"])
    def test_concat_of_parts_with_and_without_them(self, field: str) -> None:
        """Neither dropped nor made up: parts must be of one task."""
        bare = TextData("instruction", ("d",), responses=("4",))
        more = TextData("instruction", ("d",), responses=("4",), **{field: (getattr(CHAT, field)[0],)})
        with pytest.raises(DataError, match="got 2 different"):
            TextData.concat([bare, more])

    def test_split_takes_them_along(self) -> None:
        """Each example keeps its own: the number stands in all four fields."""
        count = 40
        data = TextData(
            "instruction", tuple(f"q{k}" for k in range(count)), responses=tuple(str(k) for k in range(count)),
            references=tuple((str(k), f"no. {k}") for k in range(count)),
            droppable=tuple((k, k + 1) for k in range(count)),
        )  # fmt: skip
        parts = split(data, validation=0.2, test=0.2, seed=0)
        assert sorted(int(r) for part in parts for r in part.responses or ()) == list(range(count))
        for part in parts:
            for text, said, right, span in zip(
                part.text, part.responses or (), part.references or (), part.droppable or (), strict=True
            ):
                k = int(said)
                assert (text, right, span) == (f"q{k}", (said, f"no. {k}"), (k, k + 1))

    def test_digest_is_the_documented_hash(self) -> None:
        """The lines that the docstring of `digest` lists, written out by hand."""
        lines = (
            '["instruction", []]\n["ask a", null, null, "1"]\n["ask b", null, null, "2"]\n["ask c", null, null, "3"]\n'
            '["references", [["1"], ["2", "two"], ["3", "three", "III"]]]\n["droppable", [[4, 5], [0, 0], [0, 3]]]\n'
        )
        assert CHAT.digest() == hashlib.sha256(lines.encode()).hexdigest()

    def test_digest_sees_them_and_old_digests_stand(self) -> None:
        """All different; and without them the hash is the one from before there were any (test_text.py)."""
        bare = TextData("instruction", CHAT.text, responses=CHAT.responses)
        others = [
            CHAT,
            bare,
            TextData("instruction", CHAT.text, responses=CHAT.responses, references=CHAT.references),
            TextData("instruction", CHAT.text, responses=CHAT.responses, droppable=CHAT.droppable),
            TextData(
                "instruction", CHAT.text, responses=CHAT.responses, references=(("1",), ("2",), ("3",)),
                droppable=CHAT.droppable,
            ),
            TextData(
                "instruction", CHAT.text, responses=CHAT.responses, references=CHAT.references,
                droppable=((4, 5), (0, 0), (0, 2)),
            ),
        ]  # fmt: skip
        assert len({data.digest() for data in others}) == len(others)
        lines = '["instruction", []]\n' + "".join(
            f'["{text}", null, null, "{said}"]\n' for text, said in zip(bare.text, bare.responses or (), strict=True)
        )
        assert bare.digest() == hashlib.sha256(lines.encode()).hexdigest()

    def test_lists_become_tuples(self) -> None:
        """The class says "Lists are turned into tuples", so that equal data are equal and hashable."""
        data = TextData("instruction", ["ask a"], responses=["1"], references=[["1", "one"]], droppable=[[4, 5]])  # type: ignore[arg-type]
        assert data == TextData(
            "instruction", ("ask a",), responses=("1",), references=(("1", "one"),), droppable=((4, 5),)
        )
        assert isinstance(hash(data), int)

    def test_an_example_without_any_reference_is_refused(self) -> None:
        """What nothing counts as right for cannot be scored; the reader of tasks refuses it too."""
        with pytest.raises(DataError):
            TextData("instruction", ("ask a",), responses=("1",), references=((),))
