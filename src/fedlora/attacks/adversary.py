"""A run's byzantine clients: who they are, what they do to a round's uploads, and the numbers they report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist, median
from typing import Literal, assert_never

import torch

from fedlora.attacks.changes import Change, change, combined, deviation, mean, noise, norm, over, size, upload
from fedlora.attacks.directions import regauged, with_insertion
from fedlora.attacks.kinds import Attack
from fedlora.core.lora import Adapter, LoRA, named_tensors
from fedlora.core.messages import Upload
from fedlora.core.sent import Attacked, Sent, Tampered
from fedlora.errors import HyperparameterError


@dataclass(frozen=True)
class Adversary:
    """These `clients` play `attack`, knowing every upload of the round: the strongest adversary. For experiments.

    Its actions are a function of the round's uploads, the round and `seed`. Its clients report their number of examples
    honestly, and abstain or diverge as they would. Uploads that are not finite are ignored. In a round without an
    honest client the byzantine clients learn from each other. Pass it to `simulate(adversary=...)`.

    It reports for each byzantine client's upload: "change", the norm of what it adds to its readout; "honest", the norm
    of what it would have added; "left_out", the share of the wanted change that did not fit its rank, by norm; for alie
    also "z".

    Raises:
        HyperparameterError: no clients; or, in a round, an attack on both factors when only one travels.

    Example:
        >>> attack = Adversary(Attack("sign-flip"), ("site-2",), seed=0)
        >>> record = next(simulate(server, clients, trainer, start(server, seed_adapter), rounds=1, adversary=attack))
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
        known = sorted((s for s in sent if _counts(s)), key=lambda s: s.upload.client.id)
        byzantine = [s for s in known if s.upload.client.id in self.clients]
        honest = [s for s in known if s.upload.client.id not in self.clients] or byzantine
        if byzantine and self.attack.about.pairs and not byzantine[0].roles.both_shared:
            roles = byzantine[0].roles
            raise HyperparameterError(
                f"the attack {self.attack.kind} is about products B A, but in this round only one factor travels (B "
                f"{roles.B}, A {roles.A}): choose another attack, or a method that shares both."
            )
        changes = [change(s) for s in honest] if byzantine else []
        made: dict[str, Upload] = {}
        found: dict[str, Mapping[str, float]] = {}
        for own in byzantine:
            client = own.upload.client.id
            made[client], found[client] = self._one(own, known, changes, len(byzantine), round)
        uploads = [made.get(s.upload.client.id, s.upload) for s in sent]
        return Tampered(uploads, Attacked(self.attack.words, found))

    def _one(
        self, own: Sent, known: Sequence[Sent], honest: Sequence[Change], byzantine: int, round: int
    ) -> tuple[Upload, dict[str, float]]:
        """One byzantine client's upload, and its numbers."""
        kind, trained, seed = self.attack.kind, change(own), (self.seed, round)
        facts = {"honest": norm(trained), "left_out": 0.0}
        strength = self.attack.about.default if self.attack.strength is None else self.attack.strength
        if kind == "alie":
            strength = facts["z"] = largest_z(len(known), byzantine) if strength is None else strength
        s = strength or 0.0
        match kind:
            case "label-flip":  # its data were hostile, but it sends what it trained
                lie = own.upload
            case "gauge":
                lie = regauged(own.upload, s, *seed)
            case "subspace-insertion":
                sizes = over(honest, lambda parts: [*map(size, parts)])
                of_modules = {name: found for (part, name), found in sizes.items() if part == "module"}
                lie = with_insertion(own, known, of_modules, s, *seed)
            case "free-rider" if not self.attack.noise:
                lie = _unchanged(own)
            case "sign-flip" | "scale" | "alie" | "inner-product" | "free-rider":
                wanted = _wanted(kind, own, trained, honest, s, seed)
                # A part that no honest client holds stays as trained.
                lie, facts["left_out"] = upload(own, {key: wanted.get(key, part) for key, part in trained.items()})
            case _:
                assert_never(kind)
        return lie, {"change": norm(change(replace(own, upload=lie))), **facts}


def _wanted(
    kind: Literal["sign-flip", "scale", "alie", "inner-product", "free-rider"], own: Sent, trained: Change,
    honest: Sequence[Change], s: float, seed: tuple[int, int],
) -> Change:  # fmt: skip
    """The change that a byzantine client wants, before it is cut to its rank. mean and sd: over honest clients, entry
    by entry.

    Sources: scale: with s = n, one of n clients replaces the mean by its own change. alie: Baruch, Baruch and Goldberg,
    "A Little Is Enough", NeurIPS 2019, algorithm 3; sign as in the public code. inner-product: with m of n clients, the
    plain mean's inner product with the honest one is negative for e > (n - m) / m; Xie, Koyejo and Gupta, "Fall of
    Empires", UAI 2019 (PMLR 115, 2020).
    """
    match kind:
        case "sign-flip" | "scale":
            return over([trained], lambda parts: combined(parts, [s if kind == "scale" else -s]))
        case "alie":
            return over(honest, lambda parts: combined([mean(parts), deviation(parts)], [1.0, -s]))
        case "inner-product":
            return over(honest, lambda parts: combined([mean(parts)], [-s]))
        case "free-rider":  # noise in which every part has the median honest client's size
            random = noise(own, *seed, own.upload.client.id)
            usual = over(honest, lambda parts: median(map(size, parts)))
            return {k: combined([x], [usual.get(k, 0.0) / (size(x) or 1.0)]) for k, x in random.items()}


def largest_z(clients: int, attackers: int) -> float:
    """z_max: the largest z at which enough honest clients lie farther out than the byzantine clients, if changes are
    normal.

    The byzantine clients need s = floor(n / 2 + 1) - m supporters among the n - m honest clients, and z_max = max {z :
    phi(z) < (n - m - s) / (n - m)}. At least 0, and finite even if the byzantine clients are so many that they need
    nobody (s < 1 counts as 1). Small federations with few byzantine clients leave almost nothing: n = 15 and m = 3 give
    0.21.

    Source: Baruch, Baruch and Goldberg, "A Little Is Enough", NeurIPS 2019, algorithm 3, lines 1 and 2.

    Example:
        >>> round(largest_z(50, 24), 3)  # s = 2, phi(z) = 24 / 26
        1.426
    """
    honest = clients - attackers
    supporters = max(1, clients // 2 + 1 - attackers)
    share = (honest - supporters) / honest if honest else 0.0
    return max(0.0, NormalDist().inv_cdf(share)) if 0 < share < 1 else 0.0


def _counts(sent: Sent) -> bool:
    """Whether the server will count it, as far as we can tell: it does not abstain, and is finite."""
    finite = all(bool(torch.isfinite(tensor).all()) for _, tensor in named_tensors(sent.upload.adapter))
    return sent.upload.num_examples != 0 and finite


def _unchanged(sent: Sent) -> Upload:
    """The readout's travelling parts unchanged, in the upload's dtypes: not one bit differs."""
    modules = {}
    for name, lora in sent.upload.adapter.modules.items():
        begun, like = sent.begun.modules[name].tensors(), lora.tensors()
        modules[name] = LoRA(**{f: begun[f].detach().to(like[f].dtype) if f in like else None for f in ("B", "A")})
    heads = {name: sent.begun.heads[name].to(head.dtype) for name, head in sent.upload.adapter.heads.items()}
    return replace(sent.upload, adapter=Adapter(modules, heads))
