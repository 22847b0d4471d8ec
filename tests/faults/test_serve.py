"""Row 32 and rule 12, on the command itself with the real model: signals, a dead worker, a dead parent."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from bench import children, listeners, until
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig

from sglite.runtime.hub import ModelSource

SERVE = [sys.executable, "-m", "sglite", "serve", "--port", "0", "--threads", "1", "--kv-tokens", "4096"]
GREEDY = {"text": "The capital of France is", "sampling_params": {"max_new_tokens": 8, "temperature": 0}}
JSON = {"content-type": "application/json"}
LONG: dict[str, Any] = {
    "text": "Once upon a time",
    "sampling_params": {"max_new_tokens": 2000, "temperature": 0, "ignore_eos": True},
    "stream": True,
}


class Server:
    """``sglite serve`` as its operator sees it."""

    def __init__(self, *options: str) -> None:
        self.process = subprocess.Popen([*SERVE, *options], stderr=subprocess.PIPE, text=True)
        self.words: list[str] = []
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.words.append(line)
            if "serving at" in line:
                break
        self.url = self.words[-1].rpartition(" ")[2].strip()
        self._reader = threading.Thread(target=self.words.extend, args=(self.process.stderr,))
        self._reader.start()

    @property
    def worker(self) -> int | None:
        found = children(self.process.pid)
        return found[0] if found else None

    def post(self, body: Any = GREEDY) -> httpx.Response:
        return httpx.post(self.url + "/generate", json=body, timeout=60)

    def status(self, path: str) -> int:
        return httpx.get(self.url + path, timeout=10).status_code

    def wait(self) -> int:
        code = self.process.wait(30)
        self._reader.join()
        assert self.process.stderr is not None
        self.process.stderr.close()
        return code


@contextmanager
def serving(*options: str) -> Iterator[Server]:
    server = Server(*options)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.process.kill()
            server.wait()


class Reader(threading.Thread):
    """Reads a stream to its end."""

    def __init__(self, server: Server, body: Any = LONG) -> None:
        super().__init__()
        self.events: list[str] = []
        self.started = threading.Event()
        self._stream = (server.url + "/generate", body)
        self.start()
        assert self.started.wait(30)

    def run(self) -> None:
        url, body = self._stream
        with httpx.stream("POST", url, json=body, timeout=60) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    self.events.append(line[6:])
                    self.started.set()

    def error(self) -> dict[str, Any]:
        """What the stream ended with, after checking that it ended with an error and as no success does."""
        self.join(30)
        assert not self.is_alive()
        assert "[DONE]" not in self.events
        error: dict[str, Any] = json.loads(self.events[-1])["error"]
        return error


def refuse_a_long_word(server: Server) -> None:
    """Row 20: 900 kB without a space, which any tokenizer chews on for long."""
    assert server.post({"text": "x" * 900_000}).json()["error"]["code"] == "context_length_exceeded"


def slowest_health_during(server: Server, work: Callable[[], None]) -> float:
    """Seconds of the slowest answer of /health until ``work`` is done. On a quiet machine it is milliseconds."""
    with ThreadPoolExecutor(1) as pool, httpx.Client(base_url=server.url) as client:
        done, slowest = pool.submit(work), 0.0
        while not done.done():
            began = time.monotonic()
            assert client.get("/health").status_code == 200
            slowest = max(slowest, time.monotonic() - began)
        done.result()
    return slowest


def answer_to_a_head(server: Server) -> bytes:
    """What a client hears whose request's body does not come."""
    host, _, port = server.url.rpartition("/")[2].partition(":")
    with socket.create_connection((host, int(port)), timeout=2) as connection:
        connection.sendall(f"POST /generate HTTP/1.1\r\nhost: {host}\r\ncontent-length: 9\r\n\r\n".encode())
        return connection.recv(4096)


def gone(pid: int) -> bool:
    try:
        return "State:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.mark.usefixtures("smollm2")
