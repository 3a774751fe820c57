"""Fills a model from a checkpoint, tensor by tensor, and proves that nothing is missing or left over.

Which rows a name fills comes from the modules (`loader/names.py`), which tensors hold them from the
checkpoint (`loader/find_sources.py`). Peak memory is the model plus one tensor: nothing is mapped, and
routed experts are never read. A rank of several reads its rows and columns only; what is left over is proven
by all stages together.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from gpu_service.loader.find_sources import find_sources, listed
from gpu_service.loader.fp8_source import keep_stored_fp8
from gpu_service.loader.names import Target, expected_names, wanted_name
from gpu_service.loader.sources import Means, WeightSource
from gpu_service.loader.tied_head import is_stored_as_head
from gpu_service.loader.tower import check_tower
from gpu_service.model_config import ModelConfig
from gpu_service.models.common import CausalLM
from gpu_service.models.registry import build_model
from gpu_service.models.vision.registry import build_tower
from moebius.checkpoint.errors import CheckpointError
from moebius.checkpoint.index import CheckpointIndex, TensorInfo
from moebius.checkpoint.quantisation import read_schemes
from moebius.checkpoint.reader import SliceReader
from moebius.checkpoint.rules import check_prediction_layers
from moebius.config import ModelConfigSection


def load_weights(model: CausalLM, directory: str | Path, *, keep_fp8: bool = False) -> None:
    """Give every parameter memory on `model.device` and its values from the checkpoint.

    Values are converted to each parameter's dtype, quantised ones after dequantising; with `keep_fp8` linear
    layers that are stored in fp8 stay in it. Raises CheckpointError listing every name that is missing,
    unused, mis-shaped, of a wrong type or quantised in an unknown way, before the first weight is read; the
    model is unusable after an error.
    """
    expected, sources = _find(model, directory, keep_fp8)
    threads = torch.get_num_threads()
    with SliceReader() as reader, ThreadPoolExecutor(threads) as workers:
        means = Means(reader, workers, threads)
        for name, target in expected.items():
            sources[name].fill(target, means, model.device)
    _check_no_meta(model)
    model.pack()


def shape_weights(model: CausalLM, chosen: ModelConfigSection) -> None:
    """Give every parameter the type that `load_weights` will, so that memory can be planned; raises as it."""
    if chosen.dense_weights == "keep":
        _find(model, chosen.model, keep_fp8=True)


def check_weights(config: ModelConfig, directory: str | Path) -> None:
    """Raises as `load_weights` and `load_tower` do before they read any value: from headers alone."""
    _find(build_model(config, device="meta"), directory, keep_fp8=False)
    if config.vision is not None:
        check_tower(build_tower(config, directory, "meta"), directory, config.model_type)


def _find(
    model: CausalLM, directory: str | Path, keep_fp8: bool
) -> tuple[dict[str, Target], dict[str, WeightSource]]:
    """What fills which parameter."""
    index = CheckpointIndex.open(directory)
    expected = expected_names(model)
    sources = find_sources(index.directory, _present(index, model), expected, read_schemes(directory))
    if keep_fp8:
        keep_stored_fp8(expected, sources)
    return expected, sources


def _present(index: CheckpointIndex, model: CausalLM) -> dict[str, TensorInfo]:
    """The checkpoint's tensors that this process reads, by canonical name."""
    present: dict[str, TensorInfo] = {}
    config = model.config
    check_prediction_layers(index, config.model_type, config.num_layers)
    swapped = config.tie_word_embeddings and is_stored_as_head(index, config.model_type, config.num_layers)
    for name, info in index.tensors.items():
        canonical = wanted_name(name, config, model.parallel, head_is_embedding=swapped)
        if canonical is None:
            continue
        if canonical in present:
            raise CheckpointError(
                f"{index.directory}: {present[canonical].name} and {name} are both {canonical}"
            )
        present[canonical] = info
    return present


def _check_no_meta(model: CausalLM) -> None:
    empty = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if empty:
        raise CheckpointError(f"parameters without values after loading: {listed(empty)}")
