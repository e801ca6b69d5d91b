"""Strangers' patterns and names. Kinds of evidence: comparison with peft's own functions, property, and by hand.

What a pattern means is what peft 0.21's `get_pattern_key` and `check_target_module_exists` say of it, called here. What
is refused is what peft fails on, and what is not of the grammar or beyond a bound, which the refusal names.
"""

from __future__ import annotations

import json
import re
import time
import warnings
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from peft.tuners.tuners_utils import _ExcludedModule, check_target_module_exists
from peft.utils.other import get_pattern_key
from safetensors.torch import save_file

from fedlora import Adapter, LoRA, read_adapter, write_adapter
from fedlora.adapters import patterns
from fedlora.adapters.config_meaning import resolve
from fedlora.adapters.io import AdapterSpec
from fedlora.adapters.patterns import Question, literal, matches
from fedlora.adapters.reader import CONFIG_FILE, WEIGHTS_FILE, AdapterFile
from fedlora.errors import AdapterFormatError
from support.command_line import Said

pytestmark = pytest.mark.timeout(60)
PREFIX = "base_model.model."
drawn = settings(deadline=None, derandomize=True, database=None)

# ---- what is drawn ---------------------------------------------------------------------------------------------------

WORDS = ("a", "b", "ab", "q_proj", "layers", "0", "1", "12", "A", "a+b", "m(1)", "x-y")
names = st.lists(st.sampled_from(WORDS), min_size=1, max_size=5).map(".".join)
letters = st.sampled_from(["a", "b", "q_proj", "layers", "0", "12", "A", r"\.", ".", "_", "-"])
plain_patterns = st.builds(lambda start, parts: start + "".join(parts), st.sampled_from(["", "^"]), st.lists(letters))
ATOMS = st.sampled_from([".", "a", "b", r"\.", r"\d", r"\w", "[ab]", "[^.]", "[a-z_]", r"[\w.-]", "[.a]"])
REPEATS = st.sampled_from(["*", "+", "?", "*?", "+?", "??", "{2}", "{1,3}", "{2,}", "{0,9}?"])
PLACES = st.sampled_from(["^", "$", r"\b", r"\B", r"\A", r"\Z"])
GROUPS = st.sampled_from(["({})", "(?:{})", "(?={})", "(?!{})", "({})?", "(?:{}){2}", "({}){1,4}", "(?:{})??"])


def of_the_grammar(parts: int) -> st.SearchStrategy[str]:
    """Patterns as the screen reads them."""
    one = letters | ATOMS | st.builds(str.__add__, ATOMS, REPEATS) | PLACES
    joined = st.lists(one, min_size=1, max_size=4).map("".join)
    return st.recursive(
        joined,
        lambda inner: st.builds(
            lambda before, group, several, after: before + group.replace("{}", "|".join(several), 1) + after,
            joined, GROUPS, st.lists(inner, min_size=1, max_size=3), joined,
        ),
        max_leaves=parts,
    )  # fmt: skip


def peft_rank(rank_pattern: Mapping[str, int], name: str) -> int:
    """peft 0.21, lora/model.py: _create_and_replace."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return rank_pattern.get(get_pattern_key(rank_pattern.keys(), name), 99)


def peft_targets(config: Mapping[str, Any], name: str) -> bool:
    fields = ("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "modules_to_save")
    asked = SimpleNamespace(target_parameters=None, **{field: config.get(field) for field in fields})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = check_target_module_exists(asked, name)
    return bool(found) and not isinstance(found, _ExcludedModule)


def compared(config: dict[str, Any], asked: list[str]) -> bool:
    """The same ranks and targets as peft's; or a refusal, where peft fails or the screen says why (False)."""
    config = {"r": 99, "lora_alpha": 1, "target_modules": [], **config}
    try:
        said = resolve(config, asked)
    except AdapterFormatError as error:
        assert "Name the modules" in str(error) and "\n" not in str(error), error
        return False
    expected = [(peft_rank(config.get("rank_pattern") or {}, name), peft_targets(config, name)) for name in asked]
    assert [(said.rank(name), said.targeted[name]) for name in asked] == expected
    return True


