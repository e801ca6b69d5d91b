"""What fedlora makes of hostile adapters, in a process of its own, and whether that is refused in a line or right.

A child with a limit on memory runs every operation on a case and measures it; whoever asks can end it when it hangs.
The oracle of what is accepted is peft: it loads the same folders, and what fedlora wrote, on a fresh base in float64.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import resource
import shutil
import sys
import time
import traceback
import unicodedata
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from support.hostile import CONFIG_FILE, KINDS, PREFIX, WEIGHTS_FILE, Asked, Layers

SECONDS, MEGABYTES, LETTERS = 3.0, 500, 3000
PATIENCE = 45.0  # seconds by the clock for one operation, on a machine that does other things too
OURS = "operation"


# ---- bases and peft --------------------------------------------------------------------------------------------------


def build(layers: Layers) -> nn.Module:
    """The base model, in float64, always the same."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        root = nn.Module()
        for path, sizes in layers.items():
            home = root
            for name, child in pairwise(path.split(".")):
                if name not in home._modules:
                    home.add_module(name, nn.ModuleList() if child.isdigit() else nn.Module())
                home = home.get_submodule(name)
            home.add_module(path.rpartition(".")[2], _layer(*sizes))
        for module in root.children():
            module.config = SimpleNamespace()  # peft writes the number of layers there, where it repeats them
        return root.double().eval()


def repeated(state: Mapping[str, Tensor], ranges: Any) -> dict[str, Tensor]:
    """The base whose layers are those of layer_replication, [first, end) one after the other."""
    order = [k for first, end in ranges or () for k in range(first, end)]
    found = {key: tensor for key, tensor in state.items() if not order or ".layers." not in key}
    for new, old in enumerate(order):
        at = f"model.layers.{old}."
        found |= {f"model.layers.{new}.{k.removeprefix(at)}": t for k, t in state.items() if k.startswith(at)}
    return found


def _layer(kind: str, *sizes: Any) -> nn.Module:
    if kind == "linear":
        return nn.Linear(sizes[1], sizes[0])
    if kind == "embedding":
        return nn.Embedding(*sizes)
    if kind == "conv":
        d_out, d_in, *kernel = sizes
        make: Any = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[len(kernel)]
        return make(d_in, d_out, tuple(kernel))
    if kind == "Conv1D":
        from transformers.pytorch_utils import Conv1D

        return Conv1D(*sizes)
    module = nn.Module()
    for name, shape in sizes[0].items():
        module.register_parameter(name, nn.Parameter(0.3 * torch.randn(shape)))
    return module


class PeftRefuses(Exception):
    pass


def by_peft(folder: Path, layers: Layers) -> dict[str, Tensor]:
    """The state of the base with the adapter merged into it by peft."""
    from peft import PeftModel

    base = build(layers)
    before = base.state_dict()
    keys = set(before)
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = PeftModel.from_pretrained(base, folder, low_cpu_mem_usage=False)
            if again := model.peft_config["default"].layer_replication:
                keys = set(repeated(before, again))
                _unshare(model)
            state = model.merge_and_unload().state_dict()
    except Exception as error:
        raise PeftRefuses(f"{type(error).__name__}: {error}") from error
    if set(state) != keys:
        raise PeftRefuses(f"other tensors: {sorted(set(state) ^ keys)[:3]}")
    return {k: t.double() for k, t in state.items()}


