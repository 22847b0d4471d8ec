"""Python's search for garbage, in a process that serves: it holds everybody up, so it looks at little and seldom."""

from __future__ import annotations

import gc

_THRESHOLDS = (1_000, 5, 100)
"""New objects until the youngest are looked at, and how often those until the older ones are. Nearly all that requests
leave behind goes without a search; one of 50,000 objects holds everybody up for 50 ms, so each looks at few."""


def keep_everything() -> None:
    """Whatever is here now (modules, routes, a model) stays, and is never looked at again."""
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
