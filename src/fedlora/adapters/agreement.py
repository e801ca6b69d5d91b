"""Whether the upload.json of several adapters tell of one base model, one order of classes and one round.

What they say is compared, and what one does not say is no contradiction: an adapter without upload.json says nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedlora.adapters.reader import AdapterFile
from fedlora.adapters.uploads import FILE, read_facts, read_round, read_upload
from fedlora.core.echo import quoted
from fedlora.errors import AdapterFormatError

_WEIGHTS = (".safetensors", ".gguf", ".bin")


@dataclass(frozen=True)
class Said:
    """What one adapter's upload.json says. client, round, labels, base: None where it says nothing."""

    directory: Path
    client: str | None = None
    examples: float | None = None
    round: int | None = None
    labels: tuple[str, ...] | None = None
    base: dict[str, str] | None = None
    template: str | None = None

    @classmethod
    def of(cls, file: AdapterFile) -> Said:
        """Raises `AdapterFormatError` for facts of another shape than an upload's."""
        where = file.directory
        facts = read_upload(where, file.limits)
        if facts is None:
            return cls(where)
        client, examples = read_facts(where, file.limits)
        labels = _checked(facts, where, "label_names", lambda v: isinstance(v, list) and _texts(v), "a list of texts")
        base = _checked(
            facts, where, "base_model_sha256", lambda v: isinstance(v, dict) and _texts(v.values()), "names and digests"
        )
        template = _checked(facts, where, "template", lambda v: isinstance(v, str), "a text")
        number = read_round(where, file.limits)
        return cls(where, client, examples, number, tuple(labels) if labels is not None else None, base, template)


def check_uploads(
    files: Sequence[AdapterFile], *, counted: bool, labels: bool = True, same_base: bool = False
) -> list[str]:
    """What to say of uploads that are merged.

    Args:
        counted: their examples are their weights. labels: their classes matter, since a trained head is taken.
        same_base: their base models are one, whatever the digests say.

    Raises:
        AdapterFormatError: contrary facts: other classes or another order of them, other digests of the base model's
            weights, or, where their examples count, two of one client.
    """
    said = [one for one in map(Said.of, files) if one.client is not None]
    notes = _of_labels(said, labels) + _of_bases(said, same_base) + _of_clients(said, counted)
    rounds = {_name(one): one.round for one in said if one.round is not None}
    if len(set(rounds.values())) > 1:
        notes.append(f"the uploads are of different rounds: {_listed(rounds)}")
    templates = {_name(one): one.template for one in said if one.template is not None}
    if len(set(templates.values())) > 1:
        notes.append(f"the uploads were trained with different templates: {_listed(templates)}")
    return notes


def base_weights(file: AdapterFile) -> dict[str, str]:
    """File of the base weights -> its SHA-256, as the adapter's upload.json has them; empty where it has none."""
    return _weights(Said.of(file))


def same_weights(files: Sequence[AdapterFile]) -> bool:
    """Whether every upload.json has digests of its base model's weights, and all of them the same."""
    found = [base_weights(file) for file in files]
    return bool(found) and bool(found[0]) and all(one == found[0] for one in found)


# -------------------------------------------------------------------------------------------------------- inside


def _weights(said: Said) -> dict[str, str]:
    return {name: digest for name, digest in (said.base or {}).items() if name.endswith(_WEIGHTS)}


def _of_labels(said: Sequence[Said], matter: bool) -> list[str]:
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
        f"Train with the same --labels at every site; --heads drop merges the rest."
    )


def _of_bases(said: Sequence[Said], same_base: bool) -> list[str]:
    known = [one for one in said if one.base]
    notes: list[str] = []
    for one in known[1:]:
        first, mine = known[0].base or {}, one.base or {}
        differ = sorted(name for name in first.keys() & mine.keys() if first[name] != mine[name])
        weights = [name for name in differ if name.endswith(_WEIGHTS)]
        both = f"{known[0].directory} and {one.directory}"
        if weights and not same_base:
            name = weights[0]
            raise AdapterFormatError(
                f"{both} were trained on different base models: the SHA-256 of {quoted(name, 80)} is "
                f"{quoted(first[name][:12])}... in one {FILE} and {quoted(mine[name][:12])}... in the other, so their "
                f"updates do not add up. --same-base merges them where the weights are the same all the same."
            )
        if weights or not any(name.endswith(_WEIGHTS) for name in first.keys() & mine.keys()):
            why = "digests differ" if weights else "weights lie in files of other names, so their digests say nothing"
            notes.append(f"the base models of {both} are taken for one: their {why}")
        elif differ:
            notes.append(f"the base models of {both} have the same weights, and other {', '.join(differ)}")
    return notes


def _of_clients(said: Sequence[Said], counted: bool) -> list[str]:
    """Two of one client, and those that count nothing."""
    notes = []
    by_client: dict[str, list[Said]] = {}
    for one in said:
        by_client.setdefault(one.client or "", []).append(one)
    for client, uploads in by_client.items():
        if len(uploads) > 1:
            both = f"{uploads[0].directory} and {uploads[1].directory} are both of client {quoted(client, 80)}"
            if counted:
                raise AdapterFormatError(f"{both}: its examples would count twice. Give one for each, or --weights.")
            notes.append(f"{both}: it counts {len(uploads)} times")
    return notes


def _name(one: Said) -> str:
    return one.client or str(one.directory)


def _listed(found: dict[str, Any]) -> str:
    told = ", ".join(f"{quoted(name, 80)} {quoted(value, 40)}" for name, value in list(found.items())[:4])
    return told + (", ..." if len(found) > 4 else "")


def _texts(values: Any) -> bool:
    return all(isinstance(value, str) for value in values)


def _checked(facts: dict[str, Any], where: Path, key: str, fits: Any, what: str) -> Any:
    found = facts.get(key)
    if found is not None and not fits(found):
        raise AdapterFormatError(f"{where / FILE}: {key} is {what}; got {quoted(found)}.")
    return found
