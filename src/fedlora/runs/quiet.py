"""Quiet for the libraries that would talk into a progress bar."""

from __future__ import annotations

import warnings


def quiet_libraries() -> None:
    """transformers' own progress bars and reports would run through ours."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
