"""Schemathesis over our own OpenAPI document: `make schemathesis`.

    python tests/server/fuzz_openapi.py --examples 100

All phases, valid and invalid requests, against a scripted engine behind the real server. It fails on a 5xx, on a
status, content type or body that the document does not announce.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from sglite.runtime.server.config import ServerConfig
from sglite.runtime.server.runner import running
from sglite.runtime.testing import answering, scripted_engine

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
PHASES = "examples,coverage,fuzzing,stateful"


def fuzz(examples: int, seconds: int, seed: int) -> subprocess.CompletedProcess[str]:
    """The run's outcome; its text says which requests failed and how to repeat them."""
    with (
        tempfile.TemporaryDirectory() as folder,
        scripted_engine(answering("{}")) as engine,
        running(engine, ServerConfig(port=0, data_folder=folder)) as url,
    ):
        return subprocess.run(command(url, examples, seconds, seed), capture_output=True, text=True, cwd=folder)


def command(url: str, examples: int, seconds: int, seed: int) -> Sequence[str]:
    program = Path(sys.executable).with_name("schemathesis")
    options = ["--checks", CHECKS, "--phases", PHASES, "--mode", "all", "--seed", str(seed), "--no-color"]
    limits = ["--max-examples", str(examples), "--max-time", str(seconds), "--request-timeout", "30"]
    return [str(program), "run", f"{url}/openapi.json", *options, *limits, "--suppress-health-check", "all"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=50, help="requests per operation and phase (default: 50)")
    parser.add_argument("--seconds", type=int, default=1800, help="most time (default: 1800)")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    done = fuzz(options.examples, options.seconds, options.seed)
    print(done.stdout, done.stderr)
    return done.returncode


if __name__ == "__main__":
    raise SystemExit(main())
