"""Rounds by hand: uploads as folders, merged round by round. Kinds of evidence: contract (`Server` in memory is the
reference, bit for bit), end to end (`fedlora train` and `merge` on tiny models from disk).
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fedlora.cli
from fedlora import Adapter, Client, LoRA, Server, Upload, build, read_adapter, write_adapter
from fedlora.adapters.collection import Collection
from fedlora.adapters.reader import AdapterFile
from fedlora.core import checkpoint
from fedlora.data.demo import PACKAGED
from fedlora.data.rows import Rows
from fedlora.errors import CheckpointError
from fedlora.offline import ByHand
from support.adapter_folders import saved, updates
from support.command_line import Said
from support.known_warnings import FUTURE_NAMES, LORA_BIAS
from support.own_programs import DOUBLING, command
from support.processes import Program
from support.tiny_models import bert, llama
from support.training_data import classification, instructions, save_model

pytestmark = [FUTURE_NAMES, LORA_BIAS]


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
    for other in ("fedit", "glora rho=0.5"):
        done = main("merge", a, b, "--method", other, "--state", tmp_path / "s", "-o", tmp_path / "p")
        assert done.code == 2 and "'method glora'" in done.err and f"'method {other}'" in done.err
        assert not (tmp_path / "p").exists()
    big = [saved(tmp_path / "other", name, 2, base="big") for name in "ab"]
    done = main("merge", *big, "--method", "glora", "--state", tmp_path / "s", "-o", tmp_path / "p")
    assert done.code == 2 and "state of base 'tiny'" in done.err


def test_a_state_is_of_the_base_weights_that_the_uploads_say(tmp_path: Path, main: Callable[..., Said]) -> None:
    """Another model at the same path is another base: by the digests in upload.json, as soon as one round says them."""

    def folders(number: int, digest: str | None) -> list[Path]:
        found = [saved(tmp_path / f"{number} {digest}", name, 2) for name in "ab"]
        for folder in found:
            facts: dict[str, Any] = {"client": folder.name, "num_examples": 1, "round": number}
            facts |= {"base_model_sha256": {"model.safetensors": digest}} if digest else {}
            (folder / "upload.json").write_text(json.dumps(facts))
        return found

    def merged(number: int, digest: str | None) -> Said:
        out = tmp_path / f"out {number} {digest}"
        return main("merge", *folders(number, digest), "--method", "glora", "--state", tmp_path / "s", "-o", out)

    assert merged(1, None).code == merged(2, "a" * 64).code == merged(3, "a" * 64).code == 0
    before = {path.name: path.read_bytes() for path in (tmp_path / "s").iterdir()}
    other = merged(4, "b" * 64)
    assert other.code == 2 and "a" * 12 in other.err and "b" * 12 in other.err and "--state" in other.err
    assert {path.name: path.read_bytes() for path in (tmp_path / "s").iterdir()} == before
    assert merged(4, "a" * 64).code == merged(5, None).code == 0


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
    assert "names 'new', " in done.err
    (tmp_path / "few.toml").write_text("b = 30\n")
    done = main("merge", *folders, "--readout", tmp_path / "few.toml", "-o", tmp_path / "few")
    assert done.code == 0 and "no rank for 'x/../../evil'" in done.err
    assert re.search(r"rank 30 of client 'b' .*\(8\)", done.err)
    (tmp_path / "bad.toml").write_text("b = 0\n")
    done = main("merge", *folders, "--readout", tmp_path / "bad.toml", "-o", tmp_path / "p")
    assert done.code == 2 and "whole ranks from 1" in done.err


@pytest.mark.parametrize("method", ["svd", "glora", "hetlora"])
def test_what_clients_get_says_how_far_off_it_is(tmp_path: Path, main: Callable[..., Said], method: str) -> None:
    """Oracle: dense float64 of the written folders. In the table, the JSON and each card; a dry run says the same."""
    folders = [saved(tmp_path, name, rank) for name, rank in (("a", 2), ("b", 5))]
    command = ["merge", *folders, "--method", method, "--readout", "same"]
    done = main(*command, "-o", tmp_path / "o", "--json")
    said = json.loads(done.out)["clients"]
    whole = updates(tmp_path / "o")
    size = sum(float(update.square().sum()) for update in whole.values())
    assert [(c["client"], c["ranks"], c["modules"]) for c in said] == [("a", [2, 2], 2), ("b", [5, 5], 2)]
    for c in said:
        folder = tmp_path / "o" / "clients" / c["client"]
        got = updates(folder)
        off = (sum(float((got[m] - whole[m]).square().sum()) for m in whole) / size) ** 0.5
        assert (off > 0.1 or c["client"] == "b") and abs(c["error"] - off) < 1e-5
        assert f"relative distance {c['error']:.2e} " in (folder / "README.md").read_text()
    assert json.loads(main(*command, "-o", tmp_path / "p", "--dry-run", "--json").out)["clients"] == said
    table = main(*command, "-o", tmp_path / "q").out
    assert "off the global update" in table and f"{said[0]['error']:.1e}" in table
    worst = max(c["error"] for c in said)
    refused = main(*command, "-o", tmp_path / "r", "--max-error", f"{worst * 0.999}").complaint()
    assert ("off the global update" in refused or method == "hetlora") and not (tmp_path / "r").exists()


def test_what_is_asked_of_a_result_holds_for_what_clients_get(tmp_path: Path, main: Callable[..., Said]) -> None:
    folders = [saved(tmp_path, name, 2) for name in "ab"]
    done = main("merge", *folders, "--readout", "same", "--heads", "drop", "--dtype", "bfloat16", "-o", tmp_path / "o")
    assert done.code == 0, done.err
    for place in ("o", "o/clients/a", "o/clients/b"):
        file = AdapterFile(tmp_path / place)
        assert not file.heads and {stored.dtype for stored in file.stored.values()} == {"BF16"}


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
    options = ["--base", base, "--lr", "0.01"]
    fresh = ["--targets", "query,value" if classifies else "q_proj,v_proj", "--rank"]
    options += [] if classifies else ["--template", "none"]
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
    for number in (1, 2):
        uploads = []
        for site, rank in (("a", 2), ("b", 4)):
            start = ["--adapter", tmp_path / f"merged{number - 1}/clients/{site}"] if number > 1 else [*fresh, rank]
            out = tmp_path / f"up{number}" / site
            done = main("train", *options, *start, "--data", tmp_path / f"{site}.jsonl", "--client", site,
                          "--steps", 8, "--batch-size", 8, "--round", number, "-o", out)  # fmt: skip
            assert done.code == 0, done.err
            facts = json.loads((out / "upload.json").read_text())
            assert facts["client"] == site and facts["num_examples"] == (40 if classifies else 20)
            assert facts["template"] == (None if classifies else "raw")
            assert re.search("1 training example .*--max-length = 16: ", done.err)
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
    assert done.code == 2 and "--labels, the same" in done.err and not (tmp_path / "o").exists()
    done = main(*options, "--client", "../x", "-o", tmp_path / "o")
    assert done.code == 2 and "--client may have letters" in done.err and "not begin with" in done.err
    (tmp_path / "e.csv").write_text("a,b\n1,2\n")
    done = main("train", "--base", base, "--data", tmp_path / "e.csv", "--client", "a", "-o", tmp_path / "o")
    assert done.code == 2 and re.search("e.csv .*'label' .*'response' .*'messages'", done.err)


def test_an_option_that_would_do_nothing_is_refused(tmp_path: Path, main: Callable[..., Said]) -> None:
    """Each beside what makes it idle; nothing is written. By its default the same option says nothing."""
    base = save_model(tmp_path / "base", bert().bert, classifies=True)
    (tmp_path / "d.csv").write_text("text,label\nw1 w2,0\nw3,1\n")
    (tmp_path / "asked.csv").write_text("prompt,response\nw1,w2\n")
    (tmp_path / "talk.jsonl").write_text('{"messages": [{"role": "user", "content": "w1"}]}\n')
    common = ["train", "--base", base, "--client", "a", "-o", tmp_path / "o"]
    assert main("train", "--base", base, "--client", "a", "-o", tmp_path / "in", "--data", tmp_path / "d.csv",
                "--targets", "query", "--steps", 1).code == 0  # fmt: skip
    for data, more, says in (
        ("d.csv", ["--steps", 2, "--epochs", 3], "--epochs counts only if --steps"),
        ("d.csv", ["--adapter", tmp_path / "in", "--rank", 4], "--rank is for a fresh"),
        ("d.csv", ["--adapter", tmp_path / "in", "--targets", "query"], "--targets is for a fresh"),
        ("d.csv", ["--prompt", "zz"], "--prompt is for language"),
        ("d.csv", ["--template", "none"], "--template is for language"),
        ("asked.csv", ["--label", "zz"], "--label is for classes, and "),
        ("asked.csv", ["--text", "zz"], "--text is for classes, and "),
        ("talk.jsonl", ["--response", "zz"], "--response is for instructions, and "),
    ):
        said = main(*common, "--data", tmp_path / data, *more).complaint()
        assert says in said and "Leave it out" in said and not (tmp_path / "o").exists(), said


@pytest.mark.parametrize(
    ("labels", "says"),
    [
        ("123", "the classes ['1', '2', '3']"),
        ("02", " --labels='0,2'."),
        (["-1", "1"], "give --labels='-1,1'."),
        (["1", "+1"], "give --labels='+1,1'."),
    ],
)
def test_numbers_are_classes_where_they_are_all_from_nought_on(
    tmp_path: Path, main: Callable[..., Said], labels: Sequence[str], says: str
) -> None:
    """0, 1, 2 are the same at every site. Of other numbers another site may have more; what is said can be typed."""
    base = save_model(tmp_path / "base", bert().bert, classifies=True)
    data = tmp_path / "d.csv"
    options = ["train", "--base", base, "--data", data, "--client", "a", "--steps", 1, "-o", tmp_path / "o"]
    data.write_text("text,label\n" + "".join(f"w{k},{label}\n" for k, label in enumerate(labels)))
    said = main(*options).complaint()
    assert says in said and "label_names" not in said and not (tmp_path / "o").exists()
    given = re.search(r"--labels='(.*)'\.", said)
    assert given is not None and main(*options, "--labels=" + given[1]).code == 0
    upload = json.loads((tmp_path / "o" / "upload.json").read_text())
    assert upload["label_names"] == given[1].split(",")


def blue_and_green(folder: Path) -> Path:
    (folder / "d.csv").write_text("text,label\nw0 w1 w2,blue\nw1 w2 w0,blue\nw4 w5,green\n")
    return folder / "d.csv"


def test_an_upload_calls_its_base_model_by_a_name_that_others_can_use(
    tmp_path: Path, main: Callable[..., Said], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub's name of a packaged model and of one in the hub's cache, the whole path of a directory. A received
    adapter's name stays, unless it is a path and this site has the hub's."""
    real = save_model(tmp_path / "base", bert().bert, classifies=True)
    cached = save_model(tmp_path / f"models--org--tiny/snapshots/{'a' * 40}", bert().bert, classifies=True)
    monkeypatch.setitem(PACKAGED, "demo", lambda: real)
    monkeypatch.chdir(tmp_path)
    common = ["--data", blue_and_green(tmp_path), "--client", "a", "--labels", "blue,green", "--steps", 1]
    demo = "sentence-transformers/all-MiniLM-L6-v2"
    for base, start, name in (
        ("demo", None, demo), (cached, None, "org/tiny"), ("base", None, str(real)),
        ("demo", "up2", demo), ("base", "up0", demo), (cached, "up0", demo), ("base", "up2", str(real)),
    ):  # fmt: skip
        out = f"up{len(list(tmp_path.glob('up*')))}"
        done = main("train", "--base", base, *common, *(["--adapter", start] if start else []), "-o", out)
        assert done.code == 0, done.err
        assert json.loads(Path(out, "adapter_config.json").read_text())["base_model_name_or_path"] == name, out
    done = main("merge", "up0", "up2", "--method", "svd", "-o", "r")  # not refused, and no path is handed on
    assert done.code == 0, done.err
    assert json.loads(Path("r/adapter_config.json").read_text())["base_model_name_or_path"] == demo


