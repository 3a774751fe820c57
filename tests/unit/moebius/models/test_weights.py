"""Guards the declaration of a model's weights: checkpoints, modules and ranks have what layers declare."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from _pytest.mark.structures import ParameterSet

from gpu_service.core.parallel import ParallelContext
from gpu_service.core.partition import stage_layers
from gpu_service.loader.names import expected_names, module_of, wanted_name
from gpu_service.models.compose import build_model
from moebius.errors import ConfigError
from moebius.models.checkpoint import open_index
from moebius.models.config import ModelConfig, ModelOverrides
from moebius.models.layers.weights import Weight
from moebius.models.read import read_model_config
from moebius.models.weights import model_weights
from tests.helpers.tiny_models import TINY_MODELS, write_tiny_model

ROOT = Path(__file__).parents[4]
TYPES = {"float32": torch.float32, "int32": torch.int32}


def _cases() -> list[ParameterSet]:
    """One model of each family, and in `make test-all` the others."""
    first = {tiny.model_type: name for name, tiny in reversed(TINY_MODELS.items())}
    names = ((name, first[tiny.model_type] == name) for name, tiny in TINY_MODELS.items())
    return [pytest.param(name, marks=[] if is_first else [pytest.mark.full]) for name, is_first in names]


@pytest.mark.parametrize("name", _cases())
def test_a_checkpoint_and_its_modules_have_what_layers_declare(name: str, tmp_path: Path) -> None:
    """Names and shapes of tensors, shapes and types of the parameters of one and of two ranks."""
    write_tiny_model(TINY_MODELS[name], tmp_path, seed=3)
    config = read_model_config(tmp_path, ModelOverrides(language_model_only=True))
    declared = {weight.name: weight for weight in model_weights(config)}
    stored = {
        canonical: info.shape
        for stored_name, info in open_index(tmp_path).tensors.items()
        if (canonical := wanted_name(stored_name, config)) is not None
    }
    required = {name for name, weight in declared.items() if not weight.may_be_missing}
    assert required <= set(stored) <= set(declared)
    assert {name: declared[name].shape for name in stored} == stored
    for rank, count in ((0, 1), (0, 2), (1, 2)):
        try:
            _check_rank(config, ParallelContext(rank, count))
        except ConfigError:
            assert count == 2, "one rank has no part that can not be"


def _check_rank(config: ModelConfig, parallel: ParallelContext) -> None:
    rank, model = (parallel.tp_rank, parallel.tp_size), build_model(config, device="meta", parallel=parallel)
    parameters, into = dict(model.named_parameters()), dict[str, list[Weight]]()
    for weight in model_weights(config):
        into.setdefault(weight.parameter, []).append(weight)
    assert set(parameters) == set(into)
    for name, weights in into.items():
        parts = [weight.held_shape(*rank) for weight in weights]
        assert (sum(part[0] for part in parts), *parts[0][1:]) == parameters[name].shape, name
        assert {weight.dtype for weight in weights} == {weights[0].dtype}
        assert parameters[name].dtype == TYPES.get(weights[0].dtype, model.dtype), name


@pytest.mark.parametrize("name", ["gemma4_text", "deepseek_v4", "qwen4_exp_text_three_streams_bias_tied"])
def test_stages_share_a_models_weights(name: str, tmp_path: Path) -> None:
    """Two stages expect all that one does, each under its own modules; both have an embedding that is the
    head. (Names of a layer's own parameters once were those of another stage's.)
    """
    write_tiny_model(TINY_MODELS[name], tmp_path, seed=3)
    config = read_model_config(tmp_path, ModelOverrides(language_model_only=True))
    everything = {weight.name for weight in model_weights(config)}
    found: list[set[str]] = []
    for stage in range(2):
        parallel = ParallelContext(stage=stage, num_stages=2)
        model = build_model(config, device="meta", parallel=parallel)
        expected = expected_names(config, parallel)
        assert set(expected) == {
            weight.name for weight in model_weights(config, stage_layers(config, parallel))
        }
        for target in expected.values():
            module_of(model, target.parameter).get_parameter(target.parameter.rpartition(".")[2])
        found.append(set(expected))
    assert found[0] | found[1] == everything
    shared = {"model.embed_tokens.weight"} if config.tie_word_embeddings else set()
    assert found[0] & found[1] == shared


def test_no_module_computes_a_weights_shape() -> None:
    """Parameters are made of declarations alone; what holds a weight in another format, and what comes with
    that, is made by who holds it.
    """
    allowed = {("rank_weights.py", "optional"), ("linear.py", "keep_packed"), ("linear.py", "keep_fp8")}
    allowed |= {("ngrams.py", "keep_fp8"), ("ngrams.py", "_without_rows")}
    found = set()
    for path in sorted((ROOT / "gpu_service/layers").glob("*.py")):
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(function, ast.FunctionDef) or function.name == "empty_parameter":
                continue
            names = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
            attributes = {node.attr for node in ast.walk(function) if isinstance(node, ast.Attribute)}
            # What `pack` makes is made of what was loaded.
            is_made = "Parameter" in attributes and function.name not in ("pack", "make_packed")
            if "empty_parameter" in names or (is_made and "Parameter" in attributes and _calls(function)):
                found.add((path.name, function.name))
    assert found == allowed


def _calls(function: ast.FunctionDef) -> bool:
    """Returns whether the function calls `nn.Parameter`, not only names it as a type."""
    calls = (node.func for node in ast.walk(function) if isinstance(node, ast.Call))
    return any(isinstance(called, ast.Attribute) and called.attr == "Parameter" for called in calls)
