"""What a federation tells of its rounds: FED/server/rounds.jsonl, now.json, and lines for people.

rounds.jsonl is appended, never rewritten and never cut. A round has one line, from its checkpoint, and a second one if
it is measured:

    {"round": 3, "loss": 0.41, "losses": {"acme": 0.41}, "fates": {"acme": {"fate": "trained", "why": ""}, ...}, ...}
    {"round": 3, "scores": {"site_mean": {"accuracy": 0.8}, ...}}

`read_rounds` puts them together. What a kill left of a line is skipped. After a fall-back to an older checkpoint a
round is played, and told, again: its later line holds, and takes back all rounds after it. now.json says who is asked.
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedlora.core import files
from fedlora.core.text import shown
from fedlora.errors import CheckpointError, QuorumNotMet
from fedlora.given_files import RECORDS, parse_json, read_given
from fedlora.privacy.accounting import epsilon_up
from fedlora.runs.folder import plain
from fedlora.server.judged import in_words

log = logging.getLogger(__name__)
_QUIET = ("trained", "offline", "not drawn")  # fates that the round's line tells well enough


class Journal:
    """A federation's two files. folder: of both; None: only in memory.

    Raises:
        CheckpointError: the disk refuses.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder, self._played, self._scores = folder, dict[int, dict[str, Any]](), dict[int, dict[str, Any]]()
        for line in _whole_lines(folder / "rounds.jsonl") if folder is not None else ():
            self._take(line)
        self._now: dict[str, Any] = {"round": 0, "doing": "", "asked": [], "answered": []}

    def lines(self, upto: int | None = None) -> list[dict[str, Any]]:
        """The lines of the rounds until `upto`, in order, each with its scores as keys."""
        rounds = sorted(self._played.items())
        return [{"metrics": {}, **line, **self._scores.get(n, {})} for n, line in rounds if upto is None or n <= upto]

    def measured(self, round: int) -> bool:
        """Whether a round's scores are told."""
        return round in self._scores

    def played(self, line: str) -> None:
        """Tell a round's line, as it stands in the checkpoint, in rounds.jsonl and in the log; after a kill, only if it
        is not told yet."""
        found = json.loads(line)
        if self._played.get(found["round"]) != found:
            self._append(found)
            for text in beside(found):
                log.warning("%s", text)
            log.info("%s", round_line(found))

    def scored(self, round: int, scores: Mapping[str, Any]) -> None:
        """Tell a round's scores."""
        self._append({"round": round, "scores": plain(dict(scores))})

    def asked(self, round: int, doing: str, clients: Collection[str]) -> None:
        """now.json: these clients are asked to "train" or to "measure"."""
        self._tell(round=round, doing=doing, asked=list(clients), answered=[], ended=None, since=_time())

    def answered(self, client: str) -> None:
        """now.json: an asked client has its fate."""
        if client in self._now["asked"]:
            self._tell(answered=[*self._now["answered"], client])

    def ended(self, kind: str, why: str) -> None:
        """now.json: no more rounds in this process. kind: "complete", "stopped", "quorum", "refused" (it would fail
        again), "failed" or "interrupted"."""
        self._tell(ended={"kind": kind, "why": shown(why, 4000)}, since=_time())

    @contextmanager
    def telling_the_end(self, stopped: Callable[[], str | None]) -> Iterator[None]:
        """now.json: why the rounds in this block ended. stopped: why they stopped early, if they did."""
        kind, why = "interrupted", ""
        try:
            yield
            kind, why = "complete" if stopped() is None else "stopped", stopped() or ""
        except QuorumNotMet as error:
            kind, why = "quorum", str(error)
            log.warning("%s", shown(why, 4000))
            raise
        except Exception as error:
            kind, why = "failed", f"{type(error).__name__}: {error}"
            raise
        finally:
            self.ended(kind, why)

    def _tell(self, **news: Any) -> None:
        self._now |= news
        if self._folder is not None:
            try:
                files.write(self._folder / "now.json", json.dumps(self._now) + "\n")
            except OSError as error:  # losing a report is better than losing a round
                log.warning("now.json could not be written: %s", error)

    def _take(self, line: Mapping[str, Any]) -> None:
        number = line["round"]
        if "scores" in line:
            self._scores[number] = dict(line["scores"])
            return
        for table in (self._played, self._scores):  # a round that is played again takes back all after it
            for later in [n for n in table if n >= number]:
                del table[later]
        self._played[number] = dict(line)

    def _append(self, line: Mapping[str, Any]) -> None:
        if self._folder is not None:
            path = self._folder / "rounds.jsonl"
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                with path.open("ab+") as file:
                    size = file.seek(0, os.SEEK_END)
                    torn = size > 0 and os.pread(file.fileno(), 1, size - 1) != b"\n"
                    file.write(b"\n" * torn + json.dumps(line, allow_nan=False).encode() + b"\n")
                    file.flush()
                    os.fsync(file.fileno())
            except OSError as error:
                raise CheckpointError(
                    f"{path}: {error.strerror}. Free some space and resume; no round is lost."
                ) from error
        self._take(line)


