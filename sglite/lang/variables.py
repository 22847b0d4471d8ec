"""A program's variables: filled piece by piece on the event loop, read from anywhere."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from sglite.errors import ProgramError, RequestError, SgliteError
from sglite.lang.nodes import Typed
from sglite.lang.waiting import Signal

Site = tuple[str, int]
"""File and line of the program that appended something."""


class Variable:
    """``pieces`` grow while it streams; ``done`` comes with a value or an error and is final.

    ``meta`` gives what is known about its making; ``typed`` turns its text into what the author asked for; ``parts``
    are the variables it was gathered from; ``thinking`` is where its reasoning goes.
    """

    __slots__ = (
        "done", "error", "meta", "name", "parts", "pieces", "signal", "site", "stopped", "thinking", "typed", "value",
    )  # fmt: skip

    def __init__(self, name: str | None, site: Site | None = None) -> None:
        self.name = name
        self.site = site
        self.pieces: list[str] = []
        self.meta: Callable[[], Any] | None = None
        self.typed: Typed | None = None
        self.parts: tuple[Variable, ...] = ()
        self.thinking: Variable | None = None
        self.value: Any = None
        self.error: Exception | None = None
        self.done = False
        self.stopped = False
        self.signal = Signal()

    def is_done(self) -> bool:
        return self.done

    def add(self, piece: str) -> None:
        self.pieces.append(piece)
        self.signal.notify()

    def set(self, value: Any) -> None:
        if not self.pieces and isinstance(value, str):
            self.pieces.append(value)
        self.value = value
        self.done = True
        self.signal.notify()

    def fail(self, error: Exception) -> None:
        if not self.done:
            self.error = error
            self.done = True
            self.signal.notify()
        if self.thinking is not None:
            self.thinking.fail(error)

    def read(self) -> Any:
        """The value of a finished variable, or what prevented it."""
        assert self.done
        if self.error is not None:
            raise again(self.error)
        return self.value

    def read_typed(self) -> Any:
        """As ``schema``, ``dtype`` or tools want it. Raises ProgramError for text that does not fit."""
        value = self.read()
        if self.parts:
            return [part.read_typed() for part in self.parts]
        if self.typed is None:
            return value
        return [self._convert(text) for text in value] if isinstance(value, list) else self._convert(value)

    def _convert(self, text: str) -> Any:
        assert self.typed is not None
        try:
            return self.typed(text)
        except ValueError as error:
            cut = self._cut_short()
            raise ProgramError(f"the value of {self.name!r} does not fit its type{cut}: {text!r}: {error}") from error

    def _cut_short(self) -> str:
        meta = self.meta() if self.meta is not None else None
        first = meta[0] if isinstance(meta, list) and meta else meta
        reason = first.get("finish_reason") if isinstance(first, dict) else None
        return " (it was cut off by max_tokens)" if reason and reason["type"] == "length" else ""


def again(error: Exception) -> Exception:
    """A fresh copy to raise, so that readers do not share a traceback; the original is its cause."""
    fresh = copy.copy(error)
    fresh.__cause__ = error
    return fresh


def located(error: BaseException, what: str, site: Site | None, request_id: str | None) -> SgliteError:
    """``error`` with the program's own line and the request in its message; foreign errors become RequestError."""
    file, line = site or ("?", 0)
    where = f"{what} at {file.rpartition('/')[2]}:{line}"
    request_id = getattr(error, "request_id", None) or request_id
    suffix = f" (request {request_id})" if request_id and request_id not in str(error) else ""
    if isinstance(error, SgliteError):
        placed = copy.copy(error)
        placed.args = (f"{where}: {error}{suffix}",)
        if isinstance(placed, RequestError):
            placed.request_id = request_id
    else:
        placed = RequestError(f"{where}: {type(error).__name__}: {error}{suffix}", request_id=request_id)
    placed.__cause__ = error
    if site:
        placed.add_note(f'appended in File "{file}", line {line}')
    return placed


def unknown(name: str, known: list[str]) -> ProgramError:
    names = ", ".join(known) or "none"
    return ProgramError(f"no variable {name!r} has been generated or set here; known: {names}")
