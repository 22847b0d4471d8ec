"""What the example agents share: the options --model and --backend, and a table of the calls that were made."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import httpx
from rich.console import Console
from rich.table import Table

import sglite as sgl
from sglite.lang.backends.openai_wire import Dialect

console = Console()
ON = """where it runs:
  python FILE                                     the default model, loaded here
  python FILE --model ./folder                    another model
  python FILE --backend http://127.0.0.1:30000    a server started with sglite serve
  python FILE --backend http://127.0.0.1:8000/v1  the OpenAI routes of vLLM, SGLang, llama.cpp, sglite or others
  sglite run FILE                                 with sglite's own options in front of the file
"""
DIALECTS: dict[str, Dialect] = {"vllm": "vllm", "sglang": "vllm", "sglite": "vllm", "llamacpp": "llama.cpp"}
"""By whom a server says that it owns its models."""


def command_line(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=description, epilog=ON, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    model = "registry name, folder or .gguf file (default: smollm2-135m); with /v1: its name there (default: the first)"
    parser.add_argument("--model", help=model)
    parser.add_argument("--backend", metavar="URL", help="a running server, instead of loading a model here")
    dialect = "what a server of OpenAI routes has beyond OpenAI's: of vllm or llama.cpp (default: it is asked)"
    parser.add_argument("--dialect", choices=("openai", "vllm", "llama.cpp"), help=dialect)
    return parser


def start(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line and set the backend that it names, if it is there; one that is set already stays."""
    options = parser.parse_args(arguments)
    if options.backend and options.backend.rstrip("/").endswith("/v1"):
        sgl.set_default_backend(service(options.backend, options.model, options.dialect))
    elif options.backend:
        sgl.set_default_backend(sgl.RuntimeEndpoint(options.backend))
        sgl.get_server_info()
    elif options.model or sgl.get_default_backend() is None:
        sgl.set_default_backend(sgl.Engine(model=options.model or "smollm2-135m"))
    return options


def service(
    url: str, model: str | None, dialect: Dialect | None, get: Callable[[str], httpx.Response] = httpx.get
) -> sgl.OpenAI:
    """A server's OpenAI routes; what was not said of its model and its dialect is in its list of models."""
    if model is None or dialect is None:
        try:
            first = get(f"{url.rstrip('/')}/models").raise_for_status().json()["data"][0]
        except httpx.HTTPError as error:
            raise sgl.UnavailableError(f"{url} does not say which models it has: {error}") from error
        model = model or first["id"]
        dialect = dialect or DIALECTS.get(first.get("owned_by"), "openai")
    return sgl.OpenAI(model, base_url=url, dialect=dialect)


def exact_if_possible() -> sgl.ChoicesMethod:
    """The method of ``select`` that tells probabilities, where the backend can score texts: services only generate."""
    return sgl.token_length_normalized if isinstance(sgl.get_default_backend(), sgl.OpenAI) else sgl.exact


def run(main: Callable[[], None]) -> None:
    """An example as a command: what goes wrong is told in a sentence."""
    try:
        main()
    except (sgl.SgliteError, OSError) as error:
        sys.exit(f"{Path(sys.argv[0]).name}: error: {error}")


def show_calls(states: Sequence[sgl.ProgramState]) -> None:
    """One line per program: how many calls it took, and how much of their prompts was computed before."""
    table = Table("program", "calls", "prompt tokens", "cached", "new", "seconds", title="what it took", min_width=60)
    for number, state in enumerate(states, 1):
        calls = list(state.trace())
        prompt, cached = sum(c.prompt_tokens for c in calls), sum(c.cached_tokens for c in calls)
        end = max((c.start + c.wall for c in calls), default=0.0)
        share = f"{cached / prompt:.0%}" if prompt else "-"
        new = sum(c.new_tokens for c in calls)
        table.add_row(str(number), str(len(calls)), str(prompt), share, str(new), f"{end:.2f}")
    console.print(table)
