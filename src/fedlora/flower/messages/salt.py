"""Unpredictable names for the pieces of messages.

Flower stores a message as objects, and an object's name is the hash of its content. If a site can predict what another
will send or receive (a frozen matrix, the settings, a readout that both get), it can register those names first, with
other pieces below them: then the honest message is refused, and nothing says who caused it. So each leaf of a message
holds random bytes. The purpose is not secrecy: the salt travels with the salted bytes.
"""

from __future__ import annotations

import os

from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms
from flwr.app import ConfigRecord, MetricRecord, RecordDict

from fedlora.flower.messages.parts import parts

SALT = 48  # bytes before salted ones: a key of 32 and a nonce of 16
IN_SALT = "salt"  # the salt's key among settings and numbers


def salted(data: bytes | memoryview) -> bytes:
    """The bytes under a keystream (ChaCha20), after its key: every piece that Flower cuts from them, however small,
    differs from other messages'."""
    salt = os.urandom(SALT)
    return salt + _stream(salt).update(data)


def unsalted(data: bytes) -> bytearray:
    """The original of `salted`. data: at least `SALT` bytes."""
    original = bytearray(len(data) - SALT)
    _stream(data[:SALT]).update_into(memoryview(data)[SALT:], original)
    return original


def with_salt(record: RecordDict) -> RecordDict:
    """The record with salt in its settings and numbers too, which its readers ignore."""
    for config in parts(record, ConfigRecord).values():
        config[IN_SALT] = os.urandom(16).hex()
    for metrics in parts(record, MetricRecord).values():
        metrics[IN_SALT] = int.from_bytes(os.urandom(7), "little")
    return record


def _stream(salt: bytes) -> CipherContext:
    return Cipher(algorithms.ChaCha20(salt[:32], salt[32:]), mode=None).encryptor()
