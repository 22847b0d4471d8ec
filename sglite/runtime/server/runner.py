"""Running the app with uvicorn: one listening socket, one clear line when it cannot be had, a clean end."""

from __future__ import annotations

import asyncio
import gc
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import FrameType

import uvicorn

from sglite.errors import ConfigError
from sglite.protocol import Backend
from sglite.runtime.garbage import keep_everything
from sglite.runtime.server.app import create_app
from sglite.runtime.server.config import ServerConfig
from sglite.runtime.server.connection import Connection
from sglite.runtime.server.gate import default_hosts
from sglite.runtime.server.logs import set_up
from sglite.runtime.server.spans import open_spans
from sglite.runtime.server.store import Store, open_store

_BACKLOG = 4096
"""Connections that wait to be accepted; the system may allow fewer. One beyond them tries again after a second."""
_DOORS = 16
_LAST_WORDS = 1.0
"""Seconds in which cancelled requests end their answers."""


def serve(backend: Backend, config: ServerConfig, ready: Callable[[str], None] = lambda url: None) -> None:
    """Serve until SIGINT or SIGTERM. ``ready`` is called with the URL once connections are accepted.

    Raises ConfigError when the address cannot be listened on.
    """
    with listen(config) as listener, open_store(config.data_folder) as store:
        serve_on(listener, backend, config, store, ready)


def serve_on(
    listener: socket.socket,
    backend: Backend,
    config: ServerConfig,
    store: Store | None = None,
    ready: Callable[[str], None] = lambda url: None,
) -> None:
    """Like ``serve``, on a socket that listens and a store that is open already."""
    set_up(config.log_format, config.log_level)
    allow_open_files()
    with _ending_is_no_error():
        server = _Server(backend, config, store, lambda: ready(url_of(listener)))
        gc.collect()
        keep_everything()
        server.run(doors(listener))


def doors(listener: socket.socket) -> list[socket.socket]:
    """The one listening socket several times over: uvloop accepts one connection a turn from each."""
    return [listener, *(listener.dup() for _ in range(_DOORS - 1))]


def allow_open_files() -> None:
    """As many as the system lets us have: each connection is one."""
    if sys.platform != "win32":
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft < hard:
            with suppress(OSError, ValueError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


@contextmanager
def _ending_is_no_error() -> Iterator[None]:
    """uvicorn raises the signal that ended it once more, for the handlers that were there before its own."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def running(backend: Backend, config: ServerConfig | None = None) -> Iterator[str]:
    """Serve from a thread of this process, for tests and notebooks; gives the URL. Any free port by default."""
    config = config or ServerConfig(port=0)
    started = threading.Event()
    with listen(config) as listener, open_store(config.data_folder) as store:
        server = _Server(backend, config, store, started.set)
        thread = threading.Thread(target=server.run, args=(doors(listener),), name="sglite-server", daemon=True)
        thread.start()
        started.wait()
        try:
            yield url_of(listener)
        finally:
            server.should_exit = True
            thread.join()


def listen(config: ServerConfig) -> socket.socket:
    """The listening socket. Raises ConfigError that names the address and the way out."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((config.host, config.port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        reason = error.strerror or str(error)
        raise ConfigError(
            f"cannot listen on {config.host}:{config.port}: {reason.lower()}; choose another --port (0: any free one)"
        ) from None
    return listener


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _Server(uvicorn.Server):
    """uvicorn, which tells when it accepts connections, and for which a second signal of any kind means now."""

    def __init__(self, backend: Backend, config: ServerConfig, store: Store | None, ready: Callable[[], None]) -> None:
        self._ready = ready
        self._drain_timeout = config.drain_timeout
        self._drained: float | None = None
        """When what still runs is cancelled; None before the first signal."""
        config = replace(config, allowed_hosts=config.allowed_hosts or default_hosts(config.host))
        super().__init__(
            uvicorn.Config(
                create_app(backend, config, store, open_spans(config.otlp_endpoint)),
                log_config=None,
                access_log=False,
                lifespan="on",
                server_header=False,
                proxy_headers=False,
                ws="none",
                backlog=_BACKLOG,
                http=Connection,
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        if self.started:
            self._ready()

    async def on_tick(self, counter: int) -> bool:
        """While draining, connections are still accepted, so that whoever asks hears 503 and not silence."""
        if not await super().on_tick(counter):
            return False
        self._drained = self._drained or time.monotonic() + self._drain_timeout
        return self.force_exit or not self.server_state.tasks or time.monotonic() >= self._drained

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """What still runs is cancelled, and gets a moment to say so to its client."""
        left = (self._drained or 0.0) - time.monotonic()
        self.config.timeout_graceful_shutdown = max(0, int(left))
        await super().shutdown(sockets)
        if self.server_state.tasks and not self.force_exit:
            await asyncio.wait(self.server_state.tasks, timeout=_LAST_WORDS)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.config.app.state.service.seats.draining = True  # type: ignore[union-attr]
        self.force_exit = self.should_exit
        super().handle_exit(sig, frame)
