"""Adapters from strangers: damaged, contradicting and malicious folders. Kinds of evidence: by hand and property.

Every file is made here byte by byte, by the safetensors format's own description and json, so no library can soften it.
What must come out follows from the contract alone: an `AdapterFormatError` of one line that names the place and the
reason, with exit code 2 and nothing written on the command line, within a second and a hundred megabytes. The drawn
cases (hypothesis) ask that nothing else than success or such an error ever comes out.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import re
import shutil
import struct
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedlora import read_adapter, write_adapter
from fedlora.adapters.collection import collected
from fedlora.adapters.reader import CONFIG_FILE, WEIGHTS_FILE, AdapterFile
from fedlora.errors import AdapterFormatError, FedLoRAError
from support.command_line import Said

pytestmark = pytest.mark.timeout(60)  # what blocks, as on a pipe, ends as a failure of its test
PREFIX = "base_model.model."
Header = dict[str, Any]


# ---- files by hand ---------------------------------------------------------------------------------------------------

_NUMBERS = {"F64": "d", "F32": "f", "F16": "e", "I64": "q", "I32": "i", "I8": "b", "U8": "B", "BOOL": "?"}


def tensors(shapes: Mapping[str, tuple[int, ...]], dtype: str = "F32", value: float = 0.5) -> tuple[Header, bytes]:
    """A header and the bytes that it tells of."""
    header, data = {}, b""
    for key, shape in shapes.items():
        count = math.prod(shape)
        block = struct.pack(f"<{count}{_NUMBERS[dtype]}", *[type(value)(value)] * count)
        header[key] = {"dtype": dtype, "shape": list(shape), "data_offsets": [len(data), len(data) + len(block)]}
        data += block
    return header, data


def weights(header: object, data: bytes, length: int | None = None) -> bytes:
    """The safetensors file."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def pair(path: str, d_out: int = 6, r: int = 2, d_in: int = 5) -> dict[str, tuple[int, ...]]:
    return {f"{PREFIX}{path}.lora_A.weight": (r, d_in), f"{PREFIX}{path}.lora_B.weight": (d_out, r)}


Q, V = "layers.0.q_proj", "layers.0.v_proj"
SHAPES = {**pair(Q), **pair(V, 4)}
QA, QB = pair(Q)
CONFIG: dict[str, Any] = {
    "peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"], "rank_pattern": {},
    "alpha_pattern": {}, "use_rslora": False, "init_lora_weights": True, "bias": "none", "modules_to_save": None,
    "task_type": "CAUSAL_LM", "base_model_name_or_path": "some/base", "revision": None, "inference_mode": True,
}  # fmt: skip


