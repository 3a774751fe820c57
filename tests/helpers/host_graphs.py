"""The host's twin of a captured graph: operations recorded with the very tensors they touched.

As strict as a GPU's graph: a replay runs no Python of the recorded work, so whatever that work read outside
of tensors (lengths, lists, decisions) stays what it was. Code that replays right here keeps its state where
a graph can see it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils import _python_dispatch

from gpu_service.device.graphs import CapturedGraph, Cut, GraphBackend

# torch leaves it untyped.
_DispatchMode: Any = _python_dispatch.TorchDispatchMode


class _Recorder(_DispatchMode):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[torch.Tensor]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.namespace == "c10d":
            # A collective: its schema does not tell that it writes to its arguments.
            self.calls.append((partial(_call_and_wait, func), args, kwargs, []))
            return result
        outputs = _tensors_of((result,))
        memory = {_memory(tensor) for tensor in _tensors_of((*args, *kwargs.values()))}
        # What shares memory with an argument is a view or was written in place; a replay refills the others.
        fresh = [output for output in outputs if _memory(output) not in memory]
        if len(fresh) not in (0, len(outputs)):
            raise NotImplementedError(f"{func} returns new tensors and old ones")
        if fresh or func._schema.is_mutable:
            self.calls.append((func, args, kwargs, fresh))
        return result


def _call_and_wait(collective: Any, *args: Any, **kwargs: Any) -> None:
    """Waits for what it sends and receives, as a stream does."""
    result = collective(*args, **kwargs)
    (result[-1] if isinstance(result, tuple) else result).wait()


def _tensors_of(values: Iterable[Any]) -> list[torch.Tensor]:
    """Returns the tensors among an operation's arguments or results, which are values and lists of values.

    torch's own walk of nested containers took half of a capture's time.
    """
    found = []
    for value in values:
        for each in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(each, torch.Tensor):
                found.append(each)
    return found


def _memory(tensor: torch.Tensor) -> int:
    # Packed weights have no storage to show, and no views.
    return id(tensor) if tensor.is_mkldnn else tensor.untyped_storage().data_ptr()


class _Recording(CapturedGraph):
    def __init__(self, recorder: _Recorder) -> None:
        self._calls = recorder.calls

    def replay(self) -> None:
        for func, args, kwargs, outputs in self._calls:
            result = func(*args, **kwargs)
            new = _tensors_of((result,)) if outputs else []
            for output, tensor in zip(outputs, new, strict=True):
                output.copy_(tensor)

    def close(self) -> None:
        self._calls = []


class RecordedOperations(GraphBackend):
    """Records by running once: unlike on a GPU, what is recorded also happens."""

    def capture(self, work: Callable[[], None]) -> CapturedGraph:
        recorder = _Recorder()
        with recorder:
            work()
        return _Recording(recorder)

    def capture_pieces(self, work: Callable[[Cut], None]) -> CapturedGraph:
        """What the host launches takes its turn among the operations."""
        recorder = _Recorder()

        def cut(tensors: Sequence[torch.Tensor], launch: Callable[..., None]) -> None:
            recorder.calls.append((partial(launch, *tensors), (), {}, []))

        with recorder:
            work(cut)
        return _Recording(recorder)
