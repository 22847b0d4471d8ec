"""Figures of a run: percentiles of its times, rates, and how many requests kept what was promised."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sglite.bench.load import Shot
from sglite.errors import ConfigError

QUANTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds."""

    mean: float
    p50: float
    p95: float
    p99: float


@dataclass(frozen=True, slots=True)
class Slo:
    """The longest times, in seconds, with which a request counts as good. None: any."""

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    def kept(self, shot: Shot) -> bool:
        pairs = ((self.ttft, shot.ttft), (self.tpot, shot.tpot), (self.e2e, shot.e2e))
        return shot.error is None and all(most is None or (time or 0.0) <= most for most, time in pairs)


@dataclass(frozen=True, slots=True)
class Figures:
    """Rates are per second of the run; ``hit_rate`` is None where no prompt was counted; times are None where nothing
    came. ``goodput``: requests per second that kept the SLO (None without one)."""

    requests: int
    failed: int
    seconds: float
    requests_per_second: float
    tokens_per_second: float
    prompt_tokens: int
    cached_tokens: int
    tokens: int
    hit_rate: float | None
    goodput: float | None
    times: Mapping[str, Times | None]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def figures(shots: Sequence[Shot], slo: Slo | None = None) -> Figures:
    """Raises ConfigError where there are no shots. Times are of requests that succeeded."""
    if not shots:
        raise ConfigError("there are no requests to measure")
    good = [shot for shot in shots if shot.error is None]
    seconds = max(shot.end for shot in shots)
    prompt, tokens = sum(shot.prompt_tokens for shot in good), sum(shot.tokens for shot in good)
    cached = sum(shot.cached_tokens for shot in good)
    return Figures(
        requests=len(shots),
        failed=len(shots) - len(good),
        seconds=seconds,
        requests_per_second=len(good) / seconds,
        tokens_per_second=tokens / seconds,
        prompt_tokens=prompt,
        cached_tokens=cached,
        tokens=tokens,
        hit_rate=cached / prompt if prompt else None,
        goodput=sum(map(slo.kept, shots)) / seconds if slo else None,
        times={
            "ttft": times(shot.ttft for shot in good),
            "itl": times(gap for shot in good for gap in shot.gaps),
            "tpot": times(shot.tpot for shot in good),
            "e2e": times(shot.e2e for shot in good),
        },
    )


def times(values: Iterable[float | None]) -> Times | None:
    known = sorted(value for value in values if value is not None)
    if not known:
        return None
    return Times(sum(known) / len(known), *(quantile(known, share) for share in QUANTILES.values()))


def quantile(ordered: Sequence[float], share: float) -> float:
    """The least value that at least ``share`` of all do not exceed (nearest rank): always one that was measured."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def read_slo(text: str) -> Slo:
    """``ttft=200,tpot=50,e2e=5000``, in milliseconds. Raises ConfigError naming what cannot be."""
    limits: dict[str, float] = {}
    for pair in text.split(","):
        name, _, value = pair.strip().partition("=")
        if name not in ("ttft", "tpot", "e2e"):
            raise ConfigError(f"slo: {name!r} is none of ttft, tpot, e2e; write it as ttft=200,tpot=50 (milliseconds)")
        try:
            limits[name] = float(value) / 1000
        except ValueError:
            raise ConfigError(f"slo: {name} must be a number of milliseconds, not {value!r}") from None
        if not limits[name] > 0:
            raise ConfigError(f"slo: {name} must be greater than 0, not {value}")
    return Slo(**limits)
