"""Strangers' patterns and names. Kinds of evidence: comparison with peft's own functions, property, and by hand.

What a pattern means is what peft 0.21's `get_pattern_key` and `check_target_module_exists` say of it, called here. What
may be refused is what peft fails on, and what is beyond a bound that the refusal names.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings
import zipfile
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft.tuners.tuners_utils import _ExcludedModule, check_target_module_exists
from peft.utils.other import get_pattern_key
from safetensors.torch import save_file

import fedlora
from fedlora import Adapter, LoRA, read_adapter, write_adapter
from fedlora.adapters import patterns
from fedlora.adapters.io import AdapterSpec
from fedlora.adapters.patterns import PatternLimits, Question, literal, matches
from fedlora.adapters.reader import CONFIG_FILE, WEIGHTS_FILE, AdapterFile
from fedlora.adapters.resolved import resolve
from fedlora.errors import AdapterFormatError
from support.command_line import Said

pytestmark = pytest.mark.timeout(60)
PREFIX = "base_model.model."
drawn = settings(deadline=None, derandomize=True, database=None)

# ---- what is drawn ---------------------------------------------------------------------------------------------------

WORDS = ("a", "b", "ab", "q_proj", "layers", "0", "1", "12", "é", "A", "k", "K", "a+b", "m(1)", "x-y")
names = st.lists(st.sampled_from(WORDS), min_size=1, max_size=5).map(".".join)
letters = st.sampled_from(["a", "b", "q_proj", "layers", "0", "12", "é", "ß", "A", "K", "K", r"\.", ".", "_", "-"])
plain_patterns = st.builds(lambda start, parts: start + "".join(parts), st.sampled_from(["", "^"]), st.lists(letters))
ATOMS = st.sampled_from([
    r"\d", r"\w", r"\W", r"\s", r"\b", r"\B", r"\A", r"\Z", "^", "$", "[ab]", "[^.]", r"[\w-]", "[a-k]", "[]a]", r"\1",
    r"\2", "(?P=n)", "(?:)", "(?#no)", r"\x61", r"\u00e9", r"\N{LATIN SMALL LETTER A}", r"\141", "(?i)", "(?x)a b",
    "[[:alpha:]]", r"\p{L}", r"\m", "{", "}",
    "a{,2}", "a{2,1}", "(?i:A)", "(?-i:a)", "(?a:\\w)", "(?s:.)", "|", ")", "\n",
    "(?:a){e<=1}", r"\X",
])  # fmt: skip
AROUND = st.sampled_from([
    "({})", "(?:{})", "(?P<n>{})", "(?={})", "(?!{})", "(?<={})", "(?<!{})", "(?>{})", "(?i:{})",
    "(?({0})a|b)", "(?(1){}|b)",
    "{}*", "{}+", "{}?", "{}*?", "{}++", "{}?+", "{}{{2}}", "{}{{1,3}}", "{}{{,2}}+", "{}|b", "(?P<n>a){}(?P=n)",
])  # fmt: skip
any_patterns = st.recursive(
    letters | ATOMS,
    lambda inner: (
        st.lists(inner, min_size=1, max_size=3).map("".join)
        | st.builds(
            lambda around, part: around.replace("{{", "{").replace("}}", "}").replace("{}", part), AROUND, inner
        )
    ),
    max_leaves=6,
)


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


def compared(config: dict[str, Any], asked: list[str]) -> None:
    """The same ranks and targets as peft's, or a refusal where peft fails or a bound is named."""
    config = {"r": 99, "lora_alpha": 1, "target_modules": [], **config}
    try:
        expected = [(peft_rank(config.get("rank_pattern") or {}, name), peft_targets(config, name)) for name in asked]
    except (re.error, OverflowError) as error:
        with pytest.raises(AdapterFormatError, match=r"is not a regular expression|counts"):
            resolve(config, asked)
        assert error is not None
        return
    try:
        said = resolve(config, asked)
    except AdapterFormatError as error:
        # peft compiles a pattern when it comes to it; here all are, and it would fail for another model's names.
        assert re.search("more than the|is not a regular expression", str(error)), error
        if "is not a" in str(error):
            with pytest.raises(re.error):
                for pattern in _all_patterns(config):
                    re.compile(pattern)
        return
    assert said.targeted is not None
    assert [(said.rank(name), said.targeted[name]) for name in asked] == expected


