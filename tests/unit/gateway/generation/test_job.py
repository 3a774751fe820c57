"""Guards that merged streams lose nothing and leave nothing running."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from gateway.generation.job import merge


class Source:
    """A stream that notes when it was closed; filled by its own generator."""

    def __init__(self) -> None:
        self.closed = False

    async def items(self, count: int, wait_s: float = 0.0, fail: bool = False) -> AsyncGenerator[int, None]:
        """`count` numbers; then waits, fails or ends."""
        try:
            for number in range(count):
                yield number
            await asyncio.sleep(wait_s)
            if fail:
                raise ValueError("source failed")
        finally:
            self.closed = True


@pytest.mark.parametrize("streams", [1, 3])
async def test_merge_gives_every_item(streams: int) -> None:
    """Nothing is lost or doubled, and every stream is closed."""
    sources = [Source() for _ in range(streams)]
    items = [item async for item in merge([source.items(5) for source in sources])]
    assert sorted(items) == sorted(list(range(5)) * streams)
    assert all(source.closed for source in sources)


async def test_merge_closes_the_others_on_failure() -> None:
    """One stream's failure ends the merge at once, and nothing goes on in the background."""
    slow, broken = Source(), Source()
    merged = merge([slow.items(1, wait_s=60), broken.items(1, fail=True)])
    with pytest.raises(ValueError, match="source failed"):
        _ = [item async for item in merged]
    assert slow.closed
    assert broken.closed


async def test_merge_closes_all_when_the_reader_leaves() -> None:
    """Closing the merged stream closes its sources: that is how a disconnect reaches the engine."""
    sources = [Source(), Source()]
    merged = merge([source.items(1, wait_s=60) for source in sources])
    await anext(merged)
    await merged.aclose()
    assert all(source.closed for source in sources)
