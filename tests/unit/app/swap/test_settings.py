"""Guards how a file with several models is read: what is wrong is named, in all of them at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.swap.settings import read_models
from moebius.config.loader import load_config
from moebius.errors import UserError

TWO = """
gateway: {port: 81, api_key_file: %s, host: 0.0.0.0}
max_model_len: 512
models:
  big: {model: /m/big, model_aliases: [gpt-*]}
  small:
    model: {model: /m/small, max_model_len: 64}
    gpu: {kv_cache_gib: 0.5}
"""


def written(tmp_path: Path, text: str) -> str:
    """Returns the path of a file with that text."""
    file = tmp_path / "models.yaml"
    file.write_text(text)
    return str(file)


def test_each_model_has_the_common_settings_and_its_own(tmp_path: Path) -> None:
    """Flags win over a model's own settings, those over common ones. The models' servers are on ports of
    their own that only this host reaches, and take the clients' keys and ours."""
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    config = read_models(written(tmp_path, TWO % keys), {"page_size": "32"})
    assert (config.shared.gateway.port, config.shared.gateway.host) == (81, "0.0.0.0")
    big, small = config.models["big"], config.models["small"]
    assert (big.model.model, big.model.max_model_len, big.model.served_model_name) == ("/m/big", 512, "big")
    assert (small.model.max_model_len, small.gpu.kv_cache_gib, small.gpu.page_size) == (64, 0.5, 32)
    assert {one.gateway.host for one in (big, small)} == {"127.0.0.1"}
    assert len({81, big.gateway.port, small.gateway.port}) == 3
    assert {one.gateway.api_key_file for one in (big, small)} == {str(keys)}
    assert {one.gateway.api_key for one in (big, small)} == {config.key} != {""}


def test_names_that_clients_may_use(tmp_path: Path) -> None:
    """A name, with Ollama's tag too, before an alias; none is the first model; others are unknown."""
    config = read_models(written(tmp_path, TWO % "''"), {})
    asked = (None, "small", "small:latest", "gpt-5", "claude-x", "other")
    assert [config.name_for(name) for name in asked] == ["big", "small", "small", "big", "small", None]
    assert config.key == ""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "models: {a: {model: /m, page_sice: 4}, b: {page_size: 4}}",
            ["models.a", "page_size", "models.b has no"],
        ),
        ("models: []", ["'models' must map names to settings, not []"]),
        ("models: {a: /m}", ["models.a must be a text with a mapping of settings"]),
        ("models: {a: {model: /m, models: {}}}", ["models.a", "'models'"]),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, words: list[str]) -> None:
    """All that is wrong in any of the models is said at once."""
    with pytest.raises(UserError) as error:
        read_models(written(tmp_path, text), {})
    assert all(word in str(error.value) for word in words), str(error.value)


def test_one_process_takes_no_models(tmp_path: Path) -> None:
    """Commands that run one model refuse such a file."""
    with pytest.raises(UserError, match="'models' is for `moebius serve` only"):
        load_config(written(tmp_path, "models: {a: {model: /m}}"))
