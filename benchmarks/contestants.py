"""What several benchmarks run: modules with their clients, the thin SVD beside them, a method alone and in a server.

Imported by the benchmarks, not run by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from baseline import Thin, bare_thin_svd, thin_svd
from fedlora import Adapter, Client, LoRA, Server, Upload, build
from measure import Contestant
from workloads import Core, Shape, Workload, draw_factors, gauge_fixed

THIN, BARE = "thin SVD core", "a bare thin SVD, as one would type it"
U32 = 2.0**-24


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

    def first(self, modules: int) -> Sample:
        return Sample(self.w, self.shape, self.modules[:modules], self.cores[:modules])

    @property
    def times(self) -> float:
        return self.shape.count / len(self.modules)


def samples_of(w: Workload, quick: bool, eps: float = 0.3) -> list[Sample]:
    samples = []
    for shape in w.shapes:
        modules = [draw_factors(shape.d_out, shape.d_in, w.ranks, seed, eps) for seed in range(shape.run(quick))]
        samples.append(Sample(w, shape, modules, [gauge_fixed(loras, w.weights) for loras in modules]))
    return samples


def each(samples: Sequence[Sample], work: Callable[[Sample, int], object], repeats: int | None = None) -> Contestant:
    """`work(sample, k)` for every module k of the samples, one after the other."""

    def loop(sample: Sample) -> None:
        for k in range(len(sample.modules)):
            work(sample, k)

    return Contestant([(sample.times, partial(loop, sample)) for sample in samples], repeats)


def together(samples: Sequence[Sample], work: Callable[[Sample], object]) -> Contestant:
    """`work(sample)` for all modules of a sample at once, as the server has them."""
    return Contestant([(sample.times, partial(work, sample)) for sample in samples])


def read_out(made: Thin, ranks: Sequence[int]) -> None:
    """A balanced pair for every client."""
    root = made.s.sqrt()
    for r in ranks:
        _ = made.U[:, :r] * root[:r], root[:r, None] * made.Vh[:r]


def thin_svd_core(sample: Sample, k: int) -> None:
    """From gauge-fixed clients, stacked and weighed."""
    read_out(thin_svd(sample.cores[k].M, sample.cores[k].N, U32), sample.w.ranks)


def bare_thin_svd_of(sample: Sample, k: int) -> None:
    """From raw factors, stacked and weighed here."""
    Bs, As = zip(*(lora.factors for lora in sample.modules[k]), strict=True)
    weighed = [p * B for p, B in zip(sample.w.weights, Bs, strict=True)]
    read_out(bare_thin_svd(torch.cat(weighed, dim=1), torch.cat(As)), sample.w.ranks)


def flexlora_dense(sample: Sample, k: int) -> None:
    """FlexLoRA as its paper times it: the full SVD of the dense mean, and a readout for every client."""
    mean = sum(p * lora.delta() for p, lora in zip(sample.w.weights, sample.modules[k], strict=True))
    U, s, Vh = torch.linalg.svd(mean, full_matrices=False)
    for r in sample.w.ranks:
        _ = U[:, :r] * s[:r], Vh[:r].clone()


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