def _all_patterns(config: Mapping[str, Any]) -> list[str]:
    whole = [config[field] for field in ("target_modules", "exclude_modules") if isinstance(config.get(field), str)]
    lists = config.get("layers_pattern") or []
    return [
        *whole, *(rf"(.*\.)?({key})$" for key in config.get("rank_pattern") or {}),
        *(rf"(^|.*\.){m}($|\..*)" for m in config.get("modules_to_save") or []),
        *(rf"(?:^|.*?\.){p}\.(?P<idx>\d+)\." for p in ([lists] if isinstance(lists, str) else lists)),
    ]  # fmt: skip


# ---- as peft means them ----------------------------------------------------------------------------------------------


@settings(drawn, max_examples=400)
@given(st.lists(plain_patterns, min_size=1, max_size=4), st.lists(names, min_size=1, max_size=5))
def test_names_as_patterns_mean_what_peft_takes_them_for(keys: list[str], asked: list[str]) -> None:
    """Looked up, never matched: no child process is needed."""
    assert all(literal(key) is not None for key in keys)
    compared({"rank_pattern": {key: k for k, key in enumerate(keys, 1)}}, asked)


@settings(drawn, max_examples=150)
@given(st.lists(any_patterns | plain_patterns, min_size=1, max_size=4), st.lists(names, min_size=1, max_size=5))
def test_any_pattern_means_what_peft_takes_it_for(keys: list[str], asked: list[str]) -> None:
    compared({"rank_pattern": {key: k for k, key in enumerate(keys, 1)}}, asked)


some_names = st.lists(names | st.sampled_from(WORDS), max_size=3)


@settings(drawn, max_examples=200)
@given(
    targets=some_names | any_patterns, excluded=st.none() | some_names | any_patterns,
    saved=st.lists(names | plain_patterns.filter(lambda p: p) | any_patterns, max_size=2),
    layers=st.none() | st.integers(0, 12) | st.lists(st.sampled_from([0, 1, 12]), max_size=2),
    lists=st.none() | st.sampled_from(["layers", "a", r"layers|a", "", "k.0", "[ab]+"]) | st.just(["b", "layers"]),
    asked=st.lists(names, min_size=1, max_size=6),
)  # fmt: skip
def test_targets_are_those_of_peft(
    targets: Any, excluded: Any, saved: list[str], layers: Any, lists: Any, asked: list[str]
) -> None:
    if isinstance(targets, str):  # peft refuses both together, and a config has no pattern without letters
        layers = lists = None
        targets = targets or "a"
    if layers is None:
        lists = None
    compared({"target_modules": targets, "exclude_modules": excluded, "modules_to_save": saved,
              "layers_to_transform": layers, "layers_pattern": lists}, asked)  # fmt: skip


@pytest.mark.parametrize("lists", [None, "", [], "layers", ["a", "layers"], ["layers", "a"], "1"], ids=str)
@pytest.mark.parametrize("layers", [0, 1, [0], [0, 1], []], ids=str)
def test_layers_are_those_of_peft(layers: Any, lists: Any, no_child: None) -> None:
    """Every name of up to four of five words; targets by their end, and two in full, which are targets in any layer."""
    asked = [".".join(words) for n in range(1, 5) for words in product(("a", "layers", "0", "1", "\u0661"), repeat=n)]
    targets = ["a", "1.layers", "a.0.layers.1", "layers.0.layers"]
    compared({"target_modules": targets, "layers_to_transform": layers, "layers_pattern": lists}, asked)


@pytest.mark.parametrize(
    ("key", "name"),
    [("(?:q_prxj){e<=1}", "q_proj"), ("[[:alpha:]]+_proj", "q_proj"), (r"q_\p{L}+", "q_proj"),
     ("q_proj(?V1)", "q_proj"), (r"(?<=q.*)proj", "q_proj"),
     (r"(?|q_(p)roj|b)", "q_proj"), (r"q_\X+", "q_proj"), ("[q--a]_proj", "q_proj")],
)  # fmt: skip
def test_what_another_engine_would_match(key: str, name: str) -> None:
    """Written for the package `regex`: no match, or an error, in `re`, and so in peft."""
    compared({"rank_pattern": {key: 200}}, [name])


