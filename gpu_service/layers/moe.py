"""What follows attention in a layer: an MLP, or the mixture-of-experts block.

The block routes, and adds up what expert servers and the device itself compute.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import nn
from torch.nn import functional

from gpu_service.core.parallel import ParallelContext
from gpu_service.core.step import ForwardInputs
from gpu_service.layers.asked_experts import AskedExperts, ask_experts
from gpu_service.layers.composition import Composition
from gpu_service.layers.context import ForwardContext
from gpu_service.layers.deferral import Collect, add_late
from gpu_service.layers.linear import Linear, Projection, RowParallelLinear, Seam
from gpu_service.layers.norm import ScaledRMSNorm, make_norm
from gpu_service.layers.rank_weights import RankWeights
from gpu_service.ops.activation import (
    CLAMPED_ACTIVATIONS,
    GATED_ACTIVATIONS,
    PLAIN_ACTIVATIONS,
    apply_gate,
)
from gpu_service.ops.host_kernels import routing_rule
from gpu_service.ops.linear import add_norm_linear, add_norm_route, linear
from gpu_service.ops.router import choose_by_kind, route, weigh_chosen, zero_experts
from moebius import _kernels
from moebius.checkpoint.errors import CheckpointError
from moebius.models.layers import ffn as specs
from moebius.models.layers.ffn import Dense
from moebius.models.layers.router import ExpertKindsConfig, RouterConfig


class MLP(nn.Module):
    """`down(act(gate(x)) * up(x))`, or `down(act(up(x)))` where the activation has no gate.

    Every rank holds a part of the intermediate dimension.
    """

    def __init__(
        self, spec: Dense, own: RankWeights, parallel: ParallelContext, *, reduce: bool = True
    ) -> None:
        """`reduce=False` leaves the sum over ranks to the caller.

        The activated gate is cut off above the limit, and `up` on both sides.
        """
        super().__init__()
        activation = spec.activation
        self.gate_up_proj = Linear(own.under("gate_up_proj"))
        self.down_proj = RowParallelLinear(own.under("down_proj"), parallel, reduce=reduce)
        activations: Mapping[str, Callable[..., torch.Tensor]] = PLAIN_ACTIVATIONS | GATED_ACTIVATIONS
        self._activation: Callable[[torch.Tensor], torch.Tensor] = activations[activation]
        if activation == "gpt_oss":
            self._activation = partial(GATED_ACTIVATIONS[activation], alpha=spec.alpha, limit=spec.limit)
        elif spec.limit != math.inf:
            self._activation = partial(CLAMPED_ACTIVATIONS[activation], limit=spec.limit)

    def host_weights(self, output_gate: torch.Tensor | None = None) -> _kernels.MlpWeights | None:
        """Returns the block as `_kernels.DecoderLayers` computes it; None: that computes another one.

        `output_gate` `[1, H]`: of the products by whose sigmoids it is weighed, if it is.
        """
        gate_up, down = self.gate_up_proj.projection, self.down_proj.projection
        squares = self._activation is PLAIN_ACTIVATIONS["relu2"]
        known = squares or self._activation is GATED_ACTIVATIONS["silu"]
        if gate_up is None or down is None or not known:
            return None
        gate = 0 if output_gate is None else output_gate.data_ptr()
        return _kernels.MlpWeights(gate_up, down, gate, squares)

    def read_seam(self, seam: Seam, inputs: ForwardInputs) -> tuple[torch.Tensor, ...] | None:
        """With gate and up, see `ReadsSeam`."""
        return self.gate_up_proj.after_seam(seam)

    def forward(
        self, hidden_states: torch.Tensor, context: ForwardContext, projected: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Maps `[T, H]` to a new `[T, H]`; the context is part of the signature that MLP and MoE share.

        `projected`: gate and up, if they were computed already; may be overwritten.
        """
        if projected is None:
            projected = self.gate_up_proj(hidden_states)
        output: torch.Tensor = self.down_proj(self._activation(projected))
        return output


