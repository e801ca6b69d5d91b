"""Server aggregation: ours, the paper's to the letter, the baselines and other people's code, on workloads W1 to W5.

    python benchmarks/aggregation.py [--workloads W1,W2,W3,W4,W5] [--quick] [--repeats 7] [--json FILE]
                                     [--compare FILE]

Core rows start from gauge-fixed clients (U_i, Ahat_i), as the paper counts (its QR is on the client), and end with a
readout for every client. All-in rows start from raw (B_i, A_i) and end there too. `Server.aggregate` rows add the
server's checks and a download of every client. Rows that run on fewer modules than the workload has are counted up,
which the table says. One thread, one process, contestants interleaved: ratios count, absolute times do not. GLoRA's
core gets the modules of a shape at once, as a server has them; its reference and the thin SVD get them one by one
(`baseline.thin_svd`; bare: without its signs and its cut).

The floor is computed: every factor read and the server's update written once, at the memory bandwidth of this moment,
plus the flops of the cheapest known route, at the rate of float32 products of the workload's shape. With S = sum r_i
and R = ceil(rho S) that is d_out S^2 + 2 S R (d_out + d_in) + d_in R^2, and where S is near d_out or above it (W5), the
mean update and its Gram matrix, 2 d_out d_in S + min^2 max.

docs/images/draw_times.py draws the picture of benchmarks.md, from benchmarks/results/aggregation.json.
--compare FILE: each row over the thin SVD core, now and in a result that --json wrote on such a machine.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import math
import sys
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from baseline import bare_thin_svd, thin_svd
from fedlora import Adapter, Client, LoRA, Server, Upload, build
from fedlora.core.lora import stack
from fedlora.core.method import Update, aggregate_all
from fedlora.linalg import Budget, Spectrum, consensus_mean, consensus_means, rank_tolerance
from fedlora.linalg.weighted_mean import weighted_mean
from fedlora.methods._spectral import instantiate
from measure import Contestant, as_json, contest, elapsed, machine, median, on_stderr, spread
from workloads import LIGHT_W5, WORKLOADS, Core, Shape, Workload, draw_factors, gauge_fixed

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from support import families  # type: ignore[import-not-found]

RHOS = (0.1, 0.5, 1.0)
LIMIT = 40.0  # seconds after which a contestant gets no more repeats
U32 = rank_tolerance(torch.float32)

CORE, PAPER, FLOOR = "GLoRA core, rho = {:g}", "GLoRA as the paper writes it, float32, rho = {:g}", "floor, rho = {:g}"
REFERENCE, ALL_IN = "GLoRA core, reference, rho = 1", "GLoRA all-in, rho = 1"
THIN, THIN_ALL_IN, BARE = "thin SVD core (QR, QR, SVD)", "thin SVD all-in", "thin SVD core, bare"
DENSE = "FlexLoRA dense, all-in"
SERVED, SERVED_THIN = "Server.aggregate + downloads: glora, rho = {:g}", "Server.aggregate + downloads: flexlora, thin"


# --------------------------------------------------------------------------------------------------- what is run


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


def each(
    samples: Sequence[Sample], work: Callable[[Sample, int], object], repeats: int | None = None, times: float = 1.0
) -> Contestant:
    """`work(sample, k)` for every module k of the samples, one after the other."""

    def loop(sample: Sample) -> None:
        for k in range(len(sample.modules)):
            work(sample, k)

    return Contestant([(times * sample.times, partial(loop, sample)) for sample in samples], repeats)


def together(samples: Sequence[Sample], work: Callable[[Sample], object]) -> Contestant:
    """`work(sample)` for all modules of a sample at once, as the server has them."""
    return Contestant([(sample.times, partial(work, sample)) for sample in samples])


def read_out(spectrum: Spectrum, ranks: Sequence[int]) -> None:
    for k, r in enumerate(ranks):
        chosen = torch.arange(min(r, spectrum.rank))
        instantiate(spectrum, chosen, r, split="balanced", start=None, seed=(0, 0, str(k)))


def glora_core(sample: Sample, rho: float) -> None:
    budgets = [Budget(sample.w.budget(rho))] * len(sample.cores)
    for made in consensus_means([core.sent for core in sample.cores], budgets):
        read_out(made.spectrum, sample.w.ranks)


def glora_reference(sample: Sample, k: int) -> None:
    read_out(consensus_mean(sample.cores[k].sent, Budget(sample.w.S)).spectrum, sample.w.ranks)


def glora_paper_float32(sample: Sample, k: int, rho: float) -> None:
    """The paper's pseudo-code as one would type it in torch, float32: Gram, eigh, a projection loop, thin SVD."""
    p, N = sample.w.weights, sample.cores[k].N
    bases = [U for U, _ in sample.cores[k].sent.pairs]
    M = torch.cat([math.sqrt(x) * U for x, U in zip(p, bases, strict=True)], dim=1)
    R = sample.w.budget(rho)
    values, V = torch.linalg.eigh(M.T @ M)
    U_ref = M @ (V.flip(1)[:, :R] / values.flip(0)[:R].clamp(min=1e-12).sqrt())
    Z, at = torch.zeros(R, N.shape[1]), 0
    for x, U in zip(p, bases, strict=True):
        Z += x * (U_ref.T @ U) @ (N[at : at + U.shape[1]] / math.sqrt(x))
        at += U.shape[1]
    O, s, Vh = torch.linalg.svd(Z, full_matrices=False)
    U_s = U_ref @ O
    for r in sample.w.ranks:
        _ = U_s[:, :r] * s[:r].sqrt(), s[:r].sqrt()[:, None] * Vh[:r]


