"""Every tolerance of the test suite in one place; absolute unless said otherwise."""

from __future__ import annotations

import torch

# Logits of our float32 model against transformers' float32 model (random weights, |logit| up to ~10).
LOGITS_FLOAT32_VS_TRANSFORMERS = 1e-4

# Logits of the same float32 model along two ways of computing the same step (chunking, batching, reuse).
# Latent attention, absorbed in one and written out in the other, reaches 2.2e-5; all else stays below 2e-5,
# but for a gated delta rule with AVX2's products, whose sums have fewer lanes: 4.02e-5.
LOGITS_FLOAT32_SELF = 6e-5

# Attention of random normal inputs in bfloat16 against the same in float32.
ATTENTION_BFLOAT16 = 2e-2

# Routing weights and single ops in float32 against transformers' modules.
OP_FLOAT32 = 2e-6

# Mean error of our bfloat16 or float16 logits over transformers' mean error in the same type, both against
# float32. Over the tiny models the ratio is 0.96 on average in bfloat16 and 0.98 in float16; a router that
# turns on one rounding has moved one model's to 1.53.
HALF_ERROR_RATIO = 1.75

# GEMMs of float32 rows against the unpacked weights in float64; the norm of the difference over the norm.
GEMM_FLOAT32 = 1e-5

# W8A8 GEMMs, whose sums are exact, against float64; the largest difference over the largest value.
GEMM_INT8 = 3e-7

# Activations in float32 against float64, relative to each value.
ACTIVATION_FLOAT32 = 5e-6

# Expert layers against float64, over the largest wanted magnitude: float32 throughout.
EXPERTS_FLOAT32 = 1e-5

# Root mean square over that of the wanted values: bfloat16 rows, the activation rounded to bfloat16, which
# costs 1.65e-3 on average; a few rows of narrow experts can lie above, but not above the largest step.
EXPERTS_BFLOAT16 = 2e-3
EXPERTS_BFLOAT16_FEW_ROWS = 3.9e-3

# The same for W8A8, rows and activations rounded to 127 steps each: against exact rows, and against rows
# rounded likewise in float64 (where a value between two steps may fall to the other side).
EXPERTS_W8A8 = 3e-2
EXPERTS_W8A8_STEPS = 2e-3

# GEMMs of bfloat16 rows against the same rows and exact weights in float64; the norm of the difference
# over the norm. Only float32 sums round (and vdpbf16ps flushes what is subnormal).
GEMM_BFLOAT16 = 5e-6
# The same where tiles hold weights as two bfloat16, which is within 2^-17 of each.
GEMM_TWO_PARTS = 8e-6
# The same where each 32 values of a row are integers of 15 bits: one below 1/128 of the largest is rounded
# (2.7e-5 was seen of 33 values, a sixtieth of what rounding the activation to bfloat16 costs).
GEMM_SPLIT = 3e-5

# Norm of a row's error over its expected norm, from independent roundings to first order
# (tests/helpers/weight_golden.py). Few of them may fall the same way, and those of x reach gate and up alike.
ROUNDING_SPREADS = 3.0

# Float32 sums over experts in another order or in parts, over the largest wanted magnitude.
EXPERTS_SUMMED_APART = 2e-6

# Share of tokens that choose an expert of a random model's router, simulated again, against the law it was
# fitted to: two simulations of 4096 and 8192 tokens, and the first experts held below 1.
ROUTER_SHARES_FITTED = 0.06

# One op computed in float32 and rounded once or twice, relative to the value: some units in the last place.
OP_ROUNDINGS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}

# Attention of random normal inputs in float16 against float64 (the largest seen is 1.5e-3).
ATTENTION_FLOAT16 = 4e-3

# Log-probabilities of the same float32 model on one rank and on several, whose partial sums are added.
LOGITS_FLOAT32_RANKS = 5e-5

# Latent attention in float32 against plain attention in float64; latents pass two more GEMMs.
MLA_FLOAT32 = 5e-5

# Resident experts by Triton kernels in float32 against the torch reference, over the largest magnitude.
RESIDENT_FLOAT32 = 4e-6

