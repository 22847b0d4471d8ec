"""A profile of the engine's thread, for /start_profile and /stop_profile."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sglite.errors import InvalidRequestError

LONGEST = 60.0
"""Seconds after which a forgotten profile makes place for the next."""


class Profiler:
    """Both methods are called on the thread that is recorded."""

    def __init__(self) -> None:
        self._running: Any = None
        self._began = 0.0

    def start(self) -> None:
        """Raises InvalidRequestError where a profile is being recorded."""
        from torch.profiler import profile

        if self._running is not None:
            if time.monotonic() - self._began < LONGEST:
                raise InvalidRequestError("a profile is being recorded; end it with /stop_profile")
            self.stop()
        self._running, self._began = profile(), time.monotonic()
        self._running.start()

    def stop(self) -> Callable[[], str]:
        """What writes the recorded profile down. Raises InvalidRequestError where none is being recorded."""
        if self._running is None:
            raise InvalidRequestError("no profile is being recorded; begin one with /start_profile")
        recorded, self._running = self._running, None
        recorded.stop()
        return lambda: _trace(recorded)


def _trace(recorded: Any) -> str:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(file))
        return file.read_text(encoding="utf-8")
