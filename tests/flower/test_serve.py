"""`serve`'s decisions, on a simulated SuperLink: what it waits for, what ends it and how, and that it continues when it
is called again. Kind: *unit*."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from fedlora.errors import ConfigError
from fedlora.flower.places import FederationFolder
from fedlora.flower.processes import holder, locked
from fedlora.flower.server.journal import Journal
from fedlora.flower.server.serve import Lost, Pace, Supervisor
from fedlora.flower.server.status import Standing
from fedlora.flower.server.superlink import NodeFacts, RunFacts, SuperLinkError
from fedlora.flower.server.superlink_process import SAYS
from support.played_folders import CLIENTS, end_rounds, federation_folder, play_round

Turn = Callable[["FakeLink"], RunFacts | None]  # one look at the run; None: it goes on as it is


class FakeLink:
    """A SuperLink whose runs are a script: runs -> the turns of each, one for a look.

    done: what was asked of it, in order. online: who is there; `comes` is called at each look at the nodes.
    """

    address = "127.0.0.1:1"

    def __init__(self, home: Path, *scripts: list[Turn]) -> None:
        self.folder, self.log, self.scripts = FederationFolder(home), home / "superlink.log", list(scripts)
        self.done: list[str] = []
        self.keys = set[str]()
        self.online = list(CLIENTS)
        self.comes: Callable[[], None] = lambda: None
        self.code: int | None = None
        self.listed = list[RunFacts]()
        self._turns: list[Turn] = []

    def start(self) -> None:
        self.done.append("start")
        self.code = None

    def stop(self) -> None:
        self.done.append("stop")
        self.code = None

    def ended(self) -> int | None:
        return self.code

    def nodes(self) -> list[NodeFacts]:
        self.comes()
        return [NodeFacts(n, k, "online" if n in self.online else "offline", b"") for k, n in enumerate(CLIENTS)]

    def runs(self) -> list[RunFacts]:
        return self.listed

    def look(self, run: int) -> RunFacts:
        found = self._turns.pop(0)(self) if self._turns else None
        return found or RunFacts(run, "running")

    def keep_keys(self, keys: Mapping[str, Path]) -> list[str]:
        new = sorted(keys.keys() - self.keys)
        if new or keys.keys() != self.keys:
            self.done.append("keys " + ",".join(keys))
        self.keys = set(keys)
        return [f"{name}: its key is admitted" for name in new if len(self.done) > 2]

    def run(self) -> int:
        assert self.scripts, "no more runs were expected"
        self.done.append("run")
        self._turns = self.scripts.pop(0)
        return 7

    def stop_run(self, run: int) -> None:
        self.done.append(f"stop run {run}")


def rounds(*numbers: int, **fates: str) -> Turn:
    """A turn in which these rounds are played, or nothing happens."""

    def turn(link: FakeLink) -> RunFacts | None:
        for number in numbers:
            play_round(link.folder.path, number, fates)
        return None

    return turn


def completes(number: int) -> Turn:
    def turn(link: FakeLink) -> RunFacts:
        end_rounds(link.folder.path, number)
        return RunFacts(7, "finished:completed")

    return turn


def fails(details: str, *, ended: str = "") -> Turn:
    """The run fails. ended: why, in now.json."""

    def turn(link: FakeLink) -> RunFacts:
        if ended:
            Journal(link.folder.path / "server").ended(ended, details)
        return RunFacts(7, "finished:failed", details)

    return turn


def dies(code: int = -9) -> Turn:
    """The SuperLink ends."""

    def turn(link: FakeLink) -> RunFacts | None:
        link.code = code
        return None

    return turn


FAST = Pace(log=0.0, look=0.0, remind=100.0, pending=0.2, thin=0.0, unanswered=3)


def served(
    home: Path, *scripts: list[Turn], before: Callable[[FakeLink], None] = lambda link: None
) -> tuple[Standing, FakeLink, list[str]]:
    """`serve` on these runs, to its end: the standing, the link, and the output."""
    link, said = FakeLink(home, *scripts), list[str]()
    before(link)
    return Supervisor(link, said.append, pace=FAST).serve(), link, said


def test_all_rounds_a_line_each_and_everything_taken_down(tmp_path: Path) -> None:
    """Runs that an earlier SuperLink left are stopped first. What it refuses is said: its other lines are not repeated,
    and of those before this call nothing is."""
    home = federation_folder(tmp_path / "f")
    (home / "superlink.log").write_text(f"{SAYS}of yesterday\n")

    def left(link: FakeLink) -> None:
        link.listed = [RunFacts(3, "running"), RunFacts(2, "finished:failed"), RunFacts(1, "pending")]

    def refuses(link: FakeLink) -> None:
        with link.log.open("a") as file:
            file.write(f"INFO: 200 OK\n{SAYS}cork answers as acme\n")

    now, link, said = served(home, [rounds(1, cork="late"), refuses, rounds(2, 3), completes(3)], before=left)
    assert (now.done, now.why) == (3, "complete")
    assert link.done == ["start", "stop run 3", "stop run 1", "keys acme,berlin,cork", "run", "stop"]
    assert said[0].startswith("fed-1: 3 sites, 3 rounds, 0 ") and "cork answers as acme" in said
    assert [line for line in said if line.startswith("round")] == [f"round {k} is played" for k in (1, 2, 3)]
    assert not [line for line in said if "200 OK" in line or "yesterday" in line]
    assert holder(home / "state" / "serve.lock") is None


def test_a_finished_federation_is_left_alone(tmp_path: Path) -> None:
    """No SuperLink is started; raising the rounds goes on."""
    home = federation_folder(tmp_path / "f")
    for number in (1, 2, 3):
        play_round(home, number)
    end_rounds(home, 3)
    now, link, _ = served(home)
    assert now.why and link.done == []
    settings = home / "federation.toml"
    settings.write_text(settings.read_text().replace("rounds = 3", "rounds = 5"))
    now, link, said = served(home, [rounds(4, 5), completes(5)])
    assert now.done == 5 and "run" in link.done and said[0].startswith("fed-1: 3 sites, 5 rounds, 3 ")


def test_where_the_superlink_dies_all_ends_and_started_again_it_goes_on(tmp_path: Path) -> None:
    home, made = federation_folder(tmp_path / "f"), list[FakeLink]()
    with pytest.raises(Lost, match=r"the SuperLink ended with code -9: killed"):
        served(home, [rounds(1), dies()], before=made.append)
    assert made[0].done[-2:] == ["run", "stop"] and holder(home / "state" / "serve.lock") is None
    now, _, said = served(home, [rounds(2, 3), completes(3)])
    assert now.done == 3 and said[0].startswith("fed-1: 3 sites, 3 rounds, 1 ")


def test_a_superlink_that_hangs_is_ended(tmp_path: Path) -> None:
    home = federation_folder(tmp_path / "f")

    def hangs(link: FakeLink) -> RunFacts:
        raise SuperLinkError("timed out")

    with pytest.raises(Lost, match="does not answer"):
        served(home, [rounds(1), hangs, hangs, hangs])
    now, _, _ = served(home, [hangs, hangs, rounds(2, 3), hangs, hangs, completes(3)])
    assert now.done == 3, "two in a row are a hiccup"


def test_a_failure_ends_it_with_the_cause(tmp_path: Path) -> None:
    fail = fails("ServerApp failed with exception: out of memory")
    with pytest.raises(Lost, match=r"1 of 3 rounds done: .*out of memory"):
        served(federation_folder(tmp_path / "f"), [rounds(1), fail])


def test_wrong_settings_are_told_as_such(tmp_path: Path) -> None:
    """A ConfigError is exit code 2, after which no unit starts it again: `test_what_ends_for_good`."""
    home = federation_folder(tmp_path / "f")
    with pytest.raises(ConfigError, match=r"^lora\.lora_alpha was 8 and is 16\.$"):
        served(home, [fails("lora.lora_alpha was 8 and is 16.", ended="refused")])
    (home / "policy.toml").write_text("nonsense")
    with pytest.raises(ConfigError, match="policy"):
        served(home)


def test_a_run_that_never_begins_is_explained(tmp_path: Path) -> None:
    home = federation_folder(tmp_path / "f")
    (home / "superlink.log").write_text("certificate verify failed: IP address mismatch\n")

    def pending(link: FakeLink) -> RunFacts:
        time.sleep(0.02)
        return RunFacts(7, "pending")

    with pytest.raises(Lost, match=r"within 0 s: .*certificate verify failed"):
        served(home, [pending] * 100)


def test_asked_to_stop_it_ends_the_run_and_then_all(tmp_path: Path) -> None:
    home = federation_folder(tmp_path / "f")
    link, said, stop = FakeLink(home), list[str](), threading.Event()

    def asked(link: FakeLink) -> None:
        stop.set()

    link.scripts = [[rounds(1), asked]]
    now = Supervisor(link, said.append, stop=stop, pace=FAST).serve()
    assert now.done == 1 and not now.why
    assert link.done[-2:] == ["stop run 7", "stop"]
    assert said[-1].startswith("asked to stop")


def test_keys_that_come_while_it_runs_are_admitted(tmp_path: Path) -> None:
    """And the site is missed until it is online."""
    home = federation_folder(tmp_path / "f")

    def dublin(link: FakeLink) -> None:
        (home / "keys" / "dublin.pub").write_text("key")
        (home / "policy.toml").write_text((home / "policy.toml").read_text() + "dublin = 4\n")

    _, link, said = served(home, [rounds(1), dublin, rounds(), rounds(), rounds(2, 3), completes(3)])
    assert "dublin: its key is admitted" in said
    keys = [line for line in link.done if line.startswith("keys")]
    assert keys == ["keys acme,berlin,cork", "keys acme,berlin,cork,dublin"]
    assert "online: acme, berlin, cork; missing: dublin" in said


def test_two_cannot_serve_one_folder(tmp_path: Path) -> None:
    home = federation_folder(tmp_path / "f")
    with locked(home / "state" / "serve.lock", "serves it"):
        assert holder(home / "state" / "serve.lock") == os.getpid()
        with pytest.raises(ConfigError, match=f"process {os.getpid()} already serves"):
            served(home)
    assert holder(home / "state" / "serve.lock") is None


def test_too_few_answers_are_never_given_up_and_who_comes_and_goes_is_told_once(tmp_path: Path) -> None:
    """More often than failures are given up; nothing waits here, because the rounds themselves do."""
    home = federation_folder(tmp_path / "f")
    seen = [["acme"], ["acme"], ["acme", "cork"], [], list(CLIENTS)]

    def coming(link: FakeLink) -> None:
        link.comes = lambda: setattr(link, "online", seen.pop(0) if len(seen) > 1 else seen[0])

    quorum = fails("ServerApp failed with exception: round 1: 1 of 2", ended="quorum")
    now, link, said = served(
        home, *[[quorum] for _ in range(5)], [rounds(), rounds(1, 2, 3), completes(3)], before=coming
    )
    assert now.done == 3 and link.done.count("run") == 6 and link.done.count("start") == 1
    assert [line for line in said if line.startswith("online")] == [
        "online: acme; missing: berlin, cork", "online: acme, cork; missing: berlin",
        "online: nobody; missing: acme, berlin, cork", "online: acme, berlin, cork (all 3)",
    ]  # fmt: skip