def thin_svd_core(sample: Sample, k: int) -> None:
    read_out(thin_svd(sample.cores[k].M, sample.cores[k].N, U32), sample.w.ranks)


def bare_thin_svd_core(sample: Sample, k: int) -> None:
    read_out(bare_thin_svd(sample.cores[k].M, sample.cores[k].N), sample.w.ranks)


def thin_svd_all_in(sample: Sample, k: int) -> None:
    B, A = stack(sample.modules[k], sample.w.weights).factors
    read_out(thin_svd(B, A, U32), sample.w.ranks)


def mean_factors(sample: Sample, k: int) -> LoRA:
    """FedIT: all clients get the same pair, so there is nothing to read out."""
    B, A = zip(*(lora.factors for lora in sample.modules[k]), strict=True)
    return LoRA(weighted_mean(B, sample.w.weights), weighted_mean(A, sample.w.weights))


def fedex_dense(sample: Sample, k: int) -> None:
    """The mean pair, and sum p_i B_i A_i - mean(B) mean(A) as a matrix."""
    stack([*sample.modules[k], mean_factors(sample, k)], [*sample.w.weights, -1.0]).delta()


def by_method(
    samples: Sequence[Sample], name: str, repeats: int | None = None, times: float = 1.0, **hparams: Any
) -> Contestant:
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
        parts.append((times * sample.times, partial(run, states, [sample.updates(k) for k in modules])))
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


# -------------------------------------------------------------------------------------------- other people's code


def peft_merge(samples: Sequence[Sample], repeats: int, times: float) -> Contestant:
    """peft's `add_weighted_adapter(combination_type="svd")` on bare linear layers that hold every client's factors."""
    from peft import LoraConfig, get_peft_model

    def loaded(sample: Sample) -> Any:
        layers = {f"m{k}": torch.nn.Linear(sample.shape.d_in, sample.shape.d_out, bias=False)
                  for k in range(len(sample.modules))}  # fmt: skip
        configs = {f"c{i}": LoraConfig(r=r, lora_alpha=r, target_modules=list(layers))
                   for i, r in enumerate(sample.w.ranks)}  # fmt: skip
        model = get_peft_model(torch.nn.ModuleDict(layers), configs["c0"], adapter_name="c0")
        for name, config in list(configs.items())[1:]:
            model.add_adapter(name, config)
        for k, loras in enumerate(sample.modules):
            layer = model.base_model.model[f"m{k}"]
            for i, lora in enumerate(loras):
                B, A = lora.factors
                layer.lora_B[f"c{i}"].weight.data, layer.lora_A[f"c{i}"].weight.data = B, A
        return model

    def merge(model: Any, w: Workload) -> None:
        names = [f"c{i}" for i in range(len(w.ranks))]
        model.add_weighted_adapter(names, w.weights, "merged", combination_type="svd", svd_rank=max(w.ranks))
        model.delete_adapter("merged")

    return Contestant([(times * s.times, partial(merge, loaded(s), s.w)) for s in samples], repeats)


