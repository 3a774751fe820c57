"""Consecutive layers on a CPU by one call, in steps whose rows are all computed alone.

In decode a layer's kernels take some ten microseconds each, and calling them one by one from Python takes
as long again. `_kernels.DecoderLayers` calls the same kernels in the same order on the same weights: both
ways give the same bits, so that a step may be computed either way. Layers of other kinds, and steps within
which something else is to happen (recording, streaming, deferral, a sampled trace, images), take the layers'
own `forward`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import nn

from gpu_service.attention.cpu_backend import AttendingRows, HostAttention
from gpu_service.cache.state_cache import StateSlots
from gpu_service.layers.context import ForwardContext
from gpu_service.layers.decoder import DecoderLayer, NormedResidualLayer, ResidualStream, SingleLayer
from gpu_service.layers.host_mixer import HostPlaces, Sight
from gpu_service.layers.moe import MoE, Router
from gpu_service.ops.host_kernels import MOST_SCORED_ROWS
from gpu_service.ops.rope import RopeTable
from moebius import _kernels

# Kinds of layers, some of which one call computes.
HostLayer = DecoderLayer | NormedResidualLayer | SingleLayer


class HostLayers:
    """Some consecutive layers; made by `HostRuns`."""

    def __init__(
        self,
        weights: Sequence[_kernels.LayerWeights],
        layers: Sequence[HostLayer],
        sights: Sequence[Sight],
        attention: HostAttention,
        end: int,
    ) -> None:
        """`sights`: those of the layers that attend; `end`: the number of the layer after the last one."""
        self.end = end
        self._sights, self._attention, self._dtype = list(sights), attention, attention.paged_cache.dtype
        self._has_states = any(_keeps_state(layer) for layer in layers)
        self._moes = [layer.block for layer in layers if isinstance(layer.block, MoE)]
        # Layers with routed experts, and experts of a row there.
        self._routed = [(moe.layer_id, moe.gate.top_k) for moe in self._moes if isinstance(moe.gate, Router)]
        # Sums over experts are float32.
        last = layers[-1].block
        sums_experts = isinstance(last, MoE) and not last.has_own_space
        self._update_dtype = torch.float32 if sums_experts else self._dtype
        is_bfloat16, size = self._dtype == torch.bfloat16, layers[0].hidden_size
        self._kernel = _kernels.DecoderLayers(attention.threads, is_bfloat16, size, weights)

    def forward(self, stream: ResidualStream, ropes: Sequence[RopeTable], context: ForwardContext) -> bool:
        """Adds the layers to the stream; False: they have to be called one by one, and nothing has changed.

        Raises what the expert client raises; then the step may be run again unchanged.
        """
        rows = [self._attention.lone_rows(*sight) for sight in self._sights]
        seen = [row for row in rows if row is not None]
        if len(seen) < len(rows) or any(moe.on_routed is not None for moe in self._moes):
            return False
        inputs = context.inputs
        if self._has_states and not (inputs.is_uniform_decode or inputs.depths):
            return False
        if not self._moes:
            self._run(stream, ropes, context, seen, None)
            return True
        if context.experts is None or context.experts.call_log is not None:
            return False
        with context.experts.driven_by_host(context.inputs.positions.shape[0]) as experts:
            if experts is None:
                return False
            self._run(stream, ropes, context, seen, experts)
        return True

    def _run(
        self,
        stream: ResidualStream,
        ropes: Sequence[RopeTable],
        context: ForwardContext,
        seen: Sequence[AttendingRows],
        experts: _kernels.RoutedExperts | None,
    ) -> None:
        inputs, residual = context.inputs, stream.sum()
        slots = (inputs.state_reads, inputs.state_writes) if self._has_states else (None, None)
        reads, writes = (0 if part is None else part.data_ptr() for part in slots)
        update = torch.empty(residual.shape, dtype=self._update_dtype)
        tables = [(t.cos.data_ptr(), t.sin.data_ptr(), t.cos.shape[-1], t.interleaved) for t in ropes]
        noted = self._noted(context, residual.shape[0])
        self._kernel.run(
            experts,
            residual.data_ptr(),
            update.data_ptr(),
            residual.shape[0],
            inputs.slot_mapping.data_ptr(),
            inputs.block_table.data_ptr(),
            inputs.block_table.stride(0),
            seen[0].requests.data_ptr() if seen else 0,
            tables,
            [(rows.begins.data_ptr(), rows.ends.data_ptr()) for rows in seen],
            reads,
            writes,
            noted,
        )
        if context.samples is not None:
            for layer, _ in noted:
                context.samples.serve(layer, residual.shape[0])
        stream.add(update)

    def _noted(self, context: ForwardContext, rows: int) -> list[tuple[int, int]]:
        """Returns the layers whose choices are sampled, with where they are copied to."""
        if context.samples is None:
            return []
        found = [(layer, context.samples.address(layer, rows, top_k)) for layer, top_k in self._routed]
        return [(layer, address) for layer, address in found if address is not None]


def _keeps_state(layer: HostLayer) -> bool:
    mixer = layer.host_mixer
    return mixer is not None and mixer.sight is None


_NONE: Mapping[int, HostLayers] = {}


class HostRuns:
    """Which of a stage's layers are computed together, once it is known what they attend with."""

    def __init__(
        self,
        layers: Sequence[nn.Module],
        first_layer: int,
        rotary_of: Sequence[int | None],
        begins: Collection[int] = (),
    ) -> None:
        """`layers`: those that every token passes, from number `first_layer` on; `rotary_of`: by number, the
        index of its rotary table; `begins`: layers before which a run ends, because the stream is read there.
        """
        self._layers, self._first_layer, self._rotary_of = layers, first_layer, rotary_of
        self._begins = begins
        self._attention: HostAttention | None = None
        self._states: StateSlots | None = None
        self._runs: Mapping[int, HostLayers] = _NONE

    def of_step(self, context: ForwardContext) -> Mapping[int, HostLayers]:
        """Returns the runs that the step may use, by the number of their first layer."""
        attention, inputs = context.attention, context.inputs
        if not isinstance(attention, HostAttention) or inputs.positions.shape[0] > MOST_SCORED_ROWS:
            return _NONE
        watchers = context.recorder, context.first_overflow, context.between_layers, context.deferral
        devices = context.resident, context.streamed, inputs.image_features, inputs.valid_rows
        if any(part is not None for part in (*watchers, *devices)):
            return _NONE
        if attention is not self._attention or context.states is not self._states:
            self._attention, self._states = attention, context.states
            self._runs = self._found(attention)
        return self._runs

    def _found(self, attention: HostAttention) -> Mapping[int, HostLayers]:
        """Returns the longest runs of layers that have weights for the kernels."""
        runs: dict[int, HostLayers] = {}
        number = self._first_layer
        while number < self._first_layer + len(self._layers):
            run = self._run_from(number, attention)
            if run is not None:
                runs[number] = run
            number = number + 1 if run is None else run.end
        return runs

    def _run_from(self, begin: int, attention: HostAttention) -> HostLayers | None:
        weights: list[_kernels.LayerWeights] = []
        layers: list[HostLayer] = []
        sights: list[Sight] = []
        for number, layer in enumerate(self._layers[begin - self._first_layer :], begin):
            if weights and number in self._begins:
                break
            if not isinstance(layer, HostLayer):
                break
            mixer = layer.host_mixer
            sight = None if mixer is None else mixer.sight
            if sight is not None and sight not in sights:
                sights.append(sight)
            place = 0 if sight is None else sights.index(sight)
            places = HostPlaces(attention.paged_cache, self._states, self._rotary_of[number], place)
            found = layer.host_weights(places)
            if found is None:
                break
            weights.append(found)
            layers.append(layer)
        return HostLayers(weights, layers, sights, attention, begin + len(layers)) if layers else None
