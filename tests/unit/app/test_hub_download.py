"""Guards `moebius models download --hub`: digests are the hub's, and Pods that wait read nothing half."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest

from app.checkpoint_download import complete_source
from app.commands.download import download
from moebius.errors import UserError
from tests.helpers import hub_server as hub_server_module
from tests.helpers.hub_server import COMMIT, HubServer, hub_server

FILES = {
    "config.json": b'{"model_type": "x"}',
    "tokenizer.json": b"{}",
    "model.safetensors": bytes(range(256)) * 400,
    "README.md": b"of no use",
}
LIMIT_S = 60.0
MODEL = "org/model"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with hub_server({MODEL: dict(FILES)}) as server:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", server.url)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        yield server


def test_the_hub_says_which_files_and_digests(
    hub: HubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What `serve` would read arrives, from the commit that the hub named, with the token; SHA-256 and git's
    SHA-1 are both compared with what lies on the disk."""
    hub.token = "secret"
    token = tmp_path / "token"
    token.write_text("secret\n")
    place = tmp_path / "model"
    download(place, hub=MODEL, token_file=token)
    assert "3 files, 3 of them fetched now" in capsys.readouterr().out
    found = {path.name for path in place.iterdir() if not path.name.startswith(".")}
    assert found == {"config.json", "tokenizer.json", "model.safetensors"}
    assert (place / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert complete_source(place) == "org/model@main"
    for name in ("config.json", "model.safetensors"):
        (place / name).write_bytes(b"damaged")
        download(place, hub=MODEL, token_file=token)
        assert "3 files, 1 of them fetched now" in capsys.readouterr().out
        assert (place / name).read_bytes() == FILES[name]


def test_a_file_that_is_not_what_the_hub_lists_is_refused(hub: HubServer, tmp_path: Path) -> None:
    """Another content under a listed digest ends the download with the file's name, and its note is taken
    back: files of the revision before are being replaced."""
    place = tmp_path / "m"
    download(place, hub=MODEL)

    class Lies(dict[str, bytes]):
        def get(self, name: str, default: bytes | None = None) -> bytes | None:  # type: ignore[override]
            return b"other" if name == "config.json" else super().get(name, default)

    hub.repositories[MODEL] = Lies(FILES | {"config.json": b"{}"})
    with pytest.raises(UserError, match=r"config\.json: its SHA-1 in git is"):
        download(place, hub=MODEL, revision=COMMIT)
    assert complete_source(place) == ""


def test_a_hub_without_digests_is_refused(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mirror that lists none cannot be compared with: the way by a list of one's own is named."""
    monkeypatch.setattr(
        hub_server_module, "_sibling", lambda name, data: {"rfilename": name, "size": len(data)}
    )
    with pytest.raises(UserError, match=r"lists no digest of config\.json; give --base-url"):
        download(tmp_path / "m", hub=MODEL)


def test_pods_wait_for_the_job(hub: HubServer, tmp_path: Path) -> None:
    """One that waits ends when all files of its own source are there, not with those of another revision."""
    place = tmp_path / "model"
    place.mkdir()
    words = ("models", "download", str(place), "--hub", MODEL, "--revision", COMMIT, "--wait")
    command = [sys.executable, "-m", "moebius", *words]
    # It asks no hub.
    environment = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9"}
    waiting = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        assert waiting.stderr is not None
        assert "waiting until org/model is there" in waiting.stderr.readline()
        download(place, hub=MODEL)
        assert waiting.poll() is None
        download(place, hub=MODEL, revision=COMMIT)
        assert waiting.wait(LIMIT_S) == 0
    finally:
        waiting.kill()
        waiting.communicate()


@pytest.mark.parametrize(
    ("hub_name", "base_url", "checksums", "revision", "sentence"),
    [
        ("model", "", None, "", "is no name on the hub; allowed: owner/name"),
        (MODEL, "https://a/b", None, "", "allowed: --hub NAME, or --base-url URL"),
        ("", "https://a/b", None, "", "or --base-url URL with --checksums FILE"),
        ("", "https://a/b", Path("x"), "v", "it needs --hub"),
        ("org/none", "", None, "", "no such model at"),
    ],
)
def test_what_cannot_be_downloaded_is_said(
    hub_name: str,
    base_url: str,
    checksums: Path | None,
    revision: str,
    sentence: str,
    hub: HubServer,
    tmp_path: Path,
) -> None:
    """One sentence, and nothing was written."""
    with pytest.raises(UserError, match=sentence):
        download(tmp_path / "m", base_url, checksums, hub_name, revision)
    assert not (tmp_path / "m").exists()