@cache
def chorus() -> Any | None:
    """chorus-fl's exact aggregator; None where it is not installed."""
    spec = importlib.util.find_spec("chorus")
    if spec is None:
        return None
    package, server = types.ModuleType("chorus"), types.ModuleType("chorus.server")
    package.__path__ = list(spec.submodule_search_locations or ())  # its __init__ wants a web client
    server.__path__ = [f"{path}/server" for path in package.__path__]
    sys.modules |= {"chorus": package, "chorus.server": server}
    return importlib.import_module("chorus.server.aggregation").FedExLoRA


def chorus_merge(aggregator: Any, samples: Sequence[Sample], repeats: int, times: float) -> Contestant:
    """`FedExLoRA().aggregate`, whose output has the largest rank."""

    def sent(sample: Sample, client: int) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for k, loras in enumerate(sample.modules):
            B, A = loras[client].factors
            tensors |= {f"m{k}.lora_A.weight": A, f"m{k}.lora_B.weight": B}
        return tensors

    parts = []
    for s in samples:
        uploads = [sent(s, i) for i in range(len(s.w.ranks))]
        parts.append((times * s.times, lambda s=s, uploads=uploads: aggregator().aggregate(uploads, s.w.weights)))
    return Contestant(parts, repeats)


# ---------------------------------------------------------------------------------------------------- a workload


def dense_samples(w: Workload, samples: Sequence[Sample]) -> tuple[list[Sample], float]:
    """For contestants that take a dense SVD: few modules, none above 4096 x 4096, and how to count up to the rest."""
    few = [s.first(2 if s.shape.d_out < 1000 else 1) for s in samples if s.shape.d_out * s.shape.d_in <= 4096**2]

    def cost(some: Sequence[Sample]) -> float:
        sizes = [(s.shape.d_out, s.shape.d_in, s.shape.count) for s in some]
        return sum(n * d_out * d_in * (w.S + min(d_out, d_in)) for d_out, d_in, n in sizes)

    return few, cost(samples) / cost(few)


def contestants(w: Workload, samples: Sequence[Sample], quick: bool) -> dict[str, Contestant]:
    dense, times = dense_samples(w, samples)
    largest = max(s.shape.d_out for s in dense)
    few = (2 if quick else 7) if largest < 1000 else 1 if quick or largest > 2048 else 3
    rows = {
        "HetLoRA, dense norms": by_method(samples, "hetlora", None if largest < 1000 else few, solver="dense"),
        "HetLoRA, thin norms": by_method(samples, "hetlora"),
        "FLoRA: stack": each(samples, lambda s, k: stack(s.modules[k], w.weights)),
        THIN: each(samples, thin_svd_core),
        BARE: each(samples, bare_thin_svd_core),
        THIN_ALL_IN: each(samples, thin_svd_all_in),
        SERVED_THIN: served(samples, "flexlora"),
        **{PAPER.format(rho): each(samples, partial(glora_paper_float32, rho=rho)) for rho in RHOS},
        **{CORE.format(rho): together(samples, partial(glora_core, rho=rho)) for rho in RHOS},
        REFERENCE: each(samples, glora_reference),
        ALL_IN: by_method(samples, "glora"),
        **{SERVED.format(rho): served(samples, "glora", rho=rho) for rho in (0.1, 1.0)},
    }
    if len(set(w.ranks)) == 1:
        rows["FedIT: weighted average"] = each(samples, mean_factors)
        rows["FedEx-LoRA, dense residual"] = each(samples, fedex_dense, None if largest < 1000 else few)
        rows["FedEx-LoRA, factored residual"] = by_method(samples, "fedex-lora")
    rows[DENSE] = by_method(dense, "flexlora", few, times, solver="dense")
    if importlib.util.find_spec("peft"):
        rows["peft, svd merge"] = peft_merge(dense, few, times)
    if chorus():
        rows["chorus-fl, FedExLoRA"] = chorus_merge(chorus(), dense, few, times)
    return rows


