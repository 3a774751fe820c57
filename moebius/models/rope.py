"""The two ways checkpoints spell rotary embedding, read into one `RopeConfig`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from moebius.models.keys import HfKeys
from moebius.models.layers.rope import NUM_AXES, RopeConfig

_KIND_KEYS = ("rope_type", "type")
_ORIGINAL = "original_max_position_embeddings"


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """YaRN's temperature of attention, `0.1 mscale ln(factor) + 1`; 1 where nothing is stretched."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _no_factor(scaling: Mapping[str, float]) -> float:
    return 1.0


def _yarn_factor(scaling: Mapping[str, float]) -> float:
    """The checkpoint's own, or DeepSeek's ratio of two temperatures, or the paper's."""
    if "attention_factor" in scaling:
        return scaling["attention_factor"]
    factor = scaling["factor"]
    if "mscale" in scaling and "mscale_all_dim" in scaling:
        return yarn_mscale(factor, scaling["mscale"]) / yarn_mscale(factor, scaling["mscale_all_dim"])
    return yarn_mscale(factor)


def _longrope_factor(scaling: Mapping[str, float]) -> float:
    """The checkpoint's own, or the paper's: `sqrt(1 + ln(factor) / ln(original length))`."""
    if "attention_factor" in scaling:
        return scaling["attention_factor"]
    factor, length = scaling["factor"], scaling["original_max_position_embeddings"]
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(length))


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """The keys of config.json that one kind of scaling has."""

    required: tuple[str, ...] = ()
    # Name -> value where the checkpoint has none; None: left out.
    optional: tuple[tuple[str, float | None], ...] = ()
    # Booleans and what they are by default; among the numbers they are 0 and 1.
    flags: tuple[tuple[str, bool], ...] = ()
    # Whether `original_max_position_embeddings` counts, by default the longest context.
    original_length: bool = False
    # What cosines and sines are multiplied by.
    attention_factor: Callable[[Mapping[str, float]], float] = _no_factor
    # Whether `factor` is, where it is null (or, unless required, absent), the longest context divided by the
    # original one.
    factor_by_lengths: bool = False
    # Whether `partial_rotary_factor` counts pairs (`rotated_pairs`) of a head that is rotated whole.
    counts_pairs: bool = False
    # Lists of a number for each pair, by which its frequency is divided: where no sequence is longer than
    # the original length, and where some may be.
    pair_factors: tuple[str, str] | None = None


ROPE_SCALINGS: Mapping[str, RopeScaling] = {
    "default": RopeScaling(),
    "linear": RopeScaling(("factor",)),
    # Changes frequencies beyond `max_position_embeddings` only, and no sequence here is longer than that.
    "dynamic": RopeScaling(("factor",)),
    "llama3": RopeScaling(("factor", "low_freq_factor", "high_freq_factor"), original_length=True),
    # LongRoPE (Ding et al. 2024, arXiv:2402.13753).
    "longrope": RopeScaling(
        optional=(("factor", None), ("attention_factor", None)),
        original_length=True,
        factor_by_lengths=True,
        pair_factors=("short_factor", "long_factor"),
        attention_factor=_longrope_factor,
    ),
    "proportional": RopeScaling(optional=(("factor", None),), counts_pairs=True),
    "yarn": RopeScaling(
        ("factor",),
        (
            ("beta_fast", 32.0),
            ("beta_slow", 1.0),
            ("attention_factor", None),
            ("mscale", None),
            ("mscale_all_dim", None),
        ),
        (("truncate", True),),
        True,
        _yarn_factor,
        factor_by_lengths=True,
    ),
}


@dataclass(frozen=True, slots=True)
class SectionDefaults:
    """What a family with mRoPE has where its checkpoint does not say."""

    sections: tuple[int, ...]  # Pairs that turn by time, height and width.
    # Whether they alternate: part of the family's code, which a checkpoint can only confirm.
    interleaved: bool


def _numbers(hf: HfKeys, rope: HfKeys, scaling: RopeScaling) -> dict[str, float]:
    """Returns what the kind needs, defaults filled in."""
    by_lengths = scaling.factor_by_lengths and rope.is_null("factor")
    numbers = {name: rope.number(name) for name in scaling.required if not (name == "factor" and by_lengths)}
    if scaling.original_length:
        # Some checkpoints have it outside, and then that one counts.
        longest = hf.integer("max_position_embeddings")
        numbers[_ORIGINAL] = hf.number(_ORIGINAL, default=rope.number(_ORIGINAL, default=longest))
        if by_lengths or (scaling.factor_by_lengths and not rope.has("factor")):
            numbers["factor"] = longest / numbers[_ORIGINAL]
    for name, default in scaling.optional:
        if rope.has(name) or default is not None:
            numbers[name] = rope.number(name, default=default)
    for name, flag in scaling.flags:
        numbers[name] = float(rope.boolean(name, default=flag))
    return numbers


# Of queries, and after how many positions they grow; see `RopeConfig`.
QueryGrowth = tuple[float, float]
_NO_GROWTH: QueryGrowth = (0.0, 1.0)
PairFactors = tuple[tuple[float, ...], ...]


