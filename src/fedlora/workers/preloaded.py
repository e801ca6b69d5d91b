"""What worker processes find imported already: see `processes._context`. Imported for that alone."""

import contextlib

import torch  # noqa: F401

with contextlib.suppress(ImportError):  # the extra `train`
    import peft  # noqa: F401
    import transformers.modeling_utils  # noqa: F401
