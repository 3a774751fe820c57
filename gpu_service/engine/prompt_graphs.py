"""Layers of steps with prompts as captured graphs: one per number of tokens, smaller steps are padded.

Launched one by one, the kernels of a step of some hundred tokens take the host longer than the device. A
graph holds all layers for its number of rows, whatever requests these belong to, but for attention, which the
host plans and launches for the step itself between pieces of the graph (`attention/between_graphs.py`):

host   | upload rows, plan | piece | attend | piece | attend | ... | piece | logits, sampling, drafts

What comes after the layers depends on the requests, too, and is launched as in a step without graphs. Rows
of padding are a token at position 0 of a slot that no request has, with the dummy page as their cache; they
choose no experts, and attend to nothing.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import structlog
import torch

from gpu_service.attention.base import AttentionBackend
from gpu_service.attention.between_graphs import AttentionBetweenGraphs
from gpu_service.core.step import Dummy, StepPlan, graph_rows
from gpu_service.device.graphs import CapturedGraph, Cut, GraphBackend
from gpu_service.device.stream import Uploader
from gpu_service.engine.decode_graphs import LATER_RUNS, WARM_UP_RUNS
from gpu_service.engine.model_runner import Forwarded, ModelRunner
from gpu_service.engine.packed_rows import PackedTokens, graph_tokens, token_fields
from moebius.errors import brief
from moebius.process.progress import counted

_log = structlog.get_logger(__name__)


@dataclass(slots=True)
class PromptGraph:
    """One captured size; filled by `PromptGraphs.capture_next`."""

    size: int
    inputs: StepPlan  # its tensors are the graph's
    captured: CapturedGraph


class PromptGraphs:
    """All graphs of an engine, over one set of input and output buffers. Call with the stream active.

    For models whose layers read nothing of a step but its tokens, except in attention: without states, and
    without choices of tokens or blocks before attention. No expert server may be asked, and nothing streamed.
    """

    def __init__(
        self, runner: ModelRunner, backend: GraphBackend, uploader: Uploader, *, sizes: list[int]
    ) -> None:
        assert isinstance(runner.attention, AttentionBackend), "latents are not captured in pieces"
        self._runner, self._backend, self._uploader = runner, backend, uploader
        self._sizes = sorted(sizes)
        largest, device = self._sizes[-1], runner.token_pool.tokens.device
        self._attention = AttentionBetweenGraphs(runner.attention, largest)
        self._fields = token_fields(runner.features)
        self._dummies = {Dummy.SLOT: runner.token_pool.dummy_slot}
        self._packed = {size: PackedTokens(self._fields, size, self._dummies) for size in self._sizes}
        self._rows = torch.zeros(self._packed[largest].end, dtype=torch.uint8, device=device)
        self._input_ids = torch.zeros(largest, dtype=torch.int64, device=device)
        # What all graphs leave, of the largest size; made by the first run.
        self._outputs: Forwarded | None = None
        self._graphs: dict[int, PromptGraph] = {}
        # Sizes that are to be captured, ascending.
        self._left = [*self._sizes]

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers; what the graphs allocate while they are captured comes on top."""
        outputs = [found for found in self._outputs or () if isinstance(found, torch.Tensor)]
        own = sum(buffer.nbytes for buffer in (self._rows, self._input_ids, *outputs))
        return own + self._attention.nbytes

    @property
    def sizes(self) -> list[int]:
        """Numbers of tokens that have a graph, ascending."""
        return sorted(self._graphs)

    @property
    def num_left(self) -> int:
        """Number of sizes that are to be captured still."""
        return len(self._left)

    def capture_all(self) -> None:
        """Captures what is left, as `capture_next`."""
        for _ in counted(range(self.num_left), "capturing graphs of prompts", self.num_left):
            if self._left:
                self.capture_next()

    def capture_next(self) -> None:
        """Runs the largest size that is left, then captures it.

        Where one cannot be captured there are no graphs, and a warning says why: steps are slower, not wrong.
        Raises RuntimeError where the device failed: it may go on recording what comes next.
        """
        size = self._left.pop()
        try:
            self._graphs[size] = self._capture(size)
        except torch.AcceleratorError as error:
            raise RuntimeError(
                f"steps of {size} tokens can not be captured in a graph ({brief(error)}); "
                "cuda_graph_max_prompt_tokens: 0 runs without"
            ) from error
        except Exception as error:
            _log.warning("steps with prompts run without graphs", tokens=size, because=brief(error))
            self.close()
            return
        if not self._left:
            _log.info("graphs of prompts are captured", sizes=self._sizes)

    def replay_of(self, plan: StepPlan, staged: StepPlan) -> Callable[[], Forwarded] | None:
        """Returns what replays the layers of a step, which is on the host and on the device; None: it has to
        run eagerly. What that returns is valid until the next replay.
        """
        rows, runner = plan.query_start_loc[-1], self._runner
        if not self._graphs or rows > self._sizes[-1] or plan.images is not None or plan.depths:
            return None
        if runner.recorder is not None and runner.recorder.needs_eager_steps:
            return None
        # None: it is captured later. A larger one would compute more padding than its launches save.
        graph = self._graphs.get(self._sizes[bisect.bisect_left(self._sizes, rows)])
        return None if graph is None else partial(self.replay, graph, plan, staged)

    def replay(self, graph: PromptGraph, plan: StepPlan, staged: StepPlan) -> Forwarded:
        """Launches the layers of a step, whose tokens are in the token pool."""
        rows, packed = plan.query_start_loc[-1], self._packed[graph.size]
        self._uploader.fill(self._rows, packed.end, partial(packed.write_tokens, plan, rows))
        self._runner.attention.plan(staged)
        self._attention.plan_rows(rows, graph.size)
        graph.captured.replay()
        return _rows_of(self._made(), rows)

    def close(self) -> None:
        """Gives up all graphs."""
        for graph in self._graphs.values():
            graph.captured.close()
        self._graphs, self._left = {}, []

    def _capture(self, size: int) -> PromptGraph:
        inputs = self._inputs(size)
        self._attention.plan(inputs)
        for _ in range(LATER_RUNS if self._graphs else WARM_UP_RUNS):
            made = self._forward(inputs)
            if self._outputs is None:
                self._outputs = _each(torch.zeros_like, made)
        try:
            captured = self._backend.capture_pieces(partial(self._step, inputs))
        finally:
            self._attention.end_capture()
        # Once before any request depends on it.
        self._attention.plan_rows(0, size)
        captured.replay()
        return PromptGraph(size, inputs, captured)

    def _inputs(self, size: int) -> StepPlan:
        """Returns a step of `size` tokens, all of them padding, on the memory that its graph reads."""
        rows = graph_rows(self._fields, size, self._dummies)
        uploaded = self._uploader.upload(list(rows.values()), self._rows)
        return graph_tokens(dict(zip(rows, uploaded, strict=True)), size, self._input_ids)

    def _forward(self, inputs: StepPlan) -> Forwarded:
        runner = self._runner
        inputs.input_ids.copy_(runner.token_pool.gather(inputs.token_slots, inputs.positions))
        context = replace(runner.context(inputs), attention=self._attention)
        return runner.forwarded(runner.model.forward(context), context)

    def _step(self, inputs: StepPlan, cut: Cut) -> None:
        """The recorded work; reads and writes memory that stays."""
        self._attention.cut_at(cut)
        rows, made = inputs.positions.shape[0], self._forward(inputs)
        kept = _rows_of(self._made(), rows)
        kept.hidden_states.copy_(made.hidden_states)
        for memory, found in (
            (kept.first_overflow, made.first_overflow),
            (kept.drafter_inputs, made.drafter_inputs),
        ):
            if memory is not None and found is not None:
                memory.copy_(found)

    def _made(self) -> Forwarded:
        assert self._outputs is not None, "a run comes before what is recorded"
        return self._outputs


def _each(change: Callable[[torch.Tensor], torch.Tensor], outputs: Forwarded) -> Forwarded:
    overflow, inputs = outputs.first_overflow, outputs.drafter_inputs
    return Forwarded(
        change(outputs.hidden_states),
        None if overflow is None else change(overflow),
        None if inputs is None else change(inputs),
    )


def _rows_of(outputs: Forwarded, rows: int) -> Forwarded:
    return _each(lambda found: found[:rows], outputs)
