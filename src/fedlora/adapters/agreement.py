"""Checks that several adapters' upload.json files agree on the class order, the clients and the round.

Only stated facts are compared: a missing fact, or a missing upload.json, contradicts nothing.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from fedlora.adapters import allocation
from fedlora.adapters.io import AdapterSpec, read_adapter
from fedlora.adapters.limits import Limits
from fedlora.adapters.reader import AdapterFile
from fedlora.adapters.uploads import FILE, Facts, read_facts
from fedlora.core.messages import Client, Upload, checked_examples
from fedlora.core.text import quoted
from fedlora.errors import AdapterFormatError, repeated


def check_uploads(files: Sequence[AdapterFile], *, counted: bool, labels: bool = True) -> list[str]:
    """Notes for the user about uploads that are merged.

    Args:
        counted: their examples are their weights. labels: classes matter, because trained heads are merged.

    Raises:
        AdapterFormatError: facts conflict: different classes or class order, or, where examples count, two uploads from
            one client.
    """
    said = [facts for file in files if (facts := read_facts(file.directory, file.limits)).there]
    notes = _of_labels(said, labels) + _of_clients(said, counted)
    rounds = {one.client: one.round for one in said if one.round is not None}
    if len(set(rounds.values())) > 1:
        told = ", ".join(f"{quoted(name, 80)} {number}" for name, number in list(rounds.items())[:4])
        notes.append(f"the uploads belong to different rounds: {told}{', ...' if len(rounds) > 4 else ''}")
    return notes


def read_uploads(
    directories: Sequence[str | os.PathLike[str]], *, limits: Limits | None = None
) -> tuple[list[Upload], AdapterSpec]:
    """The adapters in PEFT directories as one round's uploads, and the first one's spec.

    An adapter without upload.json is a client named by its path, with one example, so all of these count alike.

    Raises:
        AdapterFormatError: a directory cannot be read, there are fewer than two, the work exceeds `limits.work`, or the
            base models have different names.
    """
    if len(directories) < 2:
        raise AdapterFormatError(f"give at least two adapters; got {len(directories)}.")
    files = [AdapterFile(directory, limits=limits) for directory in directories]
    held: dict[str, list[allocation.Pair]] = {}
    for file in files:
        for path in file.layouts:
            held.setdefault(path, []).append(file.pair(path))
    allocation.check_work(held.values(), files[0].limits)
    uploads, specs = [], []
    for directory in directories:
        adapter, spec = read_adapter(directory, limits=limits)
        facts = read_facts(Path(directory), limits)
        upload = Upload(Client(facts.client, adapter.ranks), facts.examples, adapter)
        checked_examples(upload)
        uploads.append(upload)
        specs.append(spec)
    bases = {str(directory): spec.base_model for directory, spec in zip(directories, specs, strict=True)}
    if len(set(bases.values())) > 1:
        raise AdapterFormatError(
            f"the adapters have different base models, so their updates do not add up: {quoted(bases, 1_000)}."
        )
    twice = repeated(upload.client.id for upload in uploads)
    if twice:
        raise AdapterFormatError(
            f"two of the adapters belong to client {quoted(twice[0])}: give one per client, all of one round."
        )
    return uploads, specs[0]


# -------------------------------------------------------------------------------------------------------------- inside


def _of_labels(said: Sequence[Facts], matter: bool) -> list[str]:
    known = [one for one in said if one.labels is not None]
    other = next((one for one in known if one.labels != known[0].labels), None)
    if other is None:
        return []
    first = known[0]
    mine, theirs = (quoted(list(one.labels or ())) for one in (first, other))
    both = f"{first.directory} has {mine} and {other.directory} {theirs}"
    if not matter:
        return [f"the uploads' classes differ ({both}); their heads are left out"]
    raise AdapterFormatError(
        f"the uploads number their classes differently, so a mean would mix them: label_names of {both} in {FILE}. "
        f"Train with the same classes at every site; --heads drop merges the rest."
    )


def _of_clients(said: Sequence[Facts], counted: bool) -> list[str]:
    """Notes on several uploads from one client; raises if their examples count."""
    notes = []
    by_client: dict[str, list[Facts]] = {}
    for one in said:
        by_client.setdefault(one.client, []).append(one)
    for client, uploads in by_client.items():
        if len(uploads) > 1:
            both = f"{uploads[0].directory} and {uploads[1].directory} both belong to client {quoted(client, 80)}"
            if counted:
                raise AdapterFormatError(f"{both}: its examples would count twice. Give one per client, or --weights.")
            notes.append(f"{both}: it counts {len(uploads)} times")
    return notes
