"""What config.json of Step-3.5-Flash says of single layers, as both services read it.

Lists have entries for the prediction layers behind the last one too, which are cut off here.
"""

from __future__ import annotations

import math
from typing import Any

from moebius.checkpoint.errors import CheckpointError

# Layers before the first mixture of experts where no list says which they are.
_DENSE_LAYERS = 3


def layers_of(name: str, values: Any, num_layers: int) -> tuple[Any, ...]:
    """A list's first `num_layers` entries; None: empty. Raises CheckpointError for a shorter list."""
    if values is None:
        return ()
    if not isinstance(values, list) or len(values) < num_layers:
        raise CheckpointError(
            f"config.json: {name} is {values!r}; a list of {num_layers} entries or more is allowed"
        )
    return tuple(values[:num_layers])


def moe_layers(listed: Any, num_layers: int) -> tuple[int, ...]:
    """`moe_layers_enum`, numbers in a list or in a string with commas, ascending; None: all from the third.

    Raises CheckpointError for anything else.
    """
    if listed is None:
        return tuple(range(min(_DENSE_LAYERS, num_layers), num_layers))
    items = listed.split(",") if isinstance(listed, str) else listed
    try:
        numbers = {int(item) for item in items if str(item).strip()}
    except (TypeError, ValueError):
        raise CheckpointError(
            f"config.json: moe_layers_enum is {listed!r}; layers' numbers, separated by commas, are allowed"
        ) from None
    return tuple(sorted(number for number in numbers if 0 <= number < num_layers))


def clamp_limits(name: str, values: Any, num_layers: int) -> tuple[float, ...]:
    """Where a layer clamps gate and up, infinite where it does not (null or 0); None: empty.

    Raises CheckpointError for a list that is too short, or an entry that is no number >= 0.
    """
    limits = []
    for value in layers_of(name, values, num_layers):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or value < 0):
            raise CheckpointError(f"config.json: {name} has {value!r}; numbers >= 0 and null are allowed")
        limits.append(float(value) if value else math.inf)
    return tuple(limits)
