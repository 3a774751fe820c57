"""Guards the encryption of the disk tier: without its key a file gives nothing, with it what was written."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from structlog.testing import capture_logs

from gpu_service.cache.tiers.digests import identity_digest, page_digests, root_digest
from gpu_service.cache.tiers.disk_cipher import DiskCipher, read_cipher
from gpu_service.cache.tiers.disk_tier import DiskTier
from moebius.errors import UserError

IDENTITY = identity_digest("a model")
NAMES = page_digests(root_digest(IDENTITY, ""), np.arange(6), 2)
PAYLOADS = [np.full(5000, 17 * (index + 1), np.uint8) for index in range(3)]


def tier(directory: Path, key: int | None) -> DiskTier:
    """Returns a tier with a key of equal bytes."""
    return DiskTier(directory, IDENTITY, 10**6, cipher=None if key is None else DiskCipher(bytes([key]) * 32))


def write(directory: Path, key: int | None) -> Path:
    """Returns the file of three pages."""
    writer = tier(directory, key)
    for index, (name, payload) in enumerate(zip(NAMES, PAYLOADS, strict=True)):
        assert writer.append(name, NAMES[index - 1] if index else root_digest(IDENTITY, ""), 2, payload)
    (path,) = (record.path for record in [writer.record(NAMES[0])] if record is not None)
    writer.close()
    return path


def read(reader: DiskTier, index: int) -> bool:
    """Whether a page comes back, and as what it was."""
    record, into = reader.record(NAMES[index]), np.zeros(5000, np.uint8)
    assert record is not None
    return reader.read(record, into) and np.array_equal(into, PAYLOADS[index])


def test_only_the_key_opens_a_file(tmp_path: Path) -> None:
    """It has no payload in plain text; without its key it is skipped, which one line says, and stays."""
    path = write(tmp_path, 1)
    data = path.read_bytes()
    assert all(payload[:64].tobytes() not in data for payload in PAYLOADS)
    again = tier(tmp_path, 1)
    assert all(read(again, index) for index in range(3))
    for key in (2, None):
        with capture_logs() as logs:
            other = tier(tmp_path, key)
        assert len(other) == 0
        assert [log["event"] for log in logs] == ["KV files with another key, or none, are skipped"]
        assert logs[0]["files"] == 1
        other.drop()
        assert path.exists()
    with capture_logs() as logs:
        assert len(tier(tmp_path, 1)) == 3
    assert not logs


def test_payloads_cannot_be_exchanged(tmp_path: Path) -> None:
    """A payload in another one's place, with a checksum that is right, is computed again, with one line."""
    path = write(tmp_path, 1)
    reader = tier(tmp_path, 1)
    first, second = (reader.record(name) for name in NAMES[:2])
    assert first is not None
    assert second is not None
    reader._records[NAMES[0]] = second._replace(key=NAMES[0], path=path)
    with capture_logs() as logs:
        assert not read(reader, 0)
    assert [log["event"] for log in logs] == ["a KV block on disk cannot be read and is computed again"]
    assert "cannot be decrypted" in logs[0]["because"]
    assert reader.record(NAMES[0]) is None
    assert read(reader, 1)


def test_names_need_the_key() -> None:
    """Other keys name the same prefix differently."""
    names = {DiskCipher(bytes([key]) * 32).keyed_identity(IDENTITY) for key in (1, 2)} | {IDENTITY}
    assert len(names) == 3


@pytest.mark.parametrize(
    ("content", "mode", "message"),
    [
        (b"x" * 31, 0o600, "has no key: 32 bytes, or 64 hexadecimal digits"),
        (b"x" * 32, 0o640, "can be read by others; chmod 600 it"),
        (None, 0, "cannot be read: No such file"),
    ],
)
def test_what_is_no_key_is_refused(content: bytes | None, mode: int, message: str, tmp_path: Path) -> None:
    """The message says what a key file is."""
    path = tmp_path / "key"
    if content is not None:
        path.write_bytes(content)
        path.chmod(mode)
    with pytest.raises(UserError, match=message):
        read_cipher(str(path))


def test_a_key_has_two_forms(tmp_path: Path) -> None:
    """32 bytes, or their digits and the end of a line, are the same key; no file is no key."""
    path = tmp_path / "key"
    path.touch(0o600)
    path.write_bytes(bytes(range(32)))
    raw = read_cipher(str(path))
    path.write_text(bytes(range(32)).hex() + "\n")
    digits = read_cipher(str(path))
    assert raw is not None
    assert digits is not None
    assert raw.name == digits.name
    assert read_cipher("") is None


def test_a_tier_without_a_key_starts_without_cryptography() -> None:
    """Only payloads that are encrypted load the library that encrypts them."""
    program = "import sys, gpu_service.cache.tiers.disk_tier; sys.exit('cryptography' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
