"""CUDA graphs and a busy device, for tests that have one."""

from __future__ import annotations

from collections.abc import Callable

import torch


def capture(step: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """Runs a step as the engine does before a capture, then records it. Returns the graph and its output."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        output = step()
    return graph, output


def hold_device(cycles: int = 50_000_000) -> None:
    """Queues a kernel that does nothing for some 30 ms, so that the host runs ahead."""
    torch.cuda._sleep(cycles)
