"""Read the two inputs of the conversion: the dense GGUF and the expert split."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from moebius.app.demo_model import recipe
from moebius.app.demo_model.errors import DemoModelError
from moebius.checkpoint.errors import CheckpointError
from moebius.checkpoint.reader import SliceReader
from moebius.checkpoint.stored_values import as_float32

if TYPE_CHECKING:
    from moebius.checkpoint.gguf.model import GgufModel


class DenseWeights:
    """The GGUF's tensors, dequantised to float32 one at a time, and a record of which were used."""

    def __init__(self, model: GgufModel) -> None:
        """See `open`."""
        self._model = model
        self._unused = set(model.tensors)

    @classmethod
    def open(cls, path: Path) -> DenseWeights:
        """Open a GGUF file; raises DemoModelError when it is not GGUF or not the recipe's geometry."""
        from moebius.checkpoint.gguf.model import open_gguf

        try:
            weights = cls(open_gguf(path))
        except CheckpointError as error:
            raise DemoModelError(f"{path} is not a readable GGUF file: {error}") from error
        weights._check_geometry()
        return weights

    def field(self, name: str) -> Any:
        """Return a metadata value (number, string or list); raises DemoModelError when it is absent."""
        if name not in self._model.metadata:
            raise DemoModelError(f"the GGUF file has no field {name!r}")
        return self._model.metadata[name]

    def tensor(self, name: str) -> NDArray[np.float32]:
        """Return a tensor as float32, [out_features, in_features] for matrices."""
        from moebius.checkpoint.gguf.tensors import in_floats

        if name not in self._model.tensors:
            raise DemoModelError(f"the GGUF file has no tensor {name!r}")
        self._unused.discard(name)
        info = in_floats(self._model.tensors[name], name)
        with SliceReader() as reader:
            return as_float32(reader.read(info), info.dtype)

    def layer(self, layer: int, name: str) -> NDArray[np.float32]:
        """Return `blk.<layer>.<name>.weight` as float32."""
        return self.tensor(f"blk.{layer}.{name}.weight")

    def require_all_used(self) -> None:
        """Raise DemoModelError when a tensor of the file went into no output: the recipe missed it."""
        if self._unused:
            raise DemoModelError(f"GGUF tensors that the recipe does not use: {sorted(self._unused)}")

    def _check_geometry(self) -> None:
        expected = {
            "general.architecture": "llama",
            "llama.block_count": recipe.NUM_LAYERS,
            "llama.embedding_length": recipe.HIDDEN_SIZE,
            "llama.feed_forward_length": recipe.DENSE_INTERMEDIATE_SIZE,
            "llama.attention.head_count": recipe.NUM_HEADS,
            "llama.attention.head_count_kv": recipe.NUM_KV_HEADS,
        }
        found = {name: self.field(name) for name in expected}
        if found != expected:
            raise DemoModelError(f"the GGUF file describes another model: {found}, expected {expected}")


class ExpertSplit:
    """How each dense MLP becomes experts; filled by `load` from split.safetensors.

    neuron_order: int16 [layers, 1536], a permutation per layer: shared neurons first, then expert 0, 1, ...
    router: float16 [layers, experts, hidden] and bias: float32 [layers, experts], both before scaling.
    """

    def __init__(
        self, neuron_order: NDArray[np.int16], router: NDArray[np.float16], bias: NDArray[np.float32]
    ) -> None:
        """Filled by `load`; raises DemoModelError when a shape or a permutation is wrong."""
        self.neuron_order = neuron_order
        self.router = router
        self.bias = bias
        layers, experts = recipe.NUM_LAYERS, recipe.NUM_EXPERTS
        expected = {
            "neuron_order": (layers, recipe.DENSE_INTERMEDIATE_SIZE),
            "router": (layers, experts, recipe.HIDDEN_SIZE),
            "bias": (layers, experts),
        }
        found = {"neuron_order": neuron_order.shape, "router": router.shape, "bias": bias.shape}
        if found != expected:
            raise DemoModelError(f"the split has shapes {found}, expected {expected}")
        identity = np.arange(recipe.DENSE_INTERMEDIATE_SIZE)
        if not (np.sort(neuron_order, axis=1) == identity).all():
            raise DemoModelError(
                "the split's neuron_order is not a permutation of all neurons in every layer"
            )

    @classmethod
    def load(cls, path: Path) -> ExpertSplit:
        """Read the split from a safetensors file."""
        from safetensors.numpy import load_file

        try:
            tensors = load_file(path)
            return cls(tensors["neuron_order"], tensors["router"], tensors["bias"])
        except KeyError as error:
            raise DemoModelError(f"{path} has no tensor {error}") from error
