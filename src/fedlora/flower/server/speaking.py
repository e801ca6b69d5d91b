"""What messages hold, for the two kinds of clients: stock PEFT clients (FlowerTune), and fedlora's own (`Node`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from flwr.app import ConfigRecord, RecordDict

from fedlora.core.messages import Client, ClientMemory, Download, Held
from fedlora.core.parcels import held_after, pack
from fedlora.errors import ConfigError
from fedlora.flower.envelope import Receipt, parts
from fedlora.flower.peft import peft_record, peft_upload
from fedlora.flower.records import parcel_record, record_upload
from fedlora.flower.scores import as_question
from fedlora.flower.server.answers import Reply
from fedlora.flower.server.state import FederationState
from fedlora.server.server import Server
from fedlora.server.state import ServerState


@dataclass(frozen=True)
class StockClients:
    """Clients that exchange `get_peft_model_state_dict` and hold nothing. r, lora_alpha: of their `LoraConfig`."""

    r: int
    lora_alpha: float
    at_nodes = True  # each chooses its data by its node

    @property
    def factor(self) -> float:
        """Of a client's B to the server's."""
        return self.lora_alpha / self.r

    def check(self, server: Server, begun: ServerState, clients: Mapping[str, Any]) -> None:
        """Raises `ConfigError` for a method that they cannot serve, or a start of another rank than theirs."""
        found, wanted = set(begun.start.ranks.values()), set(clients.values())
        if found != wanted:
            raise ConfigError(
                f"the start has LoRA factors of rank {sorted(found)}, and the stock clients have r = {wanted}."
            )
        if not server.roles(begun).both_shared or server.method.moves_base:
            raise ConfigError(
                f"{server.method.name} needs clients that keep or freeze a part, or that move their base weights, and "
                f"stock PEFT clients do neither. Use glora, fedit, flexlora, svd, hetlora, or fedlora's own clients."
            )

    def question(
        self, download: Download, kept: FederationState, config: ConfigRecord, number: int, measure: bool
    ) -> RecordDict:
        """A client's message in round `number`, to train or to measure."""
        config = ConfigRecord({**dict(config), "server-round": number})
        return RecordDict({"arrays": peft_record(download.adapter, self.factor), "config": config})

    def reply(self, content: RecordDict, client: Client, server: Server, state: ServerState) -> Reply:
        """A client's upload. Raises `RecordError`; the server checks values."""
        upload, loss = peft_upload(content, client, _shapes(client, state), self.factor)
        return Reply(upload, loss, None)


@dataclass(eq=False)
class OwnClients:
    """Clients of fedlora, whose messages leave out what they hold.

    run: the federation's name. terms: that they must have in their join.toml; "" without one. sent: client -> what it
    holds once it has the message that it was sent last.
    """

    run: str
    terms: str = ""
    sent: dict[str, Held] = field(default_factory=dict)
    factor, at_nodes = 1.0, False  # the parcel names the client, wherever it goes

    def check(self, server: Server, begun: ServerState, clients: Mapping[str, Any]) -> None:
        """Any method can be played with them."""

    def question(
        self, download: Download, kept: FederationState, config: ConfigRecord, number: int, measure: bool
    ) -> RecordDict:
        """A client's message, to train or to measure: a parcel, and the receipt for the client's earlier work."""
        name = download.client.id
        self.sent[name] = held_after(download, download.start, untrained=measure)
        held = kept.state.clients.get(name, ClientMemory()).held
        record = parcel_record(pack(download, held), self.run, self.terms, kept.receipts.get(name, Receipt()))
        for key, value in config.items():
            parts(record, ConfigRecord)["config"].setdefault(key, value)
        return as_question(record, str(config.get("measure", "validation"))) if measure else record

    def reply(self, content: RecordDict, client: Client, server: Server, state: ServerState) -> Reply:
        """A client's upload. Raises `RecordError`; the server checks values."""
        upload, loss, kept = record_upload(
            content, client, run=self.run, round=state.round, shapes=_shapes(client, state), roles=server.roles(state),
            heads=state.heads,
        )  # fmt: skip
        return Reply(upload, loss, replace(self.sent[client.id], local=tuple(kept)))


def speaks(r: int | None, lora_alpha: float | None, run: str) -> OwnClients | StockClients:
    """The kind of clients: stock ones have both numbers, of their `LoraConfig`. Raises `ConfigError` for one alone."""
    if r is None and lora_alpha is None:
        return OwnClients(run)
    if not r or lora_alpha is None or not 0 < lora_alpha < math.inf:
        raise ConfigError(f"r and lora_alpha are those of stock PEFT clients, both or neither; got {r}, {lora_alpha}.")
    return StockClients(r, lora_alpha)


def _shapes(client: Client, state: ServerState) -> dict[str, tuple[int, int]]:
    """Module -> (d_out, d_in), of the modules that the client holds."""
    factors = {name: state.start.modules[name].factors for name in client.ranks(state.start.modules)}
    return {name: (B.shape[0], A.shape[1]) for name, (B, A) in factors.items()}
