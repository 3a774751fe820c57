"""Decode steps as captured graphs: one per batch size, smaller batches padded to the next.

A graph holds a whole step whose requests compute one token each: gather of the token ids, forward, logits,
the greedy token and its way into the token pool. So a greedy batch needs one copy, one graph and one copy
back; other sampling runs on the graph's logits. A short prompt is a request for each of its tokens. Rows of
padding are a token at position 0 of a slot that no request has, with the dummy page as their cache, and
choose no experts.

The first pass of a drafter with one layer is a graph of its own after it, because tokens that are not the
likeliest are drawn between the two; it reads the same inputs and the same plan of attention. Passes for
further draft tokens are launched one by one. Where steps copy experts it is no graph: what was copied for
the step is there once.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import structlog
import torch

from gpu_service.core.prompt_rows import as_decode_rows, fit_rows
from gpu_service.core.step import Dummy, StepPlan, captured_fields, graph_plan, graph_rows
from gpu_service.device.graphs import CapturedGraph, GraphBackend
from gpu_service.device.stream import Uploader, packed_offsets
from gpu_service.engine.model_runner import ModelRunner
from gpu_service.engine.packed_rows import PackedRows
from gpu_service.engine.sampler import StepOutputs
from gpu_service.experts.fetching.fetcher import MOST_ROWS
from gpu_service.speculation.drafter import FirstPass
from moebius.process.progress import counted

_log = structlog.get_logger(__name__)
# Runs before the first capture: one compiles, loads and allocates, the next finds everything in place. Before
# captures of other sizes one is enough, for kernels that only they use.
WARM_UP_RUNS, LATER_RUNS = 2, 1


@dataclass(slots=True)
class DecodeGraph:
    """One captured size; filled by `DecodeGraphs.capture_all`."""

    size: int
    inputs: StepPlan  # its tensors are the graph's
    captured: CapturedGraph | None = None
    first_pass: CapturedGraph | None = None  # A drafter's; None: it is launched by the host.


class DecodeGraphs:
    """All graphs of an engine, over one set of input and output buffers. Call with the stream active."""

    def __init__(
        self,
        runner: ModelRunner,
        backend: GraphBackend,
        uploader: Uploader,
        *,
        sizes: list[int],
        max_pages: int,
        vocab_size: int,
    ) -> None:
        """`max_pages`: of the longest request; `vocab_size`: columns of the model's logits here."""
        self._runner = runner
        self._backend = backend
        self._uploader = uploader
        self._sizes = sorted(sizes)
        self._fields = captured_fields(runner.features)
        self._dummies = {
            Dummy.SLOT: runner.token_pool.dummy_slot,
            Dummy.STATE: 0 if runner.states is None else runner.states.dummy_slot,
        }
        device, largest = runner.token_pool.tokens.device, self._sizes[-1]
        empty = graph_rows(self._fields, largest, self._dummies, num_pages=max_pages)
        _, nbytes = packed_offsets(list(empty.values()))
        self._rows = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        self._int32_rows = self._rows.view(torch.int32)
        self._packed = {size: PackedRows(self._fields, size, self._dummies) for size in self._sizes}
        self._block_table = torch.zeros((largest, max_pages), dtype=torch.int32, device=device)
        # The widest block table so far: columns from there on hold zeros in all rows.
        self._widest = 0
        self._input_ids = torch.zeros(largest, dtype=torch.int64, device=device)
        # Memory that all graphs write their results to, of the largest size; on a pipeline stage without the
        # head logits have no columns.
        self._token_ids = torch.zeros(largest, dtype=torch.int64, device=device)
        self._finite = torch.zeros(largest, dtype=torch.bool, device=device)
        self._logits = torch.zeros((largest, vocab_size), dtype=torch.float32, device=device)
        notes, drafter = runner.notes_overflow, runner.drafter
        self._first_overflow = torch.zeros(largest, dtype=torch.int32, device=device) if notes else None
        self._hidden_states = None if drafter is None else drafter.make_buffer(largest)
        # What the drafter's first pass makes, and its tokens; None: no graph has it.
        self._first_pass: FirstPass | None = None
        if drafter is not None and drafter.captures and runner.fetcher is None:
            self._first_pass = FirstPass(drafter.make_buffer(largest), torch.zeros_like(self._token_ids))
        self._graphs: dict[int, DecodeGraph] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers; what the graphs allocate while they are captured comes on top."""
        inputs = (self._rows, self._block_table, self._input_ids)
        return sum(buffer.nbytes for buffer in (*inputs, self._token_ids, self._finite, self._logits))

    def capture_all(self) -> None:
        """Runs each size, then captures it, the largest first. Expert servers must be ready.

        Raises RuntimeError naming the size that can not be captured.
        """
        for size in counted(reversed(self._sizes), "capturing decode graphs", len(self._sizes)):
            try:
                self._graphs[size] = self._capture(size)
            except Exception as error:
                raise RuntimeError(
                    f"decode steps of {size} rows can not be captured in a graph ({error}); "
                    "cuda_graphs: false runs without graphs"
                ) from error
        _log.info("decode graphs are captured", sizes=self._sizes)

    def graph_for(self, plan: StepPlan) -> DecodeGraph | None:
        """Returns the graph that fits a step best; None: it has to run eagerly."""
        rows = plan.query_start_loc[-1]
        if not self._graphs or rows > self._sizes[-1] or not fit_rows(plan):
            return None
        if plan.depths:  # a graph's rows have no order among them
            return None
        recorder = self._runner.recorder
        if recorder is not None and recorder.needs_eager_steps:
            return None
        return self._graphs[self._sizes[bisect.bisect_left(self._sizes, rows)]]

    def replay(self, graph: DecodeGraph, plan: StepPlan) -> StepOutputs:
        """Launches a step. Returns its logits float32 `[S, V]`, and tokens if all rows want the likeliest.

        All of them are valid until the next replay.
        """
        rows = as_decode_rows(plan, self._dummies[Dummy.SLOT])
        count, padding = rows.num_requests, graph.size - rows.num_requests
        packed, width = self._packed[graph.size], rows.block_table.shape[1]
        self._uploader.fill(self._rows, packed.nbytes(width), partial(packed.write, rows))
        self._set_pages(packed.pages(self._int32_rows, width), graph.size)
        graph.inputs.seq_lens[:] = rows.seq_lens + [1] * padding
        self._runner.attention.plan_replay(graph.inputs)
        assert graph.captured is not None
        fetched = self._runner.fetch(graph.size)
        graph.captured.replay()
        if fetched is not None:
            fetched.launched()
        overflow, hidden_states = self._first_overflow, self._hidden_states
        is_greedy = plan.sampling is not None and plan.sampling.takes_argmax
        of_samples, first_pass = self._sampled_rows(plan), None
        if graph.first_pass is not None and plan.is_uniform_decode:
            first_pass = partial(self._replay_pass, graph, count)
        return StepOutputs(
            self._logits[of_samples],
            None if hidden_states is None else hidden_states[:count],
            self._token_ids[of_samples] if is_greedy else None,
            self._finite[of_samples] if is_greedy else None,
            streamed=fetched,
            first_overflow=None if overflow is None else overflow[:count],
            replay_first_pass=first_pass,
        )

    def _sampled_rows(self, plan: StepPlan) -> slice | torch.Tensor:
        """Returns which of a graph's rows a step samples from."""
        if plan.is_uniform_decode:
            return slice(plan.num_requests)
        return self._uploader.upload([plan.logits_indices])[0]

    def _replay_pass(self, graph: DecodeGraph, count: int) -> FirstPass:
        """Launches the drafter's first pass after its step, of `count` rows; valid until the next replay."""
        assert graph.first_pass is not None
        assert self._first_pass is not None
        graph.first_pass.replay()
        return FirstPass(*(buffer[:count] for buffer in self._first_pass))

    def close(self) -> None:
        """Gives up all graphs."""
        for graph in self._graphs.values():
            for captured in (graph.captured, graph.first_pass):
                if captured is not None:
                    captured.close()
        self._graphs = {}

    def _capture(self, size: int) -> DecodeGraph:
        rows = self._upload(graph_rows(self._fields, size, self._dummies), size)
        if not self._is_ever_padded(size):
            del rows["valid_rows"]
        graph = DecodeGraph(size, graph_plan(rows, size, self._input_ids[:size]))
        self._runner.attention.plan_capture(graph.inputs)
        graph.captured = self._recorded(lambda: self._step(graph.inputs))
        if self._first_pass is not None:
            graph.first_pass = self._recorded(lambda: self._draft(graph.inputs))
        # Once before any request depends on it.
        self._begin_step()
        self._runner.attention.plan_replay(graph.inputs)
        graph.captured.replay()
        if graph.first_pass is not None:
            graph.first_pass.replay()
        return graph

    def _recorded(self, work: Callable[[], None]) -> CapturedGraph:
        for _ in range(LATER_RUNS if self._graphs else WARM_UP_RUNS):
            self._begin_step()
            work()
        return self._backend.capture(work)

    def _upload(self, rows: dict[str, torch.Tensor], size: int) -> dict[str, torch.Tensor]:
        """Fills the memory that graphs of this size read; returns it."""
        uploaded = dict(zip(rows, self._uploader.upload(list(rows.values()), self._rows), strict=True))
        return uploaded | {"block_table": self._set_pages(uploaded["block_table"], size)}

    def _set_pages(self, pages: torch.Tensor, size: int) -> torch.Tensor:
        """Refills the block table of graphs of this size, as wide as the longest request that may come: most
        of it is zeros that need not travel.
        """
        table, width = self._block_table[:size], pages.shape[1]
        table[:, :width].copy_(pages)
        if width < self._widest:
            table[:, width : self._widest].zero_()
        self._widest = max(self._widest, width)
        return table

    def _begin_step(self) -> None:
        if self._runner.experts is not None:
            self._runner.experts.begin_step()

    def _step(self, plan: StepPlan) -> None:
        """The recorded work; reads and writes memory that stays."""
        runner, size = self._runner, plan.num_requests
        plan.input_ids.copy_(runner.token_pool.gather(plan.token_slots, plan.positions))
        fetcher = runner.fetcher if size <= MOST_ROWS else None
        context = runner.context(plan, None if fetcher is None else fetcher.layers_side)
        hidden_states = runner.model.forward(context)
        logits = runner.model.compute_logits(hidden_states)
        first_overflow = runner.first_overflow(context)
        sampled = runner.sampler.greedy(logits)
        assert sampled.token_ids is not None
        assert sampled.finite is not None
        runner.token_pool.scatter(plan.sample_slots, plan.sample_positions, sampled.token_ids)
        self._logits[:size].copy_(logits)
        self._token_ids[:size].copy_(sampled.token_ids)
        self._finite[:size].copy_(sampled.finite)
        if self._first_overflow is not None and first_overflow is not None:
            self._first_overflow[:size].copy_(first_overflow)
        if self._hidden_states is not None and runner.drafter is not None:
            self._hidden_states[:size].copy_(runner.drafter.inputs(hidden_states, context))

    def _draft(self, plan: StepPlan) -> None:
        """The recorded work of a drafter's first pass, after that of the step."""
        runner, size, buffers = self._runner, plan.num_requests, self._first_pass
        assert runner.drafter is not None
        assert self._hidden_states is not None
        assert buffers is not None
        next_ids = runner.token_pool.gather(plan.token_slots, plan.positions + 1)
        found = runner.drafter.first_pass(runner.context(plan), self._hidden_states[:size], next_ids)
        buffers.made[:size].copy_(found.made)
        buffers.token_ids[:size].copy_(found.token_ids)

    def _is_ever_padded(self, size: int) -> bool:
        """Returns whether smaller batches use this graph; else masking would waste a kernel a layer."""
        index = self._sizes.index(size)
        return size - (self._sizes[index - 1] if index else 0) > 1
