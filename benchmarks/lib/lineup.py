"""Who takes part: sglite in process in each weight format, its server, and every peer that is installed.

Peers live in one folder, each in an environment of its own; ``peers/README.md`` says how to fill it.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from lib.client import Dialect, LlamaDialect
from lib.contestants import WORKERS, Contestant, Server, Worker

MODEL = "smollm2-135m"
THREADS = len(os.sched_getaffinity(0))
SGLITE = Dialect(flush="/flush_cache")


@dataclass(frozen=True, slots=True)
class Entry:
    """``start`` loads the model and waits until it answers."""

    name: str
    ours: bool
    start: Callable[[], Contestant]


def lineup(weights: Sequence[str], servers: Sequence[str], folder: Path) -> list[Entry]:
    return [
        *_ours(weights),
        *_urls(servers),
        *_transformers(folder),
        *_llama(folder),
        *_vllm(folder),
        *_openvino(folder),
    ]


def _ours(weights: Sequence[str]) -> Iterator[Entry]:
    for each in weights:
        options = {"model": MODEL, "weights": each}
        yield Entry(f"sglite {each}", True, partial(Worker, sys.executable, "with_sglite.py", options))
    if weights:
        yield Entry(f"sglite {weights[0]}, server", True, partial(_sglite_server, weights[0]))


def _sglite_server(weights: str) -> Server:
    port = free_port()
    command = [sys.executable, "-m", "sglite", "serve", "--model", MODEL, "--weights", weights, "--port", port]
    return Server(f"http://127.0.0.1:{port}", SGLITE, command)


def _urls(servers: Sequence[str]) -> Iterator[Entry]:
    """``URL`` or ``NAME=URL``; a name that begins with llama means llama.cpp's way to spell constraints."""
    for given in servers:
        name, _, url = given.rpartition("=")
        dialect = LlamaDialect() if name.startswith("llama") else Dialect()
        yield Entry(name or url, name.startswith("sglite"), partial(Server, url, dialect))


def _transformers(folder: Path) -> Iterator[Entry]:
    yield Entry("transformers bf16", False, partial(_transformers_worker, folder))


def _transformers_worker(folder: Path) -> Worker:
    options = {"model": str(exported(folder)), "threads": THREADS}
    return Worker(sys.executable, "with_transformers.py", options)


def _llama(folder: Path) -> Iterator[Entry]:
    """The file as it is shipped (Q4_1), and every other one that lies in ``llama/models``."""
    program = llama_server(folder)
    if program is None:
        return
    for path in [shipped(), *sorted((folder / "llama/models").glob("*.gguf"))]:
        kind = "Q4_1" if path == shipped() else path.stem
        yield Entry(f"llama.cpp {kind}", False, partial(_llama_server, program, path))


def llama_server(folder: Path) -> Path | None:
    """The wheel keeps its programs beside its Python files."""
    return next(iter(sorted((folder / "llama").glob("**/bin/llama-server"))), None)


def _llama_server(program: Path, model: Path) -> Server:
    port = free_port()
    command = [str(program), "-m", str(model), "--host", "127.0.0.1", "--port", port, "-np", "32", "-c", "73728"]
    command += ["-t", str(THREADS), "-tb", str(THREADS)]
    return Server(f"http://127.0.0.1:{port}", LlamaDialect(), command)


def _vllm(folder: Path) -> Iterator[Entry]:
    program = folder / "vllm/bin/vllm"
    if program.exists():
        yield Entry("vLLM bf16", False, partial(_vllm_server, program, folder))


def _vllm_server(program: Path, folder: Path) -> Server:
    port = free_port()
    command = [str(program), "serve", str(exported(folder)), "--host", "127.0.0.1", "--port", port]
    command += ["--enable-prefix-caching", "--max-model-len", "4096", "--max-num-seqs", "32"]
    environment = {"VLLM_CPU_KVCACHE_SPACE": "4", "VLLM_CPU_OMP_THREADS_BIND": f"0-{THREADS - 1}"}
    if openmp := sorted((folder / "vllm").glob("lib/**/libiomp5.so")):  # its best figures need it
        environment["LD_PRELOAD"] = str(openmp[0])
    return Server(f"http://127.0.0.1:{port}", Dialect(), command, environment)


def _openvino(folder: Path) -> Iterator[Entry]:
    """The file as it is shipped, and every exported model in ``openvino/models``, named by its folder."""
    python = folder / "openvino/bin/python"
    if not python.exists():
        return
    exports = sorted(path.parent for path in (folder / "openvino/models").glob("*/openvino_model.xml"))
    for kind, model in [("Q4_1", shipped()), *((path.name, path) for path in exports)]:
        options = {"model": str(model), "threads": THREADS}
        yield Entry(f"OpenVINO {kind}", False, partial(Worker, str(python), "with_openvino.py", options))


def exported(folder: Path) -> Path:
    """The model in Hugging Face's layout; made on first use."""
    target = (folder / "model").absolute()
    if not (target / "model.safetensors").exists():
        subprocess.run([sys.executable, str(WORKERS / "export.py"), str(target)], check=True)
    return target


def shipped() -> Path:
    from sglite.runtime.hub import resolve_model

    return resolve_model(MODEL).path


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])