def put(folder: Path, config: object = CONFIG, content: bytes | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    raw = config if isinstance(config, bytes) else json.dumps(config).encode()
    (folder / CONFIG_FILE).write_bytes(raw)
    (folder / WEIGHTS_FILE).write_bytes(weights(*tensors(SHAPES)) if content is None else content)
    return folder


@pytest.fixture
def good(tmp_path: Path) -> Path:
    return put(tmp_path / "good")


def used(folder: Path, out: Path) -> None:
    """All that is done with one adapter: opened, checked, read whole, written again, and combined with itself."""
    file = AdapterFile(folder)
    file.check()
    write_adapter(out, *read_adapter(folder))
    both = collected([folder, folder], [0.7, 0.3])
    for module in both.modules:
        both.combined(module).cut()


def refused(folder: Path, why: str, main: Callable[..., Said]) -> None:
    """The whole contract of a refusal."""
    root = folder.parent
    put(root / "sound")
    with pytest.raises(AdapterFormatError, match=why) as caught:
        used(folder, root / "again")
    said = str(caught.value)
    assert "\n" not in said and str(folder) in said, said
    assert not (root / "again").exists()
    for args in (["merge", root / "sound", folder, "-o", root / "out"], ["validate", folder]):
        done = main(*args)
        assert done.code == 2 and done.err.count("\n") == 1 and re.search(why, done.err), done.err
        assert "Traceback" not in done.err and len(done.err) < 3000
    assert not (root / "out").exists()


def test_the_sound_file_is_sound(good: Path, main: Callable[..., Said], tmp_path: Path) -> None:
    """So that what the other tests refuse is refused for what they changed."""
    used(good, tmp_path / "again")
    assert main("validate", good).code == 0
    assert main("merge", good, good, "-o", tmp_path / "m").code == 0
    assert float(AdapterFile(good).lora(Q).delta()[0, 0]) == 4 / 2 * 2 * 0.25  # alpha / r times r products


# ---- weights ---------------------------------------------------------------------------------------------------------

HEADER, DATA = tensors(SHAPES)
WHOLE = weights(HEADER, DATA)


def changed(key: str = QA, **fields: object) -> bytes:
    """The sound file with another line for one tensor in its header."""
    return weights({**HEADER, key: {**HEADER[key], **fields}}, DATA)


def renamed(old: str, new: str) -> bytes:
    """Factors under another name, in the order of the file."""
    return weights({key.replace(old, new): line for key, line in HEADER.items()}, DATA)


def shaped(shapes: Mapping[str, tuple[int, ...]], dtype: str = "F32", value: float = 0.5) -> bytes:
    return weights(*tensors(shapes, dtype, value))


def twice(text: str) -> bytes:
    """A header that says `text` again at its end."""
    return weights(json.dumps(HEADER).encode()[:-1] + b", " + text.encode() + b"}", DATA)


DAMAGED = r"adapter_model\.safetensors is damaged"
# what -> (content of adapter_model.safetensors, what the refusal says)
WEIGHTS: dict[str, tuple[Callable[[], bytes], str]] = {
    "empty": (lambda: b"", DAMAGED),
    "cut in the last tensor": (lambda: WHOLE[:-4], DAMAGED),
    "giant header length": (lambda: weights(HEADER, DATA, 2**63), f"{DAMAGED}.*9,223,372,036,854,775,808"),
    "a key twice": (lambda: twice(json.dumps(QA) + ": " + json.dumps(HEADER[QA])), "occurs twice"),
    "huge shape": (lambda: changed(shape=[2**62, 2**62]), DAMAGED),
    "whole numbers": (lambda: shaped(SHAPES, "I64", 1), "type 'I64'; adapters hold"),
    "NaN": (lambda: shaped(SHAPES, value=math.nan), "holds NaN or Inf"),
    "no tensors": (lambda: weights({}, b""), "holds no lora_A and lora_B"),
    "not gathered": (lambda: shaped(dict.fromkeys(SHAPES, (0,))), "is empty.*ZeRO-3.*zero_to_fp32"),
    "no B": (lambda: shaped({k: s for k, s in SHAPES.items() if k != QB}), "q_proj.lora_B.weight' is missing.*damaged"),
    "two ranks": (lambda: shaped({**SHAPES, QA: (3, 5)}), "q_proj"),
    "another rank": (lambda: shaped({**SHAPES, **pair(Q, r=3)}), "q_proj' has rank 3, but its config says 2"),
    "an extra tensor": (lambda: shaped({**SHAPES, f"{PREFIX}norm.weight": (4,)}), "norm.weight' is neither"),
    "a magnitude": (lambda: shaped({**SHAPES, f"{PREFIX}{Q}.lora_magnitude_vector": (6,)}), "magnitude_vector' is nei"),
    "no prefix": (lambda: renamed(PREFIX, ""), "names begin with base_model"),
    **{
        f"name {name!r}": ((lambda n=name: renamed(Q, n)), "no name of a module|is neither|is damaged")
        for name in ("../../etc", "a\nb", "a\x1b[31mb", "a\u2028b", "a." * 400 + "b")
    },
}  # fmt: skip


@pytest.mark.parametrize("what", list(WEIGHTS))
def test_weights_that_are_refused(what: str, main: Callable[..., Said], tmp_path: Path) -> None:
    make, why = WEIGHTS[what]
    refused(put(tmp_path / "bad", content=make()), why, main)


def test_one_limit_and_its_option(good: Path, main: Callable[..., Said]) -> None:
    """A file of 65 GiB, a hole on the disk, is refused before anything is read; --max-bytes sets another limit."""
    size = (good / WEIGHTS_FILE).stat().st_size
    assert main("validate", good, "--max-bytes", size).code == 0
    out = good.parent / "m"
    for words in (["validate", good], ["inspect", good], ["merge", good, "-o", out], ["diff", good, good],
                  ["resize", good, "--rank", 1, "-o", out], ["audit", good, good],
                  ["export", good, "--format", "merged", "--model", "x", "-o", out]):  # fmt: skip
        assert f"--max-bytes {size} allows it" in main(*words, "--max-bytes", size - 1).complaint()
    os.truncate(good / WEIGHTS_FILE, 65 * 2**30)
    assert "69,793,218,560 bytes, more than the 68,719,476,736" in main("validate", good).complaint()


def test_a_large_tensor_is_checked_in_pieces(tmp_path: Path, main: Callable[..., Said]) -> None:
    """20 MB in two factors: sound; and a NaN as the last number of the first is found, and named."""
    shapes = pair(Q, r=2, d_in=1_300_000)
    assert main("validate", put(tmp_path / "good", content=shaped(shapes))).code == 0
    header, data = tensors(shapes)
    end = header[QA]["data_offsets"][1]
    bad = put(tmp_path / "bad", content=weights(header, data[: end - 4] + struct.pack("<f", math.nan) + data[end:]))
    assert re.search("q_proj.lora_A.* holds NaN", main("validate", bad).complaint())


def test_a_file_that_is_cut_off_meanwhile_is_refused(good: Path) -> None:
    file = AdapterFile(good)
    os.truncate(good / WEIGHTS_FILE, len(WHOLE) - 4)
    with pytest.raises(AdapterFormatError, match="has changed"):
        file.check()


def test_a_pickle_beside_the_weights_is_not_opened(good: Path, main: Callable[..., Said], tmp_path: Path) -> None:
    """Alone it is refused; beside a safetensors it is ignored. Opening it would make a directory."""

    class Trap:
        def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
            return os.mkdir, (str(tmp_path / "sprung"),)

    (good / "adapter_model.bin").write_bytes(pickle.dumps(Trap()))
    used(good, tmp_path / "again")
    shutil.rmtree(tmp_path / "again")
    (good / WEIGHTS_FILE).unlink()
    refused(good, "is not a PEFT adapter.*adapter_model.bin is a pickle", main)
    shutil.copyfile(good / "adapter_model.bin", good / WEIGHTS_FILE)
    refused(good, DAMAGED, main)
    assert not (tmp_path / "sprung").exists()


# ---- kinds of files --------------------------------------------------------------------------------------------------


def linked(folder: Path, name: str, target: str | Path) -> None:
    (folder / name).unlink()
    (folder / name).symlink_to(target)


def outside(folder: Path, name: str) -> None:
    shutil.copy(folder / name, folder.parent / "elsewhere")
    linked(folder, name, folder.parent / "elsewhere")


def instead(make: Callable[[Path], object]) -> Callable[[Path, str], None]:
    return lambda folder, name: ((folder / name).unlink(), make(folder / name))[0]


def in_a_cache_of_links(folder: Path, name: str) -> None:
    """As in the hub's cache, but the blob is a link to somewhere else."""
    blobs = folder.parent.parent / "blobs"
    blobs.mkdir()
    shutil.copy(folder / name, blobs.parent / "elsewhere")
    (blobs / "abc").symlink_to(blobs.parent / "elsewhere")
    linked(folder, name, "../../blobs/abc")


# what -> (what is done to one of the files, what the refusal says)
PLACES: dict[str, tuple[Callable[[Path, str], None], str]] = {
    "a link to the outside": (outside, "is a link to another place"),
    "a link to itself": (lambda f, n: linked(f, n, n), "cannot be read"),
    "a pipe": (instead(os.mkfifo), "not an ordinary file"),
    "a blob that is a link": (in_a_cache_of_links, "is a link to another place"),
    "missing": (instead(lambda path: None), "is not a PEFT adapter: it has no"),
}


@pytest.mark.parametrize("name", [CONFIG_FILE, WEIGHTS_FILE])
@pytest.mark.parametrize("what", list(PLACES))
def test_a_file_that_is_no_file_of_the_directory(
    what: str, name: str, main: Callable[..., Said], tmp_path: Path
) -> None:
    change, why = PLACES[what]
    folder = put(tmp_path / "snapshots" / "bad")
    change(folder, name)
    refused(folder, why, main)


def test_the_cache_of_the_hub_is_read(main: Callable[..., Said], tmp_path: Path) -> None:
    """snapshots/REVISION/FILE is a link to ../../blobs/HASH; links within the directory are fine too."""
    folder = put(tmp_path / "models--some--adapter" / "snapshots" / "0123abcd")
    blobs = folder.parent.parent / "blobs"
    blobs.mkdir()
    for name, blob in ((CONFIG_FILE, "aa11"), (WEIGHTS_FILE, "bb22")):
        shutil.move(folder / name, blobs / blob)
        (folder / name).symlink_to(f"../../blobs/{blob}")
    used(folder, tmp_path / "again")
    assert main("merge", folder, folder, "-o", tmp_path / "m").code == 0
    inside = put(tmp_path / "inside")
    shutil.move(inside / WEIGHTS_FILE, inside / "model.v2")
    (inside / WEIGHTS_FILE).symlink_to("model.v2")
    used(inside, tmp_path / "again")
    (tmp_path / "link").symlink_to(inside)  # the directory itself may be a link
    used(tmp_path / "link", tmp_path / "again")


def test_a_place_that_is_no_adapter(main: Callable[..., Said], tmp_path: Path) -> None:
    refused(tmp_path / "bad", "is not a PEFT adapter.*no such folder", main)
    (tmp_path / "bad").write_bytes(WHOLE)
    refused(tmp_path / "bad", "is not a PEFT adapter.*no folder; give", main)


# ---- configs ---------------------------------------------------------------------------------------------------------


def config(**fields: object) -> bytes:
    return json.dumps(CONFIG | fields).encode()


def literal(field: str, text: str) -> bytes:
    """The config with a field in the very letters of `text`."""
    return config(**{field: "@@"}).replace(b'"@@"', text.encode())


# what -> (content of adapter_config.json, what the refusal says)
CONFIGS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is not JSON"),
    "a list": (b"[]", "holds no JSON object"),
    "deep in a field": (literal("auto_mapping", "[" * 100_000 + "]" * 100_000), "is not JSON.*nested too deeply"),
    "a key twice inside": (literal("rank_pattern", '{"q_proj": 2, "q_proj": 3}'), "'q_proj' occurs twice"),
    "half a letter": (literal("revision", '"\\ud83d"'), "is not JSON: it holds half a letter"),
    "no fields": (b"{}", "peft_type = None"),
    "no r": (json.dumps({k: v for k, v in CONFIG.items() if k != "r"}).encode(), r"\br = None"),
    "r contradicts": (config(r=4), "q_proj' has rank 2, but its config says 4"),
    "a pattern contradicts": (config(rank_pattern={"v_proj": 3}), "v_proj' has rank 2, but its config says 3"),
    **{
        f"{field} = {text[:12]}": (literal(field, text), rf"\b{field} = ")
        for field, values in {"r": ("0", "true", "1000001"), "lora_alpha": ("0", '"2"', "1000000001")}.items()
        for text in values
    },
    "alpha of 1e400": (literal("lora_alpha", "1e400"), "is not JSON: it has "),
    "a rank of true": (literal("rank_pattern", '{"q_proj": true}'), "rank_pattern = "),
    "an alpha below 0": (literal("alpha_pattern", '{"q_proj": -1}'), "alpha_pattern = "),
    "patterns in a list": (config(rank_pattern=["q_proj"]), "rank_pattern = "),
    "another bias": (config(bias="some"), "bias = 'some'"),
    "a switch in words": (config(use_rslora="false"), "use_rslora = 'false'"),
    "a task of its own": (config(task_type="EVIL"), "task_type = 'EVIL'"),
    "a base of two lines": (config(base_model_name_or_path="a\nb"), "base_model_name_or_path = "),
    "a base of a megabyte": (config(base_model_name_or_path="a" * 10**6), "base_model_name_or_path = "),
    "saved by a pattern": (config(modules_to_save=["(a+)+$"]), "modules_to_save = "),
}


