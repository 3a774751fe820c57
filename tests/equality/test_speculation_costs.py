"""Guards that an assembled engine counts what rows choose, by place: lengths of drafts follow from it."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpu_service.core.request import Request, SamplingParams
from gpu_service.speculation.overlap import ExpertPlace
from moebius.config import (
    ExpertConfig,
    GpuConfig,
    ModelConfigSection,
    MoebiusConfig,
    PlacementConfig,
)
from tests.helpers.built_engine import running_engine
from tests.helpers.tiny_models import make_tiny_model


def requests() -> list[Request]:
    """Returns some that decode side by side, whose texts repeat themselves."""
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    return [Request(f"r{i}", [5 + i, 9, 17] * 6, params) for i in range(3)]


@pytest.mark.parametrize(("ratio", "has_residents", "has_others"), [(0, 0, 1), (0.5, 1, 1), (1.0, 1, 0)])
def test_choices_are_counted_at_their_places(
    ratio: float, has_residents: int, has_others: int, tmp_path: Path
) -> None:
    """Each row's choices are all counted, at the places that the placement gives them; rows of several
    requests, and further rows of one, share some."""
    make_tiny_model("qwen3_moe", tmp_path)
    config = MoebiusConfig(
        model=ModelConfigSection(model=str(tmp_path), dtype="float32"),
        gpu=GpuConfig(
            gpu_threads=1,
            page_size=4,
            num_pages=128,
            max_num_batched_tokens=64,
            speculative_method="ngram",
        ),
        experts=ExpertConfig(expert_transport="local"),
        placement=PlacementConfig(gpu_experts_ratio=ratio),
    )
    with running_engine(config) as engine:
        engine.run(requests())
        drafts, model = engine.engine._pacing._drafts, engine.built.model_config
        assert drafts is not None
        places = drafts.overlap.places
    assert places is not None
    (top_k,) = {layer.router.top_k for layer in model.routed.values()}
    assert sum(place.per_row for place in places) == pytest.approx(top_k)
    assert (places[ExpertPlace.RESIDENT].per_row > 0) == has_residents
    assert (places[ExpertPlace.SERVED].per_row > 0) == has_others
    assert places[ExpertPlace.FETCHED].per_row == 0
    for place in places:
        if place.per_row:
            assert place.shared is not None
            assert 0 < place.shared <= 1
            assert place.new is not None
