"""Compiles every Triton kernel of the ops for sm_90; a program of its own, see `compile_triton`."""

from __future__ import annotations

import sys

import torch

from gpu_service.model_config import RouterConfig
from gpu_service.ops.examples import EXAMPLES
from gpu_service.ops.triton.table import IMPLEMENTATIONS
from tests.helpers.compile_triton import SHARED_BYTES, launches_compile, stack_bytes
from tests.helpers.linear_cases import QWEN3_5_LARGE, make_delta_case

# A few values that wait on the stack cost nothing; a tile of them would be read again and again.
STACK_BYTES = 256


def compile_linear_attention() -> None:
    """At the sizes and in the type where a program has the most to hold."""
    case = make_delta_case(QWEN3_5_LARGE, [1, 70], torch.bfloat16)
    IMPLEMENTATIONS["gated_delta_extend"].function(*case)
    taps = torch.zeros(QWEN3_5_LARGE.conv_size, 4, dtype=torch.bfloat16)
    recent = torch.zeros(5, 3, QWEN3_5_LARGE.conv_size, dtype=torch.bfloat16)
    IMPLEMENTATIONS["causal_conv_extend"].function(case.qkv, recent, taps, *case[6:])


def main() -> None:
    """Prints a line per kernel: its name and the bytes of its machine code."""
    device = torch.device("cpu")
    with launches_compile() as compiled:
        for dtype in (torch.bfloat16, torch.float32):
            for name, implementation in IMPLEMENTATIONS.items():
                implementation.function(*EXAMPLES[name](device, dtype))
        slots, key, value, mapping = EXAMPLES["append_kv"](device, torch.bfloat16)
        fp8 = slots.to(torch.float8_e4m3fn)
        IMPLEMENTATIONS["append_kv"].function(fp8, key, value, mapping, 0.5, 2.0)
        _, *fp8_weight = EXAMPLES["fp8_linear"](device, torch.bfloat16)
        IMPLEMENTATIONS["fp8_linear"].function(torch.zeros(64, 200, dtype=torch.bfloat16), *fp8_weight)
        update, residual, weight, eps = EXAMPLES["fused_add_rms_norm"](device, torch.bfloat16)
        IMPLEMENTATIONS["fused_add_rms_norm"].function(update.float(), residual, weight, eps)
        # One key head, one router group, one chunk of logits, heads shared by a program.
        table = IMPLEMENTATIONS["rope_table"].function(torch.arange(64), torch.rand(1), torch.bfloat16, True)
        by_pair = torch.zeros(32, 3, dtype=torch.int64).t()
        IMPLEMENTATIONS["rope_table"].function(by_pair, torch.rand(32), torch.bfloat16, False)
        heads, weight = torch.zeros(64, 2, 4, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.bfloat16)
        IMPLEMENTATIONS["qk_norm_rope"].function(heads, weight, weight, 1e-6, 1, table)
        IMPLEMENTATIONS["apply_rope"].function(heads[:, :1], table)
        logits = torch.zeros(2, 128, dtype=torch.bfloat16)
        for score, post in (("softmax", "renormalize"), ("none", "softmax")):
            config = RouterConfig(128, 8, score, post=post)
            IMPLEMENTATIONS["route"].function(logits, None, config, logits[:, 0] > 0)
        IMPLEMENTATIONS["argmax_and_finite"].function(torch.zeros(1, 7))
        small = len(compiled)
        compile_linear_attention()
    for kernel in compiled:
        print(kernel.metadata.name, len(kernel.asm["cubin"]))
        assert kernel.metadata.shared <= SHARED_BYTES, "more shared memory than there is"
    for kernel in compiled[small:]:
        assert stack_bytes(kernel) <= STACK_BYTES, "values of a tile do not stay in registers"
    sys.exit(0 if compiled else 1)


if __name__ == "__main__":
    main()
