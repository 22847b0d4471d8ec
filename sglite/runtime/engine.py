"""The in-process engine: a Backend whose step loop runs on a thread of its own.

Callers, on any event loop, tokenise and compile on their side of the door; commands reach the engine thread through
its inbox, answers come back through an Outbox. The thread is never blocked by a client.
"""

from __future__ import annotations

import asyncio
import logging
import math
import queue
import threading
import time
import uuid
import weakref
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from torch import inference_mode

from sglite.errors import (
    ConfigError,
    GrammarError,
    InvalidRequestError,
    SgliteError,
    UnavailableError,
    UnsupportedError,
)
from sglite.protocol import Chunk, Constraint, GenerateRequest, ModelInfo, Prompt, SamplingParams, Text, Usage
from sglite.runtime.best import best_samples
from sglite.runtime.config import config_from
from sglite.runtime.core import EngineCore
from sglite.runtime.embedding import POOLING, EmbedSink, EmbedTrack
from sglite.runtime.failures import untold
from sglite.runtime.profiling import Profiler
from sglite.runtime.stream import Outbox, Stream

if TYPE_CHECKING:
    from sglite.runtime.assembly import Parts
    from sglite.runtime.config import EngineConfig
    from sglite.runtime.grammar.base import Grammar
    from sglite.runtime.tracks import Job

log = logging.getLogger("sglite.engine")

T = TypeVar("T")
Command = Callable[[], None]

_LONG_TEXT = 20_000
"""Characters from which on encoding a prompt is given to a thread, so that the caller's loop goes on."""


