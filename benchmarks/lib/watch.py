"""CPU time and memory of processes, from /proc: what a contestant used, and what everybody else used meanwhile."""

from __future__ import annotations

import os
import time
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")
PROC = Path("/proc")


class Watch:
    """Foreign use between ``start`` and ``stop``: what the machine's CPUs did, less this process and one contestant's.

    Other contestants count as foreign: one that spins while it waits would slow its neighbours.
    """

    def __init__(self, contestant: int | None) -> None:
        self._root = contestant
        self._began = time.perf_counter()
        self._busy, self._own = busy_seconds(), self._own_seconds()

    def foreign_cores(self) -> float:
        """Cores, on average since the beginning. Counts of the kernel are ticks of 10 ms, hence the small allowance."""
        wall = time.perf_counter() - self._began
        foreign = (busy_seconds() - self._busy) - (self._own_seconds() - self._own)
        return max(0.0, foreign - 4 / TICKS) / wall

    def _own_seconds(self) -> float:
        mine = os.times()
        theirs = 0.0 if self._root is None else sum(map(_used_seconds, tree(self._root)))
        return mine.user + mine.system + theirs


def settle(patience: float = 3.0) -> None:
    """Waits until nobody computes, at most ``patience`` seconds: who has just answered may still tidy up or spin, and
    the next one in turn would pay for it."""
    end = time.perf_counter() + patience
    while time.perf_counter() < end:
        before = busy_seconds()
        time.sleep(0.2)
        if busy_seconds() - before <= 2 / TICKS:
            return


def busy_seconds() -> float:
    """All CPUs together since boot, with what other machines on the same host took from this one."""
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, _first_line(PROC / "stat").split()[1:9])
    return (user + nice + system + irq + softirq + steal) / TICKS


def tree(root: int) -> list[int]:
    """A process and all its descendants."""
    children: dict[int, list[int]] = {}
    for entry in PROC.iterdir():
        if entry.name.isdigit() and (fields := _stat(int(entry.name))):
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return found


def peak_megabytes(root: int) -> float:
    """The most that a process held in memory so far, plus the same of its descendants."""
    return sum(map(_peak, tree(root))) / 1024


def _used_seconds(pid: int) -> float:
    """With its dead children, so that a process that ends does not take its time with it."""
    fields = _stat(pid)
    return sum(map(int, fields[11:15])) / TICKS if fields else 0.0


def _peak(pid: int) -> int:
    try:
        lines = (PROC / str(pid) / "status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), 0)


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the state on (proc(5) calls it field 3); none where the process has ended."""
    try:
        return (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _first_line(path: Path) -> str:
    with path.open() as file:
        return file.readline()
