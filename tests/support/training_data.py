"""Tiny models on disk as one downloads them, their tokenizer of whole words, and text for them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from fedlora.data import TextData
from fedlora.training.encode import cut_prompts
from support.tiny_models import VOCABULARY, bert

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[EOS]")
PAD, UNK, CLS, SEP, EOS = range(5)
WORDS = tuple(f"w{k}" for k in range(VOCABULARY - len(SPECIAL)))  # w0 is token 5, w1 token 6, ...
LABELS = ("blue", "green", "red")


def word(k: int) -> int:
    """The token id of `w{k}`."""
    return len(SPECIAL) + k


def tokenizer(*, classifies: bool) -> PreTrainedTokenizerFast:
    """Whole words, white space between them. For classifiers with [CLS] and [SEP] as BERT has them, and segments."""
    vocabulary = {token: k for k, token in enumerate((*SPECIAL, *WORDS))}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if not classifies:
        return PreTrainedTokenizerFast(
            tokenizer_object=backend, unk_token="[UNK]", pad_token="[PAD]", eos_token="[EOS]"
        )
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="[UNK]", pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )  # fmt: skip


def save_model(folder: Path, network: Any, *, classifies: bool) -> Path:
    """A directory such as one downloads: config.json, model.safetensors, tokenizer."""
    transformers_logging.disable_progress_bar()
    network.save_pretrained(folder)
    tokenizer(classifies=classifies).save_pretrained(folder)
    return folder


def save_encoder(folder: Path, layers: int = 1) -> Path:
    """BERT without a classifier, as pre-trained encoders come: its head is drawn when it is loaded."""
    return save_model(folder, bert(layers).bert, classifies=True)


def classification(count: int, seed: int, *, length: tuple[int, int] = (3, 8), skew: int | None = None) -> TextData:
    """Sentences of distinct words whose class is that of their first word (w0..w2: blue, w3..w5: green, w6..w8: red).

    skew: this class makes up three quarters.
    """
    draw = random.Random(seed)
    labels = [draw.randrange(3) if skew is None or draw.random() < 0.625 else skew for _ in range(count)]
    text = [
        " ".join([f"w{3 * y + draw.randrange(3)}", *draw.sample(WORDS[9:], draw.randint(*length) - 1)]) for y in labels
    ]
    return TextData("classification", tuple(text), labels=tuple(labels), label_names=LABELS)


def instructions(count: int, seed: int) -> TextData:
    """Prompts of 2 to 5 words, answered by 1 to 4 words."""
    draw = random.Random(seed)
    prompts = [" ".join(draw.sample(WORDS, draw.randint(2, 5))) for _ in range(count)]
    answers = [" ".join(draw.sample(WORDS, draw.randint(1, 4))) for _ in range(count)]
    return TextData("instruction", tuple(prompts), responses=tuple(answers))


def rows(data: TextData) -> str:
    labels = data.labels or ()
    pairs = zip(data.text, labels, strict=True)
    return "".join(json.dumps({"text": text, "label": data.label_names[y]}) + "\n" for text, y in pairs)


def csv_rows(data: TextData) -> str:
    pairs = zip(data.text, data.labels or (), strict=True)
    return "sentence,class\n" + "".join(f"{text},{data.label_names[y]}\n" for text, y in pairs)


def encode_prompts(data: TextData, reader: Any, *, max_length: int, template: str | None = None) -> list[list[int]]:
    """The token ids that a model is asked with, without how many were cut."""
    return [one["input_ids"] for one in cut_prompts(data, reader, max_length=max_length, template=template)]
