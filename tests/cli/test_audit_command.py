"""`fedlora audit` from the command line to its numbers and picture; kept uploads.

Kinds of evidence: *oracle* (errors and drifts by dense float64 matrices from what peft or safetensors hold; counts by
hand), *end-to-end* (real runs that keep uploads, directories that peft wrote, peft loading what was kept), *contract*
(bad input is one line and exit code 2).
"""

from __future__ import annotations

import json
import math
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import Tensor

import fedlora.runs.storing
import fedlora.training.loop
from fedlora import METHODS, Adapter, AdapterSpec, Client, LoRA, Upload, read_adapter, write_adapter
from fedlora.adapters.uploads import read_uploads, write_upload
from fedlora.analysis.audit import regauge
from fedlora.errors import FedLoRAError
from fedlora.runs.folder import RunFolder
from support.command_line import Said, cells, invoke, options
from support.federations import SHAPES, noise
from support.known_warnings import FUTURE_NAMES, NOT_ON_THE_HUB
from support.local_training import bits
from support.peft_models import dense_logits, peft_layers, saved, trained
from support.projects import FEDSA, configured, contents, peft_model, pixels, ran
from support.recorded import Call, recording
from support.tiny_models import bert, logits

pytestmark = [FUTURE_NAMES, NOT_ON_THE_HUB]

F64 = torch.float64
Pairs = list[dict[str, tuple[Tensor, Tensor]]]  # a client each: module -> B and A, float64, B A the whole update


def audited(*args: object) -> dict[str, Any]:
    """`fedlora audit ARGS --json`: method -> its numbers."""
    found: dict[str, Any] = json.loads(invoke("audit", *args, "--json").stdout)
    return found


# ---- a run that keeps its uploads ------------------------------------------------------------------------------------

EQUAL = ("clients.ranks=[4]", "clients.count=3")


@dataclass(frozen=True, eq=False)
class Kept:
    folder: RunFolder
    calls: list[Call]

    @property
    def examples(self) -> dict[str, int]:
        """Client -> how many examples it trains on, as the manifest counts them."""
        return {c: p["examples"] for c, p in self.folder.read_json("manifest.json")["data"]["train"].items()}


def kept(project: Path, out: Path, *sets: str) -> Kept:
    """`fedlora run` on a tiny model, two rounds, with what each client trained."""
    few = ("run.rounds=2", "train.max_steps=2", "evaluate.every=2")
    with recording() as calls:
        invoke("run", project / "config.toml", "--out", out, *options([*few, *sets]))
    return Kept(RunFolder(out), calls)


@pytest.fixture(scope="module", params=["glora", "ffa-lora", "fedex-lora"])
def run(request: pytest.FixtureRequest, project: Path, tmp_path_factory: pytest.TempPathFactory) -> Kept:
    """keep_uploads = "all"; ranks 2, 4, 4 where the method serves them. Tests read it and change nothing."""
    ranks = EQUAL if request.param == "fedex-lora" else ()
    sets = (f"method.name={request.param}", "run.keep_uploads=all", *ranks)
    return kept(project, tmp_path_factory.mktemp("kept") / "run", *sets)


def test_a_kept_upload_is_what_the_client_trained_bit_for_bit(run: Kept) -> None:
    """`Trained.adapter` of the real trainer, the frozen factor of ffa-lora and rolora included; whose, of how many
    examples (the manifest's) and of which round beside it. Nothing else is there."""
    assert sorted((call.round, call.client) for call in run.calls) == [
        (t, f"site-{k}") for t in (1, 2) for k in (1, 2, 3)
    ]
    for call in run.calls:
        directory = run.folder.uploads(call.round) / call.client
        adapter, spec = read_adapter(directory, scaling=2.0)
        assert bits(adapter) == bits(call.trained.adapter) and spec.scaling == 2.0
        facts = json.loads((directory / "upload.json").read_text())
        assert facts == {"client": call.client, "num_examples": run.examples[call.client], "round": call.round}
        assert {path.name for path in directory.iterdir()} == {
            "adapter_config.json", "adapter_model.safetensors", "README.md", "upload.json",
        }  # fmt: skip
    directories = [path for path in (run.folder.path / "uploads").rglob("*") if path.is_dir()]
    assert len(directories) == 2 + 6


