"""A federation's folder with toys in place of models: its policy, checkpoints, journal and measurements are the real
ones, and its sites measure by arithmetic on the adapter that they are given."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w

from fedlora import Adapter, Server
from fedlora.flower.places import FederationFolder
from fedlora.flower.scores import choosing_of
from fedlora.flower.server.federation import Federation
from fedlora.flower.server.opening import AtServer, Opening
from fedlora.flower.server.state import going_on
from fedlora.flower.site.node import Node
from fedlora.flower.terms.joining import Address, JoinFile
from fedlora.flower.terms.policy import Policy
from fedlora.flower.terms.settings import FederationSettings
from fedlora.server.server import start
from support.flower_grid import RANKS, LocalGrid, Toy, seed_adapter


class Ruler:
    """An evaluator of pure arithmetic."""

    def measure_adapter(self, adapter: Adapter, client: str | None = None) -> dict[str, float]:
        size = sum(float(lora.factors[0].double().abs().sum()) for lora in adapter.modules.values())
        return {"accuracy": 1 / (1 + size), "loss": size, "perplexity": float("nan")}

    def count(self, client: str | None = None) -> int:
        return 7 + len(client or "")


def write_policy(folder: Path, clients: Mapping[str, Any], **more: Any) -> None:
    (folder / "policy.toml").write_text(tomli_w.dumps({**more, "clients": clients}))


def toy_federation(
    folder: Path, server: Server, ranks: Mapping[str, Any] = RANKS, *, trainer: Any = None, **tables: Any
) -> tuple[Federation, LocalGrid]:
    """A federation that goes on in FOLDER. tables: of its settings; each round is measured if they do not say no."""
    home = FederationFolder(folder)
    said = {"id": "toys", "data": {"label_names": ["no", "yes"]}, "lora": {"target_modules": ["q"]}, **tables}
    settings, seed = FederationSettings.model_validate(said), seed_adapter()
    if not home.policy.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_policy(folder, ranks)
    state = start(server, seed)
    begun = going_on(home.checkpoints, settings.id, server, state)
    choosing, policy = choosing_of(settings, server.has_global_model(state.server)), Policy.read(home.policy)
    join = JoinFile(federation="toys", server=Address(name="x", port=1, ca=""), agreed=settings.agreed(), facts={})
    opening = Opening(home, settings, policy, server, None, None, join, AtServer(), choosing, 0)  # type: ignore[arg-type]
    ruler = Ruler()
    nodes = {
        name: Node(name, trainer or Toy(), folder / "nodes" / name, terms=join.terms(), run="toys",
                   evaluators={"validation": ruler, "test": ruler})  # type: ignore[dict-item]
        for name in ranks
    }  # fmt: skip
    return Federation(opening, begun, None), LocalGrid(nodes)
