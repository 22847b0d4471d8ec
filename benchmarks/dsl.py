"""What does the DSL itself cost? Time per gen on the mock, a fork of 64, and 10,000 states in one process.

    python benchmarks/dsl.py                      # sglite alone
    python benchmarks/dsl.py --peer PYTHON        # also SGLang's interpreter: PYTHON is one that can import sglang

Prints a table and writes ``dsl.json`` beside this file. Sides take turns, and the best of the rounds counts: the rest
is the machine's other work. "reading" waits for each variable, "appending" for the last one, and "awaiting" is an
``async def``. The mock answers at once, like the stub that SGLang gets; "streamed" is the same mock over the event
loop, as backends that have to wait are used.
"""

import argparse
import asyncio
import json
import resource
import subprocess
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

import sglite as sgl
from sglite.testing import MockBackend

HERE = Path(__file__).parent


@sgl.function
def reading(s, count):
    for _ in range(count):
        s += "q"
        s += sgl.gen("a", max_tokens=8)
        s["a"]


@sgl.function
def appending(s, count):
    for _ in range(count):
        s += "q"
        s += sgl.gen("a", max_tokens=8)
    s["a"]


@sgl.function
async def awaiting(s, count):
    for _ in range(count):
        s += "q"
        s += sgl.gen("a", max_tokens=8)
        await s.get("a")


@sgl.function
def trivial(s, question):
    s += question
    s += sgl.gen("a")


@sgl.function
def wide(s):
    s += "a beginning that all of them share"
    began = time.perf_counter()
    s.fork(64)
    return time.perf_counter() - began


class Streamed(MockBackend):
    """Gives its chunks through ``generate`` only."""

    @property
    def answer(self):
        return None


def per_gen(program, gens, runs, mock=MockBackend):
    """Seconds per gen of ``runs`` programs one after the other."""
    backend = mock("ok")
    program.run(gens, backend=backend)
    began = time.perf_counter()
    for _ in range(runs):
        program.run(gens, backend=backend)
    return (time.perf_counter() - began) / runs / gens


def per_gen_on_one_loop(gens, runs):
    async def main():
        backend = MockBackend("ok")
        await awaiting.arun(gens, backend=backend)
        began = time.perf_counter()
        for _ in range(runs):
            await awaiting.arun(gens, backend=backend)
        return (time.perf_counter() - began) / runs / gens

    return asyncio.run(main())


def many_states(count):
    began = time.perf_counter()
    states = trivial.run_batch([{"question": "q"}] * count, backend=MockBackend("ok"))
    assert all(state["a"] == "ok" for state in states)
    return time.perf_counter() - began


def peer(python, gens, runs):
    command = [python, str(HERE / "dsl_peer.py"), str(gens), str(runs)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", help="a Python that can import sglang")
    parser.add_argument("--gens", type=int, default=6, help="gens per program")
    parser.add_argument("--runs", type=int, default=200, help="programs per round")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    found = {}

    def keep(name, seconds):
        found[name] = min(found.get(name, float("inf")), seconds)

    for _ in range(options.rounds):
        keep("reading", per_gen(reading, options.gens, options.runs))
        keep("appending", per_gen(appending, options.gens, options.runs))
        keep("reading, streamed", per_gen(reading, options.gens, options.runs, Streamed))
        keep("appending, streamed", per_gen(appending, options.gens, options.runs, Streamed))
        keep("awaiting", per_gen_on_one_loop(options.gens, options.runs))
        keep("fork of 64", wide.run(backend=MockBackend()).ret_value)
        if options.peer:
            for name, seconds in peer(options.peer, options.gens, options.runs).items():
                keep(f"sglang {name}", seconds)
    keep("10,000 states", many_states(10_000))
    report(found)


def report(found):
    table = Table("what", "time", "SGLang", "ratio", title="the DSL on a backend that answers at once")
    for name in ("reading", "appending", "awaiting", "reading, streamed", "appending, streamed"):
        theirs = found.get(f"sglang {name.removesuffix(', streamed')}")
        ratio = f"{found[name] / theirs:.2f}" if theirs else "-"
        table.add_row(f"per gen, {name}", micro(found[name]), micro(theirs) if theirs else "-", ratio)
    table.add_row("fork of 64", f"{found['fork of 64'] * 1e3:.2f} ms", "-", "-")
    table.add_row("10,000 states", f"{found['10,000 states']:.2f} s", "-", "-")
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    table.add_row("peak memory", f"{memory:.0f} MB", "-", "-")
    Console().print(table)
    (HERE / "dsl.json").write_text(json.dumps({**found, "peak_memory_mb": memory}, indent=2) + "\n")


def micro(seconds):
    return f"{seconds * 1e6:.0f} µs"


if __name__ == "__main__":
    main()