def test_a_head_goes_on_under_the_names_of_its_classes(tmp_path: Path, main: Callable[..., Said]) -> None:
    """A received head says classes by their numbers: other names, or another order, at any later step would make a
    yes of each no. Left out, --labels is the adapter's own."""
    base, data = save_model(tmp_path / "base", bert().bert, classifies=True), blue_and_green(tmp_path)
    common = ["train", "--base", base, "--data", data, "--client", "a", "--steps", 1, "--targets", "query"]
    first = main(*common, "--labels", "green,blue", "-o", tmp_path / "u1")
    kept = ["--weights-from", "num_examples", "--method", "svd", "--state", tmp_path / "st"]
    done = main("merge", tmp_path / "u1", *kept, "--readout", "same", "-o", tmp_path / "m1")
    assert first.code == done.code == 0, first.err + done.err
    common = common[:-2]
    received = ["--adapter", tmp_path / "m1" / "clients" / "a", "--round", 2]
    for labels in ("blue,green", "green,blue,red"):
        wrong = main(*common, *received, "--labels", labels, "-o", tmp_path / "wrong")
        assert wrong.code == 2 and "['green', 'blue']" in wrong.err and not (tmp_path / "wrong").exists(), labels
    for k, labels in enumerate(([], ["--labels", "green,blue"])):
        assert main(*common, *received, *labels, "-o", tmp_path / f"u2{k}").code == 0
        facts = json.loads((tmp_path / f"u2{k}" / "upload.json").read_text())
        assert facts["label_names"] == ["green", "blue"]
    facts = json.loads((tmp_path / "u20" / "upload.json").read_text()) | {"label_names": ["blue", "green"]}
    shutil.copytree(tmp_path / "u20", tmp_path / "other")
    (tmp_path / "other" / "upload.json").write_text(json.dumps(facts))
    refused = main("merge", tmp_path / "other", *kept, "-o", tmp_path / "m2")
    assert refused.code == 2 and "['green', 'blue']" in refused.err and "['blue', 'green']" in refused.err
    assert main("merge", tmp_path / "other", *kept, "--heads", "drop", "-o", tmp_path / "m3").code == 0  # it has none


