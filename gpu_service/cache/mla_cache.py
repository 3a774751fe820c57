"""The device tensors of multi-head latent attention: one latent vector per token for all heads, in pages.

Source: DeepSeek-V2 (arXiv:2405.04434), section 2.1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gpu_service.cache.fp8 import quantise_e4m3
from gpu_service.cache.index_keys import IndexKeys
from gpu_service.cache.layer_pages import LayerPages


class MlaCache(LayerPages):
    """Latents of all layers.

    One tensor `[num_pages, page_size, latent_dim + rope_dim]` per layer: a token's compressed keys and
    values, then its rotated key part, which all heads share. The scales are those of `KVCache`, but one per
    layer, set by a loader that finds one in the checkpoint. Of a model with sparse attention, the same pages
    hold the indexer's keys.
    """

    def __init__(
        self,
        num_layers: int,
        latent_dim: int,
        rope_dim: int,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        storage_dtype: torch.dtype | None = None,
        index_layers: int = 0,
        index_dim: int = 0,
    ) -> None:
        """`index_layers` choose what they attend to, by keys of `index_dim` elements."""
        row = (latent_dim + rope_dim,)
        super().__init__("MLA", num_layers, num_pages, page_size, row, dtype, device, storage_dtype)
        self.latent_dim = latent_dim
        self.rope_dim = rope_dim
        self.scales = [1.0] * num_layers
        # None: attention is dense.
        self.index_keys: IndexKeys | None = None
        if index_layers:
            self.index_keys = IndexKeys(index_layers, index_dim, num_pages, page_size, dtype, device)

    @property
    def nbytes(self) -> int:
        """Bytes of all layers, the indexer's keys included."""
        return super().nbytes + (self.index_keys.nbytes if self.index_keys else 0)

    def zero_pages(self, pages: Sequence[int]) -> None:
        """See the base class; the indexer's keys as well."""
        super().zero_pages(pages)
        if self.index_keys is not None:
            self.index_keys.zero_pages(pages)

    def latents(self, layer_id: int) -> torch.Tensor:
        """View of the compressed part, `[num_pages, page_size, latent_dim]`."""
        return self._layers[layer_id][..., : self.latent_dim]

    def rotated(self, layer_id: int) -> torch.Tensor:
        """View of the rotated part, `[num_pages, page_size, rope_dim]`."""
        return self._layers[layer_id][..., self.latent_dim :]

    def append(
        self, layer_id: int, latent: torch.Tensor, key_rope: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Store latents `[T, latent_dim]` and rotated keys `[T, rope_dim]` in slots int64 `[T]`."""
        slots = self._layers[layer_id].flatten(0, 1)
        rows = torch.cat((latent, key_rope), dim=1)
        if self.is_quantised:
            # Copied as bytes: torch indexes no 8-bit floats.
            rows = quantise_e4m3(rows, self.scales[layer_id]).view(torch.uint8)
            slots = slots.view(torch.uint8)
        slots.index_copy_(0, slot_mapping, rows)

    def gather(self, layer_id: int, pages: torch.Tensor) -> torch.Tensor:
        """Pages side by side in `dtype`, `[len(pages) * page_size, latent_dim + rope_dim]`."""
        return self._select(layer_id, self._layers[layer_id], pages).flatten(0, 1)

    def gather_slots(self, layer_id: int, slots: torch.Tensor) -> torch.Tensor:
        """Single tokens in `dtype`, `[len(slots), latent_dim + rope_dim]`."""
        return self._select(layer_id, self._layers[layer_id].flatten(0, 1), slots)

    def _select(self, layer_id: int, stored: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        if not self.is_quantised:
            return stored.index_select(0, index)
        gathered = stored.view(torch.uint8).index_select(0, index).view(self.storage_dtype)
        return gathered.to(self.dtype).mul_(self.scales[layer_id])


def mla_bytes_per_page(
    num_layers: int, latent_dim: int, rope_dim: int, page_size: int, dtype: torch.dtype
) -> int:
    """Bytes one page takes over all layers."""
    return num_layers * page_size * (latent_dim + rope_dim) * dtype.itemsize
