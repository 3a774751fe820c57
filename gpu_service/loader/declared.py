"""Which dense weights are quantised by a model's configuration alone: for plans before there are files.

Headers may say otherwise: a tensor that was left in 16 bits against the configuration counts as quantised.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from gpu_service.loader.held import Fp8Form, KeptForm, PackedForm
from gpu_service.loader.names import Target
from gpu_service.loader.packed_sources import is_cut_within
from gpu_service.loader.sources import is_kept_fp8, names_of_parameters
from gpu_service.ops.linear import GROUP
from gpu_service.ops.packed_weight import PackedPart
from moebius.checkpoint.excluded_modules import read_excluded
from moebius.checkpoint.matrix_finder import MatrixFinder
from moebius.checkpoint.quantisation import read_schemes
from moebius.checkpoint.weight_schemes import PLAIN, WeightScheme
from moebius.kernels.weight_formats import WEIGHT_FORMATS
from moebius.models.config import DTypeName
from moebius.models.layers.ranks import ShardRange
from moebius.models.weights import HEAD


def declared_forms(
    expected: Mapping[str, Target], directory: str | Path, dtype: DTypeName
) -> dict[str, KeptForm]:
    """Returns how a GPU would keep what `quantization_config` says is quantised, by parameter: weights of
    products, but for the head, which quantisers leave in 16 bits, as embeddings.

    Raises CheckpointError for a quantisation that is not known.
    """
    finder = MatrixFinder({}, Path(directory), read_schemes(directory))
    excluded, forms = read_excluded(directory), dict[str, KeptForm]()
    for parameter, names in names_of_parameters(expected, "product").items():
        targets = [expected[name] for name in names]
        if parameter.startswith(f"{HEAD}.") or any(_is_left(target) for target in targets):
            continue
        modules = (name.removesuffix(".weight") for name in names)
        left = [excluded.has(module) for module in modules]
        schemes = [PLAIN if out else finder.declared(name) for out, name in zip(left, names, strict=True)]
        if all(is_kept_fp8(scheme) for scheme in schemes):
            cols = targets[0].cols
            forms[parameter] = Fp8Form(cols.begin % GROUP if cols is not None else 0)
            continue
        formats = [_format(*each, dtype) for each in zip(schemes, targets, strict=True)]
        if all(formats) and any(scheme is not PLAIN for scheme in schemes):
            sizes = (target.rows.size for target in targets)
            forms[parameter] = PackedForm(tuple(map(PackedPart, formats, sizes)))
    return forms


def _is_left(target: Target) -> bool:
    """Returns whether a weight is none that quantisers take: not a matrix of the activations' type."""
    return target.weight.dtype != "activation" or len(target.shape) != 2


def _format(scheme: WeightScheme, target: Target, dtype: DTypeName) -> str:
    """Returns the packed format of a part, the activations' type for values; empty: it is dequantised."""
    if scheme is PLAIN:
        return "" if dtype == "float16" else dtype
    # Group scales in float16, which only headers tell, take as many bytes.
    name = scheme.packed_format.format(scale="")
    if name not in WEIGHT_FORMATS or scheme.reorders or WEIGHT_FORMATS[name].quantised_rows:
        return ""
    cols = target.cols or ShardRange.whole(target.shape[1])
    rows_at, cols_at = (
        math.lcm(*(step for step in steps if step))
        for steps in zip(*((role.out_step, role.in_step) for role in scheme.roles), strict=True)
    )
    return name if is_cut_within(target.rows, rows_at) and is_cut_within(cols, cols_at) else ""
