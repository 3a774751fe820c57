"""Invariant: on a CPU, layers of a decode step that one call computes have the bits of calls one by one.

Also keys, values and latents in the cache (in 8 bits, too), states, and choices that are sampled; for
families that differ in norms, biases, gates, windows, rotation, recurrences and routers, with one row,
several and draft tokens, and at every instruction-set level.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_service.attention.registry import make_attention
from gpu_service.cache.fp8 import E4M3
from gpu_service.cache.kv_cache import KVCache, MlaCache, make_cache
from gpu_service.core.depths import make_depths
from gpu_service.core.step import ForwardInputs
from gpu_service.experts.choice_samples import ChoiceSamples
from gpu_service.experts.client import ExpertUnavailable
from gpu_service.experts.mailbox_client import MailboxExpertClient
from gpu_service.experts.servers import CheckedExperts
from gpu_service.layers.host_layers import HostLayers
from gpu_service.ops.backends import install, uninstall
from gpu_service.ops.host_kernels import dense_threads
from moebius.kernels import supported_isas
from moebius.mailbox import Mailbox, MailboxGeometry
from moebius.models.config import DTypeName, ModelOverrides
from moebius.models.read import read_geometry
from tests.helpers.gguf_models import cached_gguf_files
from tests.helpers.mailbox import served_mailbox
from tests.helpers.paged_runner import Decoding, PagedRunner, load_runner
from tests.helpers.tiny_models import TinyModel, write_tiny_model

PROMPT = [3, 17, 200, 5, 99, 42, 42, 8, 150, 23, 61, 2]
NAMES = (
    "qwen3_vl_moe_fused",  # Norms of heads.
    "glm4_moe",  # Always active experts.
    "gpt_oss",  # Biases, sinks and windows.
    "mixtral",  # Plain.
    "qwen3_next",  # The gated delta rule; gates that queries bring; a gate of always active experts.
    "qwen3_5_moe",  # The same with an output projection that no format holds as it is stored.
    "laguna",  # Gates of heads.
    "minimax_m2",  # Norms over all heads together.
    "deepseek_v3",  # Latent attention with YaRN's temperature.
    "deepseek_v3_whole_kv_b",  # The same without latents of queries.
    "lfm2_moe",  # Short convolutions.
    "jamba",  # Mamba, and attention that does not rotate.
    "granitemoehybrid",  # Mamba-2, what layers add is scaled, and attention does not rotate.
    "granitemoeshared",  # The same scale with rotation.
    "kimi_linear",  # Decays of elements, through a bottleneck; latent attention that does not rotate.
)
# Whose caches may hold 8-bit floats: keys and values with and without norms and rotation, and latents.
STORED_IN_8_BITS = "gpt_oss", "glm4_moe", "granitemoehybrid", "deepseek_v3", "kimi_linear"
# Where runs end, of models some of whose layers are called one by one (latent attention with gates).
ENDS = {"bailing_hybrid": [1, 3]}
# Sizes that both kinds of the family have here.
NEMOTRON_H: dict[str, Any] = {
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_shared_expert_intermediate_size": 128,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 32,
}
# Published as safetensors in bfloat16: what no GGUF file of the tests is written of.
PUBLISHED = {
    # GLM-4.7-Flash, heads that are no multiple of what threads take together.
    "glm4_moe_lite": TinyModel(
        "glm4_moe_lite",
        {
            "num_attention_heads": 10,
            "num_key_value_heads": 10,
            "hidden_size": 64,
            "moe_intermediate_size": 32,
            "head_dim": 16,
            "q_lora_rank": 48,
            "kv_lora_rank": 80,
            "qk_nope_head_dim": 24,
            "qk_rope_head_dim": 16,
            "v_head_dim": 40,
            "num_mtp_layers": 0,
            "n_routed_experts": 8,
            "num_experts_per_tok": 4,
            "n_shared_experts": 1,
            "routed_scaling_factor": 1.8,
            "norm_topk_prob": True,
            "attention_bias": True,
        },
    ),
    # Nemotron 3 Nano: layers are a mixer or a feed-forward block alone, MLPs square a ReLU, nothing rotates.
    "nemotron_h": TinyModel(
        "nemotron_h",
        {
            **NEMOTRON_H,
            "layers_block_type": [
                "linear_attention",
                "moe",
                "full_attention",
                "mlp",
                "linear_attention",
                "full_attention",
                "moe",
            ],
            "moe_latent_size": None,
        },
    ),
    # Nemotron 3 Super: experts in a space of their own, the last layer's, too.
    "nemotron_h_latent": TinyModel(
        "nemotron_h",
        {
            **NEMOTRON_H,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
            "moe_latent_size": 32,
        },
    ),
    # MiniMax-01: Lightning attention, and a stream that becomes what its halves read.
    "minimax": TinyModel(
        "minimax",
        {
            "hidden_size": 64,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "num_hidden_layers": 4,
            "intermediate_size": 32,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "block_size": 4,
            "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
            "full_attn_alpha_factor": 1.5,
            "full_attn_beta_factor": 0.8,
            "linear_attn_alpha_factor": 1.2,
            "linear_attn_beta_factor": 0.9,
            "mlp_alpha_factor": 1.3,
            "mlp_beta_factor": 0.7,
        },
    ),
    # Ling 3: decays of elements with a bound, projected directly, as gates are.
    "bailing_hybrid": TinyModel(
        "bailing_hybrid",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "hidden_size": 64,
            "moe_intermediate_size": 32,
            "head_dim": 32,
            "q_lora_rank": None,
            "kv_lora_rank": 64,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 16,
            "v_head_dim": 16,
            "num_mtp_layers": 0,
            "num_hidden_layers": 4,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "layer_group_size": 2,
            "first_k_dense_replace": 1,
            "kda_lower_bound": -4.0,
        },
    ),
}
# Those with kernels of rows of their own, and what this machine takes.
LEVELS = dict.fromkeys(
    [isa for isa in supported_isas() if isa in ("avx2", "avx512")] + [supported_isas()[-1]]
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`name -> file or directory`, each written once."""
    root = tmp_path_factory.mktemp("checkpoints")
    files = cached_gguf_files(root)

    @cache
    def made(name: str) -> Path:
        if name not in PUBLISHED:
            return files(name).path
        write_tiny_model(PUBLISHED[name], root / name, seed=7).bfloat16().save_pretrained(root / name)
        return root / name

    return made


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The host's kernels at one instruction-set level."""
    monkeypatch.setenv("MOEBIUS_ISA", request.param)
    dense_threads.cache_clear()
    install(torch.device("cpu"), "auto", torch.float32)
    yield
    uninstall("cpu")
    dense_threads.cache_clear()


