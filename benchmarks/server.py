"""What does HTTP cost on top of the engine?

    python benchmarks/server.py            # a minute
    python benchmarks/server.py --quick    # a few seconds: does it run?

The same engine twice, with the same prompts in turn: in process, and behind ``sglite serve``. Five numbers: what the
server adds to the first token of a 128-token prompt, what it takes of the throughput of 32 streams, how much of a core
its HTTP process needs for 64 streams, how late its event loop is meanwhile (99th percentile, from its own histogram),
and how long a scrape of /metrics takes meanwhile. Prints a table; writes ``server.json`` beside this file.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import uvloop
from lib.client import Dialect
from lib.contestants import Server, Worker
from lib.report import machine
from lib.watch import TICKS, Watch
from lib.works import Batch, Outcome, Prose, Request
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
MODEL = "smollm2-135m"
LAG = "sglite_event_loop_lag_seconds_bucket"


@dataclass(frozen=True, slots=True)
class Figure:
    name: str
    value: float
    unit: str
    limit: float
    note: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two tries of each, no file")
    parser.add_argument("--in-process", action="store_true", help="serve with the engine in the HTTP process")
    options = parser.parse_args()
    tries, rounds = (2, 1) if options.quick else (30, 3)
    with ExitStack() as stack:
        engine = Worker(sys.executable, "with_sglite.py", {"model": MODEL, "max_running": 64})
        stack.callback(engine.close)
        server, url = started(options.in_process)
        stack.callback(server.close)
        cutter = prose().cutter("server")
        both = partial(in_turn, engine, cheap_client(url))
        both([batch(cutter, 4, 64)])  # warm
        figures = [
            first_token(both, [batch(cutter, 1, 4) for _ in range(tries)]),
            throughput(both, [batch(cutter, 32, 128) for _ in range(rounds)]),
            *uvloop.run(under_load(url, server.pid, batch(cutter, 64, 32 if options.quick else 192))),
        ]
    show(figures)
    if not options.quick:
        value = {"machine": machine(), "in process": options.in_process, "figures": [asdict(f) for f in figures]}
        (HERE / "server.json").write_text(json.dumps(value, indent=1) + "\n")


def started(in_process: bool) -> tuple[Server, str]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    command = [sys.executable, "-m", "sglite", "serve", "--model", MODEL, "--port", port, "--max-running", "64"]
    url = f"http://127.0.0.1:{port}"
    return Server(url, Dialect(), command + ["--in-process"] * in_process), url


def prose() -> Prose:
    from sglite.protocol import Text
    from sglite.runtime.hub import resolve_model
    from sglite.runtime.loading import load_config, load_tokenizer

    source = resolve_model(MODEL)
    tokenizer = load_tokenizer(source, load_config(source))
    return Prose(lambda text: tokenizer.encode((Text(text),)))


def batch(cutter, streams: int, tokens: int) -> Batch:
    return Batch(tuple(Request(cutter.cut(128), tokens) for _ in range(streams)), stream=True)


def in_turn(engine: Worker, client, batches: Sequence[Batch]) -> list[tuple[Outcome, Outcome, float]]:
    """(in process, over HTTP, cores that others used meanwhile) of each batch; who begins changes."""
    found = []
    for number, each in enumerate(batches):
        runs = [engine.run, client]
        if number % 2:
            runs.reverse()
        watch = Watch(engine.pid)
        outcomes = [run(each) for run in runs]
        if number % 2:
            outcomes.reverse()
        found.append((*outcomes, watch.foreign_cores()))
    return found


# ------------------------------------------------------------------------------------------------------------ figures


def first_token(both, batches: Sequence[Batch]) -> Figure:
    pairs = both(batches)
    own, http = (statistics.median(pair[k].first for pair in pairs) * 1e3 for k in (0, 1))
    added = statistics.median((http.first - own.first) * 1e3 for own, http, _ in pairs)
    return Figure("added to the first token", added, "ms", 3, f"{own:.1f} ms in process, {http:.1f} ms over HTTP")


def throughput(both, batches: Sequence[Batch]) -> Figure:
    pairs = both(batches)
    own, http = (statistics.median(sum(pair[k].tokens) / pair[k].wall for pair in pairs) for k in (0, 1))
    return Figure("taken of 32 streams", (1 - http / own) * 100, "%", 3, f"{own:.0f} and {http:.0f} tok/s")


async def under_load(url: str, pid: int | None, load: Batch) -> list[Figure]:
    """CPU of the server's event loop, its lag, and scrapes, while 64 streams run."""
    assert pid is not None, "we started it"
    host, port = address(url)
    before, lag, began = loop_seconds(pid), lags(await get(host, port, "/metrics")), time.perf_counter()
    streams = asyncio.gather(*(ask(host, port, request) for request in load.requests))
    scrapes = []
    while not streams.done():
        asked = time.perf_counter()
        await get(host, port, "/metrics")
        scrapes.append((time.perf_counter() - asked) * 1e3)
        await asyncio.wait([streams], timeout=0.5)
    wall = time.perf_counter() - began
    tokens = sum(count for count, *_ in await streams)
    used = loop_seconds(pid) - before
    late = percentile(lag, lags(await get(host, port, "/metrics")), 0.99) * 1e3
    note = f"{tokens / wall:.0f} tok/s, {used / tokens * 1e6:.0f} us a token"
    return [
        Figure("64 streams cost of a core", used / wall * 100, "%", 10, note),
        Figure("event-loop lag, p99 below", late, "ms", 20, "an upper bound: a bucket's edge"),
        Figure("a scrape of /metrics, slowest", max(scrapes), "ms", 20, f"median {statistics.median(scrapes):.1f} ms"),
    ]


