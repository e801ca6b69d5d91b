"""The client's side of the protocol: complete a download, and strip what stays home. It knows no method.

mine = receive(download, kept)      train mine      send(mine, roles) -> Upload      keep(mine, roles) -> kept

`play_round` does all of it around a trainer, for the engine and a Flower node.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedlora.core.lora import Adapter, LoRA, named_tensors
from fedlora.core.messages import Client, ClientMemory, Download, Upload
from fedlora.core.method import Roles
from fedlora.core.parcels import held_after
from fedlora.core.trainer import Job, Trained, Trainer
from fedlora.errors import HyperparameterError, KeptStateError, UploadRefused


@dataclass(frozen=True, eq=False)
class Played:
    """A client's round: what it sends, what it remembers, and its mean training loss.

    Example:
        >>> played = play_round(server.download(state, clients[0]), ClientMemory(), trainer)
        >>> played.upload.client.id, played.loss
        ('site-1', 0.5)
    """

    upload: Upload
    memory: ClientMemory
    loss: float


def play_round(download: Download, memory: ClientMemory, trainer: Trainer) -> Played:
    """A client's whole round: receive, train, send, keep. Pure except for the trainer.

    Args:
        memory: from the client's last round; `ClientMemory()` before its first.

    Raises:
        KeptStateError: the memory does not fit the download. UploadRefused: training diverged in a part that stays
            here, where no server can see it; the memory is unchanged.

    Example:
        >>> played = play_round(server.download(state, clients[0]), ClientMemory(), trainer)
        >>> state = server.aggregate(state, [played.upload])
        >>> again = play_round(server.download(state, clients[0]), played.memory, trainer)
    """
    job = begin_round(download, memory)
    return finish_round(job, trainer.train(job.download, job.adapter, job.position))


def begin_round(download: Download, memory: ClientMemory) -> Job:
    """The training job: the first half of `play_round`, for engines that train several clients at once.

    Example:
        >>> job = begin_round(server.download(state, clients[0]), ClientMemory())
        >>> job.adapter.ranks
        {'q': 2, 'v': 2}
    """
    return Job(download, receive(download, memory.kept), memory.position)


def finish_round(job: Job, trained: Trained) -> Played:
    """The client's result from the trained adapter: the second half of `play_round`.

    Example:
        >>> job = begin_round(server.download(state, clients[0]), ClientMemory())
        >>> trained = trainer.train(job.download, job.adapter, job.position)
        >>> finish_round(job, trained).upload.num_examples
        40
    """
    roles, client = job.download.roles, job.download.client
    was, now = (dict(named_tensors(a.only(roles.parts("local")))) for a in (job.adapter, trained.adapter))
    for name in was | now:
        before, after = (tuple(side[name].shape) if name in side else "no shape" for side in (was, now))
        if before != after:
            raise UploadRefused(client.id, f"the local {name} has {after} after training, and had {before}.")
        if not bool(torch.isfinite(now[name]).all()):
            raise UploadRefused(client.id, f"the local {name} holds NaN or Inf: training diverged there.")
    kept = keep(trained.adapter, roles)
    upload = Upload(client, trained.num_examples, send(trained.adapter, roles))
    return Played(upload, ClientMemory(kept, trained.position, held_after(job.download, kept)), trained.loss)


def receive(download: Download, kept: Adapter | None) -> Adapter:
    """The complete adapter to train: the download, with local parts from `kept` (from the start if nothing is kept);
    its `base` holds the change of the base weights. It owns its factors and heads: training in place changes neither
    `download` nor `kept`.

    Raises:
        KeptStateError: the kept part has other modules or another rank than the download.

    Example:
        >>> receive(server.download(state, clients[0]), kept=None)
        Adapter(2 modules of rank [2], heads=['head.weight'])
    """
    have = kept or Adapter({}, {})
    both_local = have.ranks if (download.roles.B, download.roles.A) == ("local", "local") else {}
    ranks = both_local | download.start.ranks | download.adapter.ranks
    modules = {}
    for name, rank in ranks.items():
        came = download.adapter.modules.get(name)
        parts = came.tensors() if came else {}
        for factor in ("B", "A"):
            if factor not in parts:
                parts[factor] = _local_factor(name, factor, have, download.start, rank)
        modules[name] = LoRA(parts["B"].clone(), parts["A"].clone())
    foreign = sorted(set(have.modules) - set(ranks))
    if foreign:
        raise KeptStateError(
            f"the kept part holds module {foreign[0]!r} ({len(foreign)} such), which the server does not send: "
            f"it belongs to another model. Start afresh, without the kept part."
        )
    local_heads = {**download.start.heads, **have.heads} if download.roles.heads == "local" else {}
    for name, start in download.start.heads.items():
        _check_kept(f"head {name!r}", local_heads[name], start)
    heads = {name: head.clone() for name, head in {**local_heads, **download.adapter.heads}.items()}
    return Adapter(modules, heads, download.base_delta)


def _local_factor(module: str, factor: str, kept: Adapter, start: Adapter, rank: int) -> Tensor:
    what = f"factor {factor} of module {module!r}"
    begun = start.modules[module].tensors().get(factor) if module in start.modules else None
    mine = kept.modules[module].tensors().get(factor) if module in kept.modules else begun
    if mine is None:
        raise KeptStateError(
            f"{what} is local: it was neither sent nor kept. "
            f"Keep `client.keep(adapter, roles)` after each round and pass it to `receive`."
        )
    held = mine.shape[1] if factor == "B" else mine.shape[0]
    if held != rank:
        raise KeptStateError(
            f"the kept {what} has rank {held}, but the server now sends rank {rank}. "
            f"A client with local factors cannot change its rank; register it under a new id to start afresh."
        )
    if begun is not None:
        _check_kept(what, mine, begun)
    return mine


def _check_kept(what: str, mine: Tensor, start: Tensor) -> None:
    if mine.shape != start.shape:
        raise KeptStateError(
            f"the kept {what} has shape {tuple(mine.shape)}, but the server's model has {tuple(start.shape)}: "
            f"it belongs to another model. Start afresh, without the kept part."
        )


def send(adapter: Adapter, roles: Roles) -> Adapter:
    """The part of `adapter` that travels to the server: the shared parts.

    adapter: the trained adapter from `receive`. If the method moves the base weights, its `base` says on which ones it
    was trained.

    Raises:
        HyperparameterError: the method moves the base weights, and `adapter.base` is None.

    Example:
        >>> download = server.download(state, clients[0])
        >>> adapter = receive(download, kept=None)  # and train it
        >>> send(adapter, Roles(A="local", heads="local")).modules["q"]  # A and the heads stay home
        LoRA(B=(6, 2) float32, A=absent)
    """
    if roles.moves_base and adapter.base is None:
        raise HyperparameterError(
            "send: this method moves the base weights, but the trained adapter does not say on which ones it was "
            "trained (its `base` is None). Train the adapter that `receive` returned, base and all: "
            "`model.activate(mine)`, or `load_into_model(peft_model, mine)`. If you build the trained one yourself, "
            "make it from that: `dataclasses.replace(mine, modules=trained)`."
        )
    return adapter.only(roles.parts("shared"))


def keep(adapter: Adapter, roles: Roles) -> Adapter | None:
    """A copy of the local parts, for the client's next `receive`. None if there are none.

    Example:
        >>> adapter = receive(server.download(state, clients[0]), kept=None)
        >>> keep(adapter, Roles(A="local")).modules["q"]
        LoRA(B=absent, A=(2, 5) float32)
        >>> keep(adapter, Roles()) is None  # everything is shared
        True
    """
    local = adapter.only(roles.parts("local"))
    return local.map(Tensor.clone) if local.modules or local.heads else None


__all__ = [
    "Client", "ClientMemory", "Download", "Played", "Upload", "begin_round", "finish_round", "keep", "play_round",
    "receive", "send",
]  # fmt: skip
