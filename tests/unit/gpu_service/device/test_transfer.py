"""Guards the way between host and device: no buffer is reused while anyone still needs it."""

from __future__ import annotations

import pytest
import torch

from gpu_service.core.request import Request, SamplingParams, SchedulerLimits
from gpu_service.core.step import tensors_of, with_tensors
from gpu_service.device.stream import (
    DeviceEvent,
    Download,
    HostBuffers,
    HostDeviceStream,
    Uploader,
    packed_offsets,
    packed_views,
)
from gpu_service.engine.input_builder import SampledRows
from tests.helpers.host_graphs import RecordedOperations


class HeldEvent(DeviceEvent):
    """Ends when the test says so."""

    def __init__(self) -> None:
        self.ended = False

    def query(self) -> bool:
        return self.ended

    def wait(self) -> None:
        raise AssertionError("launching must never wait")


class HeldStream(HostDeviceStream):
    """Copies are done at once, but the device says it is done when the test lets it."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[HeldEvent] = []
        self.buffers: list[torch.Tensor] = []

    def record(self) -> DeviceEvent:
        self.events.append(HeldEvent())
        return self.events[-1]

    def host_buffer(self, nbytes: int) -> torch.Tensor:
        self.buffers.append(super().host_buffer(nbytes))
        return self.buffers[-1]


def test_upload_copies_every_tensor_and_forgets_the_source() -> None:
    """Any type and shape, empty ones too; aligned; changing the source later changes nothing."""
    sources = [
        torch.arange(5),
        torch.tensor([], dtype=torch.int64),
        torch.tensor([[1.5], [2.5]]),
        torch.tensor([True, False, True]),
        torch.arange(12, dtype=torch.int32).view(3, 4)[:, 1:3],
    ]
    expected = [source.clone() for source in sources]
    uploaded = Uploader(HostDeviceStream()).upload(sources)
    for source in sources:
        source.zero_()
    for got, want in zip(uploaded, expected, strict=True):
        assert got.dtype == want.dtype
        assert torch.equal(got, want)
        assert got.storage_offset() * got.element_size() % 64 == 0


def test_a_destination_gives_equal_addresses() -> None:
    """What a captured graph reads stays where it was."""
    uploader, memory = Uploader(HostDeviceStream()), torch.zeros(4096, dtype=torch.uint8)
    first = uploader.upload([torch.arange(3), torch.ones(7)], memory)
    again = uploader.upload([torch.arange(3) + 1, torch.zeros(7)], memory)
    assert [t.data_ptr() for t in first] == [t.data_ptr() for t in again]
    assert first[0].tolist() == [1, 2, 3]
    with pytest.raises(RuntimeError):
        uploader.upload([torch.zeros(2000)], memory)


def test_staging_memory_is_reused_only_when_the_device_is_done() -> None:
    """Two steps in flight have two buffers; the third gets the first's once that copy has ended."""
    stream = HeldStream()
    uploader = Uploader(stream)
    for _ in range(2):
        uploader.upload([torch.arange(9)])
    assert len(stream.buffers) == 2
    stream.events[0].ended = True
    uploader.upload([torch.arange(9)])
    assert len(stream.buffers) == 2
    uploader.upload([torch.arange(9)])
    assert len(stream.buffers) == 3


def test_a_download_keeps_its_memory_until_it_is_read() -> None:
    """Neither an ended copy nor a later download takes it away before `release`."""
    stream = HeldStream()
    buffers = HostBuffers(stream)
    first = Download(stream, buffers, [torch.tensor([7, 8]), torch.tensor([True])])
    stream.events[0].ended = True
    second = Download(stream, buffers, [torch.tensor([1, 2]), torch.tensor([False])])
    assert [tensor.tolist() for tensor in first.tensors] == [[7, 8], [True]]
    first.release()
    third = Download(stream, buffers, [torch.tensor([5, 6])])
    assert third.tensors[0].data_ptr() == stream.buffers[0].data_ptr()
    assert second.tensors[0].tolist() == [1, 2]
    assert len(stream.buffers) == 2


def test_packed_views_do_not_overlap() -> None:
    """Each has its own bytes, and they end where the total says."""
    tensors = [torch.zeros(3, dtype=torch.int64), torch.zeros(65, dtype=torch.bool), torch.zeros(1)]
    offsets, total = packed_offsets(tensors)
    buffer = torch.zeros(total, dtype=torch.uint8)
    for index, view in enumerate(packed_views(buffer, tensors)):
        view.fill_(index + 1)
    assert offsets == [0, 64, 192]
    assert [view.unique().tolist() for view in packed_views(buffer, tensors)] == [[1], [True], [3.0]]


def test_a_plan_keeps_its_shape_through_the_tree() -> None:
    """Leaves are replaced in order, nested ones too; what is no tensor is shared."""
    params = SamplingParams(temperature=1.0, top_p=0.5, presence_penalty=1.0, logit_bias=((3, 1.0),))
    requests = [
        Request("r", [1, 2], params, slot=0),
        Request("s", [1], SamplingParams(temperature=0.0), slot=1),
    ]
    plan = SampledRows(requests).plan([0, 0], SchedulerLimits(8, 64, 128, 0, frozenset({7})))
    leaves = tensors_of(plan)
    rebuilt = with_tensors(plan, [leaf.clone() for leaf in leaves])
    assert plan.penalties is not None
    assert rebuilt.penalties is not None
    assert rebuilt.penalties.slots is not plan.penalties.slots
    assert [leaf.tolist() for leaf in tensors_of(rebuilt)] == [leaf.tolist() for leaf in leaves]
    assert rebuilt.logprob_rows is plan.logprob_rows
    assert rebuilt.banned is None


def test_recorded_operations_freeze_python() -> None:
    """A replay sees new contents of tensors and nothing else: the number stays that of the recording."""
    source, target, number = torch.tensor([1.0]), torch.zeros(1), [10.0]
    with torch.inference_mode():
        graph = RecordedOperations().capture(lambda: target.copy_(source.to(torch.float64) * 2 + number[0]))
        source.fill_(3.0)
        number[0] = 1000.0
        graph.replay()
    assert target.item() == 16.0
