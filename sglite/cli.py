"""The ``sglite`` command. Every command imports what it needs when it runs, so that ``--help`` is quick."""

from __future__ import annotations

import argparse
import json
import os
import runpy
import signal
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from sglite import __version__
from sglite.bench import command as bench_command
from sglite.bench import report as bench_report
from sglite.errors import ConfigError, SgliteError
from sglite.options import add_file, add_options, given_options, read_options
from sglite.runtime.config import EngineConfig
from sglite.runtime.grammar import check as grammar_check
from sglite.runtime.server.config import ServerConfig
from sglite.runtime.worker.config import WorkerConfig

if TYPE_CHECKING:
    import socket

    from sglite.protocol import Backend
    from sglite.runtime.engine import Engine
    from sglite.runtime.server.store import Store

Command = Callable[[argparse.Namespace], int]

DESCRIPTION = "Run programs that call a language model many times, or serve a model to them."
EXAMPLES = """examples:
  sglite models                                    which models are known, and which are here already
  sglite chat                                      talk to the default model
  sglite serve --model smollm2-135m --port 30000   OpenAI's and SGLang's APIs on http://127.0.0.1:30000
  sglite run program.py --my-option 3              a program with a model loaded behind it
  sglite run --backend http://127.0.0.1:30000 program.py
  sglite bench serve --url http://127.0.0.1:30000  load on it, and what came of it
"""
SERVE_EXAMPLES = """examples:
  sglite serve --model smollm2-135m --port 30000
  sglite serve --model ./my-model-folder --dtype float32 --context-length 4096
  sglite serve --config server.toml --port 30001
  curl http://127.0.0.1:30000/v1/chat/completions -H 'content-type: application/json' \\
       -d '{"model": "smollm2-135m", "messages": [{"role": "user", "content": "Hello"}]}'
"""
RUN_EXAMPLES = """examples:
  sglite run program.py                  the default model, in this process
  sglite run --model ./folder program.py --my-option 3
  sglite run --backend http://127.0.0.1:30000 program.py
  sglite run --trace trace.json program.py

Options before the program are sglite's, those after it the program's.
"""
CHAT_EXAMPLES = """examples:
  sglite chat
  sglite chat --system "Answer in one sentence."
  echo "What is the capital of France?" | sglite chat --temperature 0
  sglite chat --backend http://127.0.0.1:30000
"""
BATCH_EXAMPLES = """examples:
  sglite batch in.jsonl -o out.jsonl
  sglite batch in.jsonl -o out.jsonl --resume --concurrency 64

A line of the input, and one of the output:
  {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [...], "max_tokens": 50}}
  {"custom_id": "a", "response": {"status_code": 200, "body": {...}}, ...}
"""

CHECK_EXAMPLES = """examples:
  sglite grammar check --schema person.json --instance answer.json
  sglite grammar check --regex '[0-9]{4}-[0-9]{2}' --text 2026-11
  sglite grammar check --jsonl constraints.jsonl --out answers.jsonl
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit code: 0, 1 for what failed, 2 for a wrong command line."""
    options = parser().parse_args(arguments)
    command: Command = options.command
    try:
        return command(options)
    except SgliteError as error:
        return _report(error, options.debug)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output has left; keep Python from complaining at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        "sglite", description=DESCRIPTION, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    top.add_argument("--version", action="version", version=f"sglite {__version__}")
    commands = top.add_subparsers(title="commands", required=True, metavar="COMMAND")
    serve = _command(commands, "serve", serve_command, "serve a model over HTTP", SERVE_EXAMPLES)
    serve.add_argument("--config", type=Path, metavar="FILE", help="a TOML file of these options; flags win over it")
    serve.add_argument("--end-with-stdin", action="store_true", help="end when standard input is closed")
    serve.add_argument("--in-process", action="store_true", help="run the engine in the HTTP server's own process")
    add_options(serve, ServerConfig, "server")
    add_options(serve, WorkerConfig, "worker: the engine's process")
    add_options(serve, EngineConfig, "engine")
    run = _command(commands, "run", run_command, "run a program with a backend set", RUN_EXAMPLES)
    run.add_argument("--trace", type=Path, metavar="FILE", help="write the trace of every program run, as JSON")
    _backend_options(run)
    run.add_argument("program", type=Path, help="a Python file")
    run.add_argument("arguments", nargs=argparse.REMAINDER, help="the program's own arguments")
    chat = _command(commands, "chat", chat_command, "talk to a model", CHAT_EXAMPLES)
    chat.add_argument("--system", metavar="TEXT", help="the system prompt")
    chat.add_argument("--max-tokens", type=int, default=512, metavar="N", help="longest answer (default: 512)")
    chat.add_argument("--temperature", type=float, default=0.7, metavar="X", help="0 is greedy (default: 0.7)")
    _backend_options(chat)
    batch = _command(commands, "batch", batch_command, "answer a file of requests", BATCH_EXAMPLES)
    batch.add_argument("input", type=Path, help="a JSONL file, as for OpenAI's batches")
    batch.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="where the answers go")
    batch.add_argument("--resume", action="store_true", help="go on where the output of an earlier run ends")
    batch.add_argument("--concurrency", type=_positive, default=32, metavar="N", help="requests at once (default: 32)")
    _backend_options(batch)
    grammar = commands.add_parser("grammar", help="look at constraints without running a model")
    inner = grammar.add_subparsers(title="commands", required=True, metavar="COMMAND")
    check = _command(inner, "check", check_command, "dry run of a constraint, against texts", CHECK_EXAMPLES)
    grammar_check.add_arguments(check)
    bench = commands.add_parser("bench", help="put load on a server or an engine, and measure")
    inner = bench.add_subparsers(title="commands", required=True, metavar="COMMAND")
    load = _command(inner, "serve", bench_command.bench_serve, "load on a server", bench_command.SERVE_EXAMPLES)
    bench_command.add_target(load)
    bench_command.add_load(load, requests=128, concurrency=16)
    load = _command(inner, "engine", bench_engine_command, "load on an engine here", bench_command.ENGINE_EXAMPLES)
    bench_command.add_load(load, requests=32, concurrency=32)
    add_options(load, EngineConfig, "engine")
    report = _command(commands, "report", report_command, "say what measured figures mean", bench_report.EXAMPLES)
    bench_report.add_options(report)
    models = _command(commands, "models", models_command, "list the known models", "")
    models.add_argument("--json", action="store_true", help="print JSON")
    return top


