"""What the example agents share: the options --model and --backend, and a table of the calls that were made."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

import sglite as sgl

console = Console()
ON = """where it runs:
  python FILE                                     the default model, loaded here
  python FILE --model ./folder                    another model
  python FILE --backend http://127.0.0.1:30000    a server started with sglite serve
  python FILE --backend http://127.0.0.1:8000/v1  vLLM's, SGLang's or sglite's OpenAI routes; --model is its name there
  sglite run FILE                                 with sglite's own options in front of the file
"""


def command_line(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=description, epilog=ON, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="registry name, folder or .gguf file (default: smollm2-135m)")
    parser.add_argument("--backend", metavar="URL", help="a running server, instead of loading a model here")
    return parser


def start(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line and set the backend that it names; one that is set already stays."""
    options = parser.parse_args(arguments)
    if options.backend and options.backend.rstrip("/").endswith("/v1"):
        backend = sgl.OpenAI(options.model or "default", base_url=options.backend, dialect="vllm")
        sgl.set_default_backend(backend)
    elif options.backend:
        sgl.set_default_backend(sgl.RuntimeEndpoint(options.backend))
    elif options.model or sgl.get_default_backend() is None:
        sgl.set_default_backend(sgl.Engine(model=options.model or "smollm2-135m"))
    return options


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
