"""Guards that what people type for other servers is understood: mapped, said to have no effect, or refused
with what does it here.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from app.other_options import note_variables, translated
from moebius.config.loader import leaves, load_config
from moebius.errors import ConfigError
from moebius.other_servers.setting_names import OTHER_NAMES, OTHER_VALUES, OtherName
from tests.helpers.command_line import run_cli

OPTIONS = {
    **dict.fromkeys(("--config", "--port", "--page-size", "--tensor-parallel-size"), True),
    **dict.fromkeys(("--dry-run", "--cuda-graphs", "-h"), False),
}


def values_of(other: OtherName) -> list[tuple[str, str]]:
    """Returns the (setting, value) pairs that a table has for a name, those that it refuses left out."""
    given = [*other.values.values(), *([other.fixed] if other.fixed is not None and other.leaf else [])]
    pairs = [value[1:].split("=") if value.startswith("@") else (other.leaf, value) for value in given]
    return [(leaf, value) for leaf, value in pairs if leaf and not value.startswith("!")]


def test_every_name_leads_somewhere() -> None:
    """A name stands for a setting that exists and a value that it takes, or says why not; both only where it
    asks for a setting and another name has its value."""
    by_name = {leaf.name: leaf for leaf in leaves()}
    for name, other in OTHER_NAMES.items():
        means = bool(other.leaf) + bool(other.fulfilled) + bool(other.refusal) + (other.unit == "tensors")
        lacks_value = other.yields and other.leaf and other.refusal and other.fixed == ""
        assert means == (2 if lacks_value else 1), name
        for leaf, value in [] if lacks_value else values_of(other):
            load_config(None, {by_name[leaf].name: value})
        for text in (other.fulfilled, other.refusal, *other.values.values()):
            for word in re.split(r"[\s(),:;]+", text):
                if word.startswith("--"):
                    assert word[2:].replace("-", "_") in by_name, f"{name}: {word} is none of our options"
    for leaf_name, renamed in OTHER_VALUES.items():
        for value in renamed.values():
            load_config(None, {leaf_name: value})


@pytest.mark.parametrize(
    ("typed", "ours"),
    [
        ("m --tp 2 -c 4096", "m --tensor-parallel-size 2 --max-model-len 4096"),
        ("m --enable-expert-parallel", "m --gpu-expert-split expert"),
        ("m --tp=2 --port 1", "m --tensor-parallel-size 2 --port 1"),
        ("--model-path m --mem-fraction-static 0.8", "m --gpu-memory-utilization 0.8"),
        ("m --enforce-eager --disable-radix-cache", "m --no-cuda-graphs --no-prefix-caching"),
        ("m --kt-method AMXINT4 --kt-cpuinfer 56", "m --expert-dtype int4 --expert-threads 56"),
        ("m -ngl 99 -fa --dry-run", "m --dry-run"),
        ("m -fa on --dry-run", "m --dry-run"),
        ("m --max-model-len auto --port 1", "m --max-model-len auto --port 1"),
        ("m --compilation_config.cudagraph_mode NONE -O 0", "m --no-cuda-graphs"),
        ("m --compilation_config.cudagraph_mode FULL_DECODE_ONLY", "m --cuda-graphs"),
        ("--model m --no-op-offload --no-webui", "m --prefill-experts cpu --no-web-page"),
        ("m --slot-save-path /var/slots", "m --slot-save-path /var/slots"),
        ("m --tp 2 --kv-offloading-size 64", "m --tensor-parallel-size 2 --kv-offload-gib 64.0"),
        ("m --config -c --port 1", "m --config -c --port 1"),
        ("m -O0 --no-mmproj --enable-prompt-tokens-details", "m --language-model-only"),
        ("m --swap-space 0 --nsa-prefill-backend auto --port 1", "m --port 1"),
        ("m --max-cudagraph-capture-size 64", "m --cuda-graph-max-batch-size 64"),
        ("m --no-enable-lora --no-perf --cont-batching --port 1", "m --port 1"),
        ("m --otlp-traces-endpoint http://c:4317", "m --otlp-endpoint http://c:4317"),
        ("m --no-cache-prompt --no-ui -cram 0", "m --no-prefix-caching --no-web-page"),
        (
            "m --speculative-config.method ngram --speculative-config.num_speculative_tokens 5",
            "m --speculative-method ngram --num-draft-tokens 5",
        ),
        (
            "m --speculative-algorithm NEXTN --speculative-num-steps 2 --speculative-eagle-topk 1",
            "m --speculative-method mtp --num-draft-tokens 2",
        ),
        ("m --draft-max 16 --draft-min 1 --port 1", "m --num-draft-tokens 16 --port 1"),
        ("m --spec-type ngram-simple", "m --speculative-method ngram"),
        ("m --unheard-of 1 -- --tp 2", "m --unheard-of 1 -- --tp 2"),
        ("m -ncmoe 30 -ctk q8_0 -ctv q8_0", "m --kv-cache-dtype fp8_e4m3 --gpu-layers 30-"),
        ("m --kt-cpuinfer 56 --kt-threadpool-count 2", "m --expert-threads 28 --expert-servers 2"),
        ("m --max-total-tokens 4000 --page-size 64", "m --num-pages 63 --page-size 64"),
        (
            "m --kt-enable-dynamic-expert-update --kt-expert-placement-strategy uniform",
            "m --placement-strategy adaptive",
        ),
        (
            "m --speculative-algo EAGLE --speculative-num-steps 3 --speculative-num-draft-tokens 4",
            "m --speculative-method mtp --num-draft-tokens 3",
        ),
        (
            'm --speculative-config {"method":"mtp","num_speculative_tokens":3}',
            "m --speculative-method mtp --num-draft-tokens 3",
        ),
        (
            'm --speculative-config {"method":"deepseek_mtp","num_speculative_tokens":1,"model":"m"}',
            "m --speculative-method mtp --num-draft-tokens 1",
        ),
        (
            "m --speculative-algorithm NEXTN --speculative-draft-model-path m/ --speculative-num-steps 1",
            "m --speculative-method mtp --num-draft-tokens 1",
        ),
        ("m --spec-type draft-mtp --spec-draft-n-max 2", "m --speculative-method mtp --num-draft-tokens 2"),
        (
            'm --speculative-config {"method":"eagle3","model":"heads","num_speculative_tokens":3}',
            "m --speculative-method eagle3 --num-draft-tokens 3 --speculative-model heads",
        ),
        (
            'm --speculative-config {"method":"draft_model","model":"small","num_speculative_tokens":3}',
            "m --speculative-method draft_model --num-draft-tokens 3 --speculative-model small",
        ),
        (
            'm --speculative-config {"model":"small","draft_tensor_parallel_size":1}',
            "m --speculative-model small --speculative-method auto",
        ),
        (
            "m --speculative-algorithm STANDALONE --speculative-draft-model-path small",
            "m --speculative-method draft_model --speculative-model small",
        ),
        (
            "m -md small --draft-max 4",
            "m --num-draft-tokens 4 --speculative-model small --speculative-method auto",
        ),
        ("m --model-draft small", "m --speculative-model small --speculative-method auto"),
        (
            "m --speculative-algorithm EAGLE3 --speculative-draft-model-path heads --speculative-num-steps 2",
            "m --speculative-method eagle3 --num-draft-tokens 2 --speculative-model heads",
        ),
        ("m --tensor_parallel_size 2 --kt-weight-path m/", "m --tensor-parallel-size 2"),
        ("m --port -1", "m --port -1"),
    ],
)
def test_options_are_translated(typed: str, ours: str) -> None:
    """Other servers' spellings become ours, values of our own options are never looked at."""
    assert translated(typed.split(), OPTIONS, lambda: 1) == ours.split()


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("m --top-k 4", "--top-k 4: sampling is set in each request .* --experts-per-token"),
        ("m --compilation_config.cudagraph_mode OFTEN", "--cuda-graphs: 'OFTEN' is not allowed"),
        ("m -C ff", "-C ff: threads are pinned"),
        ("m --rpc 10.0.0.2:50052", "--rpc .* --expert-addresses"),
        ("m --speculative-config {1}", "--speculative-config .* --speculative-method, --num-draft-tokens"),
        ("m --speculative-algorithm DFLASH", "--speculative-algorithm DFLASH: of second models"),
        ("m --speculative-eagle-topk 4", "--speculative-eagle-topk 4: draft tokens are a sequence"),
        ("m --cache-type-k q4_0", "-k q4_0: keys and values have 8 bits at least"),
        ("m -ctk q8_0 -ctv f16", "-ctv auto, after -ctk fp8_e4m3: both are --kv-cache-dtype here"),
        ("m -O3 --moe-backend triton", "-O3: no code is compiled.*--moe-backend triton: kernels are chosen"),
        ("m --nnodes 2", "--nnodes .* --rank-hosts"),
        ("m --hicache-ratio 2", "--hicache-ratio 2: --kv-offload-gib is the RAM"),
        ("m --enable-deterministic-inference", "--batch-invariant-experts"),
        ("m --disaggregation-mode prefill", "--disaggregation-mode .* same engine"),
        ("m --models-preset f.ini", "--models-preset .* `models` .* --max-loaded-models"),
        ("m -ctxcp 4 --reasoning on", "-ctxcp 4: .*--reasoning on: .* chat_template_kwargs"),
        ("m --presence-penalty 1", "--presence-penalty .* field of each request"),
        ("m -md small --draft-max 4 -devd CUDA1", "-devd CUDA1: a draft model is whole on the device"),
        (
            "m --speculative-algorithm EAGLE --speculative-draft-model-path heads",
            "--speculative-draft-model-path heads: of second models",
        ),
        (
            'm --speculative-config {"method":"eagle","model":"heads","num_speculative_tokens":3}',
            "--speculative-config.method eagle: of second models",
        ),
        ('m --speculative-config {"method":"mtp","depth":3}', "depth.*--speculative-method"),
        ("m --mm-processor-cache-gb 8", "--mm-processor-cache-gb .* --image-cache-mib"),
    ],
)
def test_what_is_done_otherwise_here_is_named(typed: str, message: str) -> None:
    """A refused option names ours."""
    with pytest.raises(ConfigError, match=message):
        translated(typed.split(), OPTIONS)


