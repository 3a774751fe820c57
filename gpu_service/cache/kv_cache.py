"""The device tensors of paged attention: keys and values of heads, latents with an indexer's keys, or
entries that stand for several tokens each, with the keys to choose them by.

One tensor of pages per layer. `page_pool.py` knows who owns a page, `radix_cache.py` whose tokens are cached.
Latents: DeepSeek-V2 (arXiv:2405.04434), section 2.1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from gpu_service.cache.fp8 import E4M3, quantise_e4m3
from gpu_service.device import TORCH_DTYPES
from gpu_service.device.stream import own_pages
from gpu_service.ops.kv import append_kv, rotate_and_append
from gpu_service.ops.rope import Unrotated
from moebius.models.attention_config import CompressedAttentionConfig
from moebius.models.config import ModelConfig

# Memory of pages, by shape (the page first), type and device; pages that may be used are zeros.
Allocate = Callable[[Sequence[int], torch.dtype, torch.device], torch.Tensor]


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Pages that all have memory, for good; on a CPU once they are used, since mappings begin as zeros."""
    if device.type == "cpu" and all(shape):
        return own_pages(shape, dtype)
    return torch.zeros(tuple(shape), dtype=dtype, device=device)


class LayerPages:
    """Tensors `[num_pages, page_size, *row]`, one per layer, whose rows may differ in size.

    Token `t` of a request lives in slot `page * page_size + t % page_size`. Page 0 is the dummy page: padding
    reads and writes it, no request owns it. Pages start as zeros, because a masked-out NaN would still poison
    a sum it is multiplied into.

    `dtype` is what attention computes in; `storage_dtype` is what pages hold: the same, or e4m3.
    """

    def __init__(
        self,
        name: str,
        rows: Sequence[tuple[int, ...]],
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
        storage_dtype: torch.dtype | None,
        allocate: Allocate = zeros,
    ) -> None:
        """`name` is for messages; `rows` has each layer's. Raises ValueError naming what is not allowed."""
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
        self._layers = [
            allocate((num_pages, page_size, *row), self.storage_dtype, self.device) for row in rows
        ]

    @property
    def num_layers(self) -> int:
        """Layers that have pages here."""
        return len(self._layers)

    def _tensors(self) -> Iterable[torch.Tensor]:
        """All that lies in the pages, the page being the first index."""
        return self._layers

    @property
    def nbytes(self) -> int:
        """Bytes of all layers, keys that they choose by included."""
        return sum(tensor.nbytes for tensor in self._tensors())

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
        for tensor in self._tensors():
            tensor.view(torch.uint8).index_fill_(0, index, 0)


class ChosenFromPages(LayerPages):
    """Pages that may also hold the keys by which layers choose what they attend to."""

    # None: every layer attends to all tokens.
    index_keys: IndexKeys | None = None

    def _tensors(self) -> Iterable[torch.Tensor]:
        return self._layers if self.index_keys is None else (*self._layers, *self.index_keys._tensors())


def bytes_per_page(config: ModelConfig, page_size: int, dtype: torch.dtype) -> int:
    """Bytes one page takes over all layers, keys and values together, and keys of blocks' choice."""
    row = sum(shape.num_kv_heads * shape.head_dim for shape in config.attention_shapes)
    keys_and_values, indexer = 2 * page_size * row * dtype.itemsize, config.block_indexer
    if indexer is None:
        return keys_and_values
    activations = TORCH_DTYPES[config.dtype]
    return keys_and_values + index_bytes_per_page(
        len(indexer.layers), indexer.row_dim, page_size, activations
    )


