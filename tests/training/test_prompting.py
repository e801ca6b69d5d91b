"""What stands around a prompt, and which tokens are learned: token by token.

Kinds of evidence: *oracle* (token ids written down from the template by hand; of SmolLM2 the whole text is written out
and tokenised by the tokenizer itself), *contract* (what cannot be told is one line), *structural* (a digest).
"""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from fedlora.data import TextData
from fedlora.errors import ConfigError, DataError
from fedlora.training.encode import IGNORED, cut_of, encode
from fedlora.training.templates import Template, check_template, converse, end_tokens, find_template, render
from support.known_warnings import CONV1D, FUTURE_NAMES
from support.packaged import smollm2_tokenizer
from support.training_data import EOS, SEP, UNK, encode_prompts, tokenizer, word

pytestmark = [FUTURE_NAMES, CONV1D]

# By words: the user's turns are "[CLS] ... [SEP]", the assistant's "[UNK]"-free "w9 ... [EOS] w8" with w9 its header.
PLAIN = (
    "{% for m in messages %}"
    "{% if m.role == 'assistant' %}w9 {{ m.content }} [EOS] w8 "
    "{% else %}{{ 'w6' if m.role == 'system' else 'w7' }} {{ m.content }} [SEP] {% endif %}"
    "{% endfor %}{% if add_generation_prompt %}w9 {% endif %}"
)
MARKED = PLAIN.replace(
    "w9 {{ m.content }} [EOS] w8 ", "w9 {% generation %}{{ m.content }} [EOS]{% endgeneration %} w8 "
)


def talking(template: str | None) -> Any:
    found = tokenizer(classifies=False)
    found.add_special_tokens({"additional_special_tokens": ["[SEP]"]})
    found.chat_template = template
    return found


def words(*numbers: int) -> list[int]:
    return [word(k) for k in numbers]


TALK = TextData(
    "instruction",
    ("w3 w4",),
    responses=("w5",),
    history=((("system", "w0"), ("user", "w1"), ("assistant", "w2 w2")),),
)
WHOLE = [
    *words(6, 0), SEP, *words(7, 1), SEP, *words(9, 2, 2), EOS, word(8), *words(7, 3, 4), SEP, *words(9, 5), EOS,
]  # fmt: skip


