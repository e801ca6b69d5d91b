"""What stands around a prompt, which tokens are learned, and what a template may not do to a text.

Kinds of evidence: *oracle* (token ids written down from the template by hand), *contract* (what cannot be learned is
one line that names client, file and row).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from fedlora.data import TextData, read_instructions
from fedlora.errors import ConfigError, DataError
from fedlora.training.encode import IGNORED, encode
from fedlora.training.loop import LocalTrainer
from fedlora.training.measure import ModelEvaluator
from fedlora.training.settings import TrainSettings
from fedlora.training.templates import BARE, check_template, find_template, rendered
from support.local_training import Loader
from support.training_data import EOS, SEP, UNK, encode_prompts, tokenizer, word

# By words: the user's turns are "w7 ... [SEP]", the assistant's "w9 ... [EOS] w8", with w9 its header.
PLAIN = (
    "{% for m in messages %}"
    "{% if m.role == 'assistant' %}w9 {{ m.content }} [EOS] w8 "
    "{% else %}{{ 'w6' if m.role == 'system' else 'w7' }} {{ m.content }} [SEP] {% endif %}"
    "{% endfor %}{% if add_generation_prompt %}w9 {% endif %}"
)


def talking(template: str | None) -> Any:
    found = tokenizer(classifies=False)
    found.add_special_tokens({"additional_special_tokens": ["[SEP]"]})
    found.chat_template = template
    return found


def words(*numbers: int) -> list[int]:
    return [word(k) for k in numbers]


def asked(*messages: tuple[str, str]) -> TextData:
    """A conversation that ends with a prompt and its answer."""
    *before, (_, prompt), (_, answer) = messages
    return TextData("instruction", (prompt,), responses=(answer,), history=(tuple(before),))


TALK = asked(("system", "w0"), ("user", "w1"), ("assistant", "w2 w2"), ("user", "w3 w4"), ("assistant", "w5"))
WHOLE = [
    *words(6, 0), SEP, *words(7, 1), SEP, *words(9, 2, 2), EOS, word(8), *words(7, 3, 4), SEP, *words(9, 5), EOS,
]  # fmt: skip


def test_the_last_answer_is_learned_with_its_end_and_nothing_else() -> None:
    """By hand: w5 [EOS], not the header w9, nor what follows the end (w8), nor the turns before. A prompt to answer
    ends with the header."""
    (example,) = encode(TALK, talking(PLAIN), max_length=64)
    assert example == {"input_ids": WHOLE, "labels": [*[IGNORED] * 16, word(5), EOS]}
    assert encode_prompts(TALK, talking(PLAIN), max_length=64) == [WHOLE[:16]]


def test_an_answer_ends_at_the_turns_end_and_at_the_tokenizers() -> None:
    ending = talking(PLAIN.replace("[EOS] w8", "[SEP] w8"))
    assert (find_template("chat", ending).ends, find_template(BARE, ending).ends) == ((SEP, EOS), (EOS,))


def test_a_long_prompt_loses_its_front_and_the_messages_before_stay() -> None:
    (example,) = encode(TALK, talking(PLAIN), max_length=17)
    assert example["input_ids"] == [*WHOLE[:12], *WHOLE[13:]] and example["cut"] == 1
    with pytest.raises(DataError, match=r"example 0: .* 14 tokens"):
        encode(TALK, talking(PLAIN), max_length=15)


def test_what_may_be_dropped_is_of_the_last_prompt() -> None:
    """By hand: w4 w5 of it, counted with the blanks before that the template's text begins with; the same words stand
    in the turn before, and stay."""
    before = (("user", "w3 w4 w5"), ("assistant", "w2"))
    data = TextData("instruction", ("  w3 w4 w5",), responses=("w5",), history=(before,), droppable=((5, 10),))
    (example,) = encode(data, talking(PLAIN), max_length=15)
    first = [*words(7, 3, 4, 5), SEP, *words(9, 2), EOS, word(8)]
    assert example["input_ids"] == [*first, *words(7, 3), SEP, *words(9, 5), EOS] and example["cut"] == 2


def test_a_token_over_the_edge_of_the_answer_is_cut_there() -> None:
    """Words are split at white space, so the header "w1" and the answer "2" would be the one word w12; in training they
    are two, as they are when the model answers: the prompt ends with w1, and "2" is no word."""
    talk, reader = asked(("user", "w3"), ("assistant", "2 w5")), talking(PLAIN.replace("w9 ", "w1"))
    (example,) = encode(talk, reader, max_length=64)
    assert example["input_ids"] == [*words(7, 3), SEP, word(1), UNK, word(5), EOS]
    assert example["labels"] == [*[IGNORED] * 4, UNK, word(5), EOS]


def test_a_date_is_the_same_every_day() -> None:
    """Llama 3 puts the day into its system message; two sites, and a run resumed tomorrow, must read the same."""
    dated = "{{ strftime_now('%d %b %Y') }}, {{ strftime_now(format='%A') }}, {{ date_string }}: " + PLAIN
    text = rendered(find_template(None, talking(dated)), (("user", "w1"),), ask=True)
    assert text == "26 Jul 2024, Friday, 26 Jul 2024: w7 w1 [SEP] w9 "


def test_what_is_no_template() -> None:
    for wrong in ("none", "Q: {prompt} {prompt}", "### {{prompt}}", PLAIN):
        with pytest.raises(ConfigError, match=r"\{prompt\} in it once"):
            check_template(wrong)


def test_a_template_that_cannot_be_learned_from() -> None:
    for template, said in (
        (None, r"no chat template.*data\.chat_template.*'\{prompt\}'"),
        (PLAIN.replace("'w7' }}", "'w7' if loop.last else 'w8' }}"), "first 4 of 5 messages"),
        (PLAIN.replace("{% if add_generation_prompt %}w9 {% endif %}", ""), "puts 'w9' before an answer"),
        ("{{ raise_exception('no system') if messages[0].role == 'system' }}" + PLAIN, "example 0: .* refuses .*no s"),
        (PLAIN.replace("[EOS] w8", "w8"), "no special token"),
    ):
        with pytest.raises((ConfigError, DataError), match=said):
            encode(TALK, talking(template), max_length=64)


# ---- each message's text occurs in its rendering, the answer's in the part that is learned ---------------------------

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THOUGHTS = "{% if m.role == 'assistant' and '<think>' not in m.content %}<think>\n\n</think>\n\n{% endif %}"
THINKING = CHATML.replace("{{ m.content", THOUGHTS + "{{ m.content")


def letters(template: str, *, special: tuple[str, ...] = (), plain: tuple[str, ...] = ()) -> Any:
    """A tokenizer whose tokens are bytes, so that each text comes back, with added tokens of both kinds."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: k for k, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in ("<|end|>", *special)])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in plain])
    found = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>", pad_token="<|end|>")
    found.chat_template = template
    return found


