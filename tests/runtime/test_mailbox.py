"""In order, each once, and whoever is cancelled while he waits takes nothing along."""

from __future__ import annotations

import asyncio

from sglite.runtime.mailbox import Mailbox


def test_things_come_out_as_they_went_in() -> None:
    async def story() -> list[int]:
        box = Mailbox[int]()
        for i in range(3):
            box.put(i)
        assert len(box) == 3
        taker = asyncio.create_task(_taken(box, 6))
        await asyncio.sleep(0)
        for i in range(3, 6):
            box.put(i)
        return await taker

    assert asyncio.run(story()) == list(range(6))


def test_a_cancelled_wait_loses_nothing() -> None:
    async def story() -> list[int]:
        box = Mailbox[int]()
        waiting = asyncio.create_task(box.take())
        await asyncio.sleep(0)
        waiting.cancel()
        box.put(1)  # before the cancelled one has had its turn
        await asyncio.gather(waiting, return_exceptions=True)
        box.put(2)
        return await _taken(box, 2)

    assert asyncio.run(story()) == [1, 2]


async def _taken(box: Mailbox[int], count: int) -> list[int]:
    return [await box.take() for _ in range(count)]
