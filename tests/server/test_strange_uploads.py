"""What is no upload ends no round, and is refused by client and reason; an upload is not written to. Kind: property."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from fedlora import Adapter, Client, LoRA, Server, Upload, build
from fedlora.errors import HyperparameterError, UploadRefused
from fedlora.server.intake import take_in
from fedlora.testing.federations import rounds

RANKS = dict.fromkeys("abcd", 3)


def factors(change: Callable[[torch.Tensor], Any]) -> Callable[[Upload], Any]:
    return lambda upload: replace(upload, adapter=upload.adapter.map(change))


def unmade(upload: Upload, module: object) -> Upload:
    """With something else in the place of a pair, which no constructor let through."""
    modules: Any = {**upload.adapter.modules, "attn.q": module}
    return replace(upload, adapter=Adapter(modules, upload.adapter.heads))


STRANGE: dict[str, Callable[[Upload], Any]] = {
    "None": lambda u: None,
    "a string": lambda u: "upload",
    "its adapter alone": lambda u: u.adapter,
    "client by name": lambda u: replace(u, client=u.client.id),
    "no adapter": lambda u: replace(u, adapter=None),
    "modules alone": lambda u: replace(u, adapter=dict(u.adapter.modules)),
    "numpy": factors(lambda t: t.numpy()),
    "lists in numpy": factors(lambda t: t.numpy().astype(object)),
    "a string for a pair": lambda u: unmade(u, "q"),
    "None for a pair": lambda u: unmade(u, None),
    "a tuple for a pair": lambda u: unmade(u, u.adapter.modules["attn.q"].factors),
    "sparse": factors(lambda t: t.to_sparse()),
    "meta": factors(lambda t: t.to("meta")),
    "examples by name": lambda u: replace(u, num_examples="many"),
}


def test_the_round_goes_on_and_says_who_and_why() -> None:
    server = Server(build("glora"), quorum=1)
    played = next(rounds(server, RANKS, [tuple(RANKS)]))
    first, *others = played.uploads
    for what, strange in STRANGE.items():
        bad = strange(first)
        after = server.aggregate(played.before, [bad, *others])
        want = server.aggregate(played.before, others)
        assert after.tally is not None and set(after.tally.weights) == {u.client.id for u in others}, what
        for name, lora in server.global_update(want).items():
            assert torch.equal(server.global_update(after)[name].delta(), lora.delta())
        with pytest.raises(UploadRefused, match=r"upload of client '(a|a \w+)' refused: "):
            Server(build("glora")).aggregate(played.before, [bad, *others])


@pytest.mark.parametrize("method", ["glora", "fedit", "fedsa-lora"])
def test_an_upload_that_is_written_to_before_the_close_is_named(method: str) -> None:
    """One buffer for all clients, in which the next one trains: each upload would be the last one's."""
    server = Server(build(method))
    played = next(rounds(server, RANKS, [tuple(RANKS)]))
    intake = server.open(played.before)
    for upload in played.uploads:
        intake.add(upload)
    factor = next(iter(played.uploads[1].adapter.modules["attn.q"].tensors().values()))
    factor.fill_(torch.nan)
    with pytest.raises(HyperparameterError, match=r"'b' was changed .*Tensor\.clone"):
        intake.close()


def test_a_lora_of_numpy_names_its_client() -> None:
    server = Server(build("fedit"))
    state = server.init(Adapter({"m": LoRA(torch.zeros(4, 2), torch.ones(2, 3))}))
    pair: Any = LoRA(torch.ones(4, 2).numpy(), torch.ones(2, 3).numpy())  # type: ignore[arg-type]
    with pytest.raises(UploadRefused, match=r"'acme' refused: .*'m' is a ndarray"):
        server.aggregate(state, [Upload(Client("acme", 2), 1, Adapter({"m": pair}))])


def test_bytes_are_counted_of_uploads_alone() -> None:
    """A refused upload travelled, too; the size of something that is no upload is unknown."""
    server = Server(build("glora"))
    pair = LoRA(torch.zeros(5, 2), torch.ones(2, 3))
    opened = server.open(server.init(Adapter({"q": pair})))
    found = list(take_in(opened, ["nonsense", Upload(Client("a", 2), -1, Adapter({"q": pair}))]))  # type: ignore[list-item]
    assert all(taken.refusal is not None for taken in found)
    assert [(taken.up_modules, taken.up_heads) for taken in found] == [(0, 0), (4 * (10 + 6), 0)]
