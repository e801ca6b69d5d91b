"""A trial's folder: the run's own data dealt out, each site a folder like a real one. Kind of evidence: *reference*:
what the sites read back is what `fedlora run` deals to its clients."""

from __future__ import annotations

import json
import subprocess
import threading
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from fedlora.data import TextData
from fedlora.errors import ConfigError
from fedlora.flower import processes
from fedlora.flower.places import FederationFolder
from fedlora.flower.serving.superlink import SuperLink
from fedlora.flower.serving.supervisor import Lost
from fedlora.flower.serving.trial import Trial
from fedlora.flower.setup.trial_folder import trial
from fedlora.flower.terms.joining import JoinFile, Request
from fedlora.flower.terms.policy import Policy
from fedlora.flower.terms.settings import FederationSettings
from fedlora.flower.terms.site_file import Site
from fedlora.runs.client_data import deal
from fedlora.runs.config import load_config
from support.deployed_folders import federation_folder, site_folder
from support.known_warnings import FUTURE_NAMES, LORA_BIAS
from support.tiny_models import bert
from support.training_data import classification, save_model

pytestmark = [FUTURE_NAMES, LORA_BIAS]


def config(root: Path, data: str) -> Path:
    save_model(root / "base", bert(), classifies=True)
    path = root / "run.toml"
    path.write_text(
        f'model = {{ path = "base" }}\nlora = {{ targets = ["query"] }}\nclients = {{ ranks = [1, 2] }}\n'
        f"run = {{ threads = 1, rounds = 2 }}\n[data]\nmax_length = 16\n{data}\n"
    )
    return path


def rows(root: Path, name: str, seed: int) -> None:
    data = classification(40, seed)
    assert data.labels is not None
    lines = [json.dumps({"words": t, "label": y}) for t, y in zip(data.text, data.labels, strict=True)]
    (root / name).write_text("\n".join(lines) + "\n")


def examples(data: TextData) -> list[tuple[str, int]]:
    assert data.labels is not None
    return sorted(zip(data.text, data.labels, strict=True))


def test_a_key_of_one_machine_is_refused_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows(tmp_path, "all.jsonl", 0)
    loaded = load_config(
        config(tmp_path, 'train = "all.jsonl"\ntext = "words"'), ["model.dtype=bfloat16", "model.bf16=true"]
    )
    monkeypatch.setattr("fedlora.flower.setup.trial_folder.prepare", lambda *_: pytest.fail("it loads the model"))
    with pytest.raises(ConfigError, match=r"model\.dtype = 'bfloat16'.* float32.*site\.toml"):
        trial(tmp_path / "f", loaded, 18080)


def test_one_file_becomes_a_file_for_each_site_and_the_held_out_are_the_servers(tmp_path: Path) -> None:
    rows(tmp_path, "all.jsonl", 0)
    shares = "validation = 0.2\ntest = 0.2"
    loaded = load_config(config(tmp_path, f'train = "all.jsonl"\ntext = "words"\n{shares}'), [])
    trial(tmp_path / "f", loaded, 18080)
    fed, whole = FederationFolder(tmp_path / "f"), deal(loaded, None)
    settings = FederationSettings.load(fed.settings)
    assert settings.data.validation == settings.data.test == 0
    for name, part in whole.parts.items():
        site = Site.read(fed.site(name).site)
        read = deal(settings.for_site(site, 2), None).parts[name]
        assert examples(read) == examples(part) and read.label_names == part.label_names
    measured = settings.for_server()
    assert measured is not None
    held = deal(measured, None)
    for part in ("validation", "test"):
        assert examples(getattr(held, part)[""]) == examples(getattr(whole, part)[""]) != []


