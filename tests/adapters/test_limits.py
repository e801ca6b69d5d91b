"""What files may claim: every limit refuses by name with the option that raises it, and up to the limits all is quick.

The worst files for each limit are made here by hand; a child process of its own reads them and tells its processor time
and its peak of memory. What memory an operation takes is measured likewise, against what was foretold.
"""

from __future__ import annotations

import json
import math
import os
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import pytest

from fedlora.adapters import allocation
from fedlora.adapters.limits import Limits
from fedlora.adapters.reader import CONFIG_FILE, WEIGHTS_FILE, AdapterFile
from fedlora.adapters.untrusted_files import Stored
from fedlora.cli.options import Limit
from fedlora.errors import AdapterFormatError, ConfigError
from support.command_line import Said
from support.processes import Program

PREFIX = "base_model.model."
CONFIG: dict[str, Any] = {
    "peft_type": "LORA", "r": 2, "lora_alpha": 4, "rank_pattern": {}, "alpha_pattern": {}, "target_modules": ["q"],
    "task_type": "CAUSAL_LM", "base_model_name_or_path": "some/base",
}  # fmt: skip
EXPERTS = {"target_modules": None, "target_parameters": ["experts.up"]}
SECONDS = 3 * 3.0  # of processor time: three seconds, and a margin for a machine with other work
MEGABYTES = 500


