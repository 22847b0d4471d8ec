"""A reader's place in text that is still growing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglite.lang.branch import Branch
from sglite.lang.variables import Variable, again
from sglite.lang.waiting import Home, Signal


@dataclass(slots=True)
class Pieces:
    """``over`` says that no more will come; ``error`` what it ended with; ``stop`` ends the generation early."""

    growing: list[str]
    signal: Signal
    home: Home
    over: Callable[[], bool]
    error: Callable[[], BaseException | None]
    abort: Callable[[], None]
    meta: Callable[[], Any]
    read: int = 0

    def block(self) -> str:
        """The next text, or nothing at the end. Not on the loop that produces it."""
        if not self._ready():
            self.home.refuse_blocking("waiting for text")
            self.signal.block_until(self._ready)
        return self._next()

    async def wait(self) -> str:
        await self.signal.until(self._ready)
        return self._next()

    def check(self) -> None:
        """Raises what the text ended with, if it was a failure."""
        error = self.error()
        if isinstance(error, Exception):
            raise again(error)

    def stop(self) -> None:
        """By a reader who may not have read all."""
        if not self.over():
            self.abort()

    def _ready(self) -> bool:
        return self.over() or len(self.growing) > self.read

    def _next(self) -> str:
        end = len(self.growing)
        text = "".join(self.growing[self.read : end])
        self.read = end
        return text


def variable_pieces(branch: Branch, variable: Variable) -> Pieces:
    return Pieces(
        variable.pieces,
        variable.signal,
        branch.run.home,
        over=variable.is_done,
        error=lambda: variable.error,
        abort=lambda: branch.stop(variable),
        meta=lambda: None if variable.meta is None else variable.meta(),
    )


def branch_pieces(branch: Branch) -> Pieces:
    """The text of a whole state of a program that streams."""
    return Pieces(
        branch.log,
        branch.progress,
        branch.run.home,
        over=branch.is_over,
        error=branch.failure,
        abort=lambda: branch.cancel("the reader of its text has stopped"),
        meta=lambda: None,
    )
