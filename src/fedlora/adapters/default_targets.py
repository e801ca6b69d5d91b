"""The modules that peft 0.21 targets where a config names none, by the base model's type.

Copied from peft.utils.constants (tests/adapters/test_open_targets.py compares): ends of names, or one pattern.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

# fmt: off
LORA: Mapping[str, str] = {
    "t5": "q v",
    "mt5": "q v",
    "bart": "q_proj v_proj",
    "gpt2": "c_attn",
    "bloom": "query_key_value",
    "blip-2": "q v q_proj v_proj",
    "opt": "q_proj v_proj",
    "gptj": "q_proj v_proj",
    "gpt_neox": "query_key_value",
    "gpt_neo": "q_proj v_proj",
    "bert": "query value",
    "roberta": "query value",
    "xlm-roberta": "query value",
    "electra": "query value",
    "deberta-v2": "query_proj value_proj",
    "deberta": "in_proj",
    "layoutlm": "query value",
    "llama": "q_proj v_proj",
    "llama4": "q_proj v_proj",
    "chatglm": "query_key_value",
    "gpt_bigcode": "c_attn",
    "mpt": "Wqkv",
    "RefinedWebModel": "query_key_value",
    "RefinedWeb": "query_key_value",
    "falcon": "query_key_value",
    "btlm": "c_proj c_attn",
    "codegen": "qkv_proj",
    "mistral": "q_proj v_proj",
    "mixtral": "q_proj v_proj",
    "stablelm": "q_proj v_proj",
    "phi": "q_proj v_proj fc1 fc2",
    "gemma": "q_proj v_proj",
    "gemma2": "q_proj v_proj",
    "gemma3_text": "q_proj v_proj",
    "gemma4": r".*language_model\..*\.(q_proj|v_proj)",
    "qwen2": "q_proj v_proj",
    "qwen3": "q_proj v_proj",
    "nemotron_h": "q_proj k_proj v_proj o_proj",
    "rwkv": "key value receptance output",
    "rwkv7": "r_proj k_proj v_proj o_proj key value",
}
ADALORA: Mapping[str, str] = {
    "t5": "q k v o wi wo",
    "mt5": "q k v o wi_0 wi_1 wo",
    "bart": "q_proj k_proj v_proj out_proj fc1 fc2",
    "gpt2": "c_attn",
    "bloom": "query_key_value",
    "opt": "q_proj k_proj v_proj out_proj fc1 fc2",
    "gptj": "q_proj v_proj",
    "gpt_neox": "query_key_value",
    "gpt_neo": "q_proj v_proj",
    "llama": "q_proj v_proj",
    "llama4": "q_proj v_proj",
    "bert": "query value",
    "roberta": "query key value dense",
    "deberta-v2": "query_proj key_proj value_proj dense",
    "gpt_bigcode": "c_attn",
    "deberta": "in_proj",
    "gemma": "q_proj v_proj",
    "gemma2": "q_proj v_proj",
    "gemma3_text": "q_proj v_proj",
    "gemma4": r".*language_model\..*\.(q_proj|v_proj)",
    "qwen2": "q_proj v_proj",
    "qwen3": "q_proj v_proj",
    "nemotron_h": "q_proj k_proj v_proj o_proj",
}
# fmt: on


def is_default_target(name: str, said: str) -> bool:
    """Whether a module's name is one that an entry of a table means."""
    if "*" in said:
        return re.fullmatch(said, name) is not None  # ours, and linear in the name
    return any(name == end or name.endswith(f".{end}") for end in said.split())
