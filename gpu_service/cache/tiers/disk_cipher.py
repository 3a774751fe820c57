"""Encryption of the disk tier: AES-256-GCM with a key of each file, from the key that settings name.

    payload on disk     nonce, 12 bytes | ciphertext | tag, 16 bytes

A file's key is a keyed BLAKE2b of the salt in its header, so that random nonces of one key are never many.
The name of a block is bound to its payload as associated data: payloads cannot be exchanged. Names are made
with the key, too (`keyed_identity`): who has a file cannot find out what is in it by trying prompts.

`cryptography` is imported where payloads are encrypted: most engines encrypt nothing, and start without it.
"""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

import numpy as np
import numpy.typing as npt

from moebius.errors import UserError

Bytes = npt.NDArray[np.uint8]
SALT_BYTES = KEY_NAME_BYTES = 16
# In place of a key's name: the file is not encrypted.
NO_KEY = bytes(KEY_NAME_BYTES)
_KEY_BYTES, _NONCE_BYTES = 32, 12


class FileCipher:
    """Seals and opens the payloads of one file. Any thread may call."""

    def __init__(self, key: bytes) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._cipher = AESGCM(key)

    def seal(self, name: bytes, payload: Bytes) -> Bytes:
        """Returns a payload, uint8 `[n]`, as the disk has it, uint8 `[n + 28]`; `name` of the block."""
        nonce = os.urandom(_NONCE_BYTES)
        return np.frombuffer(nonce + self._cipher.encrypt(nonce, payload.tobytes(), name), np.uint8)

    def open(self, name: bytes, stored: Bytes, into: Bytes) -> bool:
        """Fills `into`, uint8 `[n]`, from uint8 `[n + 28]`; False: this was not sealed by this name."""
        from cryptography.exceptions import InvalidTag

        try:
            data = self._cipher.decrypt(
                stored[:_NONCE_BYTES].tobytes(), stored[_NONCE_BYTES:].tobytes(), name
            )
        except InvalidTag:
            return False
        if len(data) != len(into):
            return False
        into[:] = np.frombuffer(data, np.uint8)
        return True


class DiskCipher:
    """A key; `name` says which one it is, 16 bytes."""

    def __init__(self, key: bytes) -> None:
        """`key`: 32 bytes."""
        self._key = key
        self.name = self._derived(b"", b"name", KEY_NAME_BYTES)

    def of_file(self, salt: bytes) -> FileCipher:
        """Returns what seals the payloads of the file with this salt, 16 bytes."""
        return FileCipher(self._derived(salt, b"file", _KEY_BYTES))

    def keyed_identity(self, identity: bytes) -> bytes:
        """Returns the identity that blocks of an engine with this key are named by, 32 bytes."""
        return self._derived(identity, b"identity", len(identity))

    def _derived(self, data: bytes, person: bytes, nbytes: int) -> bytes:
        return hashlib.blake2b(data, key=self._key, person=person, digest_size=nbytes).digest()


def read_cipher(path: str) -> DiskCipher | None:
    """Returns the key of a file: 32 bytes, or 64 hexadecimal digits; None: no file is named.

    Raises UserError where there is no such file, or others may read it.
    """
    if not path:
        return None
    try:
        mode, data = os.stat(path).st_mode, Path(path).read_bytes()
    except OSError as error:
        raise UserError(f"kv_disk_key_file: {path} cannot be read: {error.strerror}") from None
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise UserError(f"kv_disk_key_file: {path} can be read by others; chmod 600 it")
    if len(data) != _KEY_BYTES:
        try:
            data = bytes.fromhex(data.decode())
        except ValueError:
            data = b""
    if len(data) != _KEY_BYTES:
        raise UserError(
            f"kv_disk_key_file: {path} has no key: 32 bytes, or 64 hexadecimal digits "
            "as `openssl rand -hex 32` writes them"
        )
    return DiskCipher(data)
