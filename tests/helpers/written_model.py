"""A model written down from its `ModelConfig` in float32: every switch as its comment in the configuration
says, without caches, fused projections or kernels. Structures that have references of their own (several
residual streams) are computed by those.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch.nn import functional

from gpu_service.ops.gated_streams import inject_update, mix_gated_streams, norm_streams
from gpu_service.ops.hyper_connections import collapse_streams, mix_streams
from moebius.models.config import ModelConfig, RopeConfig

Half = Callable[[torch.Tensor], torch.Tensor]


def expert_answer(hidden_states: torch.Tensor, expert: int) -> torch.Tensor:
    """Returns what an expert makes of `[T, H]`: no matrices, but another function for each."""
    return torch.tanh(hidden_states * (0.5 + expert)) * (1 + expert)


class ListedExperts:
    """Has the `submit` and `collect` of an expert client."""

    call_log = None

    def submit(
        self, layer: int, hidden_states: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
    ) -> torch.Tensor:
        """Computed at once; the ticket is the result."""
        return _mixture(hidden_states, topk_ids, topk_weights)

    def collect(self, ticket: torch.Tensor, partial: torch.Tensor | None = None) -> torch.Tensor:
        """Returns the float32 `[T, H]` of the submit."""
        return ticket if partial is None else partial + ticket


def _mixture(hidden_states: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    output = torch.zeros_like(hidden_states)
    for expert in range(int(ids.max()) + 1):
        share = (weights * (ids == expert)).sum(1, keepdim=True)
        output += share * expert_answer(hidden_states, expert)
    return output


class WrittenModel:
    """Logits of one prompt; weights by their canonical names, as a checkpoint would hold them."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, torch.Tensor]) -> None:
        self.config, self.weights = config, weights

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        """Maps int64 `[T]` to float32 `[T, V]`."""
        config, embedding = self.config, self.weights["model.embed_tokens.weight"]
        x = embedding[ids] * config.embedding_scale
        hyper = config.hyper
        streams = None if hyper is None else x[:, None].repeat(1, hyper.num_streams, 1)
        for layer in range(config.num_layers):
            if streams is None:
                x = self._layer(layer, x)
            else:
                self._hyper_layer(layer, streams)
        if streams is None:
            x = self._norm("model.norm", x)
        elif hyper is not None and hyper.rank:
            x = self._mixed("model.norm", streams)[0]
        else:
            x = self._norm("model.norm", streams.mean(1))
        head = embedding if config.tie_word_embeddings else self.weights["lm_head.weight"]
        logits = x @ head.T
        if config.head_bias:
            logits = logits + self.weights["lm_head.bias"]
        logits = logits * config.logit_scale
        cap = config.final_logit_softcap
        return cap * torch.tanh(logits / cap) if cap else logits

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        y = x @ self.weights[f"{name}.weight"].T
        bias = self.weights.get(f"{name}.bias")
        return y if bias is None else y + bias

    def _norm(self, name: str, x: torch.Tensor, *, plain: bool = False) -> torch.Tensor:
        config, weight = self.config, self.weights[f"{name}.weight"]
        if config.mean_norms and not plain:
            x = x - x.mean(-1, keepdim=True)
        normed = x / (x.square().mean(-1, keepdim=True) + config.rms_norm_eps).sqrt()
        normed = normed * (1 + weight if config.one_plus_weight_norms and not plain else weight)
        bias = self.weights.get(f"{name}.bias")
        return normed if bias is None else normed + bias

    def _unit(self, x: torch.Tensor) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + self.config.rms_norm_eps).sqrt()

    # Layers.

    def _layer(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        config, stem = self.config, f"model.layers.{layer}"
        if config.layer_halves:
            half = self._attention if config.layer_halves[layer] == "attention" else self._mlp
            return x + half(f"{stem}.mixer", layer, self._norm(f"{stem}.norm", x))
        if config.shortcut_experts:
            return self._shortcut(stem, layer, x)
        attention, mlp = f"{stem}.self_attn", f"{stem}.mlp"
        before, after = f"{stem}.input_layernorm", f"{stem}.post_attention_layernorm"
        if config.normed_residuals is not None:
            weights = config.normed_residuals
            kept, added = weights.linear if self._is_linear(layer) else weights.attention
            x = self._norm(before, x)
            x = self._norm(after, kept * x + added * self._attention(attention, layer, x))
            kept, added = weights.mlp
            return kept * x + added * self._mlp(mlp, layer, x)
        if config.parallel_halves:
            normed = self._norm(before, x)
            return x + self._attention(attention, layer, normed) + self._mlp(mlp, layer, normed)
        if self._is_linear(layer):
            attention = f"{stem}.conv"
        read = self._norm(before, x) if config.input_norms else x
        update = self._attention(attention, layer, read)
        if config.output_norms:
            update = self._norm(f"{stem}.post_self_attn_layernorm", update)
        x = x + config.residual_scale * update
        read = self._norm(after, x) if config.input_norms else x
        update = self._mlp(mlp, layer, read, residual=x)
        if config.output_norms or (config.moe_output_norms and config.is_moe_layer(layer)):
            update = self._norm(f"{stem}.post_mlp_layernorm", update)
        x = x + config.residual_scale * update
        return x * self.weights[f"{stem}.layer_scalar"] if config.layer_scales else x

    def _shortcut(self, stem: str, layer: int, x: torch.Tensor) -> torch.Tensor:
        experts = torch.zeros_like(x)
        for half in range(2):
            read = self._norm(f"{stem}.input_layernorm.{half}", x)
            x = x + self._attention(f"{stem}.self_attn.{half}", layer, read)
            read = self._norm(f"{stem}.post_attention_layernorm.{half}", x)
            if half == 0:
                experts = self._mlp(f"{stem}.mlp", layer, read)
            x = x + self._dense(f"{stem}.mlps.{half}", read)
        return x + experts

    def _hyper_layer(self, layer: int, streams: torch.Tensor) -> None:
        """In place."""
        config, stem = self.config, f"model.layers.{layer}"
        hyper = config.hyper
        assert hyper is not None
        name = "conv" if self._is_linear(layer) else "self_attn"
        halves: tuple[Half, Half] = (
            lambda x: self._attention(f"{stem}.{name}", layer, x),
            lambda x: self._mlp(f"{stem}.mlp", layer, x),
        )
        if hyper.rank:
            for half, place in zip(halves, ("attn", "mlp"), strict=True):
                read, inject = self._mixed(f"{stem}.{place}_hyper_connection", streams)
                inject_update.reference(half(read), streams, inject)
            return
        norms = f"{stem}.input_layernorm", f"{stem}.post_attention_layernorm"
        for half, place, norm in zip(halves, ("attn", "ffn"), norms, strict=True):
            fn, base, scale = (self.weights[f"{stem}.{place}_hc.{part}"] for part in ("fn", "base", "scale"))
            sizes = config.rms_norm_eps, hyper.eps, hyper.iterations, hyper.magnitude
            read, post, comb = collapse_streams.reference(streams, fn, base, scale, *sizes)
            mix_streams.reference(half(self._norm(norm, read)), streams, post, comb)

    def _mixed(self, stem: str, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weight = 1 + self.weights[f"{stem}.hc_norm.weight"].view(streams.shape[1:])
        normed = norm_streams.reference(streams, weight, self.config.rms_norm_eps)
        flat = normed.flatten(1)
        narrow = functional.silu(self._linear(f"{stem}.input_mix_weight_down", flat) / streams.shape[1])
        mix = self._linear(f"{stem}.input_mix_weight_up", narrow)
        inject = self.weights.get(f"{stem}.block_inject_weight.weight")
        injected = flat[:, :0] if inject is None else flat @ inject.T
        return mix_gated_streams.reference(mix, normed), injected

    # What follows attention.

    def _dense(self, stem: str, x: torch.Tensor, limit: float = math.inf) -> torch.Tensor:
        gate = functional.silu(self._linear(f"{stem}.gate_proj", x)).clamp(max=limit)
        return self._linear(
            f"{stem}.down_proj", gate * self._linear(f"{stem}.up_proj", x).clamp(-limit, limit)
        )

    def _mlp(
        self, stem: str, layer: int, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        config = self.config
        limit = config.mlp_limits[layer] if config.mlp_limits else math.inf
        if not config.is_moe_layer(layer):
            return self._dense(stem, x, limit)
        shared = self._dense(f"{stem}.shared_experts", x, limit)
        if not config.moe.own_norms:
            return self._experts(stem, x, x) + shared
        assert residual is not None
        routed = self._unit(residual) * self.weights[f"{stem}.router_norm.weight"] * x.shape[1] ** -0.5
        experts = self._experts(stem, routed, self._norm(f"{stem}.input_norm", residual))
        return self._norm(f"{stem}.dense_norm", shared) + self._norm(f"{stem}.output_norm", experts)

    def _experts(self, stem: str, routed: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        scores = (routed @ self.weights[f"{stem}.gate.weight"].T).softmax(-1)
        weights, ids = scores.topk(self.config.moe.router.top_k, dim=-1)
        return _mixture(x, ids, weights)

    # Attention.

    def _is_linear(self, layer: int) -> bool:
        return self.config.linear is not None and layer in self.config.linear.layers

    def _attention(self, stem: str, layer: int, x: torch.Tensor) -> torch.Tensor:
        if self._is_linear(layer):
            return self._short_conv(stem, x)
        return self._latent(stem, layer, x) if self.config.mla is not None else self._grouped(stem, layer, x)

    def _short_conv(self, stem: str, x: torch.Tensor) -> torch.Tensor:
        b, c, values = self._linear(f"{stem}.in_proj", x).chunk(3, dim=1)
        taps = self.weights[f"{stem}.conv.weight"].view(values.shape[1], -1)
        width = taps.shape[1]
        padded = functional.pad((b * values).T, (width - 1, 0))
        return self._linear(f"{stem}.out_proj", c * (padded.unfold(1, width, 1) * taps[:, None]).sum(-1).T)

    def _rope(self, layer: int) -> RopeConfig | None:
        config = self.config
        return config.layer_ropes[layer] if config.layer_ropes else config.rope

    def _rotate(self, heads: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
        """Returns `[T, H, D]`, of which the first `rotary_dim` elements turn."""
        pairs = rope.rotary_dim // 2
        angles = torch.arange(heads.shape[0])[:, None] * rope.theta ** (-torch.arange(pairs) / pairs)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        turned = heads[..., : rope.rotary_dim]
        if rope.interleaved:
            a, b = turned[..., ::2], turned[..., 1::2]
            turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
        else:
            a, b = turned.chunk(2, dim=-1)
            turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
        return torch.cat((turned, heads[..., rope.rotary_dim :]), dim=-1)

    def _grown(self, query: torch.Tensor, rope: RopeConfig | None) -> torch.Tensor:
        config, positions = self.config, torch.arange(query.shape[0])
        growth, length = config.unrotated_query_growth, config.unrotated_query_growth_length
        if rope is not None:
            growth, length = rope.query_growth, rope.query_growth_length
        steps = ((positions + (rope is None)) / length).floor()
        return query * (1 + growth * torch.log1p(steps))[:, None, None]

    def _softmax(
        self, scores: torch.Tensor, layer: int, sinks: torch.Tensor | None, kept: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Returns the softmax of `[H, T, T]` scores, as the layer's mask and sinks have it; `kept` `[H, T,
        T]` besides.
        """
        shape, (rows, columns) = (
            self.config.layers[layer].mixer,
            torch.meshgrid(*[torch.arange(scores.shape[1])] * 2, indexing="ij"),
        )
        seen = columns <= rows
        window, chunk = getattr(shape, "window", None), getattr(shape, "chunk", None)
        if window is not None:
            seen = seen & (columns > rows - window)
        if chunk is not None:
            seen = seen & (columns // chunk == rows // chunk)
        scores = scores.masked_fill(~(seen if kept is None else seen & kept), float("-inf"))
        if sinks is None:
            return scores.softmax(-1)
        return torch.cat((scores, sinks[:, None, None].expand(*scores.shape[:2], 1)), -1).softmax(-1)[
            ..., :-1
        ]

    def _latent(self, stem: str, layer: int, x: torch.Tensor) -> torch.Tensor:
        config, rope, tokens = self.config, self._rope(layer), x.shape[0]
        mla, heads = config.mla, config.num_heads
        assert mla is not None

        def normed(name: str, values: torch.Tensor) -> torch.Tensor:
            scale = (values.square().mean(-1, keepdim=True) + mla.latent_eps).sqrt()
            return values / scale * self.weights[f"{stem}.{name}.weight"]

        latent_query = normed("q_a_layernorm", self._linear(f"{stem}.q_a_proj", x))
        query = self._linear(f"{stem}.q_b_proj", latent_query).view(tokens, heads, -1)
        compressed = self._linear(f"{stem}.kv_a_proj_with_mqa", x)
        latent = normed("kv_a_layernorm", compressed[:, : mla.kv_lora_rank])
        expanded = (latent @ self.weights[f"{stem}.kv_b_proj.weight"].T).view(tokens, heads, -1)
        shared = compressed[:, None, mla.kv_lora_rank :]
        plain, turned = query[..., : mla.qk_nope_head_dim], query[..., mla.qk_nope_head_dim :]
        if rope is not None:
            shared, turned = self._rotate(shared, rope), self._rotate(turned, rope)
        query = torch.cat((plain, turned), -1)
        query = query if rope is None else self._grown(query, rope)
        key, value = expanded[..., : mla.qk_nope_head_dim], expanded[..., mla.qk_nope_head_dim :]
        key = torch.cat((key, shared.expand(-1, heads, -1)), -1)
        scores = torch.einsum("thd,shd->hts", query, key) * mla.softmax_scale
        attended = torch.einsum(
            "hts,shd->thd", self._softmax(scores, layer, self.weights.get(f"{stem}.sinks")), value
        )
        if config.head_gate or config.element_gate:
            gate = self._linear(f"{stem}.g_proj", x).sigmoid()
            attended = attended * gate.view(tokens, heads, -1)
        return self._linear(f"{stem}.o_proj", attended.flatten(1))

    def _grouped(self, stem: str, layer: int, x: torch.Tensor) -> torch.Tensor:
        config, shape, rope, tokens = (
            self.config,
            self.config.layers[layer].mixer,
            self._rope(layer),
            x.shape[0],
        )
        query = self._linear(f"{stem}.q_proj", x).view(tokens, shape.num_heads, -1)
        gates: list[torch.Tensor] = []
        if config.output_gate:
            query, gate = query.chunk(2, dim=-1)
            gates.append(gate)
        key = self._linear(f"{stem}.k_proj", x).view(tokens, shape.num_kv_heads, -1)
        value = key if shape.keys_are_values else self._linear(f"{stem}.v_proj", x)
        value = self._value(value.view(tokens, shape.num_kv_heads, -1))
        query, key = self._queries_and_keys(stem, query, key, rope)
        groups = shape.num_heads // shape.num_kv_heads
        kept = self._kept_blocks(stem, layer, x, rope)
        kept = None if kept is None else kept.repeat_interleave(groups, 0)
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        scale = config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale
        scores = torch.einsum("thd,shd->hts", query, key) * scale
        sinks = self.weights.get(f"{stem}.sinks")
        attended = torch.einsum("hts,shd->thd", self._softmax(scores, layer, sinks, kept), value)
        if config.element_gate or config.head_gate:
            gates.append(self._linear(f"{stem}.g_proj", x).view(tokens, shape.num_heads, -1))
        for gate in gates:
            weigh = torch.sigmoid if config.gate_activation == "sigmoid" else functional.softplus
            attended = attended * weigh(gate)
        return self._linear(f"{stem}.o_proj", attended.flatten(1))

    def _value(self, value: torch.Tensor) -> torch.Tensor:
        value = self._clipped(value)
        if self.config.value_norm:
            value = self._unit(value)
        return value * self.config.value_scale

    def _clipped(self, heads: torch.Tensor) -> torch.Tensor:
        return heads.clamp(-self.config.qkv_limit, self.config.qkv_limit)

    def _queries_and_keys(
        self, stem: str, query: torch.Tensor, key: torch.Tensor, rope: RopeConfig | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Norm, limit, rotation, norm without weights, or the first one last."""
        config = self.config

        def normed(name: str, heads: torch.Tensor) -> torch.Tensor:
            if not config.qk_norm_full_width:
                return self._norm(f"{stem}.{name}", heads)
            return self._norm(f"{stem}.{name}", heads.flatten(1), plain=True).view(heads.shape)

        found = []
        for name, heads in (("q_norm", query), ("k_norm", key)):
            if config.qk_norm and not config.qk_norm_after_rope:
                heads = normed(name, heads)
            heads = self._clipped(heads)
            if rope is not None:
                heads = self._rotate(heads, rope)
                heads = self._unit(heads) if config.unit_qk_norm else heads
            found.append(normed(name, heads) if config.qk_norm and config.qk_norm_after_rope else heads)
        return self._grown(found[0], rope), found[1]

    def _kept_blocks(
        self, stem: str, layer: int, x: torch.Tensor, rope: RopeConfig | None
    ) -> torch.Tensor | None:
        """Returns bool `[num_kv_heads, T, T]`, of a layer that chooses blocks."""
        sizes, tokens = self.config.block_indexer, x.shape[0]
        if sizes is None or layer not in sizes.layers:
            return None
        assert rope is not None
        heads = [self._linear(f"{stem}.indexer.{name}_proj", x) for name in "qk"]
        query, key = (
            self._rotate(
                self._norm(f"{stem}.indexer.{name}_norm", rows.view(tokens, -1, sizes.head_dim)), rope
            )
            for name, rows in zip("qk", heads, strict=True)
        )
        products = torch.einsum("thd,sd->hts", query, key[:, 0])
        kept = torch.zeros_like(products, dtype=torch.bool)
        for row in range(tokens):
            own = row // sizes.block_size
            for head, product in enumerate(products):
                best = [
                    float(
                        product[
                            row, block * sizes.block_size : min(row + 1, (block + 1) * sizes.block_size)
                        ].max()
                    )
                    for block in range(own + 1)
                ]
                for block in range(max(0, own + 1 - sizes.local_blocks), own + 1):
                    best[block] = math.inf
                chosen = sorted(range(own + 1), key=lambda block: -best[block])[: sizes.top_blocks]
                for block in chosen:
                    kept[head, row, block * sizes.block_size : (block + 1) * sizes.block_size] = True
        return kept