def test_a_key_that_is_the_name_itself_is_taken_though_it_does_not_match() -> None:
    """peft looks the name up where no pattern matches: "a+b" as a pattern means aab, as a key the module a+b."""
    config = {"r": 2, "lora_alpha": 4, "target_modules": ["a+b"], "alpha_pattern": {"a+b": 400}}
    assert resolve(config, ["a+b"]).alpha("a+b") == 400


# ---- bounds ----------------------------------------------------------------------------------------------------------

BOUNDS: dict[str, tuple[str, str]] = {
    "length": ("a" * 4_001, "has 4,001 letters, more than the 4,000 allowed"),
    "brackets": ("(" * 201 + ")" * 201, "opens 201 brackets, more than the 200 allowed"),
    "counts": ("a{1001}", "counts 1,001 repetitions, more than the 1,000 allowed"),
    "nested counts": ("(?:(?:a{100}b){0,10}c){2}", "counts 2,000 repetitions"),
    "counts of all kinds": ("(a{11}?){11}+|(?=(b{10,}){11})(?>(c{12}){12}){12}", "counts 1,728 repetitions"),
    "counts in conditions": ("(a)?(?(2)(?:b{100}){100}|c)", "counts 10,000 repetitions"),
}  # fmt: skip


@pytest.mark.parametrize("what", list(BOUNDS))
def test_a_pattern_beyond_a_bound_is_refused_with_the_number(what: str) -> None:
    pattern, why = BOUNDS[what]
    with pytest.raises(AdapterFormatError, match=why) as caught:
        matches([Question("rank_pattern", "end", (pattern,))], ["q_proj"])
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


def test_as_many_patterns_as_a_file_may_have() -> None:
    with pytest.raises(AdapterFormatError, match=r"1,001 of its patterns.* 1,000 "):
        matches([Question("rank_pattern", "end", tuple(f"a{k}?" for k in range(1_001)))], ["q_proj"])
    many = tuple("a" * 3_990 + str(k) for k in range(2_100))
    with pytest.raises(AdapterFormatError, match="letters, more than the 8,000,000"):
        matches([Question("rank_pattern", "end", many)], ["q_proj"])


BOMBS = ("(a+)+$", "(a|a?)+$", "([a-z]+)*$", "((a*)*)*c", r"(?:(a)|\1?a)+$",
         "(?=(a+)+b)(a+)+$c", "(?:(?:a|b|ab)*)*c", "(?i:(A+)+)$")  # fmt: skip