# ---- as peft means them ----------------------------------------------------------------------------------------------


@settings(drawn, max_examples=200)
@given(st.lists(plain_patterns, min_size=1, max_size=4), st.lists(names, min_size=1, max_size=5))
def test_names_as_patterns_mean_what_peft_takes_them_for(keys: list[str], asked: list[str]) -> None:
    """Looked up, never matched."""
    assert all(literal(key) is not None for key in keys)
    assert compared({"rank_pattern": {key: k for k, key in enumerate(keys, 1)}}, asked)


@settings(drawn, max_examples=150)
@given(st.lists(of_the_grammar(5) | plain_patterns, min_size=1, max_size=4), st.lists(names, min_size=1, max_size=5))
def test_any_pattern_means_what_peft_takes_it_for(keys: list[str], asked: list[str]) -> None:
    compared({"rank_pattern": {key: k for k, key in enumerate(keys, 1)}}, asked)


@settings(drawn, max_examples=150)
@given(
    st.text(st.sampled_from(r"ab.01\()[]{}|?*+^$,:=!<P#dwsbAZ-"), max_size=14), st.lists(names, min_size=1, max_size=3)
)
def test_whatever_is_written_means_what_peft_takes_it_for_or_is_refused(key: str, asked: list[str]) -> None:
    compared({"rank_pattern": {key: 1}}, asked)


some_names = st.lists(names | st.sampled_from(WORDS), max_size=3)


@settings(drawn, max_examples=100)
@given(
    targets=some_names | of_the_grammar(3), excluded=st.none() | some_names | of_the_grammar(3),
    saved=st.lists(names | plain_patterns.filter(lambda p: p) | of_the_grammar(2), max_size=2),
    layers=st.none() | st.integers(0, 12) | st.lists(st.sampled_from([0, 1, 12]), max_size=2),
    lists=st.none() | st.sampled_from(["layers", "a", r"layers|a", "", "k.0", "[ab]+"]) | st.just(["b", "layers"]),
    asked=st.lists(names, min_size=1, max_size=6),
)  # fmt: skip
def test_targets_are_those_of_peft(
    targets: Any, excluded: Any, saved: list[str], layers: Any, lists: Any, asked: list[str]
) -> None:
    if isinstance(targets, str):  # peft refuses both together
        layers = None
    if layers is None:
        lists = None
    compared({"target_modules": targets, "exclude_modules": excluded, "modules_to_save": saved,
              "layers_to_transform": layers, "layers_pattern": lists}, asked)  # fmt: skip


@pytest.mark.parametrize("lists", [None, "", [], "layers", ["a", "layers"], ["layers", "a"], "1"], ids=str)
@pytest.mark.parametrize("layers", [0, 1, [0], [0, 1], []], ids=str)
def test_layers_are_those_of_peft(layers: Any, lists: Any) -> None:
    """Every name of up to four of five words; targets by their end, and two in full, which are targets in any layer."""
    asked = [".".join(words) for n in range(1, 5) for words in product(("a", "layers", "0", "1", "\u0661"), repeat=n)]
    targets = ["a", "1.layers", "a.0.layers.1", "layers.0.layers"]
    assert compared({"target_modules": targets, "layers_to_transform": layers, "layers_pattern": lists}, asked)


def test_a_key_that_is_the_name_itself_is_taken_though_it_does_not_match() -> None:
    """peft looks the name up where no pattern matches: "a?b" as a pattern means b and ab, as a key the module a?b."""
    config = {"r": 2, "lora_alpha": 4, "target_modules": ["a?b"], "alpha_pattern": {"a?b": 400}}
    assert resolve(config, ["a?b"]).alpha("a?b") == 400


