"""`fedlora merge --method` and `--robust`. Expected values: those of a `Server` in memory; dense sums in float64 of
the adapters as written, with the weights that the rule gave."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fedlora import Adapter, Client, LoRA, Server, Upload, build, read_adapter, write_adapter
from fedlora.adapters.writer import AdapterSpec
from support.adapter_folders import saved, updates
from support.command_line import Said
from support.federations import noise

NAMES = [f"site-{k}" for k in range(6)]
ATTACKER = 4


@pytest.mark.parametrize("method", ["glora", "glora rho=0.5", "flexlora", "hetlora", "lora-fair"])
def test_a_merge_by_a_method_is_one_round_of_the_server(tmp_path: Path, main: Callable[..., Said], method: str) -> None:
    name, *settings = method.split()
    server = Server(build(name, **{key: float(value) for key, value in (s.split("=") for s in settings)}),
                    heads="frozen")  # fmt: skip
    folders = [saved(tmp_path, client, rank) for client, rank in (("a", 3), ("b", 3 if name == "lora-fair" else 2))]
    done = main("merge", *folders, "--weights", "1,3", "--method", method, "-o", tmp_path / "out")
    assert done.code == 0, done.err
    read = [read_adapter(folder)[0] for folder in folders]
    uploads = [Upload(Client(c, a.ranks), w, Adapter(a.modules)) for c, a, w in zip("ab", read, (1, 3), strict=True)]
    start = {m: LoRA(torch.zeros_like(lora.B), lora.A) for m, lora in read[0].modules.items()}
    state = server.aggregate(server.init(Adapter(start)), uploads)
    want = {m: lora.map(Tensor.double).delta() for m, lora in server.global_update(state).items()}
    for module, update in updates(tmp_path / "out").items():
        torch.testing.assert_close(update, want[module], rtol=0, atol=1e-5)


@pytest.mark.parametrize("method", ["fedsa-lora", "flora"])
def test_methods_that_need_more_than_adapters_are_refused(
    tmp_path: Path, main: Callable[..., Said], method: str
) -> None:
    folders = [saved(tmp_path, name, 2) for name in "ab"]
    done = main("merge", *folders, "--method", method, "-o", tmp_path / "o")
    assert done.code == 2 and method in done.err and done.err.count("\n") == 1
    assert not (tmp_path / "o").exists()


@pytest.fixture
def sites(tmp_path: Path) -> list[str]:
    """Six adapters of two modules; one pulls twenty times as far the other way."""
    A = noise((4, 24), "A", dtype=torch.float32)
    for k, name in enumerate(NAMES):
        pairs = {}
        for module in ("a.q", "a.v"):
            B = noise((32, 4), module, dtype=torch.float32) + 0.2 * noise((32, 4), k, module, dtype=torch.float32)
            pairs[module] = LoRA(B * (-20 if k == ATTACKER else 1), A)
        config = {"base_model_name_or_path": "tiny", "target_modules": list(pairs), "peft_type": "LORA"}
        write_adapter(tmp_path / name, Adapter(pairs), AdapterSpec(config, 8.0))
    return [str(tmp_path / name) for name in NAMES]


def dense(sites: list[str], weights: list[float]) -> dict[str, Tensor]:
    found = [updates(Path(site)) for site in sites]
    return {m: sum((w * u[m] for w, u in zip(weights, found, strict=True)), torch.zeros(32, 24)) for m in found[0]}


def off(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Of the second's size."""
    gap = sum(float((one[m] - other[m]).square().sum()) for m in other)
    return float((gap / sum(float(t.square().sum()) for t in other.values())) ** 0.5)


@pytest.mark.parametrize("method", ["svd", "svd energy=0.9"])
@pytest.mark.parametrize("rank", ["exact", "2"])
def test_the_error_and_the_weights_are_those_of_what_the_rule_made(
    tmp_path: Path, sites: list[str], main: Callable[..., Said], method: str, rank: str
) -> None:
    out = tmp_path / "merged"
    words = ["merge", *sites, "-o", str(out), "--robust", "multi-krum byzantine=1", "--rank", rank]
    refused = main(*words, "--method", "fedit")
    assert refused.code == 2 and "fedit averages B and A" in refused.err
    words += ["--method", method]
    said = main(*words)
    assert said.code == 0, said.err
    report = json.loads(main(*words, "--json", "--force").out)
    counts = report["counts"]
    assert counts[ATTACKER] == 0 and sum(counts) == pytest.approx(1)
    assert report["weights"] == pytest.approx([1 / 6] * 6)
    assert report["error"] == pytest.approx(off(updates(out), dense(sites, counts)), rel=1e-3, abs=1e-6)
    assert report["error"] < 0.7 and report["rule"] == "multi-krum (f = 1)"
    assert re.search(r"multi-krum \(f = 1\) .*0\.2, 0\.2, 0\.2, 0\.2, 0, 0\.2 \(1 left out\)", said.out)
    card = (out / "README.md").read_text()
    assert "| site-4 | 0.166667 |" in card and "1 of 6 adapters" in card


def test_a_bound_is_of_the_robust_mean(tmp_path: Path, sites: list[str], main: Callable[..., Said]) -> None:
    """A perfect robust merge passes, although it is far from the plain mean; a cut one is refused."""
    words = ["merge", *sites, "-o", str(tmp_path / "m"), "--robust", "multi-krum byzantine=1", "--max-error", "0.01"]
    assert main(*words).code == 0
    assert "multi-krum" in main(*words, "--force", "--rank", "2").complaint()


def test_an_adapter_of_weight_zero_is_told_beside_a_rule(
    tmp_path: Path, sites: list[str], main: Callable[..., Said]
) -> None:
    """It takes no part in the round, so the rule has no verdict on it."""
    words = ["merge", *sites, "--weights", "1,1,1,1,1,0", "--robust", "geometric-median", "--method", "glora"]
    done = main(*words, "-o", str(tmp_path / "m"), "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["counts"][5] == 0