@contextmanager
def running(checkpoint: Path, dtype: DTypeName) -> Iterator[tuple[PagedRunner, Mailbox]]:
    """A runner whose experts echo."""
    model = read_geometry(checkpoint)
    sizes = model.num_layers, model.hidden_size, model.top_k
    with served_mailbox(MailboxGeometry(*sizes, num_slots=2, max_rows=8, num_servers=2, dtype=dtype)) as box:
        client = CheckedExperts(MailboxExpertClient(box, model, deadline_ms=60_000))
        client.wait_ready(60)
        yield (
            load_runner(
                checkpoint, experts=client, form="packed", overrides=ModelOverrides(dtype=dtype), page_size=16
            ),
            box,
        )


def taken(runner: PagedRunner, inputs: ForwardInputs) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Logits of a step's rows, and copies of all that it may have written."""
    states = [] if runner.states is None else runner.states.tensors()
    for state in states:
        state[inputs.state_writes] = 7
    runner.samples = samples = samples_of(runner)
    logits = runner.compute(inputs)
    chosen = samples.take(inputs)
    assert chosen is not None, "the first step is sampled"
    return logits, [written.clone() for written in (*runner.kv_cache.page_tensors(), *states)] + [chosen]


def samples_of(runner: PagedRunner) -> ChoiceSamples:
    """Returns new samples of a model's layers."""
    layers = {number: layer.router for number, layer in runner.model.config.routed.items()}
    return ChoiceSamples(list(layers), 1 << 20, next(iter(layers.values())).top_k, 8, torch.device("cpu"))


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Returns whether all bytes are the same; torch compares no 8-bit floats."""
    return torch.equal(first.view(torch.uint8), second.view(torch.uint8))


def draft_rows(runner: PagedRunner, sequence: Decoding, count: int) -> ForwardInputs:
    """Returns a step of one request's next token and drafts, each a row, as speculation has them."""
    rows = [replace(sequence, computed=sequence.computed + place) for place in range(count)]
    inputs = runner.inputs([(row, 1) for row in rows])
    if runner.states is None:
        return inputs
    assert inputs.state_reads is not None
    assert inputs.state_writes is not None
    reads = torch.cat((inputs.state_reads[:1], inputs.state_writes[:-1]))
    return replace(inputs, state_reads=reads, depths=make_depths(list(range(count))))


