"""The reference's next-token distributions over given sequences, in chunks, one stage's weights at a time.

The reference is independent of what serves wherever the code has a second way: float32 throughout, attention
by torch over a cache that is not quantised, experts dequantised and multiplied by torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from gpu_service.experts.local_client import LocalExpertClient
from lab.verify.long_output import LongOutput
from lab.verify.staged_model import LoadedStage, StagedModel, StageSequence
from moebius.config import MoebiusConfig
from moebius.models.geometry import MoeGeometry
from moebius.models.read import read_geometry
from moebius.process.limits import available_memory

# Tokens of a step: torch's attention keeps scores of a chunk with all tokens before it.
CHUNK = 256
# Rows whose logits are in memory at once.
_LOGITS_ROWS = 32
# Below it the rest of a distribution counts as nothing: the server's probabilities are float32.
_SMALLEST_REST = 1e-7


@dataclass(frozen=True)
class OutputScores:
    """A long output beside the reference; filled by `score_outputs`. For each of N tokens."""

    kl: torch.Tensor  # float64 [N], nats; see `kl_of_most_probable`
    reference_top: torch.Tensor  # int64 [N], the reference's most probable token
    reference_loss: torch.Tensor  # float64 [N], -log probability of the token by the reference


def float32_of(config: MoebiusConfig, model: StagedModel) -> StagedModel:
    """Returns the same checkpoint in float32, with a cache of the same. Raises ModelConfigError."""
    exact = config.model_copy(
        update={
            "model": config.model.model_copy(update={"dtype": "float32"}),
            "gpu": config.gpu.model_copy(update={"kv_cache_dtype": "auto"}),
        }
    )
    return StagedModel.open(exact, model.directory, model.device)


@torch.inference_mode()
def score_outputs(
    config: MoebiusConfig,
    reference: StagedModel,
    outputs: Sequence[LongOutput],
    on_layers: Callable[[int], None] = lambda done: None,
) -> list[OutputScores]:
    """Returns the reference's scores of each output, whose tokens it is given (teacher forcing).

    `on_layers` is called with the number of layers done. Raises CheckpointError.
    """
    geometry = read_geometry(reference.directory, config.model.experts_per_token)
    sequences = [output.sequence[:-1] for output in outputs]
    hidden_states: list[torch.Tensor | None] = [None] * len(outputs)
    for stage in range(reference.num_stages):
        loaded = reference.load(stage)
        # Another one for each stage: the one before gives its experts up.
        experts = LocalExpertClient(
            str(reference.directory),
            geometry,
            torch.float32,
            keeps=_fits(geometry, len(loaded.layers)),
            expert_checkpoint=config.model.expert_checkpoint,
        )
        for index, sequence in enumerate(sequences):
            hidden_states[index] = _computed(loaded, sequence, hidden_states[index], experts)
        on_layers(loaded.layers.stop)
    return [
        _scored(loaded, output, states)
        for output, states in zip(outputs, hidden_states, strict=True)
        if states is not None
    ]


def _fits(geometry: MoeGeometry, layers: int) -> bool:
    """Returns whether all experts of a stage in float32 take less than half of what is free."""
    weights = geometry.num_experts * geometry.hidden_size * geometry.moe_intermediate_size * 3
    return layers * weights * 4 < available_memory() / 2


def _computed(
    stage: LoadedStage,
    token_ids: torch.Tensor,
    hidden_states: torch.Tensor | None,
    experts: LocalExpertClient,
) -> torch.Tensor:
    """Returns the stage's hidden states `[T, H]` of a whole sequence, given those of the stage before."""
    sequence = StageSequence(stage, token_ids.shape[0], "torch")
    before = [None] * len(token_ids) if hidden_states is None else torch.split(hidden_states, CHUNK)
    chunks = zip(torch.split(token_ids, CHUNK), before, strict=False)
    return torch.cat([sequence.step(ids, states, experts) for ids, states in chunks])


def _scored(stage: LoadedStage, output: LongOutput, hidden_states: torch.Tensor) -> OutputScores:
    """`hidden_states` `[P + N - 1, H]` after the final norm."""
    rows = hidden_states[len(output.prompt_ids) - 1 :]
    parts = zip(
        *(
            torch.split(part, _LOGITS_ROWS)
            for part in (rows, output.token_ids, output.top_ids, output.top_logprobs)
        ),
        strict=True,
    )
    kl, top, loss = [], [], []
    for states, token_ids, top_ids, top_logprobs in parts:
        logprobs = stage.model.compute_logits(states).cpu().double().log_softmax(-1)
        kl.append(kl_of_most_probable(logprobs, top_ids, top_logprobs))
        top.append(logprobs.argmax(-1))
        loss.append(-logprobs.gather(1, token_ids.unsqueeze(1)).squeeze(1))
    return OutputScores(torch.cat(kl), torch.cat(top), torch.cat(loss))


def kl_of_most_probable(
    reference: torch.Tensor, top_ids: torch.Tensor, top_logprobs: torch.Tensor
) -> torch.Tensor:
    """KL(P || Q), float64 `[L]` in nats, with all tokens but the named ones as a single event.

    P are the reference's log-probabilities float64 `[L, V]`; of Q those of K tokens are known, `top_ids`
    `[L, K]` (-1: none) and `top_logprobs`. Merging events never increases a divergence (log sum inequality,
    Cover and Thomas 2006, theorem 2.7.1), so this is a lower bound of the divergence over the vocabulary; it
    misses only what differs among tokens that the server holds improbable.
    """
    named = top_ids >= 0
    log_p = reference.gather(1, top_ids.clamp(min=0))
    p = log_p.exp().where(named, 0.0)
    q = top_logprobs.exp().where(named, 0.0)
    of_named = (p * (log_p - top_logprobs)).where(named, 0.0).sum(1)
    rest_p, rest_q = ((1.0 - part.sum(1)).clamp(min=_SMALLEST_REST) for part in (p, q))
    return (of_named + rest_p * (rest_p / rest_q).log()).clamp(min=0.0)
