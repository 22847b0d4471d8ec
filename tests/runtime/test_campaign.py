"""Random crowds: programs with forks, priorities, aborts, small pools. Whoever is answered is answered as if alone."""

from __future__ import annotations

import asyncio
import random
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

import pytest

from sglite.errors import SgliteError
from sglite.protocol import Chunk, Constraint, GenerateRequest, LogprobParams, ProgramInfo, SamplingParams, Tokens
from sglite.runtime.engine import Engine
from sglite.runtime.testing import scripted_engine

CROWD = 24


@dataclass(frozen=True)
class Answer:
    """All that a caller sees of one sample but for times and chances."""

    ids: tuple[int, ...]
    text: str
    finish: Any
    logprobs: tuple[Any, ...]
    prompt_logprobs: tuple[Any, ...]
    completion_tokens: int


def sampling(rng: random.Random) -> SamplingParams:
    n = rng.choice((1, 1, 1, 2, 3))
    return SamplingParams(
        max_new_tokens=rng.choice((0, 1, 3, 12, 40)),
        temperature=rng.choice((0.0, 0.7, 2.0)),
        top_k=rng.choice((-1, 1, 8)),
        top_p=rng.choice((1.0, 0.8)),
        n=n,
        best_of=rng.choice((None, None, n + 2)),
        seed=rng.randrange(1000),
        stop=rng.choice(((), (), ("a",), ("zz", "b"))),
        stop_regex=rng.choice(((), (), (r"[A-Z]\d",), (r"[a-f]+x",))),
        frequency_penalty=rng.choice((0.0, 0.0, 0.5)),
        presence_penalty=rng.choice((0.0, 0.0, -0.5)),
        repetition_penalty=rng.choice((1.0, 1.0, 1.3)),
        ignore_eos=True,
    )


def request(rng: random.Random, i: int) -> GenerateRequest:
    """Prompts share beginnings, programs have a few calls on branches below one another."""
    program = f"p{rng.randrange(6)}"
    branch = rng.choice(("", "", "0", "0.1", "1"))
    stem = random.Random(program).choices(range(256), k=40)
    own = random.Random(program + branch).choices(range(256), k=rng.randrange(1, 30))
    params = sampling(rng)
    constraint = Constraint("regex", "[a-f]{2,9}") if rng.random() < 0.15 else None
    if constraint is not None:
        params = replace(params, max_new_tokens=12, stop=(), stop_regex=())
    logprobs = LogprobParams(
        output=rng.random() < 0.7, top=rng.choice((0, 2)), prompt_start=rng.choice((None, 0, 20)), ids=(65,)
    )
    return GenerateRequest(
        f"r{i}",
        (Tokens((*stem[: rng.randrange(1, 41)], *own)),),
        params,
        constraint=constraint,
        logprobs=logprobs if rng.random() < 0.3 and params.best_of is None else None,
        program=ProgramInfo(program, branch, last=rng.random() < 0.2) if rng.random() < 0.8 else None,
        priority=rng.choice((0, 0, 0, 1, 5)),
    )


async def answers(engine: Engine, asked: GenerateRequest, patience: int = 10**9) -> list[Answer] | None:
    """None when the caller lost patience after so many chunks."""
    chunks: list[Chunk] = []
    async with aclosing(engine.generate(asked)) as stream:
        async for chunk in stream:
            chunks.append(chunk)
            if len(chunks) >= patience:
                return None
    return [_answer([chunk for chunk in chunks if chunk.index == i]) for i in range(asked.sampling.n)]


def _answer(chunks: list[Chunk]) -> Answer:
    end = chunks[-1]
    assert end.finish is not None and end.usage is not None
    return Answer(
        tuple(i for chunk in chunks for i in chunk.ids),
        "".join(chunk.text for chunk in chunks),
        end.finish,
        tuple(entry for chunk in chunks for entry in chunk.logprobs),
        end.prompt_logprobs,
        end.usage.completion_tokens,
    )


async def call(engine: Engine, rng: random.Random, asked: GenerateRequest) -> list[Answer] | SgliteError | None:
    """One caller: comes at some time, may leave before, during or after, or give its program up."""
    for _ in range(rng.randrange(30)):
        await asyncio.sleep(0)
    fate = rng.random()
    if fate < 0.1:
        asked = replace(asked, deadline=rng.choice((1e-6, 0.003)))
    try:
        if fate < 0.3:
            task = asyncio.ensure_future(answers(engine, asked, rng.choice((1, 2, 5))))
            for _ in range(rng.randrange(60)):
                await asyncio.sleep(0)
            task.cancel() if rng.random() < 0.5 else None
            await asyncio.wait([task])
            return None if task.cancelled() else task.result()
        answer = await answers(engine, asked)
        if rng.random() < 0.1 and asked.program is not None:
            await engine.end_program(asked.program.program, asked.program.branch)
        return answer
    except SgliteError as error:
        return error


async def crowd(engine: Engine, rng: random.Random, requests: list[GenerateRequest]) -> list[Any]:
    calls = [call(engine, random.Random(rng.random()), asked) for asked in requests]
    given = await asyncio.gather(*calls)
    while (await engine.stats())["running"]:
        await asyncio.sleep(0.001)
    return given


@pytest.mark.parametrize("seed", range(8))
def test_a_crowd_is_answered_as_each_would_be_alone(seed: int) -> None:
    rng = random.Random(seed)
    requests = [request(rng, i) for i in range(CROWD)]
    options = {
        "page_size": rng.choice((1, 4, 16)),
        "max_running": rng.choice((2, 5, 16)),
        "max_step_tokens": rng.choice((16, 100, 2048)),
        "policy": rng.choice(("program", "fcfs", "priority", "longest-prefix", "dfs-weight")),
        "overlap": rng.random() < 0.3,
        "kv_tokens": rng.choice((128, 192, 512)),
    }
    with scripted_engine(**options) as engine:
        given = asyncio.run(crowd(engine, rng, requests))
        engine._thread._core.scheduler.check()
        stats = asyncio.run(engine.stats())
    assert stats["waiting"] == 0
    with scripted_engine(prefix_cache=False) as alone:
        for asked, answer in zip(requests, given, strict=True):
            if isinstance(answer, list):
                assert answer == asyncio.run(answers(alone, replace(asked, program=None))), (asked, options)
            elif answer is not None:
                assert type(answer).__name__ in ("DeadlineError", "CapacityError"), answer
    assert sum(isinstance(answer, list) for answer in given) > CROWD // 3
