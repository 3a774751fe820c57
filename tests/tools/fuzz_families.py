"""Draws configurations of every family: each agrees with transformers, or is refused with a reason.

    .venv/bin/python -m tests.tools.fuzz_families --configs 1000 [--family mistral]

changes some of a tiny model's sizes and switches at random and compares logits, whole and in chunks, with
experts computed as an expert server does. Prints what was refused and why, and of a failure the seed that
draws it again (--seed N --configs 1), with the fewest changes that show it.
"""

from __future__ import annotations

import argparse
import logging
import random
import re
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import structlog
import torch
import transformers

from gpu_service.experts.local_client import LocalExpertClient
from moebius.checkpoint.errors import CheckpointError
from moebius.models.config import ModelConfigError
from moebius.models.read import read_geometry
from tests.helpers.gguf_models import reference_logits
from tests.helpers.paged_runner import load_runner
from tests.helpers.tiny_models import TINY_MODELS, TinyModel, common_sizes, write_tiny_model

Values = dict[str, Any]
PROMPTS = [[3, 17, 20, 5, 69, 42, 42, 8, 50, 23, 61, 2, 90, 77, 31, 9, 80, 12, 13, 14, 15], [10, 21, 4]]
# Relative to the largest logit: some changes make logits of a hundred.
TOLERANCE = 2e-4

# One value of these replaces a key that the family has.
CHOICES: dict[str, tuple[Any, ...]] = {
    "vocab_size": (97, 128, 130, 333),
    "hidden_size": (24, 32, 40, 64, 72, 96),
    "intermediate_size": (8, 20, 33, 64),
    "moe_intermediate_size": (4, 12, 16, 32, 33, 50),
    "shared_expert_intermediate_size": (8, 24, 33),
    "head_dim": (4, 8, 10, 12, 20, 32, 64),
    "kv_lora_rank": (8, 16, 30),
    "q_lora_rank": (None, 8, 20),
    "qk_nope_head_dim": (4, 8, 16),
    "v_head_dim": (4, 8, 16, 20),
    "rms_norm_eps": (1e-6, 1e-5, 1e-2),
    "max_position_embeddings": (64, 128, 4096),
    "tie_word_embeddings": (False, True),
    "attention_bias": (False, True),
    "qkv_bias": (False, True),
    "mlp_bias": (False, True),
    "use_qk_norm": (False, True),
    "hidden_act": ("silu", "gelu"),
    "sliding_window": (1, 2, 3, 4, 7, 8, 100, None),
    "use_sliding_window": (False, True),
    "max_window_layers": (0, 1, 2),
    "attention_chunk_size": (3, 8, 100),
    "attn_temperature_tuning": (False, True),
    "global_attn_every_n_layers": (1, 2, 3),
    "index_topk": (2, 4, 8, 64),
    "clip_qkv": (None, 0.5),
    "final_logit_softcapping": (None, 2.0),
    "attention_value_scale": (None, 0.5),
    "partial_rotary_factor": (0.25, 0.5, 1.0),
    "rope_interleave": (False, True),
    "norm_topk_prob": (False, True),
    "topk_method": ("greedy", "group_limited_greedy"),
    "routed_scaling_factor": (0.5, 1.0, 3.0),
    "route_scale": (1.0, 2.0),
    "router_scaling_factor": (1.0, 2.0),
    "first_k_dense_replace": (0, 1, 2),
    "num_dense_layers": (0, 1, 2),
    "mlp_only_layers": ([], [0], [0, 1]),
    "decoder_sparse_step": (1, 2, 3),
    "moe_layer_interval": (1, 2),
    "interleave_moe_layer_step": (1, 2),
    "n_shared_experts": (1, 2, 4),
    "num_shared_experts": (1, 2, 4),
    "zero_expert_num": (0, 1, 3),
    "swiglu_limit": (0.5, 7.0),
    "linear_conv_kernel_dim": (2, 3, 4),
    "linear_num_key_heads": (1, 2, 4),
    "linear_num_value_heads": (2, 4, 8),
    "conv_kernel": (2, 3, 4),
    "mamba_d_conv": (2, 3, 4),
    "mamba_d_state": (4, 16),
    "mamba_n_groups": (1, 2, 4),
    "ssm_state_size": (4, 16),
    "residual_multiplier": (0.5, 1.0),
    "embedding_multiplier": (1.0, 3.0),
    "logits_scaling": (1.0, 2.0),
    "attention_multiplier": (0.1, 0.3),
    "mup_enabled": (False, True),
}


def _heads(draw: random.Random, values: Values) -> Values:
    kv_heads = draw.choice([1, 2, 3, 4])
    heads = kv_heads * draw.choice([1, 2, 3, 4])
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": heads if "kv_lora_rank" in values else kv_heads,
    }


def _layers(draw: random.Random, values: Values) -> Values:
    """Fewer or more, or others in another order; lists that are no kinds of layers belong to their places."""
    count = values["num_hidden_layers"]
    lists = {key for key, value in values.items() if isinstance(value, list) and len(value) == count}
    kinds = {key for key in lists if key.endswith("_types")}
    if lists == kinds:
        count = draw.choice([count, 1, 2, 3, 4, 5, 6])
    elif "partial_rotary_factors" in lists:  # they are by kind
        return {}
    return {"num_hidden_layers": count} | {key: draw.choices(values[key], k=count) for key in sorted(kinds)}


