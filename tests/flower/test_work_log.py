"""A site's own log of its work. Kinds of evidence: format (what is written is read), crash (a torn line)."""

from __future__ import annotations

from pathlib import Path

from fedlora.flower.site.work_log import Follower, Work, write


def test_what_is_written_is_read_once_and_in_order(tmp_path: Path) -> None:
    write(tmp_path, Work("train", 1, 10, 1.5, 0.25))
    follower = Follower(tmp_path)  # begins after what is there
    later = [Work("train", 2, 20, 2.0, 0.125), Work("evaluate", 2, 5, 0.5), Work("train", 3, error="no\nmemory")]
    for work in later:
        write(tmp_path, work)
    assert follower.new() == later and follower.new() == []
    assert (tmp_path / "state" / "logs" / "work.jsonl").stat().st_mode & 0o777 == 0o600


def test_a_line_that_is_not_whole_waits_and_a_broken_one_is_left_out(tmp_path: Path) -> None:
    write(tmp_path, Work("train", 1, 10, 1.5, 0.25))
    path = tmp_path / "state" / "logs" / "work.jsonl"
    whole = path.read_bytes()
    path.write_bytes(b"")
    follower = Follower(tmp_path)
    path.write_bytes(b"{nonsense\n" + whole + whole[:20])
    assert follower.new() == [Work("train", 1, 10, 1.5, 0.25)]
    with path.open("ab") as file:
        file.write(whole[20:])
    assert len(follower.new()) == 1
    path.write_bytes(whole)  # begun anew, and shorter
    assert len(follower.new()) == 1


def test_a_loss_that_is_no_number_is_an_error_and_the_line_stays_json(tmp_path: Path) -> None:
    follower = Follower(tmp_path)
    write(tmp_path, Work("train", 1, 10, 1.5, float("nan")))
    assert "NaN" not in (tmp_path / "state" / "logs" / "work.jsonl").read_text()
    (found,) = follower.new()
    assert found.loss is None and found.error == "the loss is nan"


def test_lines_for_a_screen_say_all_that_is_known() -> None:
    assert Work("train", 3, 120, 14.21, 0.412).line() == "round 3: trained 120 examples in 14.2 s, loss 0.4120"
    assert Work("evaluate", 3, 7, 0.21).line() == "round 3: measured 7 examples in 0.2 s"
    assert Work("train", 4, error="ValueError: no").line() == "round 4: train failed after 0.0 s: ValueError: no"