def _unshare(model: nn.Module) -> None:
    """Layers that are repeated share their weights, and peft would merge all their updates into one."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(parameter.detach().clone(), requires_grad=False))


def write_base(folder: Path, kind: str) -> None:
    import safetensors.torch

    folder.mkdir()
    state = {k: t.contiguous() for k, t in build(KINDS[kind].layers).state_dict().items()}
    safetensors.torch.save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"tie_word_embeddings": False, **KINDS[kind].model}))


# ---- one operation ---------------------------------------------------------------------------------------------------


@dataclass
class Done:
    """What one operation did. code: the exit code; of a call, 0 or 2. fault: a traceback that nobody caught."""

    name: str
    code: int
    out: str = ""
    err: str = ""
    fault: str = ""
    seconds: float = 0.0
    megabytes: float = 0.0


def unseemly(text: str) -> str:
    """The first letter that may not reach a terminal: controls, overrides of direction, halves of pairs."""
    for letter in text:
        if (
            letter != "\n" and unicodedata.category(letter) in ("Cc", "Cs")
        ) or letter in "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069":
            return repr(letter)
    return ""


def faults(done: Done) -> list[str]:
    """What of the promise of every operation is broken."""
    found = []
    if done.fault:
        found.append(f"ends in {done.fault}")
    elif done.code not in (0, 2):
        found.append(f"exit code {done.code}")
    if done.code == 2 and not done.fault:
        lines = [line for line in done.err.split("\n") if line and not line.startswith("note: ")]
        if len(lines) != 1:
            found.append(f"is refused in {len(lines)} lines: {done.err[:300]!r}")
        elif len(done.err) > LETTERS:
            found.append(f"is refused in {len(done.err):,} letters: {done.err[:200]!r}")
    for stream, text in (("stdout", done.out), ("stderr", done.err)):
        if odd := unseemly(text):
            found.append(f"puts {odd} on {stream}")
    if done.seconds > SECONDS:
        found.append(f"takes {done.seconds:.1f} s of CPU")
    if done.megabytes > MEGABYTES:
        found.append(f"takes {done.megabytes:.0f} MB")
    return [f"{done.name} {what}" for what in found]


def _status(field_: str) -> float:
    text = Path("/proc/self/status").read_text()
    found = re.search(rf"{field_}:\s+(\d+)", text)
    return int(found[1]) / 1024 if found else 0.0


def _cpu() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


@contextlib.contextmanager
def measured(done: Done) -> Iterator[None]:
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before, begun = _status("VmRSS"), _cpu()
    try:
        yield
    finally:
        done.seconds = _cpu() - begun
        done.megabytes = _status("VmHWM") - before


def command(*args: object) -> Done:
    """`fedlora ARGS` in this process, with streams that are as strict as real ones."""
    import fedlora.cli

    done = Done(f"fedlora {args[0]}", 1)
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="strict", write_through=True)
    err = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="backslashreplace", write_through=True)
    sys.argv = ["fedlora", *map(str, args)]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), measured(done):
        try:
            fedlora.cli.main()
        except SystemExit as stopped:
            done.code = stopped.code if isinstance(stopped.code, int) else int(stopped.code is not None)
        except BaseException as error:
            done.fault = _where(error)
    done.out, done.err = (s.buffer.getvalue().decode("utf-8") for s in (out, err))  # type: ignore[attr-defined]
    return done


def call(name: str, function: Any) -> Done:
    """A call of Python: an error of ours counts as a refusal."""
    from fedlora.errors import FedLoRAError

    done = Done(name, 0)
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said), measured(done):
        try:
            function()
        except FedLoRAError as error:
            done.code, done.err = 2, str(error)
        except BaseException as error:
            done.fault = _where(error)
    return done


def _where(error: BaseException) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    ours = [f for f in traceback.extract_tb(error.__traceback__) if "/fedlora/" in f.filename]
    at = ours[-1] if ours else last
    return f"{type(error).__name__} at {Path(at.filename).name}:{at.lineno} {at.name}: {str(error)[:200]!r}"


# ---- right -----------------------------------------------------------------------------------------------------------

_EPS = {"F64": 1e-9, "F32": 2e-5, "F16": 2e-2, "BF16": 2e-2}
# What peft cannot do with a base, which an adapter alone does not tell: `validate --base` and `apply` must refuse it.
_OF_THE_BASE = re.compile(
    r"not found in the base model|size mismatch|is not supported\. Currently|has no bias|No `target_modules` passed|"
    r"shape|out of bounds|cannot be applied to modules of type|not in the base|has no attribute|KeyError|"
    r"index \d+ is out of range|layers attribute|other tensors"
)


def eps_of(*folders: Path) -> float:
    """What storing the numbers of these folders costs, with some room."""
    found = [1e-9]
    for folder in folders:
        with (folder / WEIGHTS_FILE).open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        header.pop("__metadata__", None)
        found += [_EPS.get(line["dtype"], 1e-9) for line in header.values()]
    return max(found)


def config_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8", errors="surrogatepass"))
    return found


def layers_of(folder: Path) -> set[str]:
    """The paths of what it has factors for."""
    with (folder / WEIGHTS_FILE).open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    names = (_FACTOR.fullmatch(key.removeprefix(PREFIX)) for key in header)
    return {found[1].replace(".base_layer", "") for found in names if found}


_FACTOR = re.compile(r"(.+?)\.lora_(embedding_)?([ABE])(\.weight)?")
_TOKENS = ".token_adapter.trainable_tokens_delta"


@dataclass(frozen=True)
class Parts:
    """What an adapter does to the base, by tensor: as updates that add up, and as values that take the place of others.

    pairs: paths of layers that have factors. updates: what peft adds. values: key of the base -> (the name in the file,
    the value that peft puts there). unclear: keys of which the two cannot be told apart.
    """

    pairs: frozenset[str]
    updates: dict[str, Tensor]
    values: dict[str, tuple[str, Tensor]]
    unclear: frozenset[str]


def parts_of(folder: Path, changed: Mapping[str, Tensor], base: Mapping[str, Tensor]) -> Parts:
    """changed: what peft adds to `base` in all."""
    import safetensors.torch

    updates, values, pairs, unclear = dict(changed), {}, set(), set()
    found = {k.removeprefix(PREFIX): t for k, t in safetensors.torch.load((folder / WEIGHTS_FILE).read_bytes()).items()}
    for name in found:
        if factors := _FACTOR.fullmatch(name):
            pairs.add(factors[1].replace(".base_layer", ""))
    for name, tensor in found.items():
        key = f"{name.removesuffix(_TOKENS)}.weight" if name.endswith(_TOKENS) else name.replace(".base_layer", "")
        path = key.rpartition(".")[0]
        if _FACTOR.fullmatch(name) or name.endswith(".lora_B.bias") or key not in base:
            continue
        value = base[key] + changed[key] if name.endswith(_TOKENS) else tensor.double()
        odd = value.shape != base[key].shape or not bool(torch.isfinite(value).all())
        if key in values or odd or (path in pairs and not name.endswith(".bias")):
            unclear.add(key)
        elif path in pairs:  # a bias, and the update of one
            values[key] = (name, value)
            updates[key] = changed[key] - (value - base[key])
        elif torch.allclose(value, base[key] + changed[key], rtol=1e-12, atol=1e-12):
            values[key] = (name, value)
            updates[key] = torch.zeros_like(value)
        else:  # peft does not load it
            unclear.add(key)
    return Parts(frozenset(pairs), updates, values, frozenset(unclear))


def matrices(update: Tensor) -> list[Tensor]:
    return list(update) if update.dim() == 3 and update.shape[1] > 3 else [update.flatten(1)]


def gap(got: Tensor, want: Tensor, size: float, eps: float, noise: float) -> str:
    """ "" or how far off."""
    if not bool(torch.isfinite(want).all()):
        return "the truth overflows, and it was accepted"
    far = float(torch.linalg.vector_norm(got - want))
    if not far <= eps * size + noise:
        return f"is off by {far:.2e} of {size:.2e}"
    return ""


def _is_utf8(text: str) -> bool:
    try:
        return bool(text.encode())
    except UnicodeEncodeError:
        return False


@dataclass
class Truth:
    """What peft makes of each folder: its updates by tensor, or why it refuses."""

    base: dict[str, Tensor]
    found: dict[str, dict[str, Tensor] | str] = field(default_factory=dict)

    def base_of(self, folder: Path) -> dict[str, Tensor]:
        """With its layers repeated as the adapter says."""
        return repeated(self.base, config_of(folder).get("layer_replication"))

    def of(self, folder: Path, layers: Layers) -> dict[str, Tensor] | str:
        if str(folder) not in self.found:
            place = folder
            if not _is_utf8(str(folder)):  # which safetensors cannot open, whatever is in it
                place = folder.parent.parent / "same"
                shutil.rmtree(place, ignore_errors=True)
                shutil.copytree(folder, place, symlinks=True)
            try:
                state = by_peft(place, layers)
                base = self.base_of(folder)
                self.found[str(folder)] = {k: state[k] - base[k] for k in state}
            except PeftRefuses as error:
                self.found[str(folder)] = str(error)
        return self.found[str(folder)]


def compared(
    got: Mapping[str, Tensor], want: Mapping[str, Tensor], size: Mapping[str, float], base: Mapping[str, Tensor],
    eps: float, only: Sequence[str] | None = None,
) -> str:  # fmt: skip
    for key in want if only is None else only:
        noise = 1e-13 * float(torch.linalg.vector_norm(base[key])) + 1e-290
        if off := gap(got[key], want[key], size[key], eps, noise):
            return f"{key} {off}"
    return ""


def cut_well(got: Tensor, want: Tensor, rule: str, eps: float, noise: float) -> str:
    """Each matrix is the best of its rank (Eckart-Young), and the rank is what was asked for."""
    for R, D in zip(matrices(got), matrices(want), strict=True):
        s = torch.linalg.svdvals(D)
        tail = [float(torch.linalg.vector_norm(s[k:])) for k in range(len(s) + 1)]
        off = float(torch.linalg.matrix_norm(R - D))
        size = tail[0]
        rank = int((torch.linalg.svdvals(R) > 1e-7 * max(size, 1e-300)).sum())
        if rule.isdigit() and rank > int(rule):
            return f"has rank {rank}, asked was {rule}"
        bound = tail[min(int(rule), len(s))] if rule.isdigit() else tail[min(rank, len(s))]
        if rule.startswith("energy"):
            bound = size * (1 - float(rule[7:])) ** 0.5
        if off > bound * (1 + 1e-5) + 2 * eps * size + noise:
            return f"is off by {off:.3e} at rank {rank}, the best is {bound:.3e} of {size:.3e}"
    return ""


# ---- a case ----------------------------------------------------------------------------------------------------------


def snapshot(home: Path) -> dict[str, tuple[int, int, int]]:
    found = {}
    for where, folders, files in os.walk(home):
        for name in [*folders, *files]:
            facts = os.lstat(os.path.join(where, name))
            found[os.path.relpath(os.path.join(where, name), home)] = (facts.st_mode, facts.st_size, facts.st_mtime_ns)
    return found


@dataclass
class Verdict:
    """broken: promises that were broken. accepted: how many operations were."""

    broken: list[str] = field(default_factory=list)
    accepted: int = 0
    refused: int = 0
    compared: int = 0


def judge(home: Path, asked: Asked, say: Any) -> Verdict:
    """Every operation on the adapters in `home`. say(phase): what is about to be done, for whoever waits."""
    kind = asked.kind
    verdict, layers = Verdict(), KINDS[kind].layers
    folders = [home / name for name in asked.names]
    options = list(asked.options)
    base = home.parent / "base"
    shutil.rmtree(base, ignore_errors=True)
    write_base(base, kind)
    truth = Truth({k: t.double() for k, t in build(layers).state_dict().items()})
    before = snapshot(home)
    of_base = {key.rpartition(".")[0] for key in truth.base}  # its layers

    kept: list[Path] = []  # results that lie there while others are made

    def did(done: Done, made: Path | None = None) -> bool:
        """Judges one operation; true where it was accepted."""
        verdict.broken += faults(done)
        ok = done.code == 0 and not done.fault
        verdict.accepted += ok
        verdict.refused += not ok
        after = snapshot(home)
        new = {
            name for name in after.keys() - before.keys()
            if not any(_within(home / name, path) for path in [*kept, *([made] if made is not None and ok else [])])
        }  # fmt: skip
        if new:
            verdict.broken.append(f"{done.name} leaves {sorted(new)[:3]}")
        changed = [name for name in before if name != "." and before[name][:2] != after.get(name, (0, 0, 0))[:2]]
        changed += [n for n in before if n in after and not os.path.isdir(home / n) and before[n] != after[n]]
        if changed:
            verdict.broken.append(f"{done.name} changes {changed[:3]}")
        if ok and made is not None and not os.path.lexists(made):
            verdict.broken.append(f"{done.name} says that it wrote {made.name!r}, and it is not there")
        return ok

    def clean(made: Path) -> None:
        say("cleaning")
        top = home / made.relative_to(home).parts[0]
        shutil.rmtree(top, ignore_errors=True)
        for name in snapshot(home).keys() - before.keys():
            with contextlib.suppress(OSError):
                (home / name).unlink()

    def right(done: Done, folder: Path, of: str) -> dict[str, Tensor] | None:
        """What peft says that `folder` means, which fedlora has accepted; else the promise is broken."""
        say(f"peft loads {of}")
        want = truth.of(folder, layers)
        if isinstance(want, str):
            elsewhere = "not found in the base model" in want and not layers_of(folder) <= of_base
            if not elsewhere and (of != "an input" or not _OF_THE_BASE.search(want)):
                verdict.broken.append(f"{done.name} accepts what peft refuses: {want[:300]!r}")
            return None
        return want

    from fedlora.adapters import AdapterFile, read_adapter, write_adapter
    from fedlora.adapters.labels import labels_of
    from fedlora.adapters.uploads import read_facts

    sound = []
    for folder in folders:
        say(f"{OURS} read")

        def read_all(folder: Path = folder) -> None:
            file = AdapterFile(folder)
            for module in file.modules:
                file.lora(module), file.scale(module)
            for path in file.heads:
                file.head(path), file.kind(path)
            _ = file.size(), file.stored
            labels_of(folder), read_facts(folder)  # which `validate` reads, too

        read = call("AdapterFile", read_all)
        ok = did(read)
        say(f"{OURS} validate")
        validated = did(command("validate", folder))
        if ok != validated:
            verdict.broken.append(f"validate says {validated}, AdapterFile {ok}: {read.err[:200]!r}")
        say(f"{OURS} validate --base")
        fits = command("validate", folder, "--base", base)
        if did(fits):
            say("peft loads an input")
            found = truth.of(folder, layers)
            if isinstance(found, str):
                verdict.broken.append(f"validate --base accepts what peft refuses: {found[:300]!r}")
        say(f"{OURS} inspect")
        did(command("inspect", folder))
        say(f"{OURS} inspect --json")
        shown = command("inspect", folder, "--json")
        if did(shown):
            verdict.broken += _json_faults(shown)
        say(f"{OURS} write_adapter")
        copy = home / "copy"
        wrote = call("write_adapter", lambda folder=folder, copy=copy: write_adapter(copy, *read_adapter(folder)))
        if did(wrote, copy):
            want = right(wrote, folder, "an input")
            got = right(wrote, copy, "what was written") if want is not None else None
            if want is not None and got is not None:
                verdict.compared += 1
                size = {k: float(torch.linalg.vector_norm(t)) for k, t in want.items()}
                eps = eps_of(folder)
                if off := compared(got, want, size, truth.base_of(folder), eps):
                    verdict.broken.append(f"write_adapter(read_adapter): {off}")
                verdict.broken += _written_faults(copy)
        truth.found.pop(str(copy), None)
        clean(copy)
        say(f"{OURS} apply")
        model = home / "model"
        applied = command("export", "--for", "merged", folder, "--base", base, "-o", model)
        if did(applied, model):
            want = right(applied, folder, "an input applied")
            if want is not None:
                verdict.compared += 1
                verdict.broken += _model_faults(model, want, truth.base, eps_of(folder))
        clean(model)
        if ok:
            sound.append(folder)
    say(f"{OURS} diff")
    did(command("diff", folders[0], folders[-1]))

    def all_right(done: Done, inputs: Sequence[Path], made: Path, asked: Asked) -> None:
        """Whether what was made of `inputs` is what was asked for."""
        want = [right(done, folder, "an input") for folder in inputs]
        got = right(done, made, "the result") if all(part is not None for part in want) else None
        if got is not None:
            verdict.compared += 1
            base = truth.base_of(inputs[0])
            parts = [parts_of(folder, part, base) for folder, part in zip(inputs, want, strict=True) if part]
            eps = eps_of(*inputs, made)
            verdict.broken += [f"{done.name}: {x}" for x in faults_of(inputs, parts, parts_of(made, got, base), base,
                                                                      asked, eps)]  # fmt: skip
        verdict.broken += _written_faults(made)

    target = home / asked.out
    how = [*folders, "-o", target, "--rank", asked.rank, *options]
    tried = None
    if "dry" in asked.also:
        say(f"{OURS} merge --dry-run")
        tried = command("merge", *how, "--dry-run", "--json")
        if did(tried):
            verdict.broken += _json_faults(tried)
    say(f"{OURS} merge")
    merged = command("merge", *how)
    accepted = did(merged, target)
    if tried is not None and (tried.code == 0) != accepted:
        verdict.broken.append(f"merge --dry-run ends in {tried.code}, merge in {merged.code}: {merged.err[:300]!r}")
    if accepted:
        all_right(merged, folders, target, asked)
        kept.append(target)
        written = {name: (target / name).read_bytes() for name in os.listdir(target)}
        if "force" in asked.also:
            say(f"{OURS} merge over a result")
            if did(command("merge", *how), target):
                verdict.broken.append("merge replaces a result without --force")
            say(f"{OURS} merge --force")
            if not did(command("merge", *how, "--force"), target):
                verdict.broken.append("merge --force does not replace a result")
            if {name: (target / name).read_bytes() for name in os.listdir(target)} != written:
                verdict.broken.append("merge --force writes another result")
    if "python" in asked.also:
        say(f"{OURS} merge by Python")
        other = home / "python"
        done = call("adapters.merge", lambda: _by_python(folders, other, asked))
        if did(done, other) != accepted and target.name.isascii() and len(target.name) < 200:
            verdict.broken.append(f"merge ends in {merged.code}, adapters.merge in {done.code}: {done.err[:300]!r}")
        elif done.code == 0 and accepted:
            for name in (WEIGHTS_FILE, CONFIG_FILE):
                if (other / name).read_bytes() != written[name]:
                    verdict.broken.append(f"merge and adapters.merge write another {name}")
        clean(other)
    kept.clear()
    truth.found.pop(str(target), None)
    clean(target)
    say(f"{OURS} resize")
    small = home / "small"
    resized = command("resize", folders[0], "-o", small, *asked.resize)
    if did(resized, small):
        one = Asked(kind, asked.names[:1], asked.resize[1], ("--heads", "first", *asked.resize[2:]))
        all_right(resized, folders[:1], small, one)
    clean(small)
    return verdict


def _by_python(folders: Sequence[Path], out: Path, asked: Asked) -> None:
    """The options as `fedlora.adapters.merge` has them."""
    from fedlora.adapters import merge

    def value(option: str) -> Any:
        return asked.options[asked.options.index(option) + 1] if option in asked.options else None

    said = next((o.removeprefix("--weights=") for o in asked.options if o.startswith("--weights=")), None)
    error = value("--max-error")
    merge(
        folders, out, rank=int(asked.rank) if asked.rank.isdigit() else asked.rank,
        weights=[float(w) for w in said.split(",")] if said else None, weights_from=value("--weights-from"),
        sum="--sum" in asked.options, missing=value("--missing"), heads=value("--heads") or "average",
        dtype=value("--dtype"), max_error=float(error) if error else None,
    )  # fmt: skip


def _within(path: Path, made: Path) -> bool:
    """Whether a new entry is what was asked for: the result, what is in it, or a parent of it."""
    return path == made or made in path.parents or path in made.parents


def _json_faults(done: Done) -> list[str]:
    def never(text: str) -> None:
        raise ValueError(f"{text} is no JSON")

    try:
        json.loads(done.out, parse_constant=never)
    except ValueError as error:
        return [f"{done.name} --json prints no JSON: {error}"]
    return []


def _written_faults(folder: Path) -> list[str]:
    """Of the files that a stranger reads next: strict JSON, a front matter of known keys, no control characters."""
    import yaml

    def never(text: str) -> None:
        raise ValueError(f"{text} is no JSON")

    found = []
    try:
        config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"), parse_constant=never)
        if config.get("auto_mapping"):
            found.append("the result carries auto_mapping on")
        if config["lora_alpha"] != config["r"] or config.get("use_rslora"):
            found.append("readers of one alpha get the scale wrong")
    except ValueError as error:
        found.append(f"the config written is no JSON: {error}")
    card = (folder / "README.md").read_text(encoding="utf-8")
    if odd := unseemly(card):
        found.append(f"the card holds {odd}")
    try:
        front = yaml.safe_load(card.split("---")[1])
        if not set(front) <= {"library_name", "base_model", "tags", "base_model_relation"}:
            found.append(f"the card's front matter has {sorted(map(str, front))}")
    except (yaml.YAMLError, IndexError, TypeError) as error:
        found.append(f"the card's front matter is no YAML: {str(error)[:200]!r}")
    for table in re.findall(r"(?m)(?:^\|.*(?:\n|\Z))+", card):
        bars = {line.count("|") - line.count("\\|") for line in table.splitlines()}
        if len(bars) > 1:
            found.append(f"the rows of a table of the card have {sorted(bars)} bars")
    return found


def _model_faults(model: Path, want: Mapping[str, Tensor], base: Mapping[str, Tensor], eps: float) -> list[str]:
    import safetensors.torch

    state = safetensors.torch.load_file(model / "model.safetensors")
    if state.keys() != base.keys():
        return [f"apply writes other tensors: {sorted(state.keys() ^ base.keys())[:3]}"]
    got = {k: state[k].double() - base[k] for k in base}
    size = {k: float(torch.linalg.vector_norm(t)) for k, t in want.items()}
    off = compared(got, want, size, base, max(eps, 1e-6))  # `apply` computes in float32 unless the base is float64
    return [f"apply: {off}"] if off else []


def shares(asked: Asked, counts: Sequence[float]) -> list[float]:
    """The weight of each adapter; of a sum as it is."""
    return list(counts) if "--sum" in asked.options else [w / sum(counts) for w in counts]


def counts_of(folders: Sequence[Path], asked: Asked) -> list[float] | None:
    """None where upload.json does not say them all."""
    for option in asked.options:
        if option.startswith("--weights="):
            return [float(w) for w in option.removeprefix("--weights=").split(",")]
    if "--weights-from" not in asked.options:
        return [1.0] * len(folders)
    try:
        found = [json.loads((folder / "upload.json").read_text())["num_examples"] for folder in folders]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    sound = all(type(n) in (int, float) and 0 <= n <= 1e15 for n in found) and sum(found) > 0
    return [float(n) for n in found] if sound else None


def faults_of(
    folders: Sequence[Path], parts: Sequence[Parts], got: Parts, base: Mapping[str, Tensor], asked: Asked, eps: float,
) -> list[str]:  # fmt: skip
    """What of a result is not the weighted sum of peft's updates, nor the value that was asked for beside them."""
    options = asked.options
    counts = counts_of(folders, asked)
    if counts is None:
        return ["weights are taken from an upload.json that does not say them"]
    rule = options[options.index("--heads") + 1] if "--heads" in options else "average"
    unclear = frozenset[str]().union(got.unclear, *(part.unclear for part in parts))
    for key in base:
        path = key.rpartition(".")[0]
        if key in unclear:
            continue
        # what is put in the place of the base's
        weights = shares(asked, counts)
        held = [(p.values[key][1], w) for p, w in zip(parts, weights, strict=True) if key in p.values]
        value: Tensor | None = None
        if held:
            alike = all(torch.equal(t, held[0][0]) for t, _ in held)
            total = sum(w for _, w in held)
            if rule == "first":
                value = parts[0].values[key][1] if key in parts[0].values else None
            elif rule == "average" and len(held) < len(parts):
                return [f"{key} is averaged, and some adapters lack it"]
            elif rule != "drop" and "--sum" in options and not alike and abs(total - 1) > 1e-6:
                return [f"{key} is no update, and is summed with weights that add up to {total:g}"]
            elif rule != "drop":
                value = held[0][0] if alike else torch.stack([w / total * t for t, w in held]).sum(0)
        size = max([float(torch.linalg.vector_norm(t)) for t, _ in held], default=0.0)
        noise = 1e-13 * float(torch.linalg.vector_norm(base[key])) + 1e-290
        if (value is None) != (key not in got.values):
            return [f"{key} is {'put in place' if value is None else 'left out'}, against --heads {rule}"]
        if value is not None and (off := gap(got.values[key][1], value, size, eps, noise)):
            return [f"the value of {key} {off}"]
        # what is added to it
        if "renormalise" in options:
            mine = [w if path in p.pairs else 0.0 for w, p in zip(weights, parts, strict=True)]
            weights = [w / (sum(mine) or 1.0) for w in mine]
        terms = [w * p.updates[key] for w, p in zip(weights, parts, strict=True)]
        want = torch.stack(terms).sum(0)
        size = sum(float(torch.linalg.vector_norm(t)) for t in terms)
        if not bool(torch.isfinite(want).all()):
            return [f"the sum of {key} overflows, and it was accepted"]
        if asked.rank != "exact" and not key.endswith(".bias") and any(path in p.pairs for p in parts):
            if off := cut_well(got.updates[key], want, asked.rank, eps, noise):
                return [f"at rank {asked.rank} {key} {off}"]
        elif off := gap(got.updates[key], want, size, eps, noise):
            return [f"{key} {off}"]
    return []


