"""Every tolerance of the test suite in one place; absolute unless said otherwise."""

from __future__ import annotations

# Logits of our float32 model against transformers' float32 model (random weights, |logit| up to ~10).
LOGITS_FLOAT32_VS_TRANSFORMERS = 1e-4

# Logits of the same float32 model along two ways of computing the same step (chunking, batching, reuse).
LOGITS_FLOAT32_SELF = 2e-5

# Attention of random normal inputs in bfloat16 against the same in float32.
ATTENTION_BFLOAT16 = 2e-2

# Routing weights and single ops in float32 against transformers' modules.
OP_FLOAT32 = 2e-6

# Mean error of our bfloat16 logits over transformers' mean error, both against float32 (a ratio; the
# largest seen on the tiny models is 1.26).
BFLOAT16_ERROR_RATIO = 1.5
