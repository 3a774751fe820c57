"""What caches of every kind of attention are: one tensor of pages per layer.

Knows layers and pages; knows nothing of what a token's row means, of requests or of who owns a page.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gpu_service.cache.fp8 import E4M3


class LayerPages:
    """Tensors `[num_pages, page_size, *row]`, one per layer.

    Token `t` of a request lives in slot `page * page_size + t % page_size`. Page 0 is the dummy page: padding
    reads and writes it, no request owns it. Pages start as zeros, because a masked-out NaN would still poison
    a sum it is multiplied into.

    `dtype` is what attention computes in; `storage_dtype` is what pages hold: the same, or e4m3.
    """

    def __init__(
        self,
        name: str,
        num_layers: int,
        num_pages: int,
        page_size: int,
        row: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device | str,
        storage_dtype: torch.dtype | None,
    ) -> None:
        """`name` is for messages. Raises ValueError naming what is not allowed."""
        if num_pages < 2 or page_size < 1:
            raise ValueError(
                f"{name} cache needs num_pages >= 2 (page 0 is the dummy) and page_size >= 1, "
                f"got {num_pages} pages of {page_size}"
            )
        if storage_dtype not in (None, dtype, E4M3):
            raise ValueError(f"{name} pages of {storage_dtype} are not supported; allowed: {dtype}, {E4M3}")
        self.num_pages = num_pages
        self.page_size = page_size
        self.dtype = dtype
        self.storage_dtype = storage_dtype or dtype
        self.device = torch.device(device)
        shape = (num_pages, page_size, *row)
        self._layers = [
            torch.zeros(shape, dtype=self.storage_dtype, device=self.device) for _ in range(num_layers)
        ]

    @property
    def num_layers(self) -> int:
        """Layers that have pages here."""
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
        """A layer, `[num_pages, page_size, *row]`."""
        return self._layers[layer_id]

    def zero_pages(self, pages: Sequence[int]) -> None:
        """Clear pages that may hold NaN or Inf (a failed request's), before anyone else is given them."""
        if not pages:
            return
        index = torch.as_tensor(pages, dtype=torch.int64, device=self.device)
        for layer in self._layers:
            layer.view(torch.uint8).index_fill_(0, index, 0)
