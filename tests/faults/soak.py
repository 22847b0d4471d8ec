"""Load for as long as one likes, against a server of its own on loopback, and what came of it.

    python tests/faults/soak.py requests --requests 1000000 --minutes 60          the scripted model
    python tests/faults/soak.py requests --model smollm2-135m --minutes 60 --kill-every 600 --open 1000
    python tests/faults/soak.py overload --seconds 30
    python tests/faults/soak.py drains --count 100
    python tests/faults/soak.py aborts --model smollm2-135m --tokens 500

``requests``: 25% of the requests are aborted at a random event, 5% are invalid, 1% are read slowly; half stream.
Everything is counted: an answer nobody expected, a stream that ended without ``[DONE]`` and without an error event,
what the server's processes hold before and after, and how their memory grows. Exits with 1 where something was lost.
"""

from __future__ import annotations

import argparse
import sys

from soak_ends import aborts_command, drains_command
from soak_overload import overload_command
from soak_requests import requests_command


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = top.add_subparsers(required=True, metavar="COMMAND")
    requests = commands.add_parser("requests")
    requests.add_argument("--requests", type=int, default=1_000_000)
    requests.add_argument("--kill-every", type=float, default=0.0, metavar="SECONDS", help="SIGKILL the worker")
    requests.add_argument("--open", type=int, default=0, help="idle connections beside the active ones")
    overload = commands.add_parser("overload")
    overload.add_argument("--seconds", type=float, default=30.0, help="for each of the next")
    overload.add_argument("--times", type=int, nargs="+", default=[1, 2, 10, 100], help="multiples of --active clients")
    drains = commands.add_parser("drains")
    drains.add_argument("--count", type=int, default=100)
    aborts = commands.add_parser("aborts")
    aborts.add_argument("--count", type=int, default=100)
    for command, run in (
        (requests, requests_command),
        (overload, overload_command),
        (drains, drains_command),
        (aborts, aborts_command),
    ):
        command.add_argument("--model", help="a real model through `sglite serve`; else the scripted one")
        command.add_argument("--tokens", type=int, default=32, help="most new tokens of an answer")
        command.add_argument("--minutes", type=float, default=60.0)
        command.add_argument("--active", type=int, default=64, help="clients at work")
        command.set_defaults(run=run)
    return top


if __name__ == "__main__":
    options = parser().parse_args()
    sys.exit(options.run(options))
