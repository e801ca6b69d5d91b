"""The work after a federation's last round: the last measurements, trackers, a summary, and adapter folders like those
of `fedlora run`. What it writes holds no path of a machine.

server/adapter/      the last round's model          server/best/      the best round's
server/clients/NAME/ each client's readout, if run.readouts is set
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any

from flwr.serverapp import Grid

from fedlora.adapters.base_names import is_path
from fedlora.adapters.io import AdapterSpec
from fedlora.client import receive
from fedlora.core import files
from fedlora.core.lora import Adapter
from fedlora.core.messages import ClientMemory, as_pruned
from fedlora.core.read_only import ReadOnly
from fedlora.flower.rounds.choosing import sites_test
from fedlora.flower.rounds.events import Fated, read_events
from fedlora.flower.rounds.federation import Opening
from fedlora.flower.rounds.log_lines import measurement_lines
from fedlora.flower.rounds.private_words import public_summary
from fedlora.flower.rounds.recording import Recorder
from fedlora.flower.rounds.site_evaluation import SiteRound
from fedlora.flower.rounds.strategy import FedLoRA
from fedlora.flower.terms.policy import Policy
from fedlora.flower.terms.site_file import Site
from fedlora.runs.base_names import BaseName, base_name
from fedlora.runs.card import model_card
from fedlora.runs.config import RunConfig
from fedlora.runs.exported import global_adapter, write_export
from fedlora.runs.finishing import MOST_CLASSES
from fedlora.runs.folder import plain
from fedlora.runs.manifest import code_facts
from fedlora.runs.private_run import PrivateRun, told
from fedlora.runs.stopping import Line
from fedlora.server.judged import of_run, remarks
from fedlora.server.state import RunState
from fedlora.training.evaluation import Measured
from fedlora.training.metrics import score_name
from fedlora.training.prompting import is_jinja

log = logging.getLogger(__name__)
_FOLDERS = {"last": "adapter", "best": "best"}  # a state that is kept -> its folder


def finish(
    grid: Grid, opening: Opening, strategy: FedLoRA, recorder: Recorder, private: PrivateRun | None
) -> dict[str, Any]:
    """Write adapters, their scores, and the summary. The summary comes last: if it exists, everything does."""
    settings, home, state = opening.settings, opening.home, strategy.flower_state.state
    lines = strategy.lines.finished()
    best = recorder.best(lines)
    chosen = {"last": state}
    if best is not None and best["round"] == state.round:
        chosen["best"] = state
    elif (found := recorder.best_state(best)) is not None:
        chosen["best"] = found
    at_sites = strategy.measure(grid, "test") if sites_test(settings) else SiteRound()
    for note in measurement_lines(at_sites.facts(), f"test set, round {state.round}"):
        log.warning("%s", note)
    judged = of_run(lines) if opening.server.rule is not None else None
    for remark in remarks(judged, strategy.policy.clients) if judged is not None else ():
        log.warning("%s", remark)
    spent = None if private is None else private.spent(state.round)
    results = Results(opening, strategy.policy, _examples(opening), judged, spent)
    tested = _tested(opening, chosen)
    for name, measured in tested.items():
        scores, by = measured.scores, "server"
        if not scores and chosen[name].round == state.round:  # the sites measured this state
            scores, by = {k: v for k, v in at_sites.mean().items() if k != "examples"}, "the sites"
        results.write_model(home.server / _FOLDERS[name], chosen[name], scores, by if scores else "server")
    if settings.run.readouts:
        results.write_readouts(home.server / "clients", state, {n: s.scores for n, s in at_sites.measured.items()})
    recorder.close({k: (one.round, tested[k].scores if k in tested else {}) for k, one in chosen.items()})
    stopped = recorder.stopped(lines)
    if stopped is None and private is not None and strategy.stopped == "budget":
        why = private.releases.why_spent(state.round)
        stopped = {"round": state.round, "of": settings.run.rounds, "best_round": None, "best": None, "why": why}
    summary = _summary(opening, strategy, best, at_sites, tested, judged, stopped)
    if spent is not None:
        summary = public_summary(summary, spent)
    files.write(home.summary, json.dumps(plain(summary), indent=2, sort_keys=True) + "\n")
    return dict(plain(summary))


def _tested(opening: Opening, chosen: Mapping[str, RunState]) -> dict[str, Measured]:
    """The scores of the server's model in each state on the server's test file, if there is one; for a method without a
    model at the server, of no state."""
    server, test = opening.server, opening.at_server.test
    tested: dict[str, Measured] = {}
    for name, one in chosen.items():
        if not server.has_global_model(one.server):
            continue
        if name == "best" and one.round == chosen["last"].round:
            tested[name] = tested["last"]
        else:
            tested[name] = test.measure(server, one) if test is not None else Measured({}, None)
    return tested


def _summary(
    opening: Opening, strategy: FedLoRA, best: Line | None, at_sites: SiteRound, tested: Mapping[str, Measured],
    judged: Mapping[str, Any] | None, stopped: Mapping[str, Any] | None,
) -> dict[str, Any]:  # fmt: skip
    """Any federation's summary; `public_summary` removes what a private one may not release."""
    settings, state, lines = opening.settings, strategy.flower_state.state, strategy.lines.finished()
    key = "site_mean" if opening.choosing.by == "sites" else "metrics"
    scored = [line for line in lines if line.get(key)]
    return {
        "federation": settings.id,
        "method": strategy.server.method.name,
        "rounds": state.round,
        "of": settings.run.rounds,
        "metric": score_name(settings.evaluate.metric),
        "measured_by": opening.choosing.by,
        "validation": {
            "last": scored[-1][key] if scored else {},
            "best": best[key] if best is not None else {},
        },
        "best_round": best["round"] if best is not None else None,
        "stopped_early": stopped,
        "test": {name: tested[name].scores if name in tested else {} for name in _FOLDERS},
        "confusion": _confusion(opening, tested),
        "site_test": {
            "sites": at_sites.facts()["site_metrics"], "mean": at_sites.mean(), "capped": at_sites.capped(),
            "unmeasured": dict(at_sites.unmeasured),
        },
        "sites": taken_part(strategy.policy, lines),
        "refusals": dict(strategy.flower_state.refusals),
        **({"defence": judged} if judged is not None else {}),
        "seconds": sum(line["seconds"] or 0.0 for line in lines),
        "adapter": "last" in tested,
        "versions": code_facts()["versions"],
        "settings": json.loads(settings.travelling()),
        "diagnostics": strategy.server.diagnostics(state.server),
    }  # fmt: skip


