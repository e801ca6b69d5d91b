"""What one function takes, all take: kinds of adapters that training programs write, through everything that reads or
writes one. Kind of evidence: oracle (peft's own dense models, float64).

Each kind: two adapters are validated alone and with their base, merged by each rule of heads, resized and written
anew; each result is loaded by peft, means what it should, and passes `validate --base` and `apply` on the base, whose
model is peft's own.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers as hf
from peft import AdaLoraConfig, LoraConfig, PeftModel, get_peft_model
from torch import Tensor

from fedlora.adapters import merge, read_adapter, resize, write_adapter
from fedlora.adapters.module_names import plain
from fedlora.adapters.reader import AdapterFile
from fedlora.applying.apply import apply_adapter, check_adapter
from fedlora.applying.base_folder import BaseFiles
from fedlora.errors import AdapterFormatError
from support.bases import reconfigure, rewrite
from support.peft_cases import randomise

pytestmark = pytest.mark.filterwarnings("ignore")  # of peft's, of what these kinds are about

SIZES: dict[str, Any] = {
    "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
}  # fmt: skip
BOTH = ["embed_tokens", "lm_head"]
RULES = ("average", "first", "drop")


def model(name: str, **fields: Any) -> Callable[[], Any]:
    config = name
    for end in ("ForCausalLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering", "Model"):
        config = config.removesuffix(end)
    return lambda: getattr(hf, name)(getattr(hf, f"{config}Config")(**SIZES | fields))


def t5() -> Any:
    sizes = {"vocab_size": 40, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2}
    return hf.T5ForConditionalGeneration(hf.T5Config(**sizes, decoder_start_token_id=0))


def llava() -> Any:
    image = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    parts = {
        "vision_config": hf.CLIPVisionConfig(**image, image_size=16, patch_size=8),
        "text_config": hf.LlamaConfig(**SIZES),
    }
    return hf.LlavaForConditionalGeneration(hf.LlavaConfig(**parts, image_token_index=39))


@dataclass(frozen=True)
class Kind:
    """base: what the adapter is trained on. fields: of peft's config. grown: the vocabulary grew by so many before
    training. saving: how peft saves. edit: what another program puts into the config. ada: AdaLoRA."""

    base: Callable[[], Any]
    fields: Mapping[str, Any]
    grown: int = 0
    saving: Mapping[str, Any] = field(default_factory=dict)
    edit: Mapping[str, Any] = field(default_factory=dict)
    ada: bool = False


LLAMA, TIED = model("LlamaForCausalLM"), model("LlamaForCausalLM", tie_word_embeddings=True)


def causal(base: Callable[[], Any] = LLAMA, **more: Any) -> Kind:
    own = {name: more.pop(name) for name in ("grown", "saving", "edit", "ada") if name in more}
    return Kind(base, {"task_type": "CAUSAL_LM", "target_modules": ["q_proj"]} | more, **own)


def encoder(head: str, task: str | None, **more: Any) -> Kind:
    labels = {"num_labels": 3} if "Classification" in head else {}
    return Kind(model(f"Bert{head}", **labels), {"task_type": task, "target_modules": ["query", "value"]} | more)


UNSLOTH = {
    "base_model_class": "LlamaForCausalLM", "parent_library": "transformers.models.llama.modeling_llama",
    "unsloth_fixed": True,
}  # fmt: skip
SWIFT = {"lora_dtype": "AUTO", "lorap_lr_ratio": 16.0, "lorap_emb_lr": 1e-6}
KINDS: dict[str, Kind] = {
    "plain": causal(),
    "grown": causal(grown=2),
    "grown, both saved": causal(grown=2, modules_to_save=BOTH),
    "grown, embedding saved": causal(grown=2, modules_to_save=["embed_tokens"]),
    "grown, head saved": causal(grown=2, modules_to_save=["lm_head"]),
    "both saved, with embeddings": causal(modules_to_save=BOTH, saving={"save_embedding_layers": True}),
    "grown, tokens": causal(grown=2, trainable_token_indices=[40, 41]),
    "grown, tokens of the head": causal(grown=2, trainable_token_indices={"lm_head": [40, 41]}),
    "grown, tokens of both": causal(grown=2, trainable_token_indices={"lm_head": [40], "embed_tokens": [40, 41]}),
    "grown, tokens, head saved": causal(grown=2, trainable_token_indices=[40, 41], modules_to_save=["lm_head"]),
    "grown, LoRA of the embedding": causal(grown=2, target_modules=["q_proj", "embed_tokens"]),
    "grown, LoRA of both": causal(grown=2, target_modules=["q_proj", *BOTH]),
    "grown, tied": causal(TIED, grown=2),
    "grown, tied, tokens": causal(TIED, grown=2, trainable_token_indices=[40, 41]),
    "grown, tied, tokens by name": causal(TIED, grown=2, trainable_token_indices={"embed_tokens": [40, 41]}),
    "grown, tied, saved together": causal(
        TIED, grown=2, modules_to_save=["embed_tokens"], ensure_weight_tying=True),
    "tied, saved together, with embeddings": causal(
        TIED, modules_to_save=["embed_tokens"], ensure_weight_tying=True, saving={"save_embedding_layers": True}),
    "grown, tied, tokens of both": causal(
        TIED, grown=2, trainable_token_indices={"embed_tokens": [40, 41], "lm_head": [40, 41]}),
    "grown, not tied, saved together": causal(grown=2, modules_to_save=["embed_tokens"], ensure_weight_tying=True),
    "grown, GPT-NeoX": causal(model("GPTNeoXForCausalLM"), grown=2, target_modules=["query_key_value"]),
    "grown, a head with a bias": causal(model("PhiForCausalLM"), grown=2),
    "grown, T5": Kind(t5, {"task_type": "SEQ_2_SEQ_LM", "target_modules": ["q", "v"]}, grown=2),
    "grown, classes": Kind(
        model("BertForSequenceClassification", num_labels=3), {"task_type": "SEQ_CLS", "target_modules": ["query"]},
        grown=2),
    "answers, a head of another name": Kind(
        model("ModernBertForQuestionAnswering", pad_token_id=0, num_hidden_layers=3),
        {"task_type": "QUESTION_ANS", "target_modules": ["Wqkv"]}),
    "bias all": causal(model("Qwen2ForCausalLM"), bias="all"),
    "bias all, head saved": causal(model("GPTNeoXForCausalLM"), target_modules=["query_key_value"], bias="all",
                                   modules_to_save=["lm_head"]),
    "classes": encoder("ForSequenceClassification", "SEQ_CLS"),
    "classes, bias all": encoder("ForSequenceClassification", "SEQ_CLS", bias="all"),
    "classes, bias lora_only": encoder("ForSequenceClassification", "SEQ_CLS", bias="lora_only"),
    "classes, lora_bias": encoder("ForSequenceClassification", "SEQ_CLS", lora_bias=True),
    "classes, a saved module of several": encoder(
        "ForSequenceClassification", "SEQ_CLS", bias="all", modules_to_save=["pooler"]),
    "classes of tokens, bias all": encoder("ForTokenClassification", "TOKEN_CLS", bias="all"),
    "answers": encoder("ForQuestionAnswering", "QUESTION_ANS"),
    "answers, bias all": encoder("ForQuestionAnswering", "QUESTION_ANS", bias="all"),
    "features": encoder("Model", "FEATURE_EXTRACTION"),
    "features, saved": encoder("Model", "FEATURE_EXTRACTION", modules_to_save=["pooler"], bias="all"),
    "sequences": Kind(t5, {"task_type": "SEQ_2_SEQ_LM", "target_modules": ["q", "v"]}),
    "sequences, saved": Kind(t5, {"task_type": "SEQ_2_SEQ_LM", "target_modules": ["q"], "modules_to_save": ["wi"]}),
    "no task, saved": encoder("ForSequenceClassification", None, modules_to_save=["classifier"], bias="all"),
    "AdaLoRA, bias all": Kind(
        model("BertForSequenceClassification", num_labels=3),
        {"task_type": "SEQ_CLS", "target_modules": ["query"], "bias": "all", "total_step": 10}, ada=True),
    "Unsloth": causal(edit={"auto_mapping": UNSLOTH}),
    "ms-swift": causal(edit=SWIFT),
}  # fmt: skip


def grown(kind: Kind) -> Any:
    """The model that training begins with."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        found = kind.base().double().eval()
        if kind.grown:
            found.resize_token_embeddings(SIZES["vocab_size"] + kind.grown, mean_resizing=False)
    return found