def best(work: Callable[[], object], repeats: int = 7) -> float:
    work()
    return min(elapsed(work) for _ in range(repeats))


def bandwidth() -> float:
    """Bytes a second that a large copy reads and writes."""
    here = torch.ones(2**26)
    there = torch.empty_like(here)
    return 2 * here.nbytes / best(lambda: there.copy_(here))


def gemm_rate(d: int, S: int) -> float:
    """Flops a second of float32 products between d x S and S x S matrices, of the faster kind."""
    X, Y = torch.randn(d, S), torch.randn(S, S)
    return 2 * d * S * S / min(best(lambda: X.T @ X), best(lambda: X @ Y))


def floors(w: Workload) -> dict[str, float]:
    """Row -> seconds, computed from what this machine does now."""
    speed = bandwidth()
    rates = {shape: gemm_rate(max(shape.d_out, shape.d_in), w.S) for shape in w.shapes}

    def seconds(shape: Shape, rho: float) -> float:
        S, d_out, d_in = w.S, shape.d_out, shape.d_in
        R = min(w.budget(rho), d_out, d_in)
        in_factors = d_out * S**2 + 2 * S * R * (d_out + d_in) + d_in * R**2
        of_the_mean = 2 * d_out * d_in * S + d_out * d_in * min(d_out, d_in)
        return 4 * (S + R) * (d_out + d_in) / speed + min(in_factors, of_the_mean) / rates[shape]

    return {FLOOR.format(rho): sum(s.count * seconds(s, rho) for s in w.shapes) for rho in RHOS}


@dataclass(frozen=True)
class Row:
    """ms: of all modules, the median. spread: None for fewer than four repeats. note: how it was counted up."""

    ms: float
    spread: float | None
    repeats: int
    note: str


def run(w: Workload, repeats: int, quick: bool) -> dict[str, Row]:
    on_stderr(f"{w.name}: drawing and gauge-fixing the clients")
    samples = samples_of(w, quick)
    everyone = contestants(w, samples, quick)
    times = contest(everyone, repeats * w.repeats, LIMIT, lambda what: on_stderr(f"{w.name}: {what}"))
    on_stderr("")
    rows = {name: Row(1e3 * seconds, None, 0, "computed") for name, seconds in floors(w).items()}
    for name, t in times.items():
        note = counted(everyone[name], len(w.shapes))
        rows[name] = Row(1e3 * median(t), spread(t) if len(t) > 3 else None, len(t), note)
    return rows


def counted(contestant: Contestant, shapes: int) -> str:
    factors = sorted({round(times, 1) for times, _ in contestant.parts})
    if factors == [1.0]:
        return ""
    note = f"x {' to '.join(f'{x:g}' for x in (factors[0], factors[-1])[: len(factors)])} from fewer modules"
    return note if len(contestant.parts) == shapes else f"{note}, larger shapes by d_out d_in (S + min)"


# ------------------------------------------------------------------------------------------------------ accuracy


def core_error(core: Core, mean: Tensor) -> float:
    """The core at rho = 1 against the dense float64 mean of the factors as they were stored, relative to its terms."""
    (made,) = consensus_means([core.sent], [Budget(core.M.shape[1])])
    s = made.spectrum
    gap = (s.U.double() * s.s.double()) @ s.Vh.double() - mean
    return float(torch.linalg.vector_norm(gap)) / float(torch.linalg.vector_norm(core.N.double()))