# As training tools write them into target_modules, of adapters on the hub: what -> (pattern, names of which the first
# is a target and the others are not).
WRITTEN: dict[str, tuple[str, list[str]]] = {
    "ms-swift": (
        r"^(model\.language_model(?=\.).*\.(in_proj_z|out_proj|up_proj|v_proj|q_proj|shared_expert_gate))$",
        ["model.language_model.layers.3.self_attn.q_proj", "model.visual.blocks.3.attn.q_proj"]),
    "ms-swift, all but": (
        "^(model)(?!.*(lm_head|output|emb|wte|shared)).*",
        ["model.layers.27.mlp.down_proj", "model.embed_tokens", "visual.merger"]),
    "Unsloth": (
        r"(?:.*?(?:vision|image|visual|patch|language|text).*?(?:self_attn|attention|attn|mixer|mlp|feed_forward|ffn|"
        r"dense|mixer).*?(?:qkv|proj|linear_fc1|linear_fc2|out_proj|in_proj_qkv|in_proj_z|gate_proj|up_proj|down_proj|"
        r"q_proj|k_proj|v_proj|o_proj).*?)|(?:\bmodel\.layers\.[\d]{1,}(?!.*\.experts\.\d)\..*?(?:self_attn|attention|"
        r"attn|mixer|mlp|feed_forward|ffn|dense|mixer).*?\.(?:(?:q_proj|v_proj|o_proj)))",
        ["model.vision_tower.vision_model.encoder.layers.26.self_attn.out_proj", "model.layers.0.self_attn.k_proj"]),
    "peft's T5": (
        ".*encoder.*block.0.*(SelfAttention|EncDecAttention|DenseReluDense).(k|q|v|wo|wi)$",
        ["encoder.block.0.layer.0.SelfAttention.q", "decoder.block.0.layer.0.SelfAttention.q"]),
    "layers by number": (
        r"model\.layers\.(1[0-9]|[0-3])\.(self_attn|mlp)\.(q_proj|down_proj)",
        ["model.layers.12.mlp.down_proj", "model.layers.9.mlp.down_proj"]),
    "counts": (r"^blocks\.\d{1,2}\.(attn\.(qkv|proj)|mlp\.fc[12])$", ["blocks.7.attn.proj", "blocks.123.attn.proj"]),
}  # fmt: skip


@pytest.mark.parametrize("tool", list(WRITTEN))
def test_what_training_tools_write_is_taken(tool: str) -> None:
    pattern, asked = WRITTEN[tool]
    assert compared({"target_modules": pattern}, asked)
    assert [peft_targets({"target_modules": pattern}, name) for name in asked] == [True] + [False] * (len(asked) - 1)
    longest = ".".join([asked[0], "x" * (119 - len(asked[0]))])  # real names have up to 120 letters
    assert compared({"target_modules": pattern}, [longest])


# ---- bounds ----------------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[str, str]] = {
    "length": ("a?" * 2_001, "4,002 letters, more than the 4,000"),
    "brackets": ("(" * 21 + "a?" + ")" * 21, "more than 20 brackets"),
    "a group without end": ("(?:ab)*", "without end"),
    "nested repeats": ("(a+)+$", "without end"),
    "a back reference": (r"(a)\1", "at letter 4"),
    "a look behind": ("(?<=a)b", "'?<=a)b' at letter 2"),
    "a name of a group": ("(?P<n>a)", "letter 2"),
    "flags": ("(?i)a", "letter 2"),
    "a condition": ("(a)?(?(1)b|c)", "letter 6"),
    "possessive": ("a*+b?", "letter 3"),
    "an atomic group": ("(?>a?)", "letter 2"),
    "another engine's class": ("[[:alpha:]]+", "letter 1"),
    "a letter by its number": (r"\x61?", "letter 1"),
    "no bracket to close": ("a?)", "letter 3"),
    "a bracket left open": ("(a?", "does not close"),
    "no letter to repeat": ("?a", "letter 1"),
    "a count of a thousand": ("a{1000}", "letter 2"),
    "a control character": ("a?\n", "letter 3"),
    "a range from more to less": ("[z-a]", "not a regular expression"),
    "four endless repeats": (".*a.*a.*a.*b", "more than 200,000,000 steps"),
    "many choices": ("a?" * 40, "more than 200,000,000 steps"),
    "counts of counts": ("(?:(?:(?:a?){99}){99}){99}", "steps"),
    "alternatives again": ("(a|aa){60}b", "steps"),
}  # fmt: skip


