"""Text as token ids: segments, cuts, padding, and which tokens the loss is on. Kind of evidence: oracle (by hand)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from fedlora.data import TextData, read_instructions
from fedlora.errors import ConfigError, DataError
from fedlora.training.encode import IGNORED, Cut, collate, cut_of, encode
from support.local_training import Loader
from support.training_data import CLS, EOS, LABELS, SEP, encode_prompts, tokenizer, word


def test_a_model_sees_a_pair_as_transformers_would_show_it(load: Loader, classifier: Path) -> None:
    """Oracle: tokenizer and model called directly. BERT tells the two sentences apart by their segment ids."""
    data = TextData("classification", ("w0 w1", "w5"), pair=("w2", "w1 w2 w3"), labels=(0, 1), label_names=LABELS)
    tok = AutoTokenizer.from_pretrained(classifier)
    inputs = tok(list(data.text), list(data.pair or ()), padding=True, return_tensors="pt")
    network = load().network.eval()
    ours = collate(encode(data, tok, max_length=16), tok, torch.device("cpu"))
    with torch.no_grad():
        torch.testing.assert_close(network(**ours).logits, network(**inputs).logits)


def test_a_length_that_special_tokens_fill_is_refused() -> None:
    """Below it transformers cuts nothing at all, or all of a text; at it a token of each text is left."""
    data = TextData("classification", ("w0 w1 w2",), pair=("w3 w4",), labels=(0,), label_names=("no", "yes"))
    with pytest.raises(ConfigError, match=r"max_length = 4 .* 3 special tokens.* 5 or more"):
        encode(data, tokenizer(classifies=True), max_length=4)
    (example,) = encode(data, tokenizer(classifies=True), max_length=5)
    assert example["input_ids"] == [CLS, word(0), SEP, word(3), SEP] and example["cut"] == 3


@pytest.mark.parametrize("max_length", [4, 5, 7])
def test_a_long_prompt_is_cut_from_its_front_and_the_response_never(max_length: int) -> None:
    data = TextData("instruction", ("w0 w1 w2",), responses=("w3 w4",))
    (example,) = encode(data, tokenizer(classifies=False), max_length=max_length, template="{prompt}")
    room = min(3, max_length - 3)
    prompt = [word(0), word(1), word(2)][3 - room :]
    assert example["input_ids"] == [*prompt, word(3), word(4), EOS]
    assert example["labels"] == [*[IGNORED] * room, word(3), word(4), EOS]


def test_what_may_be_dropped_goes_before_the_front() -> None:
    """droppable: the characters of w1 w2 of the prompt, from their end; then the front. SuperNI's prompts end in
    "### Response:", which a cut at the end would lose."""
    data = TextData("instruction", ("w0 w1 w2 w3",), responses=("w5",), droppable=((3, 8),))
    for room, left in ((4, (0, 1, 2, 3)), (3, (0, 1, 3)), (2, (0, 3)), (1, (3,))):
        (example,) = encode(data, tokenizer(classifies=False), max_length=room + 4, template="w7 {prompt} w9 ")
        assert example["input_ids"] == [word(7), *map(word, left), word(9), word(5), EOS]
        assert example.get("cut", 0) == 4 - room


def test_a_response_that_fills_the_length_keeps_half_of_it_and_is_counted() -> None:
    """By hand: six words and an end token within 7 keep 3 words, no end token, and leave 4 to the prompt of 5."""
    long = TextData("instruction", ("w0 w1 w2 w3 w4", "w0"), responses=("w5 w6 w7 w8 w9 w5", "w1"))
    cut, whole = encode(long, tokenizer(classifies=False), max_length=7, template="{prompt}")
    assert cut["input_ids"] == [*map(word, (1, 2, 3, 4)), *map(word, (5, 6, 7))]
    assert cut["labels"] == [*[IGNORED] * 4, *map(word, (5, 6, 7))] and cut["cut"] == 1 + 4
    assert whole["input_ids"][-1] == EOS and "cut" not in whole
    assert cut_of([cut, whole]) == Cut(2, 1, 5, 1)


def test_what_cannot_be_encoded_is_named_by_file_and_row(tmp_path: Path) -> None:
    """The place stays with an example through splits and joins; without a file it is its number."""
    rows = [{"prompt": f"w{k}", "response": "w1"} for k in range(4)]
    file = tmp_path / "acme.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = TextData.concat([read_instructions(file).select([3, 2]), read_instructions(file).select([0])])
    with pytest.raises(DataError, match=rf"^{file}, row 4, line 4: .* 5 tokens"):
        encode(data, tokenizer(classifies=False), max_length=6, template="w7 w8 w9 {prompt} w9 w8")
    by_hand = TextData("instruction", ("w0",), responses=("w1",), history=((("system", "w3"),),))
    with pytest.raises(DataError, match=r"^example 0: .* only a chat template"):
        encode(by_hand, tokenizer(classifies=False), max_length=6, template="{prompt}")


def test_what_begins_every_text_is_never_cut() -> None:
    """By hand: of its four tokens and an end within four, the prompt's front goes, not the token of no characters."""
    beginning = tokenizer(classifies=False)
    beginning._tokenizer.post_processor = TemplateProcessing(single="[EOS] $A", special_tokens=[("[EOS]", EOS)])
    data = TextData("instruction", ("w3 w4",), responses=("w5",))
    (example,) = encode(data, beginning, max_length=4, template="{prompt}")
    assert example["input_ids"] == [EOS, word(4), word(5), EOS] and example["cut"] == 1


def test_a_tokenizer_that_ends_every_text_does_not_end_the_prompt() -> None:
    """The answer stands right behind it: an end token in between would be read as the end."""
    ending = tokenizer(classifies=False)
    ending._tokenizer.post_processor = TemplateProcessing(single="$A [EOS]", special_tokens=[("[EOS]", EOS)])
    assert ending("w3")["input_ids"] == [word(3), EOS]
    data = TextData("instruction", ("w3 w4",), responses=("w5",))
    (example,) = encode(data, ending, max_length=64, template="w7 {prompt} w8")
    assert example["input_ids"] == [*map(word, (7, 3, 4, 8, 5)), EOS]
    assert encode_prompts(data, ending, max_length=64, template="w7 {prompt} w8") == [[*map(word, (7, 3, 4, 8))]]


def test_a_tokenizer_without_padding_pads_with_its_end_token_and_still_learns_to_end(
    load: Loader, language_model: Path, tmp_path: Path
) -> None:
    """GPT-2's case: the end of a response keeps its label, padding has none."""
    folder = tmp_path / "no-pad"
    shutil.copytree(language_model, folder)
    tok = tokenizer(classifies=False)
    tok.pad_token = None
    tok.save_pretrained(folder)
    model = load(folder, task="causal-lm", labels=(), lora={"target_modules": ["q_proj"]})
    assert model.tokenizer.pad_token_id == EOS
    data = TextData("instruction", ("w0", "w1 w2"), responses=("w3", "w4 w5"))
    batch = collate(encode(data, model.tokenizer, max_length=16, template="{prompt}"), model.tokenizer, model.device)
    assert batch["input_ids"].tolist() == [
        [word(0), word(3), EOS, EOS, EOS],
        [word(1), word(2), word(4), word(5), EOS],
    ]
    assert batch["labels"].tolist()[0] == [IGNORED, word(3), EOS, IGNORED, IGNORED]
    assert batch["attention_mask"].tolist()[0] == [1, 1, 1, 0, 0]
