"""What whoever asked is told of failures that are not theirs."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from sglite.errors import RequestError
from sglite.runtime.runner import DeviceMemoryError
from sglite.runtime.sampler import BadLogitsError

if TYPE_CHECKING:
    from sglite.runtime.tracks import Track

log = logging.getLogger("sglite.engine")


def untold(message: str, error: Exception, request_id: str | None = None) -> RequestError:
    """A failure of our own for whoever asked: its text, which may hold paths and addresses, is in its cause alone."""
    known = f": {error}" if isinstance(error, BadLogitsError) else "; the log says why"
    failure = RequestError(message + known, request_id=request_id)
    failure.__cause__ = error
    return failure


def no_memory(track: Track, error: DeviceMemoryError) -> RequestError:
    log.error("the device has no memory for a step of one row: %s", error)
    return RequestError(
        "the device has no memory for a step of this request alone; start the engine with a smaller kv_tokens",
        request_id=track.job.request.id,
    )