def test_peft_loads_kept_uploads_as_the_models_that_were_trained(run: Kept, project: Path) -> None:
    """peft's own loader, against W0 + scaling B A dense in a plain model, with the trained head; peft's rank is r_i.
    fedex-lora's base change is no part of an upload (audit.md): its directory is relative to that round's base."""
    for call in run.calls[-3:]:
        model = peft_model(project, run.folder.uploads(2) / call.client).eval()
        updates = {name: 2.0 * lora.delta() for name, lora in call.trained.adapter.modules.items()}
        want = dense_logits(bert, updates, call.trained.adapter.heads)
        torch.testing.assert_close(logits(model), want, rtol=1e-4, atol=1e-5)
        assert {layer.r["default"] for layer in peft_layers(model).values()} == set(call.received.ranks.values())


def test_last_keeps_the_last_round_alone_and_none_keeps_nothing(project: Path, tmp_path: Path, undrawn: None) -> None:
    """config.py: "of the last round or of all"; the default is none. The kept bits do not depend on which."""
    last = kept(project, tmp_path / "last", "run.keep_uploads=last")
    assert [path.name for path in (last.folder.path / "uploads").iterdir()] == ["round-00002"]
    for call in last.calls[-3:]:
        adapter, _ = read_adapter(last.folder.uploads(2) / call.client, scaling=2.0)
        assert bits(adapter) == bits(call.trained.adapter)
    assert not (kept(project, tmp_path / "none").folder.path / "uploads").exists()


def test_a_refused_upload_is_not_kept(project: Path, tmp_path: Path, undrawn: None) -> None:
    """What did not count in the round would be averaged by the audit: with a quorum, NaN of site-2 is left out."""
    train = fedlora.training.loop.LocalTrainer.train

    def diverging(self: Any, download: Any, adapter: Any, position: int) -> Any:
        done = train(self, download, adapter, position)
        return (
            replace(done, adapter=done.adapter.map(lambda t: t * math.nan)) if download.client.id == "site-2" else done
        )

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(fedlora.training.loop.LocalTrainer, "train", diverging)
        folder = kept(project, tmp_path / "run", "run.keep_uploads=all", "server.quorum=2").folder
    for t in (1, 2):
        assert sorted(path.name for path in folder.uploads(t).iterdir()) == ["site-1", "site-3"]


def test_a_resumed_run_keeps_the_same_uploads(project: Path, tmp_path: Path) -> None:
    """Stopped after one round and gone on with: byte for byte the files of the run that was never stopped."""
    config = configured(project, "run.rounds=2", "run.keep_uploads=all", "train.max_steps=2")
    whole, stopped = ran(config, tmp_path / "whole"), ran(config, tmp_path / "stopped", 1)
    ran(config, stopped.path, resume=True)
    files = [{k: digest for k, (digest, _) in contents(f.path / "uploads").items()} for f in (whole, stopped)]
    assert files[0] == files[1] and len(files[0]) == 2 * 3 * 4


