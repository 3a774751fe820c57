"""Which part of the model this process holds, and the collective operations over ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import torch

from moebius.config import ParallelConfig
from moebius.errors import ConfigError


class Collectives(ABC):
    """Operations of one group of ranks. All ranks call them in the same order; may be captured in a graph."""

    @abstractmethod
    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sums a tensor over the group, in place; returns it. Every rank gets the same bits."""

    @abstractmethod
    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns `[..., N]` of each rank, joined along the last dimension in rank order: `[..., N
        * size]`.
        """

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """Overwrites the tensor with that of the group's rank `source`; returns it."""

    @abstractmethod
    def send(self, tensor: torch.Tensor, destination: int) -> None:
        """Gives a tensor to the group's rank `destination`, which must `receive` one of its shape."""

    @abstractmethod
    def receive(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """Overwrites the tensor with what the group's rank `source` sent; returns it."""


class SoloCollectives(Collectives):
    """The null object: a group of one."""

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        return tensor

    def send(self, tensor: torch.Tensor, destination: int) -> None:
        """Raises RuntimeError: there is no other rank."""
        raise RuntimeError(f"a group of one has no rank {destination} to send to")

    def receive(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """Raises RuntimeError: there is no other rank."""
        raise RuntimeError(f"a group of one has no rank {source} to receive from")


@dataclass(frozen=True, slots=True)
class ParallelContext:
    """Filled once at start. Ranks of one pipeline stage are consecutive: rank = stage * tp_size + tp_rank."""

    tp_rank: int = 0
    tp_size: int = 1
    stage: int = 0
    num_stages: int = 1
    # Each of the stage's ranks holds other resident experts, whole ones; else all hold channels of each.
    holds_whole_experts: bool = False
    tensor_group: Collectives = field(default_factory=SoloCollectives)  # Over the ranks of this stage.
    world_group: Collectives = field(default_factory=SoloCollectives)  # Over all ranks.
    stage_sizes: tuple[int, ...] = ()  # Layers of each stage; empty: nearly equal numbers.

    @staticmethod
    def place(settings: ParallelConfig, rank: int) -> ParallelContext:
        """Returns the place of a rank, without collectives yet.

        Raises ConfigError where `pipeline_layers` are not one number for each stage.
        """
        stage, tp_rank = divmod(rank, settings.tensor_parallel_size)
        stages, sizes = settings.pipeline_parallel_size, settings.pipeline_layers
        if sizes and (len(sizes) != stages or min(sizes) < 1):
            raise ConfigError(
                f"pipeline_layers: {','.join(map(str, sizes))} is not allowed; allowed: a number from 1 "
                f"on for each of {stages} stages (pipeline_parallel_size)"
            )
        return ParallelContext(
            tp_rank=tp_rank,
            tp_size=settings.tensor_parallel_size,
            stage=stage,
            num_stages=stages,
            holds_whole_experts=settings.gpu_expert_split == "expert" and settings.tensor_parallel_size > 1,
            stage_sizes=sizes,
        )

    @property
    def rank(self) -> int:
        """Index of this process among all ranks."""
        return self.stage * self.tp_size + self.tp_rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.tp_size * self.num_stages

    @property
    def expert_channel_ranks(self) -> int:
        """The number of ranks over which the channels of a resident expert are divided."""
        return 1 if self.holds_whole_experts else self.tp_size

    @property
    def sampling_rank(self) -> int:
        """The rank whose sampled tokens all others take: the last stage's first."""
        return (self.num_stages - 1) * self.tp_size

    @property
    def is_first_stage(self) -> bool:
        """Returns whether the embedding is here."""
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        """Returns whether the final norm, the head and the sampler are here."""
        return self.stage == self.num_stages - 1

    def send_to_next_stage(self, hidden_states: torch.Tensor) -> None:
        """Sends to the rank with the same place in the next stage; ranks of a stage hold the same
        `[T, H]`.
        """
        self.world_group.send(hidden_states, self.rank + self.tp_size)

    def receive_from_previous_stage(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Overwrites `[T, H]` with what the previous stage sent; returns it."""
        return self.world_group.receive(hidden_states, self.rank - self.tp_size)


SOLO = ParallelContext()
