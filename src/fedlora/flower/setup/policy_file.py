"""policy.toml written: made once, then a site added, removed or given another rank, with its comments left in place.

A change is made to the text, and read back: where the file is in a form that this does not understand, nothing is
written and the error says which line to write by hand.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path

from fedlora.core import files
from fedlora.core.echo import quoted
from fedlora.errors import ConfigError
from fedlora.given_files import read_given

Rank = int | Mapping[str, int]
_HEAD = """\
# Who may take part, and how much they can count for: the server's word, whatever a client claims.
# Read anew at the beginning of each round. Sites come and go by `fedlora flower admit` and `fedlora flower remove`.
# max_weight_share = 0.5   # no site counts for more than this share of those who count; left out: max(0.5, 2 / sites)
deadline = 600.0    # seconds; a round waits no longer
retries = 1         # of a round with too few usable replies; then the run stops, its state stored
quarantine = 3      # refused uploads in a row after which a site is no longer asked; 0 asks for ever
# max_upload_mb = 100  # of one reply; left out: twice what the site's own upload can have, and 1 MB

[clients]           # name = rank
"""


_PRIVATE_HEAD = """\
# Who is asked: the server's word, whatever a client claims. Read anew at the beginning of each round.
# The federation is private: all of them are asked in every round, who does not answer counts as zero, and nobody is
# added to privacy.members of federation.toml. Sites are let in by `fedlora flower admit`.
deadline = 600.0    # seconds; a round waits so long for sites to be online, and so long for their answers
retries = 0         # a private round is played once
quarantine = 0      # and everybody is asked
# max_upload_mb = 100  # of one reply; left out: twice what the site's own upload can have, and 1 MB

[clients]           # name = rank
"""


def policy_text(clients: Mapping[str, Rank], *, private: bool = False) -> str:
    """A new policy with safe defaults. private: of a federation with [privacy]."""
    return (_PRIVATE_HEAD if private else _HEAD) + "".join(f"{_line(name, rank)}\n" for name, rank in clients.items())


def with_client(text: str, name: str, rank: Rank) -> str:
    """The policy with one more site, the last, or with another rank for one that is there.

    Raises:
        ConfigError: the file's form is not understood; the message has the line to write.
    """
    lines = text.splitlines(keepends=True)
    before = _clients(text)
    wanted = {**before, name: rank}
    begin, end = _table(lines)
    if name in before:
        changed = [_changed(line, name, rank) if _key(line) == name else line for line in lines[begin:end]]
        made = "".join([*lines[:begin], *changed, *lines[end:]])
    else:
        last = max((k + 1 for k in range(begin, end) if _key(lines[k])), default=begin)
        if last and not lines[last - 1].endswith("\n"):
            lines[last - 1] += "\n"
        made = "".join([*lines[:last], f"{_line(name, rank)}\n", *lines[last:]])
    return _checked(made, text, wanted, f"write {_line(name, rank)!r} below [clients] yourself")


def without_client(text: str, name: str) -> str:
    """The policy without one site. Raises `ConfigError`, as `with_client`."""
    lines = text.splitlines(keepends=True)
    begin, end = _table(lines)
    made = "".join([*lines[:begin], *(line for line in lines[begin:end] if _key(line) != name), *lines[end:]])
    wanted = {k: v for k, v in _clients(text).items() if k != name}
    return _checked(made, text, wanted, f"take {name!r} out of [clients] yourself")


def read_policy_text(path: Path) -> str:
    """Raises `ConfigError`."""
    try:
        return read_given(path).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the policy {path} cannot be read: {error}.") from error


def write_policy(path: Path, text: str) -> None:
    """All or nothing. Raises `ConfigError`."""
    try:
        files.write(path, text)
    except OSError as error:
        raise ConfigError(f"the policy {path} cannot be written: {error}.") from error


def _line(name: str, rank: Rank) -> str:
    value = str(rank) if isinstance(rank, int) else f"{{ {', '.join(f'{_quote(k)} = {r}' for k, r in rank.items())} }}"
    return f"{name if re.fullmatch(r'[A-Za-z0-9_-]+', name) else _quote(name)} = {value}"


def _changed(line: str, name: str, rank: Rank) -> str:
    """The line with another rank, and its comment."""
    found = re.fullmatch(r"\s*[^=]*=\s*(?:\d+|\{[^}#]*\})(\s*(?:#.*)?\r?\n?)", line)
    return _line(name, rank) + (found[1] if found else "\n")


def _quote(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _key(line: str) -> str | None:
    """The name that a line of [clients] gives a rank."""
    found = re.match(r"""\s*(?:([A-Za-z0-9_-]+)|"((?:[^"\\]|\\.)*)"|'([^']*)')\s*=""", line)
    return next((part for part in found.groups() if part is not None), None) if found else None


def _table(lines: list[str]) -> tuple[int, int]:
    """Where the lines of [clients] begin and end."""
    heads = [k for k, line in enumerate(lines) if re.match(r"\s*\[", line)]
    begin = next((k for k in heads if re.match(r"\s*\[\s*clients\s*\]", lines[k])), None)
    if begin is None:
        return len(lines), len(lines)
    return begin + 1, next((k for k in heads if k > begin), len(lines))


def _clients(text: str) -> dict[str, Rank]:
    try:
        found = tomllib.loads(text).get("clients")
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"the policy is not TOML: {error}. Mend it first.") from error
    if not isinstance(found, dict):
        raise ConfigError("the policy has no table [clients] with name = rank.")
    return found


def _checked(made: str, before: str, clients: Mapping[str, Rank], instead: str) -> str:
    """`made`, if it says what it should and nothing else has changed."""
    wanted = {
        **tomllib.loads(before),
        "clients": {k: dict(v) if isinstance(v, Mapping) else v for k, v in clients.items()},
    }
    try:
        found = tomllib.loads(made)
    except tomllib.TOMLDecodeError:
        found = {}
    if found != wanted or list(found["clients"]) != list(wanted["clients"]):
        raise ConfigError(
            f"policy.toml is written in a form that is not changed here ([clients] has lines NAME = RANK in the one "
            f"that `fedlora flower init` writes): {quoted(instead)[1:-1]}, and call this again."
        )
    return made


__all__ = ["policy_text", "read_policy_text", "with_client", "without_client", "write_policy"]