class EngineThread:
    """Runs commands and steps until it is told to stop; everything behind the inbox belongs to it alone."""

    def __init__(self, core: EngineCore, close: Callable[[], None]) -> None:
        self.outbox = Outbox(self._orphaned)
        self._core = core
        self._close = close
        self._inbox: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._closed = False
        self._door = threading.Lock()
        """Held while something is put into the inbox, so that nothing comes in behind the order to stop."""
        self._thread = threading.Thread(target=self._run, name="sglite-engine", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def send(self, command: Command) -> None:
        """Have the engine thread run it before its next step. Raises UnavailableError after ``stop``."""
        with self._door:
            if self._closed:
                raise UnavailableError("the engine is closed")
            self._inbox.put(command)

    def ask(self, question: Callable[[], T]) -> Future[T]:
        """Like ``send``, with an answer."""
        future: Future[T] = Future()
        self.send(partial(_answer, future, question))
        return future

    def stop(self) -> None:
        """End every request with UnavailableError, and the thread. Safe to call twice."""
        with self._door:
            self._closed = True
            self._inbox.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    @inference_mode()
    def _run(self) -> None:
        try:
            while self._drain():
                self._step()
                self.outbox.flush()
        finally:
            self._shut()
            self._core.fail_all(UnavailableError("the engine is closed"))
            self.outbox.flush()
            self._close()

    def _shut(self) -> None:
        """Whatever came in before the door closed still gets its answer."""
        with self._door:
            self._closed = True
        while not self._inbox.empty():
            command = self._inbox.get()
            if command is not None:
                self._contained(command)

    def _drain(self) -> bool:
        """Run the waiting commands; with nothing to compute, sleep until there is one. False: stop."""
        block = not self._core.busy
        while True:
            try:
                command = self._inbox.get(block=block)
            except queue.Empty:
                return True
            if command is None:
                return False
            self._contained(command)
            block = False

    def _step(self) -> None:
        """A step that raises is our own mistake: every request in it gets an error, the engine goes on."""
        try:
            self._core.step()
        except Exception as error:
            log.exception("a step failed")
            self._core.fail_all(untold("the engine failed in a step", error))

    def _contained(self, command: Command) -> None:
        try:
            command()
        except Exception:
            log.exception("a command of the engine failed")

    def _orphaned(self, stream: Stream) -> None:
        if stream.job is not None:
            self._core.abort(stream.job)


def _answer(future: Future[T], question: Callable[[], T]) -> None:
    try:
        future.set_result(question())
    except Exception as error:
        future.set_exception(error)


@dataclass(slots=True)
class Outcomes:
    """What became of the samples under a constraint, since the start: those that ended with a complete answer, those
    that ended by an error, and of all their tokens how many were forced; how often tokens were taken back."""

    constrained_complete: int = 0
    constrained_failed: int = 0
    constrained_tokens: int = 0
    constrained_forced_tokens: int = 0
    constrained_rollbacks: int = 0

    def count(self, usage: Usage) -> None:
        self.constrained_complete += 1
        self.constrained_tokens += usage.completion_tokens
        self.constrained_forced_tokens += usage.forced_tokens
        self.constrained_rollbacks += usage.rollbacks


class Engine:
    """A model, ready to generate, in this process. It is a Backend, and a context manager that closes itself.

    ``Engine(model="smollm2-135m", **options)`` takes the fields of EngineConfig as keywords; an unknown one raises
    ConfigError. ``model_path`` is SGLang's name for ``model``. A model that cannot be found or loaded raises
    NotFoundError or ModelLoadError.
    """

    pooling = POOLING
    """How ``embed`` makes a vector of a prompt's positions: its last token's final hidden state."""

    def __init__(self, model: str | None = None, *, model_path: str | None = None, **options: Any) -> None:
        if model is not None and model_path is not None:
            raise ConfigError("model and model_path are the same; give one")
        from sglite.runtime.assembly import build

        if model is not None or model_path is not None:
            options["model"] = model_path if model is None else model
        self._start(build(config_from(options)))

    @classmethod
    def of(cls, parts: Parts) -> Engine:
        """An engine over parts made elsewhere: a scripted model, a faulty one."""
        engine = cls.__new__(cls)
        engine._start(parts)
        return engine

    def _start(self, parts: Parts) -> None:
        self._parts = parts
        self._core = parts.core
        self._outcomes = Outcomes()
        self._profiler = Profiler()
        self._thread = EngineThread(parts.core, parts.close)
        self._finalizer = weakref.finalize(self, self._thread.stop)

    @property
    def config(self) -> EngineConfig:
        """The resolved options: no "auto" in it."""
        return self._parts.config

    # ---- the Backend verb --------------------------------------------------------------------------------------

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk]:
        """See ``protocol.Backend.generate``. Closing the iterator aborts the request within a step."""
        if request.sampling.best_of is None:
            return self._generate(request)
        return best_samples(self._generate, request)

    async def _generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk]:
        stream = Stream(self._thread.outbox, asyncio.get_running_loop())
        job = await self._admit(request, stream)
        stream.job = job
        self._thread.send(partial(self._submit, job))
        open_samples = 1 if request.candidates else request.sampling.n
        try:
            while open_samples:
                chunk = await stream.next()
                open_samples -= chunk.finish is not None
                if request.constraint is not None and chunk.finish is not None and chunk.usage is not None:
                    self._outcomes.count(chunk.usage)
                yield chunk
        except GrammarError:
            self._outcomes.constrained_failed += 1
            raise
        finally:
            if open_samples and self._thread.alive:
                self._abort(job)
            stream.job = None  # the two hold each other: else both wait for the garbage collector

    async def info(self) -> ModelInfo:
        return self._parts.info

    async def flush_cache(self) -> None:
        """Forget every prefix no running request is using."""
        await asyncio.wrap_future(self._thread.ask(self._core.scheduler.flush))

    async def end_program(self, program: str, branch: str = "", *, namespace: str = "") -> None:
        """See ``protocol.KeepsPrograms``."""
        self._thread.send(partial(self._core.scheduler.end_program, namespace, program, branch))

    async def pin(self, prompt: Prompt, ttl: float, *, namespace: str = "") -> int:
        """Keep what is cached of a prompt for ``ttl`` seconds, whatever else is needed; how many tokens that are.

        To have it cached, generate from it first; ``max_new_tokens=0`` will do. Pins end early by ``flush_cache``, and
        where a request that has the engine to itself could not be served otherwise. Raises CapacityError (``param``
        "pin") when more than half of the pool would be pinned, InvalidRequestError for a ttl that is not positive.
        """
        if isinstance(ttl, bool) or not isinstance(ttl, int | float) or not 0 < ttl < math.inf:
            raise InvalidRequestError(f"ttl must be a positive number of seconds, not {ttl!r}", param="ttl")
        ids = await self.tokenize(prompt)
        return await asyncio.wrap_future(self._thread.ask(partial(self._core.scheduler.pin, (namespace, ""), ids, ttl)))

    async def tokenize(self, prompt: Prompt) -> list[int]:
        """The ids that a request with this prompt begins with."""
        return await asyncio.to_thread(self._parts.intake.encode, prompt)

    async def detokenize(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens included. Raises InvalidRequestError for an id that the model lacks."""
        return await asyncio.to_thread(self._parts.intake.decode, ids)

    async def check_constraint(self, constraint: Constraint) -> None:
        """Raises GrammarError where a request under this constraint would be refused."""
        await asyncio.wrap_future(self._parts.grammars.compile_async(constraint))

    async def check_texts(self, constraint: Constraint, texts: Sequence[str]) -> Mapping[str, Any]:
        """What ``sglite grammar check`` says of the constraint and of each text; nothing is raised."""
        from sglite.runtime.grammar.check import Checker

        checker = Checker(self._parts.grammars, lambda text: self._parts.intake.encode((Text(text),)))
        return await asyncio.wrap_future(self._parts.grammars.beside(lambda: checker.check(constraint, texts)))

    async def embed(self, prompts: Sequence[Prompt], namespace: str = "") -> list[tuple[int, tuple[float, ...]]]:
        """Each prompt's count of tokens and its vector of length 1: see ``pooling``. Raises as ``generate`` does."""
        return list(await asyncio.gather(*(self._embed(prompt, namespace) for prompt in prompts)))

    async def _embed(self, prompt: Prompt, namespace: str) -> tuple[int, tuple[float, ...]]:
        sink = EmbedSink()
        sampling = SamplingParams(max_new_tokens=0)
        request = GenerateRequest(f"embed-{uuid.uuid4().hex}", prompt, sampling, namespace=namespace)
        job = await asyncio.to_thread(self._parts.intake.job, request, sink, time.perf_counter())
        self._thread.send(partial(self._core.submit, job, [EmbedTrack(job, sink)]))
        try:
            return len(job.prompt_ids), await sink.found
        finally:
            if not sink.found.done() or sink.found.cancelled():
                self._abort(job)

    async def start_profile(self) -> None:
        """Record what the engine's thread does. Raises InvalidRequestError where it is being recorded."""
        await asyncio.wrap_future(self._thread.ask(self._profiler.start))

    async def stop_profile(self) -> str:
        """What was recorded, in Chrome's trace format. Raises InvalidRequestError where nothing was."""
        recorded = await asyncio.wrap_future(self._thread.ask(self._profiler.stop))
        return await asyncio.to_thread(recorded)

    async def abort(self, request_id: str) -> None:
        """End the request of this id with AbortedError; an unknown id is no error: it may just have ended."""
        await asyncio.wrap_future(self._thread.ask(partial(self._core.abort_id, request_id)))

    async def aclose(self) -> None:
        await asyncio.to_thread(self.close)

    # ---- life --------------------------------------------------------------------------------------------------

    async def stats(self) -> dict[str, Any]:
        """Counters of the engine, taken between two steps."""
        core = await asyncio.wrap_future(self._thread.ask(self._core.stats))
        return {**core, **self._parts.grammars.counters(), **asdict(self._outcomes)}

    def close(self) -> None:
        """End running requests with UnavailableError and free the model. Safe to call twice."""
        self._finalizer()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- the caller's side of the door -------------------------------------------------------------------------

    async def _admit(self, request: GenerateRequest, stream: Stream) -> Job:
        now = time.perf_counter()
        if request.logprobs is not None and request.logprobs.constrained and self.config.device.startswith("cuda"):
            raise UnsupportedError("logprobs under the constraint are not there on GPUs yet", param="logprobs")
        grammar = await self._compile(request)
        make_job = partial(self._parts.intake.job, request, stream, now, grammar)
        if sum(len(s.value) for s in request.prompt if isinstance(s, Text)) > _LONG_TEXT:
            return await asyncio.to_thread(make_job)
        return make_job()

    async def _compile(self, request: GenerateRequest) -> Grammar | None:
        if request.constraint is None:
            return None
        grammar = await asyncio.wrap_future(self._parts.grammars.compile_async(request.constraint))
        budget = request.sampling.max_new_tokens
        if not grammar.is_ready(budget):
            await asyncio.wrap_future(self._parts.grammars.beside(partial(grammar.matcher, budget)))
        return grammar

    # ---- on the engine thread ----------------------------------------------------------------------------------

    def _submit(self, job: Job) -> None:
        try:
            self._core.submit(job, self._parts.intake.tracks(job))
        except SgliteError as error:
            job.sink.fail(error)
        except Exception as error:  # our own mistake, but this request's alone
            log.exception("request %s could not be started", job.request.id)
            job.sink.fail(untold("the request could not be started", error, job.request.id))

    def _abort(self, job: Job) -> None:
        with suppress(UnavailableError):  # closed in the meantime: the request has ended with it
            self._thread.send(partial(self._core.abort, job))
