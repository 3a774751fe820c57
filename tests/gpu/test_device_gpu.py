"""Invariant: a GPU's stream, transfers and graphs do what their host twins do, and make no host wait."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from gpu_service.core.request import Request, SamplingParams, SchedulerLimits
from gpu_service.core.step import tensors_of, with_tensors
from gpu_service.device.graphs import CudaGraphs
from gpu_service.device.stream import (
    CudaDeviceStream,
    Download,
    HostBuffers,
    Uploader,
    own_pages,
    page_lock,
)
from gpu_service.engine.input_builder import SampledRows
from gpu_service.engine.sampler import PenaltyCounts, Sampler
from gpu_service.ops.ngrams import table_rows

pytestmark = pytest.mark.gpu
# Cycles: about two seconds, far longer than any launch.
LONG = 4_000_000_000
# torch leaves it untyped.
_cuda: Any = torch.cuda


@pytest.fixture
def stream() -> Iterator[CudaDeviceStream]:
    """A stream that has ended when the test has."""
    made = CudaDeviceStream(torch.device("cuda", torch.cuda.current_device()))
    with made.active(), torch.inference_mode():
        yield made
    made.synchronize()


def test_upload_and_download_do_not_wait(stream: CudaDeviceStream) -> None:
    """On a held-up device both return at once; afterwards every value has made the round trip."""
    uploader, results = Uploader(stream), HostBuffers(stream)
    sources = [torch.arange(1000), torch.rand(7, 3), torch.tensor([True, False]), torch.empty(0)]
    expected = [source.clone() for source in sources]
    # Memory that is page-locked for the first time may wait; a service has all it needs after its warm-up.
    _cuda._sleep(LONG // 20)
    warm = Download(stream, results, uploader.upload(sources) + uploader.upload(sources))
    warm.event.wait()
    warm.release()
    _cuda._sleep(LONG)
    first = uploader.upload(sources)
    for source in sources:
        source.zero_()
    second = uploader.upload(sources)
    download = Download(stream, results, first + second)
    assert not download.event.query(), "the device was not held up: nothing was shown"
    download.event.wait()
    for got, want in zip(download.tensors, [*expected, *sources], strict=True):
        assert torch.equal(got, want)


def test_a_graph_replays_on_refilled_memory(stream: CudaDeviceStream) -> None:
    """Two graphs in one pool, the larger captured first; replays see what was uploaded last."""
    uploader, graphs = Uploader(stream), CudaGraphs(stream)
    inputs = torch.zeros(4096, dtype=torch.uint8, device=stream.device)
    output = torch.zeros(512, device=stream.device)
    captured = {}
    for size in (512, 8):
        (view,) = uploader.upload([torch.ones(size)], inputs)

        def work(view: torch.Tensor = view, size: int = size) -> None:
            output[:size].copy_((view * 2 + 1).cumsum(0))

        work()
        captured[size] = graphs.capture(work)
    for size in (8, 512, 8):
        values = torch.rand(size)
        uploader.upload([values], inputs)
        captured[size].replay()
        stream.synchronize()
        torch.testing.assert_close(output[:size].cpu(), (values * 2 + 1).cumsum(0))
    for graph in captured.values():
        graph.close()


def test_a_capture_that_fails_leaves_the_stream_usable(stream: CudaDeviceStream) -> None:
    """The error is the work's own; a later capture succeeds."""
    graphs, value = CudaGraphs(stream), torch.zeros(4, device=stream.device)

    def broken() -> None:
        value.add_(1)
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        graphs.capture(broken)
    value.add_(1)
    graph = graphs.capture(lambda: value.add_(1))
    value.zero_()
    graph.replay()
    stream.synchronize()
    assert value.tolist() == [1.0] * 4
    graph.close()


