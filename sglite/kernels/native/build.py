"""The shared library: compiled on first use for this very machine, then kept in the user's cache folder.

The name of the file holds a hash of the sources, the compiler's version and the CPU's features, so a changed source,
a new compiler or another machine on the same home folder compiles anew. It appears by one rename: several processes
may start at once, and nothing half-written is ever loaded.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

NEEDED = frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"})
FLAGS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-shared", "-fPIC", "-pthread")
"""Contraction is off because the bits of a result must not depend on what the compiler fuses."""

_SOURCES = Path(__file__).parent
_COMPILE_SECONDS = 300


class BuildError(Exception):
    """The library cannot be made or loaded here; the message is one line that says why."""


@cache
def cpu_features() -> frozenset[str]:
    """What the kernel reports of the first CPU; empty where it reports nothing (not Linux, not x86)."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    flags = next((line for line in lines if line.startswith("flags")), "")
    return frozenset(flags.partition(":")[2].split())


def library() -> Path:
    """Path of the compiled library, made now if need be. Raises BuildError."""
    missing = sorted(NEEDED - cpu_features())
    if missing:
        raise BuildError(f"this CPU lacks {', '.join(missing)}")
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if not compiler:
        raise BuildError("no C++ compiler was found; install g++ or set CXX")
    target = _folder() / f"sglite-{_key(compiler)}.so"
    if not target.exists():
        _compile(compiler, target)
    return target


def _folder() -> Path:
    base = os.environ.get("SGLITE_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "sglite"
    return Path(base).expanduser() / "native"


def _sources() -> list[Path]:
    return sorted([*_SOURCES.glob("*.h"), *_SOURCES.glob("*.cpp")])


def _key(compiler: str) -> str:
    digest = hashlib.sha256()
    for path in _sources():
        digest.update(path.name.encode() + path.read_bytes())
    for part in (_run([compiler, "--version"]), *FLAGS, *sorted(cpu_features())):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:20]


def _compile(compiler: str, target: Path) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            fresh = Path(folder) / "library.so"
            _run([compiler, *FLAGS, str(_SOURCES / "native.cpp"), "-o", str(fresh)])
            fresh.replace(target)
    except OSError as error:
        raise BuildError(f"the compiled kernels cannot be written to {target.parent}: {error}") from error


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_COMPILE_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} cannot be run: {error}") from error
    if done.returncode:
        reason = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[:200])
        raise BuildError(f"{command[0]} failed: {reason}")
    return done.stdout
