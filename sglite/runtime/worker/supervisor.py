"""Keeps a worker process running, and is the Backend of whatever worker there is.

While there is none (loading, crashed), every call is refused with UnavailableError, which a server answers with 503.
A worker that dies takes its calls along, each ended once with UnavailableError: what was streamed cannot be taken
back, so nothing is tried twice. The next one is started at once, after further ends in a row with growing pauses;
after ``max_crashes`` of them, or when the very first one cannot load its model, ``failure`` says why and
``given_up`` is called.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from sglite.errors import SgliteError, UnavailableError, UnsupportedError
from sglite.protocol import Chunk, Constraint, GenerateRequest, ModelInfo, Prompt
from sglite.runtime.worker.config import WorkerConfig
from sglite.runtime.worker.process import WorkerProcess, died

log = logging.getLogger("sglite.worker")

COMMAND = (sys.executable, "-m", "sglite.runtime.worker")
STEADY = 60.0
"""Seconds of service after which a worker's end counts as the first again."""
_CHECKS = 0.25
_PAUSES = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)


@dataclass(frozen=True, slots=True)
class Hooks:
    """Whom the supervisor tells: of the first worker that is ready, and of giving up."""

    ready: Callable[[], None] = lambda: None
    given_up: Callable[[], None] = lambda: None


