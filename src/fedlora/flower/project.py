"""`fedlora flower init`: everything that a federation on Flower needs besides its data, in one folder.

run.toml policy.toml start/      what server and nodes share, and who may take part
app/                             a thin Flower app (two shims; fedlora itself is installed, not shipped)
flwr/config.toml                 connections for $FLWR_HOME
certs/ keys/                     TLS for loopback and one key a node, for a trial: real ones come from your own CA
systemd/ env.sh                  units and switches for machines that stay
"""

from __future__ import annotations

import datetime
import ipaddress
import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

import tomli_w
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedlora.adapters.io import write_adapter
from fedlora.errors import ConfigError
from fedlora.runs.config import RunConfig
from fedlora.runs.preparation import Prepared

CONNECTION = "fedlora"
SWITCHES = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}
_APP = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "fedlora-app"
version = "1.0.0"
description = "Federated LoRA by fedlora"
license = { file = "LICENSE" }
dependencies = ["flwr>=1.41.0"]

[tool.hatch.build.targets.wheel]
packages = ["."]

[tool.flwr.app]
publisher = "fedlora"
fab-format-version = 1
flwr-version-target = "1.41.0"

[tool.flwr.app.components]
serverapp = "fedlora_app.server_app:app"
clientapp = "fedlora_app.client_app:app"

[tool.flwr.app.config]
folder = "{folder}"
resume = false
evaluate = false
"""
_SHIM = '''\
"""{what}. All of it is in fedlora.flower.apps."""

from fedlora.flower.apps import {name} as app

__all__ = ["app"]
'''
_UNIT = """\
[Unit]
Description={what}
After=network-online.target

[Service]
EnvironmentFile={folder}/env
ExecStart={command}
Restart=always
# A SuperNode leaves with code 0 when the SuperLink forgets it, and orphans would keep their accelerator.
RestartSec=5
KillMode=control-group