def trained(kind: Kind, folder: Path, seed: int) -> Path:
    """As peft saves it, which looks at the base's vocabulary before it grew."""
    base = grown(kind)
    base.name_or_path = base.config._name_or_path = str(folder.parent / "small")
    fields = {key: list(value) if isinstance(value, list) else value for key, value in kind.fields.items()}
    rank = {"init_r": 3, "target_r": 2} if kind.ada else {"r": 3}
    made = get_peft_model(base, (AdaLoraConfig if kind.ada else LoraConfig)(**rank, lora_alpha=6, **fields))
    randomise(made, seed)
    made.save_pretrained(folder, **kind.saving)
    (folder / "README.md").unlink(missing_ok=True)
    if kind.edit:
        reconfigure(folder, **kind.edit)
    return folder


def dense(folder: Path, base: Path, kind: type[Any]) -> dict[str, Tensor]:
    """The base with the adapter in it, as peft makes it; that it loads every tensor of modules and heads is seen in
    the sums."""
    fresh = kind.from_pretrained(base, dtype=torch.float64)
    found = PeftModel.from_pretrained(fresh, folder).merge_and_unload()
    return {name: tensor.clone() for name, tensor in found.state_dict().items()}


def off(got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> float:
    assert got.keys() == want.keys()
    return max(float((got[name] - want[name]).abs().max()) for name in want if want[name].is_floating_point())


class Everything:
    """All that is asked of an adapter folder on a base."""

    def __init__(self, base: Path, kind: type[Any]) -> None:
        self.base, self.kind = base, kind

    def taken(self, folder: Path) -> dict[str, Tensor]:
        """Validated alone, and applied, which begins with the judgement of `validate --base`: the model is peft's,
        which is returned."""
        AdapterFile(folder).check()
        want = dense(folder, self.base, self.kind)
        full = folder.parent / f"{folder.name}-full"
        apply_adapter(AdapterFile(folder, with_base=True), BaseFiles(self.base), full)
        got = self.kind.from_pretrained(full, dtype=torch.float64).state_dict()
        assert off(got, want) < 1e-10
        return want


# ---- names of transformers 4, which peft converts as it loads --------------------------------------------------------


def old_llava(tensors: dict[str, Tensor]) -> None:
    for key in list(tensors):
        tensors[key.replace("model.model.language_model.", "model.language_model.model.")] = tensors.pop(key)


def mixtral_of_4(folder: Path) -> Path:
    """One pair for each matrix of each expert, as peft saved them; made by hand, since no transformers 4 is here."""
    draw = torch.Generator().manual_seed(1)
    tensors = {}
    for expert in range(4):
        for name, (d_out, d_in) in {"w1": (24, 16), "w2": (16, 24), "w3": (24, 16)}.items():
            path = f"base_model.model.model.layers.0.block_sparse_moe.experts.{expert}.{name}.lora_"
            tensors[f"{path}A.weight"] = torch.randn(2, d_in, generator=draw, dtype=torch.float64)
            tensors[f"{path}B.weight"] = torch.randn(d_out, 2, generator=draw, dtype=torch.float64)
    folder.mkdir()
    safetensors.torch.save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    fields = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": 2,
        "lora_alpha": 8,
        "target_modules": ["w1", "w2", "w3"],
    }
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    return folder