class TestTurns:
    @pytest.mark.parametrize("template", [PLAIN, MARKED], ids=["plain", "with generation marks"])
    def test_every_assistants_turn_with_its_end_and_nothing_else(self, template: str) -> None:
        """By hand: w2 w2 [EOS] and w5 [EOS] are learned; not the header w9, what follows an end (w8), or the users."""
        (example,) = encode(TALK, talking(template), max_length=64)
        assert example["input_ids"] == WHOLE
        learned = [place for place, label in enumerate(example["labels"]) if label != IGNORED]
        assert learned == [7, 8, 9, 16, 17]
        assert [example["labels"][place] for place in learned] == [*words(2, 2), EOS, word(5), EOS]
        assert encode(TALK, talking(template), max_length=64, loss_on="all")[0]["labels"] == WHOLE

    def test_a_template_of_ones_own_is_as_the_tokenizers(self) -> None:
        """data.template as Jinja text, on a tokenizer that has none."""
        assert encode(TALK, talking(None), max_length=64, template=PLAIN) == encode(TALK, talking(PLAIN), max_length=64)

    def test_a_prompt_ends_with_the_opening_of_the_answer(self) -> None:
        """What training shows before the last answer is what generation starts from."""
        assert encode_prompts(TALK, talking(PLAIN), max_length=64) == [WHOLE[:16]]

    def test_a_token_over_the_edge_of_a_turn_is_cut_there(self) -> None:
        """Words are split at white space, so the header "w1" and the answer "2" would be the one word w12; in training
        they are two, as they are when the model answers: the prompt ends with w1, and "2" is no word."""
        template = PLAIN.replace("w9 ", "w1")
        data = TextData("instruction", ("w3",), responses=("2 w5",))
        (example,) = encode(data, talking(None), max_length=64, template=template)
        assert example["input_ids"] == [*words(7, 3), SEP, word(1), UNK, word(5), EOS]
        assert example["labels"] == [*[IGNORED] * 4, UNK, word(5), EOS]
        assert encode_prompts(data, talking(None), max_length=64, template=template) == [example["input_ids"][:4]]

    def test_an_answer_ends_at_the_turns_end_and_at_the_tokenizers(self) -> None:
        ending = PLAIN.replace("[EOS] w8", "[SEP] w8")
        assert end_tokens(find_template(PLAIN, talking(None)), talking(None)) == (EOS,)
        assert end_tokens(find_template(ending, talking(None)), talking(None)) == (SEP, EOS)
        assert end_tokens(Template("raw"), talking(None)) == (EOS,)

    def test_a_date_is_the_same_every_day(self) -> None:
        """Llama 3 puts the day into its system message; two sites, and a run resumed tomorrow, must read the same."""
        template = "{{ strftime_now('%d %b %Y') }}, {{ date_string }}: " + PLAIN
        chosen = find_template(template, talking(None))
        text = render(chosen, talking(None), (("user", "w1"),), ask=True)
        assert text == "26 Jul 2024, 26 Jul 2024: w7 w1 [SEP] w9 "
        asked = "{% set f = '%B %-d, %A' %}{{ strftime_now(format=f) }} " + PLAIN
        text = render(find_template(asked, talking(None)), talking(None), (("user", "w1"),), ask=True)
        assert text.startswith("July %-d, Friday"), "a code that not every system has stays as it is, every day"

    def test_a_sign_in_a_text_is_refused(self) -> None:
        """It would open or end a turn: a forged one would be learnt, or an answer cut."""
        for role, talk in (
            ("user", (("user", "w1 [SEP] w2"), ("assistant", "w5"))),
            ("assistant", (("user", "w1"), ("assistant", "w5 [EOS]"))),
        ):
            with pytest.raises(DataError, match=rf"the {role}'s text .*'\[(SEP|EOS)\]' at character 3"):
                converse(find_template(PLAIN, talking(None)), talking(None), talk)

    @pytest.mark.parametrize(("template", "left"), [("none", [3, 4]), ("w7 {prompt} w8", [7, 3, 4, 8])])
    def test_a_tokenizer_that_ends_every_text_does_not_end_the_prompt(self, template: str, left: list[int]) -> None:
        """The answer stands right behind it: an end token in between would be read as the end."""
        ending = talking(None)
        ending._tokenizer.post_processor = TemplateProcessing(single="$A [EOS]", special_tokens=[("[EOS]", EOS)])
        assert ending("w3")["input_ids"] == [word(3), EOS]
        data = TextData("instruction", ("w3 w4",), responses=("w5",))
        (example,) = encode(data, ending, max_length=64, template=template)
        assert example["input_ids"] == [*words(*left), *words(5), EOS]
        assert encode_prompts(data, ending, max_length=64, template=template) == [words(*left)]

    def test_an_answers_words_in_the_header_do_not_hide_it(self) -> None:
        """ "w9" stands before every answer, where the template was not asked for one; and it is the answer, too."""
        silent = PLAIN.replace("{% if add_generation_prompt %}w9 {% endif %}", "")
        talk = TextData("instruction", ("w3 w4",), responses=("w9",))
        with pytest.raises(DataError, match="puts 'w9' before an answer"):
            encode(talk, talking(silent), max_length=64)

    def test_a_template_that_wants_a_system_message_has_an_end(self) -> None:
        wants = "{% if messages[0].role != 'system' %}{{ raise_exception('system first') }}{% endif %}" + PLAIN
        assert end_tokens(find_template(wants, talking(None)), talking(None)) == end_tokens(
            find_template(PLAIN, talking(None)), talking(None)
        )


