"""Rounds by hand: the server's half of a federated round on adapters that arrive as files, with its state kept.

Organisations without a network between them collect folders, aggregate them with any method that needs only its
clients' adapters, and hand folders back. If the state is kept, these are a real server's rounds: GLoRA chooses each
client's slots by what that client sent before.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from fedlora.adapters.collection import Collection
from fedlora.core import beside, checkpoint, files
from fedlora.core.echo import quoted
from fedlora.core.lora import Adapter, LoRA
from fedlora.core.messages import Client, Missing, Upload
from fedlora.core.method import Method
from fedlora.errors import AdapterFormatError, CheckpointError, ConfigError, repeated
from fedlora.server.robust_rules import Rule
from fedlora.server.server import Server
from fedlora.server.state import ServerState

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class _Kept:
    """All that is kept between rounds, in one checkpoint. base, weights, classes: see `ByHand`. clients: every
    one that ever took part -> its ranks. handed: per round, SHA-256 of the adapters it produced. counted: SHA-256 of an
    upload -> the round in which it counted."""

    TAG: ClassVar[str] = "by-hand/1"

    state: ServerState
    base: str
    weights: Mapping[str, str]
    classes: tuple[str, ...]
    clients: Mapping[str, Mapping[str, int]]
    handed: tuple[tuple[str, ...], ...]
    counted: Mapping[str, int]


class ByHand:
    """A server whose clients' adapters are files.

    Args:
        method: the method, and its `label`, which must match a kept state's. folder: where the state is kept; None
            keeps none. base: the clients' base model. missing: how to count clients that lack a module. rule: a robust
            rule; a client's change is relative to what this server would hand it at the rank it sent (without a state:
            relative to no adapter at all). also_called: other names of the base model that a kept state may have.
        weights: file of the base model's weights -> its SHA-256, classes: a classifier's class names in order, both
            from the uploads; a kept state must have the same.

    Raises:
        ConfigError: the method's clients keep a part, or its base weights move, so an adapter alone is not its result.
        CheckpointError: the folder holds a state of another method or another base model.

    Example:
        >>> from fedlora.adapters.collection import Collection
        >>> server = ByHand(build("svd"), "svd", None, base="model", missing="zero")
        >>> given = Collection.of([AdapterFile("adapter"), AdapterFile("adapter")], [1.0, 1.0])
        >>> state = server.aggregate(given, ["site-1", "site-2"], [100, 100], [1, 1])
        >>> state.round
        1
    """

    def __init__(
        self,
        method: Method[Any],
        label: str,
        folder: Path | None,
        *,
        base: str,
        missing: Missing,
        rule: Rule | None = None,
        also_called: Sequence[str] = (),
        weights: Mapping[str, str] | None = None,
        classes: Sequence[str] = (),
    ) -> None:
        self._server = Server(method, weighting="examples", heads="frozen", missing=missing, rule=rule)  # as given
        self._of, self._folder, self._base = f"method {label}", folder, base
        self._bases, self._weights = {base, *also_called}, dict(weights or {})
        self._classes = tuple(classes)
        self.clients: dict[str, dict[str, int]] = {}  # every client that ever took part -> its ranks
        self._handed: tuple[tuple[str, ...], ...] = ()  # per round, SHA-256 of the adapters it produced
        self._counted: dict[str, int] = {}  # SHA-256 of an upload -> the round in which it counted
        self._newest: int | None = None  # the folder's newest round, as far as this server knows
        roles = method.roles(0)
        if not roles.both_shared:
            raise ConfigError(
                f"{method.name} needs clients that keep a part of their adapter or freeze it (B {roles.B}, A "
                f"{roles.A}); with files only, a method must share both factors: glora, fedit, flexlora, svd, ..."
            )
        if roles.moves_base:
            raise ConfigError(f"{method.name} moves the base weights, so its result is more than an adapter.")
        self.state = self._kept()

    def _kept(self) -> ServerState | None:
        if self._folder is not None and self._folder.exists() and not self._folder.is_dir():
            raise CheckpointError(f"{self._folder} is a file; --state names a folder.")
        if self._folder is None or not self._folder.is_dir():
            return None
        self._newest = checkpoint.newest_round(self._folder)
        kind = self._server.method.State
        loaded = checkpoint.load_newest(self._folder, _Kept, kind, of=self._of, tell=log.warning)
        if loaded is None:  # it was killed before its first round
            return None
        kept = loaded[1]
        if kept.base not in self._bases:
            raise CheckpointError(
                f"{self._folder} holds the state of base {kept.base!r}, but this merge has {self._base!r}. Continue "
                f"with the same base, or name another folder with --state."
            )
        if kept.weights and self._weights and kept.weights != self._weights:
            raise CheckpointError(
                f"{self._folder} holds the state of a base model with other weights (SHA-256 of "
                f"{', '.join(f'{name}: {digest[:12]}' for name, digest in list(kept.weights.items())[:2])}) than the "
                f"uploads say now ({', '.join(d[:12] for d in list(self._weights.values())[:2])}): somebody "
                f"replaced the base model between the rounds. Restore it, or name another folder with --state."
            )
        if kept.classes and self._classes and kept.classes != self._classes:
            raise CheckpointError(
                f"{self._folder} holds the state of rounds with the classes {quoted(list(kept.classes))}, but the "
                f"uploads name {quoted(list(self._classes))}: their heads would mean other classes. Train with the "
                f"same --labels at every site and in every round, or name another folder with --state."
            )
        self._base, self._weights = kept.base, dict(kept.weights) or self._weights
        self._classes = kept.classes or self._classes
        self.clients = {name: dict(ranks) for name, ranks in kept.clients.items()}
        self._handed, self._counted = kept.handed, dict(kept.counted)
        return kept.state

    def check_apart(self, out: Path) -> None:
        """Raise `ConfigError` if a result would be written to the state's folder."""
        if self._folder is not None and os.path.realpath(self._folder) == os.path.realpath(out):
            raise ConfigError(f"{out} cannot be both the state and the result; name two folders.")

    def aggregate(
        self,
        adapters: Collection,
        clients: Sequence[str],
        examples: Sequence[float],
        rounds: Sequence[int | None],
        starts: Sequence[str | None] = (),
        digests: Sequence[str] = (),
    ) -> ServerState:
        """The next round's state, from one adapter per client.

        Args:
            rounds: the round each upload says it belongs to. starts: the SHA-256 of the adapter each says it began
                from. digests: of its own weights.

        Raises:
            AdapterFormatError: two uploads of one client, or, if a state is kept, an upload of another round than its
                next, one that already counted, or one that began from an earlier round's result.
            UploadRefused, RankMismatch: as in the server and the method.
        """
        twice = repeated(clients)
        if twice:
            raise AdapterFormatError(f"two of the adapters belong to client {twice[0]!r}: give one per client.")
        wanted = 1 if self.state is None else self.state.round + 1
        stale = [name for name, number in zip(clients, rounds, strict=True) if number not in (None, wanted)]
        if stale and self._folder is not None:
            raise AdapterFormatError(
                f"the upload of {stale[0]!r} belongs to another round than {wanted}, which the state in "
                f"{self._folder} waits for: it counted already, or is early. To merge the same round again in "
                f"another way, leave out --state."
            )
        if self._folder is not None:
            self._check_new(clients, rounds, starts, digests)
        uploads = []
        for file, name, count in zip(adapters.files, clients, examples, strict=True):
            adapter = Adapter({module: file.lora(module) for module in file.modules})
            uploads.append(Upload(Client(name, adapter.ranks), count, adapter))
        if self.state is None:
            self.state = self._server.init(_zero_start(uploads))
        after = self._server.aggregate(self.state, uploads)
        self.state = after
        self.clients |= {u.client.id: dict(u.adapter.ranks) for u in uploads}
        self._counted |= dict.fromkeys(digests, after.round)
        return after

    def _check_new(
        self, clients: Sequence[str], rounds: Sequence[int | None], starts: Sequence[str | None], digests: Sequence[str]
    ) -> None:
        """Raise `AdapterFormatError` for an upload that gives no round and already counted, or that began from an
        earlier round's result, or afresh."""
        for name, number, start, digest in zip(clients, rounds, starts, digests, strict=False):
            if number is None and digest in self._counted:
                raise AdapterFormatError(
                    f"the upload of {name!r} counted already, in round {self._counted[digest]} of the state in "
                    f"{self._folder}. To merge the same round again in another way, leave out --state."
                )
            if self._handed and start is not None and start.startswith("fresh"):
                raise AdapterFormatError(
                    f"the upload of {name!r} began from a fresh adapter, but the state in {self._folder} has played "
                    f"{len(self._handed)} rounds: averaging would lose what was learned in them. Train it with "
                    f"--adapter, from the adapter that the last round wrote for this client, or from the round's "
                    f"result if the client is new."
                )
            old = [k for k, handed in enumerate(self._handed, start=1) if start in handed]
            if old and old[-1] < len(self._handed):
                raise AdapterFormatError(
                    f"the upload of {name!r} began from the result of round {old[-1]}, but the state in {self._folder} "
                    f"has played {len(self._handed)}: averaging would lose what was learned since. Train it from the "
                    f"adapter that round {len(self._handed)} wrote for it: --readout same writes an adapter for each "
                    f"client that ever took part."
                )

    def handed_out(self, digests: Sequence[str]) -> None:
        """Record this round's products: SHA-256 of the weights of the result and of each client's adapter."""
        self._handed = (*self._handed, tuple(digests))

    def whole(self) -> Mapping[str, LoRA]:
        """The server's update for each module. Raises `NoGlobalModel`."""
        return self._server.global_update(self._begun())

    def readout(self, client: str, ranks: int | Mapping[str, int]) -> Adapter:
        """The adapter a client starts its next round from, at its own ranks."""
        return self._server.download(self._begun(), Client(client, ranks)).adapter

    def _begun(self) -> ServerState:
        if self.state is None:
            raise ConfigError("no round has been played yet: give adapters to `aggregate` first.")
        return self.state

    def save(self) -> None:
        """Save the state, if there is a folder for it."""
        with self.saving():
            pass

    @contextmanager
    def saving(self) -> Iterator[None]:
        """`save` as a context manager, for results that must be visible before the state: the data are on disk when the
        block begins, and a rename at its end publishes them. If the block fails, the state stays as it was.

        Raises:
            CheckpointError: it cannot be written, or another process has saved a round since this state was read.
        """
        if self._folder is None or self.state is None:
            yield
            return
        folder, in_block = self._folder, False
        kept = _Kept(self.state, self._base, self._weights, self._classes, self.clients, self._handed, self._counted)
        try:
            with (
                files.making(folder),
                self._alone(folder),
                checkpoint.saving(folder, self.state.round, kept, of=self._of),
            ):
                in_block = True
                yield
                in_block = False
        except OSError as error:
            if in_block:
                raise
            raise CheckpointError(f"the state cannot be written to {folder}: {error.strerror or error}.") from error
        self._newest = self.state.round

    @contextmanager
    def _alone(self, folder: Path) -> Iterator[None]:
        """Hold off other writers, and check that none saved since this state was read. Raises `CheckpointError`."""
        handle = os.open(folder, os.O_RDONLY)
        try:
            newest = checkpoint.newest_round(folder)
            if beside.hold(handle) is False or newest != self._newest:
                raise CheckpointError(
                    f"another process saves a round in {folder}, or has saved one since this state was read (the "
                    f"newest is {newest or 'none'}). A round counts once: continue with the next one."
                )
            yield
        finally:
            os.close(handle)


def _zero_start(uploads: Sequence[Upload]) -> Adapter:
    """An adapter that changes nothing, with every module at its largest rank: B = 0, A from the largest upload."""
    largest: dict[str, LoRA] = {}
    for upload in uploads:
        for name, lora in upload.adapter.modules.items():
            if name not in largest or lora.rank > largest[name].rank:
                largest[name] = lora
    start = {}
    for name, lora in largest.items():
        B, A = lora.factors
        start[name] = LoRA(torch.zeros_like(B), A)
    return Adapter(start)
