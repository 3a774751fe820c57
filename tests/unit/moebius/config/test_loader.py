"""Guards the configuration: unique leaves, defaults < YAML < flags, and errors that name the key."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from moebius.config import MoebiusConfig
from moebius.config.loader import effective_config, leaves, load_config, printable_config
from moebius.errors import ConfigError


def written(tmp_path: Path, text: str) -> Path:
    """Returns a configuration file with that text."""
    path = tmp_path / "moebius.yaml"
    path.write_text(text)
    return path


def test_leaf_names_are_unique_and_described() -> None:
    """A flag needs no prefix because no two sections share a leaf name; every leaf says what it is."""
    names = [leaf.name for leaf in leaves()]
    assert len(names) == len(set(names))
    assert [leaf.name for leaf in leaves() if not leaf.description] == []


def test_flags_beat_yaml_beats_defaults(tmp_path: Path) -> None:
    """The three sources override one another leaf by leaf."""
    path = written(tmp_path, "gateway: {port: 9000, host: 0.0.0.0}\nexperts: {split_shares: [2, 1]}\n")
    config = load_config(path, {"port": "9001", "prefix_caching": False, "max_num_seqs": None})
    assert (config.gateway.port, config.gateway.host) == (9001, "0.0.0.0")
    assert config.experts.split_shares == (2, 1)
    assert config.gpu.prefix_caching is False
    assert config.gpu.max_num_seqs == MoebiusConfig().gpu.max_num_seqs


def test_flag_texts_become_values_of_their_type() -> None:
    """Lists are comma separated, `none` unsets an optional leaf, numbers are numbers."""
    flags = {
        "expert_addresses": "a:1, b:2",
        "experts_per_token": "none",
        "kv_cache_gib": "0.5",
        "num_pages": "7",
    }
    config = load_config(None, flags)
    assert config.experts.expert_addresses == ("a:1", "b:2")
    assert (config.model.experts_per_token, config.gpu.kv_cache_gib, config.gpu.num_pages) == (None, 0.5, 7)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gatway: {port: 1}", "unknown section 'gatway'; did you mean 'gateway'"),
        ("gateway: {prot: 1}", "unknown key 'gateway.prot'; did you mean 'port'"),
        (
            "experts: {exact_experts: true}",
            "exact_experts'; it is called 'batch_invariant_experts' now",
        ),
        ("gateway: {dtype: float32}", "'dtype' belongs to section 'model', not 'gateway'"),
        ("prot: 1", "unknown section 'prot'; did you mean 'port'"),
        ("gateway: {port: '8000'}", "gateway.port in .*: '8000' is not allowed; allowed: an integer, >= 0"),
        ("gateway: {port: 70000}", "70000 is not allowed; allowed: an integer, >= 0, <= 65535"),
        ("gpu: {prefix_caching: 1}", "gpu.prefix_caching in .*: 1 is not allowed; allowed: true or false"),
        ("model: {dtype: fp8}", "'fp8' is not allowed; allowed: one of auto, float32, bfloat16"),
        ("experts: {split_shares: [1, x]}", "'x' is not allowed; allowed: a list, each an integer"),
        ("gateway: 5", "section 'gateway' must be a mapping of settings, not 5"),
        ("gateway: {port: 1, port: 2}", "key 'port' is given twice \\(line 1\\)"),
        ("- 1", "expected a mapping, as of sections"),
        ("gateway: {", "is not valid YAML"),
    ],
)
def test_bad_yaml_is_named(tmp_path: Path, text: str, message: str) -> None:
    """Each mistake in a file ends as one line that names key, value and what is allowed."""
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(written(tmp_path, text))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"port": "x"}, "--port: 'x' is not allowed; allowed: an integer, >= 0, <= 65535"),
        ({"port": "-1"}, "--port: -1 is not allowed"),
        ({"device": "tpu"}, "--device: 'tpu' is not allowed; allowed: one of auto, cpu, cuda"),
        (
            {"experts_per_token": "0"},
            "--experts-per-token: 0 is not allowed; allowed: an integer, >= 1, or none",
        ),
        ({"split_shares": "1,b"}, "--split-shares: '1,b' is not allowed; allowed: a list, each an integer"),
        ({"prot": "1"}, "unknown setting 'prot'; did you mean 'port'"),
    ],
)
def test_bad_flag_is_named(flags: dict[str, str], message: str) -> None:
    """Each wrong flag ends as a message in the flag's own spelling."""
    with pytest.raises(ConfigError, match=message):
        load_config(None, flags)


def test_missing_file_is_named(tmp_path: Path) -> None:
    """A configuration file that is not there is an error, not an empty configuration."""
    with pytest.raises(ConfigError, match=r"cannot read configuration file .*nowhere\.yaml"):
        load_config(tmp_path / "nowhere.yaml")


def test_effective_config_reads_back(tmp_path: Path) -> None:
    """What the supervisor writes for a child gives the child the very same configuration."""
    flags = {"api_key": "secret", "split_shares": "3,1", "num_pages": "12", "model": "/m: # odd"}
    config = load_config(None, flags)
    path = written(tmp_path, effective_config(config))
    assert load_config(path) == config


def test_printed_config_shows_everything_but_secrets() -> None:
    """Every leaf is printed; the API key is not readable in it."""
    text = printable_config(load_config(None, {"api_key": "hunter2"}))
    assert "hunter2" not in text
    shown = yaml.safe_load(text)
    assert {name for values in shown.values() for name in values} == {leaf.name for leaf in leaves()}


def test_a_number_or_a_word(tmp_path: Path) -> None:
    """A leaf that takes either reads both from flags and files, and its error names both."""
    path = tmp_path / "c.yaml"
    path.write_text("experts: {numa_node: auto}\n")
    assert load_config(path).experts.numa_node == "auto"
    assert load_config(path, {"numa_node": "1"}).experts.numa_node == 1
    for wrong in ("somewhere", "-2"):
        with pytest.raises(ConfigError, match=f"{wrong}.*an integer, >= -1, or one of auto, cpuset"):
            load_config(None, {"numa_node": wrong})


def test_counts_may_have_the_suffixes_of_vllm() -> None:
    """32K is 32 * 1024, 32k is 32 000; anything else after a number is refused."""
    by_name = {leaf.name: leaf for leaf in leaves()}
    parse = by_name["max_model_len"].parse
    assert [parse(text) for text in ("32K", "32k", "1M", "2m", "7")] == [32768, 32000, 1 << 20, 2_000_000, 7]
    for wrong in ("32Kb", "k", "1.5K", "32 K"):
        with pytest.raises(ConfigError, match=r"--max-model-len: .* is not allowed; allowed: an integer"):
            parse(wrong)