class TestCuts:
    @pytest.mark.parametrize(
        ("max_length", "left"),
        [
            (18, WHOLE),
            (17, [*words(6, 0), SEP, *words(7, 3, 4), SEP, *words(9, 5), EOS]),
            (10, [*words(6, 0), SEP, *words(7, 3, 4), SEP, *words(9, 5), EOS]),
            (9, [*words(6, 0), SEP, *words(7, 4), SEP, *words(9, 5), EOS]),
            (8, [*words(6, 0), SEP, *words(7), SEP, *words(9, 5), EOS]),
        ],
    )
    def test_the_earliest_exchange_goes_first_then_the_prompts_front(self, max_length: int, left: list[int]) -> None:
        """By hand; the template, the system message and the last answer stay whole, and the lost tokens are counted."""
        (example,) = encode(TALK, talking(PLAIN), max_length=max_length)
        assert example["input_ids"] == left
        assert [y for y in example["labels"] if y != IGNORED][-2:] == [word(5), EOS]
        lost = len(WHOLE) - len(left)
        assert example.get("cut", 0) == lost
        assert (cut_of([example]).cut, cut_of([example]).tokens) == (int(lost > 0), lost)
        assert encode_prompts(TALK, talking(PLAIN), max_length=max_length - 2) == [left[:-2]]

    def test_what_may_be_dropped_goes_before_the_front(self) -> None:
        """droppable: the characters of w1 w2 of the prompt, from their end; then the front."""
        data = TextData("instruction", ("w0 w1 w2 w3",), responses=("w5",), droppable=((3, 8),))
        for max_length, left in ((9, (0, 1, 2, 3)), (8, (0, 1, 3)), (7, (0, 3)), (6, (3,))):
            (example,) = encode(data, talking(PLAIN), max_length=max_length)
            assert example["input_ids"] == [word(7), *words(*left), SEP, *words(9, 5), EOS]

    def test_no_room_for_the_template_or_for_the_answer(self) -> None:
        with pytest.raises(DataError, match=r"example 0: .*never cut .* 6 tokens"):
            encode(TALK, talking(PLAIN), max_length=7)
        with pytest.raises(DataError, match=r"example 0: .*2 tokens .*no room"):
            encode(TALK, talking(PLAIN), max_length=2)

    def test_of_a_text_the_prompt_is_cut_and_not_the_text(self) -> None:
        data = TextData("instruction", ("w0 w1 w2",), responses=("w5",))
        for room, left in ((5, (0, 1, 2)), (4, (1, 2)), (3, (2,))):
            (example,) = encode(data, talking(None), max_length=room + 2, template="w7 {prompt} w9 ")
            assert example["input_ids"] == [word(7), *words(*left), word(9), word(5), EOS]