@pytest.mark.parametrize("what", list(REFUSED))
def test_what_is_not_of_the_grammar_is_refused_with_the_place_and_a_way_out(what: str) -> None:
    pattern, why = REFUSED[what]
    begun = time.process_time()
    with pytest.raises(AdapterFormatError) as caught:
        matches([Question("rank_pattern", "end", (pattern,))], ["q_proj", "a" * 512])
    said = str(caught.value)
    assert (
        why in said and "\n" not in said and len(said) < 300 and "rank_pattern" in said and "Name the modules" in said
    )
    assert time.process_time() - begun < 1


def worst_names(pattern: str) -> list[str]:
    """Of 512 letters, or of as many as the pattern is taken with: all alike, in words, and two letters in turn."""
    return [name[:size] for size in (512, 200, 90) for name in ("a" * 512, "a." * 256, "ab" * 256, "a" * 511 + "!")]


@settings(drawn, max_examples=60)
@given(of_the_grammar(8), st.sampled_from(["", "b", "!", "$"]), st.sampled_from(["end", "whole", "inside", "layer"]))
@example("[ab]{0,9}[ab]+(a{0,9}[a-z.]){1,4}", "!", "whole")  # the worst of 55,000 drawn at random: 0.2 s
@example("(|){99}", "", "whole")  # choices between nothing and nothing
@example("((((){99}){99}){99}){99}", "", "end")
@example("(a||a?){60}", "b", "inside")
@example(".*a.*a.*a", "!", "whole")
@example("[.a]*?a{2,}a+$a", "!", "whole")
@example("a([ab]*?){1,4}", "!", "whole")
def test_no_pattern_that_is_taken_takes_long(start: str, end: str, kind: patterns.Kind) -> None:
    """To screen, to compile and to match, once: what all names and patterns together take is bounded by the clock."""
    for name in worst_names(start + end):
        begun = time.process_time()
        try:
            matches([Question("f", kind, (start + end,))], [name])
        except AdapterFormatError:
            continue
        finally:
            assert time.process_time() - begun < 2, (start + end, kind, name)


@pytest.mark.parametrize(
    "pattern",
    ["(" * 2_000 + ")" * 2_000, "a|" * 1_999 + "b?", "[" + "ab" * 1_990 + "]?", "(?:a?|" * 15 + "b" + ")" * 15,
     "a{99}" * 790 + "b?", "(?:" + "|".join(f"layers.{k}" for k in range(330)) + ")b?"],
    ids=["deep", "wide", "set", "nested alternatives", "counts", "words"],
)  # fmt: skip
def test_a_pattern_that_is_hard_to_compile(pattern: str) -> None:
    begun = time.process_time()
    try:
        matches([Question("f", "end", (pattern,))], ["a" * 512])
    except AdapterFormatError as error:
        assert "Name the modules" in str(error)
    assert time.process_time() - begun < 1


def test_as_many_patterns_as_a_file_may_have() -> None:
    with pytest.raises(AdapterFormatError, match=r"1,001 of its patterns.* 1,000 "):
        matches([Question("rank_pattern", "end", tuple(f"a{k}?" for k in range(1_001)))], ["q_proj"])


@pytest.mark.parametrize("slow", ["matching", "matching one name", "compiling", "looking up"])
def test_all_patterns_and_names_together_take_bounded_time(slow: str) -> None:
    """Each question is short, and there are very many of them; peft, which has no bound, would take hours."""
    masks = tuple("".join("." if k >> i & 1 else "a" for i in range(14)) + "b" * 40 for k in range(2**14))
    keys, asked = {
        "matching": (tuple(f"[ab]*a{k}?[ab]!" for k in range(900)), ["a" * 512] * 10_000),
        "matching one name": (tuple(f"(?:.?){{14}}!{k}?" for k in range(1_000)), ["a." * 50]),
        "compiling": (tuple("[a-z]" * 790 + f"{k}?" for k in range(1_000)), ["q"]),
        "looking up": (masks, ["c" * 54] * 100_000),
    }[slow]
    begun = time.process_time()
    with pytest.raises(AdapterFormatError, match=r"more than 0\.2 s .*--limit pattern_seconds"):
        matches([Question("rank_pattern", "end", keys)], asked, seconds=0.2)
    assert time.process_time() - begun < 2