def processes() -> set[int]:
    """The children of this process."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            facts = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(facts[1]) == os.getpid() and facts[0] != "Z":
            found.add(int(stat.parent.name))
    return found


linux = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks into /proc")


@linux
@pytest.mark.parametrize("bomb", BOMBS)
def test_matching_that_does_not_end_is_refused_and_leaves_nothing_running(
    bomb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = processes()
    begun = time.perf_counter()
    with pytest.raises(AdapterFormatError, match=r"does not end within 1 s .*; peft, .*, would hang") as caught:
        matches([Question("rank_pattern", "end", (bomb,))], ["a" * 60 + "!"] * 3, PatternLimits(seconds=1))
    assert "\n" not in str(caught.value) and time.perf_counter() - begun < 20
    assert processes() == before


def test_the_command_says_so(main: Any, tmp_path: Path) -> None:
    folder = put(tmp_path / "bad", {"q" * 40: (2, 2)}, rank_pattern={"(q+)+$(?<=!)": 2})
    done: Said = main("validate", folder)
    assert done.code == 2 and done.err.count("\n") == 1
    assert "rank_pattern" in done.err and "would hang on them" in done.err and "--limit pattern_seconds" in done.err


@linux
def test_the_memory_of_the_child_is_bounded() -> None:
    """A pattern that would fill gigabytes; its own peak is read by the one who started it, in a process without us."""
    program = textwrap.dedent("""
        import json, subprocess, sys, threading, time
        text, limits = sys.argv[1], ["10", "20", str(64 * 2**20), str(10**10)]
        child = subprocess.Popen([sys.executable, "-I", "-S", "-c", text, *limits], stdin=-1, stdout=-1, stderr=-3)
        peak = 0
        def watch():
            global peak
            while child.poll() is None:
                try:
                    lines = open(f"/proc/{child.pid}/status").read().splitlines()
                    peak = max([peak, *(int(l.split()[1]) for l in lines if l.startswith("VmHWM"))])
                except OSError:
                    return
                time.sleep(0.005)
        watcher = threading.Thread(target=watch); watcher.start()
        asked = [{"kind": "end", "patterns": ["(?:(?:x?){30000}){30000}"]}]
        child.communicate((json.dumps(asked) + "\\n" + json.dumps("a" * 100) + "\\n").encode())
        watcher.join()
        print(child.returncode, peak)
    """)
    done = subprocess.run([sys.executable, "-I", "-c", program, patterns._program()], capture_output=True, text=True)
    code, peak = map(int, done.stdout.split())
    assert code == 3 and peak < 100 * 1024  # kB
    limits = PatternLimits(counts=10**10, memory=64 * 2**20)
    with pytest.raises(AdapterFormatError, match="more than 64 MB; peft"):
        matches([Question("rank_pattern", "end", ("(?:(?:x?){30000}){30000}",))], ["a"], limits)


@linux
def test_the_child_ends_when_we_are_killed() -> None:
    """By its own clock, though it matches without a pause and nobody waits for it."""
    program = (
        "from fedlora.adapters.patterns import *; "
        "matches([Question('f', 'end', ('(a+)+$',))], ['a' * 90 + '!'], PatternLimits(seconds=50, clock=4))"
    )
    ours = subprocess.Popen([sys.executable, "-c", program], env=here(), start_new_session=True)
    try:
        child = 0
        deadline = time.monotonic() + 50
        while not child and time.monotonic() < deadline:
            child = next((pid for pid in session(ours.pid) if pid != ours.pid), 0)
            time.sleep(0.05)
        assert child
    finally:
        ours.kill()
        ours.wait()
    while session(ours.pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not session(ours.pid)


def here() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(fedlora.__file__).parents[1])}


def session(leader: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            facts = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(facts[3]) == leader and facts[0] != "Z":
            found.append(int(stat.parent.name))
    return found


# ---- wherever it is called from --------------------------------------------------------------------------------------

ASKED = Question("rank_pattern", "end", (r"layers\.\d+\.q_proj", "v_proj"))
NAMES = ["model.layers.1.q_proj", "model.layers.0.v_proj", "layers.x.q_proj"]
TOLD: list[list[int | None]] = [[0, 1, None]]


def _is_daemon() -> bool:
    return multiprocessing.current_process().daemon


def ask(_: object = None) -> list[list[int | None]]:
    return matches([ASKED], NAMES)


def test_from_threads() -> None:
    found: list[list[list[int | None]]] = []
    threads = [threading.Thread(target=lambda: found.append(ask())) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [TOLD] * 6


def test_from_a_worker_process(forked: Any) -> None:
    """A daemon, which may have no children of multiprocessing's."""
    with forked.Pool(1) as pool:
        assert pool.apply(_is_daemon)
        assert pool.map(ask, [None]) == [TOLD]