def test_the_sampler_says_what_it_says_on_a_cpu(stream: CudaDeviceStream) -> None:
    """Every parameter at once, in float32, on a held-up device: no call waits."""
    vocab, count = 1000, 6
    limits = SchedulerLimits(8, 64, 128, 0, frozenset({7}))
    params: dict[str, Any] = {"presence_penalty": 0.5, "repetition_penalty": 1.3, "frequency_penalty": 0.2}
    kinds = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.7, top_k=20),
        SamplingParams(temperature=1.0, top_p=0.8, logprobs=3),
        SamplingParams(temperature=1.2, min_p=0.02, min_tokens=4, **params),
        SamplingParams(temperature=1.0, logit_bias=((5, 3.0),)),
        SamplingParams(temperature=0.9, top_p=0.9, top_k=50, **params),
    ]
    requests = [
        Request(f"r{i}", [1, 2, 3], SamplingParams(**(_fields(kinds[i]) | {"seed": i})), slot=i)
        for i in range(count)
    ]
    logits = torch.randn(count, vocab, generator=torch.Generator().manual_seed(1)) * 3
    plan = SampledRows(requests).plan([2] * count, limits)
    host = Sampler(vocab, torch.device("cpu"), count)
    device = Sampler(vocab, stream.device, count)
    for slot in range(count):
        tokens = torch.tensor([1, 2, 3, slot, 9], dtype=torch.int32)
        host.penalties.assign(slot, tokens, 3)
        device.penalties.assign(slot, tokens.to(stream.device), 3)
    expected = host.sample(logits.clone(), plan)
    on_device = logits.to(stream.device)
    device.sample(on_device.clone(), with_tensors(plan, Uploader(stream).upload(tensors_of(plan))))
    device.penalties.retract(*_penalties(plan, device, stream, expected.token_ids))
    stream.synchronize()
    _cuda._sleep(LONG)
    staged = with_tensors(plan, Uploader(stream).upload(tensors_of(plan)))
    sampled = device.sample(on_device, staged)
    assert not stream.record().query(), "the device was not held up: nothing was shown"
    assert sampled.token_ids.tolist() == expected.token_ids.tolist()
    assert sampled.finite.tolist() == expected.finite.tolist()
    assert sampled.logprobs is not None
    assert expected.logprobs is not None
    for got, want in zip(sampled.logprobs, expected.logprobs, strict=True):
        torch.testing.assert_close(got.cpu(), want, rtol=1e-5, atol=1e-5)


def _fields(params: SamplingParams) -> dict[str, Any]:
    return {name: getattr(params, name) for name in params.__slots__}


def _penalties(plan: Any, sampler: Sampler, stream: CudaDeviceStream, token_ids: torch.Tensor) -> Any:
    rows = with_tensors(plan.penalties, Uploader(stream).upload(tensors_of(plan.penalties)))
    return rows, token_ids.to(stream.device)


def test_penalty_counts_take_back_what_they_counted(stream: CudaDeviceStream) -> None:
    """A step that is run again counts its tokens once."""
    counts = PenaltyCounts(50, stream.device, 4)
    request = Request("r", [1], SamplingParams(presence_penalty=1.0), slot=2)
    plan = SampledRows([request]).plan([0], SchedulerLimits(8, 64, 128, 0, frozenset()))
    assert plan.penalties is not None
    rows = with_tensors(plan.penalties, Uploader(stream).upload(tensors_of(plan.penalties)))
    tokens = torch.tensor([9], device=stream.device)
    logits = torch.zeros(1, 50, device=stream.device)
    counts.advance(rows, tokens)
    counts.retract(rows, tokens)
    counts.apply(logits, rows)
    assert not logits.any()
    counts.advance(rows, tokens)
    counts.apply(logits, rows)
    assert logits[0, 9].item() == -1.0


@pytest.mark.parametrize("kind", ["bfloat16", "e4m3"])
def test_kernels_read_tables_in_the_hosts_memory(stream: CudaDeviceStream, kind: str) -> None:
    """Kernels read them eagerly and in a graph that is replayed with other rows; a table that is gone can be
    locked again.
    """
    from gpu_service.ops.triton.ngrams import table_rows as compute

    device = stream.device
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        table = own_pages((3000, 160), torch.bfloat16 if kind == "bfloat16" else torch.float8_e4m3fn)
        table.copy_(torch.randn(3000, 160, generator=generator))
        scale = None if kind == "bfloat16" else torch.tensor([0.25], device=device)
        page_lock(table, device, "the table")
        rows = torch.randint(-3, 3003, (50, 16), generator=generator)
        on_device = rows.to(device)
        expected = table_rows.reference(rows, table, None if scale is None else scale.cpu(), torch.bfloat16)
        assert torch.equal(compute(on_device, table, scale, torch.bfloat16).cpu(), expected)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = compute(on_device, table, scale, torch.bfloat16)
        on_device.copy_(rows.flip(0))
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(captured.cpu(), expected.flip(0))
        del table, graph, captured