def test_eagle_is_not_taken_for_mtp_in_silence(capsys: pytest.CaptureFixture[str]) -> None:
    """SGLang has one word for heads of their own and for a model's layers: the latter are taken, and said."""
    options = OPTIONS | {"--speculative-method": True}
    assert translated(["m", "--speculative-algorithm", "EAGLE"], options) == [
        "m",
        "--speculative-method",
        "mtp",
    ]
    assert "EAGLE: draft tokens come from the model's own MTP layers" in capsys.readouterr().err
    translated(["m", "--speculative-algorithm", "NEXTN"], options)
    assert not capsys.readouterr().err


def test_flat_configuration_files_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """vLLM's and LvLLM's configuration files have no sections."""
    path = tmp_path / "config.yaml"
    path.write_text(
        "model: /m\nhost: 0.0.0.0\nport: 8070\ntensor-parallel-size: 2\nmax-model-len: 66000\n"
        "gpu-memory-utilization: 0.8\ntrust-remote-code: true\nenable-prefix-caching: true\n"
        "enforce-eager: true\nseed: 7\nLK_THREADS: 44\nLVLLM_GPU_RESIDENT_MOE_LAYERS: 0-1\n"
    )
    config = load_config(path)
    assert (config.model.model, config.gateway.port, config.gateway.host) == ("/m", 8070, "0.0.0.0")
    assert (config.parallel.tensor_parallel_size, config.model.max_model_len) == (2, 66000)
    assert (config.gpu.cuda_graphs, config.gpu.prefix_caching, config.gpu.random_seed) == (False, True, 7)
    assert (config.experts.expert_threads, config.placement.gpu_layers) == (44, "0-1")
    assert "trust-remote-code has no effect" in capsys.readouterr().err


