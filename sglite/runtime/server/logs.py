"""Log lines of the server, for people or as JSON, each with the id of the request it belongs to."""

from __future__ import annotations

import json
import logging
import random
import re
import sys
import time
from contextvars import ContextVar
from typing import Any

request_id: ContextVar[str | None] = ContextVar("request_id", default=None)
"""Set where a request comes in; what it starts inherits it."""
traced_headers: ContextVar[dict[str, str] | None] = ContextVar("traced_headers", default=None)
"""The headers by which a client says to which trace of its own a request belongs."""

_ID = re.compile(r"[A-Za-z0-9_.\-]{1,64}\Z")
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def request_id_of(given: str) -> str:
    """The id that a client chose, or one of ours; no secret, and os.urandom costs more."""
    return given if _ID.match(given) else f"{random.getrandbits(128):032x}"


def set_up(format: str, level: str) -> None:
    """Send the log lines of sglite and uvicorn to standard error. A log that cannot be written stops nothing."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if format == "json" else TextLines())
    logging.raiseExceptions = False
    for name in ("sglite", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(level.upper() if name == "sglite" else logging.WARNING)
        logger.propagate = False


class JsonLines(logging.Formatter):
    """One JSON object a line: time, level, logger, message, and whatever else the line says of itself."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_extras(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class TextLines(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        extras = " ".join(f"{name}={value}" for name, value in _extras(record).items())
        head, newline, rest = text.partition("\n")
        return f"{head} {extras}{newline}{rest}" if extras else text


def _extras(record: logging.LogRecord) -> dict[str, Any]:
    own = {name: value for name, value in vars(record).items() if name not in _STANDARD}
    known = request_id.get()
    return {"request_id": known, **own} if known else own
