"""What the config.json of several families have in common, in the same keys."""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from moebius.models.config import DTypeName, ModelConfig
from moebius.models.keys import HfKeys
from moebius.models.layers.ffn import Dense, Experts, FeedForward, MoE
from moebius.models.layers.gqa import GQA, Window
from moebius.models.layers.layer import Layer
from moebius.models.layers.mixer import Mixer
from moebius.models.layers.norms import Norm, RMSNorm
from moebius.models.layers.residual import Residual, Sequential
from moebius.models.layers.rope import RopeConfig
from moebius.models.layers.router import RouterConfig

# What gates the MLPs, by the name that checkpoints use; a model has one for dense layers and experts.
_ACTIVATIONS = ("silu",)

# Keys that say nothing about the function the model computes at inference.
_HARMLESS = (
    "architectures",
    "attention_dropout",
    "auto_map",
    "initializer_range",
    "max_window_layers",
    "output_router_logits",
    "pad_token_id",
    # Of routed experts, which are not read here; the loader refuses dense weights that are not floats.
    "quantization_config",
    "router_aux_loss_coef",
    "transformers_version",
    "use_cache",
)

# What transformers 4 writes into nested configurations besides: settings of its own `generate` and of tasks.
_OF_GENERATE = (
    "_name_or_path",
    "add_cross_attention",
    "bad_words_ids",
    "begin_suppress_tokens",
    "chunk_size_feed_forward",
    "cross_attention_hidden_size",
    "decoder_start_token_id",
    "diversity_penalty",
    "do_sample",
    "early_stopping",
    "encoder_no_repeat_ngram_size",
    "exponential_decay_length_penalty",
    "finetuning_task",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "id2label",
    "is_decoder",
    "is_encoder_decoder",
    "label2id",
    "length_penalty",
    "max_length",
    "min_length",
    "no_repeat_ngram_size",
    "num_beam_groups",
    "num_beams",
    "num_return_sequences",
    "output_attentions",
    "output_hidden_states",
    "output_scores",
    "prefix",
    "problem_type",
    "pruned_heads",
    "remove_invalid_values",
    "repetition_penalty",
    "return_dict",
    "return_dict_in_generate",
    "sep_token_id",
    "suppress_tokens",
    "task_specific_params",
    "temperature",
    "tf_legacy_loss",
    "tie_encoder_decoder",
    "tokenizer_class",
    "top_k",
    "top_p",
    "torchscript",
    "typical_p",
    "use_bfloat16",
)

# Keys of relatives of these families that would change the function if they were set.
_REFUSED = (
    "attention_chunk_size",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "logit_scale",
)


_SEQUENTIAL = Sequential()
FULL, SLIDING = "full_attention", "sliding_attention"
# Layers whose indexer chooses tokens: transformers' name, and those that publishers and its older
# releases wrote.
INDEXED = ("indexed_attention", "deepseek_sparse_attention", "qwen_sparse_attention")


