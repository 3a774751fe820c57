"""Writes results as they come: those that wait for the disk are written and made durable together."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from gateway.batches.results import ResultFile

_FULL_S = 2.0  # between two tries while the disk is full


class ResultWriter:
    """The one writer of a batch's result files. Used on the event loop."""

    def __init__(self, files: Mapping[str, ResultFile], log: Any) -> None:
        """`log`: for the reason why nothing can be written, once per reason."""
        self._files = files
        self._log = log
        self._waiting: list[tuple[str, bytes, asyncio.Future[None]]] = []
        self._writing: asyncio.Task[None] | None = None
        self._is_closing = False
        self._problem = ""

    async def write(self, name: str, line: bytes) -> None:
        """Returns once the line is on disk, however long the disk is full."""
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((name, line, written))
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write_all())
        await written

    async def close(self) -> None:
        """Writes what waits; what the disk does not take now is left out."""
        self._is_closing = True
        if self._writing is not None:
            await asyncio.gather(self._writing, return_exceptions=True)

    async def _write_all(self) -> None:
        while self._waiting:
            taken = [one for one in self._waiting if not one[2].cancelled()]
            self._waiting = []
            for name in self._files:
                await self._append(name, [one for one in taken if one[0] == name])

    async def _append(self, name: str, taken: list[tuple[str, bytes, asyncio.Future[None]]]) -> None:
        if not taken:
            return
        lines = [line for _, line, _ in taken]
        while True:
            try:
                await asyncio.to_thread(self._files[name].append, lines)
                break
            except OSError as error:
                if str(error) != self._problem:
                    self._log.error("results of a batch cannot be written: they wait", reason=str(error))
                self._problem = str(error)
                if self._is_closing:
                    for _, _, written in taken:
                        written.cancel()
                    return
                await asyncio.sleep(_FULL_S)
        for _, _, written in taken:
            if not written.done():
                written.set_result(None)