def test_a_site_that_misses_a_round_goes_on_from_the_newest_one(tmp_path: Path, main: Callable[..., Said]) -> None:
    """It is named and gets an adapter. An upload from its older one is refused, and so is one that counted already."""
    base, data = save_model(tmp_path / "base", bert().bert, classifies=True), blue_and_green(tmp_path)
    common = ["train", "--base", base, "--data", data, "--labels", "blue,green", "--steps", 1]
    kept = ["--weights-from", "num_examples", "--method", "glora", "--state", tmp_path / "st", "--readout"]

    def train(client: str, round: int, *more: Any) -> Path:
        out = tmp_path / f"u{round}-{client}"
        done = main(*common, "--client", client, "--round", round, *more, "-o", out, "--force")
        assert done.code == 0, done.err
        return out

    first = [train(name, 1, "--targets", "query", "--rank", rank) for name, rank in (("a", 2), ("b", 3))]
    assert main("merge", *first, *kept, "same", "-o", tmp_path / "r1").code == 0
    second = train("a", 2, "--adapter", tmp_path / "r1" / "clients" / "a")
    shutil.copytree(tmp_path / "st", tmp_path / "again")
    done = main("merge", second, *kept, "same", "-o", tmp_path / "r2")
    assert done.code == 0 and re.search("'b' took no part", done.err), done.err
    assert json.loads((tmp_path / "r2/clients/b/adapter_config.json").read_text())["r"] == 3
    fresh = train("b", 3, "--targets", "query", "--rank", 3)
    refused = main("merge", fresh, *kept, "same", "-o", tmp_path / "r3")
    assert refused.code == 2 and re.search("'b' .*fresh", refused.err), refused.err
    stale = train("b", 3, "--adapter", tmp_path / "r1" / "clients" / "b")
    refused = main("merge", stale, *kept, "same", "-o", tmp_path / "r3")
    assert refused.code == 2 and re.search("'b' .*round 1,", refused.err), refused.err
    facts = json.loads((second / "upload.json").read_text())
    (second / "upload.json").write_text(json.dumps({k: v for k, v in facts.items() if k != "round"}))
    refused = main("merge", second, *kept, "same", "-o", tmp_path / "r3")
    assert refused.code == 2 and re.search("'a' counted already, in round 2", refused.err), refused.err
    fresh = train("b", 3, "--adapter", tmp_path / "r2" / "clients" / "b")
    assert main("merge", fresh, *kept, "same", "-o", tmp_path / "r3").code == 0
    (tmp_path / "ranks.toml").write_text("a = 2\nb = 3\nkork = 2\n")
    kept[-2] = tmp_path / "again"
    done = main("merge", second, *kept, tmp_path / "ranks.toml", "-o", tmp_path / "r4")
    assert done.code == 0 and re.search("'b' .*no part.*'kork'", done.err, re.S)


