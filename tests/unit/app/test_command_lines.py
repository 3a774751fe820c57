"""Guards that command lines of other servers, as people have them, are translated as a whole.

Each line of tests/data/command_lines.yaml starts the same server, or everything that differs is named at once
next to the command line of ours for the rest.
"""

from __future__ import annotations

import collections
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.commands.serve import serve_options
from app.other_commands import read_command, translate_command
from app.other_options import translated
from moebius.config.leaves import leaves
from moebius.config.loader import load_config
from moebius.errors import ConfigError, UserError
from moebius.other_servers.tensor_overrides import resident_layers
from tests.helpers.command_line import run_cli

DATA = Path(__file__).resolve().parents[2] / "data"
LINES: list[dict[str, Any]] = yaml.safe_load((DATA / "command_lines.yaml").read_text())
SOCKETS = 2


def names(differences: list[str]) -> list[str]:
    """Returns which options and variables differ, each once, in their order."""
    found = [re.match(r"-ot|[A-Z_][A-Z0-9_]+(?==)|[^\s:]+", text) for text in differences]
    return list(dict.fromkeys(match[0] for match in found if match))


def settings(arguments: list[str]) -> dict[str, str | bool]:
    """Returns the values of a command line of ours, by leaf."""
    flags = {leaf.flag: leaf for leaf in leaves()}
    found = dict[str, str | bool]()
    words = iter(arguments)
    for word in words:
        flag, is_given, value = word.partition("=")
        negative = flag.startswith("--no-") and flag not in flags
        leaf = flags.get("--" + flag[5:] if negative else flag)
        if leaf is not None:
            is_switch = leaf.annotation is bool
            found[leaf.name] = (not negative) if is_switch else value if is_given else next(words)
        elif flag == "--config":
            next(words)
        elif flag.startswith("--"):
            assert flag == "--dry-run", word
    return found


@pytest.mark.parametrize("entry", LINES, ids=[f"{entry['from']}-{at}" for at, entry in enumerate(LINES)])
def test_a_line_starts_the_same_or_names_all_that_differs(entry: dict[str, Any]) -> None:
    """What is printed is right, can be started, and is the same when it is translated again."""
    options = serve_options()
    ours, found = translate_command(shlex.split(entry["line"]), options, lambda: SOCKETS)
    assert shlex.join(ours) == entry["ours"]
    assert names(found.differences) == entry.get("differs", [])
    given = settings(ours[ours.index("serve") + 1 :])
    given.pop("config", None)
    load_config(None, given)
    again, found_again = translate_command(ours, options, lambda: 1)
    assert (again, found_again.differences) == (ours, [])


def test_the_lines_are_of_all_servers_and_many_need_no_change() -> None:
    """The corpus stays as large and as varied as it is said to be."""
    servers = collections.Counter(read_command(shlex.split(entry["line"])).server for entry in LINES)
    assert len(LINES) >= 150
    assert all(servers[name] >= 5 for name in ("vllm", "sglang", "llama-server", "ollama"))
    assert sum("LVLLM_" in entry["line"] or "--kt-" in entry["line"] for entry in LINES) >= 25
    assert sum("differs" not in entry for entry in LINES) >= 70


def test_a_config_of_lvllm_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its own file is read as it stands; of a changed one all that differs is named together, by line."""
    config = load_config(DATA / "lvllm_config.yaml")
    assert (config.gateway.port, config.gpu.page_size, config.gpu.kv_cache_dtype) == (8070, 128, "fp8_e4m3")
    assert (config.gpu.speculative_method, config.gpu.num_draft_tokens) == ("mtp", 3)
    assert (config.parallel.small_all_reduce, config.gpu.cuda_graphs) == ("nccl", True)
    assert "trust-remote-code has no effect" in capsys.readouterr().err
    path = tmp_path / "config.yaml"
    path.write_text(
        "swap-space: 4\ntokenizer-mode: auto\ntokenizer-mode: slow\ntensor-parallel-size: two\n"
        "compilation_config.mode: VLLM_COMPILE\nunheard-of: 1\nenable-prefix-caching: false\n"
    )
    with pytest.raises(ConfigError) as raised:
        load_config(path)
    said = str(raised.value)
    for part in (
        "'tokenizer-mode' is given twice (line 3)",
        "--tensor-parallel-size: 'two'",
        "swap-space 4: ",
    ):
        assert part in said
    for part in ("compilation_config.mode VLLM_COMPILE: ", "unknown section 'unheard-of'"):
        assert part in said
    path.write_text("enable-prefix-caching: false\nenable-lora: false\nspeculative-config: {method: mtp}\n")
    config = load_config(path)
    assert (config.gpu.prefix_caching, config.gpu.speculative_method) == (False, "mtp")


def test_all_differences_are_said_at_once_with_the_rest() -> None:
    """`moebius serve` with another server's options stops once, not once per option."""
    typed = "m --tp 2 --swap-space 4 --enable-lora --kv-cache-dtype fp9 --scheduling-policy fcfs"
    with pytest.raises(ConfigError) as raised:
        translated(typed.split(), serve_options(), lambda: SOCKETS)
    said = str(raised.value)
    for part in (
        "--swap-space 4: preempted requests",
        "--enable-lora: LoRA",
        "--kv-cache-dtype: 'fp9' is not allowed",
    ):
        assert part in said
    assert said.endswith("without these it is: moebius serve m --tensor-parallel-size 2")


