"""The messages for two kinds of clients on Flower: fedlora's own, and stock PEFT ones.

A codec turns a download into a message and a reply into an upload. The strategy does not distinguish the two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from fedlora.core.lora import Adapter
from fedlora.core.messages import Client, Download, Held, Upload
from fedlora.core.parcels import held_after, pack
from fedlora.core.read_only import ReadOnly
from fedlora.errors import ConfigError
from fedlora.flower.messages.envelope import Envelope, Receipt
from fedlora.flower.messages.records import parcel_record, record_upload, stock_upload
from fedlora.flower.terms.facts import Facts
from fedlora.flower.terms.policy import Policy
from fedlora.server.server import Server
from fedlora.server.state import ServerState

_NONE = Receipt()


@dataclass(frozen=True, eq=False)
class Reply:
    """A client's reply, and what the server now knows about it. loss: None if it reports none. held: what need not be
    sent again; None: nothing."""

    upload: Upload
    loss: float | None
    held: Held | None


class Codec(Protocol):
    """The messages for one kind of clients."""

    def require(self, server: Server, state: ServerState, policy: Policy) -> None:
        """Raises `ConfigError` for a method or a policy that such clients cannot serve."""

    def question(self, download: Download, held: Held | None, run: str, receipt: Receipt = _NONE) -> RecordDict:
        """The message to one client. held: what it already holds. run: the federation's name. receipt: for the
        client's earlier work."""

    def reply(self, content: RecordDict, asked: Download, state: ServerState, run: str) -> Reply:
        """The reply, read. Raises `RecordError`; the server checks values."""


@dataclass(frozen=True)
class OwnClients:
    """fedlora's own ClientApp: parcels to it, uploads back.

    settings: the current ones, as `FederationSettings.travelling`, sent with every message.
    facts: returns the server's; sites compare theirs before they train, and the server compares theirs in replies. It
    is called for every message, because sites can be admitted between rounds.
    """

    settings: str = ""
    facts: Callable[[], Facts] = Facts

    def require(self, server: Server, state: ServerState, policy: Policy) -> None:
        """Accepts any method."""

    def question(self, download: Download, held: Held | None, run: str, receipt: Receipt = _NONE) -> RecordDict:
        return parcel_record(pack(download, held), run, Envelope(self.settings, self.facts().text()), receipt)

    def reply(self, content: RecordDict, asked: Download, state: ServerState, run: str) -> Reply:
        upload, loss, kept = record_upload(
            content, asked.client, run=run, round=asked.round, shapes=_shapes(asked.client, state), roles=asked.roles,
            heads=state.heads, facts=self.facts(),
        )  # fmt: skip
        return Reply(upload, loss, replace(held_after(asked), local=tuple(kept)))


@dataclass(frozen=True)
class StockClients:
    """Clients that send get_peft_model_state_dict, all with one rank r and alpha.

    config: settings that they read besides "server-round".
    """

    r: int
    alpha: float
    config: Mapping[str, Any] = field(default_factory=ReadOnly)

    @property
    def factor(self) -> float:
        """The factor that converts a client's B to the server's scale, 1."""
        return self.alpha / self.r

    def require(self, server: Server, state: ServerState, policy: Policy) -> None:
        roles = server.roles(state)
        if not roles.both_shared or server.method.moves_base:
            raise ConfigError(
                f"{server.method.name} needs clients that keep or freeze a part, or that move their base weights, and "
                f"stock PEFT clients do neither. Use glora, fedit, flexlora, svd, hetlora, or fedlora's own "
                f"ClientApp."
            )
        ranks = {r for name, rank in policy.clients.items() for r in Client(name, rank).ranks(state.modules).values()}
        if ranks != {self.r}:
            raise ConfigError(f"stock clients have r = {self.r}; the policy's ranks are {sorted(ranks)}.")

    def question(self, download: Download, held: Held | None, run: str, receipt: Receipt = _NONE) -> RecordDict:
        config = ConfigRecord({**self.config, "server-round": download.round + 1})
        return RecordDict({"arrays": self._peft(download.adapter), "config": config})

    def result(self, server: Server, state: ServerState) -> ArrayRecord:
        """The server's model as such clients read it."""
        return self._peft(server.download(state, Client("whoever asks", self.r)).adapter)

    def _peft(self, adapter: Adapter) -> ArrayRecord:
        """The record that `set_peft_model_state_dict` reads."""
        arrays = {}
        for module, lora in adapter.modules.items():
            B, A = (t.detach().float() for t in lora.factors)
            arrays[f"base_model.model.{module}.lora_A.weight"] = Array(A.numpy())
            arrays[f"base_model.model.{module}.lora_B.weight"] = Array((B / self.factor).numpy())
        return ArrayRecord(arrays)

    def reply(self, content: RecordDict, asked: Download, state: ServerState, run: str) -> Reply:
        upload = stock_upload(content, asked.client, _shapes(asked.client, state), self.factor)
        return Reply(upload, None, None)


def _shapes(client: Client, state: ServerState) -> dict[str, tuple[int, int]]:
    """Module -> (d_out, d_in), for the modules that the client holds."""
    factors = {name: state.start.modules[name].factors for name in client.ranks(state.start.modules)}
    return {name: (B.shape[0], A.shape[1]) for name, (B, A) in factors.items()}
