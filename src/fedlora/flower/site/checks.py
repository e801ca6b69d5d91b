"""Checks of a site: its files, its data and its base model, read by the code of its rounds; its server and its clock.
For `fedlora flower site`, `fedlora flower node` and `fedlora doctor SITE`.
"""

from __future__ import annotations

import email.utils
import ssl
import time
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key

from fedlora.core.text import shown
from fedlora.errors import ConfigError, FedLoRAError
from fedlora.flower.places import SiteFolder
from fedlora.flower.site.trainer import keeping
from fedlora.flower.terms.facts import check, model_facts
from fedlora.flower.terms.joining import JoinFile
from fedlora.flower.terms.privacy import promise
from fedlora.flower.terms.settings import FederationSettings
from fedlora.flower.terms.site_file import Site

Row = tuple[str, str, bool | None]  # (check, finding, whether it is sound); None: not yet, by nobody's fault


def is_site(folder: Path) -> bool:
    """Whether this is a site's folder, and not a federation's at its server."""
    return SiteFolder(folder).site.is_file() or SiteFolder(folder).key.is_file()


def checked_site(folder: Path, *, server: bool = True) -> list[Row]:
    """All checks of a site's folder; those of its server, if asked for."""
    here = SiteFolder(folder.resolve())
    try:
        join, site = JoinFile.read(here.join), Site.read(here.site)
    except FedLoRAError as error:
        return [("site", str(error), False)]
    rows: list[Row] = [("site", f"{site.name}, of {join.federation} at {join.address}", True)]
    rows += checked_work(join, site)
    try:
        if server:
            found = look(join, here)
            rows.append(("server", found.why, None if found.fate == "not admitted" else found.fate == "admitted"))
    except FedLoRAError as error:
        rows.append(("key", str(error), False))
    return rows


def checked_work(join: JoinFile, site: Site) -> list[Row]:
    """Check the site's data and base model: whether a round could use them."""
    try:
        settings = join.settings()
        rows = _data(settings, site)
    except FedLoRAError as error:
        return [("data", str(error), False)]
    if settings.privacy is not None:  # the server guarantees it; a site sets nothing
        rows.append(("privacy", promise(settings.privacy, settings.run.rounds), True))
    try:
        facts = model_facts(site.model, settings, site.own["model"].get("revision"))
        check(join.facts, facts, f"site {site.name!r}")
    except FedLoRAError as error:
        return [*rows, ("base model", str(error), False)]
    return [*rows, ("base model", f"{site.model}: {facts['base'][:12]}, as the server's", True)]


def _data(settings: FederationSettings, site: Site) -> list[Row]:
    """Raises `FedLoRAError` for data that no round could use."""
    from fedlora.runs.client_data import deal

    dealt = deal(settings.for_site(site), None, keep=keeping(settings))
    train, held = dealt.parts[site.name], ""
    for words, parts in (("to validate", dealt.own_validation), ("to test", dealt.own_test)):
        held += f", {len(parts[site.name])} {words}" if site.name in parts else ""
    rows: list[Row] = [("data", f"{site.data}: {len(train)} examples to train on{held}", True)]
    if train.labels is not None:
        counts = Counter(train.labels)
        named = ", ".join(f"{name} {counts[k]}" for k, name in enumerate(train.label_names))
        none = [name for k, name in enumerate(train.label_names) if not counts[k]]
        note = f"; no examples of {', '.join(none)} here: the model learns this from other sites" if none else ""
        rows.append(("classes", named + note, True))
    return rows


def private_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """A site's own key. Raises `ConfigError` if the file does not hold one."""
    try:
        found = load_ssh_private_key(path.read_bytes(), None)
        if not isinstance(found, ec.EllipticCurvePrivateKey):
            raise ValueError("it is of another kind")
        return found
    except Exception as error:
        raise ConfigError(f"the key {path} cannot be read: {error}.") from error


# ---------------------------------------------------------------------------------------------------------- the server


@dataclass(frozen=True)
class Found:
    """Whether the server would let this site in. fate: "admitted", or one word for the obstacle. why: a sentence."""

    fate: str
    why: str


