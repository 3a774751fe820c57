"""The host's twin of a captured graph: operations recorded with the very tensors they touched.

As strict as a GPU's graph: a replay runs no Python of the recorded work, so whatever that work read outside
of tensors (lengths, lists, decisions) stays what it was. Code that replays right here keeps its state where
a graph can see it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _python_dispatch

from gpu_service.device.graphs import CapturedGraph, GraphBackend

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
        returns = func._schema.returns
        outputs = list(result) if isinstance(result, (tuple, list)) else [result]
        # What aliases an argument is a view or written in place; only new tensors are to be refilled.
        fresh = [
            output
            for index, output in enumerate(outputs)
            if isinstance(output, torch.Tensor)
            and returns[min(index, len(returns) - 1)].alias_info is None
            and not _is_view(func)
        ]
        if fresh or func._schema.is_mutable:
            self.calls.append((func, args, kwargs, fresh))
        return result


def _is_view(func: Any) -> bool:
    return bool(func.is_view) and not func._schema.is_mutable


class _Recording(CapturedGraph):
    def __init__(self, recorder: _Recorder) -> None:
        self._calls = recorder.calls

    def replay(self) -> None:
        for func, args, kwargs, outputs in self._calls:
            result = func(*args, **kwargs)
            if not outputs:
                continue
            again = list(result) if isinstance(result, (tuple, list)) else [result]
            new = [tensor for tensor in again if isinstance(tensor, torch.Tensor)]
            for output, tensor in zip(outputs, new, strict=True):
                output.copy_(tensor)

    def close(self) -> None:
        self._calls = []


class RecordedOperations(GraphBackend):
    """Records by running once: unlike on a GPU, what is recorded also happens."""

    def capture(self, work: Callable[[], None]) -> CapturedGraph:
        """See the base class."""
        recorder = _Recorder()
        with recorder:
            work()
        return _Recording(recorder)