def test_a_site_reads_on_in_its_data_from_round_to_round(tmp_path: Path, main: Callable[..., Said]) -> None:
    """By flipping labels: with a step of 2 a round, of 4 examples another two move each of two rounds' uploads, as in
    `fedlora run`, whose clients go on where they were."""
    base = save_model(tmp_path / "base", bert().bert, classifies=True)
    rows = [(f"w{k} w{k + 1}", "blue" if k % 2 else "green") for k in range(4)]

    def uploads(name: str, rows: list[tuple[str, str]]) -> list[bytes]:
        (tmp_path / f"{name}.csv").write_text("text,label\n" + "".join(f"{text},{label}\n" for text, label in rows))
        common = ["train", "--base", base, "--data", tmp_path / f"{name}.csv", "--labels", "blue,green", "--targets",
                  "query", "--client", "a", "--steps", 1, "--batch-size", 2]  # fmt: skip
        outs = [tmp_path / f"{name}-{round}" for round in (1, 2)]
        for round, out in enumerate(outs, start=1):
            assert main(*common, "--round", round, "-o", out).code == 0
        return [(out / "adapter_model.safetensors").read_bytes() for out in outs]

    whole, moved = uploads("whole", rows), []
    for k in range(4):
        flipped = [(text, label if j != k else {"blue": "green", "green": "blue"}[label])
                   for j, (text, label) in enumerate(rows)]  # fmt: skip
        moved.append([a != b for a, b in zip(uploads(f"flip{k}", flipped), whole, strict=True)])
    assert [sum(column) for column in zip(*moved, strict=True)] == [2, 2]
    assert all(sum(row) == 1 for row in moved)


