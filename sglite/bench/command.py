"""The commands ``sglite bench serve`` and ``sglite bench engine``."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglite.bench.figures import Figures, Slo, figures, read_slo
from sglite.bench.load import Job, Shot, Target, closed_loop, made_jobs, open_loop
from sglite.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from sglite.protocol import Backend

SERVE_EXAMPLES = """examples:
  sglite bench serve --url http://127.0.0.1:30000                         16 callers, 128 requests
  sglite bench serve --url http://127.0.0.1:30000 --rate 4 --slo ttft=500,tpot=50
  sglite bench serve --url http://127.0.0.1:8000/v1 --concurrency 32 --shared-prefix 512 --prompt-tokens 640
  sglite bench serve --url http://127.0.0.1:30000 --prompts prompts.jsonl --chat --json run.json

A line of --prompts is {"prompt": "...", "max_tokens": 64}; max_tokens may be left out.
TTFT: to the first text. ITL: between pieces of text. TPOT: per token after the first. E2E: to the end.
With --rate, times count from the moment a request was due, also when it had to wait to be sent.
"""
ENGINE_EXAMPLES = """examples:
  sglite bench engine                                       32 requests at once, 128 tokens in and 128 out
  sglite bench engine --concurrency 1 --requests 4          one at a time
  sglite bench engine --shared-prefix 1024 --prompt-tokens 1056 --output-tokens 32
  sglite bench engine --weights int4 --json int4.json
"""


def add_load(parser: argparse.ArgumentParser, *, requests: int, concurrency: int) -> None:
    """The options that both commands share."""
    load = parser.add_argument_group("the load")
    load.add_argument("--requests", type=_positive, default=requests, metavar="N", help=f"default: {requests}")
    load.add_argument(
        "--concurrency", type=_positive, metavar="N", help=f"closed loop: requests under way (default: {concurrency})"
    )
    load.add_argument("--rate", type=float, metavar="R", help="open loop: requests per second, as a Poisson process")
    load.add_argument("--prompt-tokens", type=_positive, default=128, metavar="N", help="about (default: 128)")
    load.add_argument("--output-tokens", type=_positive, default=128, metavar="N", help="most (default: 128)")
    load.add_argument("--shared-prefix", type=int, default=0, metavar="N", help="tokens that all prompts begin with")
    load.add_argument("--prompts", type=Path, metavar="FILE", help="prompts to send instead, as JSON lines")
    load.add_argument("--slo", type=str, metavar="A=MS,..", help="what a good request keeps: ttft, tpot, e2e in ms")
    load.add_argument("--warm-up", type=int, default=2, metavar="N", help="requests before the clock (default: 2)")
    load.add_argument("--load-seed", type=int, default=0, metavar="N", help="another one makes other prompts and times")
    load.add_argument("--json", type=Path, metavar="FILE", help="also write the figures as JSON")
    parser.set_defaults(default_concurrency=concurrency)


def add_target(parser: argparse.ArgumentParser) -> None:
    server = parser.add_argument_group("the server")
    server.add_argument("--url", required=True, help="any server with OpenAI's routes")
    server.add_argument("--served-model", default="", metavar="NAME", help="its model (default: the first it names)")
    server.add_argument("--api-key", metavar="KEY", help="its API key (default: $SGLITE_API_KEY)")
    server.add_argument("--chat", action="store_true", help="use the chat route instead of completions")
    server.add_argument("--natural-end", action="store_true", help="answers may end early; else ignore_eos is sent")


def bench_serve(options: argparse.Namespace) -> int:
    """1 where a request failed."""
    from sglite.bench.targets import OpenAITarget

    plan = _Plan(options)
    key = options.api_key or os.environ.get("SGLITE_API_KEY")
    target = OpenAITarget(
        options.url, model=options.served_model, api_key=key, chat=options.chat, exact=not options.natural_end
    )

    async def run() -> tuple[str, list[Shot]]:
        try:
            name = await target.ready()
            return name, await plan.run(target)
        finally:
            await target.aclose()

    name, shots = asyncio.run(run())
    return _publish(plan, shots, {"command": "serve", "url": options.url, "model": name})


def bench_engine(options: argparse.Namespace, backend: Backend) -> int:
    """1 where a request failed. Closes the backend."""
    from sglite.bench.targets import BackendTarget

    async def run() -> tuple[str, list[Shot]]:
        try:
            name = (await backend.info()).name
            return name, await plan.run(BackendTarget(backend))
        finally:
            await backend.aclose()

    plan = _Plan(options)
    name, shots = asyncio.run(run())
    return _publish(plan, shots, {"command": "engine", "model": name})


class _Plan:
    """What to send and how, out of the command line. Raises ConfigError naming the option that cannot be."""

    def __init__(self, options: argparse.Namespace) -> None:
        if options.rate is not None and options.concurrency is not None:
            raise ConfigError("--rate (an open loop) and --concurrency (a closed one) cannot be combined")
        if options.rate is not None and not 0 < options.rate <= 10_000:
            raise ConfigError(f"--rate must be greater than 0 and at most 10000, not {options.rate}")
        if not 0 <= options.shared_prefix < options.prompt_tokens:
            raise ConfigError("--shared-prefix must be less than --prompt-tokens: each prompt has something of its own")
        self.slo: Slo | None = read_slo(options.slo) if options.slo else None
        self.rate: float | None = options.rate
        self.callers: int = options.concurrency or options.default_concurrency
        self.seed: int = options.load_seed
        self.file: Path | None = options.json
        self.jobs = read_jobs(options.prompts, options.output_tokens) if options.prompts else self._made(options)
        self._warm = made_jobs(options.warm_up, options.prompt_tokens, 8, seed=self.seed - 1)

    def _made(self, options: argparse.Namespace) -> list[Job]:
        return made_jobs(
            options.requests,
            options.prompt_tokens,
            options.output_tokens,
            shared_tokens=options.shared_prefix,
            seed=self.seed,
        )

    async def run(self, target: Target) -> list[Shot]:
        await closed_loop(target, self._warm, 1, lambda shot: None)
        return await _with_progress(len(self.jobs), lambda done: self._send(target, done))

    async def _send(self, target: Target, done: Callable[[Shot], object]) -> list[Shot]:
        if self.rate is not None:
            return await open_loop(target, self.jobs, self.rate, self.seed, done)
        return await closed_loop(target, self.jobs, self.callers, done)

    def settings(self) -> dict[str, Any]:
        loop = {"rate": self.rate} if self.rate is not None else {"concurrency": self.callers}
        slo = {} if self.slo is None else {"slo": {n: getattr(self.slo, n) for n in ("ttft", "tpot", "e2e")}}
        return {**loop, **slo, "seed": self.seed}


async def _with_progress(total: int, work: Callable[[Callable[[Shot], object]], Awaitable[list[Shot]]]) -> list[Shot]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("requests", total=total)
        return await work(lambda shot: progress.advance(task))


def read_jobs(file: Path, max_tokens: int) -> list[Job]:
    """Raises ConfigError naming the line that is none."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {(error.strerror or str(error)).lower()}") from None
    jobs = [_read_job(file, number, line, max_tokens) for number, line in enumerate(lines, 1) if line.strip()]
    if not jobs:
        raise ConfigError(f"{file} holds no prompt")
    return jobs


