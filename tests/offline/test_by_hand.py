"""Rounds by hand, models with adapters written in, budgets. Kinds of evidence: contract (`Server` in memory is the
reference for rounds by hand, bit for bit), oracle (peft's own merge_and_unload for full models; brute force for
budgets), end to end (`fedlora train`, `merge`, `apply` on tiny models from disk).
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from fedlora import Adapter, Client, Server, Upload, build, read_adapter
from fedlora.adapters.truncation import ModuleReport, budget_ranks
from support.adapter_folders import SHAPES, saved
from support.command_line import Said
from support.known_warnings import FUTURE_NAMES, LORA_BIAS
from support.tiny_models import bert, gpt2, llama
from support.training_data import classification, instructions, save_model

pytestmark = [FUTURE_NAMES, LORA_BIAS]


def updates(folder: Path) -> dict[str, Tensor]:
    adapter, _ = read_adapter(folder)
    return {name: lora.map(Tensor.double).delta() for name, lora in adapter.modules.items()}


# ---- rounds by hand --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["glora", "glora rho=0.5", "flexlora", "hetlora", "svd", "lora-fair"])
def test_two_rounds_by_hand_are_two_rounds_of_the_server(
    tmp_path: Path, main: Callable[..., Said], method: str
) -> None:
    """What clients get back is what `Server.download` gives them in memory, after each of two rounds: with history."""
    name, *settings = method.split()
    settings = settings if name != "svd" else ["energy=1.0"]  # on files svd cuts only where --rank says so
    hparams = {key: float(value) for key, value in (setting.split("=") for setting in settings)}
    server = Server(build(name, **hparams), heads="frozen", missing="zero")
    ranks = {"a": 2, "b": 3} if name != "lora-fair" else {"a": 3, "b": 3}
    state = None
    for number in (1, 2):
        folders = [saved(tmp_path / str(number), client, rank) for client, rank in ranks.items()]
        for folder, count in zip(folders, (10, 30), strict=True):
            facts = {"client": folder.name, "num_examples": count, "round": number}
            (folder / "upload.json").write_text(json.dumps(facts))
        out = tmp_path / f"out{number}"
        done = main("merge", *folders, "--weights-from", "num_examples", "--method", method, "--state",
                      tmp_path / "state", "--readout", "same", "-o", out)  # fmt: skip
        assert done.code == 0, done.err
        assert f"round {number} of {method}" in done.out

        read = {client: read_adapter(folder)[0] for client, folder in zip(ranks, folders, strict=True)}
        uploads = [Upload(Client(c, read[c].ranks), w, Adapter(read[c].modules)) for c, w in (("a", 0.25), ("b", 0.75))]
        if state is None:
            start = {m: lora.map(Tensor.clone) for m, lora in read["b"].modules.items()}
            for lora in start.values():
                lora.factors[0].zero_()
            state = server.init(Adapter(start))
        state = server.aggregate(state, uploads)
        want = {m: lora.map(Tensor.double).delta() for m, lora in server.global_update(state).items()}
        for module, update in updates(out).items():
            torch.testing.assert_close(update, want[module], rtol=0, atol=1e-5)
        for client in ranks:
            got, _ = read_adapter(out / "clients" / client)
            down = server.download(state, Client(client, read[client].ranks)).adapter
            assert set(got.heads) == set(read[client].heads)
            for module, lora in down.modules.items():
                for mine, theirs in zip(got.modules[module].factors, lora.factors, strict=True):
                    assert torch.equal(mine, theirs), (number, client, module)


def test_a_state_is_of_one_method_and_one_base(tmp_path: Path, main: Callable[..., Said]) -> None:
    a, b = saved(tmp_path, "a", 2), saved(tmp_path, "b", 2)
    assert main("merge", a, b, "--method", "glora", "--state", tmp_path / "s", "-o", tmp_path / "o").code == 0
    for more, said in ((["fedit"], "state of method 'glora'"), (["glora rho=0.5"], "state of method 'glora'")):
        done = main("merge", a, b, "--method", *more, "--state", tmp_path / "s", "-o", tmp_path / "p")
        assert done.code == 2 and said in done.err and not (tmp_path / "p").exists()
    other = [saved(tmp_path / "other", name, 2, base="big") for name in "ab"]
    done = main("merge", *other, "--method", "glora", "--state", tmp_path / "s", "-o", tmp_path / "p")
    assert done.code == 2 and "state of base 'tiny'" in done.err


@pytest.mark.parametrize("method", ["fedsa-lora", "fedsvd", "ffa-lora", "rolora", "fedex-lora", "flora"])
def test_methods_that_need_more_than_adapters_are_refused(
    tmp_path: Path, main: Callable[..., Said], method: str
) -> None:
    folders = [saved(tmp_path, name, 2) for name in "ab"]
    done = main("merge", *folders, "--method", method, "-o", tmp_path / "o")
    assert done.code == 2 and method in done.err and done.err.count("\n") == 1
    assert not (tmp_path / "o").exists()


def test_readout_ranks_from_a_file_and_names_that_are_paths(tmp_path: Path, main: Callable[..., Said]) -> None:
    folders = [saved(tmp_path, name, 4) for name in "ab"]
    for folder, name in zip(folders, ("x/../../evil", "b"), strict=True):
        (folder / "upload.json").write_text(json.dumps({"client": name, "num_examples": 1, "round": 1}))
    (tmp_path / "ranks.toml").write_text('b = 3\n"x/../../evil" = 1\nnew = 2\n')
    done = main("merge", *folders, "--readout", tmp_path / "ranks.toml", "-o", tmp_path / "o")
    assert done.code == 0, done.err
    got = {path.name: read_adapter(path)[0].ranks for path in (tmp_path / "o" / "clients").iterdir()}
    assert {name: set(ranks.values()) for name, ranks in got.items()} == {"b": {3}, "evil": {1}, "new": {2}}
    (tmp_path / "bad.toml").write_text("b = 0\n")
    done = main("merge", *folders, "--readout", tmp_path / "bad.toml", "-o", tmp_path / "p")
    assert done.code == 2 and "whole ranks from 1" in done.err


# ---- ranks -----------------------------------------------------------------------------------------------------------


def test_a_budget_is_spent_where_it_saves_most() -> None:
    """Brute force over all rank vectors that fit: no other loses less. Equal costs, where greedy is optimal."""
    spectra = [(5.0, 4.0, 0.1), (1.0, 0.9, 0.8), (3.0, 0.2, 0.1)]
    reports = [ModuleReport(str(k), 3, 3, 3, 0.0, math.hypot(*s), s) for k, s in enumerate(spectra)]
    for mean in (1, 1.4, 2, 2.5, 3):
        ranks = budget_ranks(reports, [10, 10, 10], mean)
        assert sum(ranks) <= 3 * mean and min(ranks) >= 1

        def lost(ranks: Any) -> float:
            return sum(x * x for s, r in zip(spectra, ranks, strict=True) for x in s[r:])

        fitting = [r for r in itertools.product((1, 2, 3), repeat=3) if sum(r) <= 3 * mean]
        assert lost(ranks) == pytest.approx(min(lost(r) for r in fitting))


def test_a_budget_from_the_command_line(tmp_path: Path, main: Callable[..., Said]) -> None:
    folders = [saved(tmp_path, name, 4) for name in "ab"]
    out = tmp_path / "o"
    said = json.loads(main("merge", *folders, "--rank", "budget=3", "-o", out, "--json").out)
    ranks = read_adapter(out)[0].ranks
    numbers = {m: ranks[m] * sum(SHAPES[m]) for m in ranks}
    assert sum(numbers.values()) <= 3 * sum(sum(s) for s in SHAPES.values())
    exact = [0.5 * (x + y) for x, y in zip(updates(folders[0]).values(), updates(folders[1]).values(), strict=True)]
    gap = sum(float((got - want).norm()) ** 2 for got, want in zip(updates(out).values(), exact, strict=True))
    size = sum(float(want.norm()) ** 2 for want in exact)
    assert said["error"] == pytest.approx(math.sqrt(gap / size), rel=1e-4)


def test_for_vllm_one_rank_that_it_takes_and_no_saved_modules(tmp_path: Path, main: Callable[..., Said]) -> None:
    folders = [saved(tmp_path, "a", 2), saved(tmp_path, "b", 7)]
    out = tmp_path / "o"
    assert main("merge", *folders, "--for", "vllm", "-o", out).code == 0
    config = json.loads((out / "adapter_config.json").read_text())
    assert config["r"] == config["lora_alpha"] == 16 and not config["rank_pattern"] and not config["modules_to_save"]
    keys = load_file(out / "adapter_model.safetensors")
    assert {t.shape[0] for name, t in keys.items() if "lora_A" in name} == {16}
    assert all("lora_" in name for name in keys)
    want = [0.5 * (x + y) for x, y in zip(updates(folders[0]).values(), updates(folders[1]).values(), strict=True)]
    for got, w in zip(updates(out).values(), want, strict=True):
        torch.testing.assert_close(got, w, rtol=0, atol=1e-5)


# ---- tensors beside the pairs ----------------------------------------------------------------------------------------


def test_a_head_that_only_some_have(tmp_path: Path, main: Callable[..., Said]) -> None:
    a, b = saved(tmp_path, "a", 2), saved(tmp_path, "b", 2)
    bare = load_file(b / "adapter_model.safetensors")
    save_file({k: t for k, t in bare.items() if "classifier" not in k}, b / "adapter_model.safetensors")
    done = main("merge", a, b, "-o", tmp_path / "o")
    assert done.code == 2 and "--heads holders" in done.err and not (tmp_path / "o").exists()
    assert main("merge", a, b, "--heads", "holders", "-o", tmp_path / "o").code == 0
    for path, head in read_adapter(a)[0].heads.items():
        torch.testing.assert_close(read_adapter(tmp_path / "o")[0].heads[path], head)
    assert main("merge", a, b, "--heads", "drop", "-o", tmp_path / "p").code == 0
    assert not read_adapter(tmp_path / "p")[0].heads


# ---- full models -----------------------------------------------------------------------------------------------------

CASES = {
    "linear": (llama, {"target_modules": ["q_proj", "v_proj", "down_proj"]}),
    "Conv1D": (gpt2, {"target_modules": ["c_attn", "c_proj"]}),
    "embedding and head": (llama, {"target_modules": ["embed_tokens", "lm_head", "q_proj"]}),
    "bias": (bert, {"target_modules": ["query"], "bias": "all", "task_type": "SEQ_CLS"}),
    "lora_bias": (bert, {"target_modules": ["query"], "lora_bias": True, "task_type": "SEQ_CLS"}),
    "tokens": (llama, {"target_modules": ["q_proj"], "trainable_token_indices": [1, 5]}),
    "ranks": (bert, {"target_modules": ["query", "value"], "rank_pattern": {"value": 3}, "use_rslora": True}),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("shards", [False, True])
@pytest.mark.filterwarnings("ignore")
def test_a_model_with_the_adapter_in_it_is_what_peft_makes(
    tmp_path: Path, main: Callable[..., Said], name: str, shards: bool
) -> None:
    """peft's merge_and_unload, tensor for tensor; the model loads in transformers, from one file or several shards."""
    kind, options = CASES[name]
    model: Any = kind()
    model.save_pretrained(tmp_path / "base", max_shard_size="20KB" if shards else "1GB")
    assert (tmp_path / "base" / "model.safetensors.index.json").exists() == shards
    peft_model = get_peft_model(model, LoraConfig(r=2, lora_alpha=5, **options))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in peft_model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    peft_model.save_pretrained(tmp_path / "adapter")
    done = main("apply", tmp_path / "adapter", "--base", tmp_path / "base", "-o", tmp_path / "full")
    assert done.code == 0, done.err
    auto = AutoModelForSequenceClassification if kind is bert else AutoModelForCausalLM
    got = auto.from_pretrained(tmp_path / "full").state_dict()
    base = auto.from_pretrained(tmp_path / "base")
    want = PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload().state_dict()
    assert got.keys() == want.keys()
    for key, tensor in want.items():
        torch.testing.assert_close(got[key], tensor, rtol=1e-5, atol=1e-6, msg=key)
    assert main("validate", tmp_path / "adapter", "--base", tmp_path / "base").code == 0
    done = main("apply", tmp_path / "adapter", "--base", tmp_path / "base", "-o", tmp_path / "full")
    assert done.code == 2 and "is not empty" in done.err