def loop_seconds(pid: int) -> float:
    """CPU time of the process's main thread, which runs the event loop, to 10 ms."""
    fields = Path(f"/proc/{pid}/task/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def lags(scrape: bytes) -> dict[float, float]:
    families = text_string_to_metric_families(scrape.decode())
    return {float(s.labels["le"]): s.value for f in families for s in f.samples if s.name == LAG}


def percentile(before: dict[float, float], after: dict[float, float], share: float) -> float:
    counts = {edge: after[edge] - before[edge] for edge in after}
    return next(edge for edge in sorted(counts) if counts[edge] >= share * max(counts.values()))


# ------------------------------------------------------------------------------------- a client that costs next to none


def address(url: str) -> tuple[str, int]:
    host, _, port = url.removeprefix("http://").partition(":")
    return host, int(port)


def cheap_client(url: str):
    host, port = address(url)
    runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)

    async def all_of(load: Batch) -> Outcome:
        began = time.perf_counter()
        answers = await asyncio.gather(*(ask(host, port, request) for request in load.requests))
        wall = time.perf_counter() - began
        return Outcome(wall, tuple(a[0] for a in answers), tuple(a[1] for a in answers), answers[0][2] - began)

    return lambda load: runner.run(all_of(load))


async def ask(host: str, port: int, request: Request) -> tuple[int, str, float]:
    """Tokens, text (not looked at), and when the first came."""
    fields = {"prompt": request.ids, "max_tokens": request.max_tokens, "temperature": 0, "ignore_eos": True}
    body = json.dumps(fields | {"stream": True, "stream_options": {"include_usage": True}}).encode()
    loop = asyncio.get_running_loop()
    transport, answer = await loop.create_connection(Answer, host, port)
    transport.write(head("POST", "/v1/completions", len(body)) + body)
    await answer.complete
    transport.close()
    last = next(line for line in reversed(answer.tail.split(b"\n")) if line.startswith(b"data: {"))
    return json.loads(last[6:])["usage"]["completion_tokens"], "", answer.first


class Answer(asyncio.Protocol):
    """A stream of events as it comes: the time of the first, and the end of them all."""

    def __init__(self) -> None:
        self.complete = asyncio.get_running_loop().create_future()
        self.first = 0.0
        self.tail = b""

    def data_received(self, data: bytes) -> None:
        if not self.first and b"data: {" in data:
            self.first = time.perf_counter()
        self.tail = (self.tail + data)[-2000:]
        if b"[DONE]" in self.tail:
            self.complete.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.complete.done():
            self.complete.set_exception(error or ConnectionError("the answer is not whole"))


async def get(host: str, port: int, path: str) -> bytes:
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(head("GET", path, 0))
    answer = await reader.read()
    writer.close()
    return answer.partition(b"\r\n\r\n")[2]


def head(method: str, path: str, length: int) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "host: 127.0.0.1", "connection: close", "content-type: application/json"]
    return "\r\n".join([*lines, f"content-length: {length}", "", ""]).encode()


def show(figures: Sequence[Figure]) -> None:
    table = Table("figure", "value", "at most", "")
    for f in figures:
        verdict = "" if f.value <= f.limit else "[red]over[/] "
        table.add_row(f.name, f"{f.value:.1f} {f.unit}", f"{f.limit:g} {f.unit}", f"{verdict}{f.note}")
    Console(width=None if sys.stdout.isatty() else 120).print(table)


if __name__ == "__main__":
    main()
