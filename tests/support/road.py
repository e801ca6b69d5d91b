"""Three hospitals walk the page docs/how-to/federation.md: machines furnished, its blocks played where they belong.

with walking(tmp_path) as road:
    road.walk("1. At the server", "2. At each site", ...)
    road.until_next_rounds(2)
"""

from __future__ import annotations

import contextlib
import csv
import random
import re
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import BertConfig, BertModel

from fedlora.flower.server.journal import read_rounds
from support.containers import PLACE
from support.machines import Done, Machine, Network, until
from support.page import PAGE, Block, under
from support.tiny_models import VOCABULARY
from support.training_data import save_model

SITES = ("acme", "berlin", "cork")
START = ("1. At the server", "2. At each site", "3. At the server: admit the sites")
LABELS = ("no", "yes")
ROUNDS = 2  # of the page's six
SITE, SERVER, PROXY = "fedlora-site", "fedlora-server", "fedlora-proxy"  # the units


@contextlib.contextmanager
def stopped(machine: Machine, unit: str) -> Iterator[None]:
    """The unit, while something is changed; started again after it."""
    assert machine.run("systemctl", "stop", unit).code == 0
    try:
        yield
    finally:
        assert machine.run("systemctl", "start", unit).code == 0


def write_notes(path: Path, seed: int) -> None:
    """A hospital's file: 40 notes of words w0 to w19, whose class is whether the first word's number is odd."""
    draw = random.Random(seed)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label"])
        for k in range(40):
            first = 2 * draw.randrange(5) + k % 2
            words = " ".join([f"w{first}", *(f"w{draw.randrange(10, 20)}" for _ in range(5))])
            writer.writerow([words, LABELS[k % 2]])


def write_model(folder: Path) -> Path:
    """A base model as one downloads it: BERT without a head, 2 layers, texts of up to 128 tokens."""
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = BertConfig(vocab_size=VOCABULARY, num_attention_heads=2, **sizes, max_position_embeddings=128)
    return save_model(folder, BertModel(config), classifies=True)


def own(machine: Machine) -> Path:
    """The home of somebody's own account there: the page's commands are typed in it."""
    folder = machine.folder / "own"
    folder.mkdir(exist_ok=True)
    return folder


@dataclass
class Road:
    """The machines on their way. seen: (machine, block, what came of it), in their order."""

    network: Network
    seen: list[tuple[str, Block, Done]] = field(default_factory=list)

    @property
    def server(self) -> Machine:
        return self.network["server"]

    @property
    def fed(self) -> Path:
        return self.server.folder / "fed"

    @property
    def sites(self) -> list[Machine]:
        return [self.network[name] for name in SITES]

    def walk(self, *headings: str) -> None:
        """Play the page's blocks under these headings, each at the machine that it is for. All must succeed."""
        for block in under(PAGE.read_text(encoding="utf-8"), headings):
            if block.language == "toml":
                text = block.text.replace("rounds = 6", f"rounds = {ROUNDS}")
                assert text != block.text
                (own(self.network["computer"]) / block.whom).write_text(text)
            elif block.whom in ("computer", "server"):
                self.play(self.network[block.whom], block)
            elif block.whom == "site":
                with ThreadPoolExecutor() as at_once:  # three people at three machines
                    for coming in [at_once.submit(self.play, site, block) for site in self.sites]:
                        coming.result()

    def play(self, machine: Machine, block: Block, seconds: float = 180) -> Done:
        text = block.text.replace("~fedlora", '"$HOME"').replace("--name NAME", f"--name {machine.name}")
        text = text.replace("examples/deploy", str(PLACE))
        if block.language == "python":
            done = machine.run("python", "-c", text, seconds=seconds)
        else:
            done = machine.shell(f"cd own\n{text}", seconds=seconds)
        self.seen.append((machine.name, block, done))
        assert done.code == 0, f"{machine.name}, {block.heading}:\n{text}\ncode {done.code}, said:\n{done.out}"
        return done

    def rounds(self) -> list[dict[str, Any]]:
        """The lines of rounds.jsonl, each with its scores."""
        return read_rounds(self.fed / "server" / "rounds.jsonl")

    def go_on(self, rounds: int, *, deadline: float) -> None:
        """More rounds, as docs/how-to/federation.md has it, each of which waits no longer than `deadline` seconds."""
        self._set(self.fed / "federation.toml", r"rounds = \d+", f"rounds = {rounds}")
        self._set(self.fed / "policy.toml", r"deadline = \S+", f"deadline = {deadline:.1f}")
        assert self.server.shell("sudo systemctl restart fedlora-server").code == 0
        self.until_next_rounds(1, 400)

    def _set(self, path: Path, line: str, other: str) -> None:
        text, count = re.subn(f"(?m)^{line}", other, path.read_text())
        assert count == 1, f"{path}: {count} lines of {line!r}"
        path.write_text(text)

    def until_next_rounds(self, count: int = 1, seconds: float = 120, *, of: tuple[str, ...] = SITES) -> None:
        """Until so many more rounds are played in which all of these sites have trained."""
        begun = self.rounds()[-1]["round"] if self.rounds() else 0

        def played() -> bool:
            return sum(line["round"] > begun and set(of) <= set(line["weights"]) for line in self.rounds()) >= count

        until(played, seconds, f"{count} more rounds of {', '.join(of)}", *self.network)

    def wait_said(self, machine: Machine, unit: str, words: str, since: int = 0, seconds: float = 90) -> str:
        """The last line that the unit has said with these words (a regular expression), after `since` characters."""
        pattern = re.compile(f"[^\n]*(?:{words})[^\n]*", re.I)
        until(lambda: pattern.search(machine.said(unit)[since:]), seconds, f"{machine.name}: {words!r}", *self.network)
        return [found[0] for found in pattern.finditer(machine.said(unit)[since:])][-1].strip()


@contextlib.contextmanager
def walking(root: Path, *, others: tuple[str, ...] = ()) -> Iterator[Road]:
    """The machines: server, three sites with their data, a computer with the base model, `others` with nothing."""
    model = write_model(root / "model")
    with Network(root, ["server", *SITES, "computer", *others]) as network:
        shutil.copytree(model, own(network["computer"]) / "model")
        for name in ("server", *SITES):
            own(network[name])
            (network[name].folder / "env").symlink_to(sys.prefix)  # where the page's commands install fedlora
        for k, name in enumerate(SITES):
            write_notes(own(network[name]) / "notes.csv", k)
        yield Road(network)
