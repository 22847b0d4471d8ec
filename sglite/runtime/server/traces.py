"""What programs did lately, call by call: for the page, in the form in which ``sglite run --trace`` writes it.

Counts and times only: no text is kept. One key's programs are not another's to see.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import asdict, dataclass, field
from typing import Any

from sglite.protocol import GenerateRequest, Usage

MAX_PROGRAMS = 100
MAX_CALLS = 1000


@dataclass(frozen=True, slots=True)
class CallRecord:
    """One request that has ended. ``began``: wall clock; other times are seconds. ``program`` is the request's own id
    where it belongs to none."""

    program: str
    branch: str
    request_id: str
    namespace: str
    kind: str
    constrained: bool
    last: bool
    began: float
    ttft: float | None
    wall: float
    finish: str
    usage: Usage = field(default_factory=Usage)

    def shown(self, program_began: float) -> dict[str, Any]:
        counts = asdict(self.usage)
        return {
            "name": None,
            "kind": self.kind,
            "branch": self.branch,
            "request_id": self.request_id,
            "start": self.began - program_began,
            "ttft": self.ttft,
            "wall": self.wall,
            "finish": self.finish,
            "new_tokens": counts.pop("completion_tokens"),
            **counts,
        }


def kind_of(request: GenerateRequest) -> str:
    if request.candidates:
        return "select"
    return "score" if request.sampling.max_new_tokens == 0 else "gen"


class Traces:
    """The latest programs, and the first calls of each; what they take is bounded."""

    def __init__(self) -> None:
        self._programs: OrderedDict[tuple[str, str], list[CallRecord]] = OrderedDict()

    def add(self, record: CallRecord) -> None:
        key = (record.namespace, record.program)
        calls = self._programs.setdefault(key, [])
        self._programs.move_to_end(key)
        if len(calls) < MAX_CALLS:
            calls.append(record)
        if len(self._programs) > MAX_PROGRAMS:
            self._programs.popitem(last=False)

    def programs(self, namespace: str) -> list[dict[str, Any]]:
        """The caller's programs, the latest first."""
        found = [(name, calls) for (space, name), calls in self._programs.items() if owns(namespace, space)]
        return [_summary(name, calls) for name, calls in reversed(found)]

    def program(self, namespace: str, name: str) -> dict[str, Any] | None:
        for (space, known), calls in self._programs.items():
            if known == name and owns(namespace, space):
                began = min(call.began for call in calls)
                ordered = sorted(calls, key=lambda call: call.began)
                return {**_summary(name, calls), "calls": [call.shown(began) for call in ordered], "divergences": []}
        return None


def owns(namespace: str, space: str) -> bool:
    """A caller's namespace may be narrowed by what the client says."""
    return space == namespace or space.startswith(f"{namespace}/")


def _summary(name: str, calls: list[CallRecord]) -> dict[str, Any]:
    began = min(call.began for call in calls)
    return {
        "program": name,
        "function": "program" if len(calls) > 1 or calls[0].branch else "request",
        "began": began,
        "age": time.time() - began,
        "count": len(calls),
        "branches": len({call.branch for call in calls}),
        "prompt_tokens": sum(call.usage.prompt_tokens for call in calls),
        "cached_tokens": sum(call.usage.cached_tokens for call in calls),
        "new_tokens": sum(call.usage.completion_tokens for call in calls),
        "forced_tokens": sum(call.usage.forced_tokens for call in calls),
    }
