"""The facts that server and sites must share, and the messages for mismatches: with another base model, renamed classes
or another version, training would run without an error, but its result would be worthless.

The server's facts travel with every train message; a node compares them with its own before it trains, and sends its
own with every reply.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import field, replace
from typing import Annotated, Any

from packaging.version import Version
from pydantic import Field, StrictBool, StrictFloat, StrictInt, StrictStr, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from fedlora import __version__
from fedlora.core.read_only import ReadOnly
from fedlora.core.text import quoted, shown
from fedlora.errors import FedLoRAError
from fedlora.versions import installed

PROTOCOL = "fedlora/5"  # of the messages; both sides refuse another one by name

ASKED = ("base", "tokenizer", "labels", "scaling", "max_length")  # known to every site before it trains
_MUST_MEET = ("protocol", "fedlora")
_WATCHED = ("torch", "transformers", "peft")  # another major version is refused


Digest = Annotated[StrictStr, Field(pattern=r"^([0-9a-f]{64})?$")]  # a SHA-256, or "" for unknown
Words = Annotated[tuple[StrictStr, ...], Field(max_length=100_000)]
Plain = StrictStr | StrictBool | StrictInt | StrictFloat | None


class Disagreement(FedLoRAError, ValueError):
    """A site and its server differ in facts that they must share. The message names both sides."""


@dataclass(frozen=True)
class Facts:
    """One side's facts. Unknown ones are empty: "" or (), 0 for numbers.

    base, tokenizer, template: digests of the base model's weights, of its tokenizer's behaviour, and of its chat
    template if the federation uses that. labels: the classes in order. scaling: alpha / r, or its replacement.
    max_length: in tokens. targets: "module d_out x d_in" of all adapted modules. architecture: the numbers and words of
    the base model's configuration. versions: of the protocol and of the libraries.

    Example:
        >>> differences(Facts(labels=("no", "yes")), Facts(labels=("yes", "no")))[0].split(":")[0]
        "the server's classes are ['no', 'yes'], and this site has ['yes', 'no']"
    """

    base: Digest = ""
    tokenizer: Digest = ""
    template: Digest = ""
    labels: Words = ()
    scaling: Annotated[float, Field(ge=0, lt=1e12, strict=True)] = 0.0
    max_length: Annotated[StrictInt, Field(ge=0, lt=10**12)] = 0
    targets: Words = ()
    architecture: Annotated[Mapping[StrictStr, Plain], Field(max_length=1000)] = field(default_factory=dict)
    versions: Annotated[Mapping[StrictStr, StrictStr], Field(max_length=1000)] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "architecture", ReadOnly(self.architecture))
        object.__setattr__(self, "versions", ReadOnly(self.versions))

    def table(self) -> dict[str, Any]:
        """The facts as plain values, for TOML and JSON; unknown ones are left out."""
        found = {name: getattr(self, name) for name in type(self).__dataclass_fields__}
        found |= {"labels": list(self.labels), "targets": list(self.targets)}
        found |= {"architecture": dict(self.architecture), "versions": dict(self.versions)}
        return {name: value for name, value in found.items() if value}

    def text(self) -> str:
        """The facts as canonical JSON, for a message."""
        return json.dumps(self.table(), sort_keys=True)

    @classmethod
    def from_table(cls, table: Any) -> Facts:
        """Facts from plain values that the other side wrote. Ignores unknown fields. Raises `Disagreement` for anything
        of the wrong type."""
        return _read(TypeAdapter(cls).validate_python, table)

    @classmethod
    def from_text(cls, text: str) -> Facts:
        """Facts from a message; "" knows nothing. Raises `Disagreement`."""
        return _read(TypeAdapter(cls).validate_json, text) if text else cls()

    def filled(self, other: Facts) -> Facts:
        """These facts, with unknown ones taken from the other side. Versions stay as they are."""
        lacks = {name: getattr(other, name) for name in type(self).__dataclass_fields__ if not getattr(self, name)}
        lacks.pop("versions", None)
        return replace(self, **lacks)


def _read(reader: Callable[[Any], Facts], given: Any) -> Facts:
    try:
        return reader(given)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = "".join(f"{part} = " for part in first["loc"][:1])
        raise Disagreement(
            f"the other side's facts cannot be read: {shown(name, 40)}{quoted(first['input'], 60)}."
        ) from error


# -------------------------------------------------------------------------------------------------------- comparing


# The fact, its name, and what to do. All of it is compared in the same way.
_COMPARED = (
    ("base", "base model has the weights", "adapters of one base model mean nothing on another. Point `model` in "
     "site.toml at a copy of the server's files (another revision, precision or quantisation is another model)"),
    ("tokenizer", "tokenizer is", "the same text becomes other tokens. Copy tokenizer.json and tokenizer_config.json "
     "with the base model"),
    ("template", "chat template is", "prompts would stand in another frame. Copy it with the tokenizer, or let "
     "data.template name one"),
    ("labels", "classes are", "class k must be the k-th name everywhere. Names and order come from data.labels in the "
     "server's federation.toml"),
    ("scaling", "scaling is", "it comes from lora.scaling or lora.alpha in the server's federation.toml"),
    ("max_length", "max_length is", "it comes from data.max_length in the server's federation.toml"),
)  # fmt: skip


def differences(server: Facts, site: Facts, name: str = "this site", *, whole: bool = False) -> list[str]:
    """A sentence for each difference: both sides' facts, the likely cause, and what to do.

    Args:
        name: the site's name in sentences. whole: the site must know everything that the server knows, like a site that
            trains; otherwise facts that one side does not know are not compared.
    """
    said: list[str] = []
    if whole:
        silent = unsaid(site, [f for f in (*ASKED, "targets") if getattr(server, f)], server.versions)
        if silent:
            said.append(f"{name} does not say its {', '.join(silent)}, which the server's must be compared with")
    for what, called, todo in _COMPARED:
        ours, theirs = getattr(server, what), getattr(site, what)
        if ours and theirs and ours != theirs:
            said.append(f"the server's {called} {_said(ours)}, and {name} has {_said(theirs)}: {todo}")
    odd = [k for k in server.architecture if k in site.architecture and server.architecture[k] != site.architecture[k]]
    if odd:
        pairs = "; ".join(
            f"{shown(k, 40)} is {quoted(server.architecture[k], 40)} at the server and "
            f"{quoted(site.architecture[k], 40)} at {name}" for k in odd[:3]
        )  # fmt: skip
        said.append(
            f"the configurations of the base models differ in {len(odd)} keys: {pairs}; copy the server's config.json "
            f"with its weights"
        )
    here, there = {*server.targets}, {*site.targets}
    if here and there and here != there:
        ours, theirs = ([shown(t, 80) for t in sorted(one)[:2]] or "none" for one in (here - there, there - here))
        said.append(
            f"the server's adapters have {len(here)} modules and those of {name} have {len(there)}: only at the server "
            f"{ours}, only at the site {theirs}. Both use the server's lora.targets, so their base models have "
            f"different shapes, or the common start belongs to another model"
        )
    return said


def _said(value: str | float | tuple[str, ...]) -> str:
    """A fact in words: of a digest the beginning."""
    if isinstance(value, str):
        return f"{value[:12]}..."
    return f"{value:g}" if isinstance(value, int | float) else quoted(list(value))


def unsaid(site: Facts, needed: Sequence[str], versions: Collection[str] = _MUST_MEET) -> list[str]:
    """The needed facts that a side leaves out, and the needed versions, among those that must match."""
    versions = [f"version of {name}" for name in _MUST_MEET if name in versions and not site.versions.get(name)]
    return [*(name.replace("_", " ") for name in needed if not getattr(site, name)), *versions]


def versions_apart(server: Mapping[str, str], site: Mapping[str, str], name: str = "this site") -> list[str]:
    """Why two sets of versions do not work together, in sentences. The protocol and fedlora's major.minor must be
    equal; for torch, transformers and peft the major version.

    Example:
        >>> versions_apart({"fedlora": "0.1.0", "torch": "2.12.0"}, {"fedlora": "0.1.4", "torch": "2.13.1"})
        []
    """
    refused = []
    if (a := server.get("protocol")) and (b := site.get("protocol")) and a != b:
        refused.append(f"the server speaks {quoted(a, 30)} and {name} {quoted(b, 30)}: install one version of fedlora")
    for package in ("fedlora", *_WATCHED):
        a, b = server.get(package), site.get(package)
        parts = 2 if package == "fedlora" else 1
        if a and b and _number_of(a)[:parts] != _number_of(b)[:parts]:
            wanted = f"pip install '{package}=={'.'.join(map(str, _number_of(a)[:2]))}.*'"
            refused.append(
                f"{package} is {shown(a, 30)} at the server and {shown(b, 30)} at {name}, and these do not work "
                f"together: install the server's at {name} ({wanted})"
            )
    return refused


def _number_of(text: str) -> tuple[int, ...]:
    """ "2.13.0+cpu" as (2, 13, 0); () for what is no version."""
    try:
        return Version(text).release
    except ValueError:  # also for a number with too many digits for Python
        return ()


def versions_here() -> dict[str, str]:
    """The versions on this machine."""
    found = {name: installed(name) for name in _WATCHED}  # a torch built by hand has no version here
    return {"protocol": PROTOCOL, "fedlora": __version__} | {name: at for name, at in found.items() if at is not None}


def check(server: Facts, site: Facts, name: str = "this site", *, whole: bool = True) -> None:
    """Raises `Disagreement` if the two may not work together."""
    wrong = [
        *versions_apart(server.versions, site.versions, name),
        *differences(server, site, name, whole=whole),
    ]
    if wrong:
        raise Disagreement("; ".join(wrong) + ".")


__all__ = [
    "ASKED", "PROTOCOL", "Disagreement", "Facts", "check", "differences", "unsaid", "versions_apart",
    "versions_here",
]  # fmt: skip