def test_a_dead_worker_and_then_a_dead_parent() -> None:
    with serving() as server:
        canary = server.post().json()["text"]
        assert listeners(server.process.pid) == [("127.0.0.1", int(server.url.rpartition(":")[2]))]
        assert server.worker is not None and listeners(server.worker) == []
        assert slowest_health_during(server, lambda: refuse_a_long_word(server)) < 0.5
        stream, dead = Reader(server), server.worker
        assert dead is not None
        os.kill(dead, signal.SIGKILL)
        refused = server.post()
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")
        assert refused.headers["retry-after"]
        assert answer_to_a_head(server).startswith(b"HTTP/1.1 503 "), "an engine that loads is not kept from it"
        assert stream.error()["code"] == "unavailable"
        assert (server.status("/health"), server.status("/ready")) == (200, 503)
        slowest = 0.0
        while server.status("/ready") == 503:
            began = time.monotonic()
            assert server.status("/health") == 200
            slowest = max(slowest, time.monotonic() - began)
        assert slowest < 0.5, "health waits for nobody"
        assert server.post().json()["text"] == canary
        assert server.status("/health_generate") == 200
        worker = server.worker
        assert worker is not None and worker != dead
        server.process.kill()
        assert server.wait() == -signal.SIGKILL
        until(lambda: gone(worker), "the worker follows its parent")


@pytest.mark.usefixtures("smollm2")
def test_sigterm_drains_what_can_end_in_time_and_tells_the_rest() -> None:
    short = {**LONG, "sampling_params": {**LONG["sampling_params"], "max_new_tokens": 30}}
    with serving("--drain-timeout", "4") as server:
        endless, stream, worker = Reader(server), Reader(server, short), server.worker
        server.process.send_signal(signal.SIGTERM)
        until(lambda: server.status("/ready") == 503, "not ready once told to end", 2)
        refused = server.post()
        assert refused.status_code == 503 and refused.headers["retry-after"]
        assert server.status("/health") == 200
        stream.join(30)
        assert stream.events[-1] == "[DONE]" and json.loads(stream.events[-2])["meta_info"]["completion_tokens"] == 30
        assert "shutting down" in endless.error()["message"]
        assert server.wait() == 0
        assert worker is not None and gone(worker)


@pytest.mark.usefixtures("smollm2")
def test_a_second_signal_is_quick() -> None:
    with serving("--drain-timeout", "60") as server:
        stream = Reader(server)
        server.process.send_signal(signal.SIGTERM)
        until(lambda: server.status("/ready") == 503, "not ready once told to end", 2)
        began = time.monotonic()
        server.process.send_signal(signal.SIGINT)
        assert server.wait() == 0
        assert time.monotonic() - began < 3
        stream.join(30)


@pytest.mark.usefixtures("smollm2")
def test_row_36_nowhere_to_write_is_no_reason_not_to_serve() -> None:
    """Standard output closed, standard error on a full disk."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = ["sh", "-c", f'exec "$@" --port {port} >&- 2>/dev/full', "sh", *SERVE]
    process = subprocess.Popen(command)
    url = f"http://127.0.0.1:{port}"

    def ready() -> bool:
        try:
            return httpx.get(url + "/ready").status_code == 200
        except httpx.TransportError:
            return False

    try:
        until(ready, "ready", 60)
        assert httpx.post(url + "/generate", json=GREEDY, timeout=60).status_code == 200
        assert httpx.post(url + "/generate", content=b"{", headers=JSON).status_code == 400
        process.send_signal(signal.SIGTERM)
        process.wait(30)
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("damage", "word"),
    [("missing", "no model"), ("empty", "config.json"), ("cut", "cut.gguf"), ("huge", "model.safetensors")],
)
def test_a_bad_model_is_one_line(tmp_path: Path, smollm2: ModelSource, damage: str, word: str) -> None:
    path = {"missing": tmp_path / "nothing", "cut": tmp_path / "cut.gguf"}.get(damage, tmp_path)
    if damage == "cut":
        with smollm2.path.open("rb") as whole:
            path.write_bytes(whole.read(4_000_000))
    if damage == "huge":
        AutoConfig.for_model("llama", vocab_size=300, **SMALL).save_pretrained(tmp_path)
        write_tokenizer(tmp_path)
        (tmp_path / "model.safetensors").write_bytes((2**63 - 1).to_bytes(8, "little") + b"{}")
    result = subprocess.run([*SERVE, "--model", str(path)], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 1
    [line] = result.stderr.splitlines()
    assert line.startswith("sglite: error: ") and word in line


SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}


def write_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer(
        models.BPE(vocab={c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
