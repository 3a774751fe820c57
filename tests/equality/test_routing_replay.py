"""Guards `models random --routing-from`: a model made from a trace chooses exactly what the trace says.

The engine records both: the trace from another model, and what the made model chooses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from gpu_service.core.request import Request, SamplingParams
from lab.random_model import RandomModelOptions, write_random_model
from lab.random_model.replay import fit_replay
from lab.random_model.shapes import SHAPES
from lab.random_model.tensors import FIRST_WORD
from moebius.config import PlacementConfig
from moebius.errors import UserError
from moebius.experts.placement import ExpertStatistics
from tests.equality.test_engine_real_model import config_for
from tests.helpers.built_engine import running_engine

TOKENS = 200
SHAPE = SHAPES["small"]


def recorded(model: Path, prompts: Sequence[list[int]], tokens: int = TOKENS) -> ExpertStatistics:
    """Returns what the engine records of greedy answers of `tokens` tokens, one prompt after the other."""
    config = config_for(model, max_num_batched_tokens=16, num_pages=256)
    config = config.model_copy(update={"placement": PlacementConfig(expert_recorder="per_token")})
    params = SamplingParams(temperature=0.0, max_tokens=tokens, min_tokens=tokens)
    with running_engine(config) as engine:
        assert engine.built.recorder is not None
        engine.built.recorder.start("per_token")
        for number, prompt in enumerate(prompts):
            engine.run([Request(f"r{number}", prompt, params)])
        return engine.built.recorder.dump()


def sets(statistics: ExpertStatistics) -> NDArray[np.int16]:
    """Returns int16 `[tokens, layers, top_k]`, each token's experts in the order of their ids."""
    assert statistics.token_ids is not None
    return np.sort(statistics.token_ids, axis=2)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the trace of a model with skewed routers and topics: neighbours share 45 % of their experts."""
    directory = tmp_path_factory.mktemp("recorded")
    options = RandomModelOptions("small", skew="zipf:1.2", head="chain", overlap=45, topic_tokens=32, seed=3)
    write_random_model(directory / "model", options)
    path = directory / "trace.safetensors"
    path.write_bytes(recorded(directory / "model", [[FIRST_WORD]]).encode("safetensors"))
    return path


@pytest.mark.parametrize("weight_format", ["bfloat16", pytest.param("q4_0", marks=pytest.mark.full)])
def test_the_trace_is_replayed(trace: Path, tmp_path: Path, weight_format: str) -> None:
    """A text's answer goes through all rows of the trace, and each token chooses the row's experts.

    Popularity, what neighbours share and how topics drift are those of the trace because all choices are.
    """
    wanted = sets(ExpertStatistics.read(str(trace)))
    options = RandomModelOptions("small", weight_format, seed=11, routing_from=str(trace))
    written = write_random_model(tmp_path / "model", options)
    assert written.replay is not None
    assert (written.replay.num_rows, written.replay.share) == (len(wanted), 1.0)
    # Two texts of bytes, and their answers.
    text = [[40, 50, 60], [7] * 21]
    found = sets(recorded(written.path, text, len(wanted) + 1))
    for prompt in text:
        own, found = found[len(prompt) : len(prompt) + len(wanted)], found[len(prompt) + len(wanted) :]
        assert np.array_equal(own, wanted)
    assert len(found) == 0


def test_a_replay_goes_round(trace: Path, tmp_path: Path) -> None:
    """After the trace's last row comes its first one again, in an answer that starts anywhere."""
    wanted = sets(ExpertStatistics.read(str(trace)))
    path = write_random_model(tmp_path / "model", RandomModelOptions("small", routing_from=str(trace))).path
    found = sets(recorded(path, [[FIRST_WORD]], 2 * len(wanted)))
    assert np.array_equal(found[: len(wanted)], wanted)
    assert np.array_equal(found[len(wanted) :], wanted[: len(found) - len(wanted)])


def test_any_choice_of_a_published_shape_can_be_replayed() -> None:
    """Choices without structure, the hardest that a trace can have, in 41 elements for each layer.

    8 of 128 experts, as Qwen3-30B-A3B has them, can be expressed; 10 of 512, as Qwen3-Next has them, can not.
    """
    shape = replace(SHAPES["qwen3-30b-a3b"], num_layers=2, hidden_size=2 * 41 + 34)
    order = np.random.default_rng(0).random((200, 2, shape.num_experts)).argsort(axis=2)
    replay = fit_replay(order[:, :, : shape.top_k].astype(np.int16), shape, seed=0)
    assert replay.code_elements == 41
    assert replay.share > 0.999
    with pytest.raises(UserError, match=r"express ..% of this trace's choices"):
        fit_replay(
            np.random.default_rng(0).random((32, 2, 512)).argsort(axis=2)[:, :, :10].astype(np.int16),
            replace(shape, num_experts=512, top_k=10),
            seed=0,
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (RandomModelOptions("tiny"), "was recorded of another shape: 32 experts, 8 in tiny"),
        (RandomModelOptions("small", layers=3), "of another shape: 4 layers with experts, 3 in small"),
        (RandomModelOptions("glm-4.5-air-tiny"), "allowed with shapes of Qwen3-MoE"),
        (RandomModelOptions("small", skew="zipf:1"), "--overlap and --skew are not allowed with it"),
    ],
)
def test_what_does_not_fit_is_refused(
    trace: Path, tmp_path: Path, options: RandomModelOptions, message: str
) -> None:
    """Nothing is written before the trace is known to fit."""
    with pytest.raises(UserError, match=message):
        write_random_model(tmp_path / "model", replace(options, routing_from=str(trace)))
    assert not (tmp_path / "model").exists()


def test_a_file_that_is_no_trace_is_refused(trace: Path, tmp_path: Path) -> None:
    """Another recorder mode, tokens without choices, and no file at all."""
    statistics = ExpertStatistics.read(str(trace))
    assert statistics.token_ids is not None
    padded = statistics.token_ids.copy()
    padded[3, 1, 0] = -1
    cases = {
        "with --mode stat; allowed: per_token": replace(statistics, mode="stat", token_ids=None),
        "has tokens that do not choose 4 different experts": replace(statistics, token_ids=padded),
        r"choices of shape \[0": replace(statistics, token_ids=padded[:0]),
    }
    for message, case in cases.items():
        path = tmp_path / "trace.json"
        path.write_bytes(case.encode("json"))
        with pytest.raises(UserError, match=message):
            write_random_model(tmp_path / "model", RandomModelOptions("small", routing_from=str(path)))
    missing = RandomModelOptions("small", routing_from=str(tmp_path / "none.json"))
    with pytest.raises(UserError, match=r"--routing-from: .*none.json cannot be read"):
        write_random_model(tmp_path / "model", missing)