def test_names_of_transformers_4_are_taken_as_peft_takes_them(tmp_path: Path) -> None:
    """peft's dense models of the old names and of the new ones are one; so are ours. A target that means the old names
    only is none to peft, and refused."""
    kind = Kind(llava, {"task_type": "CAUSAL_LM", "target_modules": ["gate_proj", "down_proj"]})
    grown(kind).save_pretrained(tmp_path / "base")
    every = Everything(tmp_path / "base", hf.LlavaForConditionalGeneration)
    new, old = trained(kind, tmp_path / "a", 1), trained(kind, tmp_path / "b", 1)
    rewrite(old, old_llava)
    want = every.taken(new)
    assert off(every.taken(old), want) < 1e-12
    merge([old, old], tmp_path / "merged")
    resize(old, tmp_path / "resized", rank=4)
    write_adapter(tmp_path / "copy", *read_adapter(old))
    assert max(off(every.taken(tmp_path / name), want) for name in ("merged", "resized", "copy")) < 1e-10
    reconfigure(old, target_modules=r"language_model\.model\..*(gate|down)_proj")
    AdapterFile(old).check()
    with pytest.raises(AdapterFormatError, match=r"model\.language_model\.layers\.0"):
        check_adapter(AdapterFile(old, with_base=True), BaseFiles(every.base))


