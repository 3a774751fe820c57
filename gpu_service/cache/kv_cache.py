"""The device tensors that hold keys and values, in pages; who owns a page, `cache/page_pool.py` knows."""

from __future__ import annotations

import torch

from gpu_service.cache.layer_pages import LayerPages
from gpu_service.model_config import ModelConfig
from gpu_service.ops.kv import append_kv


def bytes_per_page(config: ModelConfig, page_size: int, dtype: torch.dtype) -> int:
    """Bytes one page takes over all layers, keys and values together."""
    return 2 * len(config.attention_layers) * page_size * config.kv_size * dtype.itemsize


class KVCache(LayerPages):
    """Keys and values of all layers that attend.

    One tensor `[num_pages, page_size, 2 * num_kv_heads, head_dim]` per layer: a token's keys and values
    lie side by side, so that a reader gathers both with one index.

    As e4m3, a key is stored as key / `key_scales[layer]`, a value as value / `value_scales[layer]`,
    saturating at 448. The scales are 1.0; a loader that finds `k_scale` and `v_scale` in a checkpoint sets
    them before the first step (captured graphs hold them as constants).
    """

    def __init__(
        self,
        config: ModelConfig,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        storage_dtype: torch.dtype | None = None,
    ) -> None:
        row = (2 * config.num_kv_heads, config.head_dim)
        num_layers = len(config.attention_layers)
        super().__init__("KV", num_layers, num_pages, page_size, row, dtype, device, storage_dtype)
        self.num_kv_heads = config.num_kv_heads
        self.key_scales = [1.0] * num_layers
        self.value_scales = [1.0] * num_layers
        self._slots = [layer.view(-1, *row) for layer in self._layers]

    def slots(self, layer_id: int) -> torch.Tensor:
        """The same memory by token slot, `[num_pages * page_size, 2 * num_kv_heads, head_dim]`."""
        return self._slots[layer_id]

    def keys(self, layer_id: int) -> torch.Tensor:
        """View of the keys, `[num_pages, page_size, num_kv_heads, head_dim]`."""
        return self._layers[layer_id][:, :, : self.num_kv_heads]

    def values(self, layer_id: int) -> torch.Tensor:
        """View of the values, `[num_pages, page_size, num_kv_heads, head_dim]`."""
        return self._layers[layer_id][:, :, self.num_kv_heads :]

    def append(
        self, layer_id: int, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Store new keys and values, `[T, num_kv_heads, head_dim]`, in slots int64 `[T]` of a layer."""
        scales = self.key_scales[layer_id], self.value_scales[layer_id]
        append_kv(self._slots[layer_id], key, value, slot_mapping, *scales)