def test_the_keys_of_the_file_that_lvllm_ships_are_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Dotted keys, `auto` and flags of its config.yaml are read, or said to have no effect, or refused."""
    path = tmp_path / "config.yaml"
    path.write_text(
        "model: /m\nmax-model-len: auto\ncompilation_config.cudagraph_mode: FULL_DECODE_ONLY\n"
        "compilation_config.mode: NONE\nenable_prefix_caching: true\nmax_num_seqs: 2\n"
        "disable-custom-all-reduce: true\nmm-encoder-tp-mode: data\nblock-size: 128\n"
        "kv_cache_dtype: bfloat16\n"
    )
    config = load_config(path)
    assert (config.model.max_model_len, config.gpu.cuda_graphs, config.gpu.page_size) == (None, True, 128)
    assert "mm-encoder-tp-mode has no effect" in capsys.readouterr().err
    path.write_text("speculative-config: '{1}'\n")
    with pytest.raises(ConfigError, match="--speculative-method, --num-draft-tokens"):
        load_config(path)


def test_an_unknown_flat_key_is_refused(tmp_path: Path) -> None:
    """The key is named, as in a section."""
    path = tmp_path / "config.yaml"
    path.write_text("tensor-paralel-size: 2\n")
    with pytest.raises(ConfigError, match="unknown section 'tensor-paralel-size'"):
        load_config(path)


@pytest.mark.parametrize("typed", [["--gpu-layers", "20"], ["--gpu-layers=20"]])
def test_a_number_of_layers_is_not_taken_for_a_layer_in_silence(
    typed: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """llama.cpp's option of this name counts layers; ours names them."""
    options = OPTIONS | {"--gpu-layers": True}
    assert translated(["m", *typed], options) == ["m", *typed]
    assert "llama.cpp's first 20 layers are --gpu-layers 0-19" in capsys.readouterr().err
    assert translated(["m", "--gpu-layers", "0"], options) == ["m", "--gpu-layers", "0"]
    assert "0-" not in capsys.readouterr().err
    assert translated(["m", "--gpu-layers", "0-19"], options) == ["m", "--gpu-layers", "0-19"]
    assert not capsys.readouterr().err


