"""Guards what the real openai client sees of the gateway, in front of a scripted engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.helpers.fake_engine import MODEL, FakeEngine, serving
from tests.helpers.gateway_server import gateway_config, running_gateway
from tests.helpers.openai_checks import ALL_CHECKS
from tests.helpers.tiny_tokenizer import byte_level_tokenizer, write_tokenizer


@pytest.fixture(scope="module")
def base_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One gateway in front of one scripted engine."""
    directory: Path = tmp_path_factory.mktemp("openai")
    tokenizer = byte_level_tokenizer()
    write_tokenizer(directory, tokenizer)
    address = f"unix:{directory}/engine.sock"
    with (
        serving(FakeEngine(directory, tokenizer), address),
        running_gateway(gateway_config(address)) as url,
    ):
        yield url


@pytest.mark.parametrize("check", ALL_CHECKS, ids=lambda check: check.__name__)
def test_openai_client(base_url: str, check: Callable[[str, str], None]) -> None:
    """Each check states its own invariant."""
    check(base_url, MODEL)
