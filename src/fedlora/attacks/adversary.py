"""A run's liars: who they are, what they do to a round's uploads, and the numbers they report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from fedlora.attacks import crafts
from fedlora.attacks.directions import regauged, with_insertion
from fedlora.attacks.kinds import Attack
from fedlora.attacks.spaces import Change, ChangeSpace, Entries, Products
from fedlora.core.lora import Adapter, LoRA, named_tensors
from fedlora.core.messages import Upload
from fedlora.core.sent import Attacked, Sent, Tampered
from fedlora.errors import HyperparameterError


@dataclass(frozen=True)
class Adversary:
    """These `clients` play `attack`, knowing every upload of the round: the strongest adversary. For experiments.

    Its actions are a function of the round's uploads, the round and `seed`. Its clients report their number of examples
    honestly, and abstain or diverge as they would. Uploads that are not finite are ignored. In a round without an
    honest client the liars learn from each other. Pass it to `simulate(adversary=...)`.

    It reports for each liar's upload: "change", the norm of what it adds to its readout; "honest", the norm of what it
    would have added; "left_out", the share of the wanted change that did not fit its rank, by norm; for alie also "z".

    Raises:
        HyperparameterError: no clients; or, in a round, an attack on both factors when only one travels.

    Example:
        >>> liars = Adversary(Attack("sign-flip"), ("site-2",), seed=0)
        >>> record = next(simulate(server, clients, trainer, start(server, seed_adapter), rounds=1, adversary=liars))
        >>> record.attacked.what, sorted(record.attacked.clients)
        ('sign-flip (s = 1)', ['site-2'])
    """

    attack: Attack
    clients: tuple[str, ...]
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.clients:
            raise HyperparameterError("an Adversary without clients attacks nothing: name one, or leave it out.")

    def __str__(self) -> str:
        """The attack in one line, for a log."""
        return f"{self.attack.words} by {', '.join(self.clients)}"

    def __call__(self, sent: Sequence[Sent], round: int) -> Tampered:
        by_id = sorted((s for s in sent if _counts(s)), key=lambda s: s.upload.client.id)
        liars = {s.upload.client.id: s for s in by_id if s.upload.client.id in self.clients}
        honest = [s for s in by_id if s.upload.client.id not in self.clients] or list(liars.values())
        made: dict[str, Upload] = {}
        told: dict[str, Mapping[str, float]] = {}
        if liars:
            space = self._space(next(iter(liars.values())))
            changes = [space.change(s) for s in honest] if self.attack.about.colludes else []
            for client, own in liars.items():
                made[client], told[client] = self._one(own, space, by_id, changes, len(liars), round)
        uploads = [made.get(s.upload.client.id, s.upload) for s in sent]
        return Tampered(uploads, Attacked(self.attack.words, told))

    def _space(self, one: Sent) -> ChangeSpace:
        both = one.roles.both_shared
        if self.attack.about.pairs and not both:
            raise HyperparameterError(
                f"the attack {self.attack.kind} is about products B A, but in this round only one factor travels (B "
                f"{one.roles.B}, A {one.roles.A}): choose another attack, or a method that shares both."
            )
        return Products() if both else Entries()

    def _one(
        self, own: Sent, space: ChangeSpace, known: Sequence[Sent], honest: Sequence[Change], liars: int, round: int
    ) -> tuple[Upload, dict[str, float]]:
        """One liar's upload, and its numbers."""
        kind, trained = self.attack.kind, space.change(own)
        told = {"honest": space.norm(trained)}
        if kind == "label-flip":  # its data were hostile, but it sends what it trained
            return own.upload, {"change": told["honest"], **told, "left_out": 0.0}
        strength = self.attack.about.default if self.attack.strength is None else self.attack.strength
        if kind == "alie":
            strength = crafts.largest_z(len(known), liars) if strength is None else strength
            told["z"] = strength
        strength = 0.0 if strength is None else strength
        seeds = (self.seed, round)
        left_out = 0.0
        if kind == "gauge":
            upload = regauged(own.upload, strength, *seeds)
        elif kind == "subspace-insertion":
            sizes: dict[str, list[float]] = {}
            for change in honest:
                for (part, name), size in space.sizes(change).items():
                    if part == "module":
                        sizes.setdefault(name, []).append(size)
            upload = with_insertion(own, known, sizes, strength, *seeds)
        elif kind == "free-rider" and not self.attack.noise:
            upload = _unchanged(own)
        else:
            wanted = self._wanted(own, space, trained, honest, strength, seeds)
            upload, left_out = space.upload(own, wanted)
        sent = space.norm(space.change(Sent(upload, own.begun, own.roles)))
        return upload, {"change": sent, **told, "left_out": left_out}

    def _wanted(
        self, own: Sent, space: ChangeSpace, trained: Change, honest: Sequence[Change], strength: float,
        seeds: tuple[int, int],
    ) -> Change:  # fmt: skip
        """The change this liar wants, before it is cut to its rank. A part that no honest client holds stays as
        trained.

        Sources: scale: with s = n, one of n clients replaces the mean by its own change. inner-product: with m of n
        clients, the plain mean's inner product with the honest one is negative for e > (n - m) / m; Xie, Koyejo and
        Gupta, "Fall of Empires", UAI 2019 (PMLR 115, 2020).
        """
        kind = self.attack.kind
        if kind == "sign-flip":
            return space.times(trained, -strength)
        if kind == "scale":
            return space.times(trained, strength)
        if kind == "free-rider":
            return crafts.disguised(space, own, honest, *seeds, own.upload.client.id)
        if kind == "alie":
            all_parts = crafts.little(space, honest, strength)
        elif kind == "inner-product":
            all_parts = space.times(space.mean(honest), -strength)
        else:  # never run another attack under this name
            raise NotImplementedError(f"{kind} is in `kinds.KINDS`, but this file does not say what it sends.")
        return Change({key: all_parts.parts.get(key, part) for key, part in trained.parts.items()})


def _counts(sent: Sent) -> bool:
    """Whether the server will count it, as far as we can tell: it does not abstain, and is finite."""
    upload = sent.upload
    if upload.num_examples == 0:
        return False
    return all(bool(torch.isfinite(tensor).all()) for _, tensor in named_tensors(upload.adapter))


def _unchanged(sent: Sent) -> Upload:
    """The readout's travelling parts unchanged, in the upload's dtypes: not one bit differs."""
    modules = {}
    for name, lora in sent.upload.adapter.modules.items():
        begun, like = sent.begun.modules[name].tensors(), lora.tensors()
        modules[name] = LoRA(**{f: begun[f].detach().to(like[f].dtype) if f in like else None for f in ("B", "A")})
    heads = {name: sent.begun.heads[name].to(head.dtype) for name, head in sent.upload.adapter.heads.items()}
    return replace(sent.upload, adapter=Adapter(modules, heads))
