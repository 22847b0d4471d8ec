"""From the engine thread to event loops: answers are gathered during a step and handed over once per loop.

One ``call_soon_threadsafe`` per step and loop, however many requests it carries: waking a loop costs more than all the
rest of a small chunk.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from sglite.protocol import Chunk
from sglite.runtime.mailbox import Mailbox

if TYPE_CHECKING:
    from sglite.runtime.tracks import Job

Item = Chunk | Exception


class Stream:
    """A request's Sink on the engine's side, its queue of answers on the caller's."""

    def __init__(self, outbox: Outbox, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.job: Job | None = None
        self._outbox = outbox
        self._items: Mailbox[Item] = Mailbox()

    def chunk(self, chunk: Chunk) -> None:
        self._outbox.add(self, chunk)

    def fail(self, error: Exception) -> None:
        self._outbox.add(self, error)

    def deliver(self, item: Item) -> None:
        """On the caller's loop."""
        self._items.put(item)

    async def next(self) -> Chunk:
        """The next chunk; raises what the request failed with."""
        item = await self._items.take()
        if isinstance(item, Exception):
            raise item
        return item


class Outbox:
    """Owned by the engine thread. ``orphaned`` is told of streams whose event loop is gone."""

    def __init__(self, orphaned: Callable[[Stream], None]) -> None:
        self._orphaned = orphaned
        self._items: dict[asyncio.AbstractEventLoop, list[tuple[Stream, Item]]] = {}

    def add(self, stream: Stream, item: Item) -> None:
        batch = self._items.get(stream.loop)
        if batch is None:
            batch = self._items[stream.loop] = []
        batch.append((stream, item))

    def flush(self) -> None:
        items, self._items = self._items, {}
        for loop, batch in items.items():
            try:
                loop.call_soon_threadsafe(_deliver, batch)
            except RuntimeError:  # the loop was closed under its requests
                for stream, _ in batch:
                    self._orphaned(stream)


def _deliver(batch: list[tuple[Stream, Item]]) -> None:
    for stream, item in batch:
        stream.deliver(item)