class Supervisor:
    """A Backend. ``start`` is called on the event loop that will use it; ``aclose`` or that loop's end stop it."""

    pooling = "last"
    """See ``Engine.pooling``."""

    def __init__(
        self,
        options: Mapping[str, Any],
        config: WorkerConfig | None = None,
        *,
        command: Sequence[str] = COMMAND,
        hooks: Hooks | None = None,
    ) -> None:
        self.failure: SgliteError | None = None
        self.restarts = 0
        self._options = options
        self._config = config or WorkerConfig()
        self._command = command
        self._hooks = hooks or Hooks()
        self._worker: WorkerProcess | None = None
        self._info: ModelInfo | None = None
        self._reason: SgliteError = died(None)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._supervise(), name="sglite-supervisor")

    @property
    def pid(self) -> int | None:
        """The worker's process id, while there is one."""
        return self._worker.process.pid if self._worker is not None else None

    # ---- the Backend verb --------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        """See ``protocol.Backend.generate``."""
        request.validate()
        worker = self._ready_worker()
        call, items = worker.submit(request)
        open_samples = 1 if request.candidates else request.sampling.n
        try:
            while open_samples:
                item = await items.take()
                if isinstance(item, SgliteError):
                    raise item
                assert isinstance(item, Chunk)
                open_samples -= item.finish is not None
                if not open_samples:
                    worker.forget(call)
                yield item
        finally:
            worker.cancel(call)

    async def info(self) -> ModelInfo:
        """Known since the first worker was ready; until then UnavailableError."""
        if self._info is None:
            raise self._unavailable()
        return self._info

    async def flush_cache(self) -> None:
        await self._ask("flush_cache")

    async def tokenize(self, prompt: Prompt) -> list[int]:
        return list(await self._ask("tokenize", prompt))

    async def detokenize(self, ids: Sequence[int]) -> str:
        text: str = await self._ask("detokenize", tuple(ids))
        return text

    async def embed(self, prompts: Sequence[Prompt], namespace: str = "") -> list[tuple[int, tuple[float, ...]]]:
        return list(await self._ask("embed", tuple(prompts), namespace))

    async def start_profile(self) -> None:
        await self._ask("start_profile")

    async def stop_profile(self) -> str:
        trace: str = await self._ask("stop_profile")
        return trace

    async def check_constraint(self, constraint: Constraint) -> None:
        await self._ask("check_constraint", constraint)

    async def check_texts(self, constraint: Constraint, texts: Sequence[str]) -> Mapping[str, Any]:
        found: Mapping[str, Any] = await self._ask("check_texts", constraint, tuple(texts))
        return found

    async def pin(self, prompt: Prompt, ttl: float, *, namespace: str = "") -> int:
        """See ``Engine.pin``. A worker that dies takes its pins along."""
        kept: int = await self._ask("pin", prompt, ttl, namespace)
        return kept

    async def abort(self, request_id: str) -> None:
        await self._ask("abort", request_id)

    async def end_program(self, program: str, branch: str = "", *, namespace: str = "") -> None:
        """See ``protocol.KeepsPrograms``. A worker that is gone keeps nothing."""
        with suppress(UnavailableError, UnsupportedError):
            await self._ask("end_program", program, branch, namespace)

    async def aclose(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _ask(self, verb: str, *arguments: Any) -> Any:
        return await self._ready_worker().ask(verb, *arguments)

    # ---- health ------------------------------------------------------------------------------------------------

    async def stats(self) -> dict[str, Any]:
        """The engine's counters as of its last heartbeat, and the supervisor's own."""
        worker = self._worker
        found = dict(worker.stats) if worker is not None else {}
        return {
            **found,
            "worker_restarts": self.restarts,
            "worker_silence": worker.silence if worker is not None else 0.0,
        }

    def check_loaded(self) -> None:
        """Raises UnavailableError while no worker is loaded."""
        self._ready_worker()

    def check_ready(self) -> None:
        """Raises UnavailableError while no worker is loaded, or the one there is does not answer."""
        worker = self._ready_worker()
        if worker.silence > self._config.stale_after:
            raise UnavailableError(f"the engine has not answered for {worker.silence:.0f} s")

    def _ready_worker(self) -> WorkerProcess:
        worker = self._worker
        if worker is None or worker.ended.is_set() or not worker.info.done():
            raise self._unavailable()
        return worker

    def _unavailable(self) -> UnavailableError:
        return UnavailableError("the engine is starting again" if self._info else "the model is being loaded")

    # ---- supervision -------------------------------------------------------------------------------------------

    async def _supervise(self) -> None:
        crashes = 0
        while True:
            served = await self._one_worker()
            if self._info is None:
                break  # a model that never loaded will not load the next time
            crashes = 1 if served > STEADY else crashes + 1
            if crashes >= self._config.max_crashes:
                break
            self.restarts += 1
            pause = _PAUSES[min(crashes - 1, len(_PAUSES) - 1)]
            log.error("%s; starting it again%s", self._reason, f" in {pause:g} s" if pause else "")
            await asyncio.sleep(pause)
        self.failure = self._reason if self._info is None else _hopeless(crashes, self._reason)
        self._hooks.given_up()

    async def _one_worker(self) -> float:
        """From a worker's start to its end; for how many seconds it served."""
        worker = self._worker = await WorkerProcess.start(self._command, self._options, self._config)
        began = time.monotonic()
        try:
            if await self._loaded(worker):
                began = time.monotonic()
                await self._watch(worker)
        finally:
            code = await worker.stop()
        self._reason = worker.error or died(code)
        return time.monotonic() - began

    async def _loaded(self, worker: WorkerProcess) -> bool:
        """Wait until the model is loaded. Loading may take any time: a download, a slow disk."""
        await asyncio.wait([worker.info])
        if worker.info.cancelled():
            return False
        first = self._info is None
        self._info = worker.info.result()
        if first:
            self._hooks.ready()
        else:
            log.warning("the engine is ready again")
        return True

    async def _watch(self, worker: WorkerProcess) -> None:
        """Until it ends, or is silent for too long and is killed."""
        while not worker.ended.is_set():
            if worker.silence > self._config.hang_timeout:
                log.error("the engine has not answered for %.0f s: killing it", worker.silence)
                worker.kill()
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(_CHECKS):
                    await worker.ended.wait()


def _hopeless(crashes: int, reason: SgliteError) -> UnavailableError:
    return UnavailableError(f"{reason}, {crashes} times in a row: giving up")