@pytest.mark.parametrize("what", list(CONFIGS))
def test_configs_that_are_refused(what: str, main: Callable[..., Said], tmp_path: Path) -> None:
    content, why = CONFIGS[what]
    refused(put(tmp_path / "bad", content), why, main)


def test_a_module_that_is_adapted_and_saved_whole(main: Callable[..., Said], tmp_path: Path) -> None:
    content = shaped({**SHAPES, f"{PREFIX}{Q}.weight": (6, 5)})
    refused(put(tmp_path / "bad", CONFIG | {"modules_to_save": ["q_proj"]}, content), "also saved whole", main)


# ---- a second and a hundred megabytes --------------------------------------------------------------------------------


def pairs(names: list[str]) -> bytes:
    """Rank 1 in float16, zero but for the last number, which is NaN: refused only after all of it was read."""
    keys = [f"{PREFIX}{name}.lora_{factor}.weight" for name in names for factor in "AB"]
    header = {k: {"dtype": "F16", "shape": [1, 1], "data_offsets": [2 * j, 2 * j + 2]} for j, k in enumerate(keys)}
    return weights(header, bytes(2 * len(keys) - 2) + struct.pack("<e", math.nan))


RANK_1 = CONFIG | {"r": 1}
ENDS = {".".join(["b"] * k): 1 for k in range(1, 17)}


