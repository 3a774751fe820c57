"""Looks into the layers of a stage while it runs: what its routers chose, what each layer leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gpu_service.layers.moe import MoE
from moebius.app.verify.staged_model import LoadedStage


@dataclass(frozen=True)
class Routed:
    """What a router was given and chose; filled by `watching`."""

    hidden_states: torch.Tensor  # [T, H]
    topk_ids: torch.Tensor  # int32 [T, K]
    topk_weights: torch.Tensor  # float32 [T, K]


@contextmanager
def watching(
    stage: LoadedStage,
    on_routed: Callable[[int, Routed], None],
    on_layer: Callable[[int, torch.Tensor], None],
) -> Iterator[None]:
    """Within it both are called with the layer's index in the checkpoint.

    `on_routed` before the layer's experts are asked, `on_layer` with the sum `[T, H]` behind it.
    """
    hooks = []
    layers: Any = stage.model.model.layers
    for layer, module in zip(stage.layers, layers, strict=True):
        hooks.append(module.register_forward_hook(_on_layer(layer, on_layer)))
        for part in module.modules():
            if isinstance(part, MoE):
                hooks.append(part.gate.register_forward_hook(_on_routed(layer, on_routed)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _on_layer(layer: int, call: Callable[[int, torch.Tensor], None]) -> Callable[..., None]:
    def hook(module: nn.Module, given: tuple[Any, ...], stream: Any) -> None:
        call(layer, stream.sum().clone())

    return hook


def _on_routed(layer: int, call: Callable[[int, Routed], None]) -> Callable[..., None]:
    def hook(module: nn.Module, given: tuple[Any, ...], chosen: Any) -> None:
        weights, ids = chosen
        call(layer, Routed(given[0], ids, weights))

    return hook