def _command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, run: Command, text: str, examples: str
) -> argparse.ArgumentParser:
    made = commands.add_parser(
        name,
        help=text,
        description=text[0].upper() + text[1:] + ".",
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("--debug", action="store_true", help="show the traceback of an error")
    made.set_defaults(command=run)
    return made


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {number}")
    return number


def _backend_options(made: argparse.ArgumentParser) -> None:
    remote = made.add_argument_group("a server instead of a model in this process")
    remote.add_argument("--backend", metavar="URL", help="use the sglite server at this URL")
    remote.add_argument("--api-key", metavar="KEY", help="its API key (default: $SGLITE_API_KEY)")
    add_options(made, EngineConfig, "engine")


def _report(error: SgliteError, debug: bool) -> int:
    if debug:
        traceback.print_exception(error)
    print(f"sglite: error: {error}{_place(error)}", file=sys.stderr)
    return 2 if isinstance(error, ConfigError) else 1


def _place(error: SgliteError) -> str:
    return f" ({error.__notes__[0]})" if getattr(error, "__notes__", None) else ""


# --------------------------------------------------------------------------------------------------------- commands


def serve_command(options: argparse.Namespace) -> int:
    from sglite.runtime.server.runner import listen, serve_on
    from sglite.runtime.server.store import open_store

    if options.config is not None:
        add_file(options.config, [ServerConfig, WorkerConfig, EngineConfig], options)
    config = _with_keys(read_options(ServerConfig, options))
    if options.end_with_stdin:
        _end_with_stdin()
    # The socket first: a port in use is known in no time, while a model takes seconds to load.
    with listen(config) as listener, open_store(_data_folder(config)) as store:
        if options.in_process:
            with _engine(options) as engine:
                serve_on(listener, engine, config, store, _announce)
        else:
            _serve_worker(options, listener, config, store)
    return 0


def _serve_worker(
    options: argparse.Namespace, listener: socket.socket, config: ServerConfig, store: Store | None
) -> None:
    """The engine in a process of its own. Raises what kept it from starting, or from starting again."""
    from sglite.runtime.hub import resolve_model
    from sglite.runtime.loading import load_config
    from sglite.runtime.server.runner import serve_on, url_of
    from sglite.runtime.worker.supervisor import Hooks, Supervisor

    load_config(resolve_model(read_options(EngineConfig, options).model))  # what cannot be served is told at once
    hooks = Hooks(
        ready=lambda: _announce(url_of(listener)),
        given_up=lambda: os.kill(os.getpid(), signal.SIGTERM),
    )
    worker = read_options(WorkerConfig, options)
    supervisor = Supervisor(given_options(EngineConfig, options), worker, hooks=hooks)
    serve_on(listener, supervisor, config, store, lambda url: supervisor.start())
    if supervisor.failure is not None:
        raise supervisor.failure


def _with_keys(config: ServerConfig) -> ServerConfig:
    """Keys from the environment, where other users of the machine do not see them, unless given otherwise."""
    keys = tuple(key.strip() for key in os.environ.get("SGLITE_API_KEYS", "").split(",") if key.strip())
    admin = os.environ.get("SGLITE_ADMIN_KEY", "")
    return replace(config, api_keys=config.api_keys or keys, admin_key=config.admin_key or admin)


def _data_folder(config: ServerConfig) -> str:
    """A server on a port of its own finds its batches again after a restart; one on any free port keeps none."""
    from sglite.runtime.hub import cache_folder

    return config.data_folder or (str(cache_folder() / f"server-{config.port}") if config.port else "")


def _announce(url: str) -> None:
    with suppress(OSError, ValueError):  # a full disk or a closed stream behind stderr is no reason not to serve
        print(f"sglite: serving at {url}", file=sys.stderr, flush=True)


def _end_with_stdin() -> None:
    """Ask this process to end when whoever started it closes our standard input, or dies."""

    def watch() -> None:
        while os.read(0, 4096):  # not through sys.stdin: its lock must be free when the interpreter ends
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="sglite-stdin", daemon=True).start()


