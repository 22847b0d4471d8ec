"""Every option of the supervised worker, written once: the CLI and the docs read this dataclass."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sglite.errors import ConfigError


def _option(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """When a worker counts as ill, as hung and as hopeless. Times are seconds."""

    stale_after: float = _option(5.0, "an engine silent for so long is not ready: /ready answers 503")
    hang_timeout: float = _option(120.0, "an engine silent for so long is killed and started again")
    max_crashes: int = _option(5, "ends of the engine's process in a row after which the server gives up")
    max_pending_bytes: int = _option(64 << 20, "most bytes of requests that wait for the engine's process to read them")

    def __post_init__(self) -> None:
        for name in ("stale_after", "hang_timeout", "max_crashes", "max_pending_bytes"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be positive, not {getattr(self, name)}")