def put(folder: Path, config: Mapping[str, Any] | bytes, header: Mapping[str, Any] | bytes, size: int = 0) -> Path:
    """An adapter of zeros, `size` bytes of them."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_FILE).write_bytes(config if isinstance(config, bytes) else json.dumps(config).encode())
    raw = header if isinstance(header, bytes) else json.dumps(header, separators=(",", ":")).encode()
    with (folder / WEIGHTS_FILE).open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        file.truncate(8 + len(raw) + size)
    return folder


def tensors(shapes: Mapping[str, tuple[str, tuple[int, ...]]]) -> tuple[dict[str, Any], int]:
    """name -> (type, shape), as a header and the bytes that it tells of."""
    header, at = {}, 0
    for name, (dtype, shape) in shapes.items():
        size = math.prod(shape) * {"F32": 4, "F16": 2}[dtype]
        header[PREFIX + name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    return header, at


def pairs(names: list[str], r: int = 2, d: int = 1, other: str = "F32") -> dict[str, tuple[str, tuple[int, ...]]]:
    found = {}
    for name in names:
        found[f"{name}.lora_A.weight"] = ("F32", (r, d))
        found[f"{name}.lora_B.weight"] = (other, (d, r))
    return found


ONE = pairs(["m.q"])

# ---- options -------------------------------------------------------------------------------------------------------


def test_every_limit_is_an_option() -> None:
    found = Limits.parse([f"{f.name}={k + 7}" for k, f in enumerate(fields(Limits))])
    assert [getattr(found, f.name) for f in fields(Limits)] == [k + 7 for k in range(len(fields(Limits)))]
    assert Limits.parse(["total=80GiB", "json=3KiB", "tensors=1_000"]) == Limits(
        total=80 * 2**30, json=3072, tensors=1000
    )
    assert Limits.parse([], max_bytes=5, max_tensors=6) == Limits(total=5, tensors=6)
    assert Limits.parse(["total=5"], max_bytes=5) == Limits(total=5)
    assert Limits.parse() == Limits()


def test_every_limit_is_in_the_help_and_on_the_page() -> None:
    """With its default, and no others: both are written down beside the class."""
    option = get_args(Limit)[1].help
    assert [f.name for f in fields(Limits)] == option.split("): ")[1].split(";")[0].split(", ")
    page = Path(__file__).parents[2].joinpath("docs/reference/adapters-from-strangers.md").read_text()
    table = {}
    for row in page.partition("| limit | default |")[2].splitlines()[2:]:
        if row.startswith("| `"):
            names, values = (cell.strip() for cell in row.split("|")[1:3])
            told = re.findall(r"half of the machine's|[\d,]*\d(?: [MG]iB)?", values)
            table |= dict(zip(re.findall(r"`(\w+)`", names), told, strict=True))
    usual = {f.name: f"{getattr(Limits(), f.name):,}" for f in fields(Limits)}
    usual |= {"header": "32 MiB", "json": "8 MiB", "total": "64 GiB", "memory": "half of the machine's"}
    assert (Limits().header, Limits().json, Limits().total) == (32 * 2**20, 8 * 2**20, 64 * 2**30)
    assert table == usual


@pytest.mark.parametrize(
    "text",
    ["tensors=0", "tensors=-1", "tensors=nan", "tensors=", "tensors", "=5", "", "tensor=5", "tensors=1e6",
     "tensors=inf", "tensors=2.5", "tensors=٣", "total=1XiB", "total=9999999999999TiB", "tensors=" + "9" * 5000,
     "x" * 10_000],
)  # fmt: skip
def test_limits_that_are_none(text: str, main: Callable[..., Said], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--limit"):
        Limits.parse([text])
    said = main("validate", put(tmp_path / "a", CONFIG, *tensors(ONE)), "--limit", text).complaint()
    assert len(said) < 500


@pytest.mark.parametrize("option", ["--max-bytes", "--max-tensors"])
@pytest.mark.parametrize("value", ["0", "-5"])
def test_shorthands_of_zero(option: str, value: str, main: Callable[..., Said], tmp_path: Path) -> None:
    """0 meant the default once, without a word."""
    assert option in main("validate", put(tmp_path / "a", CONFIG, *tensors(ONE)), f"{option}={value}").complaint()


def test_two_values_for_one_limit(main: Callable[..., Said], tmp_path: Path) -> None:
    folder = put(tmp_path / "a", CONFIG, *tensors(ONE))
    for given in (["--max-tensors", "5", "--limit", "tensors=6"], ["--limit", "tensors=5", "--limit", "tensors=6"]):
        said = main("validate", folder, *given).complaint()
        assert "contradict" in said and "5" in said and "6" in said


@pytest.mark.parametrize(
    "command", ["validate", "inspect", "diff", "merge", "export", "audit"]
)  # fmt: skip
def test_every_command_that_reads_adapters_takes_them(
    command: str, main: Callable[..., Said], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With room for one tensor only, a pair is refused by each of them, before anything else is done."""
    monkeypatch.chdir(tmp_path)
    folder = put(tmp_path / "a", CONFIG, *tensors(ONE))
    more: dict[str, list[object]] = {
        "diff": [folder, folder], "merge": [folder, folder, "-o", "out"],
        "export": [folder, "--for", "merged", "--base", folder, "-o", "out"],
        "audit": [folder, folder],
    }  # fmt: skip
    said = main(command, *more.get(command, [folder]), "--limit", "tensors=1").error()
    assert "names 2 tensors" in said and "--limit tensors=2" in said
    assert not (tmp_path / "out").exists()


def _over() -> dict[str, tuple[Mapping[str, Any] | bytes, Mapping[str, Any] | bytes, int, str]]:
    """limit -> (config, header, bytes, a value of the limit that this is beyond)."""
    deep: Any = []
    for _ in range(6):
        deep = [deep]
    many = tensors(pairs([f"m{k}.q" for k in range(3)]))
    heads = tensors({**pairs([f"m{k}.q" for k in range(3)]), "a.x": ("F32", (1,)), "b.x": ("F32", (1,))})
    experts = tensors(pairs(["x.experts"], r=6))
    return {
        "header": (CONFIG, *tensors(ONE), "100"),
        "json": (CONFIG, *tensors(ONE), "100"),
        "depth": (CONFIG | {"eva_config": {"a": deep}}, *tensors(ONE), "5"),
        "values": (CONFIG, *tensors(ONE), "20"),
        "tensors": (CONFIG, *many, "5"),
        "dimensions": (CONFIG, *tensors({"m.q.lora_A.weight": ("F32", (2, 1, 1, 1)), "m.q.lora_B.weight":
                                         ("F32", (1, 2, 1, 1))}), "3"),
        "modules": (CONFIG | EXPERTS, *experts, "2"),
        "experts": (CONFIG | EXPERTS, *experts, "2"),
        "name": (CONFIG, *tensors(ONE), "10"),
        "questions": (CONFIG | {"modules_to_save": ["a", "b"]}, *heads, "11"),
        "total": (CONFIG, *tensors(ONE), "50"),
        "memory": (CONFIG, *tensors(pairs(["m.q"], d=100)), "1000"),
        "work": (CONFIG, *tensors(pairs(["m.q"], d=100)), "1000"),
    }  # fmt: skip