# ---- the process -----------------------------------------------------------------------------------------------------


def serve(pipe: Any) -> None:
    """Judges what comes through the pipe, until None comes. Memory beyond 2 GB more than it begins with is an error."""
    import peft  # noqa: F401 - the baseline holds it, and what commands import when they are called

    import fedlora.cli.merge_method
    import fedlora.cli.method_names
    import fedlora.export.merged
    import fedlora.runs.plots  # noqa: F401

    torch.set_num_threads(1)
    os.fsync = lambda descriptor: None  # type: ignore[assignment,misc]
    np.seterr(all="ignore")
    start = int(_status("VmSize")) * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (start + 2 * 2**30, start + 2 * 2**30))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while True:
        asked = pipe.recv()
        if asked is None:
            return
        try:
            verdict = judge(*asked, say=lambda phase: pipe.send(("phase", phase)))
        except BaseException as error:
            verdict = Verdict([f"the judge itself fails: {_where(error)}\n{traceback.format_exc()[-1500:]}"])
        pipe.send(("verdict", verdict))


def stuck(pipe: Any) -> None:
    """In the place of `serve`: a child that dies of the first case, if its rank is "die", and else never answers."""
    asked = pipe.recv()
    pipe.send(("phase", f"{OURS} merge"))
    if asked[1].rank == "die":
        os._exit(9)
    time.sleep(3600)


class Judge:
    """One child that judges; another when it hangs or dies."""

    def __init__(self, context: Any, work: Any = serve) -> None:
        self._context, self._work = context, work
        self._child: Any = None

    def __call__(self, home: Path, asked: Asked) -> Verdict:
        if self._child is None:
            self._pipe, there = self._context.Pipe()
            self._child = self._context.Process(target=self._work, args=(there,), daemon=True)
            self._child.start()
            there.close()
        phase = "starting"
        try:
            self._pipe.send((home, asked))
            while self._pipe.poll(PATIENCE + 60 * (phase == "starting")):
                what, value = self._pipe.recv()
                if what == "verdict":
                    return value  # type: ignore[no-any-return]
                phase = value
            how = f"hangs for {PATIENCE:g} s"
        except (EOFError, OSError):
            how = "ends the process"
        self.stop()
        if phase.startswith("peft"):
            return Verdict([f"{how} where {phase}, which fedlora has accepted"])
        return Verdict([f"{phase} {how}"])

    def stop(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.join()
            self._pipe.close()
            self._child = None