def run_command(options: argparse.Namespace) -> int:
    import sglite
    from sglite.lang.calls import ProgramTrace, watch_traces

    if not options.program.is_file():
        raise ConfigError(f"there is no program {str(options.program)!r}")
    traces: list[ProgramTrace] = []
    if options.trace is not None:
        _check_writable(options.trace)
        watch_traces(traces.append)
    sglite.set_default_backend(_backend(options))
    sys.argv = [str(options.program), *options.arguments]
    sys.path.insert(0, str(options.program.resolve().parent))
    try:
        runpy.run_path(str(options.program), run_name="__main__")
    except SgliteError as error:
        _locate(error, options.program)
        raise
    finally:
        if options.trace is not None:
            options.trace.write_text(json.dumps([trace.to_json() for trace in traces], indent=2), encoding="utf-8")
    return 0


def _check_writable(file: Path) -> None:
    """Known before the model is loaded, not after the program has run."""
    try:
        file.open("a").close()
    except OSError as error:
        raise ConfigError(f"cannot write the trace to {file}: {(error.strerror or str(error)).lower()}") from None


def chat_command(options: argparse.Namespace) -> int:
    from sglite.terminal import Conversation, talk

    conversation = Conversation(
        _backend(options), options.system, max_new_tokens=options.max_tokens, temperature=options.temperature
    )
    return talk(conversation, sys.stdin, sys.stdout)


def batch_command(options: argparse.Namespace) -> int:
    """1 when a request failed: the output says which and why."""
    import asyncio

    from rich.console import Console
    from rich.progress import Progress

    from sglite.runtime.server.batchfile import read_requests, run_file

    requests = read_requests(options.input, options.output, resume=options.resume)
    backend = _backend(options)

    async def run(done: Callable[[object], None]) -> Counter[str]:
        try:
            return await run_file(backend, requests, options.output, concurrency=options.concurrency, done=done)
        finally:
            await backend.aclose()

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("requests", total=len(requests))
        counts = asyncio.run(run(lambda _: progress.advance(task)))
    print(f"sglite: {counts['completed']} completed, {counts['failed']} failed: {options.output}", file=sys.stderr)
    return 1 if counts["failed"] else 0


def check_command(options: argparse.Namespace) -> int:
    return grammar_check.main(options)


def bench_engine_command(options: argparse.Namespace) -> int:
    return bench_command.bench_engine(options, _engine(options))


def report_command(options: argparse.Namespace) -> int:
    return bench_report.main(options)


def models_command(options: argparse.Namespace) -> int:
    from dataclasses import asdict

    from sglite.runtime.hub import list_models

    models = list_models()
    if options.json:
        print(json.dumps([asdict(model) for model in models], indent=2))
        return 0
    width = max(len(model.name) for model in models)
    for model in models:
        place = "here" if model.cached else "to be fetched"
        print(f"{model.name:{width}}  {model.size / 1e6:6.0f} MB  {model.licence:12}  {place:13}  {model.title}")
    return 0


def _backend(options: argparse.Namespace) -> Backend:
    if options.backend is None:
        return _engine(options)
    given = sorted(given_options(EngineConfig, options))
    if given:
        raise ConfigError(f"{', '.join(given)} are options of an engine; the server at --backend has its own")
    from sglite.lang.backends.http import RuntimeEndpoint

    return RuntimeEndpoint(options.backend, options.api_key or os.environ.get("SGLITE_API_KEY"))


def _engine(options: argparse.Namespace) -> Engine:
    from sglite.runtime.engine import Engine

    return Engine(**given_options(EngineConfig, options))


def _locate(error: SgliteError, program: Path) -> None:
    """Note the program's line on an error that came out of it."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == str(program)]
    if frames:
        error.add_note(f"{program}, line {frames[-1].lineno}")
