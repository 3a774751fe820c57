"""DeepSeek-V4.1's language model in plain float32 torch, a whole sequence at a time: the reference of ours.

No release of transformers reads the family. The formulas are those of the published `inference/model.py` and
`inference/engram.py` (revision dba1be0a40aa), without a cache, and without the rounding of keys and entries
to 8 and 4 bits that these simulate. Names of parameters are the published ones.
"""

from __future__ import annotations

import json
import math
import unicodedata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models
from torch import Tensor, nn
from torch.nn import functional

_DEFAULTS = {
    "model_type": "deepseek_v41",
    "architectures": ["DeepseekV41ForCausalLM"],
    "dtype": "float32",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "scoring_func": "sqrtsoftplus",
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
    "topk_method": "noaux_tc",
    "n_shared_experts": 1,
    "candidate_source_layer_id": -1,
    "engram_layer_ids": [],
    "hc_eps": 1e-6,
    "hc_sinkhorn_iters": 20,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}


class DeepseekV41Config(SimpleNamespace):
    """The keys of config.json as attributes; tables' rows and kinds of tokens follow from the others."""

    def __init__(self, **values: Any) -> None:
        super().__init__(**(_DEFAULTS | values))
        if self.engram_layer_ids:
            self.engram_num_embeddings = [sum(primes) for primes in table_primes(self)]
            self.engram_compressed_vocab_size = len(set(kinds_of_tokens(self.vocab_size)))

    def get_text_config(self) -> DeepseekV41Config:
        """Returns itself: there is nothing but text."""
        return self

    def to_dict(self) -> dict[str, Any]:
        """Returns all keys."""
        return dict(vars(self))


def _words(vocab_size: int) -> list[str]:
    """Returns tokens of which every fourth one is another one but for its case, accents or blanks."""
    forms = "{0}", "{0} ", "É{0}", "{1}"
    return [forms[i % 4].format(f"w{i // 4}é", f"W{i // 4}e") for i in range(vocab_size)]


def kinds_of_tokens(vocab_size: int) -> list[int]:
    """Returns which tokens count as one, numbered in the order of their first ones."""
    kinds: dict[str, int] = {}
    found = []
    for word in _words(vocab_size):
        decomposed = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", word))
        plain = "".join(sign for sign in decomposed if unicodedata.category(sign) != "Mn")
        found.append(kinds.setdefault(" ".join(plain.lower().split()), len(kinds)))
    return found


def write_tokenizer(vocab_size: int, directory: Path) -> None:
    """Writes the tokenizer of a model with so large a vocabulary."""
    numbered = {word: number for number, word in enumerate(_words(vocab_size))}
    tokenizer = Tokenizer(models.WordLevel(numbered, unk_token=next(iter(numbered))))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(directory / "tokenizer.json"))


def table_primes(config: DeepseekV41Config) -> list[list[int]]:
    """Returns the buckets of each layer's hashes, which are primes that are used once."""
    found, candidate = [], config.engram_vocab_size
    hashes = (config.engram_max_ngram_size - 1) * config.engram_n_heads
    for _ in config.engram_layer_ids:
        own: list[int] = []
        while len(own) < hashes:
            if all(candidate % divisor for divisor in range(2, math.isqrt(candidate) + 1)):
                own.append(candidate)
            candidate += 1
        found.append(own)
    return found


def table_factors(config: DeepseekV41Config, place: int) -> list[int]:
    """Returns the factors of a token and of those before it in a layer's hashes, which are odd."""
    generator = np.random.default_rng(10007 * config.engram_layer_ids[place])
    bound = max(1, (np.iinfo(np.int64).max // config.engram_compressed_vocab_size) // 2)
    drawn = generator.integers(low=0, high=bound, size=(config.engram_max_ngram_size,), dtype=np.int64)
    return [2 * int(value) + 1 for value in drawn]


class _Norm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, rows: Tensor) -> Tensor:
        return self.weight * rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + self.eps)


def _linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