def _confusion(opening: Opening, tested: Mapping[str, Measured]) -> dict[str, Any] | None:
    classes = opening.settings.data.labels or []
    found = {name: tested[name].confusion if name in tested else None for name in _FOLDERS}
    return None if found["last"] is None or len(classes) > MOST_CLASSES else {"classes": classes, **found}


def _examples(opening: Opening) -> dict[str, float]:
    """Client -> the number of examples that it last reported for training."""
    trained = (e for e in read_events(opening.home.events) if isinstance(e, Fated) and e.fate == "trained")
    return {event.client: event.examples for event in trained if event.examples is not None}


@dataclass(frozen=True, eq=False)
class Results:
    """Writes adapters of a federation's states.

    policy: the current one. examples: client -> its reported training examples, including clients that left. judged: a
    robust rule's effect in all rounds (`server.judged.of_run`). spent: a private federation's spending, for the card.
    """

    opening: Opening
    policy: Policy
    examples: Mapping[str, float]
    judged: Mapping[str, Any] | None
    spent: Mapping[str, Any] | None

    def write_model(self, place: Path, state: RunState, scores: Mapping[str, float], by: str = "server") -> None:
        """The server's model, as one complete adapter. by: who measured the scores."""
        self._export(place, global_adapter(self.opening.server, state), state.round, scores, by=by)

    def write_readouts(self, place: Path, state: RunState, scores: Mapping[str, Mapping[str, float]]) -> None:
        """Each client's readout in a folder with its name. scores: of clients that measured at their sites."""
        for name in self.policy.clients:
            memory = state.clients.get(name, ClientMemory())
            download = self.opening.server.download(state.server, as_pruned(self.policy.client(name), memory))
            mine = receive(download, None).folded()
            self._export(place / name, mine, state.round, scores.get(name, {}), client=name)

    def _export(
        self,
        place: Path,
        adapter: Adapter,
        round: int,
        scores: Mapping[str, float],
        client: str | None = None,
        by: str = "server",
    ) -> None:
        config, here = self._config(), self.opening.at_server
        base = self._base()
        template = config.data.prompting() if config.model.task == "causal-lm" else None
        card = model_card(
            self._facts(by), config, adapter, round, scores,
            client=client, base=base,
            tokenizer=here.tokenizer is not None, judged=self.judged,
            privacy=None if self.spent is None else told(self.spent),
        )  # fmt: skip
        write_export(
            place, adapter, self._named(base), here.tokenizer, self.opening.settings.data.labels or (), card,
            chat_template=template if template is not None and is_jinja(template) else None,
        )  # fmt: skip

    def _config(self) -> RunConfig:
        model, method = self._base().name or "model", self.opening.settings.method.name
        config = self.opening.settings.for_site(Site(name="site", data="data", model=model, method=method))
        return config.model_copy(update={"defence": self.opening.settings.defence})

    def _base(self) -> BaseName:
        """The base model's name: its public name, or otherwise its directory's name, and a digest."""
        model = self.opening.settings.at_server.model
        if model is not None and (found := base_name(model, self.opening.at_server.digests)).name is not None:
            return found
        name = model or self.opening.spec.base_model
        if model is None and name is not None and not is_path(name):
            return base_name(name, {})
        short = PurePath(name).name if name else "base model"
        agreed = self.opening.known.base
        digest = f" Its weights have the digest `{agreed}`." if agreed else ""
        files = "".join(f"\n* `{file}`, SHA-256 `{found}`" for file, found in self.opening.at_server.digests.items())
        return BaseName(
            None,
            f"a local directory, `{short}`",
            f"Each site has its own copy of it; at the server it is called `{short}`, and adapter_config.json names it "
            f"so: put the path of your copy into its `base_model_name_or_path`.{digest}"
            f"{' These are its files:' if files else ''}\n{files}",
        )

    def _named(self, base: BaseName) -> AdapterSpec:
        """The start's spec, without any path of a machine."""
        given = self.opening.settings.at_server.model or self.opening.spec.base_model
        name = base.name or (PurePath(given).name if given else None)
        spec = self.opening.spec
        return replace(spec, config=ReadOnly({**spec.config, "base_model_name_or_path": name}))

    def _facts(self, target: str) -> dict[str, Any]:
        """The card's facts, in the form of a run's manifest."""
        settings, clients = self.opening.settings, self.policy.clients
        left = {name: "left" for name in self.examples if name not in clients}  # their training remains in the model
        shown = left | {
            n: r if isinstance(r, int) else "/".join(map(str, dict.fromkeys(r.values()))) for n, r in clients.items()
        }
        return {
            **code_facts(),
            "config_digest": hashlib.sha256(settings.travelling().encode()).hexdigest()[:16],
            "model": {"sha256": self.opening.at_server.digests},
            "data": {
                "train": {name: {"examples": self.examples.get(name)} for name in shown},
                "labels": settings.data.labels or [],
                "label_counts": None,
            },
            "clients": shown,
            "method": repr(self.opening.server.method),
            "evaluation_target": target,
            "answer_ends": list(self.opening.at_server.ends),
            "changes": self.opening.history.told(),
        }


def taken_part(policy: Policy, lines: Sequence[Line]) -> dict[str, dict[str, Any]]:
    """Site -> its rank, the number of rounds in which it counted, and of each other fate; including sites that left."""
    names = dict.fromkeys([*policy.clients, *(n for line in lines for n in {**line["weights"], **line["fates"]})])
    fates = {name: Counter(line["fates"][name]["fate"] for line in lines if name in line["fates"]) for name in names}
    return {
        name: {
            "rank": policy.clients.get(name),
            "rounds": sum(name in line["weights"] for line in lines),
            **{fate.replace(" ", "_"): count for fate, count in fates[name].items() if fate != "trained"},
        }
        for name in names
    }