def _read_job(file: Path, number: int, line: str, max_tokens: int) -> Job:
    try:
        value = json.loads(line)
        job = Job(value["prompt"], value.get("max_tokens", max_tokens))
        if not isinstance(job.prompt, str) or not job.prompt or type(job.max_tokens) is not int or job.max_tokens < 1:
            raise ValueError
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(f'{file}, line {number}: write {{"prompt": "text", "max_tokens": 64}}') from None
    return job


def _publish(plan: _Plan, shots: Sequence[Shot], about: dict[str, Any]) -> int:
    from rich.console import Console

    found = figures(shots, plan.slo)
    show(found, Console())
    for error in sorted({shot.error for shot in shots if shot.error})[:5]:
        print(f"sglite: failed: {error}", file=sys.stderr)
    if plan.file is not None:
        machine = {"cores": len(os.sched_getaffinity(0)), "python": platform.python_version()}
        value = {"kind": "load", **about, "settings": plan.settings(), "machine": machine, "figures": found.as_json()}
        plan.file.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    return 1 if found.failed else 0


def show(found: Figures, console: Console) -> None:
    from rich.table import Table

    table = Table("ms", "mean", "P50", "P95", "P99")
    for name, each in found.times.items():
        row = ["-"] * 4 if each is None else [f"{v * 1000:,.1f}" for v in (each.mean, each.p50, each.p95, each.p99)]
        table.add_row(name.upper(), *row)
    console.print(table)
    rates = f"{found.requests_per_second:.2f} requests/s, {found.tokens_per_second:,.1f} tokens/s"
    good = "" if found.goodput is None else f", goodput {found.goodput:.2f} requests/s"
    hit = "unknown" if found.hit_rate is None else f"{found.hit_rate:.1%}"
    failed = f", {found.failed} failed" if found.failed else ""
    console.print(f"{found.requests} requests in {found.seconds:.2f} s{failed}: {rates}{good}", highlight=False)
    console.print(f"{found.prompt_tokens:,} prompt tokens, {hit} of them cached", highlight=False)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, not {text!r}")
    return int(text)