def test_fresh_starts_that_differ_are_told(tmp_path: Path, main: Callable[..., Said]) -> None:
    base, data = save_model(tmp_path / "base", bert().bert, classifies=True), blue_and_green(tmp_path)
    common = ["train", "--base", base, "--data", data, "--labels", "blue,green", "--steps", 1, "--targets", "query"]
    ups = [tmp_path / "a", tmp_path / "b"]
    for seed, out in enumerate(ups):
        assert main(*common, "--client", out.name, "--start-seed", seed, "-o", out).code == 0
    done = main("merge", *ups, "--weights-from", "num_examples", "-o", tmp_path / "m")
    assert done.code == 0 and "--start-seed" in done.err


def test_a_site_trains_without_reports_of_the_libraries(tmp_path: Path, program: Callable[..., Program]) -> None:
    """A classifier that is new to the base model is what was asked for, and a bar is ours or none. What libraries say
    as they are imported is asked of `fedlora run` (`test_run_command`)."""
    base = save_model(tmp_path / "base", bert().bert, classifies=True)
    done = program(Path(str(fedlora.cli.__file__)).with_name("__main__.py"), "train", "--base", base, "--data",
                   blue_and_green(tmp_path), "--client", "a", "--labels", "blue,green", "--steps", 1,
                   "-o", tmp_path / "o").ended()  # fmt: skip
    said = [line for line in done.stderr.splitlines() if " fedlora train: " not in line]  # what it is doing
    assert done.returncode == 0 and not said, said


def test_a_round_that_another_process_saved_meanwhile_is_not_counted_twice(
    tmp_path: Path, main: Callable[..., Said]
) -> None:
    """Two servers read one state; the second to save is refused, and what came before is as it was."""
    files = [AdapterFile(saved(tmp_path, name, 2)) for name in "ab"]
    given = Collection.of(files, [1.0, 1.0])

    def server() -> ByHand:
        return ByHand(build("svd"), "svd", tmp_path / "state", base="tiny", missing="zero")

    for begun in (False, True):  # a folder that is not there yet, and one with a round in it
        hands = [server(), server()]
        for hand in hands:
            hand.aggregate(given, ["a", "b"], [1.0, 1.0], [None, None])
        with hands[1].saving() if begun else nullcontext():  # the other one is at it just now
            if begun:
                with pytest.raises(CheckpointError, match="another process"):
                    hands[0].save()
        hands[1 if begun else 0].save()
        before = {path.name: path.read_bytes() for path in (tmp_path / "state").iterdir()}
        with pytest.raises(CheckpointError, match="another process"):
            hands[0 if begun else 1].save()
        assert {path.name: path.read_bytes() for path in (tmp_path / "state").iterdir()} == before
    assert server().state.round == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "state"]