def _pair_factors(rope: HfKeys, scaling: RopeScaling, num_pairs: int) -> PairFactors:
    """Returns a number for each pair, twice; none where the kind has none."""
    found = tuple(rope.numbers(name) for name in scaling.pair_factors or ())
    for name, factors in zip(scaling.pair_factors or (), found, strict=True):
        if len(factors) != num_pairs:
            raise rope.error(name, list(factors), f"{num_pairs} numbers, one for each rotated pair")
    return found


def _scaling(hf: HfKeys, rope: HfKeys | None, num_pairs: int) -> tuple[str, dict[str, float], PairFactors]:
    """Returns the kind, its numbers, and those of pairs."""
    if rope is None:
        return "default", {}, ()
    kind = rope.string(*_KIND_KEYS, default="default")
    scaling = ROPE_SCALINGS.get(kind)
    if scaling is None:
        raise rope.error("rope_type", kind, ", ".join(sorted(ROPE_SCALINGS)))
    numbers, factors = _numbers(hf, rope, scaling), _pair_factors(rope, scaling, num_pairs)
    if not scaling.original_length:
        rope.skip(_ORIGINAL)  # transformers writes and ignores it
    if rope.unread:
        optional = (name for name, _ in scaling.optional if name not in numbers)
        names = ", ".join((*numbers, *optional, *(scaling.pair_factors or ())))
        raise rope.error(rope.unread[0], "...", f"keys of {kind} scaling: {names or 'none'}")
    return kind, numbers, factors


def _sections(rope: HfKeys, mrope: SectionDefaults) -> tuple[int, ...]:
    """`mrope_section`: three numbers of pairs."""
    sections = rope.integers("mrope_section") or mrope.sections
    if len(sections) != NUM_AXES or min(sections) < 0:
        raise rope.error("mrope_section", list(sections), f"{NUM_AXES} numbers >= 0")
    interleaved = rope.boolean("mrope_interleaved", default=mrope.interleaved)
    if interleaved is not mrope.interleaved:
        raise rope.error("mrope_interleaved", interleaved, str(mrope.interleaved).lower())
    return sections


def read_layer_ropes(
    hf: HfKeys, kinds: Sequence[str], head_dim: int, defaults: Mapping[str, tuple[float, float]]
) -> tuple[RopeConfig, ...]:
    """Reads the rotary embedding of each layer, where `rope_parameters` has an entry for each of
    `layer_types`.

    `kinds`: the type of each layer; `defaults`: theta and partial factor of a type, where the checkpoint does
    not say. Keys that stand outside of entries count for all types.
    """
    by_kind = hf.section("rope_parameters")
    ropes = {}
    for kind in dict.fromkeys(kinds):
        own = by_kind.value(kind) if by_kind is not None and by_kind.has(kind) else None
        theta, factor = defaults[kind]
        changed = hf if own is None else hf.with_values(rope_parameters=own)
        ropes[kind] = read_rope(changed, head_dim, default_theta=theta, default_partial_factor=factor)
    return tuple(ropes[kind] for kind in kinds)


def read_rope(
    hf: HfKeys,
    head_dim: int,
    *,
    default_theta: float = 10000.0,
    default_partial_factor: float = 1.0,
    interleaved: bool = False,
    mrope: SectionDefaults | None = None,
    growth: QueryGrowth = _NO_GROWTH,
) -> RopeConfig:
    """Read `rope_parameters` (transformers 5) or `rope_theta` + `rope_scaling` + `partial_rotary_factor`.

    `head_dim` is the width that the partial factor is a part of; `mrope` None: one position a token;
    `growth`: that of queries, which the caller has read.
    """
    rope = hf.section("rope_parameters") or hf.section("rope_scaling")
    hf.skip("rope_scaling")
    theta = hf.number("rope_theta", default=default_theta)
    factor = hf.number("partial_rotary_factor", default=default_partial_factor)
    if rope is not None:
        theta = rope.number("rope_theta", default=theta)
        factor = rope.number("partial_rotary_factor", default=factor)
    sections = () if mrope is None else _sections(hf if rope is None else rope, mrope)
    rotary_dim = int(head_dim * factor)
    if rotary_dim < 2 or rotary_dim % 2 or rotary_dim > head_dim:
        raise hf.error(
            "partial_rotary_factor", factor, f"an even number of the {head_dim} elements of a head"
        )
    kind, numbers, pair_factors = _scaling(hf, rope, rotary_dim // 2)
    if ROPE_SCALINGS[kind].counts_pairs:
        numbers["rotated_pairs"], rotary_dim = rotary_dim // 2, head_dim
    if sections and 2 * sum(sections) != rotary_dim:
        raise hf.error("mrope_section", list(sections), f"three numbers whose sum is {rotary_dim // 2}")
    return RopeConfig(
        theta,
        rotary_dim,
        interleaved,
        kind,
        tuple(numbers.items()),
        pair_factors,
        ROPE_SCALINGS[kind].attention_factor(numbers),
        mrope_sections=sections,
        mrope_interleaved=mrope is not None and mrope.interleaved,
        query_growth=growth[0],
        query_growth_length=growth[1],
    )
