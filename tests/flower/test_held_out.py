"""A site is never measured on rows that it trained on, whatever becomes of its data file between rounds.

Kinds of evidence: *property* (what a round trained on and what a later one measures on share no input), *contract*
(what is told, and to whom). The rounds are real ones: tiny models, Flower's wire.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from fedlora.data import TextData, split
from fedlora.data.splits import Parts, inputs
from fedlora.errors import ConfigError
from fedlora.flower.site.held_out import keep_held_out, record_of
from fedlora.flower.site.site_folder import fill_site
from fedlora.flower.site.site_work import told_to_server
from fedlora.flower.terms.joining import JoinFile
from fedlora.flower.terms.site_file import Site
from fedlora.runs import inputs as runs_inputs
from support.federation_folders import FederationOnDisk
from support.known_warnings import FUTURE_NAMES, LORA_BIAS
from support.shown_certificates import authority

pytestmark = [FUTURE_NAMES, LORA_BIAS]


@pytest.fixture
def dealt(monkeypatch: pytest.MonkeyPatch) -> list[tuple[set[Any], set[Any]]]:
    """(inputs that acme trains on, inputs that it holds out), each time that its trainer is made."""
    found, real = [], runs_inputs.deal

    def deal(*given: Any, **more: Any) -> Any:
        made = real(*given, **more)
        if "acme" in made.parts:
            held = {one for own in (made.own_validation, made.own_test) for one in inputs(own["acme"])}
            found.append((set(inputs(made.parts["acme"])), held))
        return made

    monkeypatch.setattr(runs_inputs, "deal", deal)
    return found


def test_a_file_that_grows_between_rounds_is_measured_on_nothing_that_was_trained_on(
    tmp_path: Path, dealt: list[tuple[set[Any], set[Any]]], caplog: pytest.LogCaptureFixture
) -> None:
    """Rows are appended and put in another order, one that was trained on goes, and one that is held out comes again in
    other letters. Drawn anew, a share of the file would be of rows that round 1 trained on."""
    made = FederationOnDisk(tmp_path, run={"rounds": 1})
    made.play()
    (trained, held), data = dealt[0], tmp_path / "acme.jsonl"
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    old = {row["text"] for row in rows}
    again = next(row for row in rows if (row["text"].casefold(), "") in held)
    gone = next(row for row in rows if (row["text"].casefold(), "") in trained)
    new = [{"text": f"w{k} w{k + 7} w3", "label": rows[0]["label"]} for k in range(30)]
    assert not {row["text"] for row in new} & old
    changed = [row for row in rows[::-1] if row != gone] + [{**again, "text": f" {again['text'].upper()}  "}, *new]
    data.write_text("".join(json.dumps(row) + "\n" for row in changed))
    made.write(run={"rounds": 3})
    made.play()
    later_trained, later_held = dealt[1]
    assert later_held == held and not (trained | later_trained) & held
    assert {(row["text"], "") for row in new} <= later_trained and len(dealt) == 2
    assert "data file has changed" in caplog.text and str(len(later_trained)) in caplog.text
    assert [line["fates"]["acme"]["fate"] for line in made.lines()] == ["trained"] * 3


def test_another_file_is_refused_with_a_way_out(tmp_path: Path, dealt: list[tuple[set[Any], set[Any]]]) -> None:
    """None of its held-out rows is left, and nothing says on which of the new rows it trained before."""
    made = FederationOnDisk(tmp_path, run={"rounds": 1})
    made.play()
    data = tmp_path / "acme.jsonl"
    old = data.read_text()
    data.write_text("".join(line.replace('"w', '"x w') + "\n" for line in old.splitlines()))
    made.write(run={"rounds": 2})
    made.play()
    fate = made.lines()[-1]["fates"]["acme"]
    assert fate["fate"] == "failed" and "held_out.json" in fate["why"] and "validation and test" in fate["why"]
    record_of(tmp_path / "sites" / "acme" / "state", "fed-test", "acme").write_text("{}")
    made.write(run={"rounds": 3})
    made.play()
    assert made.lines()[-1]["fates"]["acme"]["fate"] == "trained"


def test_a_site_that_lost_what_it_holds_out_neither_trains_nor_measures_until_somebody_looked(tmp_path: Path) -> None:
    """Its state is emptied and its file has grown: a draw would hold out rows that counted. The server knows, in that
    round and in all later ones; a site that counts for the first time is welcome, in whatever round."""
    made = FederationOnDisk(tmp_path, run={"rounds": 1})
    late = made.grid()
    late.offline = {"berlin"}
    made.play(late)
    state = tmp_path / "sites" / "acme" / "state"
    shutil.rmtree(state)
    with (tmp_path / "acme.jsonl").open("a") as file:
        file.writelines(json.dumps({"text": f"w{k} w{k + 7} w3", "label": "red"}) + "\n" for k in range(30))
    for rounds in (2, 3):  # of round 3 the server remembers nothing that acme holds
        made.write(run={"rounds": rounds})
        made.play()
        line = made.lines()[-1]
        assert line["fates"]["acme"]["fate"] == "failed" and "held_out.json" in line["fates"]["acme"]["why"]
        assert "held_out.json" in line["site_unmeasured"]["acme"] and "acme" not in line["site_metrics"]
        assert line["fates"]["berlin"]["fate"] == "trained" and "berlin" in line["site_metrics"]
    record = record_of(state, "fed-test", "acme")
    record.parent.mkdir(parents=True, exist_ok=True)
    record.write_text("{}")
    made.write(run={"rounds": 4})
    made.play()
    assert made.lines()[-1]["fates"]["acme"]["fate"] == "trained" and len(json.loads(record.read_text())) == 2


def test_a_site_that_lost_its_folder_and_joins_again_takes_part(tmp_path: Path) -> None:
    """Its key, its state and the record of its held-out rows are gone, and the server knows that its work counted. The
    folder is made by what `fedlora flower site --join` calls."""
    made = FederationOnDisk(tmp_path, run={"rounds": 1})
    made.play()
    folder, settings = tmp_path / "sites" / "acme", made.settings()
    site = Site.read(folder / "site.toml")
    shutil.rmtree(folder)
    folder.mkdir()
    ca = authority().pem
    join = JoinFile(settings.id, "acme", 4, "fl.example.org", 443, ca, settings.travelling(), {})
    fill_site(folder, join.text().encode(), site, {})
    made.write(run={"rounds": 2})
    made.play()
    line, record = made.lines()[-1], record_of(folder / "state", settings.id, "acme")
    assert line["fates"]["acme"]["fate"] == "trained" and "acme" in line["site_metrics"]
    assert set(json.loads(record.read_text())) == {"validation", "test"}


def texts(count: int, prefix: str = "row") -> TextData:
    numbers = range(count)
    return TextData(
        "classification", text=tuple(f"{prefix} {k}" for k in numbers), labels=tuple(k % 2 for k in numbers),
        label_names=("no", "yes"),
    )  # fmt: skip


def drawn(data: TextData) -> Parts:
    return split(data, validation=0.2, test=0.2, seed=0)


def said(parts: Sequence[TextData]) -> list[tuple[str, ...]]:
    return [part.text for part in parts]


def test_the_same_file_gives_the_same_parts_in_the_same_order(tmp_path: Path) -> None:
    """A trainer that is started again trains on what it did, bit for bit; before the first round the draw counts."""
    record, parts = tmp_path / "held_out.json", drawn(texts(40))
    assert said(keep_held_out(parts, record, first=True, counted=False)) == said(parts)
    assert said(keep_held_out(parts, record, first=False, counted=True)) == said(parts)
    others = drawn(texts(40, "other"))
    nothing = split(texts(40), validation=0, test=0, seed=0)  # by a hostile server: before, it trained on all
    with pytest.raises(ConfigError, match="names no row"):
        (tmp_path / "empty.json").write_text('{"validation": [], "test": []}')
        keep_held_out(nothing, tmp_path / "empty.json", first=False, counted=True)
    with pytest.raises(ConfigError, match="validation and test"):  # and whose settings name another column
        keep_held_out(split(texts(40, "col"), validation=0, test=0, seed=0), record, first=False, counted=True)
    still = keep_held_out(nothing, record, first=False, counted=True)
    assert [*map(sorted, said(still))] == [*map(sorted, said(parts))]
    assert said(keep_held_out(others, record, first=True, counted=False)) == said(others)
    assert said(keep_held_out(others, record, first=False, counted=True)) == said(others)
    assert said(keep_held_out(nothing, tmp_path / "none.json", first=True, counted=False)) == said(nothing)
    assert not (tmp_path / "none.json").exists()


def test_what_is_kept_and_told_holds_nothing_of_the_data(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Neither in the record nor in messages about a record that is missing, damaged, or for other rows."""
    record = tmp_path / "held_out.json"
    secret = drawn(texts(40, "Jane Doe"))
    with pytest.raises(ConfigError, match=r"held_out\.json") as gone:
        keep_held_out(secret, record, first=False, counted=True)
    keep_held_out(secret, record, first=False, counted=False)
    with pytest.raises(ConfigError) as refused:
        keep_held_out(drawn(texts(40, "other")), record, first=False, counted=True)
    record.write_text("{}" + record.read_text())
    with pytest.raises(ConfigError, match=r"held_out\.json") as damaged:
        keep_held_out(secret, record, first=False, counted=True)
    everything = record.read_text() + caplog.text + "".join(map(str, (gone.value, refused.value, damaged.value)))
    assert "jane" not in everything.casefold() and "row" in told_to_server(refused.value, tmp_path)