def error_on(w: Workload) -> float:
    """On the first module."""
    loras = draw_factors(w.shapes[0].d_out, w.shapes[0].d_in, w.ranks, 0)
    core = gauge_fixed(loras, w.weights)
    return core_error(core, stack([lora.map(Tensor.double) for lora in loras], w.weights).delta())


def hard_errors() -> dict[str, float]:
    """Hard family of tests/support/families.py -> the worst of three shapes; the last has d_out below sum r_i."""
    errors: dict[str, float] = {}
    for name in families.FAMILIES:
        for d_out, d_in in ((48, 40), (40, 60), (24, 70)):
            case = families.family(name, d_out=d_out, d_in=d_in)
            loras = [LoRA(*map(torch.from_numpy, case.uploads[c])) for c in sorted(case.uploads)]
            core = gauge_fixed(loras, [case.weights[c] for c in sorted(case.uploads)])
            error = core_error(core, torch.from_numpy(families.mean_update(case)))
            errors[name] = max(errors.get(name, 0.0), error)
    return errors


# ------------------------------------------------------------------------------------------------------- targets


@dataclass(frozen=True)
class Verdict:
    target: str
    measured: float
    met: bool


# Of W1 to W4, by rho: the core over its floor at most, the paper's way over the core at least; dense over core.
OVER_FLOOR = {"W1": (24, 14, 10), "W2": (6.5, 4, 3), "W3": (6, 3.7, 3.1), "W4": (4, 2.8, 2.4)}
OVER_CORE = {"W1": (1.8, 2.1, 2.4), "W2": (2, 2, 2.4), "W3": (2, 2.4, 2.6), "W4": (2.3, 2.4, 3)}
SERVER_OVER_THIN = {"W1": 1.5, "W2": 1.0, "W3": 1.0, "W4": 1.2}
DENSE_OVER_CORE = {"W1": 250, "W2": 220, "W3": 350}
TOLERANCE = 1.05  # on the 1.0 of W5


def verdicts(w: Workload, rows: Mapping[str, Row], hard: Mapping[str, float]) -> list[Verdict]:
    made: list[Verdict] = []

    def judge(over: str, under: str, sense: str, bound: float) -> None:
        got = rows[over].ms / rows[under].ms
        made.append(
            Verdict(f"{over} / {under} {sense} {bound:g}", got, got <= bound if sense == "<=" else got >= bound)
        )

    if w.name in OVER_FLOOR:
        judge(CORE.format(1), THIN, "<=", 1.0)
        judge(SERVED.format(1), THIN, "<=", SERVER_OVER_THIN[w.name])
        for rho, floor, paper in zip(RHOS, OVER_FLOOR[w.name], OVER_CORE[w.name], strict=True):
            judge(CORE.format(rho), FLOOR.format(rho), "<=", floor)
            judge(PAPER.format(rho), CORE.format(rho), ">=", paper)
        if w.name in DENSE_OVER_CORE:
            judge(DENSE, CORE.format(1), ">=", DENSE_OVER_CORE[w.name])
    else:
        for mine, thin in ((CORE.format(1), THIN), (ALL_IN, THIN_ALL_IN)):
            judge(mine, min((thin, DENSE), key=lambda name: rows[name].ms), "<=", TOLERANCE)
    error, worst = error_on(w), max(hard, key=lambda name: hard[name])
    made.append(Verdict("error of GLoRA core, rho = 1, on this workload <= 3e-7", error, error <= 3e-7))
    target = f"error of GLoRA core, rho = 1, on {len(hard)} hard families <= 3e-7 (worst: {worst})"
    made.append(Verdict(target, hard[worst], hard[worst] <= 3e-7))
    return made


# -------------------------------------------------------------------------------------------------------- output


