"""`fedlora flower admit | remove`: decide who may take part."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedlora.cli.flower.common import Folder, needed, typed
from fedlora.cli.screen import console
from fedlora.errors import ConfigError, FedLoRAError

if TYPE_CHECKING:
    from fedlora.flower.setup.members import Admitted


def admit(
    folder: Folder,
    requests: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[REQUEST]...", help="the request.toml of each site, as it sent it", show_default=False),
    ] = None,
    rank: Annotated[int | None, typer.Option(min=1, help="rank of a site that was not invited, or a new rank")] = None,
    rotate: Annotated[bool, typer.Option("--rotate", help="accept another key for this site")] = False,
    new: Annotated[
        str | None,
        typer.Option(metavar="NAME=RANK", help="invite a site and write its join file (NAME alone: for a known site)"),
    ] = None,
) -> None:
    """At the server: admit sites, each with the request.toml that it sent, or invite a new site.

    A running server takes the change within seconds. Of several requests one that is refused keeps no other out.

    Sites:          fedlora flower admit fed acme.toml berlin.toml
    A new site:     fedlora flower admit fed --new dublin=4    then hand it fed/join/dublin.toml
                    fedlora flower admit fed request.toml      with what it sends back
    A new key:      fedlora flower admit fed request.toml --rotate
    Another rank:   fedlora flower admit fed request.toml --rank 16
    """
    needed()
    from fedlora.flower.places import FederationFolder
    from fedlora.flower.serving.standing import standing
    from fedlora.flower.setup import members
    from fedlora.flower.terms.names import named_rank

    given = requests or []
    if bool(given) == (new is not None):
        raise ConfigError(
            "give the request.toml of a site, to admit it, or --new NAME=RANK, to invite one"
            + ("." if not given else "; not both at once.")
        )
    if new is not None:
        if rank is not None or rotate:
            raise ConfigError("--new invites a site, with its rank in it (NAME=RANK): leave --rank and --rotate out.")
        name, known = named_rank(new)
        place = members.invite(folder, name, known)
        _say(f"{place}: hand it to {name}. It holds no secret. Then: fedlora flower admit {typed(folder)} request.toml")
        return
    if len(given) > 1 and (rank is not None or rotate):
        raise ConfigError(f"--rank and --rotate are for one site; got {len(given)} requests. Give them one by one.")
    refused: list[str] = []
    for request in given:
        try:
            _say_admitted(members.admit(folder, request, rank=rank, rotate=rotate))
        except FedLoRAError as error:
            if len(given) == 1:
                raise
            refused.append(f"{request}: {error}")
    if len(refused) < len(given):
        over = standing(FederationFolder(folder)).finished
        more = "All rounds are played: for more, raise [run] rounds in federation.toml and restart the server."
        _say(more if over else "A running server takes this over within seconds, a rank in the next round.")
    if refused:
        raise ConfigError(f"{len(refused)} of {len(given)} requests are refused. {' '.join(refused)}")


def _say_admitted(done: Admitted) -> None:
    key, rank = done.fingerprint, _rank(done.rank)
    if done.old_key is not None:
        key += f" in place of {done.old_key}"
    if done.before not in (None, done.rank):
        rank += f" in place of {_rank(done.before)}"
    _say(f"{done.site}: {'was admitted already' if done.known else 'admitted'}, with the key {key}, rank {rank}.")
    if done.learned:
        _say(f"The server took {', '.join(done.learned)} of the base model from it: all other sites must match.")
    for line in done.notes:
        _say(f"note: {line}")


def remove(folder: Folder, name: Annotated[str, typer.Argument(help="the site", show_default=False)]) -> None:
    """At the server: remove a site. It takes effect in the next round.

    Its key and request are kept in FOLDER/removed."""
    needed()
    from fedlora.flower.setup import members

    for line in members.remove(folder, name):
        _say(f"note: {line}")
    _say(f"{name}: removed. A running server puts it out within seconds.")


def _rank(rank: object) -> str:
    return str(rank) if isinstance(rank, int) else "by module"


def _say(line: str) -> None:
    console.print(line)
