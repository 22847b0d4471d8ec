"""The stateful fuzz for as long as one likes: ``python tests/faults/fuzz.py --steps 10000000 --minutes 60 --jobs 2``.

Model-free: the real scheduler, radix tree and page book against ``world.Reference``, every invariant after every
step. Prints one line of JSON; a violated invariant ends it with the seed that repeats it.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "runtime"))

from world import World

LIFE = 2_000
"""Steps of one world, from its seed to its drain."""


def live(seed: int, steps: int = LIFE) -> Counter[str]:
    """One world's life, told by its seed alone."""
    rng = random.Random(seed)
    world = World(rng.randrange)
    while world.steps < steps:
        happening = rng.random()
        if happening < 0.25 or world.engine.scheduler.idle:
            world.submit()
        elif happening < 0.28:
            world.abort()
        elif happening < 0.283:
            world.flush()
        elif happening < 0.29:
            world.end_program()
        elif happening < 0.2905:
            world.kill()
        world.step()
    world.drain()
    names = ("steps", "finished", "aborted", "refused", "kills")
    return Counter({name: getattr(world, name) for name in names})


def fuzz(steps: int, minutes: float, first_seed: int = 0) -> tuple[Counter[str], float]:
    """Worlds until ``steps`` or the time is over; what happened in them, and in how many seconds."""
    began, total, seed = time.monotonic(), Counter[str](), first_seed
    while total["steps"] < steps and time.monotonic() - began < minutes * 60:
        try:
            total += live(seed)
        except BaseException:
            print(f"failed in the world of seed {seed}", file=sys.stderr)
            raise
        seed += 1
    return total, time.monotonic() - began


def spread(steps: int, minutes: float, first_seed: int, jobs: int) -> tuple[Counter[str], float]:
    """The same by so many processes, each with seeds of its own. Raises CalledProcessError where one found a fault."""
    shares = ["--steps", str(steps // jobs), "--minutes", str(minutes)]
    commands = [[sys.executable, __file__, *shares, "--seed", str(first_seed + job * 1_000_000)] for job in range(jobs)]
    total, slowest = Counter[str](), 0.0
    for process in [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]:
        told, _ = process.communicate()
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, process.args)
        found = json.loads(told)
        slowest = max(slowest, found.pop("seconds"))
        total += Counter(found)
    return total, slowest


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000_000)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    options = parser.parse_args()
    given = (options.steps, options.minutes, options.seed)
    found, seconds = fuzz(*given) if options.jobs == 1 else spread(*given, options.jobs)
    print(json.dumps({**found, "seconds": round(seconds, 1)}))