@linux
def test_from_an_archive_in_a_directory_that_is_gone(tmp_path: Path) -> None:
    source = Path(patterns.__file__).parents[1]
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        for name in ("adapters/patterns.py", "adapters/pattern_child.py", "errors.py"):
            archive.write(source / name, f"fedlora/{name}")
        for name in ("", "adapters/"):
            archive.writestr(f"fedlora/{name}__init__.py", "")
    program = textwrap.dedent(f"""
        import os, sys
        os.makedirs("gone"); os.chdir("gone"); os.rmdir({str(tmp_path / "gone")!r})
        sys.path.insert(0, {str(tmp_path / "all.zip")!r})
        from fedlora.adapters.patterns import Question, matches
        print(matches([Question("rank_pattern", "end", {ASKED.patterns!r})], {NAMES!r}))
    """)
    done = subprocess.run([sys.executable, "-I", "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.strip() == str(TOLD), done.stderr


def test_without_limits_of_the_system_the_clock_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Windows, which has no module `resource`."""
    program = patterns._program().replace("import resource\n", "raise ImportError\n")
    monkeypatch.setattr(patterns, "_program", lambda: program)
    assert ask() == TOLD
    limits = PatternLimits(seconds=1, clock=2)
    with pytest.raises(AdapterFormatError, match="would hang"):
        matches([Question("rank_pattern", "end", ("(a+)+$",))], ["a" * 60 + "!"], limits)


@pytest.mark.parametrize("executable", ["", None, "/nowhere/python", shutil.which("true")])
def test_where_no_process_can_be_started_nothing_is_matched(
    executable: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patterns.sys, "executable", executable)
    with pytest.raises(AdapterFormatError, match="none can be started") as caught:
        ask()
    assert "\n" not in str(caught.value)
    assert matches([Question("rank_pattern", "end", ("v_proj",))], NAMES) == [[None, 0, None]]


# ---- names -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def no_child(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a child process was started")

    monkeypatch.setattr(subprocess, "Popen", refuse)


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


def test_names_need_no_child(no_child: None, tmp_path: Path) -> None:
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


def test_very_many_names_and_patterns_take_time_that_is_bounded(no_child: None) -> None:
    """600,000 names and 20,000 patterns would be 12,000,000,000 questions; peft would ask them."""
    asked = [f"model.layers.{k % 128}.mlp.experts.{k // 128}.gate_proj" for k in range(600_000)]
    keys = [f"model.layers.{k % 128}.mlp.experts.{k // 128}.gate_proj" for k in range(20_000)]
    begun = time.process_time()
    (found,) = matches([Question("rank_pattern", "end", tuple(keys))], asked, PatternLimits(lookups=100_000_000))
    assert found[:20_000] == list(range(20_000)) and found.count(None) == 580_000
    assert time.process_time() - begun < 10


def test_names_made_to_be_compared_are_refused_after_a_while(no_child: None) -> None:
    """Each of 16,000 patterns with its own places for any letter; and patterns that are endings of every name."""
    masks = tuple("".join("." if k >> i & 1 else "a" for i in range(14)) + "b" * 40 for k in range(2**14))
    chains = tuple(".".join("a" * k) + "b" for k in range(1, 250))
    long = [".".join("a" * 250) + str(k) for k in range(60_000)]
    cases: list[tuple[patterns.Kind, tuple[str, ...], list[str]]] = [
        ("end", masks, ["c" * 54] * 100_000), ("end", chains, long), ("inside", chains[:40], long),
    ]  # fmt: skip
    for kind, keys, asked in cases:
        begun = time.process_time()
        with pytest.raises(AdapterFormatError, match="comparisons of its names"):
            matches([Question("rank_pattern", kind, keys)], asked, PatternLimits(lookups=5_000_000))
        assert time.process_time() - begun < 5  # a fifth of what files have


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
     ({"layers_pattern": "layers"}, "peft refuses that"), ({"target_modules": "("}, "is not a regular expression"),
     ({"modules_to_save": ["a("]}, "is not a regular expression"), ({"exclude_modules": "[[:a"}, "is not a regular")],
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
    folder = put(tmp_path / "a", {"q": (2, 2)}, modules_to_save=["(h+)+$"], more={"(h+)+$.weight": (3,)})
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


@linux
def test_the_signal_that_ends_it_leaves_no_core(tmp_path: Path) -> None:
    """The limit of processor time kills with a signal that would write one."""
    command = [sys.executable, "-I", "-S", "-c", patterns._program(), "1", "20", str(2**27), "1000"]
    asked = json.dumps([{"kind": "end", "patterns": ["(a+)+$"]}]) + "\n" + json.dumps("a" * 60 + "!") + "\n"
    done = subprocess.run(
        command, input=asked.encode(), cwd=tmp_path, stderr=subprocess.DEVNULL, stdout=subprocess.PIPE
    )
    assert done.returncode == -signal.SIGXCPU
    assert not list(tmp_path.iterdir())
