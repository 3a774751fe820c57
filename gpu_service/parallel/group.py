"""Several ranks as one engine: what each part of a rank's engine is given instead of its solo form.

Life of a rank: `join_group` (meet, make process groups), load its part of the model, `minimum` (pages that
all ranks have room for), run; at the end `close`, after the captured graphs are gone: a graph holds NCCL's
communicators, and destroying those under it hangs or crashes.

With pipeline stages the devices take turns, while the host loop stays as it is without them:

    stage 0 | embed, layers, send N |       wait for tokens N        | embed (tokens N), layers, send N+1 | …
    stage 1 |     receive N         | layers, norm, head, sample N, broadcast |      receive N+1 …
    hosts   | schedule and launch N+1 while the devices are at N, commit N, …

Token ids of step N+1 are gathered from each rank's own token pool, which the broadcast of step N filled:
stream order is all the synchronisation there is.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta

import structlog
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from gpu_service.core.constraint import ConstraintCompiler
from gpu_service.core.interface import Inbox
from gpu_service.core.parallel import SOLO, Collectives, ParallelContext
from gpu_service.device.stream import DeviceStream
from gpu_service.engine.model_runner import LaneModelRunner, ModelRunner
from gpu_service.engine.sampler import Sampler
from gpu_service.engine.step_runner import StepRunner
from gpu_service.experts.client import ExpertClient
from gpu_service.parallel.collectives import LaneCollectives, OneShotAllReduce, TorchCollectives
from gpu_service.parallel.control import RankControl
from gpu_service.parallel.crossover import measured_crossover
from gpu_service.parallel.experts import RankExperts
from gpu_service.parallel.inbox import FollowerInbox, LeaderInbox
from gpu_service.parallel.nccl import in_effect
from gpu_service.parallel.steps import GuardedRunner, RankLaneModelRunner, RankModelRunner, RankSampler
from gpu_service.parallel.waits import CollectiveWaits
from moebius.config.division import SmallAllReduce
from protos import ranks_pb2

_log = structlog.get_logger(__name__)


class RankGroup(ABC):
    """What `build` asks for the parts in which ranks differ from an engine alone."""

    parallel: ParallelContext
    # What runs a rank's part of a step; it is given this group's sampler and experts.
    model_runner: type[ModelRunner] = ModelRunner
    lane_runner: type[LaneModelRunner] = LaneModelRunner

    @abstractmethod
    def inbox(self, compiler: ConstraintCompiler | None) -> Inbox:
        """Returns where the engine's messages come from; `compiler`: of the constraints of requests among
        them.
        """

    @abstractmethod
    def sampler(self, vocab_size: int, device: torch.device, num_slots: int = 0) -> Sampler:
        """Draws the same tokens on all ranks."""

    @abstractmethod
    def experts(self, client: ExpertClient | None, divides_rows: bool) -> ExpertClient | None:
        """A client whose answers are this rank's part of the sum; see `RankExperts` for `divides_rows`."""

    @abstractmethod
    def guard(self, runner: StepRunner) -> StepRunner:
        """Returns a runner whose errors end the group, unless all ranks have them alike."""

    @abstractmethod
    def open_lane(self, stream: DeviceStream) -> None:
        """What is launched on this stream from now on has collectives of its own."""

    @abstractmethod
    def minimum(self, what: str, value: int) -> int:
        """Returns the smallest of all ranks' values; a barrier, too.

        All ranks call it with the same `what`.
        """

    @abstractmethod
    def elementwise_largest(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the largest of all ranks' numbers, by element: int64 tensors of one shape on the host.

        All call it at the same places, on the thread of the steps.
        """

    def largest(self, value: int) -> int:
        """Returns what `elementwise_largest` does, of one number each."""
        return int(self.elementwise_largest(torch.tensor([value])))

    @abstractmethod
    def report(self, fetch: int, blocks: int) -> None:
        """`blocks` of a fetch have come to this rank; of fetch 0: it could write more. Any thread may call.

        Once all ranks have, rank 0 calls `on_report` with the fetch and the smallest number.
        """

    def give_up(self, fetch: int) -> None:
        """Rank 0: no rank shall wait for a fetch any more, though not all have ended it."""
        if self.parallel.rank == 0:
            self.on_report(fetch, -1)

    # Rank 0's, called by any thread; -1 blocks: the fetch was given up.
    on_report: Callable[[int, int], None]

    @abstractmethod
    def fail(self, reason: str) -> None:
        """This rank cannot go on: ends the group, and this process."""

    @abstractmethod
    def serving(self) -> None:
        """Kernels are compiled from now on: a rank that the others wait for too long ends the group.

        Rank 0 calls it.
        """

    @abstractmethod
    def close(self) -> None:
        """Leaves in order. Captured graphs must be gone."""


class SoloGroup(RankGroup):
    """The null object: one rank, nothing is exchanged."""

    parallel = SOLO

    def inbox(self, compiler: ConstraintCompiler | None) -> Inbox:
        return Inbox()

    def sampler(self, vocab_size: int, device: torch.device, num_slots: int = 0) -> Sampler:
        return Sampler(vocab_size, device, num_slots)

    def experts(self, client: ExpertClient | None, divides_rows: bool) -> ExpertClient | None:
        return client

    def guard(self, runner: StepRunner) -> StepRunner:
        return runner

    def open_lane(self, stream: DeviceStream) -> None:
        """There are no collectives."""

    def minimum(self, what: str, value: int) -> int:
        return value

    def elementwise_largest(self, values: torch.Tensor) -> torch.Tensor:
        return values

    def report(self, fetch: int, blocks: int) -> None:
        """Does nothing: no rank waits for it."""

    def fail(self, reason: str) -> None:
        """Does nothing: no other rank is concerned."""
        raise RuntimeError(reason)

    def serving(self) -> None:
        """No rank waits for another."""

    def close(self) -> None:
        """Nothing to leave."""


class ProcessRankGroup(RankGroup):
    """A rank among others, each a process."""

    model_runner = RankModelRunner
    lane_runner = RankLaneModelRunner

    def __init__(
        self,
        parallel: ParallelContext,
        control: RankControl,
        agreement: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        self.parallel = parallel
        # Where a host waits for others: for its GPU, on which collectives run, else in the collectives.
        self._is_cuda = device.type == "cuda"
        self._control = control
        # Of its own, because it is used from another thread than the step's collectives.
        self._agreement = agreement
        self.on_report = lambda fetch, blocks: None
        # Reports on fetches that some ranks have not ended yet, by rank.
        self._reports: dict[int, dict[int, int]] = {}
        self._reporting = threading.Lock()
        control.on_report = lambda rank, report: self._reported(rank, report.fetch, report.blocks)

    def inbox(self, compiler: ConstraintCompiler | None) -> Inbox:
        if self.parallel.rank == 0:
            return LeaderInbox(self._control)
        return FollowerInbox(self._control, compiler)

    def sampler(self, vocab_size: int, device: torch.device, num_slots: int = 0) -> Sampler:
        return RankSampler(vocab_size, device, num_slots, self.parallel)

    def experts(self, client: ExpertClient | None, divides_rows: bool) -> ExpertClient | None:
        if client is None:
            return None
        return RankExperts(client, self.parallel, self.largest, divides_rows)

    def guard(self, runner: StepRunner) -> StepRunner:
        return GuardedRunner(runner, self.fail, self._control.waits if self._is_cuda else None)

    def open_lane(self, stream: DeviceStream) -> None:
        for group in (self.parallel.tensor_group, self.parallel.world_group):
            assert isinstance(group, LaneCollectives), "the group was made without a lane"
            group.is_lane = lambda: stream.is_current

    def minimum(self, what: str, value: int) -> int:
        """Waits for the slowest rank: loading takes as long as it takes."""
        return min(self._control.exchange(what, value))

    def report(self, fetch: int, blocks: int) -> None:
        if self.parallel.rank == 0:
            self._reported(0, fetch, blocks)
        else:
            self._control.report(ranks_pb2.Report(fetch=fetch, blocks=blocks))

    def _reported(self, rank: int, fetch: int, blocks: int) -> None:
        if fetch == 0:
            self.on_report(0, 0)
            return
        with self._reporting:
            found = self._reports.setdefault(fetch, {})
            found[rank] = blocks
            if len(found) < self.parallel.size:
                return
            del self._reports[fetch]
        self.on_report(fetch, min(found.values()))

    def fail(self, reason: str) -> None:
        self._control.fail(reason)

    def serving(self) -> None:
        self._control.judge_waits()

    def close(self) -> None:
        self._control.close()
        dist.destroy_process_group()

    def elementwise_largest(self, values: torch.Tensor) -> torch.Tensor:
        largest = values.clone()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self._agreement)
        return largest


def make_process_groups(
    parallel: ParallelContext,
    store: TCPStore,
    device: torch.device,
    timeout_s: float,
    small_all_reduce: SmallAllReduce = "nccl",
    has_lane: bool = False,
    waits: CollectiveWaits | None = None,
) -> tuple[ParallelContext, dist.ProcessGroup]:
    """Returns the context with its collectives, and a CPU group for agreements. All ranks call it at once.

    `small_all_reduce`: how tensor-parallel GPUs add small tensors. `has_lane`: there may be a prefill lane,
    of tensor-parallel ranks only. `waits` covers the collectives of a host that is the device.
    """
    timeout = timedelta(seconds=timeout_s)
    is_cuda = device.type == "cuda"
    dist.init_process_group(
        "nccl" if is_cuda else "gloo",
        store=store,
        rank=parallel.rank,
        world_size=parallel.size,
        timeout=timeout,
        # Makes the communicator now, rather than inside the first step.
        device_id=device if is_cuda else None,
    )
    if is_cuda:
        version: Callable[[], tuple[int, ...]] = torch.cuda.nccl.version
        _log.info("NCCL", version=".".join(map(str, version())), **in_effect())
    own = _default_group()
    for stage in range(parallel.num_stages if parallel.num_stages > 1 else 0):
        ranks = list(range(stage * parallel.tp_size, (stage + 1) * parallel.tp_size))
        # Every rank makes every group, or none would be whole.
        group = dist.new_group(ranks, timeout=timeout)
        if stage == parallel.stage:
            own = group
    solo = parallel.tp_size == 1
    small = _small_all_reduce(small_all_reduce, own, device) if is_cuda and not solo else None
    agreement = dist.new_group(backend="gloo", timeout=timeout)
    waiting = nullcontext if is_cuda or waits is None else waits.waiting
    tensor_group = SOLO.tensor_group if solo else TorchCollectives(own, parallel.tp_size, small, waiting)
    world_group: Collectives = TorchCollectives(_default_group(), parallel.size, waiting=waiting)
    _touch(replace(parallel, tensor_group=tensor_group, world_group=world_group), device)
    if has_lane:
        lane = TorchCollectives(dist.new_group(timeout=timeout), parallel.size, waiting=waiting)
        _touch(replace(parallel, tensor_group=lane, world_group=lane), device)
        tensor_group, world_group = LaneCollectives(tensor_group, lane), LaneCollectives(world_group, lane)
    return replace(parallel, tensor_group=tensor_group, world_group=world_group), agreement


def _small_all_reduce(
    wanted: SmallAllReduce, group: dist.ProcessGroup, device: torch.device
) -> OneShotAllReduce | None:
    """Returns what adds small tensors of GPUs; None: NCCL does. All ranks of the group decide alike."""
    if wanted == "nccl":
        return None
    if wanted == "auto" and not _reach_each_other(group, device):
        _log.info("NCCL adds tensors of all sizes: GPUs cannot read each other's memory")
        return None
    small = OneShotAllReduce(group, device)
    if wanted == "auto":
        small.most_bytes = measured_crossover(small.add, group, device)
    _log.info("GPUs add small tensors without NCCL", up_to_bytes=small.most_bytes, chosen_by=wanted)
    return small


def _reach_each_other(group: dist.ProcessGroup, device: torch.device) -> bool:
    peers = [number for number in range(torch.cuda.device_count()) if number != device.index]
    reached = all(torch.cuda.can_device_access_peer(device, number) for number in peers)
    agreed = torch.tensor([int(reached)], device=device)
    dist.all_reduce(agreed, op=dist.ReduceOp.MIN, group=group)
    return bool(agreed.item())


def _touch(parallel: ParallelContext, device: torch.device) -> None:
    """Uses every connection once: libraries make them, and take memory for them, at first use."""
    probe = torch.zeros(8, device=device)
    parallel.tensor_group.all_gather(parallel.tensor_group.all_reduce(probe))
    if not parallel.is_first_stage:
        parallel.receive_from_previous_stage(probe)
    if not parallel.is_last_stage:
        parallel.send_to_next_stage(probe)
    parallel.world_group.broadcast(probe, parallel.sampling_rank)


def _default_group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group
