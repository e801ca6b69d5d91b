"""Makes the messages to clients: what each is sent to train or to measure, at its own rank, without what it holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from flwr.app import Message, MessageType

from fedlora.core.messages import Client, ClientMemory, Download
from fedlora.errors import FedLoRAError, HyperparameterError, RankMismatch
from fedlora.flower.messages.codecs import Codec
from fedlora.flower.messages.envelope import Receipt
from fedlora.flower.messages.measuring import HeldOut, as_question
from fedlora.flower.rounds.arrivals import Limit
from fedlora.flower.rounds.flower_state import FlowerState
from fedlora.flower.terms.policy import Policy
from fedlora.server.checks import ranks_of
from fedlora.server.server import Server
from fedlora.server.state import ServerState

_MB = 2**20


class NotServed(FedLoRAError):
    """The method has no readout for a client's ranks, so that client gets no message. The others do."""


@dataclass(frozen=True, eq=False)
class Question:
    """A message to a client. limit: of its reply. whole: the same question with `ttl` seconds to live, which leaves out
    nothing; None: this one does not either."""

    client: str
    message: Message
    limit: Limit
    whole: Callable[[float], Question] | None = None


@dataclass(frozen=True, eq=False)
class MessageMaker:
    """Makes the messages of one state. A message may be large: it is made on demand, and made again if it is needed.

    online: name -> node id.
    """

    server: Server
    policy: Policy
    codec: Codec
    flower_state: FlowerState
    online: Mapping[str, int]

    def known(self, name: str) -> ClientMemory:
        """What the server knows of a client from earlier rounds."""
        return self.flower_state.state.clients.get(name, ClientMemory())

    def download(self, name: str) -> Download:
        """What a client begins with, whole. Raises `NotServed`."""
        try:
            return self.server.download(self.flower_state.state.server, self.policy.client(name))
        except (RankMismatch, HyperparameterError) as error:
            raise NotServed(f"{self.server.method.name} cannot serve it: {error}") from error

    def question(
        self, download: Download, group: str, ttl: float, limit: Limit, measure: HeldOut | None = None,
        leave_out: bool = True,
    ) -> Question:  # fmt: skip
        """The message with a client's download.

        Args:
            group: the id of the messages of one attempt. ttl: seconds to live. measure: the held-out part to measure;
                None: train. leave_out: what the client is thought to hold.
        """
        name = download.client.id
        held, receipt = self.known(name).held if leave_out else None, self.flower_state.receipts.get(name, Receipt())
        record = self.codec.question(download, held, self.flower_state.run, receipt)
        kind = MessageType.TRAIN
        if measure is not None:
            record, kind = as_question(record, measure), MessageType.EVALUATE

        def again(ttl: float) -> Question:
            return self.question(self.download(name), group, ttl, limit, measure, leave_out=False)

        message = Message(record, self.online[name], kind, ttl=ttl, group_id=group)
        return Question(name, message, limit, again if held is not None else None)


def reply_limit(client: Client, state: ServerState, policy: Policy) -> Limit:
    """The limit of this client's upload: twice its largest possible one and 1 MB, or the policy's limit."""
    total = tensors = 0
    for name, rank in ranks_of(client, state).items():
        B, A = state.start.modules[name].factors
        total += rank * (B.shape[0] + A.shape[1]) * max(4, B.element_size(), A.element_size())
        tensors += 2
    total += sum(head.numel() * max(4, head.element_size()) for head in state.heads.values())
    tensors += len(state.heads)
    most = 2 * total + _MB if policy.max_upload_mb is None else int(policy.max_upload_mb * _MB)
    return Limit(most, 64 + 4 * tensors + most // (_MB // 4), 2 * _MB + 2048 * tensors)