def _experts(draw: random.Random, values: Values) -> Values:
    names = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
    total = next((name for name in names if name in values), None)
    chosen = next(
        (name for name in ("num_experts_per_tok", "moe_k", "top_k_experts") if name in values), None
    )
    if total is None or chosen is None:
        return {}
    groups = draw.choice([1, 1, 2, 3]) if "n_group" in values else 1
    top_groups, size = draw.randint(1, groups), draw.choice([2, 3, 4, 5, 8])
    changes = {total: groups * size, chosen: draw.randint(1, top_groups * size)}
    return changes | ({"n_group": groups, "topk_group": top_groups} if "n_group" in values else {})


def _rope(draw: random.Random, values: Values) -> Values:
    former = values.get("rope_parameters") or {}
    if "rope_theta" in values or any(isinstance(value, dict) for value in former.values()):
        return {}
    scaling: Values = draw.choice(
        [
            {"rope_type": "default"},
            {"rope_type": "linear", "factor": draw.choice([2.0, 4.0])},
            {"rope_type": "dynamic", "factor": 2.0},
            {
                "rope_type": "yarn",
                "factor": draw.choice([2.0, 8.0]),
                "original_max_position_embeddings": draw.choice([16, 64]),
                **draw.choice([{}, {"beta_fast": 16.0, "beta_slow": 2.0}, {"attention_factor": 1.3}]),
                **draw.choice([{}, {}, {"truncate": False}]),
            },
            {
                "rope_type": "llama3",
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        ]
    )
    kept = {key: former[key] for key in ("mrope_section", "partial_rotary_factor") if key in former}
    return {"rope_parameters": scaling | {"rope_theta": draw.choice([100.0, 10000.0, 1e6])} | kept}


def _choice(draw: random.Random, values: Values) -> Values:
    key = draw.choice([key for key in CHOICES if key in values])
    return {key: draw.choice(CHOICES[key])}


CHANGES: tuple[Callable[[random.Random, Values], Values], ...] = (_heads, _layers, _experts, _rope)


def drawn(draw: random.Random, tiny: TinyModel) -> Values:
    """Returns what differs from the tiny model."""
    values = common_sizes(tiny)
    changes: Values = {}
    for change in [*draw.sample(CHANGES, draw.randint(0, 2)), *[_choice] * draw.randint(1, 6)]:
        changes |= change(draw, values | changes)
    rope = (values | changes).get("rope_parameters") or {}
    if rope.get("rope_type") == "longrope":
        # Which factors count follows from the length that is served (docs/checkpoints.md), not a prompt's.
        changes.pop("max_position_embeddings", None)
    return {key: value for key, value in changes.items() if values.get(key) != value}


def outcome(tiny: TinyModel, seed: int) -> tuple[str, str]:
    """`agrees`, `refused`, `impossible` (in transformers) or `FAILED`, and why."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        try:
            reference = write_tiny_model(tiny, directory, seed=seed)
            expected = [reference_logits(reference, prompt) for prompt in PROMPTS]
            assert all(bool(logits.isfinite().all()) for logits in expected), "infinite logits"
        except Exception as error:
            return "impossible", f"{type(error).__name__}: {error}"
        try:
            experts = LocalExpertClient(name, read_geometry(directory), torch.float32)
            runner = load_runner(directory, experts=experts)
        except (CheckpointError, ModelConfigError) as error:
            return "refused", str(error).replace(name, "")
        except Exception:
            return "FAILED", traceback.format_exc()
        for prompt, wanted in zip(PROMPTS, expected, strict=True):
            for chunk in (None, 4):
                error_ = (
                    runner.prefill(prompt, chunk=chunk)[1] - wanted
                ).abs().max() / wanted.abs().max().clamp(1.0)
                if not error_ < TOLERANCE:
                    return "FAILED", f"logits differ by {error_:.1e} of the largest, in chunks of {chunk}"
    return "agrees", ""


def fewest(tiny: TinyModel, changes: Values, seed: int) -> Values:
    """Changes without which it would not fail."""
    for key in list(changes):
        rest = {other: value for other, value in changes.items() if other != key}
        if outcome(replace(tiny, changes=tiny.changes | rest), seed)[0] == "FAILED":
            changes = rest
    return changes


def main() -> int:
    """Draws the configurations; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--configs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="of the first one; each next one has the next")
    parser.add_argument(
        "--family", default="", help="a regular expression that the tiny model's name contains"
    )
    settings = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    names = [name for name in sorted(TINY_MODELS) if re.search(settings.family, name)]
    tally: Counter[str] = Counter()
    for seed in range(settings.seed, settings.seed + settings.configs):
        name, draw = names[seed % len(names)], random.Random(seed)
        tiny = TINY_MODELS[name]
        changes = drawn(draw, tiny)
        found, why = outcome(replace(tiny, changes=tiny.changes | changes), seed)
        tally[found] += 1
        if found == "FAILED":
            print(
                f"FAILED: --seed {seed} --configs 1 ({name}): {fewest(tiny, changes, seed)}\n{why}",
                flush=True,
            )
        elif found == "refused":
            print(f"refused: {name} (seed {seed}): {why}", flush=True)
    print(dict(tally))
    return int(tally["FAILED"] > 0)


if __name__ == "__main__":
    sys.exit(main())