[Install]
WantedBy=multi-user.target
"""


_OTHER_ROUNDS = ("server.sketch_rank", "server.gauge_stress", "evaluate.patience")  # the rounds would be others
_MORE_SEEN = ("evaluate.every", "evaluate.clients_at_end", "run.keep_uploads", "run.readouts", "run.track")


def not_looked_at(config: RunConfig) -> list[str]:
    """The keys that are set, that `fedlora run` measures or stores something by, and that the Flower app ignores.

    Raises:
        ConfigError: a key that would make other rounds than the Flower app plays.
    """
    for key in _set_of(config, _OTHER_ROUNDS):
        raise ConfigError(
            f"{key} is for runs on one machine (fedlora run), and the Flower app would play the rounds without it. "
            f"Leave it out."
        )
    return _set_of(config, _MORE_SEEN)


def _set_of(config: RunConfig, keys: Sequence[str]) -> list[str]:
    """Those keys that are not at their defaults."""
    found = []
    for key in keys:
        section, name = getattr(config, key.split(".")[0]), key.split(".")[1]
        default = type(section).model_fields[name].get_default(call_default_factory=True)
        found += [key] if getattr(section, name) != default else []
    return found


def write_project(folder: Path, prepared: Prepared, *, port: int, insecure: bool) -> None:
    """The folder of a federation from a prepared run.

    Raises:
        ConfigError: the folder is not empty, or cannot be written.
    """
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty; name another folder.")
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        home = folder.resolve()
        (folder / "run.toml").write_text(_as_toml(prepared.config), encoding="utf-8")
        clients = {c.id: c.rank if isinstance(c.rank, int) else dict(c.rank) for c in prepared.clients}
        (folder / "policy.toml").write_text(_policy(clients), encoding="utf-8")
        write_adapter(folder / "start", prepared.seed_adapter, prepared.spec)
        _write_app(folder / "app", home)
        names = list(clients)
        if not insecure:
            write_certificates(folder / "certs")
            write_keys(folder / "keys", names)
        _write_connection(folder / "flwr", home, port, insecure)
        env = "".join(f"{key}={value}\n" for key, value in {**SWITCHES, "FLWR_HOME": f"{home}/flwr"}.items())
        (folder / "env").write_text(env)
        _write_units(folder / "systemd", home, names, port, insecure)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error.strerror or error}.") from error


def connection(folder: Path) -> tuple[str, bool]:
    """(the SuperLink's address, whether without TLS) of a federation's folder. Raises `ConfigError`."""
    try:
        link = tomllib.loads((folder / "flwr" / "config.toml").read_text(encoding="utf-8"))["superlink"][CONNECTION]
        return str(link["address"]), bool(link.get("insecure"))
    except (OSError, KeyError, TypeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{folder} is no complete folder of `fedlora flower init`: {error}.") from error


def superlink_command(home: Path, port: int, *, insecure: bool) -> list[str]:
    """What starts the SuperLink of a federation's folder, on loopback."""
    command = ["flower-superlink", "--host", "127.0.0.1", "--port", str(port), "--database", f"{home}/superlink.db"]
    command += ["--disable-runtime-dependency-installation"]
    if insecure:
        return [*command, "--insecure"]
    certs = home / "certs"
    return [
        *command, "--ssl-ca-certfile", f"{certs}/ca.crt", "--ssl-certfile", f"{certs}/server.crt",
        "--ssl-keyfile", f"{certs}/server.key", "--enable-supernode-auth",
    ]  # fmt: skip


def supernode_command(home: Path, name: str, address: str, port: int, *, insecure: bool) -> list[str]:
    """What starts one node of it. `port`: of the node's own API, another one for each node of a machine."""
    said = {"client": name, "config": f"{home}/run.toml", "folder": f"{home}/nodes/{name}"}
    config = " ".join(f'{key}="{value}"' for key, value in said.items())
    command = ["flower-supernode", "--superlink", address, "--port", str(port), "--node-config", config]
    if insecure:
        return [*command, "--insecure"]
    return [
        *command, "--root-certificates", f"{home}/certs/ca.crt", "--auth-supernode-private-key", f"{home}/keys/{name}",
    ]  # fmt: skip


def write_certificates(folder: Path, hosts: Sequence[str] = ("localhost", "127.0.0.1"), days: int = 90) -> None:
    """A certificate authority and a server certificate for `hosts`: ca.crt, server.crt, server.key. For trials."""
    folder.mkdir(mode=0o700)
    now = datetime.datetime.now(datetime.UTC)
    until = now + datetime.timedelta(days=days)
    ca_key, key = ec.generate_private_key(ec.SECP384R1()), ec.generate_private_key(ec.SECP384R1())
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fedlora trial CA")])
    begun = now - datetime.timedelta(minutes=5)
    ca = (
        x509.CertificateBuilder().subject_name(issuer).issuer_name(issuer).public_key(ca_key.public_key())
        .serial_number(x509.random_serial_number()).not_valid_before(begun).not_valid_after(until)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(ca_key.public_key()), critical=False)
        .add_extension(_usage(ca=True), critical=True).sign(ca_key, hashes.SHA384())
    )  # fmt: skip
    server = (
        x509.CertificateBuilder().subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, hosts[0])]))
        .issuer_name(issuer).public_key(key.public_key()).serial_number(x509.random_serial_number())
        .not_valid_before(begun).not_valid_after(until)
        .add_extension(x509.SubjectAlternativeName([_host(host) for host in hosts]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
        .add_extension(_usage(ca=False), critical=True).sign(ca_key, hashes.SHA384())
    )  # fmt: skip
    (folder / "ca.crt").write_bytes(ca.public_bytes(serialization.Encoding.PEM))
    (folder / "server.crt").write_bytes(server.public_bytes(serialization.Encoding.PEM))
    _private(folder / "server.key", key, serialization.PrivateFormat.PKCS8)


def write_keys(folder: Path, names: Sequence[str]) -> None:
    """One key pair for each node, as OpenSSH has them (Flower reads no other kind): NAME, NAME.pub."""
    folder.mkdir(mode=0o700)
    for name in names:
        key = ec.generate_private_key(ec.SECP384R1())
        _private(folder / name, key, serialization.PrivateFormat.OpenSSH)
        public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
        (folder / f"{name}.pub").write_bytes(public + b"\n")


def _private(path: Path, key: ec.EllipticCurvePrivateKey, form: serialization.PrivateFormat) -> None:
    path.touch(mode=0o600)
    path.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()))


