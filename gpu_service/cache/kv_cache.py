"""The device tensors of paged attention: keys and values of heads, latents with an indexer's keys, or
entries that stand for several tokens each, with the keys to choose them by.

One tensor of pages per layer. `page_pool.py` knows who owns a page, `radix_cache.py` whose tokens are cached.
Latents: DeepSeek-V2 (arXiv:2405.04434), section 2.1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from gpu_service.cache.fp8 import E4M3, quantise_e4m3
from gpu_service.device.stream import own_pages
from gpu_service.ops.kv import append_kv, rotate_and_append
from gpu_service.ops.rope import Unrotated
from moebius.models.layers.compressed import CompressedAttention, SharedEntryAttention, entry_mixers
from moebius.models.layers.gqa import GQA
from moebius.models.layers.latent import MLA
from moebius.models.layers.layer import Layers, cached, divided, indexed, mixers
from moebius.models.layers.layer import page_bytes as layers_page_bytes
from moebius.models.layers.mixer import Mixer
from moebius.models.layers.tensors import CacheTensor

# Memory of pages, by shape (the page first), type and device; pages that may be used are zeros.
Allocate = Callable[[Sequence[int], torch.dtype, torch.device], torch.Tensor]


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Returns pages that all have memory for good; on a CPU once used, as mappings begin as zeros."""
    if device.type == "cpu" and all(shape):
        return own_pages(shape, dtype)
    return torch.zeros(tuple(shape), dtype=dtype, device=device)


class LayerPages:
    """Tensors `[num_pages, places, *row]`, one for each `CacheTensor` of layers, whose rows may differ.

    Token `t` of a request lies in page `t // page_size` of its table, in the place `t % page_size`, divided
    by the tokens that a place stands for. Page 0 is the dummy page: padding reads and writes it, no request
    owns it. Pages start as zeros, because a masked-out NaN would still poison a sum it is multiplied into.

    `dtype` is what attention computes in; `storage_dtype` is what pages hold: the same, or e4m3.
    """

    def __init__(
        self,
        tensors: Sequence[CacheTensor],
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        storage_dtype: torch.dtype | None = None,
        allocate: Allocate = zeros,
    ) -> None:
        """Raises ValueError naming what is not allowed."""
        if num_pages < 2 or page_size < 1:
            raise ValueError(
                f"a cache needs num_pages >= 2 (page 0 is the dummy) and page_size >= 1, "
                f"got {num_pages} pages of {page_size}"
            )
        if storage_dtype not in (None, dtype, E4M3):
            raise ValueError(f"pages of {storage_dtype} are not supported; allowed: {dtype}, {E4M3}")
        self.num_pages = num_pages
        self.page_size = page_size
        self.dtype = dtype
        self.storage_dtype = storage_dtype or dtype
        self.device = torch.device(device)
        self._layers = [
            allocate((num_pages, part.places(page_size), *part.row), self.storage_dtype, self.device)
            for part in tensors
        ]

    @property
    def num_layers(self) -> int:
        """Layers that have pages here."""
        return len(self._layers)

    def _tensors(self) -> Iterable[torch.Tensor]:
        """Returns all that lies in the pages, the page being the first index."""
        return self._layers

    def page_tensors(self) -> list[torch.Tensor]:
        """Returns all memory of pages, the page being the first index: for copies of whole pages."""
        return list(self._tensors())

    @property
    def nbytes(self) -> int:
        """Bytes of all layers, keys that they choose by included."""
        return sum(tensor.nbytes for tensor in self._tensors())

    @property
    def is_quantised(self) -> bool:
        """Returns whether readers must convert what they gather."""
        return self.storage_dtype != self.dtype

    def host_storage(self, layer_id: int) -> tuple[bool, float, float]:
        """Returns how a layer's pages hold elements, for kernels of a CPU: whether as e4m3, and the scales of
        keys and of values.
        """
        return self.is_quantised, *self._scales_of(layer_id)

    def _scales_of(self, layer_id: int) -> tuple[float, float]:
        return 1.0, 1.0

    def pages(self, layer_id: int) -> torch.Tensor:
        """Returns a layer, `[num_pages, places, *row]`."""
        return self._layers[layer_id]

    def zero_pages(self, pages: Sequence[int]) -> None:
        """Clear pages that may hold NaN or Inf (a failed request's), before anyone else is given them."""
        if not pages:
            return
        index = torch.as_tensor(pages, dtype=torch.int64, device=self.device)
        for tensor in self._tensors():
            tensor.view(torch.uint8).index_fill_(0, index, 0)