def test_experts_of_transformers_4_are_refused_with_the_way_round(tmp_path: Path) -> None:
    """The way round leads where it should: what peft loads and saves again is taken, and is peft's own model."""
    kind = model("MixtralForCausalLM", num_key_value_heads=2, num_local_experts=4)
    grown(Kind(kind, {})).save_pretrained(tmp_path / "base")
    every, old = Everything(tmp_path / "base", hf.MixtralForCausalLM), mixtral_of_4(tmp_path / "old")
    AdapterFile(old).check()
    with pytest.raises(AdapterFormatError, match=r"experts\.0\.w1.*transformers 4.*save it again"):
        check_adapter(AdapterFile(old, with_base=True), BaseFiles(every.base))
    want = dense(old, every.base, every.kind)
    PeftModel.from_pretrained(every.kind.from_pretrained(every.base), old).save_pretrained(tmp_path / "again")
    assert off(every.taken(tmp_path / "again"), want) < 1e-10


def test_an_added_bias_of_one_is_zero_for_the_modules_of_others(tmp_path: Path) -> None:
    """lora_bias is peft's for all modules or none. The mean has q's in half, and beside the base, whose up_proj has no
    bias at all, it is what the mean of peft's models is."""
    base = model("LlamaForCausalLM", attention_bias=True)
    kinds = [causal(base, lora_bias=True), causal(base, target_modules=["q_proj", "up_proj"])]
    grown(kinds[0]).save_pretrained(tmp_path / "base")
    one, two = (trained(kind, tmp_path / name, k) for k, (kind, name) in enumerate(zip(kinds, "ab", strict=True)))
    A, B = (dense(folder, tmp_path / "base", hf.LlamaForCausalLM) for folder in (one, two))
    merge([one, two], tmp_path / "m")
    apply_adapter(AdapterFile(tmp_path / "m", with_base=True), BaseFiles(tmp_path / "base"), tmp_path / "full")
    got = hf.LlamaForCausalLM.from_pretrained(tmp_path / "full", dtype=torch.float64).state_dict()
    assert off(got, {n: (A[n] + B[n]) / 2 for n in A}) < 1e-10
    stored = safetensors.torch.load_file(tmp_path / "m" / "adapter_model.safetensors")
    assert [key.split(".")[-3] for key, t in stored.items() if key.endswith("lora_B.bias") and not t.any()] == [
        "up_proj"
    ]