def test_with_files_of_their_own_the_sites_hold_out_their_shares_bit_for_bit(tmp_path: Path) -> None:
    for k, name in enumerate("ab"):
        rows(tmp_path, f"{name}.jsonl", k)
    given = 'clients = { a = "a.jsonl", b = "b.jsonl" }\ntext = "words"\nvalidation = 0.2\ntest = 0.1'
    loaded = load_config(config(tmp_path, given), [])
    trial(tmp_path / "f", loaded, 18080)
    fed, whole = FederationFolder(tmp_path / "f"), deal(loaded, None)
    settings = FederationSettings.load(fed.settings)
    for name, part in whole.parts.items():
        alone = deal(settings.for_site(Site.read(fed.site(name).site), 1), None)
        assert alone.parts[name] == part  # the order counts, for it makes the batches
        assert alone.own_test[name] == whole.own_test[name]


def test_every_site_is_admitted_and_its_folder_is_a_real_one(tmp_path: Path) -> None:
    rows(tmp_path, "all.jsonl", 0)
    loaded = load_config(config(tmp_path, 'train = "all.jsonl"\ntext = "words"\nvalidation = 0.0\ntest = 0.0'), [])
    trial(tmp_path / "f", loaded, 18081)
    fed = FederationFolder(tmp_path / "f")
    assert Policy.read(fed.policy).clients == {"site-1": 1, "site-2": 2}
    for name in ("site-1", "site-2"):
        site, join = fed.site(name), JoinFile.read(fed.site(name).join)
        assert join.address == "127.0.0.1:18081" and join.ca == (fed.certificates / "ca.crt").read_text()
        assert site.public_key.read_bytes() == fed.key(name).read_bytes()
        assert Request.read(fed.request(name)).public_key == site.public_key.read_text().strip()
        assert site.key.stat().st_mode & 0o077 == 0
    assert not fed.public.exists() and not fed.proxy.exists()


def test_the_end_of_a_node_is_a_failure(tmp_path: Path) -> None:
    """A node that the kernel killed has no last words: the log's last line is of something else. One that ended by
    itself says why there; what Flower colours is read as text."""
    fed = federation_folder(tmp_path / "f")
    for name in ("one", "two"):
        site_folder(fed.site(name).path, fed.join(name))
    trial_of_two = Trial(SuperLink(fed.path))
    fed.logs.mkdir(parents=True)
    (fed.logs / "node-two.log").write_text("\x1b[93mWARNING\x1b[0m: no base model\n")
    ended = {code: subprocess.Popen(["sh", "-c", words]) for code, words in ((2, "exit 2"),)}
    ended[-9] = subprocess.Popen(["sh", "-c", "kill -9 $$"])
    for process in ended.values():
        process.wait()
    for code, how in (
        (-9, r"by SIGKILL .*log is \S+\. Call"),
        (2, "with code 2.* ends with: WARNING: no base model. "),
    ):
        trial_of_two.nodes = {"two": ended[code]}
        with pytest.raises(Lost, match=f"two .* {how}") as failed:
            trial_of_two.also()
        assert "\x1b" not in str(failed.value)


def test_a_trial_that_was_stopped_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even one that left its node's group; but it ends none of a trial that another process plays. Its nodes end
    before the SuperLink: otherwise they cannot say that they leave, and the next trial waits a minute for it."""
    fed, stop, ended = federation_folder(tmp_path / "f"), threading.Event(), list[bool]()
    site_folder(fed.site("one").path, fed.join("one"))
    mine, home = Trial(SuperLink(fed.path), stop=stop), fed.site("one").state / "flwr"
    monkeypatch.setattr(SuperLink, "start", lambda self, give_up: None)
    monkeypatch.setattr(SuperLink, "stop", lambda self: ended.extend(n.poll() is not None for n in mine.nodes.values()))
    stop.set()
    detached = subprocess.Popen(["sleep", "60"], env=processes.environment(home), start_new_session=True)
    mine.serve()
    assert detached.poll() is None
    mine.nodes = {"one": subprocess.Popen(["sleep", "60"], start_new_session=True)}
    mine.serve()
    detached.wait(10)
    assert ended == [True]