class TestWhichTemplate:
    def test_a_tokenizer_without_one_is_refused_with_the_way_out(self) -> None:
        """Nothing is glued silently: neither in training nor for generation."""
        data = TextData("instruction", ("w0",), responses=("w1",))
        for ask in (encode, encode_prompts):
            for wanted in (None, "chat"):
                with pytest.raises(ConfigError, match=r"no chat template.*data\.template.*\{prompt\}.*'none'") as error:
                    ask(data, talking(None), max_length=9, template=wanted)
                assert "\n" not in str(error.value)

    def test_none_is_the_prompt_as_it_stands(self) -> None:
        data = TextData("instruction", ("w0 w1",), responses=("w2",))
        (example,) = encode(data, talking(PLAIN), max_length=9, template="none")
        assert example["input_ids"] == [*words(0, 1, 2), EOS]

    def test_a_conversation_needs_a_chat_template(self) -> None:
        for template in ("none", "w7 {prompt} w9 "):
            with pytest.raises(DataError, match=r"example 0: .*system message"):
                encode(TALK, talking(None), max_length=64, template=template)

    @pytest.mark.parametrize(
        ("wrong", "said"),
        [
            ("raw", "data.template is 'chat'"),
            ("Q: {prompt} A: {response}", "follow by themselves"),
            ("{prompt} {prompt}", "once"),
            ("### {{prompt}}", "needs `messages`"),
        ],
    )
    def test_what_is_no_template(self, wrong: str, said: str) -> None:
        with pytest.raises(ConfigError, match=said):
            check_template(wrong)

    def test_a_manifests_name(self) -> None:
        """Text as it is, a chat template by its digest: another template is another name."""
        names = [find_template(t, talking(PLAIN)).name for t in (None, "chat", MARKED, "none", "w7 {prompt}")]
        assert names[0] == names[1] and names[0].startswith("chat, sha256 ")
        assert len(set(names)) == 4 and names[3:] == ["raw", "w7 {prompt}"]

    @pytest.mark.parametrize(
        ("template", "said"),
        [
            # the reasoning models' habit: only the last answer keeps its form
            (PLAIN.replace("w9 {{ m.content }}", "w9 {% if not loop.last %}w8 {% endif %}{{ m.content }}"), "rewrites"),
            (PLAIN.replace("{% if add_generation_prompt %}w9 {% endif %}", ""), "add_generation_prompt"),
            ("{{ raise_exception('no system message here') if messages[0].role == 'system' }}" + PLAIN, "no system"),
        ],
        ids=["rewrites", "opens nothing", "refuses"],
    )
    def test_a_template_that_cannot_be_learned_from(self, template: str, said: str) -> None:
        with pytest.raises(DataError, match=rf"example 0: the chat template .*{said}") as error:
            encode(TALK, talking(template), max_length=64)
        assert "\n" not in str(error.value)

    def test_turns_without_an_end_are_refused(self) -> None:
        """A model that learns this would never stop."""
        with pytest.raises(ConfigError, match="no special token"):
            encode(TALK, talking(PLAIN.replace("[EOS] w8", "w8")), max_length=64)


@pytest.mark.exhaustive  # it takes seconds to read the real tokenizer; quick: the templates above, written by hand
def test_smollm2_learns_the_assistants_turns_token_by_token() -> None:
    """The real template. Oracle: the text written out by hand in pieces, each with whether it is learned; the tokens of
    the whole text by the tokenizer itself, each marked by the piece that its characters lie in."""
    tok = smollm2_tokenizer()
    if isinstance(tok, str):
        pytest.skip(tok)
    pieces = [
        ("<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n", False),
        ("<|im_start|>user\nWhich colour has the sky?<|im_end|>\n<|im_start|>assistant\n", False),
        ("Blue, by day.<|im_end|>", True),
        ("\n<|im_start|>user\nAnd at night?\nIn a word.<|im_end|>\n<|im_start|>assistant\n", False),
        ("Black.<|im_end|>", True),
    ]
    data = TextData(
        "instruction",
        ("And at night?\nIn a word.",),
        responses=("Black.",),
        history=((("user", "Which colour has the sky?"), ("assistant", "Blue, by day.")),),
    )
    (example,) = encode(data, tok, max_length=128)
    whole = tok("".join(text for text, _ in pieces), add_special_tokens=False, return_offsets_mapping=True)
    assert example["input_ids"] == whole["input_ids"]
    learned = [flag for text, flag in pieces for _ in text]
    want = [t if learned[a] else IGNORED for t, (a, _) in zip(whole["input_ids"], whole["offset_mapping"], strict=True)]
    assert example["labels"] == want
    assert sum(y != IGNORED for y in want) == 5 + 1 + 2 + 1, "Blue|,| by| day|. <|im_end|> and Black|. <|im_end|>"
    (prompt,) = encode_prompts(data, tok, max_length=128)
    assert tok.decode(prompt) == "".join(text for text, _ in pieces[:-1])
    assert end_tokens(find_template(None, tok), tok) == (tok.eos_token_id,)
