"""A worker process around the scripted model, for tests of its supervisor: run like `sglite.runtime.worker`.

The option ``seed`` chooses a fault where a test wants one: 1 is a model that cannot be loaded, 2 an engine that takes
its process along when a prompt holds ``DEADLY``, 3 a process that ends before it loads anything.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from typing import Any

import torch

from sglite.errors import ModelLoadError
from sglite.runtime.engine import Engine
from sglite.runtime.testing import scripted_engine
from sglite.runtime.worker.child import main

DEADLY = ord("\x07")


def build(options: Mapping[str, Any]) -> Engine:
    torch.set_num_threads(1)  # nothing here is worth two
    match options.get("seed", 0):
        case 1:
            raise ModelLoadError("the file weights.gguf is damaged")
        case 3:
            os.kill(os.getpid(), signal.SIGKILL)
    return scripted_engine(_script, **options)


def _script(history: list[int]) -> int:
    if history[-1] == DEADLY:
        os.kill(os.getpid(), signal.SIGKILL)
    return 97 + (sum(history) + len(history)) % 26


if __name__ == "__main__":
    main(build)
