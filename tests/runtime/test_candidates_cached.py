"""How much of a scoring request's prompt was cached is told right, whichever of its branches goes first."""

from __future__ import annotations

import asyncio

import pytest

from sglite.protocol import GenerateRequest, SamplingParams, Text
from sglite.runtime.engine import Engine
from sglite.runtime.testing import scripted_engine

TEXT = "hello world " * 20


async def cached(engine: Engine, number: int) -> int:
    sampling = SamplingParams(max_new_tokens=0, temperature=0)
    request = GenerateRequest(f"r{number}", (Text(TEXT),), sampling, candidates=("yes", "no"))
    (usage,) = [chunk.usage async for chunk in engine.generate(request) if chunk.usage]
    return usage.cached_tokens


@pytest.mark.parametrize("policy", ["program", "fcfs"])
def test_only_the_first_request_computes_the_prompt(policy: str) -> None:
    async def run(engine: Engine) -> list[int]:
        return [await cached(engine, number) for number in range(6)]

    with scripted_engine(context_length=1024, policy=policy) as engine:
        first, *others = asyncio.run(run(engine))
    assert first == 0
    assert min(others) >= len(TEXT) - 16
