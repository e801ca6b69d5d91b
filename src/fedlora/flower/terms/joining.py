"""The two files that travel by hand when a site joins: join.toml to the site, request.toml back to the server.

join.toml       the server's address and certificate authority, the site's name and rank, and the agreed settings:
                everything with which a site checks itself before it sends anything. It holds no secret
request.toml    the site's public key, and the facts of its base model and versions; nothing about its data. The site
                signs it with its own key, so that an edited or forged file is detected

Both are text and may go by mail: changed line ends do not matter, changed values do.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from pydantic import Field

from fedlora.core.read_only import ReadOnly
from fedlora.core.text import quoted
from fedlora.errors import ConfigError
from fedlora.flower.terms import certificates
from fedlora.flower.terms.names import check_site, checked_rank
from fedlora.given_files import parse_toml, read_given
from fedlora.runs.reading import checked
from fedlora.training.settings import Section

JOIN, REQUEST = "fedlora-join/1", "fedlora-request/1"
_MOST = 2**20  # bytes of either file: a certificate and a page of settings are a hundredth of it


@dataclass(frozen=True)
class JoinFile:
    """The file that the server hands to one site.

    federation: its id. rank: the site's (the largest, if its modules differ). server, port: the address. ca: the
    authority's certificate, PEM. settings: the agreed ones, from `FederationSettings.travelling`. facts: the server's
    about the base model, and its versions.
    """

    federation: str
    site: str
    rank: int
    server: str
    port: int
    ca: str
    settings: str
    facts: Mapping[str, Any]

    @property
    def address(self) -> str:
        """In the form for `flower-supernode --superlink`."""
        return f"{self.server}:{self.port}"

    def text(self) -> str:
        """The file."""
        said: dict[str, Any] = {
            "format": JOIN, "federation": self.federation, "site": self.site, "rank": self.rank,
            "server": {"name": self.server, "port": self.port, "ca": self.ca},
            "agreed": _without_none(json.loads(self.settings)), "facts": _without_none(self.facts),
        }  # fmt: skip
        head = (
            f"# For the site {self.site!r}, from the server of {self.federation}. Not to be edited. At the site:\n"
            f"#   fedlora flower site FOLDER --join join.toml --data FILE --model DIRECTORY\n\n"
        )
        return head + tomli_w.dumps({**said, "check": _check(said)}, multiline_strings=True)

    @classmethod
    def read(cls, path: Path) -> JoinFile:
        """From a file.

        Raises:
            ConfigError: no such file, another kind of file, or one that was edited or cut short.
        """
        what = f"the join file {path}"
        raw = _read(path, what, JOIN, "the server makes join.toml (fedlora flower init writes join/NAME.toml)")
        check = raw.pop("check", None)
        if check != _check(raw):
            raise ConfigError(
                f"{what} was changed after the server wrote it, or cut short on its way: ask for a new copy. A site's "
                f"own settings belong into site.toml."
            )
        try:
            said = checked(_Join, raw)
            x509.load_pem_x509_certificates(said.server.ca.encode())
        except ValueError as error:
            raise ConfigError(
                f"{what} comes from another version of fedlora: {error}. Use the same version."
            ) from error
        check_site(said.site)
        checked_rank(said.rank, said.site)
        at, settings = said.server, json.dumps(said.agreed, sort_keys=True)
        return cls(said.federation, said.site, said.rank, at.name, at.port, at.ca, settings, ReadOnly(said.facts))


class _Address(Section):
    name: str = Field(pattern=r"^[a-z0-9][a-z0-9.-]{0,252}$")
    port: int = Field(ge=1, le=65535)
    ca: str


class _Join(Section):
    """The tables of a join file."""

    format: str
    federation: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    site: str
    rank: int
    server: _Address
    agreed: dict[str, Any]
    facts: dict[str, Any]


class Request(Section):
    """A site's request to be admitted. public_key: one line of OpenSSH. facts: nothing about its data. signature: of
    all of it, by that key."""

    federation: str
    site: str
    public_key: str
    signature: str
    facts: dict[str, Any]

    @classmethod
    def make(cls, join: JoinFile, private: bytes, facts: Mapping[str, Any]) -> Request:
        """A signed request. private: the site's key file, from `certificates.new_key`."""
        key = serialization.load_ssh_private_key(private, None)
        assert isinstance(key, ec.EllipticCurvePrivateKey), "a node's key is on an elliptic curve"
        form = (serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
        public = key.public_key().public_bytes(*form).decode()
        own: dict[str, Any] = _without_none(facts)
        said = _signed(join.federation, join.site, public, own)
        signature = base64.b64encode(key.sign(said, ec.ECDSA(hashes.SHA384()))).decode()
        return cls(federation=join.federation, site=join.site, public_key=public, signature=signature, facts=own)

    @property
    def fingerprint(self) -> str:
        """The fingerprint of its key, as `ssh-keygen -l` prints it."""
        return certificates.fingerprint(self.public_key)

    def text(self) -> str:
        """The file."""
        head = (
            f"# The site {self.site!r} asks to take part in {self.federation}. At the server:\n"
            f"#   fedlora flower admit FOLDER request.toml\n"
            f"# Key: {self.fingerprint} (compare it with the site's, by telephone)\n\n"
        )
        return head + tomli_w.dumps({"format": REQUEST, **self.model_dump()})

    @classmethod
    def read(cls, path: Path) -> Request:
        """Reads a file and checks its signature.

        Raises:
            ConfigError: no such file, another kind of file, a private key, or a file that was edited.
        """
        what = f"the request {path}"
        raw = _read(path, what, REQUEST, "the site makes request.toml (fedlora flower site)")
        try:
            found = checked(cls, {key: value for key, value in raw.items() if key != "format"})
        except ConfigError as error:
            raise ConfigError(f"{what}: {error}: {_ANEW}") from error
        key = certificates.public_key(found.public_key)
        check_site(found.site)
        try:
            said = _signed(found.federation, found.site, found.public_key, raw["facts"])
            key.verify(base64.b64decode(found.signature, validate=True), said, ec.ECDSA(hashes.SHA384()))
        except (InvalidSignature, ValueError, TypeError) as error:
            raise ConfigError(
                f"{what} was changed after the site signed it with the key {found.fingerprint}: {_ANEW}"
            ) from error
        return found


_ANEW = "ask the site for its request.toml again, as a file and not as copied text."


def _read(path: Path, what: str, form: str, where: str) -> dict[str, Any]:
    try:
        content = read_given(path, _MOST)
    except OSError as error:
        raise ConfigError(f"{what} cannot be read: {error.strerror}. {where[0].upper()}{where[1:]}.") from error
    if b"PRIVATE KEY" in content:
        raise ConfigError(
            f"{what} holds a private key, which must never leave its site. Delete this copy, and make a new pair of "
            f"keys at the site (fedlora flower site --rotate); {where}."
        )
    where = where[0].upper() + where[1:]
    try:
        raw = parse_toml(content.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n"))
        json.dumps(raw)  # TOML has dates and times, and nothing here is one
    except (ValueError, TypeError, RecursionError) as error:
        raise ConfigError(f"{what} cannot be read: {error}. {where}.") from error
    if (found := raw.get("format")) != form:
        raise ConfigError(f"{what} has format = {quoted(found, 40)}, and {form!r} is needed here. {where}.")
    return raw


def _signed(federation: str, site: str, public: str, facts: Mapping[str, Any]) -> bytes:
    said = {"federation": federation, "site": site, "public_key": public, "facts": dict(facts)}
    return json.dumps(said, sort_keys=True).encode()


def _check(said: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:16]


def _without_none(value: Any) -> Any:
    """The value without None, because TOML has no null. Sorted; tuples become lists, as after reading."""
    if isinstance(value, Mapping):
        return {str(key): _without_none(each) for key, each in sorted(value.items()) if each is not None}
    return [_without_none(each) for each in value] if isinstance(value, list | tuple) else value


__all__ = ["JoinFile", "Request"]
