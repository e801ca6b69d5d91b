"""`serve`'s decisions, on a simulated SuperLink: what it waits for, what ends it and how, and that it continues when a
stand-in for its unit starts it again. Kind: *unit*."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("flwr")


from fedlora import doing
from fedlora.errors import AdapterFormatError, BudgetSpent, ConfigError, LedgerError
from fedlora.flower import apps
from fedlora.flower.processes import holder, serving
from fedlora.flower.server.journal import read_now
from fedlora.flower.server.serve import Lost, Pace, Supervisor
from fedlora.flower.server.status import Standing
from fedlora.flower.server.superlink import RunFacts, SuperLinkError
from fedlora.flower.server.superlink_process import SAYS
from fedlora.flower.terms.facts import Disagreement
from support.fake_link import (
    CLIENTS,
    FakeLink,
    Turn,
    completes,
    dies,
    end_rounds,
    fails,
    federation_folder,
    play_round,
    rounds,
)


def wait(link: FakeLink) -> None:
    """A look at which nothing has happened."""


FAST = Pace(log=0.0, look=0.0, remind=100.0, pending=0.2, thin=0.0, unanswered=3)


def served(
    home: Path,
    *scripts: list[Turn],
    pace: Pace = FAST,
    before: Callable[[FakeLink], None] = lambda link: None,
    starts: int = 1,
) -> tuple[Standing, FakeLink, list[str]]:
    """`serve` on these runs, to its end: the standing, the link, and the output. starts: how often its unit starts it
    again after a failure (code 1); the last failure is raised."""
    link, said = FakeLink(home, *scripts), list[str]()
    before(link)
    for left in reversed(range(starts)):
        try:
            now = Supervisor(link, said.append, pace=pace).serve()
            assert not left, "it was to fail more often"
            return now, link, said
        except RuntimeError as error:
            said.append(str(error))
            if not left:
                raise
    raise AssertionError


def test_all_rounds_a_line_each_and_everything_taken_down(tmp_path: Path) -> None:
    home = federation_folder(tmp_path / "f")
    now, link, said = served(home, [rounds(1, cork="late"), rounds(2, 3), completes(3)])
    assert (now.done, now.why) == (3, "complete")
    assert link.done == ["start", "keys acme,berlin,cork", "run", "stop"]
    assert said[0].startswith("fed-1: 3 sites, 3 rounds, 0 ")
    assert [line for line in said if line.startswith("round")] == [f"round {k} is played" for k in (1, 2, 3)]
    assert holder(home / "state" / "serve.lock") is None


def test_what_the_superlink_refused_is_said(tmp_path: Path) -> None:
    """Its own lines are not repeated, and of those before this run nothing is."""
    home = federation_folder(tmp_path / "f")
    (home / "superlink.log").write_text(f"{SAYS}of yesterday\n")

    def refuses(link: FakeLink) -> None:
        with link.log.open("a") as file:
            file.write(f"INFO: 200 OK\n{SAYS}cork answers as acme\n")

    _, _, said = served(home, [refuses, rounds(1, 2, 3), completes(3)])
    assert "cork answers as acme" in said
    assert not [line for line in said if "200 OK" in line or "yesterday" in line]


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
    told = list[str]()
    now, link, said = served(home, [lambda link: told.append(doing.now()), rounds(4, 5), completes(5)])
    assert told == ["rounds: 3 of 5 done"]  # before, "0 of 5" until the first new round
    assert now.done == 5 and "run" in link.done and said[0].startswith("fed-1: 3 sites, 5 rounds, 3 ")


def test_an_early_stop_is_an_end(tmp_path: Path) -> None:
    home = federation_folder(tmp_path / "f")
    now, _, _ = served(home, [rounds(1, 2), completes(2, "stopped early")])
    assert (now.done, now.why) == (2, "stopped early")
    settings = home / "federation.toml"
    settings.write_text(
        settings.read_text() + "[train]\nlearning_rate = 0.5\n"
    )  # another patience, say: it looks again
    assert served(home, [rounds(3), completes(3)])[0].done == 3


def test_where_the_superlink_dies_all_ends_and_started_again_it_goes_on(tmp_path: Path) -> None:
    home = federation_folder(tmp_path / "f")
    now, link, said = served(home, [rounds(1), dies()], [dies(1)], [rounds(2, 3), completes(3)], starts=3)
    assert now.done == 3
    assert link.done.count("start") == link.done.count("stop") == link.done.count("run") == 3
    assert any("the SuperLink ended with code -9: " in line for line in said)


def test_a_run_that_was_left_is_stopped_first(tmp_path: Path) -> None:
    home = federation_folder(tmp_path / "f")

    def left(link: FakeLink) -> None:
        link.listed = [RunFacts(3, "running"), RunFacts(2, "finished:failed"), RunFacts(1, "pending")]

    _, link, _ = served(home, [rounds(1, 2, 3), completes(3)], before=left)
    assert link.done[:4] == ["start", "stop run 3", "stop run 1", "keys acme,berlin,cork"]


def test_a_superlink_that_hangs_is_ended(tmp_path: Path) -> None:
    home = federation_folder(tmp_path / "f")

    def hangs(link: FakeLink) -> RunFacts:
        raise SuperLinkError("timed out")

    now, link, said = served(home, [rounds(1), hangs, hangs, hangs], [rounds(2, 3), completes(3)], starts=2)
    assert now.done == 3 and link.done.count("start") == 2
    assert any("does not answer" in line for line in said)
    _, link, _ = served(federation_folder(tmp_path / "g"), [hangs, hangs, rounds(1, 2, 3), hangs, hangs, completes(3)])
    assert link.done.count("start") == 1  # two in a row are a hiccup


def test_a_failure_ends_it_with_the_cause_and_nothing_is_left(tmp_path: Path) -> None:
    """The ServerApp's process killed is one of them: Flower says so after a minute."""
    home = federation_folder(tmp_path / "f")
    fail = fails("ServerApp failed with exception: out of memory")
    with pytest.raises(Lost, match=r"1 of 3 rounds done: .*out of memory"):
        served(home, [rounds(1), fail])
    assert holder(home / "state" / "serve.lock") is None
    now, link, said = served(home, [fails("No heartbeat")], [rounds(2, 3), completes(3)], starts=2)
    assert now.why and link.done[-1] == "stop" and any("No heartbeat" in line for line in said)
    with pytest.raises(SuperLinkError, match="port 1 is in use"):
        served(
            federation_folder(tmp_path / "g"),
            before=lambda link: link.fails.append(SuperLinkError("port 1 is in use")),
        )