def store_in_8_bits(runner: PagedRunner) -> None:
    """Gives a model an empty cache of 8-bit floats with scales other than 1."""
    layers, kept = runner.model.config.layers, runner.kv_cache
    cache = make_cache(layers, kept.num_pages, kept.page_size, kept.dtype, storage_dtype=E4M3)
    if isinstance(cache, KVCache):
        cache.key_scales, cache.value_scales = [0.75] * cache.num_layers, [0.3] * cache.num_layers
    else:
        assert isinstance(cache, MlaCache)
        cache.scales = [0.3] * cache.num_layers
    runner.kv_cache, runner.attention = cache, make_attention(layers, cache, "cpu")


CASES = [(name, dtype, False) for name in (*NAMES, *PUBLISHED) for dtype in ("bfloat16", "float32")]
CASES += [(name, dtype, True) for name in STORED_IN_8_BITS for dtype in ("bfloat16", "float32")]


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize(("name", "dtype", "in_8_bits"), CASES)
def test_one_call_gives_the_bits_of_many(
    name: str,
    dtype: DTypeName,
    in_8_bits: bool,
    checkpoint: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lengths: list[int] = []
    whole = HostLayers.forward

    def counted(layers: HostLayers, *args: object) -> bool:
        done = whole(layers, *args)  # type: ignore[arg-type]
        lengths.append(layers.end if done else 0)
        return done

    with running(checkpoint(name), dtype) as (runner, _):
        if in_8_bits:
            store_in_8_bits(runner)
        sequences = [runner.prefill(PROMPT[:length])[0] for length in (3, 12, 7)]
        for number, sequence in enumerate(sequences):
            sequence.tokens += [9 + number, 77, 31]
        client = runner.experts
        single, several = runner.inputs([(sequences[1], 1)]), runner.inputs([(one, 1) for one in sequences])
        for inputs in (single, several, draft_rows(runner, sequences[0], 3)):
            calls = client.stats().calls
            monkeypatch.setattr(HostLayers, "forward", lambda *_: False)
            expected, expected_written = taken(runner, inputs)
            monkeypatch.setattr(HostLayers, "forward", counted)
            found, found_written = taken(runner, inputs)
            assert torch.equal(found, expected)
            assert all(map(same_bits, found_written, expected_written))
            assert bool((found_written[-1][0] >= 0).any())
            assert (client.stats().calls - calls) % 2 == 0, "either way counts the same layers"
        # Once a step, unless a layer lies between that no run takes.
        assert lengths == ENDS.get(name, [runner.model.config.num_decoder_layers]) * 3


@pytest.mark.usefixtures("level")
def test_a_lost_server_ends_the_step_which_may_be_run_again(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """A server that is lost raises what `collect` does: the engine waits for it and replays the step."""
    with running(checkpoint("mixtral"), "float32") as (runner, box):
        sequence, _ = runner.prefill(PROMPT)
        sequence.tokens.append(5)
        inputs = runner.inputs([(sequence, 1)])
        expected, _ = taken(runner, inputs)
        box.kernel.accept_generations([12345, 0])
        with pytest.raises(ExpertUnavailable) as caught:
            runner.compute(inputs)
        assert caught.value.server_index == 0
        runner.experts.recover(60)
        found, _ = taken(runner, inputs)
        assert torch.equal(found, expected)
