"""The two files that travel by hand when a site joins: join.toml to every site, a public key back from each.

join.toml holds the server's address and certificate authority, and the agreed settings and facts: everything by which a
site checks itself and trains. Messages only name its digest, so other settings need a new file at each site. It holds
no secret, but whoever can change it on its way names the server that a site believes: send it by a way that you trust.
A site answers with the one line of its key.pub; whoever can change that is admitted in its place, so both sides compare
`ssh-keygen -l -f key.pub` by telephone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w
from cryptography import x509
from pydantic import Field

from fedlora.errors import ConfigError
from fedlora.flower.terms import certificates
from fedlora.flower.terms.settings import FederationId, FederationSettings
from fedlora.given_files import parse_toml, read_given
from fedlora.runs.reading import checked, flat
from fedlora.training.settings import Section

_MOST = 2**20  # bytes: a certificate and a page of settings are a hundredth of it


class Address(Section):
    """Where sites connect. ca: the authority's certificate, PEM."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9.-]{0,252}$")
    port: int = Field(ge=1, le=65535)
    ca: str


class JoinFile(Section):
    """What the server hands to the sites.

    federation: its id. agreed: the settings that sites share. facts: the server's about the base model, its versions.
    """

    federation: FederationId
    server: Address
    agreed: dict[str, Any]
    facts: dict[str, str]

    @property
    def address(self) -> str:
        """In the form for `flower-supernode --superlink`."""
        return f"{self.server.name}:{self.server.port}"

    def settings(self) -> FederationSettings:
        """The agreed ones. Raises `ConfigError`."""
        try:
            return checked(FederationSettings, self.agreed)
        except ConfigError as error:
            raise ConfigError(
                f"the settings in join.toml cannot be read here: {error}. Does the server run another version of "
                f"fedlora? (fedlora doctor lists the versions)"
            ) from error

    def terms(self) -> str:
        """A digest of what is agreed and known, which each of the server's messages names. run.rounds counts only where
        it may not change."""
        free = self.settings().may_change
        fixed = {key: value for key, value in flat(self.agreed).items() if key not in free}
        return hashlib.sha256(json.dumps([fixed, self.facts], sort_keys=True).encode()).hexdigest()

    def text(self) -> str:
        """The file."""
        head = (
            f"# From the server of {self.federation}, for its sites. Not to be edited. At a site:\n"
            f"#   fedlora flower site FOLDER --name NAME --join join.toml --data FILE --model DIRECTORY\n\n"
        )
        return head + tomli_w.dumps(_without_none(self.model_dump(mode="json")), multiline_strings=True)

    @classmethod
    def read(cls, path: Path) -> JoinFile:
        """From a file. Raises `ConfigError`: no such file, or another kind of file."""
        where = "The server makes it (fedlora flower init writes FED/join.toml)"
        try:
            found = checked(cls, parse_toml(_text(path)))
            x509.load_pem_x509_certificates(found.server.ca.encode())
            return found
        except OSError as error:
            raise ConfigError(f"the join file {path} cannot be read: {error.strerror}. {where}.") from error
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{path} is not the join file of this version of fedlora: {error}. {where}.") from error


def site_key(path: Path) -> str:
    """A site's public key, one line of OpenSSH, from the file that it sent.

    Raises:
        ConfigError: no such file, a private key, or a key of a kind that Flower does not accept.
    """
    try:
        text = _text(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the key {path} cannot be read: {error}.") from error
    certificates.public_key(text)
    return " ".join(text.split()[:2])


def _text(path: Path) -> str:
    return read_given(path, _MOST).decode("utf-8-sig").replace("\r\n", "\n")


def _without_none(value: Any) -> Any:
    """The value without None, because TOML has no null; a missing key has its default, which is None."""
    if isinstance(value, Mapping):
        return {str(key): _without_none(each) for key, each in value.items() if each is not None}
    return [_without_none(each) for each in value] if isinstance(value, list) else value
