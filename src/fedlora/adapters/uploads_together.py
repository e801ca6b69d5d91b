"""Several PEFT directories as the uploads of one round."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from fedlora.adapters.agreement import same_weights
from fedlora.adapters.io import AdapterSpec, read_adapter
from fedlora.adapters.limits import Limits
from fedlora.adapters.reader import AdapterFile
from fedlora.adapters.uploads import FILE, read_facts
from fedlora.core.echo import quoted
from fedlora.core.messages import Client, Upload, checked_examples
from fedlora.errors import AdapterFormatError, repeated


def read_uploads(
    directories: Sequence[str | os.PathLike[str]], *, limits: Limits | None = None
) -> tuple[list[Upload], AdapterSpec]:
    """The adapters in PEFT directories as the uploads of one round, and the spec of the first.

    An adapter without upload.json is a client named by its path, with one example: all such count alike.

    Raises:
        AdapterFormatError: what cannot be read, fewer than two, or adapters of different base models: of other names,
            where not every upload.json has the same digests of the base model's weights.
    """
    if len(directories) < 2:
        raise AdapterFormatError(f"at least two adapters are needed; got {len(directories)}.")
    uploads, specs = [], []
    for directory in directories:
        adapter, spec = read_adapter(directory, limits=limits)
        client, examples = read_facts(Path(directory), limits)
        upload = Upload(Client(client, adapter.ranks), examples, adapter)
        checked_examples(upload)
        uploads.append(upload)
        specs.append(spec)
    bases = {str(directory): spec.base_model for directory, spec in zip(directories, specs, strict=True)}
    one_base = len(set(bases.values())) == 1 or same_weights([AdapterFile(Path(d), limits=limits) for d in directories])
    if not one_base:
        raise AdapterFormatError(
            f"the adapters are of different base models, so their updates do not add up: {quoted(bases, 1_000)}. Names "
            f"do not matter where every {FILE} has digests of the base model's weights, and all are equal."
        )
    names = [upload.client.id for upload in uploads]
    twice = repeated(names)
    if twice:
        raise AdapterFormatError(
            f"two of the adapters are of client {quoted(twice[0])}: give one for each client, of one round only."
        )
    return uploads, specs[0]
