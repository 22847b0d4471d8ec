"""How late the event loop is, measured by one who should wake up often."""

from __future__ import annotations

import asyncio

from sglite.runtime.server.histogram import LoopHistogram

_PERIOD = 0.02


async def measure_lag(lag: LoopHistogram) -> None:
    """For ever."""
    clock = asyncio.get_running_loop().time
    while True:
        due = clock() + _PERIOD
        await asyncio.sleep(_PERIOD)
        lag.observe(max(0.0, clock() - due))