def test_the_command_says_so(main: Any, tmp_path: Path) -> None:
    folder = put(tmp_path / "bad", {"q" * 40: (2, 2)}, rank_pattern={"(q+)+$": 2})
    done: Said = main("validate", folder)
    assert done.code == 2 and done.err.count("\n") == 1
    assert "rank_pattern" in done.err and "Name the modules" in done.err


# ---- names -----------------------------------------------------------------------------------------------------------


def put(
    folder: Path, pairs: Mapping[str, tuple[int, int]], *, more: Mapping[str, Any] | None = None, **fields: Any
) -> Path:
    """An adapter with pairs of (rank of A, rank of B), or of tensors under their own names."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for path, (a, b) in pairs.items():
        tensors[f"{PREFIX}{path}.lora_A.weight"] = torch.ones(a, 5)
        tensors[f"{PREFIX}{path}.lora_B.weight"] = torch.ones(6, b)
    tensors |= {PREFIX + name: torch.ones(shape) for name, shape in (more or {}).items()}
    save_file(tensors, folder / WEIGHTS_FILE)
    targets = sorted({path.replace(".base_layer", "") for path in pairs})
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": targets, **fields}
    (folder / CONFIG_FILE).write_text(json.dumps(config))
    return folder


def test_names_are_looked_up(tmp_path: Path) -> None:
    """As files hold them: names, paths, escaped paths from their start, layers by number."""
    pairs = {"model.layers.0.q_proj": (3, 3), "model.layers.1.q_proj": (4, 4), "model.layers.1.v_proj": (2, 2)}
    folder = put(
        tmp_path / "a", pairs, rank_pattern={r"^model\.layers\.0\.q_proj": 3, "model.layers.1.q_proj": 4},
        alpha_pattern={"v_proj": 5}, layers_to_transform=[0, 1], layers_pattern="layers",
        target_modules=["q_proj", "v_proj"], exclude_modules=["o_proj"], modules_to_save=["lm_head"],
        more={"lm_head.weight": (3, 2)},
    )  # fmt: skip
    file = AdapterFile(folder)
    assert dict(file.ranks) == {name: a for name, (a, _) in pairs.items()}
    assert file.scale("model.layers.1.v_proj") == 5 / 2
    write_adapter(tmp_path / "b", *read_adapter(folder))
    assert AdapterFile(tmp_path / "b").ranks == file.ranks


def test_very_many_names_and_patterns_take_time_that_is_bounded() -> None:
    """200,000 names and 20,000 patterns would be 4,000,000,000 questions; peft would ask them."""
    asked = [f"model.layers.{k % 128}.mlp.experts.{k // 128}.gate_proj" for k in range(200_000)]
    keys = [f"model.layers.{k % 128}.mlp.experts.{k // 128}.gate_proj" for k in range(20_000)]
    begun = time.process_time()
    (found,) = matches([Question("rank_pattern", "end", tuple(keys))], asked)
    assert found[:20_000] == list(range(20_000)) and found.count(None) == 180_000
    assert time.process_time() - begun < 5


COLLISIONS: dict[str, tuple[dict[str, Any], str]] = {
    "the prefix twice": ({"pairs": {"q": (2, 2), "base_model.model.q": (2, 2)}}, "the prefix twice"),
    "a pair in a base layer": ({"pairs": {"q": (2, 2), "q.base_layer": (2, 2)}}, "has several pairs of factors"),
    "a module in a base layer": ({"pairs": {"a.q": (2, 2), "a.base_layer.q": (2, 2)}}, "has several pairs of factors"),
    "a nesting with a gap": (
        {"pairs": {"e": (2, 2), "e.base_layer.base_layer": (2, 2)}, "target_modules": [],
         "target_parameters": ["e.up", "e.down"]}, "has several pairs of factors"),
    "two kinds of factors": (
        {"pairs": {"q": (2, 2)}, "more": {"q.lora_embedding_A": (2, 5), "q.lora_embedding_B": (6, 2)}},
        "are both lora_A of one module"),
    "a module called as an expert": (
        {"pairs": {"e": (2, 2), "e[0]": (2, 2)}, "target_modules": ["e[0]"], "target_parameters": ["e.up"]},
        "is named as an expert"),
    "a saved module twice": (
        {"pairs": {"q": (2, 2)}, "modules_to_save": ["h"], "more": {"h.weight": (3,), "h.base_layer.weight": (3,)}},
        "are one tensor of the base model"),
    "a bias twice": (
        {"pairs": {"q": (2, 2)}, "bias": "all", "more": {"q.bias": (6,), "q.base_layer.bias": (6,)}},
        "are one tensor of the base model"),
}  # fmt: skip


@pytest.mark.parametrize("what", list(COLLISIONS))
def test_names_that_collide_are_refused(what: str, tmp_path: Path) -> None:
    fields, why = COLLISIONS[what]
    fields = dict(fields)
    folder = put(tmp_path / "bad", fields.pop("pairs"), **fields)
    with pytest.raises(AdapterFormatError, match=re.escape(why)) as caught:
        AdapterFile(folder)
    assert "\n" not in str(caught.value)


NOT_TARGETED: dict[str, dict[str, Any]] = {
    "another name": {"target_modules": ["v_proj"]},
    "a pattern for the whole name": {"target_modules": "q_proj"},
    "excluded": {"target_modules": ["q_proj"], "exclude_modules": r".*\.0\..*"},
    "of another layer": {"target_modules": ["q_proj"], "layers_to_transform": [3], "layers_pattern": "layers"},
    "in a saved module": {"target_modules": ["q_proj"], "modules_to_save": ["0"]},
    "saved by a name that is a pattern": {"target_modules": ["q_proj"], "modules_to_save": ["q.proj"]},
}


@pytest.mark.parametrize("what", list(NOT_TARGETED))
def test_factors_that_peft_would_leave_out_are_refused(what: str, tmp_path: Path) -> None:
    """The oracle is peft's own answer."""
    name = "model.layers.0.q_proj"
    assert not peft_targets(NOT_TARGETED[what], name)
    folder = put(tmp_path / "bad", {name: (2, 2)}, **NOT_TARGETED[what])
    with pytest.raises(AdapterFormatError, match="does not target: peft"):
        AdapterFile(folder)


