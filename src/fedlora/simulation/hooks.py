"""What can happen to uploads on their way to the server: hooks, and lying clients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from fedlora.core.messages import Upload
from fedlora.core.sent import Sent, Tampered, Tamperer
from fedlora.errors import HyperparameterError

UploadHook = Callable[[Upload, int], Upload]  # an upload and its round, from 0 -> the upload that arrives


def tampered_by(adversary: Tamperer, sent: Sequence[Sent], round: int) -> Tampered:
    """The round's uploads after an adversary who knows them all has changed its own.

    Raises:
        HyperparameterError: the adversary does not return one upload for each that was sent.
    """
    tampered = adversary(sent, round)
    names = [one.upload.client.id for one in sent]
    if not isinstance(tampered, Tampered) or [u.client.id for u in tampered.uploads] != names:
        raise HyperparameterError(
            f"the adversary {adversary!r:.80} returned {tampered!r:.80}; it must return a Tampered with one "
            f"upload for each that was sent, changed or not, in the same order."
        )
    return tampered


def hooked(uploads: Iterable[Upload], hooks: Sequence[UploadHook], round: int) -> Iterator[Upload]:
    """The uploads as they arrive at the server.

    Raises:
        HyperparameterError: a hook does not return an upload of the same client.
    """
    for upload in uploads:
        client = upload.client.id
        for hook in hooks:
            upload = hook(upload, round)
            if not isinstance(upload, Upload) or upload.client.id != client:
                raise HyperparameterError(
                    f"the hook {hook!r} returned {upload!r:.80} for the upload of {client!r}; it must return that "
                    f"client's upload, changed or not."
                )
        yield upload
