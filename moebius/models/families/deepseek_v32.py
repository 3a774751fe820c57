"""DeepSeek-V3.2, GLM-5 and GLM-5.2: DeepSeek-V3 whose layers attend to the tokens that an indexer chooses.

Sources: DeepSeek-V3.2 (arXiv:2512.02556), IndexCache (arXiv:2603.12201) for choices that layers share, and
the configuration classes of transformers 5.23.
"""

from __future__ import annotations

from moebius.checkpoint.gguf.family import INDEXED_KEYS, GgufFamily, deepseek_yarn, indexed, latent
from moebius.checkpoint.gguf.names import INDEXER_RULES
from moebius.models.common import INDEXED, listed_or_after_dense, read_mtp_layers
from moebius.models.config import ModelConfig
from moebius.models.family import Family, MtpFamily
from moebius.models.keys import HfKeys
from moebius.models.layers.latent import TokenIndexer
from moebius.models.mla import read_mla_common, read_moe, read_v3_router, sparse
from moebius.models.names import ROTARY, TensorNames

_FULL, _SHARED = "full", "shared"
_PATTERN = {"F": _FULL, "S": _SHARED}
_SCHEDULE = ("index_topk_pattern", "index_topk_freq", "index_skip_topk_offset")


def _listed_kinds(hf: HfKeys, num_layers: int) -> tuple[str, ...]:
    """Returns the kinds of layers in the order in which the keys outrank one another; none: empty."""
    name = "indexer_types"
    kinds = hf.strings(name)
    if kinds:
        hf.skip(*_SCHEDULE)
    elif hf.has("index_topk_pattern"):
        name = "index_topk_pattern"
        hf.skip(*_SCHEDULE)
        pattern = hf.string(name)
        kinds = tuple(_PATTERN.get(letter, letter) for letter in pattern)
    if kinds and (len(kinds) != num_layers or not set(kinds) <= {_FULL, _SHARED} or kinds[0] != _FULL):
        raise hf.error(name, list(kinds), f"{num_layers} of 'full' (F) and 'shared' (S), the first one full")
    return kinds


def _scheduled_kinds(hf: HfKeys, num_layers: int) -> tuple[str, ...]:
    """Every `index_topk_freq`-th layer from `index_skip_topk_offset` - 1 on is full, and all before."""
    every = max(hf.integer("index_topk_freq", default=1, minimum=0), 1)
    offset = hf.integer("index_skip_topk_offset", default=2, minimum=0)
    if offset == 0 and every > 1:
        raise hf.error("index_skip_topk_offset", offset, "an integer >= 1: the first layer has to be full")
    return tuple(_FULL if max(layer - offset + 1, 0) % every == 0 else _SHARED for layer in range(num_layers))


def _read_indexer(hf: HfKeys, num_layers: int, rope_dim: int, *, interleaved: bool) -> TokenIndexer:
    """`interleaved` is the family's: a checkpoint may name it, and can only confirm it."""
    hf.refuse("layer_types", *([kind] * num_layers for kind in INDEXED))
    name = "indexer_rope_interleave"
    if hf.has(name) and hf.boolean(name) != interleaved:
        raise hf.error(name, hf.boolean(name), str(interleaved).lower())
    head_dim = hf.integer("index_head_dim")
    if head_dim < rope_dim:
        raise hf.error("index_head_dim", head_dim, f"at least qk_rope_head_dim ({rope_dim})")
    return TokenIndexer(
        num_heads=hf.integer("index_n_heads"),
        head_dim=head_dim,
        top_k=hf.integer("index_topk"),
        interleaved=interleaved,
    )


def _read_sparse(hf: HfKeys, *, shares: bool, interleaved: bool) -> ModelConfig:
    """Returns either family; `shares`: whether layers may take over what an earlier one chose."""
    hf.refuse("mlp_bias")
    if not hf.boolean("rope_interleave", default=True):
        raise hf.error("rope_interleave", False, "true")
    common, mla = read_mla_common(hf)
    num_layers = common.num_layers
    if mla.q_lora_rank is None:
        raise hf.error("q_lora_rank", None, "an integer >= 1: the indexer reads the queries' latent")
    kinds: tuple[str, ...] = (_FULL,) * num_layers
    if shares:
        kinds = _listed_kinds(hf, num_layers) or _scheduled_kinds(hf, num_layers)
    indexer = _read_indexer(hf, num_layers, mla.qk_rope_head_dim, interleaved=interleaved)
    moe = read_moe(hf, common, read_v3_router(hf))
    return common.model(
        sparse(mla, indexer, [kind == _FULL for kind in kinds]),
        common.ffns(moe, listed_or_after_dense(hf, num_layers)),
        num_mtp_layers=read_mtp_layers(hf),
    )


def read_deepseek_v32(hf: HfKeys) -> ModelConfig:
    """Reads DeepSeek-V3.2: DeepSeek-V3 with an indexer in every layer, whose rotated halves lie apart."""
    for name in ("indexer_types", *_SCHEDULE):
        hf.refuse(name)
    return _read_sparse(hf, shares=False, interleaved=False)


def read_glm_moe_dsa(hf: HfKeys) -> ModelConfig:
    """Reads GLM-5, and GLM-5.2, whose layers may share an earlier layer's choice."""
    hf.skip("index_share_for_mtp_iteration")
    return _read_sparse(hf, shares=True, interleaved=True)


FAMILIES = (
    Family(
        "deepseek_v32",
        read_deepseek_v32,
        TensorNames((ROTARY,), mtp_layers=True),
        gguf=(
            GgufFamily(
                "deepseek32",
                INDEXED_KEYS,
                2,
                derive=latent,
                yarn=deepseek_yarn,
                rules=INDEXER_RULES,
            ),
        ),
        mtp=MtpFamily(),
    ),
    Family(
        "glm_moe_dsa",
        read_glm_moe_dsa,
        TensorNames((ROTARY,), mtp_layers=True),
        gguf=(
            GgufFamily(
                "glm-dsa",
                INDEXED_KEYS,
                2,
                derive=indexed,
                yarn=deepseek_yarn,
                rules=INDEXER_RULES,
            ),
        ),
        mtp=MtpFamily(),
    ),
)
