"""A coding helper: it writes a small function, runs its checks in a folder of its own, and tries again with the error.

The model acts through two tools, write_file and run_file. Both see one temporary folder only: a path that leaves it is
refused, and the code runs in a bare interpreter with limits on time, memory and file size, without your environment
variables. That contains mistakes; for code from people you do not trust use a container.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from common import command_line, console, run, show_calls, start

import sglite as sgl

TASK = "add(a, b) returns the sum of a and b"
CHECKS = "assert add(2, 3) == 5\nassert add(-1, 1) == 0\nprint('all checks passed')\n"
SECONDS, MEGABYTES = 2, 256
PASSED = "all checks passed"


class Sandbox:
    """Tools around one folder. ``tools`` are what the model may call."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self.tools: list[Callable[..., str]] = [self.write_file, self.run_file]

    def write_file(self, name: str, text: str) -> str:
        try:
            self._inside(name).write_text(text, encoding="utf-8")
        except (OSError, ValueError) as error:
            return f"cannot write {name}: {error}"
        return f"wrote {len(text)} characters to {name}"

    def run_file(self, name: str) -> str:
        """What the file prints, or the last line of its error."""
        try:
            command = [sys.executable, "-I", str(self._inside(name))]
            result = subprocess.run(
                command, cwd=self.folder, env={}, preexec_fn=limit, timeout=3 * SECONDS, capture_output=True, text=True
            )
        except (ValueError, subprocess.TimeoutExpired) as error:
            return f"cannot run {name}: {type(error).__name__}"
        lines = (result.stdout if result.returncode == 0 else result.stderr).strip().splitlines()
        return lines[-1] if lines else f"exit status {result.returncode}"

    def _inside(self, name: str) -> Path:
        path = (self.folder / name).resolve()
        if not path.is_relative_to(self.folder) or path == self.folder:
            raise ValueError("the path leaves the folder")
        return path


def limit() -> None:
    """Of the child, before it runs."""
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (MEGABYTES << 20, MEGABYTES << 20))
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))


@sgl.function
def solve(s: sgl.ProgramState, task: str, checks: str, sandbox: Sandbox, attempts: int) -> bool:
    """Whether the checks passed. Every attempt is a call of a tool, and what the tool said is the next turn."""
    s += sgl.system("You are a Python programmer. You act by calling tools.")
    s += sgl.user("Write a function to solution.py: double(x) returns twice x.")
    example = (
        r'{"name": "write_file", "arguments": {"name": "solution.py", "text": "def double(x):\n    return 2 * x\n"}}'
    )
    s += sgl.assistant(example) + sgl.user("wrote 32 characters to solution.py. All checks passed. Well done!")
    s += sgl.assistant("What is next?") + sgl.user(f"Write a function to solution.py: {task}.")
    for attempt in range(attempts):
        heat = 0.0 if attempt == 0 else 0.7
        s += sgl.assistant(sgl.tool_call(f"call{attempt}", sandbox.tools, max_tokens=96, temperature=heat))
        call = s.value(f"call{attempt}")
        said = call.call()
        console.print(f"  {call.name}({dict(call.arguments)})\n    {said}", markup=False, highlight=False)
        outcome = run_checks(sandbox, checks)
        console.print(f"    checks: {outcome}", markup=False, highlight=False)
        if outcome == PASSED:
            return True
        s += sgl.user(f"{said}. The checks failed: {outcome}. Write solution.py again, with {task}.")
    return False


def run_checks(sandbox: Sandbox, checks: str) -> str:
    solution = sandbox.folder / "solution.py"
    written = solution.read_text(encoding="utf-8") if solution.is_file() else ""
    sandbox.write_file("checks.py", f"{written}\n{checks}")
    return sandbox.run_file("checks.py")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_line(__doc__)
    parser.add_argument("task", nargs="?", default=TASK, help=f"what the function does (default: {TASK!r})")
    parser.add_argument("--checks", type=Path, metavar="FILE", help=f"Python code that prints '{PASSED}' at its end")
    parser.add_argument("--attempts", type=int, default=4, metavar="N", help="most attempts (default: 4)")
    options = start(parser, arguments)
    checks = options.checks.read_text(encoding="utf-8") if options.checks else CHECKS
    console.print(f"[bold]{options.task}[/bold]")
    with tempfile.TemporaryDirectory() as folder:
        state = solve.run(options.task, checks, Sandbox(Path(folder)), options.attempts)
    console.print(f"[bold]{'solved' if state.ret_value else 'not solved'}[/bold]")
    show_calls([state])


if __name__ == "__main__":
    run(main)