def deep(words: int, count: int) -> bytes:
    return pairs([".".join(["a"] * (words - 1)) + f".{k}" for k in range(count)])


# what -> (the file, its content, the config beside it)
LARGE: dict[str, tuple[str, Callable[[], bytes], Header]] = {
    "a header of 90 MB": (WEIGHTS_FILE, lambda: weights(b" " * 90_000_000, b""), CONFIG),
    "metadata of small texts": (
        WEIGHTS_FILE,
        lambda: weights(HEADER | {"__metadata__": dict.fromkeys(map(str, range(500_000)), "")}, DATA), CONFIG),
    "one tensor too many": (WEIGHTS_FILE, lambda: deep(2, 20_001), RANK_1),
    "names of 16 words, and patterns of every length": (
        WEIGHTS_FILE, lambda: deep(16, 20_000), RANK_1 | {"rank_pattern": ENDS, "alpha_pattern": ENDS}),
    "many saved tensors": (
        WEIGHTS_FILE,
        lambda: shaped(SHAPES | {f"{PREFIX}m{k}.zz.w": (1,) for k in range(39_000)}, value=math.nan),
        CONFIG | {"modules_to_save": [*(f"s{k}" for k in range(31)), "zz"]}),
    "a config of small objects": (CONFIG_FILE, lambda: literal("x", "[" + '{"":0},' * 60_000 + "0]"), CONFIG),
}  # fmt: skip


