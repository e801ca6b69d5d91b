"""Adapters and bases written owner/name@revision. Kind of evidence: end to end, against a hub on this machine."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from fedlora.data.hub import ADAPTER_FILES, local_folder, repository_and_revision
from fedlora.errors import ConfigError
from fedlora.runs.config import load_config
from fedlora.runs.sections import ModelSection
from support.bases import small
from support.command_line import Said
from support.local_hub import COMMIT, serving

pytestmark = pytest.mark.filterwarnings("ignore")
Main = Callable[..., Said]


def test_every_command_takes_them(tmp_path: Path, main: Main, monkeypatch: pytest.MonkeyPatch) -> None:
    """By branch and by commit, each file downloaded once, no others; the result is that of the folders."""
    adapter, base = small(tmp_path)
    (adapter / "optimizer.pt").write_text("not asked for")
    (base / "onnx").mkdir()
    (base / "onnx" / "config.json").write_text("{}")
    hub = {"me/adapter": adapter, "me/base": base}
    monkeypatch.chdir(tmp_path)
    with serving(hub, tmp_path / "cache", monkeypatch) as asked:
        for command in (
            ["inspect", "me/adapter@main"],
            ["diff", "me/adapter@main", adapter],
            ["validate", f"me/adapter@{COMMIT}", "--model", "me/base@main"],
            ["merge", "me/adapter@main", adapter, "-o", "merged"],
            ["resize", "me/adapter@main", "--rank", "1", "-o", "small"],
            ["export", "me/adapter@main", "--format", "merged", "--model", f"me/base@{COMMIT}", "-o", "full"],
            ["audit", "me/adapter@main", adapter, "--methods", "fedit", "--plot", tmp_path / "a.png"],
        ):
            done = main(*command)
            assert done.code == 0, done.err
    got = [path.split("/resolve/")[1].partition("/")[2] for how, path in asked if how == "GET" and "resolve" in path]
    of_base = {path.name for path in base.iterdir() if path.is_file()}
    assert sorted(got) == sorted({"adapter_config.json", "adapter_model.safetensors", *of_base})
    assert main("export", adapter, "--format", "merged", "--model", base, "-o", "same").code == 0
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("full", "same"))
    assert one.keys() == other.keys() and all(one[key].equal(other[key]) for key in one)


def test_the_cache_serves_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cached branch is found when nothing answers; what is not cached names the command that fetches it."""
    adapter, _ = small(tmp_path)
    with serving({"me/adapter": adapter}, tmp_path / "cache", monkeypatch):
        here = local_folder("me/adapter@main", ADAPTER_FILES)
        assert {path.name for path in here.iterdir()} == set(ADAPTER_FILES[:2])
        from huggingface_hub import constants

        monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
        assert local_folder("me/adapter@main", ADAPTER_FILES) == here
        with pytest.raises(ConfigError, match="hf download me/other --revision v1 "):
            local_folder("me/other@v1", ADAPTER_FILES)


def test_a_run_s_base_and_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """model.name is as repository and revision given apart."""
    adapter, base = small(tmp_path)
    (tmp_path / "run.toml").write_text('model = {name = "me/base@main", adapter = "me/up@main"}\ndata.train = "a.csv"')
    with serving({"me/up": adapter, "me/base": base}, tmp_path / "cache", monkeypatch):
        config = load_config(tmp_path / "run.toml")
        assert (config.model.name, config.model.revision) == ("me/base", "main")
        assert (Path(config.model.location()) / "config.json").is_file()
        assert ModelSection(name=f"me/base@{COMMIT}").location() == config.model.location()
        assert config.model.adapter == str(local_folder("me/up@main", ADAPTER_FILES))
        with pytest.raises(ConfigError, match=r"names a revision, so leave out model\.revision"):
            load_config(tmp_path / "run.toml", ["model.revision=v1"])


def test_what_the_hub_lacks_is_named(tmp_path: Path, main: Main, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter, base = small(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "notes.pdf").write_text("x")
    hub = {"me/adapter": adapter, "me/base": base, "me/empty": tmp_path / "empty"}
    with serving(hub, tmp_path / "cache", monkeypatch):
        for name, why in (
            ("me/none@main", "me/none' at revision main .*RepositoryNotFound"),
            ("me/adapter@v9", "at revision v9 .*RevisionNotFound"),
            ("me/empty@main", "me/empty .* adapter_config.json, "),
        ):
            assert re.search(why, main("validate", name).error())
        assert "RepositoryNotFound" in main("validate", adapter, "--model", "me/none@main").error()


def test_a_folder_of_that_name_wins_and_a_plain_name_asks_nobody(
    tmp_path: Path, main: Main, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter, base = small(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "me").mkdir()
    adapter.rename(tmp_path / "me" / "adapter@main")
    with serving({"me/adapter": base}, tmp_path / "cache", monkeypatch) as asked:
        assert main("validate", "me/adapter@main").code == 0
        assert "me/adapter is not a PEFT adapter" in main("inspect", "me/adapter").error()
        assert "owner/name@main" in main("validate", "me/adapter@main", "--model", "me/base").error()
        assert not asked


def test_names() -> None:
    for text, want in {
        "a/b@main": ("a/b", "main"), "a/b.c-d@refs/pr/1": ("a/b.c-d", "refs/pr/1"), f"a/b@{COMMIT}": ("a/b", COMMIT),
        "a/b": None, "a@main": None, "a/b/c@main": None, "./a/b@main": None, "/a/b@main": None, "a/b@": None,
        "a/b@../c": None,
    }.items():  # fmt: skip
        assert repository_and_revision(text) == want, text
