"""Invariant: the layer that first made a value which is not finite is among those that its note names."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gpu_service.ops.overflow import FINAL_NORM, is_noted, suspects


@given(num_layers=st.integers(1, 70), first=st.integers(0, 69), is_float16=st.booleans())
def test_the_layer_that_did_it_is_suspect(num_layers: int, first: int, is_float16: bool) -> None:
    """The layer is suspect also where the stream is looked at after some layers only, and after the last
    norm; with float16 it alone is, else few others are.
    """
    first %= num_layers
    noted = next((n for n in range(first, num_layers) if is_noted(n, is_float16)), FINAL_NORM)
    found = suspects([noted], range(num_layers), is_float16)
    assert first in found
    assert len(found) <= 8
    if is_float16:
        assert found == [first]


def test_nothing_is_suspect_that_comes_after_its_note() -> None:
    """Or lies before the note that precedes it."""
    assert suspects([15], range(48), False) == list(range(8, 16))
    assert suspects([15, FINAL_NORM], range(20), False) == list(range(8, 20))
    assert suspects([], range(48), False) == []
