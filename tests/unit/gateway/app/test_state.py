"""Guards what the gateway does before it knows a model: waits for an engine, gives up over wrong files."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from gateway.app.state import Gateway
from gateway.schemas.errors import ApiError
from moebius.config import MoebiusConfig
from tests.helpers.tiny_tokenizer import byte_level_tokenizer, write_tokenizer


def no_tokenizer(directory: Path) -> str:
    (directory / "tokenizer.json").unlink()
    return "tokenizer.json"


def broken_tokenizer(directory: Path) -> str:
    (directory / "tokenizer.json").write_text('{"model": {"type": "none such"}}')
    return "tokenizer.json"


def broken_settings(directory: Path) -> str:
    (directory / "tokenizer_config.json").write_text("{")
    return "tokenizer_config.json"


def odd_settings(directory: Path) -> str:
    (directory / "tokenizer_config.json").write_text('{"chat_template": [{"text": "a"}]}')
    return ""


def broken_own_template(directory: Path) -> str:
    (directory / "chat_template.jinja").write_text("{{ messages")
    return ""


def binary_own_template(directory: Path) -> str:
    (directory / "chat_template.jinja").write_bytes(b"\xff\xfe\x00")
    return ""


SPOILERS = (
    no_tokenizer,
    broken_tokenizer,
    broken_settings,
    odd_settings,
    broken_own_template,
    binary_own_template,
)


async def reason_of(model: Path, template: str, wait_s: float) -> str | None:
    """Returns why a gateway without an engine gives up; None if it still waits after `wait_s`."""
    gateway = {"engine_address": f"unix:{model}/nobody.sock", "chat_template": template}
    config = MoebiusConfig.model_validate({"model": {"model": str(model)}, "gateway": gateway})
    broken: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    state = Gateway(config, lambda error: broken.set_result(str(error)))
    await state.open()
    try:
        return await asyncio.wait_for(broken, wait_s)
    except TimeoutError:
        with pytest.raises(ApiError) as caught:
            state.model()
        assert caught.value.status == 503
        assert str(model) not in str(caught.value.body())
        return None
    finally:
        await state.close()


@pytest.mark.parametrize("spoil", SPOILERS, ids=lambda spoil: spoil.__name__)
async def test_wrong_files_are_no_reason_to_wait(spoil: Callable[[Path], str], tmp_path: Path) -> None:
    """Whatever is wrong with tokenizer or template, the reason comes without an engine and with a path."""
    write_tokenizer(tmp_path, byte_level_tokenizer())
    name = spoil(tmp_path)
    reason = await reason_of(tmp_path, "", 30)
    assert reason is not None
    assert str(tmp_path / name) in reason


async def test_missing_template_file_is_named(tmp_path: Path) -> None:
    """The file of --chat-template is named, not the checkpoint."""
    write_tokenizer(tmp_path, byte_level_tokenizer())
    reason = await reason_of(tmp_path, str(tmp_path / "none.jinja"), 30)
    assert reason is not None
    assert str(tmp_path / "none.jinja") in reason


async def test_good_files_wait_for_the_engine(tmp_path: Path) -> None:
    """An engine that is not there yet is no error: it may load for half an hour."""
    write_tokenizer(tmp_path, byte_level_tokenizer())
    assert await reason_of(tmp_path, "", 0.6) is None