def _usage(*, ca: bool) -> x509.KeyUsage:
    no = dict.fromkeys(
        (
            "content_commitment",
            "key_encipherment",
            "data_encipherment",
            "key_agreement",
            "encipher_only",
            "decipher_only",
        ),
        False,
    )
    return x509.KeyUsage(digital_signature=not ca, key_cert_sign=ca, crl_sign=ca, **no)


def _host(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _as_toml(config: RunConfig) -> str:
    return tomli_w.dumps(_without_none(json.loads(config.canonical())))


def _without_none(value: object) -> dict[str, object]:
    assert isinstance(value, dict)
    return {k: _without_none(v) if isinstance(v, dict) else v for k, v in value.items() if v is not None}


def _policy(clients: Mapping[str, int | dict[str, int]]) -> str:
    most = max(max(r.values()) if isinstance(r, dict) else r for r in clients.values())
    head = (
        "# Who may take part, and how much they can count for: the server's word, whatever a client claims.\n"
        f"max_rank = {most}\n"
        "max_weight_share = 1.0   # no client counts for more than this share of a round\n"
        "deadline = 600.0    # seconds; a round waits no longer\n"
        "retries = 1         # of a round with too few usable replies; then the run stops, its state stored\n"
        "quarantine = 3      # refused uploads after which a client is no longer asked\n\n"
    )
    return head + tomli_w.dumps({"clients": clients})


def _write_app(folder: Path, home: Path) -> None:
    package = folder / "fedlora_app"
    package.mkdir(parents=True)
    (folder / "pyproject.toml").write_text(_APP.replace("{folder}", str(home)))
    (folder / "README.md").write_text(
        "A thin Flower app: fedlora is installed on server and nodes, not shipped in it.\n"
    )
    (folder / "LICENSE").write_text("Apache-2.0\n")
    (package / "__init__.py").write_text('"""The app\'s two shims."""\n')
    (package / "server_app.py").write_text(_SHIM.format(what="The ServerApp", name="server_app"))
    (package / "client_app.py").write_text(_SHIM.format(what="The ClientApp", name="client_app"))


def _write_connection(folder: Path, home: Path, port: int, insecure: bool) -> None:
    folder.mkdir(mode=0o700)
    how: dict[str, object] = {"insecure": True} if insecure else {"root-certificates": f"{home}/certs/ca.crt"}
    connection = {"default": CONNECTION, CONNECTION: {"address": f"127.0.0.1:{port}", **how}}
    (folder / "config.toml").write_text(tomli_w.dumps({"superlink": connection}))


def _write_units(folder: Path, home: Path, names: Sequence[str], port: int, insecure: bool) -> None:
    folder.mkdir()
    link = " ".join(f"'{word}'" if " " in word else word for word in superlink_command(home, port, insecure=insecure))
    (folder / "superlink.service").write_text(_UNIT.format(what="fedlora SuperLink", folder=home, command=link))
    for k, name in enumerate(names):
        words = supernode_command(home, name, f"127.0.0.1:{port}", 9200 + k, insecure=insecure)
        command = " ".join(f"'{word}'" if " " in word or '"' in word else word for word in words)
        unit = _UNIT.format(what=f"fedlora SuperNode {name}", folder=home, command=command)
        (folder / f"supernode-{name}.service").write_text(unit)


__all__ = ["CONNECTION", "SWITCHES", "superlink_command", "supernode_command", "write_project"]