@pytest.mark.parametrize("what", LARGE)
def test_what_claims_much_is_refused_soon_and_in_little_memory(what: str, good: Path, tmp_path: Path) -> None:
    """Beyond a program that has read an adapter; processor time, since other work on the machine is not our fault."""
    name, content, fields = LARGE[what]
    (put(tmp_path / "bad", fields) / name).write_bytes(content())
    AdapterFile(good).check()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is from now on
    before, began = peak(), time.process_time()
    with pytest.raises(AdapterFormatError, match=str(tmp_path / "bad")) as caught:
        AdapterFile(tmp_path / "bad").check()
    assert time.process_time() - began < 1 and peak() - before < 100 and len(str(caught.value)) < 1000


def peak() -> float:
    """Megabytes of memory that this process had at most."""
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) / 1024


# ---- drawn damage ----------------------------------------------------------------------------------------------------

RICH = CONFIG | {"modules_to_save": ["head"]}
RICH_SHAPES = {**SHAPES, f"{PREFIX}head.weight": (3, 6)}
FIELDS = [*CONFIG, "auto_mapping", "fan_in_fan_out", "lora_dropout", "use_dora", "target_parameters", "unheard_of"]


def only_refused(folder: Path, out: Path) -> None:
    """Success or a refusal; any other exception is the test's failure."""
    for file in out.glob("*"):  # to replace them is slow
        file.unlink()
    try:
        used(folder, out)
    except FedLoRAError as error:
        assert isinstance(error, AdapterFormatError) and "\n" not in str(error)


drawn = settings(
    max_examples=50, deadline=None, derandomize=True, database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)  # fmt: skip


@drawn
@given(
    which=st.booleans(), at=st.floats(0, 1), head=st.booleans(), cut=st.integers(0, 8), put_in=st.binary(max_size=4),
)  # fmt: skip
def test_damaged_files_are_read_or_refused(
    which: bool, at: float, head: bool, cut: int, put_in: bytes, tmp_path: Path
) -> None:
    """Some bytes replaced by others, half of them in the first 300, where the structure is."""
    parts = [json.dumps(RICH).encode(), shaped(RICH_SHAPES)]
    content = parts[which]
    place = int(at * min(len(content), 300 if head else len(content)))
    parts[which] = content[:place] + put_in + content[place + cut :]
    only_refused(put(tmp_path / "bad", *parts), tmp_path / "again")


JUNK = st.recursive(
    st.sampled_from(["q_proj", ["q_proj"], {"q_proj": None}, [[0, 1]], {"a": []}])
    | st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=5,
)


@drawn
@given(field=st.sampled_from(FIELDS), value=JUNK)
def test_a_config_with_anything_in_it_is_read_or_refused(field: str, value: object, tmp_path: Path) -> None:
    only_refused(put(tmp_path / "bad", RICH | {field: value}, shaped(RICH_SHAPES)), tmp_path / "again")