def _frequencies(config: DeepseekV41Config, size: int, compressed: bool) -> Tensor:
    base = config.compress_rope_theta if compressed else config.rope_theta
    frequencies = 1.0 / base ** (torch.arange(0, size, 2).float() / size)
    scaling = getattr(config, "rope_scaling", None)
    if not compressed or scaling is None:
        return frequencies

    def dimension(rotations: float) -> float:
        turns = scaling["original_max_position_embeddings"] / (rotations * 2 * math.pi)
        return size * math.log(turns) / (2 * math.log(base))

    low = max(math.floor(dimension(scaling["beta_fast"])), 0)
    high = min(math.ceil(dimension(scaling["beta_slow"])), size - 1)
    ramp = ((torch.arange(size // 2).float() - low) / max(high - low, 1e-3)).clamp(0, 1)
    return frequencies / scaling["factor"] * ramp + frequencies * (1 - ramp)


def _rotated(rows: Tensor, positions: Tensor, frequencies: Tensor, sign: int = 1) -> Tensor:
    """Rotates the last elements of `[T, ..., D]`, adjacent ones in pairs."""
    size = 2 * frequencies.shape[0]
    angles = sign * positions[:, None].float() * frequencies
    angles = angles.view(len(rows), *[1] * (rows.dim() - 2), -1)
    kept, ends = rows[..., :-size], rows[..., -size:]
    even, odd = ends[..., ::2], ends[..., 1::2]
    turned = even * angles.cos() - odd * angles.sin(), even * angles.sin() + odd * angles.cos()
    return torch.cat((kept, torch.stack(turned, -1).flatten(-2).to(rows.dtype)), -1)


class _Compressor(nn.Module):
    def __init__(self, config: DeepseekV41Config, rate: int) -> None:
        super().__init__()
        self.rate, self.wkv = rate, _linear(config.hidden_size, config.head_dim)
        self.norm = _Norm(config.head_dim, config.rms_norm_eps)
        if rate > 1:
            self.wgate = _linear(config.hidden_size, config.head_dim)

    def forward(self, rows: Tensor) -> Tensor:
        """Maps `[T, H]` to `[T // rate, head_dim]`."""
        rows = rows[: len(rows) // self.rate * self.rate]
        values = self.wkv(rows)
        if self.rate > 1:
            weights = self.wgate(rows).unflatten(0, (-1, self.rate)).softmax(1)
            values = (values.unflatten(0, (-1, self.rate)) * weights).sum(1)
        return self.norm(values)


class _Indexer(nn.Module):
    def __init__(self, config: DeepseekV41Config, layer: int) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        self.heads, self.size = config.index_n_heads, config.index_head_dim
        self.wq_b = _linear(config.q_lora_rank, self.heads * self.size)
        self.weights_proj = _linear(config.hidden_size, self.heads)
        if layer in config.kv_source_layer_ids:
            self.wk = _linear(config.head_dim, self.size)
            self.k_norm = _Norm(self.size, config.rms_norm_eps)

    def forward(
        self, rows: Tensor, latent: Tensor, frequencies: Tensor, shared: SimpleNamespace, rate: int
    ) -> Tensor:
        """Returns which entries each row attends to, bool `[T, E]`."""
        config, tokens = self.config, torch.arange(len(rows))
        query = self.wq_b(latent).unflatten(-1, (self.heads, self.size))
        query = _rotated(query, tokens, frequencies)
        weights = self.weights_proj(rows) * (self.size * self.heads) ** -0.5
        scores = (torch.einsum("thd,ed->the", query, shared.keys).relu() * weights[..., None]).sum(1)
        visible = torch.arange(scores.shape[1]) < ((tokens + 1) // rate)[:, None]
        scores = scores.masked_fill(~visible, -math.inf)
        if self.layer == config.candidate_source_layer_id:
            shared.candidates = self._candidates(scores, (tokens + 1) // rate)
        elif 0 <= config.candidate_source_layer_id < self.layer:
            scores = scores.masked_fill(~shared.candidates, -math.inf)
        best = scores.topk(min(config.index_topk, scores.shape[1]), dim=-1).indices
        return torch.zeros_like(visible).scatter(1, best, True) & visible

    def _candidates(self, scores: Tensor, lengths: Tensor) -> Tensor:
        size, kept = self.config.candidate_block_size, torch.zeros_like(scores, dtype=torch.bool)
        for row, length in enumerate(lengths.tolist()):
            blocks = [scores[row, at : at + size].max().item() for at in range(0, length, size)]
            order = sorted(range(len(blocks) - 1), key=lambda block: -blocks[block])
            for block in [len(blocks) - 1, *order[: self.config.candidate_topk_blocks - 1]][: len(blocks)]:
                kept[row, block * size : (block + 1) * size] = True
        return kept


class _Attention(nn.Module):
    def __init__(self, config: DeepseekV41Config, layer: int) -> None:
        super().__init__()
        self.config, self.rate = config, config.compress_ratios[layer]
        heads, size, eps = config.num_attention_heads, config.head_dim, config.rms_norm_eps
        self.groups, rank = config.o_groups, config.o_lora_rank
        self.wq_a, self.q_norm = (
            _linear(config.hidden_size, config.q_lora_rank),
            _Norm(config.q_lora_rank, eps),
        )
        self.wq_b = _linear(config.q_lora_rank, heads * size)
        self.wkv, self.kv_norm = _linear(config.hidden_size, size), _Norm(size, eps)
        self.wo_a = _linear(heads * size // self.groups, self.groups * rank)
        self.wo_b = _linear(self.groups * rank, config.hidden_size)
        self.attn_sink = nn.Parameter(torch.zeros(heads))
        if layer in config.kv_source_layer_ids:
            self.compressor = _Compressor(config, self.rate)
        if layer in config.index_source_layer_ids:
            self.indexer = _Indexer(config, layer)
        self.frequencies = _frequencies(config, config.qk_rope_head_dim, self.rate > 0)

    def forward(self, rows: Tensor, shared: SimpleNamespace) -> Tensor:
        config, tokens = self.config, torch.arange(len(rows))
        latent = self.q_norm(self.wq_a(rows))
        query = self.wq_b(latent).unflatten(-1, (config.num_attention_heads, config.head_dim))
        query = _rotated(query, tokens, self.frequencies)
        keys = _rotated(self.kv_norm(self.wkv(rows)), tokens, self.frequencies)
        distance = tokens[:, None] - tokens
        visible = (distance >= 0) & (distance < config.sliding_window)
        if self.rate:
            self._compress(rows, latent, shared)
            keys = torch.cat((keys, shared.entries))
            visible = torch.cat((visible, shared.chosen), dim=1)
        scores = torch.einsum("thd,kd->thk", query, keys) * config.head_dim**-0.5
        scores = scores.masked_fill(~visible[:, None], -math.inf)
        sinks = self.attn_sink[None, :, None].expand(len(rows), -1, 1)
        weights = torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]
        attended = _rotated(weights @ keys, tokens, self.frequencies, -1)
        grouped = attended.flatten(1).unflatten(1, (self.groups, -1))
        projected = torch.einsum("tgd,grd->tgr", grouped, self.wo_a.weight.unflatten(0, (self.groups, -1)))
        output: Tensor = self.wo_b(projected.flatten(1))
        return output

    def _compress(self, rows: Tensor, latent: Tensor, shared: SimpleNamespace) -> None:
        if hasattr(self, "compressor"):
            entries = self.compressor(rows)
            first = torch.arange(len(entries)) * self.rate
            keys = self.indexer.k_norm(self.indexer.wk(entries))
            shared.keys = _rotated(keys, first, self.frequencies)
            shared.entries = _rotated(entries, first, self.frequencies)
        if hasattr(self, "indexer"):
            shared.chosen = self.indexer(rows, latent, self.frequencies, shared, self.rate)


class _Expert(nn.Module):
    def __init__(self, config: DeepseekV41Config) -> None:
        super().__init__()
        size, width = config.hidden_size, config.moe_intermediate_size
        self.w1, self.w2, self.w3 = _linear(size, width), _linear(width, size), _linear(size, width)
        self.limit = config.swiglu_limit

    def forward(self, rows: Tensor) -> Tensor:
        gate, up = self.w1(rows).clamp(max=self.limit), self.w3(rows).clamp(-self.limit, self.limit)
        output: Tensor = self.w2(functional.silu(gate) * up)
        return output


class _Gate(nn.Module):
    def __init__(self, config: DeepseekV41Config) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(config.n_routed_experts, config.hidden_size))
        self.bias = nn.Parameter(torch.zeros(config.n_routed_experts))


class _MoE(nn.Module):
    def __init__(self, config: DeepseekV41Config) -> None:
        super().__init__()
        self.config, self.gate = config, _Gate(config)
        self.experts = nn.ModuleList(_Expert(config) for _ in range(config.n_routed_experts))
        self.shared_experts = _Expert(config)

    def forward(self, rows: Tensor) -> Tensor:
        config, logits = self.config, rows @ self.gate.weight.T
        kinds = {"softmax": lambda x: x.softmax(-1), "sigmoid": torch.sigmoid}
        scores = kinds.get(config.scoring_func, lambda x: functional.softplus(x).sqrt())(logits)
        chosen = (scores + self.gate.bias).topk(config.num_experts_per_tok, dim=-1).indices
        weights = scores.gather(1, chosen)
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * config.routed_scaling_factor
        output: Tensor = self.shared_experts(rows)
        for number, expert in enumerate(self.experts):
            token, place = torch.where(chosen == number)
            output = output.index_add(0, token, weights[token, place, None] * expert(rows[token]))
        return output


class _Table(nn.Module):
    def __init__(self, rows: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(rows, size))


class _Engram(nn.Module):
    def __init__(self, config: DeepseekV41Config, place: int) -> None:
        super().__init__()
        self.config, self.primes = config, table_primes(config)[place]
        size, heads = config.engram_max_ngram_size, config.engram_n_heads
        self.embed = _Table(config.engram_num_embeddings[place], config.engram_head_dim)
        streams = config.hc_mult, config.hidden_size
        self.wkv = _linear((size - 1) * heads * config.engram_head_dim, (streams[0] + 1) * streams[1])
        self.q_weight, self.k_weight = (nn.Parameter(torch.ones(streams)) for _ in range(2))
        self.factors = table_factors(config, place)

    def _rows(self, tokens: list[int]) -> Tensor:
        kinds, heads = kinds_of_tokens(self.config.vocab_size), self.config.engram_n_heads
        pad, found = kinds[self.config.engram_pad_token_id], []
        for at in range(len(tokens)):
            mixed, own = kinds[tokens[at]] * self.factors[0], []
            for back in range(1, self.config.engram_max_ngram_size):
                mixed ^= (kinds[tokens[at - back]] if at >= back else pad) * self.factors[back]
                for head in range(heads):
                    number = (back - 1) * heads + head
                    own.append(mixed % self.primes[number] + sum(self.primes[:number]))
            found.append(own)
        return torch.tensor(found)

    def forward(self, streams: Tensor, tokens: list[int]) -> Tensor:
        num, size, eps = *streams.shape[1:], self.config.rms_norm_eps
        pairs = self.wkv(self.embed.weight[self._rows(tokens)].flatten(1))
        keys, values = pairs[:, : num * size].unflatten(1, (num, size)), pairs[:, num * size :]
        norms = [torch.rsqrt(rows.square().mean(-1) + eps) for rows in (streams, keys)]
        fit = (streams * self.q_weight * self.k_weight * keys).sum(-1) * norms[0] * norms[1] * size**-0.5
        gate = torch.copysign(fit.abs().clamp_min(1e-6).sqrt(), fit).sigmoid()
        return streams + gate[..., None] * values[:, None]


class _Block(nn.Module):
    def __init__(self, config: DeepseekV41Config, layer: int) -> None:
        super().__init__()
        self.config, num = config, config.hc_mult
        self.attn, self.ffn = _Attention(config, layer), _MoE(config)
        self.attn_norm = _Norm(config.hidden_size, config.rms_norm_eps)
        self.ffn_norm = _Norm(config.hidden_size, config.rms_norm_eps)
        for half in ("attn", "ffn"):
            rows = (2 + num) * num
            shapes = {"fn": (rows, num * config.hidden_size), "base": (rows,), "scale": (3,)}
            for name, shape in shapes.items():
                self.register_parameter(f"hc_{half}_{name}", nn.Parameter(torch.zeros(shape)))
        if layer in config.engram_layer_ids:
            self.engram = _Engram(config, config.engram_layer_ids.index(layer))

    def _half(self, streams: Tensor, pre: Tensor, half: str, compute: Any) -> tuple[Tensor, Tensor]:
        """Returns the streams after a half of the layer, and with which weights the next one reads them."""
        config, num = self.config, self.config.hc_mult
        fn, base, scale = (getattr(self, f"hc_{half}_{name}") for name in ("fn", "base", "scale"))
        flat = streams.flatten(1)
        mixed = flat @ fn.T * torch.rsqrt(flat.square().mean(-1, keepdim=True) + config.rms_norm_eps)
        own = (mixed[:, :num] * scale[0] + base[:num]).sigmoid() + config.hc_eps
        post = 2 * (mixed[:, num : 2 * num] * scale[1] + base[num : 2 * num]).sigmoid()
        comb = (mixed[:, 2 * num :] * scale[2] + base[2 * num :]).unflatten(1, (num, num)).softmax(-1)
        comb = comb + config.hc_eps
        comb = comb / (comb.sum(1, keepdim=True) + config.hc_eps)
        for _ in range(config.hc_sinkhorn_iters - 1):
            comb = comb / (comb.sum(2, keepdim=True) + config.hc_eps)
            comb = comb / (comb.sum(1, keepdim=True) + config.hc_eps)
        update = compute((pre[..., None] * streams).sum(1))
        mixed_streams = torch.einsum("tij,tih->tjh", comb, streams)
        return post[..., None] * update[:, None] + mixed_streams, own

    def forward(
        self, streams: Tensor, pre: Tensor, tokens: list[int], shared: SimpleNamespace
    ) -> tuple[Tensor, Tensor]:
        if hasattr(self, "engram"):
            streams = self.engram(streams, tokens)
        streams, pre = self._half(streams, pre, "attn", lambda rows: self.attn(self.attn_norm(rows), shared))
        return self._half(streams, pre, "ffn", lambda rows: self.ffn(self.ffn_norm(rows)))


class DeepseekV41ForCausalLM(nn.Module):
    """The language model; called and saved as transformers' models are."""

    config_class = DeepseekV41Config

    def __init__(self, config: DeepseekV41Config) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(_Block(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = _Norm(config.hidden_size, config.rms_norm_eps)
        if not config.tie_word_embeddings:
            self.head = _linear(config.hidden_size, config.vocab_size)

    @torch.inference_mode()
    def forward(self, tokens: Tensor) -> SimpleNamespace:
        """Returns `logits` `[1, T, vocab]` of tokens int64 `[1, T]`."""
        ids, shared = tokens[0].tolist(), SimpleNamespace()
        streams = self.embed(tokens[0])[:, None].repeat(1, self.config.hc_mult, 1)
        pre = streams.new_zeros(streams.shape[:2])
        pre[:, 0] = 1.0
        for layer in self.layers:
            streams, pre = layer(streams, pre, ids, shared)
        ended = self.norm((pre[..., None] * streams).sum(1))
        head = self.embed.weight if self.config.tie_word_embeddings else self.head.weight
        return SimpleNamespace(logits=(ended @ head.T)[None])

    def generate(self, tokens: Tensor, max_new_tokens: int, **_: Any) -> Tensor:
        """Returns the tokens and those that are likeliest after them, `[1, T + max_new_tokens]`."""
        for _step in range(max_new_tokens):
            tokens = torch.cat((tokens, self(tokens).logits[:, -1:].argmax(-1)), dim=1)
        return tokens

    def save_pretrained(self, directory: Path, max_shard_size: int = 1 << 40) -> None:
        """Writes config.json, a tokenizer, and the weights in files of at most `max_shard_size` bytes, or one
        tensor each.
        """
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text(json.dumps(self.config.to_dict()))
        write_tokenizer(self.config.vocab_size, directory)
        shards: list[dict[str, Tensor]] = [{}]
        for name, tensor in self.state_dict().items():
            if sum(held.nbytes for held in shards[-1].values()) + tensor.nbytes > max_shard_size:
                shards.append({})
            shards[-1][name] = tensor.contiguous()
        if len(shards) == 1:
            save_file(shards[0], directory / "model.safetensors")
            return
        places = {}
        for number, shard in enumerate(filter(None, shards)):
            file = f"model-{number:05}.safetensors"
            save_file(shard, directory / file)
            places |= dict.fromkeys(shard, file)
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
