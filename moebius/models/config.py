"""What the model is, independent of how its checkpoint spells it.

A `ModelConfig` is made once from a checkpoint's `config.json` (`read.read_model_config`) and never holds an
object of another library. The modules in `families` know the key names of each family; everything downstream
reads only the fields below, which are also the switches by which `gpu_service.models` composes the layers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from moebius.models.attention_config import (
    BlockIndexerConfig,
    CompressedAttentionConfig,
    ExpertKindsConfig,
    HyperConnectionConfig,
    MlaConfig,
    NGramConfig,
    NormedResidualConfig,
)
from moebius.models.errors import ModelConfigError as ModelConfigError
from moebius.models.layers.layer import Layer
from moebius.models.layers.of_config import layers_of

ScoreFunction = Literal["softmax", "sigmoid", "sqrt_softplus", "sparse_mixer", "none"]
GroupScore = Literal["max", "top2_sum"]
RouterPost = Literal["none", "renormalize", "softmax", "sigmoid", "sigmoid_renormalize"]
GateActivation = Literal["sigmoid", "softplus"]
DTypeName = Literal["float32", "bfloat16", "float16"]
LayerHalf = Literal["attention", "mlp"]

# Bytes of an element.
DTYPE_BYTES: Mapping[DTypeName, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
# Positions of a token with mRoPE: time, height, width.
NUM_AXES = 3


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding; filled by `rope.read_rope`."""

    theta: float
    rotary_dim: int  # Leading elements of each head that are rotated; the rest pass through.
    interleaved: bool = False  # False: element j pairs with j + rotary_dim/2. True: pairs are (2j, 2j+1).
    # A key of `rope.ROPE_SCALINGS`, and the numbers that kind needs.
    scaling_kind: str = "default"
    scaling: tuple[tuple[str, float], ...] = ()
    # LongRoPE: what each pair's frequency is divided by where no sequence is longer than the original length,
    # and where some may be; empty: nothing.
    pair_factors: tuple[tuple[float, ...], ...] = ()
    # Cosines and sines are multiplied by it (YaRN, LongRoPE), and so every score by its square.
    attention_factor: float = 1.0
    # mRoPE: how many pairs turn by the time, the height and the width of a token; empty: all by one position.
    mrope_sections: tuple[int, ...] = ()
    # False: sections follow one another. True: pairs alternate between the three, the rest is time.
    mrope_interleaved: bool = False
    # Pairs of height and width alternate first, those of time follow.
    mrope_time_last: bool = False
    # Whether pairs' frequencies are multiplied by exponentials of learned numbers.
    learned: bool = False
    # Queries at position p are multiplied by `1 + query_growth * ln(1 + floor(p / query_growth_length))`.
    query_growth: float = 0.0
    query_growth_length: float = 1.0


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """One point of the router space that all families share; see `ops.router.route`."""

    num_experts: int
    top_k: int
    score: ScoreFunction
    # A bias added to the scores for the selection only; the weights stay unbiased.
    correction_bias: bool = False
    num_groups: int = 1
    top_groups: int = 1
    group_score: GroupScore = "top2_sum"
    post: RouterPost = "none"  # What becomes of the scores of the chosen, which then weigh them.
    # Added to the sum before dividing by it (GLM and DeepSeek: 1e-20).
    renormalize_epsilon: float = 0.0
    scale: float = 1.0
    float32_gate: bool = False  # Whether the gate matmul runs in float32 whatever the model's dtype.
    gate_bias: bool = False  # Whether the gate adds a bias to its logits.
    # The logits become `logit_softcap * tanh(logits / logit_softcap)` before they are scored; 0: they do not.
    logit_softcap: float = 0.0
    # Whether a checkpoint may have no correction bias, which then is zero.
    correction_bias_may_be_missing: bool = False
    # Of the score "sparse_mixer": how far below the best, relative to the larger of both, a logit counts.
    mixer_width: float = 0.0
    # Whether the checkpoint stores the correction bias as one row of a matrix.
    correction_bias_is_row: bool = False
    # Whether what an expert weighs is multiplied by a learned factor of its own, last.
    expert_scales: bool = False
    # Whether what an expert reads is multiplied by its weight, not what it answers; with one expert a token.
    weighs_inputs: bool = False
    # Choices after the experts' that have no weights: their answer is what they are given.
    num_zero_experts: int = 0

    @property
    def num_choices(self) -> int:
        """Returns what the gate scores: experts with weights, and those without."""
        return self.num_experts + self.num_zero_experts


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """The mixture-of-experts blocks; filled by the family's reader."""

    router: RouterConfig
    intermediate_size: int
    # Width of the always-active experts taken together; 0 when the family has none.
    shared_intermediate_size: int
    layers: frozenset[int]  # Indices of the layers that are MoE; all others have a dense MLP.
    # Whether the always-active experts' sum is multiplied by the sigmoid of a gate, per token.
    shared_gate: bool = False
    # Whether the checkpoint stores the gate and the up matrix of the always-active experts as one.
    shared_fused: bool = False
    # What routed experts compute between their matrices: an activation of kernels/gemm/gemm.h, and, of
    # those that have them, the sigmoid's slope and where gate and up are clamped.
    expert_activation: str = "silu"
    expert_alpha: float = 1.702
    expert_limit: float = 7.0
    # Where the routed experts of each decoder layer clamp instead; infinite: they do not; empty:
    # `expert_limit` in all.
    expert_limits: tuple[float, ...] = ()
    expert_bias: bool = False  # Whether routed experts' projections have biases.
    # What the sum of routed and always-active experts is multiplied by.
    output_scale: float = 1.0
    # Elements of the space that routed experts work in, between two projections that all of them share;
    # 0: the hidden size.
    latent_size: int = 0
    # Whether router and routed experts read the residual stream under norms of their own, and both their sum
    # and that of the always-active experts are normed before they are added.
    own_norms: bool = False
    # Layers where a token's id alone chooses its experts, by a table of the checkpoint; all others route.
    hash_layers: frozenset[int] = frozenset()
    # None: one kind of experts. Else `router` counts parts of them, which its score and its weighing concern.
    kinds: ExpertKindsConfig | None = None

    def with_top_k(self, top_k: int) -> MoeConfig:
        """Returns the same configuration where a token chooses `top_k` experts."""
        if self.kinds is None:
            return replace(self, router=replace(self.router, top_k=top_k))
        kinds = replace(self.kinds, top_k=top_k)
        return replace(self, router=replace(self.router, top_k=kinds.most_parts), kinds=kinds)


