"""What several benchmarks run: modules with their clients, the thin SVD beside them, a method alone and in a server.

Imported by the benchmarks, not run by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from baseline import thin_svd
from fedlora import Adapter, Client, LoRA, Server, Upload, build
from fedlora.core.method import Update, aggregate_all
from fedlora.linalg import Spectrum, rank_tolerance
from fedlora.methods._spectral import instantiate
from measure import Contestant
from workloads import Core, Shape, Workload, draw_factors, gauge_fixed

THIN = "thin SVD core"


@dataclass(frozen=True, eq=False)
class Sample:
    """The modules of one shape that are run: each one's clients, raw and gauge-fixed."""

    w: Workload
    shape: Shape
    modules: list[list[LoRA]]
    cores: list[Core]

    def seed(self, k: int) -> LoRA:
        """The start of module k: B = 0, of the largest rank."""
        rows = max((lora.factors[1] for lora in self.modules[k]), key=len)
        return LoRA(torch.zeros(self.shape.d_out, len(rows)), rows)

    def updates(self, k: int) -> list[Update]:
        parts = zip(self.w.weights, self.w.ranks, self.modules[k], strict=True)
        return [Update(f"c{i:02}", p, r, lora, torch.float32) for i, (p, r, lora) in enumerate(parts)]

    def first(self, modules: int) -> Sample:
        return Sample(self.w, self.shape, self.modules[:modules], self.cores[:modules])

    @property
    def times(self) -> float:
        return self.shape.count / len(self.modules)


def samples_of(w: Workload, quick: bool) -> list[Sample]:
    samples = []
    for shape in w.shapes:
        modules = [draw_factors(shape.d_out, shape.d_in, w.ranks, seed) for seed in range(shape.run(quick))]
        samples.append(Sample(w, shape, modules, [gauge_fixed(loras, w.weights) for loras in modules]))
    return samples


def each(samples: Sequence[Sample], work: Callable[[Sample, int], object]) -> Contestant:
    """`work(sample, k)` for every module k of the samples, one after the other."""

    def loop(sample: Sample) -> None:
        for k in range(len(sample.modules)):
            work(sample, k)

    return Contestant([(sample.times, partial(loop, sample)) for sample in samples])


def together(samples: Sequence[Sample], work: Callable[[Sample], object]) -> Contestant:
    """`work(sample)` for all modules of a sample at once, as the server has them."""
    return Contestant([(sample.times, partial(work, sample)) for sample in samples])


def read_out(spectrum: Spectrum, ranks: Sequence[int]) -> None:
    for k, r in enumerate(ranks):
        chosen = torch.arange(min(r, spectrum.rank))
        instantiate(spectrum, chosen, r, split="balanced", start=None, seed=(0, 0, str(k)))


def thin_svd_core(sample: Sample, k: int) -> None:
    read_out(thin_svd(sample.cores[k].M, sample.cores[k].N, rank_tolerance(torch.float32)), sample.w.ranks)


def by_method(samples: Sequence[Sample], name: str, repeats: int | None = None, **hparams: Any) -> Contestant:
    """The method itself, without a server: its aggregate of all modules, and a readout of each for every client."""
    method = build(name, **hparams)

    def run(states: list[Any], updates: list[list[Update]]) -> None:
        for state, us in zip(aggregate_all(method, states, updates), updates, strict=True):
            for u in us:
                method.readout(state, u.client, u.rank)

    parts = []
    for sample in samples:
        modules = range(len(sample.modules))
        states = [method.init(sample.seed(k), 0) for k in modules]
        parts.append((sample.times, partial(run, states, [sample.updates(k) for k in modules])))
    return Contestant(parts, repeats)


def served(samples: Sequence[Sample], name: str, **hparams: Any) -> Contestant:
    """`Server.aggregate` from raw factors, and a download for every client."""
    server = Server(build(name, **hparams))

    def run(state: Any, uploads: list[Upload]) -> None:
        after = server.aggregate(state, uploads)
        for upload in uploads:
            server.download(after, upload.client)

    parts = []
    for sample in samples:
        modules = range(len(sample.modules))
        uploads = [
            Upload(Client(f"c{i:02}", r), (i + 2) * 10, Adapter({f"m{k:02}": sample.modules[k][i] for k in modules}))
            for i, r in enumerate(sample.w.ranks)
        ]
        state = server.init(Adapter({f"m{k:02}": sample.seed(k) for k in modules}))
        parts.append((sample.times, partial(run, state, uploads)))
    return Contestant(parts)