@pytest.mark.parametrize(
    ("name", "fields"),
    [("a.q", {"exclude_modules": ["q"]}), ("a.q", {"modules_to_save": ["q"]}), ("lm_head", {})],
)  # fmt: skip
def test_all_linear_layers_are_not_all(name: str, fields: dict[str, Any], tmp_path: Path) -> None:
    """What peft leaves out of "all-linear": the excluded, the saved, and a language model's head. Convolutions and
    embeddings, against peft itself: test_fuzz.py."""
    more = {"q.bias": (3,)} if "modules_to_save" in fields else {}
    AdapterFile(put(tmp_path / "a", {"a.k": (2, 2)}, target_modules="all-linear", more=more, **fields))
    with pytest.raises(AdapterFormatError, match=r"peft would leave"):
        AdapterFile(put(tmp_path / "b", {name: (2, 2)}, target_modules="all-linear", more=more, **fields))


@pytest.mark.parametrize(
    ("fields", "why"),
    [({"target_modules": ".*q", "layers_to_transform": [0]}, "peft refuses that"),
     ({"layers_pattern": "layers"}, "peft refuses that"), ({"target_modules": "("}, "does not close"),
     ({"modules_to_save": ["a("]}, "does not close"), ({"exclude_modules": "[[:a"}, "letter 1")],
)  # fmt: skip
def test_configs_that_peft_does_not_take(fields: dict[str, Any], why: str, tmp_path: Path) -> None:
    with pytest.raises(AdapterFormatError, match=why):
        AdapterFile(put(tmp_path / "bad", {"a.q": (2, 2)}, **fields))


# ---- what is written -------------------------------------------------------------------------------------------------