class KVCache(ChosenFromPages):
    """Keys and values of all layers that attend.

    One tensor `[num_pages, page_size, 2 * num_kv_heads, head_dim]` per layer: a token's keys and values
    lie side by side, so that a reader gathers both with one index. Layers have their own numbers of heads and
    of elements; `num_kv_heads` here is the largest.

    As e4m3, a key is stored as key / `key_scales[layer]`, a value as value / `value_scales[layer]`,
    saturating at 448. The scales are 1.0; a loader that finds `k_scale` and `v_scale` in a checkpoint sets
    them before the first step (captured graphs hold them as constants). Where layers choose blocks of
    tokens, the same pages hold the keys that they choose by.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        storage_dtype: torch.dtype | None = None,
        allocate: Allocate = zeros,
    ) -> None:
        rows = [(2 * shape.num_kv_heads, shape.head_dim) for shape in config.attention_shapes]
        super().__init__("KV", rows, num_pages, page_size, dtype, device, storage_dtype, allocate)
        self.num_kv_heads = config.num_kv_heads
        self.key_scales = [1.0] * len(rows)
        self.value_scales = [1.0] * len(rows)
        self._slots = [layer.flatten(0, 1) for layer in self._layers]
        indexer = config.block_indexer
        if indexer is not None:
            sizes = len(indexer.layers), indexer.row_dim
            self.index_keys = IndexKeys(*sizes, num_pages, page_size, dtype, device, allocate)

    def kv_heads(self, layer_id: int) -> int:
        """Key and value heads of a layer."""
        return self._layers[layer_id].shape[2] // 2

    def slots(self, layer_id: int) -> torch.Tensor:
        """The same memory by token slot, `[num_pages * page_size, 2 * num_kv_heads, head_dim]`."""
        return self._slots[layer_id]

    def keys(self, layer_id: int) -> torch.Tensor:
        """View of the keys, `[num_pages, page_size, num_kv_heads, head_dim]`."""
        return self._layers[layer_id][:, :, : self.kv_heads(layer_id)]

    def values(self, layer_id: int) -> torch.Tensor:
        """View of the values, `[num_pages, page_size, num_kv_heads, head_dim]`."""
        return self._layers[layer_id][:, :, self.kv_heads(layer_id) :]

    def append(
        self, layer_id: int, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Store new keys and values, `[T, num_kv_heads, head_dim]`, in slots int64 `[T]` of a layer."""
        scales = self.key_scales[layer_id], self.value_scales[layer_id]
        append_kv(self._slots[layer_id], key, value, slot_mapping, *scales)

    def append_rotated(
        self, layer_id: int, unrotated: Unrotated, value: torch.Tensor, slot_mapping: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same of keys that are normed and rotated first, with their queries; returns both."""
        scales = self.key_scales[layer_id], self.value_scales[layer_id]
        return rotate_and_append(*unrotated, value, self._slots[layer_id], slot_mapping, *scales)


class IndexKeys(LayerPages):
    """Keys of all layers that choose for themselves, counted among those.

    One tensor `[num_pages, page_size, row_dim]` per such layer, in the same pages as the latents and
    always in the type of the activations: 8-bit keys would choose other tokens. A row is a token's key, and,
    where tokens are chosen in pools, the logits of its weights in one (`ops.kv.pool_index_keys`), or where
    they are chosen by means of blocks, its rotation (`ops.kv.mean_index_keys`).
    """

    def __init__(
        self,
        num_layers: int,
        row_dim: int,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        allocate: Allocate = zeros,
    ) -> None:
        rows = [(row_dim,)] * num_layers
        super().__init__("index key", rows, num_pages, page_size, dtype, device, None, allocate)
        self.row_dim = row_dim

    def append(self, index_layer: int, keys: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Store rows `[T, row_dim]` in slots int64 `[T]`."""
        self._layers[index_layer].flatten(0, 1).index_copy_(0, slot_mapping, keys)

    def gather(self, index_layer: int, pages: torch.Tensor) -> torch.Tensor:
        """Pages side by side, `[len(pages) * page_size, row_dim]`."""
        return self._layers[index_layer].index_select(0, pages).flatten(0, 1)


def index_bytes_per_page(num_layers: int, row_dim: int, page_size: int, dtype: torch.dtype) -> int:
    """Bytes one page takes over all layers that choose for themselves."""
    return num_layers * page_size * row_dim * dtype.itemsize


class MlaCache(ChosenFromPages):
    """Latents of all layers that attend.

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
        allocate: Allocate = zeros,
    ) -> None:
        """`index_layers` choose what they attend to, by rows of `index_dim` elements."""
        rows = [(latent_dim + rope_dim,)] * num_layers
        super().__init__("MLA", rows, num_pages, page_size, dtype, device, storage_dtype, allocate)
        self.latent_dim = latent_dim
        self.rope_dim = rope_dim
        self.scales = [1.0] * num_layers
        if index_layers:
            sizes = index_layers, index_dim
            self.index_keys = IndexKeys(*sizes, num_pages, page_size, dtype, device, allocate)

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


def entries_per_page(rate: int, page_size: int) -> int:
    """Places in a page for entries of `rate` tokens each; 0: the layer has none.

    An entry lies in the page of its last token, so that pages of fewer tokens may have none, but a place.
    """
    return -(-page_size // rate) if rate else 0


class CompressedCache(LayerPages):
    """Of compressed attention: entries of all layers, `[num_pages, places, head_dim]` each, which are keys
    and values of all heads.

    The entry that ends with token t of a request is in the place `t % page_size // rate` of the token's page.
    In layers with an indexer, `index_keys` has its keys of the same entries in the same places. Tokens that
    are in no entry yet, and the window, are in `state_cache.RecentTokens`.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        storage_dtype: torch.dtype | None = None,
        allocate: Allocate = zeros,
    ) -> None:
        """`config` is the rank's own. Raises ValueError as `LayerPages`, and for 8-bit storage."""
        super().__init__("compressed", (), num_pages, page_size, dtype, device, storage_dtype)
        if self.is_quantised:
            raise ValueError(f"compressed pages of {storage_dtype} are not supported; allowed: {dtype}")
        sizes = config.compressed
        assert sizes is not None, "the family's reader fills `compressed`"
        self.rates, self._allocate = sizes.rates, allocate
        self._layers = [self._pages(rate, config.head_dim) for rate in sizes.rates]
        self._index_keys = {
            layer: self._pages(sizes.rates[layer], sizes.index_head_dim)
            for layer in sorted(sizes.sparse_layers)
        }

    def _pages(self, rate: int, row: int) -> torch.Tensor:
        shape = (self.num_pages, entries_per_page(rate, self.page_size), row)
        return self._allocate(shape, self.dtype, self.device)

    def _tensors(self) -> Iterable[torch.Tensor]:
        return (*self._layers, *self._index_keys.values())

    def index_keys(self, layer_id: int) -> torch.Tensor:
        """Of a layer with an indexer, `[num_pages, places, index_head_dim]`."""
        return self._index_keys[layer_id]


