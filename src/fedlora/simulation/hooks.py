"""What may become of uploads on their way to the server: hooks, and clients that lie."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from fedlora.core.messages import Upload
from fedlora.core.sent import Sent, Tampered, Tamperer
from fedlora.errors import HyperparameterError

UploadHook = Callable[[Upload, int], Upload]  # an upload and its round, from 0 -> what arrives at the server


def tampered_by(adversary: Tamperer, sent: Sequence[Sent], round: int) -> Tampered:
    """What somebody who knows all uploads of the round makes of them.

    Raises:
        HyperparameterError: not one upload for each that was sent.
    """
    tampered = adversary(sent, round)
    names = [one.upload.client.id for one in sent]
    if not isinstance(tampered, Tampered) or [u.client.id for u in tampered.uploads] != names:
        raise HyperparameterError(
            f"the adversary {adversary!r:.80} returned {tampered!r:.80}; it returns a Tampered with one "
            f"upload for each that was sent, changed or not, in the same order."
        )
    return tampered


def hooked(uploads: Iterable[Upload], hooks: Sequence[UploadHook], round: int) -> Iterator[Upload]:
    """The uploads as they arrive at the server.

    Raises:
        HyperparameterError: a hook that gives no upload of the same client.
    """
    for upload in uploads:
        client = upload.client.id
        for hook in hooks:
            upload = hook(upload, round)
            if not isinstance(upload, Upload) or upload.client.id != client:
                raise HyperparameterError(
                    f"the hook {hook!r} returned {upload!r:.80} for the upload of {client!r}; it returns that "
                    f"client's upload, changed or not."
                )
        yield upload