@pytest.mark.filterwarnings("ignore")
def test_an_adapter_of_another_model_is_refused_before_anything_is_written(
    tmp_path: Path, main: Callable[..., Said]
) -> None:
    gpt2().save_pretrained(tmp_path / "base")  # type: ignore[operator]
    get_peft_model(llama(), LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(tmp_path / "adapter")
    for command in (["apply", tmp_path / "adapter", "-o", tmp_path / "full"], ["validate", tmp_path / "adapter"]):
        done = main(*command, "--base", tmp_path / "base")
        assert done.code == 2 and "has no 'model.layers.0.self_attn.q_proj.weight'" in done.err
        assert not (tmp_path / "full").exists()
    done = main("validate", tmp_path / "adapter", "--base", tmp_path)
    assert done.code == 2 and "is no model directory" in done.err


@pytest.mark.filterwarnings("ignore")
def test_square_weights_tied_heads_and_two_biases(tmp_path: Path, main: Callable[..., Said]) -> None:
    """peft's own merge is the oracle: GPT-2's square Conv1D beside a linear head (its config then says fan_in_fan_out =
    false), and a bias that is replaced and added to; what cannot be written is refused."""
    cases: dict[str, tuple[Any, dict[str, Any]]] = {
        "square": (gpt2, {"target_modules": ["c_proj", "lm_head"]}),
        "biases": (bert, {"target_modules": ["query"], "bias": "lora_only", "lora_bias": True}),
    }
    for name, (kind, options) in cases.items():
        model: Any = kind()
        if name == "square":
            model.config.tie_word_embeddings = False
            model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
        model.save_pretrained(tmp_path / name / "base")
        peft_model = get_peft_model(model, LoraConfig(r=2, lora_alpha=5, **options))
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in peft_model.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
        peft_model.save_pretrained(tmp_path / name / "adapter")
        done = main(
            "apply", tmp_path / name / "adapter", "--base", tmp_path / name / "base", "-o", tmp_path / name / "full"
        )
        assert done.code == 0, done.err
        auto = AutoModelForSequenceClassification if kind is bert else AutoModelForCausalLM
        got = auto.from_pretrained(tmp_path / name / "full").state_dict()
        base = auto.from_pretrained(tmp_path / name / "base")
        want = PeftModel.from_pretrained(base, tmp_path / name / "adapter").merge_and_unload().state_dict()
        for key, tensor in want.items():
            torch.testing.assert_close(got[key], tensor, rtol=1e-5, atol=1e-6, msg=key)

    whole: Any = llama()
    whole.config.tie_word_embeddings = True
    whole.tie_weights()
    whole.save_pretrained(tmp_path / "tied-llama")
    peft_model = get_peft_model(whole, LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["embed_tokens"]))
    peft_model.save_pretrained(tmp_path / "embeds")
    done = main("apply", tmp_path / "embeds", "--base", tmp_path / "tied-llama", "-o", tmp_path / "no")
    assert done.code == 2 and "ties it to the embedding" in done.err and not (tmp_path / "no").exists()


