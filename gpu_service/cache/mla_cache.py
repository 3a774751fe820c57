"""The device tensors of multi-head latent attention: one latent vector per token for all heads, in pages.

Source: DeepSeek-V2 (arXiv:2405.04434), section 2.1. Knows nothing of requests or who owns a page.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gpu_service.cache.fp8 import E4M3, quantise_e4m3


class MlaCache:
    """Latents of all layers.

    One tensor `[num_pages, page_size, latent_dim + rope_dim]` per layer: a token's compressed keys and
    values, then its rotated key part, which all heads share. Slots, the dummy page 0 and the initial zeros
    are those of `KVCache`, as are `dtype`, `storage_dtype` and the scales (one per layer here, set by a
    loader that finds one in the checkpoint).
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
    ) -> None:
        if num_pages < 2 or page_size < 1:
            raise ValueError(
                f"MLA cache needs num_pages >= 2 (page 0 is the dummy) and page_size >= 1, "
                f"got {num_pages} pages of {page_size}"
            )
        if storage_dtype not in (None, dtype, E4M3):
            raise ValueError(f"MLA pages of {storage_dtype} are not supported; allowed: {dtype}, {E4M3}")
        self.num_pages = num_pages
        self.page_size = page_size
        self.latent_dim = latent_dim
        self.rope_dim = rope_dim
        self.dtype = dtype
        self.storage_dtype = storage_dtype or dtype
        self.device = torch.device(device)
        self.scales = [1.0] * num_layers
        shape = (num_pages, page_size, latent_dim + rope_dim)
        self._layers = [
            torch.zeros(shape, dtype=self.storage_dtype, device=self.device) for _ in range(num_layers)
        ]

    @property
    def num_layers(self) -> int:
        """Layers that have latents."""
        return len(self._layers)

    @property
    def nbytes(self) -> int:
        """Bytes of all layers."""
        return sum(layer.nbytes for layer in self._layers)

    @property
    def is_quantised(self) -> bool:
        """Whether readers must convert what they gather."""
        return self.storage_dtype != self.dtype

    def pages(self, layer_id: int) -> torch.Tensor:
        """A layer, `[num_pages, page_size, latent_dim + rope_dim]`."""
        return self._layers[layer_id]

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
        layer = self._layers[layer_id]
        if not self.is_quantised:
            return layer.index_select(0, pages).flatten(0, 1)
        gathered = layer.view(torch.uint8).index_select(0, pages).view(self.storage_dtype)
        return gathered.flatten(0, 1).to(self.dtype).mul_(self.scales[layer_id])

    def zero_pages(self, pages: Sequence[int]) -> None:
        """Clear pages that may hold NaN or Inf (a failed request's), before anyone else is given them."""
        if not pages:
            return
        index = torch.as_tensor(pages, dtype=torch.int64, device=self.device)
        for layer in self._layers:
            layer.view(torch.uint8).index_fill_(0, index, 0)


def mla_bytes_per_page(
    num_layers: int, latent_dim: int, rope_dim: int, page_size: int, dtype: torch.dtype
) -> int:
    """Bytes one page takes over all layers."""
    return num_layers * page_size * (latent_dim + rope_dim) * dtype.itemsize