@dataclass(frozen=True, slots=True)
class Common:
    """What config.json says of most families in the same keys, and the layers that follow from it."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int  # Of dense MLPs.
    num_layers: int  # Decoder layers.
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    activation: str  # Of MLPs that are not routed experts'.
    dtype: str
    max_model_len: int
    attention_bias: bool
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    # Where MLPs that are not routed experts' clamp (infinite: nowhere), and their sigmoid's slope.
    limit: float = math.inf
    alpha: float = 1.702

    @property
    def norm(self) -> RMSNorm:
        """The norm of layers and heads of most families."""
        return RMSNorm(self.eps)

    def gqa(self, rope: RopeConfig | None, **changes: Any) -> GQA:
        """Attention with these heads; `changes`: fields of `GQA`."""
        head_dim = changes.get("head_dim", self.head_dim)
        values: dict[str, Any] = {
            "num_heads": self.num_heads,
            "num_kv_heads": self.num_kv_heads,
            "head_dim": head_dim,
            "value_dim": head_dim,
            "scale": head_dim**-0.5,
            "eps": self.eps,
            "bias": self.attention_bias,
        }
        return GQA(rope=rope, **(values | changes))

    def dense(self, intermediate_size: int | None = None) -> Dense:
        """Returns an MLP, by default as wide as those of dense layers."""
        size = self.intermediate_size if intermediate_size is None else intermediate_size
        return Dense(intermediate_size=size, activation=self.activation, limit=self.limit, alpha=self.alpha)

    def moe(self, router: RouterConfig, experts: Experts | int, shared: int = 0, **changes: Any) -> MoE:
        """Routed experts (an integer: of that width), and always active ones of `shared` channels together.

        `changes`: fields of `MoE`.
        """
        experts = Experts(experts) if isinstance(experts, int) else experts
        active = self.dense(shared) if shared else None
        return MoE(router=router, experts=experts, shared=active, **changes)

    def ffns(
        self, moe: FeedForward, moe_layers: Container[int], dense: Dense | None = None
    ) -> tuple[FeedForward, ...]:
        """Returns the feed-forward block of each layer: `moe` in `moe_layers`, else `dense`."""
        dense = self.dense() if dense is None else dense
        return tuple(moe if layer in moe_layers else dense for layer in range(self.num_layers))

    def model(
        self,
        mixers: Mixer | Sequence[Mixer | None],
        ffns: FeedForward | Sequence[FeedForward | None],
        *,
        norm: Norm | None = None,
        residuals: Residual | Sequence[Residual] = _SEQUENTIAL,
        **others: Any,
    ) -> ModelConfig:
        """The model of these layers: one value stands for all layers; `others`: fields of `ModelConfig`."""
        parts = zip(
            mixers if isinstance(mixers, Sequence) else (mixers,) * self.num_layers,
            ffns if isinstance(ffns, Sequence) else (ffns,) * self.num_layers,
            residuals if isinstance(residuals, Sequence) else (residuals,) * self.num_layers,
            strict=True,
        )
        return ModelConfig(
            model_type=self.model_type,
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            layers=tuple(Layer(mixer, ffn, norm or self.norm, around) for mixer, ffn, around in parts),
            # Anything else is refused when it is known what the model is computed in.
            dtype=cast(DTypeName, self.dtype),
            max_model_len=self.max_model_len,
            tie_word_embeddings=self.tie_word_embeddings,
            eos_token_ids=self.eos_token_ids,
            bos_token_id=self.bos_token_id,
            **others,
        )


def read_common(
    hf: HfKeys, *, dense_size: int | None = None, num_layers: int | None = None, tied: bool = False
) -> Common:
    """Reads what all families spell alike; raises ModelConfigError on features that no family here has.

    `dense_size`: the width of dense layers where a family says nothing of them; `num_layers`: decoder layers
    where it has another key for them; `tied`: whether the head is the embedding where the key is missing.
    """
    hf.skip(*_HARMLESS, *_OF_GENERATE)
    for name in _REFUSED:
        hf.refuse(name)
    heads = hf.integer("num_attention_heads")
    kv_heads = hf.integer("num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise hf.error("num_key_value_heads", kv_heads, f"a divisor of num_attention_heads ({heads})")
    hidden_size = hf.integer("hidden_size")
    activation = hf.string("hidden_act", default="silu")
    if activation not in _ACTIVATIONS:
        raise hf.error("hidden_act", activation, ", ".join(_ACTIVATIONS))
    dtype = hf.string("dtype", "torch_dtype", default="bfloat16")
    bos = hf.integers("bos_token_id")
    return Common(
        model_type=hf.string("model_type"),
        vocab_size=hf.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=hf.integer("intermediate_size") if dense_size is None else dense_size,
        num_layers=hf.integer("num_hidden_layers") if num_layers is None else num_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=hf.integer("head_dim", default=hidden_size // heads),
        eps=hf.number("rms_norm_eps"),
        activation=activation,
        dtype=dtype,
        max_model_len=hf.integer("max_position_embeddings"),
        attention_bias=hf.boolean("attention_bias", default=False),
        tie_word_embeddings=hf.boolean("tie_word_embeddings", default=tied),
        eos_token_ids=hf.integers("eos_token_id"),
        bos_token_id=bos[0] if bos else None,
    )


def read_softmax_router(hf: HfKeys, *, renormalizes: bool = False) -> RouterConfig:
    """Qwen's and OLMoE's: softmax over all experts.

    `renormalizes`: what a missing `norm_topk_prob` means in the family.
    """
    return RouterConfig(
        num_experts=hf.integer("num_experts", "num_local_experts"),
        top_k=hf.integer("num_experts_per_tok"),
        score="softmax",
        post="renormalize" if hf.boolean("norm_topk_prob", default=renormalizes) else "none",
    )


def read_biased_router(
    hf: HfKeys, *, renormalizes: bool = True, groups: tuple[int, int] = (1, 1), scale: float = 1.0
) -> RouterConfig:
    """DeepSeek-V3's: sigmoid scores, chosen with a correction bias, groups by the sum of their best two.

    In DeepSeek's keys or Kimi-Linear's. `renormalizes`, `groups` (how many, of which how many are kept) and
    `scale`: what missing keys mean in the family.
    """
    hf.skip("moe_router_dtype")  # always float32 here
    return RouterConfig(
        num_experts=hf.integer("n_routed_experts", "num_local_experts", "num_experts"),
        top_k=hf.integer("num_experts_per_token", "num_experts_per_tok"),
        score="sigmoid",
        correction_bias=True,
        num_groups=hf.integer("num_expert_group", "n_group", default=groups[0]),
        top_groups=hf.integer("topk_group", default=groups[1]),
        group_score="top2_sum",
        post=(
            "renormalize" if hf.boolean("moe_renormalize", "norm_topk_prob", default=renormalizes) else "none"
        ),
        renormalize_epsilon=1e-20,
        scale=hf.number("routed_scaling_factor", default=scale),
        float32_gate=True,
    )


def read_sparse_layers(hf: HfKeys, num_layers: int) -> frozenset[int]:
    """Qwen's MoE layers: every `decoder_sparse_step`-th, but those of `mlp_only_layers`."""
    dense = set(hf.integers("mlp_only_layers"))
    step = hf.integer("decoder_sparse_step", default=1)
    return frozenset(i for i in range(num_layers) if i not in dense and (i + 1) % step == 0)


