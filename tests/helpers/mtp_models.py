"""Tiny checkpoints with layers of multi-token prediction, and transformers' own `MtpModel` of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from gpu_service.layers.context import ForwardContext
from tests.helpers.paged_runner import Decoding, PagedRunner
from tests.helpers.tiny_models import TINY_MODELS, TinyModel, randomize, write_tiny_model

MTP_FILE = "model-mtp.safetensors"


@dataclass(frozen=True)
class MtpReference:
    """Transformers' model and its heads, in float32; filled by `write_mtp_model`."""

    model: Any
    heads: Any  # transformers' MtpModel

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int], num_heads: int = 1) -> list[torch.Tensor]:
        """Returns the logits of each head in turn, `[len(tokens) - 1 - head, V]`: row p of head h scores the
        token at p + h + 2.

        A head after the last one is the last once more, on what it made itself.
        """
        from transformers.cache_utils import MtpCache

        ids = torch.tensor([list(tokens)])
        hidden = self.model(ids, output_hidden_states=True).hidden_states[-1]
        found = []
        for head in range(num_heads):
            layer, length = min(head, self.heads.num_mtp_layers - 1), len(tokens) - head - 1
            positions = torch.arange(head + 1, head + 1 + length)[None]
            cache = MtpCache(config=self.model.config.get_mtp_config())
            hidden = self.heads.forward_layer(
                layer, hidden[:, :length], positions, cache, input_ids=ids[:, head + 1 :]
            )
            found.append(self.heads._project_to_logits(hidden)[0])
        return found

    @torch.inference_mode()
    def drafts(self, tokens: Sequence[int], count: int) -> list[int]:
        """What may follow, by the first head, which goes on with what it made itself."""
        from transformers.cache_utils import MtpCache

        ids, last = torch.tensor([list(tokens)]), len(tokens) - 1
        cache = MtpCache(config=self.model.config.get_mtp_config())
        hidden = self.model(ids, output_hidden_states=True).hidden_states[-1][:, :last]
        ids, positions, found = ids[:, 1:], torch.arange(1, last + 1)[None], list[int]()
        for _ in range(count):
            hidden = self.heads.forward_layer(0, hidden, positions, cache, input_ids=ids)[:, -1:]
            ids, positions = self.heads._project_to_logits(hidden).argmax(-1), positions[:, -1:] + 1
            found.append(int(ids))
        return found

    @torch.inference_mode()
    def chain(self, tokens: Sequence[int]) -> list[int]:
        """What may follow, by one head after another, from nothing that was computed before."""
        from transformers.cache_utils import MtpCache

        ids = torch.tensor([list(tokens)])
        hidden = self.model(ids, output_hidden_states=True).hidden_states[-1][:, :-1]
        cache = MtpCache(config=self.model.config.get_mtp_config())
        positions = torch.arange(1, ids.shape[1])[None]
        drafts, _, _ = self.heads(ids[:, 1:], hidden, None, positions, cache)
        found: list[int] = drafts[0].tolist()
        return found


@torch.inference_mode()
def head_logits(
    runner: PagedRunner, tokens: Sequence[int], chunks: Sequence[int] = (), heads: Sequence[int] = (0,)
) -> list[torch.Tensor]:
    """Ours, of each of `heads` in turn, for all rows; the last of them know no later token, and are wrong."""
    sequence, found = Decoding(list(tokens)), []
    padded = torch.tensor([*tokens, *[0] * (len(heads) + 1)])
    for count in chunks or [len(tokens)]:
        inputs = runner.inputs([(sequence, count)])
        runner.attention.plan(inputs)
        context = ForwardContext(
            inputs, runner.kv_cache, runner.attention, runner.experts, states=runner.states
        )
        hidden_states, rows = runner.model(context), []
        for depth, head in enumerate(heads):
            next_ids = padded[inputs.positions + depth + 1]
            hidden_states = runner.model.predict_further(head, hidden_states, next_ids, context)
            rows.append(runner.model.compute_logits(hidden_states))
        found.append(rows)
        sequence.computed += count
    return [torch.cat(parts) for parts in zip(*found, strict=True)]


def write_mtp_model(name: str | TinyModel, directory: Path, num_heads: int = 1) -> MtpReference:
    """Returns a tiny model with layers of multi-token prediction after its last."""
    tiny = TINY_MODELS[name] if isinstance(name, str) else name
    tiny = replace(tiny, shard_bytes=None)
    seed = sum(tiny.model_type.encode()) + num_heads
    model = write_tiny_model(tiny, directory, seed=seed)
    heads = make_heads(model, num_heads)
    randomize(heads.layers, seed + 1, model.config.model_type)
    _add(directory, model.config.num_hidden_layers, heads)
    return MtpReference(model, heads)