# Lines that were not in the corpus when they were tried: what each is here, and what differs.
MENDED = [
    ("vllm serve m --kv-offloading-size 64 --kv-offloading-backend native", "m --kv-offload-gib 64.0", []),
    (
        "vllm serve m -tp 2 --kv-offloading-size 64",
        "m --tensor-parallel-size 2 --kv-offload-gib 64.0",
        [],
    ),
    (
        "sglang serve --model-path m --enable-hierarchical-cache --hicache-size 32 --hicache-ratio 2",
        "m --kv-offload-gib 32.0 --port 30000",
        ["--hicache-ratio"],
    ),
    (
        "sglang serve --model-path m --enable-hierarchical-cache",
        "m --port 30000",
        ["--enable-hierarchical-cache"],
    ),
    ("llama-server -m m.gguf --cache-ram 8192", "m.gguf --kv-offload-gib 8.0 --port 8080", []),
    ("llama-server -m m.gguf --cache-ram -1", "m.gguf --port 8080", ["--cache-ram"]),
    ("llama-server -m m.gguf --pooling mean", "m.gguf --port 8080", ["--pooling"]),
    ("vllm serve m -ep", "m --gpu-expert-split expert", []),
    ("vllm serve m --allowed-origins '[\"*\"]'", "m --cors-origins '*'", []),
    ("vllm serve m --api-key a b --port 81", "m --api-key a --port 81", ["--api-key"]),
    ("vllm serve m --enforce-eager=false --enable-lora=false", "m", []),
    (
        'ollama run o/n:Q4_K_M --verbose --keepalive 1h --format json --think=high "Why?"',
        "o/n:Q4_K_M --sleep-after-s 3600.0 --port 11434",
        ["--verbose", "--think=high", "'Why?'", "--format"],
    ),
    ("vllm serve m --enable-sleep-mode", "m", []),
    ("sglang serve --model-path m --enable-memory-saver", "m --port 30000", []),
    ("llama-server -m m.gguf --sleep-idle-seconds -1", "m.gguf --sleep-after-s 0.0 --port 8080", []),
    ("OLLAMA_KEEP_ALIVE=-1m ollama run o/n:Q4_K_M", "o/n:Q4_K_M --sleep-after-s 0.0 --port 11434", []),
    ("OLLAMA_KEEP_ALIVE=1h30m ollama run o/n:Q4_K_M", "o/n:Q4_K_M --sleep-after-s 5400.0 --port 11434", []),
    ("OLLAMA_KEEP_ALIVE=0 ollama run o/n:Q4_K_M", "o/n:Q4_K_M --port 11434", ["OLLAMA_KEEP_ALIVE"]),
    (
        "OLLAMA_MAX_LOADED_MODELS=3 ollama run o/n:Q4_K_M --keepalive soon",
        "o/n:Q4_K_M --port 11434",
        ["OLLAMA_MAX_LOADED_MODELS", "--sleep-after-s"],
    ),
    (
        "llama-server -m m.gguf --models-dir d --models-max 2 --models-autoload --no-models-autoload",
        "m.gguf --port 8080",
        ["--models-dir", "--models-max", "--no-models-autoload"],
    ),
    ("nohup vllm serve m --port 81 > vllm.log 2>&1 &", "m --port 81", []),
    ("vllm serve m | tee log", "m", []),
]


@pytest.mark.parametrize(("line", "ours", "differs"), MENDED)
def test_what_was_ignored_or_refused_for_another_reason(line: str, ours: str, differs: list[str]) -> None:
    """Caches below the KV cache, short and JSON spellings, flags with a value, requests of `ollama run`,
    sleep, several models, and what is the shell's."""
    words, found = translate_command(shlex.split(line), serve_options(), lambda: SOCKETS)
    assert shlex.join(words) == f"moebius serve {ours}"
    assert names(found.differences) == differs
    load_config(None, settings(words[2:]))