def after_dense(hf: HfKeys, num_layers: int, default: int | None = None) -> frozenset[int]:
    """Returns the MoE layers after the first dense ones; `default`: how many without a key."""
    if default is not None and not hf.has("first_k_dense_replace"):
        return frozenset(range(default, num_layers))
    return frozenset(range(hf.integer("first_k_dense_replace", minimum=0), num_layers))


def listed_or_after_dense(hf: HfKeys, num_layers: int, default: int | None = None) -> frozenset[int]:
    """Returns the MoE layers that `mlp_layer_types` lists; by default those after the first dense ones."""
    kinds = hf.strings("mlp_layer_types")
    if not kinds:
        return after_dense(hf, num_layers, default)
    if len(kinds) != num_layers or not set(kinds) <= {"dense", "sparse"}:
        raise hf.error("mlp_layer_types", list(kinds), f"{num_layers} of 'dense' and 'sparse'")
    hf.skip("first_k_dense_replace")
    return frozenset(index for index, kind in enumerate(kinds) if kind == "sparse")


def read_flags(hf: HfKeys, name: str, num_layers: int) -> list[int]:
    """Returns a 0 or 1 for each layer. Raises ConfigError for others."""
    flags = list(hf.integers(name))
    if len(flags) != num_layers or not set(flags) <= {0, 1}:
        raise hf.error(name, flags, f"{num_layers} of 0 and 1")
    return flags


def read_one_window(hf: HfKeys, *, used: bool | None = None) -> Window | None:
    """`sliding_window` as the window of every layer; None where it is not `used`.

    `used` None: where there is one. Raises ModelConfigError where it is used and missing.
    """
    if used is False or (used is None and not hf.has("sliding_window")):
        hf.skip("sliding_window")
        return None
    return Window(hf.integer("sliding_window"))


def read_from_section(
    hf: HfKeys, section: HfKeys | None, name: str, outside: str, default: int, minimum: int = 1
) -> int:
    """Reads an integer of a section that a family was published with.

    What it lacks, or all of it, may stand `outside` by another name, where transformers writes it in any
    case.
    """
    found = hf.integer(outside, default=default, minimum=minimum)
    return found if section is None else section.integer(name, default=found, minimum=minimum)


def refuse_bias(hf: HfKeys, common: Common) -> None:
    """Raises where a family without biases in attention is said to have them."""
    if common.attention_bias:
        raise hf.error("attention_bias", True, "false")


def refuse_step_limits(hf: HfKeys) -> None:
    """Steps of Mamba's recurrence are not limited: transformers does so for several tokens, not for one."""
    limits = hf.value("time_step_limit")
    # As transformers 5 writes it, and, for files that are JSON to the letter, Nemotron-3-Ultra.
    endless = (float("inf"), {"__float__": "Infinity"}, 1e308)
    if limits is not None and limits not in [[0.0, end] for end in endless]:
        raise hf.error("time_step_limit", limits, "[0.0, Infinity]")


def read_windows(hf: HfKeys, num_layers: int) -> tuple[Window | None, ...]:
    """`layer_types` and `sliding_window` as the window of each layer; without a list, even layers slide.

    Raises ModelConfigError for a list of another length, an unknown
    type, or layers that slide without a window.
    """
    default = tuple(FULL if layer % 2 else SLIDING for layer in range(num_layers))
    kinds = hf.strings("layer_types") or default
    if len(kinds) != num_layers:
        raise hf.error("layer_types", list(kinds), f"one type for each of the {num_layers} layers")
    unknown = [kind for kind in kinds if kind not in (FULL, SLIDING)]
    if unknown:
        raise hf.error("layer_types", unknown[0], f"{FULL}, {SLIDING}")
    if SLIDING not in kinds:
        hf.skip("sliding_window")
        return (None,) * num_layers
    window = Window(hf.integer("sliding_window"))
    return tuple(window if kind == SLIDING else None for kind in kinds)


def sliding(attention: GQA, windows: Sequence[Window | None]) -> list[GQA]:
    """Returns the attention of each layer, which differ in their windows."""
    return [replace(attention, sight=window) for window in windows]


def sliding_rotated(attention: GQA, windows: Sequence[Window | None], kinds: Sequence[str]) -> list[GQA]:
    """Returns the same where layers that see the whole context are not rotated; `kinds`: `layer_types`."""
    layers = zip(sliding(attention, windows), kinds, strict=True)
    return [layer if kind == SLIDING else replace(layer, rope=None) for layer, kind in layers]


def every_nth_full(num_layers: int, period: int) -> list[str]:
    """`layer_types` of models whose every `period`-th layer sees the whole context and all others slide."""
    return [SLIDING if (layer + 1) % period else FULL for layer in range(num_layers)]


def read_mtp_layers(hf: HfKeys, *names: str) -> int:
    """Returns the number of layers of multi-token prediction after the last decoder layer."""
    return hf.integer(*(names or ("num_nextn_predict_layers", "num_mtp_layers")), default=0, minimum=0)