def test_a_state_that_fails_leaves_no_result_and_no_state(
    tmp_path: Path, main: Callable[..., Said], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk refuses the state: the result, which is whole by then, does not appear either."""
    folders = [saved(tmp_path, name, 2) for name in "ab"]
    real = checkpoint._encode

    def full(*args: object) -> object:
        raise CheckpointError("the disk is full")

    for state in ("new", "empty"):
        if state == "empty":
            (tmp_path / state).mkdir()
        monkeypatch.setattr(checkpoint, "_encode", full)
        done = main("merge", *folders, "--method", "glora", "--state", tmp_path / state, "-o", tmp_path / "o")
        assert "the disk is full" in done.complaint() and not (tmp_path / "o").exists()
        monkeypatch.setattr(checkpoint, "_encode", real)
        done = main("merge", *folders, "--method", "glora", "--state", tmp_path / state, "-o", tmp_path / state / "o")
        assert done.code == 0, done.err
        assert sorted(p.name[:11] for p in (tmp_path / state).iterdir()) == ["o", "round-00001"]
        assert not list(tmp_path.rglob("*.part"))


def test_a_site_weighs_its_classes(tmp_path: Path, main: Callable[..., Said]) -> None:
    """One step by the balanced weights is that by the same weights as a table (n / (k n_c) by
    hand), and another than without; a name that is no class is refused before anything is trained."""
    base = save_model(tmp_path / "base", bert().bert, classifies=True)
    lines = ["w0 w1 w2,blue", "w1 w2 w0,blue", "w2 w1,blue", "w4 w5,green"]
    (tmp_path / "d.csv").write_text("text,label\n" + "".join(f"{line}\n" for line in lines))
    common = ["train", "--base", base, "--data", tmp_path / "d.csv", "--client", "a", "--labels", "blue,green"]
    common += ["--steps", 1, "--batch-size", 4]
    weights = {"none": [], "balanced": ["balanced"], "table": [f"blue={4 / (2 * 3)},green={4 / 2}"]}
    for name, given in weights.items():
        option = ["--class-weights", *given] if given else []
        assert main(*common, *option, "-o", tmp_path / name).code == 0
    files = {name: (tmp_path / name / "adapter_model.safetensors").read_bytes() for name in weights}
    assert files["balanced"] == files["table"] != files["none"]
    facts = json.loads((tmp_path / "balanced" / "upload.json").read_text())
    assert facts["settings"]["class_weights"] == "balanced"
    for wrong, says in (("red=2", "--class-weights names 'red'"), ("blue", "--class-weights must be balanced or"),
                        ("blue=-1", "'blue=-1'")):  # fmt: skip
        assert says in main(*common, "--class-weights", wrong, "-o", tmp_path / "o").complaint()


def test_a_site_trains_by_a_program_of_its_own(
    tmp_path: Path, main: Callable[..., Said], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two rounds by hand of a program that doubles B and says 30 examples: the second begins from what the server gave
    back, and the program finds what it kept. A failure is one line, and leaves no upload."""
    monkeypatch.chdir(tmp_path)
    base, data = save_model(tmp_path / "base", llama(), classifies=False), tmp_path / "mine.jsonl"
    Rows.of(instructions(12, 0)).write(data)
    words = shlex.join(command(tmp_path, DOUBLING, "{data}"))
    site = ["train", "--base", base, "--data", data, "--client", "acme", "--command", words]
    fresh = main(*site, "--targets", "q_proj", "--rank", "2", "-o", tmp_path / "up1")
    assert fresh.code == 0, fresh.err
    first = json.loads((tmp_path / "up1" / "upload.json").read_text())
    assert (first["num_examples"], first["mean_loss"], first["settings"]) == (30, 1.0, {})
    merged = main("merge", tmp_path / "up1", "--weights-from", "num_examples", "--method", "fedit", "--state",
                  tmp_path / "st", "--readout", "same", "-o", tmp_path / "r1")  # fmt: skip
    assert merged.code == 0, merged.err
    start = tmp_path / "r1" / "clients" / "acme"
    weights = {n: LoRA(torch.ones_like(p.B), p.A) for n, p in read_adapter(start)[0].modules.items()}
    write_adapter(start, Adapter(weights), read_adapter(start)[1])
    again = main(*site, "--adapter", start, "--round", "2", "-o", tmp_path / "up2")
    assert again.code == 0, again.err
    for name, lora in read_adapter(tmp_path / "up2")[0].modules.items():
        assert torch.equal(lora.delta(), 2 * weights[name].delta())
    assert Path("programs/acme/kept/2/rounds").read_text() == "12"

    command(tmp_path, "raise SystemExit('no room')")
    said = main(*site, "--adapter", start, "--round", "3", "-o", tmp_path / "up3").complaint()
    assert "'acme' failed in round 3: " in said and "code 1" in said and "'no room'" in said
    assert not (tmp_path / "up3").exists()
    assert "--lr is " in main(
        *site, "--lr", "0.1", "-o", tmp_path / "up3"
    ).complaint()  # fmt: skip