def read_rounds(path: Path) -> list[dict[str, Any]]:
    """The lines of a federation's rounds from rounds.jsonl, in order, each with its scores; none without a file."""
    return Journal(path.parent).lines()


def rounds_done(path: Path) -> int:
    """The number of rounds that rounds.jsonl tells of."""
    return max((line["round"] for line in read_rounds(path)), default=0)


def read_now(path: Path) -> dict[str, Any]:
    """now.json; {} if there is none."""
    try:
        found = parse_json(read_given(path, RECORDS))
    except (FileNotFoundError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _whole_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Those that are whole."""
    try:
        text = read_given(path, RECORDS).decode(errors="replace")
    except FileNotFoundError:
        return
    for line in text.split("\n"):
        try:
            found = parse_json(line, nan_as_none=True)
        except ValueError:
            continue
        number = found.get("round") if isinstance(found, dict) else None
        ours = isinstance(found, dict) and isinstance(found.get("scores", found.get("fates")), dict)
        if ours and isinstance(number, int) and not isinstance(number, bool) and number >= 1:
            yield found


def _time() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


# ---------------------------------------------------------------------------------------------------------- for people


def round_line(line: Mapping[str, Any]) -> str:
    """A round in one line: everyone by name, with its loss if it trained, otherwise its fate. Of a private one also the
    epsilon of the rounds until then, and of all planned ones."""
    loss, seconds, privacy = line.get("loss"), line.get("seconds"), line.get("privacy")
    head = f"round {line['round']}"
    if privacy is not None:
        so_far, planned = (math.inf if privacy[k] is None else privacy[k] for k in ("epsilon", "epsilon_planned"))
        head += f"  epsilon {epsilon_up(so_far)} of {epsilon_up(planned)}"
    head += f"  loss {_number(loss, 3)}" if loss is not None else "  no loss"
    head += f"  {seconds:.0f} s" if isinstance(seconds, int | float) else ""
    losses = line.get("losses") or {}
    for name, one in sorted((line.get("fates") or {}).items()):
        trained = one["fate"] == "trained" and losses.get(name) is not None
        head += f"  {shown(name)} {_number(losses[name], 2) if trained else one['fate']}"
    return head


def beside(line: Mapping[str, Any]) -> list[str]:
    """What people should know of a round beside its line: who lost it and why, and what a robust rule did."""
    lost = [(name, one) for name, one in line["fates"].items() if one["fate"] not in _QUIET]
    lines = [f"round {line['round']}: {shown(name)}: {one['fate']}: {one['why']}" for name, one in lost]
    rule = in_words(line["robust"]) if line.get("robust") else ""
    return lines + ([f"round {line['round']}: {rule}"] if rule else [])


def scores_line(round: int, scores: Mapping[str, Any]) -> str:
    """A round's scores, of the server or otherwise the sites' mean; "" if there are none."""
    for key, where in (("metrics", ""), ("site_mean", " at the sites"), ("clients", " at the clients")):
        numbers = {name: value for name, value in (scores.get(key) or {}).items() if name != "examples"}
        if numbers:
            text = ", ".join(
                f"{shown(name)} {_number(value, 3)}" for name, value in numbers.items() if value is not None
            )
            return f"round {round}: {text}{where}"
    return ""


def log_to_stdout() -> None:
    """Print fedlora's log if nobody else does, because Flower gives a ServerApp a handler only for its own logger."""
    package = logging.getLogger("fedlora")
    if package.hasHandlers():
        return
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(message)s"))
    package.addHandler(handler)
    if package.getEffectiveLevel() > logging.INFO:
        package.setLevel(logging.INFO)


def _number(value: float, digits: int) -> str:
    """The number in a few columns, whatever its size."""
    return f"{value:.{digits}f}" if abs(value) < 10_000 else f"{value:.3g}"