def make_foreseen(directory: Path) -> None:
    """Changes a checkpoint so that a token follows from the one before it alone, and the head knows which.

    No layer adds anything, and the head reads the embedding as the model's end does.
    """
    norm = load_file(directory / "model.safetensors")["model.norm.weight"]
    for file in (directory / "model.safetensors", directory / MTP_FILE):
        tensors = load_file(file)
        for name, tensor in tensors.items():
            if name.endswith(("o_proj.weight", "o_proj.bias", "down_proj.weight")):
                tensor.zero_()
            elif name.endswith("eh_proj.weight"):
                size = tensor.shape[0]
                tensor.copy_(torch.cat((torch.eye(size), torch.zeros(size, size)), dim=1))
            elif name.endswith("enorm.weight"):
                tensor.fill_(1.0)
            elif name.endswith("shared_head.norm.weight"):
                tensor.copy_(norm)
        save_file(tensors, file, metadata={"format": "pt"})


def make_heads(model: Any, num_heads: int) -> Any:
    """Transformers' `MtpModel` of a model, with values of its own."""
    from transformers.modeling_layers import MtpModel

    _describe_heads(model.config, num_heads)
    heads = MtpModel(model, num_heads).eval()
    if "indexed_attention" in (getattr(heads.config, "layer_types", None) or ()):
        # Its layers want the mask of full attention, which `MtpModel` makes where no kinds are given.
        heads.config.layer_types = None
        heads.config._attn_implementation = "eager"
    for layer in heads.layers:
        for name in ("enorm", "hnorm", "post_norm"):
            # The first norm that Qwen3.5's module has is one of linear attention, with a gate.
            if type(getattr(layer, name)) is not type(model.model.norm):
                norm = type(model.model.norm)(model.config.hidden_size, eps=model.config.rms_norm_eps)
                setattr(layer, name, norm)
        # GLM-5's also return what they attended to, which `MtpModel` does not expect.
        layer.mtp_block.register_forward_hook(
            lambda *call: call[-1][0] if isinstance(call[-1], tuple) else None
        )
    return heads


def _describe_heads(config: Any, num_heads: int) -> None:
    """What transformers asks of a configuration with such layers, also where its class knows of none."""
    config.num_mtp_layers = num_heads
    for kinds in ("layer_types", "mlp_layer_types"):
        if getattr(config, kinds, None) is not None:
            # Of models with linear attention, too, such layers attend.
            last = getattr(config, kinds)[-1].replace("linear_attention", "full_attention")
            setattr(config, f"mtp_{kinds}", [last] * num_heads)


def _add(directory: Path, num_layers: int, heads: Any) -> None:
    """The heads' tensors in a file of their own, under the names of published checkpoints."""
    tensors = {}
    for head, layer in enumerate(heads.layers):
        prefix = f"model.layers.{num_layers + head}."
        for name, tensor in layer.state_dict().items():
            stored = name.removeprefix("mtp_block.").replace("post_norm.", "shared_head.norm.")
            for part, values in _published(stored, tensor):
                tensors[prefix + part] = values.contiguous().clone()
        if heads.config.model_type.startswith(("qwen3_next", "qwen3_5")):
            tensors = {_named_by_qwen(name): tensor for name, tensor in tensors.items()}
            continue
        tensors[prefix + "embed_tokens.weight"] = heads.embed_tokens.weight.detach().clone()
        tensors[prefix + "shared_head.head.weight"] = heads.shared_head.weight.detach().clone()
    save_file(tensors, directory / MTP_FILE, metadata={"format": "pt"})
    stored = directory / "model.safetensors"
    from safetensors import safe_open

    with safe_open(stored, "pt") as file:
        index = dict.fromkeys(file.keys(), stored.name) | dict.fromkeys(tensors, MTP_FILE)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    path = directory / "config.json"
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"num_nextn_predict_layers": len(heads.layers)})
    )


def _named_by_qwen(name: str) -> str:
    """`mtp.layers.0` is the decoder layer alone."""
    own = name.split(".", 3)[3]
    for part, stored in (
        ("eh_proj.", "fc."),
        ("enorm.", "pre_fc_norm_embedding."),
        ("hnorm.", "pre_fc_norm_hidden."),
        ("shared_head.norm.", "norm."),
    ):
        if own.startswith(part):
            return f"mtp.{stored}{own.removeprefix(part)}"
    return f"mtp.layers.0.{own}"


def _published(name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Experts one by one, which transformers holds as one tensor."""
    if name.endswith("experts.gate_up_proj"):
        stem = name.removesuffix("gate_up_proj")
        halves = [("gate_proj", 0), ("up_proj", 1)]
        return [
            (f"{stem}{expert}.{part}.weight", matrix.chunk(2)[half])
            for expert, matrix in enumerate(tensor)
            for part, half in halves
        ]
    if name.endswith("experts.down_proj"):
        stem = name.removesuffix("down_proj")
        return [(f"{stem}{expert}.down_proj.weight", matrix) for expert, matrix in enumerate(tensor)]
    return [(name, tensor)]


# A family's name and how many heads it has: its checkpoint, and transformers' of it.
MtpModels = Callable[[str, int], tuple[Path, MtpReference]]


def cached_mtp_models(root: Path) -> MtpModels:
    """Writes each below `root` once."""

    @cache
    def make(name: str, heads: int) -> tuple[Path, MtpReference]:
        directory = root / f"{name}-{heads}"
        return directory, write_mtp_model(name, directory, heads)

    return make
