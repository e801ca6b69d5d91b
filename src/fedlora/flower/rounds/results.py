"""A federation's results at its server: adapter folders like those of `fedlora run`, and a summary. They hold no path.

server/adapter/      the last round's model          server/best/      the best round's
server/clients/NAME/ each client's readout, if run.readouts is set
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any

from fedlora.adapters.base_names import is_path
from fedlora.adapters.io import AdapterSpec
from fedlora.client import receive
from fedlora.core.lora import Adapter
from fedlora.core.messages import ClientMemory, as_pruned
from fedlora.core.read_only import ReadOnly
from fedlora.flower.rounds.federation import Begun
from fedlora.flower.terms.policy import Policy
from fedlora.flower.terms.site_file import Site
from fedlora.runs.base_names import BaseName, base_name
from fedlora.runs.card import model_card
from fedlora.runs.config import RunConfig
from fedlora.runs.exported import global_adapter, write_export
from fedlora.runs.manifest import code_facts
from fedlora.runs.private_run import told
from fedlora.server.state import RunState
from fedlora.training.prompting import is_jinja

Line = Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Results:
    """Writes adapters of a federation's states.

    policy: the current one. examples: client -> its reported training examples, including clients that left. judged: a
    robust rule's effect in all rounds (`server.judged.of_run`). spent: a private federation's spending, for the card.
    """

    begun: Begun
    policy: Policy
    examples: Mapping[str, float]
    judged: Mapping[str, Any] | None
    spent: Mapping[str, Any] | None

    def write_model(self, place: Path, state: RunState, scores: Mapping[str, float], by: str = "server") -> None:
        """The server's model, as one complete adapter. by: who measured the scores."""
        self._export(place, global_adapter(self.begun.server, state), state.round, scores, by=by)

    def write_readouts(self, place: Path, state: RunState, scores: Mapping[str, Mapping[str, float]]) -> None:
        """Each client's readout in a folder with its name. scores: of clients that measured at their sites."""
        for name in self.policy.clients:
            memory = state.clients.get(name, ClientMemory())
            download = self.begun.server.download(state.server, as_pruned(self.policy.client(name), memory))
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
        config, here = self._config(), self.begun.at_server
        base = self._base()
        template = config.data.prompting() if config.model.task == "causal-lm" else None
        card = model_card(
            self._facts(by), config, adapter, round, scores,
            client=client, base=base,
            tokenizer=here.tokenizer is not None, judged=self.judged,
            privacy=None if self.spent is None else told(self.spent),
        )  # fmt: skip
        write_export(
            place, adapter, self._named(base), here.tokenizer, self.begun.settings.data.labels or (), card,
            chat_template=template if template is not None and is_jinja(template) else None,
        )  # fmt: skip

    def _config(self) -> RunConfig:
        model, method = self._base().name or "model", self.begun.settings.method.name
        config = self.begun.settings.for_site(Site(name="site", data="data", model=model, method=method))
        return config.model_copy(update={"defence": self.begun.settings.defence})

    def _base(self) -> BaseName:
        """The base model's name: its public name, or otherwise its directory's name, and a digest."""
        model = self.begun.settings.at_server.model
        if model is not None and (found := base_name(model, self.begun.at_server.digests)).name is not None:
            return found
        name = model or self.begun.spec.base_model
        if model is None and name is not None and not is_path(name):
            return base_name(name, {})
        short = PurePath(name).name if name else "base model"
        agreed = self.begun.agreement.facts.base
        digest = f" Its weights have the digest `{agreed}`." if agreed else ""
        files = "".join(f"\n* `{file}`, SHA-256 `{found}`" for file, found in self.begun.at_server.digests.items())
        return BaseName(
            None,
            f"a local directory, `{short}`",
            f"Each site has its own copy of it; at the server it is called `{short}`, and adapter_config.json names it "
            f"so: put the path of your copy into its `base_model_name_or_path`.{digest}"
            f"{' These are its files:' if files else ''}\n{files}",
        )

    def _named(self, base: BaseName) -> AdapterSpec:
        """The start's spec, without any path of a machine."""
        given = self.begun.settings.at_server.model or self.begun.spec.base_model
        name = base.name or (PurePath(given).name if given else None)
        return replace(self.begun.spec, config=ReadOnly({**self.begun.spec.config, "base_model_name_or_path": name}))

    def _facts(self, target: str) -> dict[str, Any]:
        """The card's facts, in the form of a run's manifest."""
        settings, clients = self.begun.settings, self.policy.clients
        left = {name: "left" for name in self.examples if name not in clients}  # their training remains in the model
        shown = left | {
            n: r if isinstance(r, int) else "/".join(map(str, dict.fromkeys(r.values()))) for n, r in clients.items()
        }
        return {
            **code_facts(),
            "config_digest": hashlib.sha256(settings.travelling().encode()).hexdigest()[:16],
            "model": {"sha256": self.begun.at_server.digests},
            "data": {
                "train": {name: {"examples": self.examples.get(name)} for name in shown},
                "labels": settings.data.labels or [],
                "label_counts": None,
            },
            "clients": shown,
            "method": repr(self.begun.server.method),
            "evaluation_target": target,
            "answer_ends": list(self.begun.at_server.ends),
            "changes": self.begun.history.told(),
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