# The same with bfloat16 rows on a GPU, against the reference in float32 on the same rows: the root mean
# square of the error over that of the wanted values. Intermediate channels are rounded to bfloat16 once,
# and weights of most formats where tiles multiply them: 5.5e-3 was seen with 72 inputs.
RESIDENT_BFLOAT16 = 6e-3
# The same in float16; rows rounded to bfloat16 would give 2e-3 to 6e-3.
RESIDENT_FLOAT16 = 1e-3

# Attention of random normal inputs over 8-bit keys and values against exact ones, in float64 (the largest
# seen is 0.125, where few keys are attended to).
ATTENTION_FP8 = 0.25

# Mean KL divergence, nats, of next-token distributions with 8-bit KV pages from those with float32 pages.
# Tiny random models are peaked and change experts at a touch: 0.002 to 0.2 were seen.
LOGITS_FP8_KV_KL = 0.3

# Latent attention in bfloat16 against plain attention in float64: the absorbed query and the latent result
# are rounded once more than plain queries and values.
MLA_BFLOAT16 = 4e-2

# Log-probabilities on one GPU and on several in float32: GEMMs may round to TF32 inside.
LOGPROBS_FLOAT32_RANKS_GPU = 5e-3

# Resident experts in float32 on a GPU against the reference: tensor cores are not used, only sums differ.
RESIDENT_GPU_FLOAT32 = 1e-5

# Weights dequantised in float32 against what the encoders say they mean, relative: products round once more.
DEQUANTISED_FLOAT32 = 5e-7

# Between the last index score that sparse attention chooses and the first that it does not: tiny models whose
# gaps are smaller could choose otherwise on another machine. Scores of random weights reach 1.
INDEX_SCORE_GAP = 1e-4

# Index scores of random bfloat16 inputs, summed in float32 over 64 heads to some hundreds, against float64.
INDEX_SCORES_BFLOAT16 = 1e-2

# Perplexity of a float32 model against transformers' own, relative.
VERIFY_PERPLEXITY = 1e-4

# GGUF types that no packed format holds are rounded to bfloat16 when packed, 8 bits: relative, of the weights
# and of what experts compute with them.
EXPERTS_GGUF_BFLOAT16 = 5e-3

# Bytes of a plan against the real ones, where only headers or a running process could tell exactly, relative.
PLANNED_BYTES = 0.03
# Parameters of published shapes against the rounded numbers their makers state, relative.
STATED_PARAMETERS = 0.015

# GEMMs with fp8 weights scaled group by group against dequantised and rounded ones, per root of the
# columns; values are of order 1 (float16 rounds weights and results once each).
FP8_LINEAR = {torch.float32: 2e-6, torch.float16: 2e-3}

# Families on a GPU, log-probabilities of their answers (tests/helpers/family_answers.py). Float32: the median
# difference to the CPU's; 4e-6 was seen between two ways on a CPU.
FAMILY_FLOAT32_LOGPROBS = 3e-4
# Bfloat16: error against the float32 reference over that of the CPU's own bfloat16 path on the same tokens.
# With weights shaken by their rounding, which turns routers elsewhere, medians reached 1.7 and means 2.3.
FAMILY_BFLOAT16_MEDIAN_RATIO = 2.5
FAMILY_BFLOAT16_MEAN_RATIO = 5.0
# In float16 one choice of experts that turns stands out of errors that are eight times smaller: the mean's
# ratio was 5.1 in one of 13 cases on an H200 (from one token of one answer on), where the median's was 1.4.
FAMILY_FLOAT16_MEAN_RATIO = 10.0
# On several ranks in bfloat16 against one, median difference of log-probabilities; 0.026 was seen on a CPU.
FAMILY_BFLOAT16_RANKS_MEDIAN = 0.08

# Cosines and sines of float32 angles, made by different libraries; values of up to 1.3.
ROPE_TABLE_FLOAT32 = 2e-6

# A mixed step of the gated delta rule against the recurrence token by token in float64, values and states of
# about 1. Narrow products round states and changes once per chunk.
DELTA_RULE = {torch.float32: 2e-5, torch.float16: 5e-3}

# The same at real sizes on a GPU: the root mean square of the error over that of the wanted values. bfloat16
# emulated on a CPU reached 3.5e-3, and 4.7e-3 of states after the same token again and again.
DELTA_RULE_GPU = {torch.float32: 1e-5, torch.bfloat16: 8e-3}
