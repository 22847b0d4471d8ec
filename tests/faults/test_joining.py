"""What a worker joins says what its parts said, and its first word comes at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace

import pytest

from sglite.protocol import Chunk, Finish, TokenLogprob, Usage
from sglite.runtime.pace import Pace
from sglite.runtime.worker.joining import joined

CHUNKS = [
    Chunk("a", (1,), 0, (TokenLogprob(1, -0.5),)),
    Chunk("b", (2,), 1),
    Chunk("c", (3, 4), 0, (TokenLogprob(3, -1.0), TokenLogprob(4, -2.0))),
    Chunk("d", (5,), 1, uncovered=1, finish=Finish("stop", "d"), usage=Usage(prompt_tokens=3, completion_tokens=2)),
    Chunk("", (), 0, finish=Finish("length"), usage=Usage(prompt_tokens=3, completion_tokens=3)),
]


async def source() -> AsyncGenerator[Chunk]:
    for chunk in CHUNKS:
        yield chunk


async def collected() -> list[Chunk]:
    return [chunk async for chunk in joined(source())]


def test_the_first_chunk_then_one_a_sample() -> None:
    first, b, a = asyncio.run(collected())
    assert first == CHUNKS[0]
    assert b == replace(CHUNKS[3], text="bd", ids=(2, 5))
    assert a == replace(CHUNKS[4], text="c", ids=(3, 4), logprobs=CHUNKS[2].logprobs)


def test_a_failure_passes_through() -> None:
    async def failing() -> AsyncGenerator[Chunk]:
        yield CHUNKS[0]
        raise KeyError("x")

    async def story() -> None:
        seen = joined(failing())
        assert await anext(seen) == CHUNKS[0]
        with pytest.raises(KeyError):
            await anext(seen)

    asyncio.run(story())


def test_bursts_let_others_have_a_turn() -> None:
    """Twenty at once at three a turn, and a callback of somebody else's runs between them; all come, in order."""

    async def story() -> list[object]:
        done: list[object] = []
        pace = Pace(3)
        for i in range(20):
            pace.soon(lambda i=i: done.append(i))
        asyncio.get_running_loop().call_soon(done.append, "other")
        assert (done, pace.waiting) == ([], 20)
        for _ in range(3):
            await asyncio.sleep(0)
        pace.soon(lambda: pace.soon(lambda: done.append("late")))
        pace.finish()
        return done

    done = asyncio.run(story())
    assert done.index("other") == 3
    assert [x for x in done if x != "other"] == [*range(20), "late"]
