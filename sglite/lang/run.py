"""What all branches of one program run share: its backend, its loop, its options, its trace, and where its body is."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import lru_cache
from typing import Any

from sglite.chat import Frames
from sglite.errors import ProgramError
from sglite.lang.calls import ProgramTrace
from sglite.lang.foresight import NOTHING_FORESEEN, Foresight
from sglite.lang.memo import PerBackend
from sglite.lang.options import Options
from sglite.lang.traffic import traffic_of
from sglite.lang.waiting import Home, Signal, background
from sglite.protocol import Backend, Chunk, GenerateRequest, ModelInfo, end_program

_infos: PerBackend[ModelInfo] = PerBackend()


class Run:
    """``changed`` is notified when a name appears and when the body is over."""

    def __init__(
        self,
        backend: Backend,
        home: Home,
        options: Options,
        function: str,
        *,
        stream: bool,
        foresight: Foresight = NOTHING_FORESEEN,
    ) -> None:
        self.id = os.urandom(16).hex()
        self.backend = backend
        self.home = home
        self.options = options
        self.stream = stream
        self.foresight = foresight
        self.info = _infos.get(backend)
        self.answer: Callable[[GenerateRequest], Iterable[Chunk]] | None = getattr(backend, "answer", None)
        """Where the backend never waits: a whole answer at once (see AnswersAtOnce)."""
        self._keeps = callable(getattr(backend, "end_program", None))
        self._ended: list[str] = []
        self.traffic = traffic_of(backend)
        self.trace = ProgramTrace(self.id, function)
        self.changed = Signal()
        self.body = Body()
        self._frames: Frames | None = None

    def tell_end(self, branch: str) -> None:
        """No call comes from ``branch`` any more. From any thread; backends that keep nothing are not told.

        It is told from the shared loop: the program's own may end with the program.
        """
        if not self._keeps:
            return
        self._ended.append(branch)
        if len(self._ended) == 1:
            home = background()
            with suppress(ProgramError):  # the process ends, and nothing can be told any more
                home.call(lambda: home.start(self._end_all()))

    async def _end_all(self) -> None:
        """Branches that end together are told together: nothing need be said of those below others."""
        while self._ended:
            ended = sorted({self._ended.pop() for _ in range(len(self._ended))})
            for branch in ended:
                if not any(_is_below(branch, other) for other in ended):
                    with suppress(Exception):  # a courtesy: programs do not depend on it
                        await end_program(self.backend, self.id, branch)

    async def load(self) -> None:
        """Asks the backend about its model, once per backend."""
        info = _infos.get(self.backend)
        if info is None:
            info = _infos.put(self.backend, await self.backend.info())
        self.info = info

    @property
    def known_info(self) -> ModelInfo:
        assert self.info is not None, "load comes before every node that needs to know"
        return self.info

    @property
    def frames(self) -> Frames:
        if self._frames is None:
            info = self.known_info
            self._frames = frames_of(_template(info), info.bos_token, info.eos_token)
        return self._frames


def _is_below(branch: str, other: str) -> bool:
    return branch != other and (other == "" or branch.startswith(f"{other}."))


def forget_info(backend: Backend) -> None:
    """After something changed behind the backend."""
    _infos.forget(backend)


def _template(info: ModelInfo) -> str:
    from sglite.chat import MESSAGES, PLAIN

    if info.chat_template is not None:
        return info.chat_template
    return MESSAGES if info.capabilities.chat_only else PLAIN


@lru_cache(64)
def frames_of(template: str, bos_token: str | None, eos_token: str | None) -> Frames:
    return Frames(template, bos_token=bos_token, eos_token=eos_token)


class Body:
    """The program's function while it runs: whether the caller is inside it, whether it is over, how it failed."""

    def __init__(self) -> None:
        self.over = False
        self.error: BaseException | None = None
        self.failed_first = False
        """Whether its error is why everything else was cancelled, and not the other way round."""
        self._thread: int | None = None
        self._task: asyncio.Task[Any] | None = None

    def enter_thread(self) -> None:
        self._thread = threading.get_ident()

    def enter_task(self) -> None:
        self._task = asyncio.current_task()

    def mine(self) -> bool:
        """Whether the caller is the body itself, which must not wait for what only it can append."""
        if self._task is not None:
            return _current_task() is self._task
        return threading.get_ident() == self._thread

    def is_over(self) -> bool:
        return self.over


def _current_task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None


_default: list[Backend] = []


def set_default(backend: Any) -> None:
    _default[:] = [] if backend is None else [as_backend(backend)]


def get_default() -> Backend | None:
    return _default[0] if _default else None


def as_backend(backend: Any) -> Backend:
    """The given backend (or a Runtime's endpoint), or the default one. Raises ProgramError when there is none."""
    if backend is None:
        if not _default:
            raise ProgramError("no backend: pass backend=... or call sglite.set_default_backend(...)")
        return _default[0]
    backend = getattr(backend, "endpoint", backend)
    if isinstance(backend, type):
        raise ProgramError(f"not a backend but its class: {backend.__name__}(...) makes one")
    if not callable(getattr(backend, "generate", None)) or not callable(getattr(backend, "info", None)):
        hint = f"; for a server use RuntimeEndpoint({backend!r})" if isinstance(backend, str) else ""
        raise ProgramError(f"not a backend: {type(backend).__name__} has no generate() and info(){hint}")
    chosen: Backend = backend
    return chosen