CHOOSING: dict[str, dict[str, Any]] = {
    "a pattern": {"target_modules": r".*\.[qv]_proj"},
    "excluded by a pattern": {"target_modules": ["q_proj", "v_proj"], "exclude_modules": r".*\.9\..*"},
    "layers by a pattern": {"target_modules": ["q_proj", "v_proj"], "layers_to_transform": [0, 1],
                            "layers_pattern": "(?:layers|h)"},
    "all": {"target_modules": "all-linear"},
    "ranks": {"target_modules": ["q_proj", "v_proj"], "rank_pattern": {r"layers\.[0]\.q_(?:proj|x)": 3},
              "alpha_pattern": {r".*0.*": 7}},
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*the base model decides:UserWarning")
@pytest.mark.parametrize("what", list(CHOOSING))
def test_no_pattern_of_theirs_is_written(what: str, tmp_path: Path) -> None:
    rank = 3 if what == "ranks" else 2
    pairs = {"model.layers.0.q_proj": (rank, rank), "model.layers.1.q_proj": (2, 2), "model.layers.1.v_proj": (2, 2)}
    folder = put(tmp_path / "a", pairs, **CHOOSING[what])
    write_adapter(tmp_path / "b", *read_adapter(folder))
    config = json.loads((tmp_path / "b" / CONFIG_FILE).read_text())
    assert isinstance(config["target_modules"], list)
    assert not any(config.get(field) for field in ("exclude_modules", "layers_to_transform", "layers_pattern"))
    written = [*config.get("rank_pattern", {}), *config.get("alpha_pattern", {}), *config["target_modules"]]
    assert all(set(name) <= set("abcdefghijklmnopqrstuvwxyz_.0123456789") for name in written), written
    assert all(peft_targets(config, name) for name in pairs)
    before, after = (read_adapter(path)[0] for path in (folder, tmp_path / "b"))
    for name in pairs:
        torch.testing.assert_close(after.modules[name].delta(), before.modules[name].delta())


def test_a_saved_module_whose_name_is_a_pattern_is_not_written(tmp_path: Path) -> None:
    folder = put(tmp_path / "a", {"q": (2, 2)}, modules_to_save=["h+$"], more={"h+$.weight": (3,)})
    with pytest.raises(AdapterFormatError, match=r"name .*peft .*pattern"):
        write_adapter(tmp_path / "b", *read_adapter(folder))


def old_rank(config: Mapping[str, Any], name: str) -> int:
    """peft before 0.14: the keys of both patterns are asked, and a name is looked up where none matches."""
    keys = [*config["rank_pattern"], *config["alpha_pattern"]]
    key = next((key for key in keys if re.match(rf".*\.{key}$", name)), name)
    return config["rank_pattern"].get(key, config["r"])


def middle_rank(config: Mapping[str, Any], name: str) -> int:
    """peft 0.14: the same for each pattern by itself."""
    keys = list(config["rank_pattern"])
    return config["rank_pattern"].get(next((k for k in keys if re.match(rf".*\.{k}$", name)), name), config["r"])


@pytest.mark.parametrize("turn", range(3))
def test_every_peft_reads_the_ranks_that_are_written(turn: int, tmp_path: Path) -> None:
    """By the rules of peft before 0.14, of 0.14, and since."""
    paths = [
        "model.layers.1.q_proj",
        "model.layers.10.q_proj",
        "model.layers.1.v_proj",
        "lm_head",
        "model.layers.2.q_proj",
    ]
    ranks = {path: 2 + (k + turn) % 3 for k, path in enumerate(paths)}
    modules = {path: LoRA(torch.ones(6, r), torch.ones(r, 5)) for path, r in ranks.items()}
    write_adapter(tmp_path, Adapter(modules), AdapterSpec({"peft_type": "LORA", "target_modules": paths}, 1.0))
    config = json.loads((tmp_path / CONFIG_FILE).read_text())
    for path, r in ranks.items():
        new = config["rank_pattern"].get(get_pattern_key(config["rank_pattern"].keys(), path), config["r"])
        assert (old_rank(config, path), middle_rank(config, path), new) == (r, r, r)
    assert AdapterFile(tmp_path).ranks == ranks
