"""Guards `moebius bench host`: what it measures is the engine's own code, driven step by step."""

from __future__ import annotations

import pytest

from lab.bench.host import PARTS, HostOptions, run


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_every_part_of_a_step_is_measured(temperature: float) -> None:
    """A part that the engine no longer calls under the measured name would show as free."""
    [row] = run(HostOptions(streams=(3,), steps=10, prompt_len=8, temperature=temperature))
    assert row.streams == 3
    assert set(row.parts_us) == set(PARTS)
    assert min(row.parts_us.values()) > 0