_BY_TIME = ("pattern_seconds",)  # what a machine does in a second is no fixed number: test_patterns has it


@pytest.mark.parametrize("name", [f.name for f in fields(Limits) if f.name not in _BY_TIME])
def test_a_refusal_names_the_limit_and_its_option(name: str, tmp_path: Path, main: Callable[..., Said]) -> None:
    """And what it proposes is enough: with it, the same file is taken."""
    config, header, size, low = _over()[name]
    folder = put(tmp_path / "a", config, header, size)
    command = ["inspect" if name in ("memory", "work") else "validate", folder]
    assert main(*command).code == 0
    said = main(*command, "--limit", f"{name}={low}").complaint()
    assert f"--limit {name}" in said and re.search(rf"\b{low}\b", said.replace(",", "")), said
    proposed = re.search(rf"--limit ({name}=\d+)", said)
    assert main(*command, "--limit", proposed[1] if proposed else f"{name}=100").code == 0


# ---- up to the limits, quick ---------------------------------------------------------------------------------------

many_names = [f"m{k}.q" for k in range(50_000)]


def heads(count: int, shape: tuple[int, ...] = (0,)) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {f"m{k}.last.x": ("F32", shape) for k in range(count)}


def _nested(count: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Six parameters in each of `count` modules, of ranks that leave their order open."""
    paths = [f"x{k}.e{'.base_layer' * depth}" for k in range(count) for depth in range(6)]
    return pairs(paths, r=12)


RAW = 32 * 2**20 - 64
# what -> (config, header, bytes of data)
WORST: dict[str, Callable[[], tuple[Any, ...]]] = {
    "tensors": lambda: (CONFIG, *tensors(pairs(many_names))),
    "tensors with long names": lambda: (
        CONFIG, *tensors(pairs([f"{k:05}" + ".abcdefgh" * 20 + ".q" for k in range(50_000)]))),
    "tensors of two types in turn": lambda: (CONFIG, *tensors(pairs(many_names, other="F16"))),
    "experts": lambda: (CONFIG | EXPERTS, *tensors(pairs([f"x{k}.experts" for k in range(10)], r=20_000))),
    "nested parameters": lambda: (
        CONFIG | {"target_modules": None, "target_parameters": [f"e.{c}" for c in "abcdef"],
                  "rank_pattern": {f"e.{c}": r for c, r in zip("abcdef", (1, 2, 3, 4, 6, 12), strict=True)}},
        *tensors(_nested(8_000))),
    "parameters' names": lambda: (
        CONFIG | {"target_parameters": [f"m{k}.q.{'abcdefgh' * 8}" for k in range(100_000)]},
        *tensors(pairs(many_names[:25]))),
    "saved modules": lambda: (
        CONFIG | {"modules_to_save": [f"m{k}.last" for k in range(49)] + ["last"]}, *tensors({**heads(99_998), **ONE})),
    "saved modules' names": lambda: (CONFIG | {"modules_to_save": [f"s{k}" for k in range(600_000)]}, *tensors(ONE)),
    "targets' names": lambda: (
        CONFIG | {"target_modules": [f"s{k}" for k in range(600_000)] + ["q"]}, *tensors(pairs(many_names))),
    "literal patterns": lambda: (
        CONFIG | {"rank_pattern": dict.fromkeys(many_names, 2)}, *tensors(pairs(many_names))),
    "dimensions": lambda: (
        CONFIG | {"modules_to_save": ["last"]}, *tensors({**heads(40_000, (1,) * 15 + (0,)), **ONE})),
    "lists": lambda: (CONFIG, b'{"a":[' + b"[]," * (RAW // 3 - 10) + b"[]]}", 0),
    "lists up to the limit": lambda: (CONFIG, b'{"a":[' + b"[]," * 740_000 + b"[]]}", 0),
    "objects up to the limit": lambda: (CONFIG, b'{"a":[' + b"{}," * 740_000 + b"{}]}", 0),
    "keys": lambda: (CONFIG, b'{"__metadata__":{' + b",".join(b'"k%d":""' % k for k in range(740_000)) + b"}}", 0),
    "depth": lambda: (CONFIG, b"[" * (RAW // 2) + b"]" * (RAW // 2), 0),
    "a long text": lambda: (CONFIG, b'{"__metadata__":{"a":"' + "\U0001f600".encode() + b"x" * (RAW - 40) + b'"}}', 0),
    "escapes": lambda: (CONFIG, b'{"__metadata__":{"a":"' + b"\\ud83d\\ude00" * (RAW // 12 - 10) + b'"}}', 0),
    "half a text": lambda: (CONFIG, b'{"a":"' + b'\\"' * (RAW // 2 - 10), 0),
    "half a text and half an escape": lambda: (CONFIG, b'{"a":"' + b'\\"' * (RAW // 2 - 10) + b"\\", 0),
    "digits": lambda: (CONFIG, b'{"a":[' + (b"1" * 499 + b",") * (RAW // 500 - 10) + b"1]}", 0),
    "one number": lambda: (CONFIG, b'{"a":' + b"1" * (RAW - 10) + b"}", 0),
    "unknown fields": lambda: (CONFIG | {f"f{k}": None for k in range(400_000)}, *tensors(ONE)),
    "keys that come twice": lambda: (
        b"{" + b",".join(b'"k%d":0' % (k % 300_000) for k in range(600_000)) + b"}", *tensors(ONE)),
    "a hole of 63 GiB": lambda: (CONFIG, *tensors({
        "m.q.lora_A.weight": ("F32", (2, 63 * 2**27)), "m.q.lora_B.weight": ("F32", (2, 2))})),
}  # fmt: skip

CHILD = """
import json, sys, time, warnings
import torch
from fedlora.adapters.reader import AdapterFile
from fedlora.errors import AdapterFormatError
warnings.simplefilter("ignore")
def memory(field):
    return next(int(line.split()[1]) // 1024 for line in open("/proc/self/status") if line.startswith(field))
for folder in sys.argv[1:]:
    open("/proc/self/clear_refs", "w").write("5")
    before, begun, said = memory("VmRSS"), time.process_time(), "sound"
    try:
        file = AdapterFile(folder)
        file.check()
    except AdapterFormatError as error:
        said = str(error)
    file = None
    print(json.dumps([time.process_time() - begun, memory("VmHWM") - before, said]), flush=True)
"""


@pytest.mark.quick(1)
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="memory is measured as Linux tells it")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", range(10))
def test_any_file_up_to_the_limits_is_judged_soon_and_in_little_memory(
    part: int, tmp_path: Path, program: Callable[..., Program]
) -> None:
    names = list(WORST)[part::10]
    folders = [put(tmp_path / str(k), *WORST[name]()) for k, name in enumerate(names)]
    (tmp_path / "child.py").write_text(CHILD)
    done = program(tmp_path / "child.py", *folders).ended()
    assert done.returncode == 0, done.stderr
    told = dict(zip(names, map(json.loads, done.stdout.splitlines()), strict=True))
    slow = {name: found for name, found in told.items() if found[0] > SECONDS or found[1] > MEGABYTES}
    assert not slow
    assert all("\n" not in said and len(said) < 1500 for *_, said in told.values())
    assert all(told[name][2] == "sound" for name in names if name in SOUND), told


SOUND = {"tensors", "tensors with long names", "tensors of two types in turn", "experts", "saved modules",
         "literal patterns", "dimensions", "a hole of 63 GiB"}  # fmt: skip


def test_a_file_with_a_hole_is_judged_and_not_loaded(tmp_path: Path) -> None:
    """63 GiB that take no disk are zeros; to have them in memory is another question."""
    file = AdapterFile(put(tmp_path / "a", *WORST["a hole of 63 GiB"]()), limits=Limits(memory=2**33))
    file.check()
    with pytest.raises(AdapterFormatError, match=r"reading module 'm\.q' would take .* --limit memory="):
        file.lora("m.q")


# ---- memory, foretold ----------------------------------------------------------------------------------------------

MERGES = """
import json, sys, torch
from fedlora.core.lora import LoRA
from fedlora.adapters.truncation import combine
def memory(field):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(field))
def lora(d_out, d_in, r):
    return LoRA(torch.randn(d_out, r).to(dtype), torch.randn(r, d_in).to(dtype))
for count, d_out, d_in, r, dtype in json.loads(sys.argv[1]):
    dtype = getattr(torch, dtype)
    combine("warm", [lora(8, 8, 2)] * 2, [0.5, 0.5]).cut(4)
    open("/proc/self/clear_refs", "w").write("5")
    before = memory("VmRSS")
    combine("m", [lora(d_out, d_in, r) for _ in range(count)], [1 / count] * count).cut(count * r)
    print(memory("VmHWM") - before)
"""
MERGED = [(8, 4096, 4096, 16, "bfloat16"), (2, 60_000, 512, 64, "float32"), (4, 300, 9000, 400, "float64")]


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="memory is measured as Linux tells it")
def test_merging_takes_no_more_memory_than_foretold(tmp_path: Path, program: Callable[..., Program]) -> None:
    """Nor so much less that honest adapters are refused for nothing."""
    (tmp_path / "merges.py").write_text(MERGES)
    done = program(tmp_path / "merges.py", json.dumps(MERGED)).ended()
    assert done.returncode == 0, done.stderr
    for (count, d_out, d_in, r, dtype), line in zip(MERGED, done.stdout.splitlines(), strict=True):
        name, size = {"bfloat16": ("BF16", 2), "float32": ("F32", 4), "float64": ("F64", 8)}[dtype]
        pair = (Stored(name, (d_out, r), 0, d_out * r * size), Stored(name, (r, d_in), 0, d_in * r * size))
        foretold, taken = allocation.bytes_to_merge([pair] * count), int(line)
        assert taken <= foretold + 2**23 and foretold <= 4 * taken, (dtype, taken, foretold)


def test_work_that_grows_with_the_cube_is_told_before_it_begins(main: Callable[..., Said], tmp_path: Path) -> None:
    """Two modules of rank 3000 took minutes, and files of a few MB could ask for days: 4 (d_out + d_in) r^2 for QR and
    40 r^3 for the SVD, summed over modules by hand. They are files of holes, and nothing of them is read."""
    d = 16_384
    shapes = {f"q.lora_{f}.weight": ("F16", shape) for f, shape in (("A", (d, d)), ("B", (d, d)))}
    folder = put(tmp_path / "a", {**CONFIG, "r": d, "lora_alpha": d}, *tensors(shapes))
    said = main("resize", folder, "--rank", "1", "--out", tmp_path / "b", "--limit", "memory=1TiB").complaint()
    assert f"{(4 * 2 * d + 40 * d) * d**2:,} operations, some 5.9 h" in said
    assert "--limit work=" in said
    assert not (tmp_path / "b").exists()
    assert "--limit work=" in main("audit", folder, folder, "--limit", "memory=1TiB").complaint()