class ExpertGate(nn.Module):
    """One product of the hidden states, by whose sigmoid the always active experts count."""

    def __init__(self, own: RankWeights) -> None:
        super().__init__()
        self.weight = own.parameter("weight")

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Maps `[T, H]` to `[T, 1]`."""
        return linear(hidden_states, self.weight, None)


class Router(nn.Module):
    """Gate matmul followed by `ops.router.route`.

    The weight is kept in the dtype the GEMM runs in.
    """

    def __init__(self, config: RouterConfig, own: RankWeights) -> None:
        super().__init__()
        self.weight, self.bias = own.parameter("weight"), own.optional("bias")
        self.e_score_correction_bias = own.optional("e_score_correction_bias")
        # Experts of each token id, where these choose them.
        self.tid2eid = own.optional("tid2eid")
        self.expert_scales = own.optional("expert_scales")
        self._config = config
        self.top_k = config.top_k
        # As `host_weights` gives it away.
        self._wide_bias: torch.Tensor | None = None

    def host_weights(self, space: tuple[Projection, ...] = ()) -> _kernels.RouterWeights | None:
        """Returns the router as `_kernels.DecoderLayers` computes it; None: it chooses in another way.

        `space`: the projections to a space of the experts' and back, if they have one.
        """
        rule, weight, correction = routing_rule(self._config), self.weight, self.e_score_correction_bias
        kinds = (torch.float32, torch.bfloat16)
        has_more = self.tid2eid is not None or self.expert_scales is not None
        if rule is None or has_more or weight.dtype not in kinds or not weight.is_contiguous():
            return None
        self._wide_bias = None if self.bias is None else self.bias.float()
        bias = 0 if self._wide_bias is None else self._wide_bias.data_ptr()
        chosen_by = 0 if correction is None else correction.data_ptr()
        return _kernels.RouterWeights(
            weight.data_ptr(), weight.dtype == kinds[1], bias, chosen_by, rule, *space
        )

    def pack(self) -> None:
        """Checks what was loaded; the loader calls it once. Raises CheckpointError for an unknown expert."""
        if self.tid2eid is not None and self.tid2eid.numel():
            least, most = (int(bound) for bound in self.tid2eid.aminmax())
            if least < 0 or most >= self._config.num_experts:
                raise CheckpointError(
                    f"tid2eid has expert {least if least < 0 else most}; allowed: 0 to "
                    f"{self._config.num_experts - 1}"
                )

    def forward(
        self, hidden_states: torch.Tensor, inputs: ForwardInputs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Maps `[T, H]` to weights float32 `[T, top_k]` and ids int32 `[T, top_k]`; -1 where not valid.

        Ids from `num_experts` on are choices without weights.
        """
        return self._choose(linear(hidden_states.to(self.weight.dtype), self.weight, self.bias), inputs)

    def read_seam(self, seam: Seam, inputs: ForwardInputs) -> tuple[torch.Tensor, ...]:
        """Returns the sum, its norm, and what `forward` says of that."""
        if self.tid2eid is not None or self.expert_scales is not None:
            total, normed, logits = add_norm_linear(*seam, self.weight, self.bias)
            return total, normed, *self._choose(logits, inputs)
        correction = self.e_score_correction_bias
        bias = None if correction is None else correction.flatten()
        return add_norm_route(*seam, self.weight, self.bias, bias, self._config, inputs.valid_rows)

    def _choose(self, logits: torch.Tensor, inputs: ForwardInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes `forward` of rows whose logits `[T, num_choices]` were computed already."""
        valid_rows, bias = inputs.valid_rows, self.e_score_correction_bias
        if self.tid2eid is not None:
            chosen = self.tid2eid.index_select(0, inputs.input_ids)
            return weigh_chosen(logits, chosen, self._config, valid_rows)
        weights, ids = route(logits, None if bias is None else bias.flatten(), self._config, valid_rows)
        if self.expert_scales is not None:
            weights = weights * self.expert_scales[ids.clamp(min=0).long()]
        return weights, ids


class RouterOfKinds(nn.Module):
    """Two gates, one for each kind of experts; a token's id says which of them decides.

    Both are computed for all rows, few logits next to what an expert costs. Attribute names, and gates that
    lie `[H, E]`, are those of the checkpoint; `pack` puts them into one.
    """

    def __init__(self, config: RouterConfig, kinds: ExpertKindsConfig, own: RankWeights) -> None:
        super().__init__()
        self.weight, self.weight_1 = own.optional("weight"), own.optional("weight_1")
        self.e_score_correction_bias = own.parameter("e_score_correction_bias")
        self._config = replace(config, num_experts=kinds.num_experts, top_k=kinds.top_k)
        self._kinds = kinds
        # Filled by `pack`: both gates `[2 * E, H]`, and the ids int64 `[V]` of tokens of the second kind.
        self._gates: torch.Tensor | None = None
        self._tokens: torch.Tensor | None = None

    def pack(self) -> None:
        """From the loaded form to the one in use; the loader calls it once."""
        assert self.weight is not None
        assert self.weight_1 is not None
        self._gates = torch.cat((self.weight, self.weight_1), dim=1).t().contiguous()
        self._tokens = torch.tensor(self._kinds.tokens, dtype=torch.int64, device=self._gates.device)
        self.weight = self.weight_1 = None

    def forward(
        self, hidden_states: torch.Tensor, inputs: ForwardInputs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`[T, H]` to weights float32 and ids int32 of parts of experts, see `ops.router.choose_by_kind`."""
        assert self._gates is not None, "the loader packs what it has loaded"
        assert self._tokens is not None
        logits = functional.linear(hidden_states.float(), self._gates)
        biases, config, valid = self.e_score_correction_bias, self._config, inputs.valid_rows
        first, second = (
            route(own, bias, config, valid) for own, bias in zip(logits.chunk(2, dim=1), biases, strict=True)
        )
        kinds = self._kinds
        return choose_by_kind(
            inputs.input_ids, self._tokens, first, second, kinds.num_experts, kinds.num_parts
        )


class MoE(nn.Module):
    """Route, submit, compute shared, resident and streamed experts meanwhile, collect, add.

    A layer without resident or streamed experts does nothing for them, and one whose experts are all here
    submits nothing.

    Holds no routed expert's weights. The routing weights already carry the family's scaling factor, so
    what `collect` returns is final.
    """

    def __init__(self, spec: specs.MoE, layer_id: int, made: Composition) -> None:
        """`layer_id`: the layer's number in the checkpoint, by which experts are asked."""
        super().__init__()
        self.layer_id, router, parallel = layer_id, spec.router, made.parallel
        own = made.weights(spec.weights(made.hidden_size))
        self.gate: Router | RouterOfKinds
        if spec.kinds is None:
            self.gate = Router(router, own.under("gate"))
        else:
            self.gate = RouterOfKinds(router, spec.kinds, own.under("gate"))
        self.shared_experts: MLP | None = None
        if spec.shared is not None:
            self.shared_experts = MLP(spec.shared, own.under("shared_experts"), parallel, reduce=False)
        self.fc1_latent_proj, self.fc2_latent_proj = (
            Linear(declared) if (declared := own.under(name)) else None
            for name in ("fc1_latent_proj", "fc2_latent_proj")
        )
        self.shared_expert_gate: ExpertGate | None = None
        if gate := own.under("shared_expert_gate"):
            self.shared_expert_gate = ExpertGate(gate)
        self._weighs_inputs, self._output_scale = router.weighs_inputs, spec.output_scale
        # Experts with weights, where a router also chooses others.
        self._num_experts = router.num_experts if router.num_zero_experts else None
        self._group = parallel.tensor_group
        # Answers of all ranks are added: one of them counts what all could compute.
        self._adds_zero_experts = parallel.tp_rank == 0
        # Called with rows, ids and weights that the experts are about to be given; `moebius verify` sets it.
        self.on_routed: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None] | None = None

    def host_weights(self) -> tuple[_kernels.MlpWeights | None, _kernels.RouterWeights] | None:
        """Returns the always active experts (None: there are none) and the router as
        `_kernels.DecoderLayers` computes them; None: the block does more than it.
        """
        differs = self._num_experts is not None or self._weighs_inputs or self._output_scale != 1.0
        if type(self) is not MoE or differs or not isinstance(self.gate, Router):
            return None
        latent = [part for part in (self.fc1_latent_proj, self.fc2_latent_proj) if part is not None]
        space = tuple(part.projection for part in latent if part.projection is not None)
        if len(space) < len(latent):
            return None
        router = self.gate.host_weights(space)
        gate = None if self.shared_expert_gate is None else self.shared_expert_gate.weight
        shared = None if self.shared_experts is None else self.shared_experts.host_weights(gate)
        if router is None or (shared is None) != (self.shared_experts is None):
            return None
        return shared, router

    @property
    def has_own_space(self) -> bool:
        """Whether experts have a space of their own; then `forward` gives the activations' type."""
        return self.fc2_latent_proj is not None

    def read_seam(self, seam: Seam, inputs: ForwardInputs) -> tuple[torch.Tensor, ...] | None:
        """Returns weights and ids of the chosen, of a model with one router; see `ReadsSeam`."""
        return self.gate.read_seam(seam, inputs) if isinstance(self.gate, Router) else None

    def forward(
        self, hidden_states: torch.Tensor, context: ForwardContext, *chosen: torch.Tensor
    ) -> torch.Tensor:
        """Maps `[T, H]` to a new `[T, H]`, float32 where there is no latent space: who adds it rounds once.

        `chosen`: weights and ids, if the router has chosen already.
        """
        return self.start(hidden_states, context, *chosen)()

    def start(
        self, hidden_states: torch.Tensor, context: ForwardContext, *chosen: torch.Tensor
    ) -> Callable[[], torch.Tensor]:
        """Asks the servers for their share; what is returned computes the rest and collects, as `forward`.

        Meanwhile `hidden_states` must stay as they are.
        """
        topk_weights, topk_ids = chosen or self.gate(hidden_states, context.inputs)
        if context.recorder is not None:
            context.recorder.record(self.layer_id, topk_ids)
        partial: torch.Tensor | None = None
        if self._num_experts is not None:
            partial = zero_experts(hidden_states, topk_weights, topk_ids, self._num_experts)
            partial = partial if self._adds_zero_experts else None
        routed = hidden_states
        if self._weighs_inputs:
            # One expert a token: what it reads carries the weight, and its answer counts once.
            routed = hidden_states * topk_weights.to(hidden_states.dtype)
            topk_weights = torch.ones_like(topk_weights)
        asked = self._ask_experts(self._expert_inputs(routed), topk_ids, topk_weights, context)
        return lambda: self._finish(hidden_states, partial, asked, context)

    def _finish(
        self,
        hidden_states: torch.Tensor,
        partial: torch.Tensor | None,
        asked: AskedExperts,
        context: ForwardContext,
    ) -> torch.Tensor:
        """`partial`: what is known of the sum already."""
        if self.shared_experts is not None:
            shared = self._shared(self.shared_experts, hidden_states, context)
            partial = shared if partial is None else partial + shared
        deferral, project = context.deferral, self.fc2_latent_proj
        computed, *late = asked.compute(partial if project is None else None)
        # A client that the host drives may leave its answer there.
        if project is None:
            computed = computed if deferral is None else deferral.take(computed)
            answer = asked.fetch[0](computed).to(hidden_states.device)
        else:
            partial = partial if deferral is None else deferral.take(partial)
            answer = project(asked.fetch[0](computed).to(hidden_states))
            answer = answer if partial is None else answer + partial
        if late:
            assert deferral is not None, "it has divided the choices"
            deferral.defer(self._late_part(late[0], asked.fetch[1], hidden_states))
        # Every rank's answer has its own rows only, and what it computes itself its own channels only.
        answer = self._group.all_reduce(answer)
        return answer if self._output_scale == 1.0 else answer.mul_(self._output_scale)

    def _late_part(
        self, computed: torch.Tensor | None, fetch: Collect, hidden_states: torch.Tensor
    ) -> Collect:
        """What adds this layer's late part to a later layer's sum; `computed` is the device's share of it."""

        def add(partial: torch.Tensor | None) -> torch.Tensor:
            if computed is None and self.fc2_latent_proj is None:
                return fetch(partial)
            answer = fetch(computed).to(hidden_states.device)
            if self.fc2_latent_proj is not None:
                answer = self.fc2_latent_proj(answer.to(hidden_states)).float()
            return answer if partial is None else add_late(partial, answer)

        return add

    def _ask_experts(
        self,
        expert_inputs: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        context: ForwardContext,
    ) -> AskedExperts:
        """Returns the same as `ask_experts`, after observers have seen the experts' inputs."""
        if self.on_routed is not None:
            self.on_routed(expert_inputs, topk_ids, topk_weights)
        parts = None
        if context.deferral is not None:
            parts = context.deferral.split(self.layer_id, topk_ids, topk_weights)
        devices = context.experts, context.resident, context.streamed
        return ask_experts(
            *(self.layer_id, expert_inputs, topk_ids, topk_weights, *devices, parts), samples=context.samples
        )

    def _expert_inputs(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Returns what routed experts are given of `[T, H]`: that, or its projection into their space."""
        if self.fc1_latent_proj is None:
            return hidden_states
        projected: torch.Tensor = self.fc1_latent_proj(hidden_states)
        return projected

    def _shared(self, experts: MLP, hidden_states: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """Returns what the always-active experts add, `[T, H]`; every rank weighs its own part alike."""
        output: torch.Tensor = experts(hidden_states, context)
        if self.shared_expert_gate is None:
            return output
        return apply_gate(output, self.shared_expert_gate(hidden_states))


class MoEWithOwnNorms(MoE):
    """A block whose always-active experts are the layer's MLP, and whose router and experts read the stream.

    `dense_norm(mlp(x)) + output_norm(experts(input_norm(residual)))`, routed by `router_norm(residual)`.
    """

    def __init__(self, spec: specs.NormedMoE, layer_id: int, made: Composition) -> None:
        plain = specs.MoE(router=spec.router, experts=spec.experts, shared=spec.shared)
        super().__init__(plain, layer_id, made)
        own = made.weights(spec.weights(made.hidden_size))
        self.router_norm = ScaledRMSNorm(own.under("router_norm"), spec.router_eps)
        self.input_norm = make_norm(spec.norm, own.under("input_norm"))
        self.dense_norm = make_norm(spec.norm, own.under("dense_norm"))
        self.output_norm = make_norm(spec.norm, own.under("output_norm"))

    def forward_with_residual(
        self, hidden_states: torch.Tensor, residual: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """Returns `[T, H]` after the layer's norm and the stream `[T, H]` before it to a new `[T, H]`."""
        assert self.shared_experts is not None, "the layer's MLP"
        weights, ids = self.gate(self.router_norm(residual), context.inputs)
        if context.recorder is not None:
            context.recorder.record(self.layer_id, ids)
        asked = self._ask_experts(self.input_norm(residual), ids, weights, context)
        # Both sums are over all ranks before they are normed.
        dense = self._group.all_reduce(self.shared_experts(hidden_states, context))
        normed: torch.Tensor = self.dense_norm(dense)
        answer = self._group.all_reduce(asked.collect(None).to(hidden_states.device))
        experts: torch.Tensor = self.output_norm(answer.to(hidden_states.dtype))
        return normed + experts