def compressed_bytes_per_page(
    sizes: CompressedAttentionConfig, head_dim: int, page_size: int, dtype: torch.dtype
) -> int:
    """Bytes one page takes over all layers."""
    entries = sum(entries_per_page(rate, page_size) for rate in sizes.rates) * head_dim
    places = sum(entries_per_page(sizes.rates[layer], page_size) for layer in sizes.sparse_layers)
    return (entries + places * sizes.index_head_dim) * dtype.itemsize


PagedCache = KVCache | MlaCache | CompressedCache


def page_bytes(config: ModelConfig, page_size: int, dtype: torch.dtype) -> int:
    """Bytes one page takes over all layers; `dtype` is what pages hold of latents, keys and values."""
    if config.compressed is not None:
        return compressed_bytes_per_page(config.compressed, config.head_dim, page_size, dtype)
    if config.mla is None:
        return bytes_per_page(config, page_size, dtype)
    mla, indexer = config.mla, config.mla.indexer
    num_layers, rope_dim = len(config.latent_layers), mla.qk_rope_head_dim
    latents = mla_bytes_per_page(num_layers, mla.kv_lora_rank, rope_dim, page_size, dtype)
    if indexer is None:
        return latents
    activations = TORCH_DTYPES[config.dtype]
    return latents + index_bytes_per_page(len(indexer.layers), indexer.row_dim, page_size, activations)


def make_cache(
    config: ModelConfig,
    num_pages: int,
    page_size: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    storage_dtype: torch.dtype | None = None,
    allocate: Allocate = zeros,
) -> PagedCache:
    """The cache of a rank whose own configuration is `config`; the rest is as in the classes."""
    if config.compressed is not None:
        return CompressedCache(config, num_pages, page_size, dtype, device, storage_dtype, allocate)
    if config.mla is None:
        return KVCache(config, num_pages, page_size, dtype, device, storage_dtype, allocate)
    indexer = config.mla.indexer
    return MlaCache(
        len(config.latent_layers),
        config.mla.kv_lora_rank,
        config.mla.qk_rope_head_dim,
        num_pages,
        page_size,
        dtype,
        device,
        storage_dtype,
        index_layers=len(indexer.layers) if indexer else 0,
        index_dim=indexer.row_dim if indexer else 0,
        allocate=allocate,
    )
