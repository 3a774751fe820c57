"""The device tensors of sparse attention's indexer: one small key per token and choosing layer, in pages."""

from __future__ import annotations

import torch

from gpu_service.cache.layer_pages import LayerPages


class IndexKeys(LayerPages):
    """Keys of all layers that choose for themselves, counted among those.

    One tensor `[num_pages, page_size, head_dim]` per such layer, in the pages of the latents beside them and
    always in the type of the activations: 8-bit keys would choose other tokens.
    """

    def __init__(
        self,
        num_layers: int,
        head_dim: int,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__("index key", num_layers, num_pages, page_size, (head_dim,), dtype, device, None)
        self.head_dim = head_dim

    def append(self, index_layer: int, keys: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Store keys `[T, head_dim]` in slots int64 `[T]`."""
        self._layers[index_layer].flatten(0, 1).index_copy_(0, slot_mapping, keys)

    def gather(self, index_layer: int, pages: torch.Tensor) -> torch.Tensor:
        """Pages side by side, `[len(pages) * page_size, head_dim]`."""
        return self._layers[index_layer].index_select(0, pages).flatten(0, 1)


def index_bytes_per_page(num_layers: int, head_dim: int, page_size: int, dtype: torch.dtype) -> int:
    """Bytes one page takes over all layers that choose for themselves."""
    return num_layers * page_size * head_dim * dtype.itemsize
