"""Silences libraries whose output would break a progress bar."""

from __future__ import annotations

import warnings


def quiet_libraries() -> None:
    """Turn off transformers' own progress bars and reports, which would run into ours."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