MARKS = ("<|im_start|>", "<|im_end|>")
CHAT = asked(("system", "Be brief."), ("user", "  Who wrote Emma?\n"), ("assistant", "Jane Austen,\nin 1815."))


def test_a_template_that_loses_an_answer_or_a_question_is_refused() -> None:
    """A typo renders as nothing, and only the end token would be learned."""
    for lost in ("assistant", "user"):
        text = CHATML.replace("m.content | trim", f"m.contents if m.role == '{lost}' else m.content")
        with pytest.raises(ConfigError, match=f"leaves out the {lost}'s text"):
            find_template("chat", letters(text, special=MARKS))


def test_a_system_message_that_the_template_loses_is_named_with_its_row(tmp_path: Path) -> None:
    reader = letters(CHATML.replace("for m in messages", "for m in messages if m.role != 'system'"), special=MARKS)
    file = tmp_path / "cork.jsonl"
    file.write_text(json.dumps({"messages": [{"role": r, "content": c} for r, c in CHAT.messages(0)]}) + "\n")
    said = rf"^{file}, row 1, line 1: .*\(chat, sha256 \w+\) .* the system's text, 'Be"
    with pytest.raises(DataError, match=said):
        encode(read_instructions(file), reader, max_length=512)


# As Mistral's: the system message stands in the last user's turn.
MOVED = """{% set s = messages[0].content if messages[0].role == 'system' else '' %}
{%- set last = messages | selectattr('role', 'equalto', 'user') | list | last %}
{%- for m in messages if m.role != 'system' %}<|im_start|>{{ m.role }}
{% if m == last %}{{ s }}
{% endif %}{{ m.content | trim }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@pytest.mark.parametrize("template", [CHATML, THINKING, MOVED], ids=["ChatML", "thoughts", "system moved"])
def test_a_template_that_keeps_all_texts_is_taken(template: str) -> None:
    """Trimmed texts, empty thoughts put before an answer, and a system message moved into the last user's turn."""
    reader = letters(template, special=MARKS, plain=("<think>", "</think>"))
    (example,) = encode(CHAT, reader, max_length=512)
    learned = reader.decode([label for label in example["labels"] if label != IGNORED])
    assert learned.endswith("Jane Austen,\nin 1815.<|im_end|>")
    whole = reader.decode(example["input_ids"])
    assert "Who wrote Emma?" in whole and "Be brief." in whole


# ---- borders of turns: special tokens and those that the template writes around turns --------------------------------

TAGS = ("<think>", "</think>", "<h1>", "</h1>", "<tool_call>")


def test_other_tokens_of_the_vocabulary_are_text() -> None:
    reader, text = letters(THINKING, special=MARKS, plain=TAGS), "<think>aloud</think> of <h1>, a <tool_call>"
    for talk in (asked(("user", text), ("assistant", "Yes.")), asked(("user", "Go on."), ("assistant", text))):
        (example,) = encode(talk, reader, max_length=512)
        assert text in reader.decode(example["input_ids"])
        assert example["labels"][-1] == reader.convert_tokens_to_ids("<|im_end|>")


@pytest.mark.parametrize(("special", "role", "text", "sign"), [
    (False, "user", "so <|im_end|> so", "<|im_end|>"), (True, "assistant", "Yes<|im_start|>user", "<|im_start|>"),
    (True, "assistant", "No<|end|>", "<|end|>"),
])  # fmt: skip
def test_a_border_in_a_text_is_refused_by_client_file_and_row(
    special: bool, role: str, text: str, sign: str, tmp_path: Path, load_language_model: Loader
) -> None:
    """It would open or end a turn: a forged one would be learned, or an answer cut. special: or the template alone
    writes it around turns. In data to train on, and in held-out ones of the client's own or of all clients."""
    model = load_language_model()
    model.tokenizer = letters(CHATML, special=MARKS if special else (), plain=() if special else MARKS)
    file = tmp_path / "berlin.jsonl"
    rows = [{"prompt": "Well?", "response": "Yes."}, {"prompt": "Well?", "response": "No."}]
    rows[1]["prompt" if role == "user" else "response"] = text
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    says = rf"^client 'berlin', {file}, row 2, line 2: the {role}'s text has '{sign.replace('|', '.')}' at"
    data = read_instructions(file)
    with pytest.raises(DataError, match=says):
        LocalTrainer(model, {"berlin": data}, TrainSettings(max_length=512), seed=0)
    with pytest.raises(DataError, match=says):
        ModelEvaluator(model, data.select([0]), [], own={"berlin": data}, max_length=512)
