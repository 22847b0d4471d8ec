"""On what programs run: sglite in process and over HTTP; llama.cpp's server and vLLM through the DSL's OpenAI backend.

A side is a backend of the DSL with a way to forget what it has cached. Peers get the model's own chat template, so that
their prompts are the same texts. ``select`` is the best that each of them has: greedy decoding under a grammar of the
choices (sglite scores all choices in one pass).
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

import sglite as sgl
from lib.client import Dialect, LlamaDialect
from lib.contestants import FailedError, Server
from lib.lineup import MODEL, THREADS, exported, free_port, llama_server, shipped
from sglite.protocol import Backend, GenerateRequest, ModelInfo, ProgramInfo

SLOTS = 16
CONTEXT = 4608
"""Tokens of a sequence that every peer has room for: the longest conversation."""


@dataclass(frozen=True, slots=True)
class Side:
    """``pid``: the server's process, None in process. ``close`` ends what was started. ``ours`` is compared with all
    others; ``peer``: somebody else's work, not a variant of ours."""

    name: str
    ours: bool
    backend: Backend
    flush: Callable[[], None]
    close: Callable[[], None]
    pid: int | None = None
    peer: bool = False


@dataclass(frozen=True, slots=True)
class Entry:
    name: str
    start: Callable[[], Side]


def sides(peers: Path, engine: dict[str, Any], llama: list[str]) -> Iterator[Entry]:
    """All that are installed. ``llama`` names the GGUF formats to serve; Q4_1 is the file as it is shipped."""
    yield Entry("sglite", lambda: _in_process("sglite", engine))
    yield Entry("sglite, HTTP", lambda: _over_http(engine))
    if (program := llama_server(peers)) is not None:
        for kind in llama:
            yield Entry(f"llama.cpp {kind}", lambda kind=kind: _llama(program, peers, kind))
    if (peers / "vllm/bin/vllm").exists():
        yield Entry("vLLM bf16", lambda: _vllm(peers))


def _in_process(name: str, options: dict[str, Any]) -> Side:
    engine = sgl.Engine(model=MODEL, **options)
    return Side(name, True, engine, lambda: flush(engine), engine.close)


def _over_http(options: dict[str, Any]) -> Side:
    port = free_port()
    flags = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    command = [sys.executable, "-m", "sglite", "serve", "--model", MODEL, "--port", port, *flags]
    server = Server(f"http://127.0.0.1:{port}", Dialect(), command)
    backend = sgl.RuntimeEndpoint(server.url)
    return Side("sglite, HTTP", True, backend, lambda: flush(backend), server.close, server.pid)


def _llama(program: Path, peers: Path, kind: str) -> Side:
    model = shipped() if kind == "Q4_1" else peers / f"llama/models/{kind}.gguf"
    if not model.exists():
        raise FailedError(f"there is no {model}")
    port, slots = free_port(), tempfile.mkdtemp()
    command = [str(program), "-m", str(model), "--host", "127.0.0.1", "--port", port]
    command += ["-np", str(SLOTS), "-c", str(SLOTS * CONTEXT), "-t", str(THREADS), "-tb", str(THREADS)]
    server = Server(f"http://127.0.0.1:{port}", LlamaDialect(), [*command, "--slot-save-path", slots])
    backend = _peer(server, "llama.cpp")

    def erase() -> None:
        for slot in range(SLOTS):
            httpx.post(f"{server.url}/slots/{slot}?action=erase", timeout=60, trust_env=False).raise_for_status()

    return Side(f"llama.cpp {kind}", False, backend, erase, server.close, server.pid, peer=True)


def _vllm(peers: Path) -> Side:
    port = free_port()
    command = [str(peers / "vllm/bin/vllm"), "serve", str(exported(peers)), "--host", "127.0.0.1", "--port", port]
    command += ["--enable-prefix-caching", "--max-model-len", str(CONTEXT), "--max-num-seqs", "32"]
    command += ["--enable-prompt-tokens-details"]
    environment = {"VLLM_CPU_KVCACHE_SPACE": "4", "VLLM_CPU_OMP_THREADS_BIND": f"0-{THREADS - 1}"}
    environment["VLLM_SERVER_DEV_MODE"] = "1"  # for the route that empties its prefix cache
    if openmp := sorted((peers / "vllm").glob("lib/**/libiomp5.so")):  # its best figures need it
        environment["LD_PRELOAD"] = str(openmp[0])
    server = Server(f"http://127.0.0.1:{port}", Dialect(), command, environment)
    backend = _peer(server, "vllm")

    def reset() -> None:
        httpx.post(f"{server.url}/reset_prefix_cache", timeout=60, trust_env=False).raise_for_status()

    return Side("vLLM bf16", False, backend, reset, server.close, server.pid, peer=True)


def _peer(server: Server, dialect: Any) -> Backend:
    """Speaks with a server that has just been started, and ends it where that fails."""
    try:
        models = httpx.get(f"{server.url}/v1/models", timeout=60, trust_env=False).raise_for_status().json()
        options = {"is_chat_model": False, "chat_template": chat_template(), "dialect": dialect, "retries": 0}
        return sgl.OpenAI(models["data"][0]["id"], base_url=f"{server.url}/v1", **options)
    except BaseException:
        server.close()
        raise


def chat_template() -> str:
    """The model's own, out of its file."""
    template = tokenizer().chat_template
    assert template is not None
    return template


def tokenizer() -> Any:
    from sglite.runtime.hub import resolve_model
    from sglite.runtime.loading import load_config, load_tokenizer

    source = resolve_model(MODEL)
    return load_tokenizer(source, load_config(source))


def flush(backend: Backend) -> None:
    sgl.flush_cache(backend)


# --------------------------------------------------------------------------------------------------------- ablations


class Around:
    """A backend that changes the requests of another one."""

    def __init__(self, inner: Backend, change: Callable[[GenerateRequest], GenerateRequest]) -> None:
        self._inner = inner
        self._change = change

    async def generate(self, request: GenerateRequest) -> Any:
        async for chunk in self._inner.generate(self._change(request)):
            yield chunk

    async def info(self) -> ModelInfo:
        return await self._inner.info()

    async def flush_cache(self) -> None:
        await self._inner.flush_cache()

    async def aclose(self) -> None:
        pass


class OneAtATime(Around):
    """Never two calls of one program at once: what a frontend that executes statement by statement would do."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner, lambda request: request)
        self._locks: dict[str, asyncio.Lock] = {}

    async def generate(self, request: GenerateRequest) -> Any:
        async with self._turn(request.program):
            async for chunk in super().generate(request):
                yield chunk

    def _turn(self, program: ProgramInfo | None) -> AbstractAsyncContextManager[object]:
        """What belongs to no program, as the prefix of a whole batch, waits for nobody."""
        return nullcontext() if program is None else self._locks.setdefault(program.program, asyncio.Lock())