def test_wrong_settings_are_told_as_such(tmp_path: Path) -> None:
    """A ConfigError is exit code 2, after which no unit starts it again: `test_what_ends_for_good`."""
    home = federation_folder(tmp_path / "f")
    with pytest.raises(ConfigError, match=r"^lora\.lora_alpha was 8 and is 16\.$"):
        served(home, [fails("lora.lora_alpha was 8 and is 16.", ended="refused")])
    (home / "policy.toml").write_text("nonsense")
    with pytest.raises(ConfigError, match="policy"):
        served(home)


_FINAL = [ConfigError, AdapterFormatError, Disagreement, BudgetSpent, LedgerError]


@pytest.mark.parametrize("error", [*_FINAL, ValueError, MemoryError])
def test_the_app_says_what_would_fail_the_same_way_again(
    error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the error's type, in now.json; and why stands in its log."""

    def play(grid: object, folder: Path) -> None:
        raise error("it is so")

    monkeypatch.setattr("fedlora.flower.server.federation.play", play)
    wrong = error in _FINAL
    context = SimpleNamespace(run_config={"folder": str(tmp_path)})
    with pytest.raises(error, match=r"^it is so$"):
        apps.main(SimpleNamespace(), context)  # type: ignore[arg-type]
    told = read_now(tmp_path / "server" / "now.json")
    assert (told["ended"] == {"kind": "refused", "why": "it is so"}) if wrong else not told
    log = tmp_path / "state" / "logs" / "serverapp.log"
    assert "it is so" in log.read_text() and "Traceback" in log.read_text()


def test_too_few_answers_are_waited_for_and_never_given_up(tmp_path: Path) -> None:
    """More often than failures are given up; the next run begins once enough are online, and not before."""
    home = federation_folder(tmp_path / "f")
    looks = 0

    def thin(link: FakeLink) -> None:
        def comes() -> None:
            nonlocal looks
            looks += 1
            link.online = ["acme"] if looks < 20 else ["acme", "cork"]

        link.online, link.comes = [], comes

    quorum = fails("ServerApp failed with exception: round 1: 1 of 2", ended="quorum")
    now, link, said = served(home, *[[quorum] for _ in range(5)], [rounds(1, 2, 3), completes(3)], before=thin)
    assert now.done == 3 and looks >= 20 and link.done.count("run") == 6
    assert said.count("online: acme; missing: berlin, cork (a round needs 2 of 3)") == 1
    assert not any(line.startswith("waiting") for line in said)  # it was told when it changed, and that is not long ago
    assert "online: acme, cork; missing: berlin (a round needs 2 of 3)" in said


def test_a_round_is_not_begun_for_fewer_than_its_rule_needs(tmp_path: Path) -> None:
    """The quorum is 2 of 3, and Krum without byzantine clients needs all three (2 f + 3). Before, two trained in vain,
    for ever."""
    home = federation_folder(tmp_path / "f")
    with (home / "federation.toml").open("a") as file:
        file.write('[robust]\nrule = "krum"\nbyzantine = 0\n')
    looks, (away, *there) = 0, CLIENTS

    def thin(link: FakeLink) -> None:
        def comes() -> None:
            nonlocal looks
            looks += 1
            link.online = list(CLIENTS) if looks > 20 else there

        link.online, link.comes = [], comes

    _, _, said = served(home, [rounds(1, 2, 3), completes(3)], before=thin)
    assert looks > 20 and any(f"missing: {away} (a round needs 3 of 3)" in line for line in said)


def test_who_comes_and_goes_is_told_once(tmp_path: Path) -> None:
    home = federation_folder(tmp_path / "f")
    seen = [["acme"], ["acme", "cork"], ["acme", "cork"], [], list(CLIENTS), list(CLIENTS)]

    def coming(link: FakeLink) -> None:
        link.comes = lambda: setattr(link, "online", seen.pop(0) if len(seen) > 1 else seen[0])

    _, _, said = served(home, [wait, wait, wait, wait, rounds(1, 2, 3), completes(3)], before=coming)
    assert [line for line in said if line.startswith("online")] == [
        "online: acme; missing: berlin, cork (a round needs 2 of 3)",
        "online: acme, cork; missing: berlin (a round needs 2 of 3)",
        "online: nobody; missing: acme, berlin, cork (a round needs 2 of 3)",
        "online: acme, berlin, cork (all 3)",
    ]


def test_a_run_that_never_begins_is_explained(tmp_path: Path) -> None:
    home = federation_folder(tmp_path / "f")
    (home / "superlink.log").write_text("certificate verify failed: IP address mismatch\n")

    def pending(link: FakeLink) -> RunFacts:
        time.sleep(0.02)
        return RunFacts(7, "pending")

    with pytest.raises(Lost, match=r"within 0 s: .*certificate verify failed"):
        served(home, [pending] * 100)


def test_a_run_that_was_seen_running_is_not_one_that_never_began(tmp_path: Path) -> None:
    """One look without an answer, long after the run began: nothing is stopped, and nothing is said of it."""
    home = federation_folder(tmp_path / "f")

    def later(link: FakeLink) -> None:
        time.sleep(0.3)  # more than `pending`

    def hiccup(link: FakeLink) -> RunFacts:
        raise SuperLinkError("500")

    now, link, said = served(home, [wait, rounds(1), later, hiccup, rounds(2), hiccup, hiccup, rounds(3), completes(3)])
    assert now.done == 3 and link.done == ["start", "keys acme,berlin,cork", "run", "stop"]
    assert not any("did not begin" in line for line in said)

    def pending(link: FakeLink) -> RunFacts:
        return RunFacts(7, "pending")

    late = [pending, later, hiccup, rounds(1, 2, 3), completes(3)]  # and one that nobody saw begin may have
    now, link, said = served(federation_folder(tmp_path / "g"), late)
    assert now.done == 3 and link.done.count("run") == 1


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


@pytest.mark.parametrize("when", ["start", "nodes", "thin"])
def test_asked_to_stop_while_it_waits(tmp_path: Path, when: str) -> None:
    home = federation_folder(tmp_path / "f")
    link, stop = FakeLink(home, [fails("no", ended="quorum")]), threading.Event()
    slow = Pace(log=0.0, look=60.0 if when == "nodes" else 0.0, thin=60.0)
    if when == "start":
        link.start = lambda *, give_up: stop.set() or None  # type: ignore[method-assign, func-returns-value]
    if when == "nodes":
        link.online = []
    began = time.monotonic()
    threading.Timer(0.3, stop.set).start()
    now = Supervisor(link, lambda line: None, stop=stop, pace=slow).serve()
    assert not now.why and time.monotonic() - began < 5 and link.done[-1] == "stop"


def test_two_cannot_serve_one_folder(tmp_path: Path) -> None:
    """The other one's process is named; however it ends, the folder is free again."""
    home = federation_folder(tmp_path / "f")
    words = f"import sys; sys.path[:0] = {sys.path!r}\nfrom pathlib import Path\nimport time\n"
    words += "from fedlora.flower.processes import serving\n"
    words += f"with serving(Path({str(home / 'state' / 'serve.lock')!r})):\n"
    words += "    print('held', flush=True); time.sleep(60)"
    other = subprocess.Popen([sys.executable, "-c", words], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        assert holder(home / "state" / "serve.lock") == other.pid
        with pytest.raises(ConfigError, match=f"process {other.pid} already serves"):
            served(home)
    finally:
        other.kill()
        other.communicate()
    assert holder(home / "state" / "serve.lock") is None
    with serving(home / "state" / "serve.lock"), pytest.raises(ConfigError, match="already serves"):
        served(home)


def test_keys_that_come_while_it_runs_are_admitted(tmp_path: Path) -> None:
    home = federation_folder(tmp_path / "f")

    def dublin(link: FakeLink) -> None:
        (home / "keys" / "dublin.pub").write_text("key")

    def erfurt(link: FakeLink) -> None:
        (home / "keys" / "erfurt.pub").write_text("key")

    _, link, said = served(home, [rounds(1), dublin, erfurt, wait, wait, rounds(2, 3), completes(3)])
    assert [line for line in said if "admitted" in line] == [f"{n}: its key is admitted" for n in ("dublin", "erfurt")]
    assert [line for line in link.done if line.startswith("keys")] == [
        "keys acme,berlin,cork", "keys acme,berlin,cork,dublin", "keys acme,berlin,cork,dublin,erfurt",
    ]  # fmt: skip


def test_a_file_among_the_keys_that_is_none_stops_nothing_while_it_waits_either(tmp_path: Path) -> None:
    """Copied there while the server waits for sites. Before, `serve` ended with code 2 then, and only then."""
    home, seen = federation_folder(tmp_path / "f"), [[], [], list(CLIENTS)]

    def copied(link: FakeLink) -> None:
        keep = link.keep_keys

        def keys(found: Mapping[str, Path]) -> list[str]:
            if len(seen) < 3:  # a look at the nodes was made since the start
                raise ConfigError("x.pub is not a public key")
            return keep(found)

        link.keep_keys = keys  # type: ignore[method-assign]
        link.comes = lambda: setattr(link, "online", seen.pop(0) if len(seen) > 1 else seen[0])

    now, _, said = served(home, [rounds(1, 2, 3), completes(3)], before=copied)
    assert now.why and said.count("x.pub is not a public key") == 1


def test_a_policy_that_is_broken_meanwhile_stops_nothing(tmp_path: Path) -> None:
    home = federation_folder(tmp_path / "f")
    good = (home / "policy.toml").read_text()

    def broken(link: FakeLink) -> None:
        (home / "policy.toml").write_text("[clients\n")

    def mended(link: FakeLink) -> None:
        (home / "policy.toml").write_text(good)

    now, _, said = served(home, [rounds(1), broken, rounds(2), mended, rounds(3), completes(3)])
    assert now.why and sum("until this run" in line for line in said) == 1
