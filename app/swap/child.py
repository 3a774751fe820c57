"""The processes of one of several models: a `moebius serve` of its own, on a port of this host alone."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from pathlib import Path

import httpx
import structlog

from app.supervisor.lines import ForwardedLines
from app.supervisor.process import CHILD_PROGRAM
from app.supervisor.runfile import write_private
from app.swap.pool import CannotLoad, ModelRunner
from moebius.config import MoebiusConfig
from moebius.config.loader import effective_config
from moebius.errors import FAILURE_MARK
from moebius.process.limits import available_memory

_log = structlog.get_logger(__name__)
_POLL_S = 0.1
_WAITING, _FAILED = "waiting for ", "moebius: "
# Beyond the time that its running requests may continue.
_STOP_MARGIN_S = 30.0
_LONGEST_LINE = 2**20


class ModelProcess(ModelRunner):
    """One model. Its command line is `moebius serve --config FILE`, with all settings in the file."""

    def __init__(self, name: str, config: MoebiusConfig, key: str, directory: Path) -> None:
        """`config`: with the address that it serves; `key`: of the API, empty: none is needed; `directory`:
        where its settings are written."""
        self.name, self.config = name, config
        gateway = config.gateway
        self.base_url = f"http://{gateway.host}:{gateway.port}"
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._settings = directory / f"{gateway.port}.yaml"
        self._process: Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._said = ""  # its last line that says why it ended
        # What a start waits for; empty: nothing.
        self.progress = ""

    @property
    def is_running(self) -> bool:
        """Whether its supervisor runs."""
        return self._process is not None and self._process.returncode is None

    def fits(self) -> bool:
        """Compares the files of weights with the RAM that is available."""
        model = Path(self.config.model.model).expanduser()
        files = [model] if model.is_file() else model.glob("*.safetensors")
        needed = sum(file.stat().st_size for file in files)
        return needed <= available_memory()

    async def start(self) -> None:
        """Starts the supervisor, and waits as long as `ready_timeout_s` says."""
        await self.stop()
        await asyncio.to_thread(write_private, self._settings, effective_config(self.config))
        wrapper = (sys.executable, "-I", "-S", CHILD_PROGRAM, str(os.getpid()), "-")
        serve = (sys.executable, "-P", "-m", "moebius", "serve", "--config", str(self._settings))
        self._said, self.progress = "", "starting"
        self._process = await asyncio.create_subprocess_exec(
            *wrapper,
            *serve,
            stdin=DEVNULL,
            stdout=PIPE,
            stderr=STDOUT,
            limit=_LONGEST_LINE,
            start_new_session=True,  # Ctrl-C is ours alone
        )
        self._reading = asyncio.create_task(self._read(self._process))
        try:
            async with asyncio.timeout(self.config.supervisor.ready_timeout_s):
                await self._until_ready(self._process)
        except TimeoutError:
            await self.stop()
            raise CannotLoad(f"{self.name} was not ready in time (ready_timeout_s)") from None
        finally:
            self.progress = ""

    async def _until_ready(self, process: Process) -> None:
        async with httpx.AsyncClient(trust_env=False) as client:
            while process.returncode is None:
                with contextlib.suppress(httpx.HTTPError):
                    if (await client.get(f"{self.base_url}/ready", timeout=2)).status_code == httpx.codes.OK:
                        return
                await asyncio.sleep(_POLL_S)
        if self._reading is not None:
            await self._reading
        raise CannotLoad(f"{self.name} cannot be loaded: {self._said or 'its log says why'}")

    async def _read(self, process: Process) -> None:
        """Passes its lines on with the model's name, and notes what they say of a start."""
        assert process.stdout is not None
        lines = ForwardedLines(self.name, self.config.telemetry.log_format == "json")
        with contextlib.suppress(ValueError):  # a line that is too long: what follows is lost
            async for raw in process.stdout:
                text = raw.decode(errors="replace").rstrip()
                if text.startswith(_WAITING):
                    self.progress = text
                elif text.startswith(_FAILED):
                    self._said = text.removeprefix(FAILURE_MARK).removeprefix(_FAILED)
                forwarded = lines.forwarded(text)
                if forwarded is not None:
                    print(forwarded, file=sys.stderr, flush=True)

    async def sleep(self) -> None:
        """Asks its gateway, which answers when the memory is given back."""
        await self._post("/sleep")

    async def wake(self) -> None:
        """Asks its gateway, which answers when the model is loaded."""
        self.progress = "waking up"
        try:
            await self._post("/wake_up")
        finally:
            self.progress = ""

    async def _post(self, path: str) -> None:
        limit_s = self.config.supervisor.ready_timeout_s
        try:
            async with httpx.AsyncClient(trust_env=False, headers=self._headers, timeout=limit_s) as client:
                answer = await client.post(self.base_url + path)
        except httpx.HTTPError as error:
            raise CannotLoad(f"{self.name} does not answer {path}: {type(error).__name__}") from None
        if answer.status_code != httpx.codes.OK:
            raise CannotLoad(f"{self.name} answered {path} with {answer.status_code}: {answer.text[:300]}")

    async def stop(self) -> None:
        """Ends the supervisor, which ends the processes; kills it when it takes too long."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
            try:
                await asyncio.wait_for(process.wait(), self.config.supervisor.stop_timeout_s + _STOP_MARGIN_S)
            except TimeoutError:
                _log.error("model does not end, it is killed", model=self.name)
                process.kill()
                await process.wait()
        if self._reading is not None:
            await self._reading
        self.progress = ""