@dataclass(frozen=True, slots=True)
class LinearAttentionConfig:
    """Layers of gated delta rule, whose state is of fixed size per request; filled by the family's reader."""

    num_key_heads: int
    # A multiple of the key heads: each of those serves as many consecutive value heads.
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_width: int  # Tokens that the causal convolution before the recurrence sees, the newest included.
    layers: frozenset[int]  # Indices of these layers; all others attend.
    # Whether one matrix makes queries, keys, values and gates, its rows grouped by key head.
    interleaved: bool = False
    # Mamba-2 instead of the delta rule: B and C of each group are its key head's, x is the values.
    state_space: bool = False
    # Kimi Delta Attention (arXiv:2510.26692): each element of a key has a decay, not only each head. As many
    # key heads as value heads.
    channel_decay: bool = False
    # Whether these decays, and the gates of the outputs, come directly from the hidden states; False: through
    # a bottleneck of one head's width.
    direct_gates: bool = False
    # Of such decays: a token's logarithm lies between this and 0; None: it has no bound.
    decay_bound: float | None = None
    # Whether the checkpoint stores `A_log` as `[1, 1, heads, 1]`.
    decay_has_axes: bool = False
    # Whether the outputs' gates are sigmoids; False: SiLU.
    sigmoid_gates: bool = False
    # Mamba instead of the delta rule, whose every channel is a head with a value of one element: width of the
    # bottleneck that their steps come through. 0: another one.
    step_rank: int = 0
    # No recurrence, only a convolution between two gates, whose every channel is a head with a value of one
    # element and without a key (`key_head_dim` 0): LFM2.
    short_conv: bool = False
    # Lightning attention: no convolution (`conv_width` 1), and heads that forget at rates that follow from
    # their numbers and their layer's.
    fixed_decay: bool = False


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """What the engine has to know of a vision tower; filled by the family's `VisionFamily.read`.

    The tower itself is composed from `vision_config` by `gpu_service.models.vision`.
    """

    image_token_id: int  # The token that stands for images in a prompt.
    merge_size: int  # Patches along each side of what becomes one token.
    patch_size: int  # Height and width of a patch, pixels.
    # Widths of the tower: its residual stream and the intermediate size of its MLPs.
    hidden_size: int
    intermediate_size: int
    tile_size: int = 0  # Pixels along each side of all that the tower reads at a time; 0: any size.
    # Tokens around an image that the prompt has from its processor; None: it has none, or finds them by name.
    start_token_id: int | None = None
    end_token_id: int | None = None
    # Whether the tokens of an image see one another, also the later ones, in layers with a window.
    sees_ahead: bool = False


