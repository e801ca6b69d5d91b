"""Messages whose pieces have names that nobody can foresee.

Flower stores a message as objects, and an object's name is the hash of its content. A site that can tell what another
is about to send, or to be sent (a matrix that is frozen, the settings, a readout that both get), can register those
names first, with other pieces below them: the honest message is then refused, and nothing says by whom. So each leaf of
a message holds random bytes. Secrecy is not the purpose: the salt travels with what it salts.
"""

from __future__ import annotations

import os

from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from flwr.app import ConfigRecord, MetricRecord, RecordDict

from fedlora.flower.messages.parts import parts

SALT = 48  # bytes in front of salted ones: a key of 32 and a nonce of 16
IN_SALT = "salt"  # the key of salt among settings and numbers


def salted(data: bytes) -> bytes:
    """The bytes under a keystream (ChaCha20), behind its key: in every piece that Flower cuts them into, however
    small, nothing is as it would be in another message."""
    salt = os.urandom(SALT)
    return salt + _stream(salt, data)


def unsalted(data: bytes) -> bytes:
    """What `salted` was given. data: at least `SALT` bytes."""
    return _stream(data[:SALT], memoryview(data)[SALT:])


def with_salt(record: RecordDict) -> RecordDict:
    """The record, in whose settings and numbers there is salt too. Its readers do not look at it."""
    for config in parts(record, ConfigRecord).values():
        config[IN_SALT] = os.urandom(16).hex()
    for metrics in parts(record, MetricRecord).values():
        metrics[IN_SALT] = int.from_bytes(os.urandom(7), "little")
    return record


def _stream(salt: bytes, data: bytes | memoryview) -> bytes:
    return Cipher(algorithms.ChaCha20(salt[:32], salt[32:]), mode=None).encryptor().update(data)