def test_an_upload_counts_once_and_outputs_are_checked_before_the_work(
    tmp_path: Path, main: Callable[..., Said]
) -> None:
    folders = [saved(tmp_path, name, 2) for name in "ab"]
    for folder in folders:
        (folder / "upload.json").write_text(json.dumps({"client": folder.name, "num_examples": 1, "round": 1}))
    state = ["--method", "glora", "--state", tmp_path / "s"]
    assert main("merge", *folders, *state, "-o", tmp_path / "o").code == 0
    done = main("merge", *folders, *state, "-o", tmp_path / "p")
    assert done.code == 2 and "another round than 2" in done.err and not (tmp_path / "p").exists()
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "x"):
        done = main("merge", *folders, "-o", out)
        assert done.code == 2 and "Traceback" not in done.err and done.err.count("\n") == 1
    done = main("merge", *folders, "--method", "glora", "--state", tmp_path / "file", "-o", tmp_path / "q")
    assert done.code == 2 and "is a file" in done.err and not (tmp_path / "q").exists()


# ---- a site's half ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["classification", "instructions"])
def test_a_federation_by_files_only(tmp_path: Path, main: Callable[..., Said], kind: str) -> None:
    """Two sites, two rounds: train fresh, merge with GLoRA, train what came back; the model improves on both."""
    classifies = kind == "classification"
    base = save_model(tmp_path / "base", bert() if classifies else llama(), classifies=classifies)
    options = ["--base", base, "--targets", "query,value" if classifies else "q_proj,v_proj", "--lr", "0.01"]
    for k, site in enumerate("ab"):
        data = classification(40, k) if classifies else instructions(20, k)
        with (tmp_path / f"{site}.jsonl").open("w") as file:
            for n, words in enumerate(data.text):
                assert not classifies or data.labels is not None
                words = " ".join([words] * 9) if n == 0 else words  # longer than the model's 16 positions: cut
                row = {"text": words, "label": data.labels[n]} if classifies else {  # type: ignore[index]
                    "prompt": words, "response": data.responses[n]}  # type: ignore[index]  # fmt: skip
                file.write(json.dumps(row) + "\n")
    losses = []
    for number in (1, 2, 3):
        uploads = []
        for site, rank in (("a", 2), ("b", 4)):
            start = ["--adapter", tmp_path / f"merged{number - 1}/clients/{site}"] if number > 1 else ["--rank", rank]
            out = tmp_path / f"up{number}" / site
            done = main("train", *options, *start, "--data", tmp_path / f"{site}.jsonl", "--client", site,
                          "--steps", 8, "--batch-size", 8, "--round", number, "-o", out)  # fmt: skip
            assert done.code == 0, done.err
            facts = json.loads((out / "upload.json").read_text())
            assert facts["client"] == site and facts["num_examples"] == (40 if classifies else 20)
            assert facts["round"] == number and len(facts["data_sha256"]) == 64
            losses.append(facts["mean_loss"])
            uploads.append(out)
        assert set(read_adapter(uploads[0])[0].ranks.values()) == {2}
        done = main("merge", *uploads, "--weights-from", "num_examples", "--method", "glora", "--state",
                      tmp_path / "s", "--readout", "same", "-o", tmp_path / f"merged{number}")  # fmt: skip
        assert done.code == 0, done.err
    assert losses[-1] < losses[1] and losses[-2] < losses[0]


def test_class_names_need_an_order_that_all_sites_share(tmp_path: Path, main: Callable[..., Said]) -> None:
    (tmp_path / "d.csv").write_text("text,label\nw1 w2,good\nw3,bad\n")
    base = save_model(tmp_path / "base", bert(), classifies=True)
    options = ["train", "--base", base, "--data", tmp_path / "d.csv", "--client", "a", "--steps", 1]
    done = main(*options, "-o", tmp_path / "o")
    assert done.code == 2 and "--labels, the same at every site" in done.err and not (tmp_path / "o").exists()
    done = main(*options, "--client", "../x", "-o", tmp_path / "o")
    assert done.code == 2 and "--client is letters" in done.err
    (tmp_path / "e.csv").write_text("a,b\n1,2\n")
    done = main("train", "--base", base, "--data", tmp_path / "e.csv", "--client", "a", "-o", tmp_path / "o")
    assert done.code == 2 and "neither a column" in done.err