def test_variables_of_others_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    """No setting is read from the environment; who relies on LvLLM's or OpenTelemetry's reads what to set."""
    others = {"LK_THREADS": "8", "LVLLM_UNKNOWN": "1", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c"}
    note_variables({"HOME": "/", "HF_HOME": "/", **others})
    lines = capsys.readouterr().err.splitlines()
    named = [line.split("variable ")[1].split(" ")[0] for line in lines]
    assert named == ["LK_THREADS", "LVLLM_UNKNOWN", "OTEL_EXPORTER_OTLP_ENDPOINT"]
    assert "--expert-threads" in lines[0]
    assert "--otlp-endpoint" in lines[2]


def test_the_command_line_understands_them() -> None:
    """From end to end: -h and --version answer, a wrong option ends as one line."""
    status, out, _ = run_cli("serve", "--help-all")
    assert status == 0
    assert out.index("Model:") < out.index("--dtype") < out.index("Telemetry") < out.index("--log-level")
    assert run_cli("--version")[1].startswith("moebius ")
    status, _, err = run_cli("serve", "/nowhere", "--tp", "two")
    assert (status, err) == (
        2,
        "  --tensor-parallel-size: 'two' is not allowed; allowed: an integer, >= 1, <= 64\n"
        "moebius: error: without these it is: moebius serve /nowhere\n",
    )
