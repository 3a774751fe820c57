"""Guards llama-server's slots: contexts that clients save, restore and erase by name, each its own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.helpers.agent_gateway import AgentGateway, agent_gateway

KEYS = {"one": "one-secret-of-a-key", "two": "two-secret-of-a-key"}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where contexts are saved; the gateway makes it."""
    return tmp_path_factory.mktemp("slots") / "saved"


@pytest.fixture(scope="module")
def running(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AgentGateway]:
    """Shared by this file."""
    folder = tmp_path_factory.mktemp("gateway")
    keys = folder / "keys"
    keys.write_text("".join(f"{secret}\n" for secret in KEYS.values()))
    keys.chmod(0o600)
    settings = {"slot_save_path": str(directory), "api_key_file": str(keys)}
    with agent_gateway(folder, **settings) as gateway:
        yield gateway


@pytest.fixture
def gateway(running: AgentGateway) -> AgentGateway:
    """Returns the shared servers with a fresh record."""
    running.engine.reset()
    return running


def post(gateway: AgentGateway, path: str, key: str = "one", **body: Any) -> httpx.Response:
    """Sends a body with one of the keys."""
    headers = {"authorization": f"Bearer {KEYS[key]}"}
    return httpx.post(f"{gateway.url}{path}", json=body, headers=headers, timeout=60)


def message(answer: httpx.Response, status: int = 400) -> str:
    """Returns why a request was refused."""
    assert answer.status_code == status, answer.text
    return str(answer.json()["error"]["message"])


@pytest.mark.parametrize("stream", [False, True])
def test_a_context_is_saved_and_restored_by_name(
    stream: bool, gateway: AgentGateway, directory: Path
) -> None:
    """The engine is sent the prompt and the output again, as the same client's; another slot has both."""
    asked = {"prompt": "The fox", "n_predict": 5, "temperature": 0, "id_slot": 1, "stream": stream}
    assert post(gateway, "/completion", **asked).status_code == 200
    first = gateway.engine.seen.requests[-1]
    saved = post(gateway, "/slots/1?action=save", filename="fox.bin").json()
    prompt_ids = list(first.tokenized.input_ids)
    assert (saved["id_slot"], saved["filename"], saved["n_saved"]) == (1, "fox.bin", len(prompt_ids) + 5)
    assert saved["timings"]["save_ms"] >= 0
    (file,) = directory.glob("*/fox.bin")
    assert (file.stat().st_size, file.stat().st_mode & 0o777) == (saved["n_written"], 0o600)
    restored = post(gateway, "/slots/0?action=restore", filename="fox.bin").json()
    assert (restored["n_restored"], restored["n_read"]) == (saved["n_saved"], saved["n_written"])
    again = gateway.engine.seen.requests[-1]
    assert list(again.tokenized.input_ids)[: len(prompt_ids)] == prompt_ids
    assert len(again.tokenized.input_ids) == saved["n_saved"]
    assert (again.sampling_params.max_tokens, again.cache_salt) == (1, first.cache_salt)
    assert again.cache_salt
    assert post(gateway, "/slots/0?action=save", filename="copy").json()["n_saved"] == saved["n_saved"]
    assert post(gateway, "/slots/0?action=erase").json() == {"id_slot": 0, "n_erased": saved["n_saved"]}
    assert "slot 0 has no context" in message(post(gateway, "/slots/0?action=save", filename="copy"))


def test_contexts_belong_to_their_key_and_model(gateway: AgentGateway, directory: Path) -> None:
    """Another key finds neither the slot nor the file; tokens of another model are not restored."""
    assert post(gateway, "/completion", prompt="A dog", n_predict=2).json()["id_slot"] == 0
    assert post(gateway, "/slots/0?action=save", filename="dog").status_code == 200
    refused = message(post(gateway, "/slots/0?action=restore", key="two", filename="dog"))
    assert refused == "no context is saved as 'dog' of the served model"
    assert "slot 0 has no context" in message(post(gateway, "/slots/0?action=save", key="two", filename="d"))
    (file,) = directory.glob("*/dog")
    for text in (json.dumps(json.loads(file.read_text()) | {"model": "another"}), '{"tokens": "', "[]"):
        file.write_text(text)
        assert "no context is saved" in message(post(gateway, "/slots/0?action=restore", filename="dog"))


def test_what_cannot_be_is_refused(gateway: AgentGateway, directory: Path) -> None:
    """Names that lead elsewhere, slots that are not there, actions that do not exist; nothing is written."""
    post(gateway, "/completion", prompt="A dog", n_predict=2)
    before = sorted(directory.glob("**/*"))
    for name in ("../out", "/etc/passwd", ".slot-0", "", "a/b", "x" * 129):
        assert "'filename' is not allowed" in message(post(gateway, "/slots/0?action=save", filename=name))
    headers = {"authorization": f"Bearer {KEYS['one']}"}
    missing = httpx.post(f"{gateway.url}/slots/0?action=save", headers=headers, timeout=60)
    assert "'filename' is missing" in message(missing)
    assert "does not exist; allowed: 0 to" in message(post(gateway, "/slots/9999?action=save", filename="a"))
    assert "'id_slot' is not allowed" in message(post(gateway, "/completion", prompt="x", id_slot=9999))
    assert post(gateway, "/slots/0?action=swap", filename="a").status_code == 400
    assert sorted(directory.glob("**/*")) == before


def test_a_server_without_a_directory_saves_nothing(tmp_path: Path) -> None:
    """llama-server's status for it, and the option that is needed; completions are as ever."""
    with agent_gateway(tmp_path) as gateway:
        assert httpx.post(f"{gateway.url}/completion", json={"prompt": "x", "n_predict": 2}, timeout=60)
        answer = httpx.post(f"{gateway.url}/slots/0?action=save", json={"filename": "a"}, timeout=60)
        assert "--slot-save-path" in message(answer, 501)