def look(server: JoinFile, here: SiteFolder) -> Found:
    """Ask the server, as the site's join file names it, whether it would let this site in.

    The request is to go online with a heartbeat interval of 0, which every SuperLink refuses: the answer says whether
    the key is registered and whether the clocks agree, and nothing changes. If the request fails, the system's or
    OpenSSL's own error says at which step.
    """
    import httpx
    from flwr.proto.fleet_pb2 import ActivateNodeRequest
    from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes
    from flwr.supernode.fleet_http_client import FleetHttpClient
    from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

    secret, asked_at = private_key(here.key), time.time()
    known: list[Any] = [
        RuntimeVersionHttpInterceptor(component_name="SuperNode"),
        NodeAuthHttpInterceptor(secret, secret.public_key()),
    ]
    try:
        authority = server.server.ca.encode()
        with FleetHttpClient.from_server_address(server.address, False, authority, interceptors=known) as client:
            request = ActivateNodeRequest(public_key=public_key_to_bytes(secret.public_key()), heartbeat_interval=0.0)
            client.ActivateNode(request)
    except httpx.HTTPStatusError as error:
        ahead = _ahead(error.response.headers.get("date"), (asked_at + time.time()) / 2)
        return _explained(server, error.response, ahead)
    except (httpx.HTTPError, httpx.InvalidURL, ssl.SSLError, OSError) as error:
        return _unreached(server, error)
    except (RuntimeError, ValueError):  # an answer of 200 that is not Flower's
        pass
    return Found("refused", f"{server.address} answers, but not as Flower does.")


def _unreached(server: JoinFile, error: BaseException) -> Found:
    """Why the request did not get through, in the words of the system or of OpenSSL."""
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    if isinstance(error, ssl.SSLCertVerificationError):
        return Found("certificate", (
            f"the certificate of {server.address} is not trusted: {shown(error.verify_message)}. By this machine's "
            f"clock it is {datetime.now(UTC):%Y-%m-%d %H:%M} UTC: if that is wrong, timedatectl set-ntp true. If it "
            f"has expired, the server must renew it; if name or authority differ, ask for its new join.toml."
        ))  # fmt: skip
    reason = shown(getattr(error, "strerror", None) or str(error) or type(error).__name__)
    return Found("silent", f"{server.address} cannot be reached from here: {reason}.")


def _explained(server: JoinFile, reply: Any, ahead: float) -> Found:
    """The meaning of the server's answer. ahead: of this machine's clock, in seconds."""
    from flwr.common.constant import SYSTEM_TIME_TOLERANCE, TIMESTAMP_TOLERANCE

    at, status = server.address, reply.status_code
    try:
        code = int(reply.json()["code"])  # Flower's own
    except (ValueError, KeyError, TypeError):
        code = 0
    most = SYSTEM_TIME_TOLERANCE - 1  # the measurement is accurate to a second
    if code == 2003:  # the interval of 0 is refused, as it should be
        return Found("admitted", f"{at} answers and knows this site's key.")
    if not 1 - TIMESTAMP_TOLERANCE - most < ahead < most:
        return Found("clock", f"this machine's clock is {ahead:+.0f} seconds from the server's, and the server refuses "
                              f"what is signed at another time. Set it: timedatectl set-ntp true.")  # fmt: skip
    if code == 2004:
        return Found("not admitted", (
            f"{at} answers, but this site's key is not registered there. Send key.pub to the server; this continues by "
            f"itself after `fedlora flower admit` there."
        ))  # fmt: skip
    if status in (502, 504):
        return Found("no federation", f"{at} answers, but no SuperLink stands behind it ({status}): `fedlora flower "
                                      f"serve` is not running there, or has played all rounds.")  # fmt: skip
    return Found("refused", f"{at} answers with status {status}: {shown(reply.text, 200)}")


def _ahead(date: str | None, asked: float) -> float:
    """The seconds by which the middle of the request is ahead of the server's time, which is in whole seconds; 0 if it
    does not say its time."""
    try:
        return asked - (email.utils.parsedate_to_datetime(date or "").timestamp() + 0.5)
    except ValueError:
        return 0.0