@dataclass(frozen=True, slots=True)
class MtpConfig:
    """Layers of multi-token prediction that are served; filled by `mtp.with_heads`.

    They are the last of `ModelConfig.num_layers`: each is a decoder layer of the model, with a cache and
    experts of its own, before which the hidden state of a token and the embedding of the next one are made
    one. See `gpu_service.layers.mtp`.
    """

    num_heads: int
    # Whether the projection reads the hidden state first; False: the embedding.
    hidden_first: bool = False


@dataclass(frozen=True, slots=True)
class ModelOverrides:
    """What the user may change about a checkpoint; filled from `MoebiusConfig`."""

    top_k: int | None = None
    max_model_len: int | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    language_model_only: bool = False  # Whether a vision tower is left out.
    # Heads of multi-token prediction that are served at most; 0: none is loaded.
    mtp_heads: int = 0


@dataclass(frozen=True)
class ModelConfig:
    """Filled by `read.read_model_config`; sizes in elements, lengths in tokens."""

    model_type: str
    vocab_size: int
    hidden_size: int
    # Width of the dense MLP layers.
    intermediate_size: int
    num_layers: int  # Decoder layers, and after them those of `mtp`.
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    activation: str
    rope: (
        RopeConfig | None
    )  # None: no layer rotates anything; order is what linear attention and masks leave.
    moe: MoeConfig
    dtype: DTypeName
    max_model_len: int  # Longest prompt + output: the checkpoint's, or the smaller override.
    # Whether queries and keys are normed: each head by itself, or all heads together with
    # `qk_norm_full_width`; before they are rotated, or after with `qk_norm_after_rope`.
    qk_norm: bool = False
    qk_norm_full_width: bool = False
    qk_norm_after_rope: bool = False
    # Whether queries and keys of layers that rotate are divided by their root mean square afterwards, before
    # a `qk_norm_after_rope`.
    unit_qk_norm: bool = False
    # Of layers that do not rotate: queries at position p are multiplied by
    # `1 + growth * ln(1 + floor((p + 1) / length))`.
    unrotated_query_growth: float = 0.0
    unrotated_query_growth_length: float = 1.0
    # Whether the checkpoint's norms hold their weight less 1 (not those inside linear attention).
    one_plus_weight_norms: bool = False
    # Whether the projections before attention have biases, and the one after it.
    attention_bias: bool = False
    output_bias: bool = False
    # Whether norms also take off the mean (LayerNorm), and whether they then have biases.
    mean_norms: bool = False
    norm_bias: bool = False
    # Whether the attention's result is weighed by a gate: one for each element, which the query projection
    # makes besides (`output_gate`) or which has a projection of its own (`element_gate`), or one for each
    # head with a projection of its own (`head_gate`); and what turns it into a weight.
    output_gate: bool = False
    element_gate: bool = False
    head_gate: bool = False
    gate_activation: GateActivation = "sigmoid"
    # Whether what either half of a layer adds to the residual stream is normed first.
    output_norms: bool = False
    # Whether, instead, only what experts add is: the second half of MoE layers.
    moe_output_norms: bool = False
    # Whether either half of a layer norms what it reads of the residual stream.
    input_norms: bool = True
    embedding_scale: float = 1.0  # What the tokens' embeddings are multiplied by,
    # and whether that is rounded to the type that the model is computed in, whichever that is.
    rounds_embedding_scale: bool = False
    residual_scale: float = 1.0  # What either half of a layer adds is multiplied by this first.
    logit_scale: float = 1.0  # What the logits are multiplied by.
    # Which half each layer is, where layers are one only; linear attention counts as "attention". Empty: all
    # layers have both.
    layer_halves: tuple[LayerHalf, ...] = ()
    # Whether a layer attends twice, each time with a dense MLP after it, and its experts read what the first
    # of these reads and are added at its end (LongCat).
    shortcut_experts: bool = False
    # None: what a half reads is only read. Else its norm takes the stream's place.
    normed_residuals: NormedResidualConfig | None = None
    # Whether both halves of a layer read the same norm of the stream, and are added together.
    parallel_halves: bool = False
    # Factor of the attention scores; None: that of the head's size.
    attention_scale: float | None = None
    # Per layer, the latest positions that a query sees, or None for all; empty: every layer sees all.
    attention_windows: tuple[int | None, ...] = ()
    # Per layer, positions of a chunk, of which a query sees its own up to itself, or None; empty: no layer
    # has chunks. A layer with a window has none.
    attention_chunks: tuple[int | None, ...] = ()
    # Query heads of each layer, where layers differ; `num_heads` is the largest; empty: it is all layers'.
    layer_num_heads: tuple[int, ...] = ()
    # Rotary embedding of each layer, where layers differ, None where nothing is rotated; empty: `rope` is all
    # layers'.
    layer_ropes: tuple[RopeConfig | None, ...] = ()
    # Where each layer's dense MLP or shared experts clamp gate and up; infinite, or no list: they do not.
    mlp_limits: tuple[float, ...] = ()
    # Whether each query head has a learned logit that joins its softmax's sum and has no value; and in which
    # layers, where not in all.
    attention_sinks: bool = False
    sink_layers: tuple[bool, ...] = ()
    # Key and value heads of each layer, and elements of a head, where layers differ; `num_kv_heads` and
    # `head_dim` are the largest; empty: they are all layers'.
    layer_kv_heads: tuple[int, ...] = ()
    layer_head_dims: tuple[int, ...] = ()
    # Elements of a value where it has fewer than a key; the cache holds zeros for the rest.
    value_head_dim: int | None = None
    value_scale: float = 1.0  # What values are multiplied by.
    # Where queries, keys and values are cut off, after norms and before rotation; infinite: nowhere.
    qkv_limit: float = math.inf
    value_norm: bool = False  # Whether each value is divided by its root mean square.
    # Whether a layer's values are its keys before their norm, without a projection; empty: nowhere.
    keys_as_values: tuple[bool, ...] = ()
    # The head's logits become `final_logit_softcap * tanh(logits / final_logit_softcap)`; 0: they do not.
    final_logit_softcap: float = 0.0
    layer_scales: bool = (
        False  # Whether each layer ends by multiplying the residual stream by a learned number.
    )
    head_bias: bool = False  # Whether the head adds a bias.
    # Whether the head is the embedding: what the checkpoint says, unless it stores another head.
    tie_word_embeddings: bool = False
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    # Layers of multi-token prediction that the checkpoint says it has, and those of them that are served;
    # None: the loader skips all.
    num_mtp_layers: int = 0
    mtp: MtpConfig | None = None
    # None: grouped-query attention. Else `num_kv_heads` is `num_heads`, and `head_dim` a query's.
    mla: MlaConfig | None = None
    block_indexer: BlockIndexerConfig | None = None  # None: no layer chooses blocks of tokens.
    vision: VisionConfig | None = None  # None: the model is text-only, or is served without its tower.
    linear: LinearAttentionConfig | None = None  # None: every layer attends.
    # None: no layer compresses what it attends to. Else `num_kv_heads` is 1, and the window is here.
    compressed: CompressedAttentionConfig | None = None
    hyper: HyperConnectionConfig | None = None  # None: layers add to one residual stream.
    ngram: NGramConfig | None = None  # None: no layer embeds n-grams.
    # What is read otherwise than another reader of config.json does; logged.
    remarks: tuple[str, ...] = field(default=(), compare=False)
    # Keys of config.json that nothing here reads; logged, so that nothing is ignored in silence.
    unread_keys: tuple[str, ...] = field(default=(), compare=False)

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """Returns what the model is, layer by layer; raises ModelConfigError for what no layer can be."""
        return layers_of(self)

    @property
    def dtype_bytes(self) -> int:
        """Bytes of an element of dense weights, activations and KV."""
        return DTYPE_BYTES[self.dtype]

    @property
    def num_mtp_heads(self) -> int:
        """Layers of multi-token prediction that are served."""
        return 0 if self.mtp is None else self.mtp.num_heads

    @property
    def num_decoder_layers(self) -> int:
        """Layers that every token passes; those of multi-token prediction are numbered after them."""
        return self.num_layers - self.num_mtp_heads

    @property
    def stream_size(self) -> int:
        """Elements of a token between two layers."""
        return self.hidden_size * (1 if self.hyper is None else self.hyper.num_streams)

    @property
    def has_mrope(self) -> bool:
        """Returns whether a token has positions in time, height and width."""
        return self.rope is not None and bool(self.rope.mrope_sections)

    @cached_property
    def softmax_scale(self) -> float:
        """Factor of the attention scores."""
        if self.mla is not None:
            return self.mla.softmax_scale
        if self.attention_scale is not None:
            return self.attention_scale
        return float(self.head_dim**-0.5)

    @cached_property
    def moe_layer_ids(self) -> tuple[int, ...]:
        """MoE layers, ascending."""
        return tuple(sorted(self.moe.layers))

    def is_moe_layer(self, layer_id: int) -> bool:
        """Returns whether the layer routes to experts (else: dense MLP)."""
        return layer_id in self.moe.layers