# ---- everything ------------------------------------------------------------------------------------------------------


RESULTS = ("copy", "resized", *RULES)
# Of those that are much alike one each: vocabularies that grew, tied tensors, saved modules, biases, programs.
QUICK = (
    "grown, tokens of both", "grown, tied, saved together", "grown, T5", "classes, lora_bias", "Unsloth",
)  # fmt: skip


def asked() -> Iterator[Any]:
    """Quick: one result to each kind in turn."""
    for turn, name in enumerate(QUICK):
        result = RESULTS[turn % len(RESULTS)]
        yield pytest.param(name, (result,), id=f"{name}-{result}")
    yield from (pytest.param(name, RESULTS, id=f"{name}-all", marks=pytest.mark.exhaustive) for name in KINDS)


def made(result: str, one: Path, two: Path) -> Path:
    """What fedlora makes of the first adapter, or of both under a rule of heads."""
    folder = one.parent / result
    if result == "copy":
        write_adapter(folder, *read_adapter(one))
    elif result == "resized":
        resize(one, folder, rank=4)
    else:
        merge([one, two], folder, heads=result)  # type: ignore[arg-type]
    return folder


@pytest.mark.parametrize(("name", "results"), list(asked()))
def test_what_one_takes_all_take_and_results_too(name: str, results: tuple[str, ...], tmp_path: Path) -> None:
    """The second adapter is made only if a result needs two; `apply` of the first tests the same."""
    kind = KINDS[name]
    kind.base().double().save_pretrained(tmp_path / "small")
    start = grown(kind)
    start.save_pretrained(tmp_path / "base")
    every = Everything(tmp_path / "base", type(start))
    one, two, B = trained(kind, tmp_path / "a", 1), tmp_path / "b", {}
    A = every.taken(one)
    if set(results) & set(RULES):
        B = dense(trained(kind, two, 2), every.base, every.kind)
    Z = {n: t.clone() for n, t in start.state_dict().items()}
    assert any(not torch.equal(A[n], Z[n]) for n in Z)
    for result in results:
        got = every.taken(made(result, one, two))
        if result in ("copy", "resized"):
            assert off(got, A) < 1e-10
            continue
        pairs = {f"{plain(path)}.weight" for path in AdapterFile(one).layouts if "layer" in path or "block" in path}
        assert off({n: got[n] for n in pairs}, {n: (A[n] + B[n]) / 2 for n in pairs}) < 1e-10
        if result == "average":
            assert off(got, {n: (A[n] + B[n]) / 2 if A[n].is_floating_point() else A[n] for n in A}) < 1e-10


def test_copies_that_peft_does_not_read(tmp_path: Path) -> None:
    """Left out of a merge with an adapter that has none, since it was trained on the grown base; refused where one
    differs from what peft reads."""
    kind = KINDS["grown, both saved"]
    kind.base().double().save_pretrained(tmp_path / "small")
    grown(kind).save_pretrained(tmp_path / "base")
    every = Everything(tmp_path / "base", hf.LlamaForCausalLM)
    one, two = trained(kind, tmp_path / "a", 1), trained(kind, tmp_path / "b", 2)
    A, B = every.taken(one), every.taken(two)

    def without(tensors: dict[str, Tensor]) -> None:
        for key in [key for key in tensors if "modules_to_save" in key or "original_module" in key]:
            del tensors[key]

    rewrite(two, without)
    assert not AdapterFile(one).notes
    merge([one, two], tmp_path / "mean")
    assert off(every.taken(tmp_path / "mean"), {n: (A[n] + B[n]) / 2 for n in A}) < 1e-10
    odd = Path(shutil.copytree(one, tmp_path / "odd"))
    rewrite(odd, lambda tensors: tensors["base_model.model.lm_head.modules_to_save.weight"].add_(1))
    with pytest.raises(AdapterFormatError, match=r"lm_head\.modules_to_save\.weight.*lm_head\.weight"):
        AdapterFile(odd)