def show(w: Workload, rows: Mapping[str, Row], judged: Sequence[Verdict]) -> None:
    shapes = ", ".join(f"{s.count} of {s.d_out} x {s.d_in}" for s in w.shapes)
    print(f"\n## {w.name}: {w.what}; {shapes}; sum r_i = {w.S}\n")
    print("| | ms, all modules | spread | repeats | x GLoRA core |\n|---|---:|---:|---:|---:|")
    for name, row in sorted(rows.items(), key=lambda item: item[1].ms):
        note = f" ({row.note})" if row.note else ""
        scatter = "-" if row.spread is None else f"{row.spread:.0%}"
        ratio = row.ms / rows[CORE.format(1)].ms
        print(f"| {name}{note} | {row.ms:.{2 if row.ms < 10 else 1}f} | {scatter} | {row.repeats} | {ratio:.2f} |")
    print("\n| target | measured | met |\n|---|---:|---|")
    for v in judged:
        print(f"| {v.target} | {v.measured:.{'1e' if 'error' in v.target else '2f'}} | {'yes' if v.met else 'NO'} |")
    sys.stdout.flush()


def compare(now: Mapping[str, Any], then: Mapping[str, Any]) -> None:
    """Each row over the thin SVD core, against the same in an earlier result."""
    for part in ("processor", "torch"):
        if now["machine"].get(part) != then["machine"].get(part):
            print(
                f"\nNot compared: {part} is {now['machine'].get(part)!r}, it was {then['machine'].get(part)!r}; "
                "ratios of another machine or torch say nothing about this code."
            )
            return
    print(f"\n## Against {then['machine']['commit']}: row / {THIN}\n")
    print("| | then | now | now / then | |\n|---|---:|---:|---:|---|")
    for name in sorted(set(now["workloads"]) & set(then["workloads"])):
        rows, before = now["workloads"][name]["rows"], then["workloads"][name]["rows"]
        timed = {row for row in set(rows) & set(before) if rows[row]["repeats"]}
        for row in sorted(timed - {THIN}):
            new, old = rows[row]["ms"] / rows[THIN]["ms"], before[row]["ms"] / before[THIN]["ms"]
            flag = "slower" if new / old > 1.15 else ""
            print(f"| {name}: {row} | {old:.3f} | {new:.3f} | {new / old:.2f} | {flag} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", type=lambda text: text.split(","))
    parser.add_argument("--repeats", type=int, help="7; with --quick 3, of W5 2; three times as many of W1")
    parser.add_argument("--quick", action="store_true", help="W1, W2 and two profiles of W5, on few modules")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--compare", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of peft
    before = json.loads(args.compare.read_text()) if args.compare else None

    named = args.workloads or (["W1", "W2", "W5"] if args.quick else list(WORKLOADS))
    chosen = [w for name in named for w in WORKLOADS[name]]
    if args.quick:
        chosen = [w for w in chosen if not w.name.startswith("W5") or w.name in LIGHT_W5]
    for name, there in (("peft", importlib.util.find_spec("peft")), ("chorus-fl", chorus())):
        if not there:
            print(f"{name} is not installed: left out.")

    hard = hard_errors()
    found = {w.name: run_and_show(w, args.repeats, args.quick, hard) for w in chosen}
    results = {
        "machine": machine(),
        "quick": args.quick,
        "hard_errors": hard,
        "workloads": {
            name: {"rows": {n: vars(r) for n, r in rows.items()}, "verdicts": [vars(v) for v in judged]}
            for name, (rows, judged) in found.items()
        },
    }
    if args.json:
        args.json.write_text(as_json(results) + "\n")
    if before:
        compare(results, before)


def run_and_show(
    w: Workload, repeats: int | None, quick: bool, hard: Mapping[str, float]
) -> tuple[dict[str, Row], list[Verdict]]:
    usual = (2 if w.name.startswith("W5") else 3) if quick else 7
    rows = run(w, repeats or usual, quick)
    judged = verdicts(w, rows, hard)
    show(w, rows, judged)
    return rows, judged


if __name__ == "__main__":
    main()
