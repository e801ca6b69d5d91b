"""Adapters and bases written owner/name@revision. Kind of evidence: end to end, against a hub on this machine."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
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
Hub = tuple[Path, Path, list[tuple[str, str]]]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """An adapter and its base here, and as me/adapter and me/base on the hub; what the hub is asked."""
    adapter, base = small(tmp_path)
    monkeypatch.chdir(tmp_path)
    with serving({"me/adapter": adapter, "me/base": base}, tmp_path / "cache", monkeypatch) as asked:
        yield adapter, base, asked


def test_every_command_takes_them(hub: Hub, tmp_path: Path, main: Main) -> None:
    """By branch and by commit, each file downloaded once, no others; the result is that of the folders."""
    adapter, base, asked = hub
    (adapter / "optimizer.pt").write_text("not asked for")
    (base / "onnx").mkdir()
    (base / "onnx" / "config.json").write_text("{}")
    for command in (
        ["inspect", "me/adapter@main"],
        ["diff", "me/adapter@main", adapter],
        ["validate", f"me/adapter@{COMMIT}", "--model", "me/base@main"],
        ["merge", "me/adapter@main", adapter, "-o", "merged"],
        ["resize", "me/adapter@main", "--rank", "1", "-o", "small"],
        ["export", "me/adapter@main", "--format", "merged", "--model", f"me/base@{COMMIT}", "-o", "full"],
        ["audit", "me/adapter@main", adapter, "--methods", "fedit"],
    ):
        done = main(*command)
        assert done.code == 0, done.err
    got = [path.split("/resolve/")[1].partition("/")[2] for how, path in asked if how == "GET" and "resolve" in path]
    of_base = {path.name for path in base.iterdir() if path.is_file()}
    assert sorted(got) == sorted({"adapter_config.json", "adapter_model.safetensors", *of_base})
    assert main("export", adapter, "--format", "merged", "--model", base, "-o", "same").code == 0
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("full", "same"))
    assert one.keys() == other.keys() and all(one[key].equal(other[key]) for key in one)


def test_the_cache_serves_without_a_network(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cached branch is found when nothing answers; what is not cached names the command that fetches it."""
    here = local_folder("me/adapter@main", ADAPTER_FILES)
    assert {path.name for path in here.iterdir()} == set(ADAPTER_FILES[:2])
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    assert local_folder("me/adapter@main", ADAPTER_FILES) == here
    with pytest.raises(ConfigError, match="hf download me/other --revision v1 "):
        local_folder("me/other@v1", ADAPTER_FILES)


def test_a_run_s_base_and_start(hub: Hub, tmp_path: Path) -> None:
    """model.name is as repository and revision given apart."""
    file = tmp_path / "run.toml"
    file.write_text('model = {name = "me/base@main", adapter = "me/adapter@main"}\ndata.train = "a.csv"')
    config = load_config(file)
    assert (config.model.name, config.model.revision) == ("me/base", "main")
    assert (Path(config.model.location()) / "config.json").is_file()
    assert ModelSection(name=f"me/base@{COMMIT}").location() == config.model.location()
    assert config.model.adapter == str(local_folder("me/adapter@main", ADAPTER_FILES))


def test_what_the_hub_lacks_is_named_a_folder_wins_and_a_plain_name_asks_nobody(
    hub: Hub, tmp_path: Path, main: Main
) -> None:
    for name, why in (
        ("me/none@main", "me/none' at revision main .*RepositoryNotFound"),
        ("me/adapter@v9", "at revision v9 .*RevisionNotFound"),
        ("me/base@main", "me/base .* adapter_config.json, "),
    ):
        assert re.search(why, main("validate", name).error())
    assert "RepositoryNotFound" in main("validate", hub[0], "--model", "me/none@main").error()
    hub[2].clear()
    (tmp_path / "me").mkdir()
    hub[0].rename(tmp_path / "me" / "adapter@main")
    assert main("validate", "me/adapter@main").code == 0
    assert "me/adapter is not a PEFT adapter" in main("inspect", "me/adapter").error()
    assert "owner/name@main" in main("validate", "me/adapter@main", "--model", "me/base").error()
    assert not hub[2]


def test_names() -> None:
    for text, want in {
        "a/b@main": ("a/b", "main"), "a/b.c-d@refs/pr/1": ("a/b.c-d", "refs/pr/1"), f"a/b@{COMMIT}": ("a/b", COMMIT),
        "a/b": None, "a@main": None, "a/b/c@main": None, "./a/b@main": None, "/a/b@main": None, "a/b@": None,
        "a/b@../c": None,
    }.items():  # fmt: skip
        assert repository_and_revision(text) == want, text