class IndexKeys(LayerPages):
    """Keys of all layers that choose for themselves, counted among those.

    They lie in the same pages as what is chosen and are always in the type of the activations: 8-bit keys
    would choose other tokens. A row is a token's key, and, where tokens are chosen in pools, the logits of
    its weights in one (`ops.kv.pool_index_keys`), or where they are chosen by means of blocks, its rotation
    (`ops.kv.mean_index_keys`); of compressed attention it is an entry's.
    """

    @property
    def row_dim(self) -> int:
        """Elements of a row."""
        return self._layers[0].shape[-1]

    def append(self, index_layer: int, keys: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Store rows `[T, row_dim]` in slots int64 `[T]`."""
        self._layers[index_layer].flatten(0, 1).index_copy_(0, slot_mapping, keys)

    def gather(self, index_layer: int, pages: torch.Tensor) -> torch.Tensor:
        """Returns pages side by side, `[len(pages) * page_size, row_dim]`."""
        return self._layers[index_layer].index_select(0, pages).flatten(0, 1)


class AttendedPages(LayerPages):
    """What layers attend to, and the keys by which some of them choose it."""

    def __init__(
        self,
        layers: Layers,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        storage_dtype: torch.dtype | None = None,
        allocate: Allocate = zeros,
    ) -> None:
        """`layers` are the rank's own. Raises ValueError as `LayerPages`."""
        attended = cached(layers)
        sizes = num_pages, page_size, dtype, device
        super().__init__([part for _, part in attended], *sizes, storage_dtype, allocate)
        if self.is_quantised and not all(mixer.stores_8_bits for mixer, _ in attended):
            raise ValueError(f"compressed pages of {storage_dtype} are not supported; allowed: {dtype}")
        # What a draft model keeps of the same tokens, in pages of the same numbers; None: there is none.
        self.beside: PagedCache | None = None
        chosen_by = indexed(layers)
        # None: every layer attends to all tokens.
        self.index_keys = IndexKeys(chosen_by, *sizes, None, allocate) if chosen_by else None
        self._describe(layers)

    def _describe(self, layers: Layers) -> None:
        """Notes what readers ask the kind of cache; called once the pages are there."""

    def _tensors(self) -> Iterable[torch.Tensor]:
        parts = (part for part in (self.index_keys, self.beside) if part is not None)
        return (*self._layers, *(tensor for part in parts for tensor in part._tensors()))


class KVCache(AttendedPages):
    """Keys and values of all layers that attend.

    One tensor `[num_pages, page_size, 2 * num_kv_heads, head_dim]` per layer: a token's keys and values
    lie side by side, so that a reader gathers both with one index. Layers have their own numbers of heads and
    of elements; `num_kv_heads` here is the largest.

    As e4m3, a key is stored as key / `key_scales[layer]`, a value as value / `value_scales[layer]`,
    saturating at 448. The scales are 1.0; a loader that finds `k_scale` and `v_scale` in a checkpoint sets
    them before the first step (captured graphs hold them as constants). Where layers choose blocks of
    tokens, the same pages hold the keys that they choose by.
    """

    def _describe(self, layers: Layers) -> None:
        self.num_kv_heads = max(layer.shape[2] for layer in self._layers) // 2
        self.key_scales = [1.0] * self.num_layers
        self.value_scales = [1.0] * self.num_layers
        self._slots = [layer.flatten(0, 1) for layer in self._layers]

    def _scales_of(self, layer_id: int) -> tuple[float, float]:
        return self.key_scales[layer_id], self.value_scales[layer_id]

    def kv_heads(self, layer_id: int) -> int:
        """Returns key and value heads of a layer."""
        return self._layers[layer_id].shape[2] // 2

    def slots(self, layer_id: int) -> torch.Tensor:
        """Returns the same memory by token slot, `[num_pages * page_size, 2 * num_kv_heads, head_dim]`."""
        return self._slots[layer_id]

    def keys(self, layer_id: int) -> torch.Tensor:
        """Returns a view of the keys, `[num_pages, page_size, num_kv_heads, head_dim]`."""
        return self._layers[layer_id][:, :, : self.kv_heads(layer_id)]

    def values(self, layer_id: int) -> torch.Tensor:
        """Returns a view of the values, `[num_pages, page_size, num_kv_heads, head_dim]`."""
        return self._layers[layer_id][:, :, self.kv_heads(layer_id) :]

    def append(
        self, layer_id: int, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Store new keys and values, `[T, num_kv_heads, head_dim]`, in slots int64 `[T]` of a layer."""
        append_kv(self._slots[layer_id], key, value, slot_mapping, *self._scales_of(layer_id))

    def append_rotated(
        self, layer_id: int, unrotated: Unrotated, value: torch.Tensor, slot_mapping: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores keys that are normed and rotated first, with their queries; returns both."""
        slots, scales = self._slots[layer_id], self._scales_of(layer_id)
        return rotate_and_append(*unrotated, value, slots, slot_mapping, *scales)


class MlaCache(AttendedPages):
    """Latents of all layers that attend.

    One tensor `[num_pages, page_size, latent_dim + rope_dim]` per layer: a token's compressed keys and
    values, then its rotated key part, which all heads share. The scales are those of `KVCache`, but one per
    layer, set by a loader that finds one in the checkpoint. Of a model with sparse attention, the same pages
    hold the indexer's keys.
    """

    def _describe(self, layers: Layers) -> None:
        """The layers' latents are alike."""
        mixer = next(mixer for mixer in mixers(layers) if isinstance(mixer, MLA))
        self.latent_dim, self.rope_dim = mixer.kv_lora_rank, mixer.qk_rope_head_dim
        self.scales = [1.0] * self.num_layers

    def _scales_of(self, layer_id: int) -> tuple[float, float]:
        return self.scales[layer_id], self.scales[layer_id]

    def latents(self, layer_id: int) -> torch.Tensor:
        """Returns a view of the compressed part, `[num_pages, page_size, latent_dim]`."""
        return self._layers[layer_id][..., : self.latent_dim]

    def rotated(self, layer_id: int) -> torch.Tensor:
        """Returns a view of the rotated part, `[num_pages, page_size, rope_dim]`."""
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
        """Returns pages side by side in `dtype`, `[len(pages) * page_size, latent_dim + rope_dim]`."""
        return self._select(layer_id, self._layers[layer_id], pages).flatten(0, 1)

    def gather_slots(self, layer_id: int, slots: torch.Tensor) -> torch.Tensor:
        """Returns single tokens in `dtype`, `[len(slots), latent_dim + rope_dim]`."""
        return self._select(layer_id, self._layers[layer_id].flatten(0, 1), slots)

    def _select(self, layer_id: int, stored: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        if not self.is_quantised:
            return stored.index_select(0, index)
        gathered = stored.view(torch.uint8).index_select(0, index).view(self.storage_dtype)
        return gathered.to(self.dtype).mul_(self.scales[layer_id])


class CompressedCache(AttendedPages):
    """Holds the entries of compressed attention of all layers, `[num_pages, places, head_dim]` each, which
    are keys and values of all heads; layers without entries have no places.

    The entry that ends with token t of a request is in the place `t % page_size // rate` of the token's page.
    In layers with an indexer, `index_keys` has its keys of the same entries in the same places. Tokens that
    are in no entry yet, and the window, are in the layers' states.
    """

    def _describe(self, layers: Layers) -> None:
        kept = entry_mixers(layers)
        self.rates = tuple(mixer.rate for mixer in kept)
        choosing = (layer for layer, mixer in enumerate(kept) if mixer.indexer is not None)
        self._index_layers = {layer: index for index, layer in enumerate(choosing)}

    def index_pages(self, layer_id: int) -> torch.Tensor:
        """Returns the pages of a layer with an indexer, `[num_pages, places, index_head_dim]`."""
        assert self.index_keys is not None, "asked only of layers that choose"
        return self.index_keys.pages(self._index_layers[layer_id])

    def entry_places(
        self, layer_id: int, positions: torch.Tensor, slot_mapping: torch.Tensor
    ) -> torch.Tensor:
        """Returns where the entries lie that end with tokens at `positions` in slots `slot_mapping`, counted
        over all pages, int64 `[T]`; of other tokens a place in the dummy page.
        """
        rate, page_size = self.rates[layer_id], self.page_size
        places = slot_mapping // page_size * -(-page_size // rate) + slot_mapping % page_size // rate
        return torch.where((positions + 1) % rate == 0, places, 0)


PagedCache = KVCache | MlaCache | CompressedCache
# Which cache holds what a kind of mixer attends to; a rank has one.
CACHES: dict[type[Mixer], type[KVCache] | type[MlaCache] | type[CompressedCache]] = {
    GQA: KVCache,
    MLA: MlaCache,
    CompressedAttention: CompressedCache,
    SharedEntryAttention: CompressedCache,
}


def page_bytes(layers: Layers, page_size: int, storage_dtype: torch.dtype, dtype: torch.dtype) -> int:
    """Bytes one page takes over all layers; `storage_dtype` is what pages hold of latents, keys and values,
    `dtype` the activations' type.
    """
    return layers_page_bytes(layers, page_size, storage_dtype.itemsize, dtype.itemsize)


def make_cache(
    layers: Layers,
    num_pages: int,
    page_size: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    storage_dtype: torch.dtype | None = None,
    allocate: Allocate = zeros,
    beside: Layers = (),
) -> PagedCache:
    """The cache of a rank's own layers, and beside it of a draft model's, `beside`, or of an EAGLE-3 head
    whose cache is of another kind; the rest is as in `AttendedPages`.
    """
    layers, apart = divided(layers)
    beside = beside or apart
    kind = next(type(mixer) for mixer, _ in cached(layers))
    sizes = num_pages, page_size, dtype, device, storage_dtype, allocate
    cache = CACHES[kind](layers, *sizes)
    if beside:
        cache.beside = make_cache(beside, *sizes)
    return cache