def test_a_half_stored_round_is_not_taken_for_a_whole_one(project: Path, tmp_path: Path) -> None:
    """A run killed while it stores round 2: the newest round with all of its uploads is round 1. To audit two of three
    clients without a word would be another federation's numbers."""
    written = []

    def killed(directory: Path, *args: Any, **kwargs: Any) -> None:
        if len(written) == 5:
            raise KeyboardInterrupt
        written.append(directory)
        write_upload(directory, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(fedlora.runs.storing, "write_upload", killed)
        with pytest.raises(KeyboardInterrupt):
            ran(configured(project, "run.rounds=3", "run.keep_uploads=all", "train.max_steps=1"), tmp_path / "run")
    found = RunFolder(tmp_path / "run").newest_uploads()
    assert found is not None and (found.round, len(found.folders)) == (1, 3)


@pytest.mark.parametrize("keep", ["last", "all"])
def test_local_factors_are_refused(project: Path, tmp_path: Path, main: Callable[..., Said], keep: str) -> None:
    """FedSA-LoRA's B never leaves its client: exit code 2, one line, before anything is written."""
    said = main(
        "run", project / "config.toml", "--out", tmp_path / "run", *options([*FEDSA, f"run.keep_uploads={keep}"])
    )
    assert "run.keep_uploads cannot store" in said.error()
    assert not (tmp_path / "run").exists()


# ---- dense oracles ---------------------------------------------------------------------------------------------------


def size(matrices: Mapping[str, Tensor]) -> float:
    return math.sqrt(sum(float(m.square().sum()) for m in matrices.values()))


def off(got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> float:
    """||got - want|| / ||want||, Frobenius, all modules together."""
    return size({m: got[m] - want[m] for m in want}) / size(want)


def mean(pairs: Pairs, p: Sequence[float]) -> dict[str, Tensor]:
    """sum_i p_i B_i A_i."""
    return {m: sum(w * x[m][0] @ x[m][1] for w, x in zip(p, pairs, strict=True)) for m in pairs[0]}  # type: ignore[misc]


def factor_average(pairs: Pairs, p: Sequence[float] | None) -> dict[str, Tensor]:
    """(sum_i p_i [B_i 0]) (sum_i p_i [A_i; 0]); without p the weights are ||B_i A_i|| by module, as in HetLoRA."""
    made = {}
    for m in pairs[0]:
        rank = max(x[m][0].shape[1] for x in pairs)
        sizes = [float((x[m][0] @ x[m][1]).norm()) for x in pairs]
        weights = p if p is not None else [s / sum(sizes) for s in sizes]
        B, A = (
            torch.zeros(pairs[0][m][0].shape[0], rank, dtype=F64),
            torch.zeros(rank, pairs[0][m][1].shape[1], dtype=F64),
        )
        for w, x in zip(weights, pairs, strict=True):
            r = x[m][0].shape[1]
            B[:, :r] += w * x[m][0]
            A[:r] += w * x[m][1]
        made[m] = B @ A
    return made


def consensus(pairs: Pairs, p: Sequence[float], rho: float) -> dict[str, Tensor]:
    """GLoRA: the mean, projected on the top R = ceil(rho sum r_i) eigenvectors of sum_i p_i U_i U_i^T."""
    made = {}
    for m, true in mean(pairs, p).items():
        P = torch.zeros(len(true), len(true), dtype=F64)
        ranks = [x[m][0].shape[1] for x in pairs]
        for w, x, r in zip(p, pairs, ranks, strict=True):
            U = torch.linalg.svd(x[m][0] @ x[m][1]).U[:, :r]
            P += w * U @ U.mT
        top = torch.linalg.eigh(P).eigenvectors[:, -math.ceil(rho * sum(ranks)) :]
        made[m] = top @ (top.mT @ true)
    return made


def moved(pairs: Pairs, condition: float, draw: int, names: Sequence[str]) -> Pairs:
    """The same updates in the audit's own coordinates of that draw (`audit.regauge`, tested in test_audit.py)."""
    made = []
    for name, x in zip(names, pairs, strict=True):
        upload = Upload(Client(name, 1), 1, Adapter({m: LoRA(B, A) for m, (B, A) in x.items()}))
        made.append({m: lora.factors for m, lora in regauge(upload, condition, seed=draw).adapter.modules.items()})
    return made


def relative(weights: Sequence[float]) -> list[float]:
    return [w / sum(weights) for w in weights]


# ---- directories: of equal ranks, written by us; of mixed ranks, written by peft -------------------------------------

SPEC = AdapterSpec({"base_model_name_or_path": "some/base", "target_modules": ["q", "v"]}, scaling=2.0)
WEIGHTS = (900.0, 300.0, 50.0)


def random_adapter(seed: str, rank: int, only: Sequence[str] = tuple(SHAPES)) -> Adapter:
    return Adapter(
        {
            m: LoRA(
                *(noise(shape, seed, m, f, dtype=torch.float32) for f, shape in (("B", (o, rank)), ("A", (rank, i))))
            )
            for m, (o, i) in SHAPES.items()
            if m in only
        }
    )


def in_float64(adapters: Sequence[Adapter], scaling: float) -> Pairs:
    """B times alpha / r, and A: the whole update as a pair."""
    return [
        {m: (scaling * lora.factors[0].double(), lora.factors[1].double()) for m, lora in a.modules.items()}
        for a in adapters
    ]


@dataclass(frozen=True)
class Sites:
    paths: list[Path]
    pairs: Pairs

    @property
    def names(self) -> list[str]:
        """What the audit calls them: an adapter without upload.json is named by its path."""
        return [str(path) for path in self.paths]


@pytest.fixture(scope="module")
def equal(tmp_path_factory: pytest.TempPathFactory) -> Sites:
    """Three adapters of rank 4 by `write_adapter`. Read-only."""
    root = tmp_path_factory.mktemp("equal")
    adapters = [random_adapter(c, 4) for c in "abc"]
    for c, adapter in zip("abc", adapters, strict=True):
        write_adapter(root / c, adapter, SPEC)
    return Sites([root / c for c in "abc"], in_float64(adapters, 2.0))


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Sites:
    """Three adapters by peft, of ranks 2, 4, 3 and alpha / r of 4, 1, 2. B and A as peft's own layers hold them."""
    root = tmp_path_factory.mktemp("mixed")
    paths, pairs = [], []
    for k, (rank, alpha) in enumerate(((2, 8), (4, 4), (3, 6))):
        config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=["query", "value"], task_type="SEQ_CLS")
        model = trained(bert, config, seed=k)
        paths.append(saved(model, root / f"site-{k}"))
        layers = peft_layers(model)
        pairs.append(
            {
                m: (layer.scaling["default"] * layer.lora_B["default"].weight.detach().double(),
                    layer.lora_A["default"].weight.detach().double())
                for m, layer in layers.items()
            }
        )  # fmt: skip
    return Sites(paths, pairs)


# ---- the numbers -----------------------------------------------------------------------------------------------------


def test_errors_of_mixed_ranks_are_the_dense_ones(mixed: Sites, undrawn: None) -> None:
    """Against dense float64, from peft's own tensors, in the units of the whole update: alpha / r differs by client."""
    p = relative(WEIGHTS)
    true = mean(mixed.pairs, p)
    methods = ["fedit", "glora", "glora gamma=1", "glora rho=0.5", "flora", "hetlora",
               "padded-average"]  # fmt: skip
    args = (
        "--weights",
        ",".join(map(str, WEIGHTS)),
        "--methods",
        ",".join(methods),
        "--conditions",
        "10",
        "--draws",
        1,
    )
    found = audited(*mixed.paths, *args)
    for name in ("glora", "glora gamma=1", "flora"):
        assert found[name]["error"] < 1e-12
    wanted = {
        "glora rho=0.5": consensus(mixed.pairs, p, 0.5),  # R = ceil(4.5)
        "hetlora": factor_average(mixed.pairs, None),
        "padded-average": factor_average(mixed.pairs, p),
    }
    for name, model in wanted.items():
        assert found[name]["error"] == pytest.approx(off(model, true), rel=1e-9), name
    assert "entry by entry" in found["fedit"]["refused"] and found["fedit"]["error"] is None
    assert {facts["server_rank"] for facts in found["glora rho=0.5"]["modules"].values()} == {5}


def test_fedits_drift_is_the_dense_one_at_each_condition(equal: Sites, undrawn: None) -> None:
    """The largest of the draws of ||avg(B_i Q_i) avg(Q_i^-1 A_i) - avg(B_i) avg(A_i)|| / ||avg(B_i) avg(A_i)||, dense.
    What clients get is that average too. It moves by whole parts already in orthogonal coordinates."""
    p = relative(WEIGHTS)
    args = ("--weights", "900,300,50", "--methods", "fedit", "--conditions", "1,10,300", "--draws", 2)
    found = audited(*equal.paths, *args)["fedit"]
    plain = factor_average(equal.pairs, p)
    for condition in (1.0, 10.0, 300.0):
        drawn = [off(factor_average(moved(equal.pairs, condition, k, equal.names), p), plain) for k in (0, 1)]
        assert found["drift"][str(condition)] == pytest.approx(max(drawn), rel=1e-9)
        assert found["readout_drift"][str(condition)] == pytest.approx(max(drawn), rel=1e-9)
        assert min(drawn) > 0.3


def test_who_moves_with_the_coordinates_and_who_only_hands_out_what_moved(equal: Sites, undrawn: None) -> None:
    """Factor averages move; fedex-lora's update does not, but the pair that clients get does;
    fedrot-lora undoes condition 1, which is orthogonal, and nothing else; flora hands out a fresh start."""
    found = audited(*equal.paths, "--conditions", "1,10", "--draws", 1)
    for name in ("fedit", "hetlora", "lora-fair", "padded-average"):
        assert min(found[name]["drift"].values()) > 0.1
    assert max(found["fedex-lora"]["drift"].values()) < 1e-9 < 0.1 < min(found["fedex-lora"]["readout_drift"].values())
    assert found["fedrot-lora"]["drift"]["1.0"] < 1e-9 < 0.1 < found["fedrot-lora"]["drift"]["10.0"]
    assert max(*found["flora"]["drift"].values(), *found["flora"]["readout_drift"].values()) < 1e-9


def test_all_is_every_method_and_says_why_not(equal: Sites, undrawn: None) -> None:
    """The default. Of adapters that were trained apart: fedsa-lora has no global model, ffa-lora and rolora need one
    common A; the reasons in JSON, the numbers empty."""
    found = audited(*equal.paths, "--conditions", "10", "--draws", 1)
    assert set(found) == set(METHODS)
    refused = {name: a["refused"] for name, a in found.items() if a["refused"]}
    assert set(refused) == {"fedsa-lora", "fedsvd", "ffa-lora", "rolora"}
    assert "no global model" in refused["fedsa-lora"]
    assert "A at one common value" in refused["ffa-lora"] and refused["ffa-lora"] == refused["rolora"]
    for name in refused:
        assert (found[name]["error"], found[name]["drift"], found[name]["modules"]) == (None, None, {})


# ---- --from-run ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("run", ["glora"], indirect=True)
def test_an_audit_of_a_run_is_of_its_newest_uploads(run: Kept, undrawn: None) -> None:
    """Round 2's, against dense float64 of what the clients trained there, with p_i by the manifest's examples. The
    directories by themselves, and round 1's, give other numbers only where they should."""
    calls = [c for c in run.calls if c.round == 2]
    pairs, p = in_float64([c.trained.adapter for c in calls], 2.0), relative([run.examples[c.client] for c in calls])
    methods = ("--methods", "padded-average, hetlora, glora, glora rho=0.5", "--conditions", "10", "--draws", 1)
    found = audited("--from-run", run.folder.path, *methods)
    true = mean(pairs, p)
    wanted = {
        "padded-average": factor_average(pairs, p),
        "hetlora": factor_average(pairs, None),
        "glora rho=0.5": consensus(pairs, p, 0.5),
    }
    for name, model in wanted.items():
        assert found[name]["error"] == pytest.approx(off(model, true), rel=1e-6), name
    assert found["glora"]["error"] < 1e-9 and max(found["glora"]["drift"].values()) < 1e-9
    first, second = (sorted(run.folder.uploads(t).iterdir()) for t in (1, 2))
    assert audited(*second, *methods) == found and audited(*first, *methods) != found
    alike = audited("--from-run", run.folder.path, *methods, "--weights", "1,1,1")["padded-average"]["error"]
    assert alike == pytest.approx(off(factor_average(pairs, [1 / 3] * 3), mean(pairs, [1 / 3] * 3)), rel=1e-6)


def test_it_says_which_round_and_loudly_where_the_run_went_on(project: Path, tmp_path: Path, undrawn: None) -> None:
    """Kept at the end of a short run, which was then made longer without keeping."""
    short = ("run.rounds=1", "train.max_steps=1", "run.keep_uploads=last")
    folder = ran(configured(project, *short), tmp_path / "run")
    arguments = ("audit", "--from-run", folder.path, "--methods", "glora", "--conditions", "10", "--draws", 1)
    said = invoke(*arguments)
    assert f"uploads of round 1 of {folder.path}" in said.stderr and "NOT THE LAST" not in said.stderr
    ran(configured(project, *short[1:2], "run.rounds=2"), folder.path, resume=True)
    assert re.search(f"NOT THE LAST ROUND: .*round 1.* {folder.path} .*2", invoke(*arguments).stderr)


def test_adapters_whose_a_differs_are_refused_wherever_the_first_one_lacks_the_module(
    tmp_path: Path, undrawn: None
) -> None:
    """b and c share A in attn.q and differ in attn.v, which a does not have: by definition nothing for ffa-lora, and no
    matter in which order they are named."""
    A = noise((4, SHAPES["attn.q"][1]), "A", dtype=torch.float32)
    for c, only in (("a", ("attn.q",)), ("b", tuple(SHAPES)), ("c", tuple(SHAPES))):
        adapter = random_adapter(c, 4, only)
        modules = {m: LoRA(x.factors[0], A if m == "attn.q" else x.factors[1]) for m, x in adapter.modules.items()}
        write_adapter(tmp_path / c, Adapter(modules), SPEC)
    for order in ("bca", "abc"):
        found = audited(*(tmp_path / c for c in order), "--methods", "ffa-lora", "--conditions", "10")
        assert found["ffa-lora"]["refused"] is not None


# ---- table and picture -----------------------------------------------------------------------------------------------


def test_the_table_shows_the_numbers_of_the_json(mixed: Sites, undrawn: None, wide: None) -> None:
    """audit.md: below 1e-3 as 2.7e-15, else a percentage; the two drifts at condition 10; GLoRA's cut in words; who
    cannot run, with the reason."""
    args = (*mixed.paths, "--methods", "fedit, glora, glora rho=0.5, hetlora", "--draws", 1)
    found = audited(*args)
    said = invoke("audit", *args).stdout
    rows = {cells(line)[0]: cells(line) for line in said.splitlines() if line.startswith("│")}
    assert set(rows) == {"glora", "glora rho=0.5", "hetlora"}
    for name, row in rows.items():
        audit = found[name]
        numbers = (audit["error"], audit["drift"]["10.0"], audit["readout_drift"]["10.0"])
        assert row[1:4] == [f"{x:.1e}" if x < 1e-3 else f"{x:.1%}" for x in numbers]
    assert row_words(rows["glora"]) == "R 9, nothing cut"
    assert row_words(rows["glora rho=0.5"]).startswith("R 5, union rank 9, least gap ")
    assert row_words(rows["hetlora"]) == ""
    assert "3 adapters, 2 modules, ranks 2, 3, 4" in said
    assert re.search("fedit not run: .*by entry", said)


def row_words(row: Sequence[str]) -> str:
    return row[4]


def test_a_picture_is_drawn_where_it_is_asked_for(mixed: Sites, tmp_path: Path) -> None:
    """Folders included; other methods draw another one."""
    places = [tmp_path / "some" / f"{name}.png" for name in ("glora", "hetlora")]
    for place in places:
        said = invoke("audit", *mixed.paths, "--methods", place.stem, "--plot", place, "--conditions", "10")
        assert f"plot: {place}" in said.stderr
    one, other = map(pixels, places)
    assert min(one.shape[:2]) > 300 and one[..., :3].std() > 0.05
    assert one.shape != other.shape or (one != other).any()


@pytest.mark.quick(1)
@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_a_picture_replaces_pictures_of_fedlora_alone(
    mixed: Sites, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, main: Callable[..., Said], ending: str
) -> None:
    """Before the work, whoever named it; what fedlora drew itself is drawn again."""
    monkeypatch.chdir(tmp_path)
    theirs = tmp_path / f"theirs.{ending}"
    theirs.write_bytes(b"of a paper")
    for command in (("inspect", *mixed.paths), ("audit", *mixed.paths, "--methods", "glora")):
        said = main(*command, "--plot", theirs)
        assert "fedlora did not draw" in said.complaint() and not said.out, command
        assert theirs.read_bytes() == b"of a paper"
    ours = tmp_path / f"ours.{ending}"
    assert [main("inspect", *mixed.paths, "--plot", ours).code for _ in range(2)] == [0, 0]
    Path("audit.png").write_bytes(b"mine")
    assert "audit.png exists" in main("audit", *mixed.paths, "--methods", "glora").complaint()
    (tmp_path / "folder.png").mkdir()
    assert "folder.png is a directory" in main("inspect", *mixed.paths, "--plot", "folder.png").complaint()


def test_without_matplotlib_there_is_a_hint_and_the_numbers(
    equal: Sites, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The extra is optional: the JSON is whole, the hint names what to install, and no picture is left."""
    monkeypatch.setitem(sys.modules, "fedlora.runs.plots", None)
    monkeypatch.delattr(fedlora.runs, "plots", raising=False)
    monkeypatch.chdir(tmp_path)
    said = invoke("audit", *equal.paths, "--methods", "glora", "--json", "--conditions", "10")
    assert json.loads(said.stdout)["glora"]["error"] < 1e-12
    assert "pip install 'fedlora[plot]'" in said.stderr and not list(tmp_path.iterdir())


# ---- refusals --------------------------------------------------------------------------------------------------------

REFUSED: dict[str, Any] = {
    "nothing to audit": ([], "adapter directories or --from-run RUN"),
    "one adapter": (["a"], "at least two adapters; got 1"),
    "other base": (["a", "other-base"], "different base models"),
    "twice by its name": (["me", "me-too"], "two of the adapters belong to client 'berlin'"),
    "too few weights": (["a", "b", "c", "--weights", "1,2"], "--weights has 2 numbers for 3 adapters"),
    "negative weight": (["a", "b", "--weights=-1,2"], "--weights takes finite numbers of at least 0"),
    "unknown method": (["a", "b", "--methods", "fedit,glroa"], "no method is called 'glroa'; did you mean 'glora'?"),
    "named twice": (["a", "b", "--methods", "glora gamma=1, fedit, glora  gamma=1"], "'glora gamma=1' is named twice"),
    "no such class": (["a", "b", "--methods", "nowhere:Method"], "the method 'nowhere:Method' cannot be made"),
    "no uploads": (["--from-run", "run"], "run holds no uploads; name the folder of one run"),
    "damaged upload.json": (["a", "damaged"], "upload.json is not JSON"),
    "hopeless condition": (["a", "b", "--methods", "fedit", "--conditions", "1e300"], "condition"),
    "unknown kind of picture": (["a", "b", "--methods", "glora", "--plot", "audit.xyz"], "xyz"),
    "picture below a file": (["a", "b", "--methods", "glora", "--plot", "a/README.md/a.png"], "a/README.md"),
}


@pytest.fixture(scope="module")
def shelf(equal: Sites, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Adapters and runs, good and bad. Read-only."""
    root = tmp_path_factory.mktemp("shelf")
    for path in equal.paths:
        shutil.copytree(path, root / path.name)
    write_adapter(
        root / "other-base", random_adapter("d", 4), AdapterSpec({**SPEC.config, "base_model_name_or_path": "x"})
    )
    for name in ("me", "me-too"):
        write_upload(root / name, Upload(Client("berlin", 4), 3, random_adapter(name, 4)), SPEC, round=1)
    (root / "run").mkdir()
    for name in ("glora/seed-0", "svd/seed-0"):
        (root / "compared" / name).mkdir(parents=True)
        (root / "compared" / name / "manifest.json").write_text("{}")
    write_upload(
        root / "lonely/uploads/round-00001/x", Upload(Client("x", 4), 3, random_adapter("x", 4)), SPEC, round=1
    )
    shutil.copytree(root / "b", root / "damaged")
    (root / "damaged" / "upload.json").write_text('{"client": "b", "num_ex')
    shutil.copytree(root / "b", root / "cut")
    weights = root / "cut" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    return root


@pytest.mark.parametrize(
    ("args", "says"),
    [pytest.param(case[0], case[1], id=name, marks=case[2:]) for name, case in REFUSED.items()],
)
def test_what_cannot_be_audited_is_one_line_and_code_2(
    shelf: Path, main: Callable[..., Said], monkeypatch: pytest.MonkeyPatch, args: list[str], says: str
) -> None:
    """As all bad input of this command line (audit.md): no traceback, no picture, nothing written."""
    monkeypatch.chdir(shelf)
    before = contents(shelf)
    said = main("audit", *args)
    assert says in said.error() and len([line for line in said.err.splitlines() if line.strip()]) == 1
    assert said.out == "" or "--plot" in args
    assert contents(shelf) == before


# ---- uploads as folders ----------------------------------------------------------------------------------------------


def uploaded(client: str, rank: int, n: float) -> Upload:
    adapter = random_adapter(client, rank)
    return Upload(Client(client, rank), n, Adapter(adapter.modules, {"classifier.weight": noise((3, 30), client)}))


def test_uploads_come_back_as_they_were_written(tmp_path: Path) -> None:
    """Ids, counts, order and bits; with scaling 2 read as the whole update, B is exactly twice what was written."""
    spec = AdapterSpec({**SPEC.config, "modules_to_save": ["classifier"]}, scaling=2.0)
    sent = [uploaded("berlin", 2, 120), uploaded("lyon", 5, 0.5), uploaded("aachen", 3, 0)]
    for k, upload in enumerate(sent):
        write_upload(tmp_path / str(k), upload, spec, round=7)
    got, back = read_uploads([tmp_path / str(k) for k in range(3)])
    assert [(u.client.id, u.num_examples) for u in got] == [("berlin", 120), ("lyon", 0.5), ("aachen", 0)]
    assert back.base_model == "some/base" and json.loads((tmp_path / "0" / "upload.json").read_text())["round"] == 7
    for one, other in zip(got, sent, strict=True):
        assert one.client.ranks(SHAPES) == other.client.ranks(SHAPES)
        doubled = {m: LoRA(2 * x.factors[0], x.factors[1]) for m, x in other.adapter.modules.items()}
        assert bits(one.adapter) == bits(Adapter(doubled, other.adapter.heads))


@pytest.mark.parametrize(
    "content",
    [b"[1, 2]", b'{"client": "a"}', b'{"client": "a", "num_examples": 3', b'{"client": "a", "num_examples": -3}',
     b'{"client": "a", "num_examples": NaN}', b'{"client": "", "num_examples": 3}'],
)  # fmt: skip
def test_a_damaged_upload_json_is_an_error_of_ours(equal: Sites, tmp_path: Path, content: bytes) -> None:
    """Never a default in its place: the weights of the audit would be wrong without a word."""
    shutil.copytree(equal.paths[0], tmp_path / "a")
    (tmp_path / "a" / "upload.json").write_bytes(content)
    with pytest.raises(FedLoRAError):
        read_uploads([tmp_path / "a", equal.paths[1]])