@pytest.mark.parametrize(
    ("line", "ours", "nearest"),
    [
        ("vllm serve m -tp 4 -ep -pp 2", "--tensor-parallel-size 4 --gpu-expert-split expert "
         "--pipeline-parallel-size 2", {}),
        ("vllm serve m -tp 8 -dcp 8", "--tensor-parallel-size 8",
         {"-dcp": "--pipeline-parallel-size"}),
        ("vllm serve m -dcp 1 -pcp 1 -dp 1", "--data-parallel-size 1", {}),
        ("vllm serve m -pcp 2 --dcp-kv-cache-interleave-size 16", "",
         {"-pcp": "--kv-cache-dtype", "--dcp-kv-cache-interleave-size": "--kv-cache-dtype"}),
        ("vllm serve m -dp 8 -ep --enable-eplb", "--data-parallel-size 8 --gpu-expert-split expert",
         {"--enable-eplb": "--expert-statistics"}),
        ("sglang serve --model-path m --tp 8 --ep 8 --enable-dp-attention --dp 8",
         "--tensor-parallel-size 8 --gpu-expert-split expert --data-parallel-size 8 --port 30000", {}),
        ("sglang serve --model-path m --pp-size 2 --pp-max-micro-batch-size 4 --moe-dp-size 2",
         "--pipeline-parallel-size 2 --port 30000",
         {"--pp-max-micro-batch-size": "--max-num-seqs", "--moe-dp-size": "--gpu-expert-split"}),
        ("sglang serve --model-path m --tp 4 --dcp-size 4 --attn-cp-size 1",
         "--tensor-parallel-size 4 --port 30000", {"--dcp-size": "--tensor-parallel-size"}),
    ],
)  # fmt: skip
def test_divisions_over_gpus_are_done_or_refused_by_name(
    line: str, ours: str, nearest: dict[str, str]
) -> None:
    """Expert, tensor and pipeline parallelism are settings; each of the others is refused with the option
    that comes nearest, and none is taken for another one."""
    words, found = translate_command(shlex.split(line), serve_options(), lambda: SOCKETS)
    assert sorted(words[3:]) == sorted(shlex.split(ours))
    assert names(found.differences) == list(nearest)
    for text, option in zip(found.differences, nearest.values(), strict=True):
        assert option in text


@pytest.mark.parametrize(
    "line",
    [
        "llama-swap --config c.yaml",
        "ollama create m -f Modelfile",
        "python ktransformers/server/main.py --port 1",
        "python -m vllm.entrypoints.grpc_server --model m",
        "vllm bench serve --model m",
    ],
)
def test_what_starts_no_known_server_is_no_model(line: str) -> None:
    """A program of another kind is named, instead of being taken for MODEL."""
    with pytest.raises(UserError, match="starts no server that is known here; known are vllm serve"):
        translate_command(shlex.split(line), serve_options(), lambda: SOCKETS)


@pytest.mark.parametrize(
    ("overrides", "layers", "differs"),
    [
        (["exps=CPU"], "", False),
        ([r"blk\.[0-9]\.ffn_.*_exps=CUDA0", "exps=CPU"], "0-9", False),
        ([r"blk\.(2[0-9]|[3-9][0-9])\.ffn_.*_exps=CPU"], "0-19", False),
        ([r"blk\.[0-4]\.ffn_.*_exps=CPU"], "5-", False),
        ([r"ffn_(up|gate)_exps=CPU"], "", True),
        ([r"attn=CPU", r"blk\.[0-9]\.ffn_.*_exps=CPU"], "10-", True),
        (["[=CPU", "exps=CPU"], "", True),
    ],
)
def test_tensor_overrides_are_layers_of_experts(overrides: list[str], layers: str, differs: bool) -> None:
    """llama.cpp's patterns name tensors, of which the experts of whole layers are what can be placed."""
    placed = resident_layers(overrides)
    assert (placed.layers, bool(placed.differences)) == (layers, differs)


def test_the_command_prints_the_line_and_lists_what_differs() -> None:
    """From end to end: stdout is a command, stderr says the rest, the status says whether all is the same."""

    def translate(*words: str, typed: str = "") -> tuple[int, str, str]:
        return run_cli("translate", *words, typed=typed)

    status, out, err = translate("--", "vllm", "serve", "m", "-tp", "2", "--trust-remote-code")
    assert (status, out) == (0, "moebius serve m --tensor-parallel-size 2\n")
    assert err.startswith("note: --trust-remote-code has no effect")
    status, out, err = translate(typed="llama-server -m m.gguf \\\n  -np 4 --grammar x # two lines\n")
    assert (status, out) == (1, "moebius serve m.gguf --max-num-seqs 4 --port 8080\n")
    assert err == (
        "differs: --grammar x: response_format, structured_outputs and tools are fields of each request\n"
    )
    assert translate("--", "vllm", "serve", "m", "-h")[0] in (0, 1)
    assert translate(typed='vllm "')[0] == 2
