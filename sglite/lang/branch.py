"""A branch: one line of a program, its queue of nodes, and who works through it.

Appending never waits. Nodes that need nothing from outside (text, turns, forks) are executed by whoever appends them,
when nothing is before them; all else is done by a task on the branch's event loop. ``_busy`` says who may touch the
transcript: whoever sets it under the lock owns the branch until the queue is empty.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections import deque
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from typing import Literal

from sglite.errors import AbortedError, ProgramError, SgliteError
from sglite.lang.calls import Call
from sglite.lang.interpreter import HANDLERS, abandon, describe
from sglite.lang.nodes import (
    Concatenate,
    Expr,
    ForkPoint,
    Gather,
    Gen,
    RoleBegin,
    RoleEnd,
    ScopeEnd,
    Select,
)
from sglite.lang.run import Run
from sglite.lang.transcript import Mark, Transcript
from sglite.lang.turns import Turns
from sglite.lang.variables import Site, Variable, located
from sglite.lang.waiting import Signal, take_back_cancellation
from sglite.lang.wording import as_written
from sglite.protocol import ProgramInfo

Item = tuple[Expr, Variable | None, Site | None]

_DEFINING = frozenset({Gen, Select, ScopeEnd})
_TURNING = frozenset({RoleBegin, RoleEnd})
_CALLING = frozenset({Gen, Select})
_JOINING = (Gather, Concatenate)
_LEADING_TO_CALLS = frozenset({Gen, Select, ForkPoint})


class Branch:
    """The author appends to it and reads its variables; the rest happens as its turn comes."""

    def __init__(self, run: Run, name: str, *, held: bool = False) -> None:
        self.run = run
        self.name = name
        self.variables: dict[str, Variable] = {}
        self.own: dict[str, None] = {}
        """Names that were defined here, in order; those inherited from the parent are not among them."""
        self.role: str | None = None
        """The turn that is open where the author stands."""
        self.ended = False
        self.joined = False
        self.error: SgliteError | None = None
        self.progress = Signal()
        """Notified when the branch becomes idle, and for each piece of text when the run streams."""
        self.log: list[str] = []

        self.transcript = Transcript()
        self.turns = Turns()
        self.born: Mark | None = None
        self.marks: dict[str, Mark] = {}
        self.generating: Variable | None = None

        self._lock = threading.Lock()
        self._queue: deque[Item] = deque()
        self._busy = held
        self._task: asyncio.Task[None] | None = None
        self._request_id: str | None = None
        self._program = ProgramInfo(run.id, name)
        self._foreseen = iter(run.foresight.calls.get(name, ()))
        self._called = False
        self._children: list[weakref.ref[Branch]] = []

    # ---- the author's side

    def append(self, row: Sequence[Expr], site: Site | None) -> None:
        """Checks what can be checked where the author stands, and queues the rest. Raises ProgramError."""
        if self.ended:
            raise ProgramError("this state has ended (joined, cancelled or returned); nothing can be appended to it")
        self._follow_turns(row)
        for node in row:
            variable = self._declare(node, site) if type(node) in _DEFINING else None
            self._queue.append((node, variable, site))
        with self._lock:
            if self._busy:
                return
            self._busy = True
        self._advance()

    def _follow_turns(self, row: Sequence[Expr]) -> None:
        role = self.role
        for node in row:
            if type(node) not in _TURNING:
                continue
            if isinstance(node, RoleBegin):
                if role is not None:
                    raise ProgramError(f"the {role} turn is still open: a turn cannot be inside another")
                role = node.role
            elif isinstance(node, RoleEnd):
                if role != node.role:
                    raise ProgramError(f"no {node.role} turn is open here, so it cannot end (open: {role})")
                role = None
        self.role = role

    def _declare(self, node: Expr, site: Site | None) -> Variable:
        """The variable that ``node`` will fill, known by its name from now on."""
        assert isinstance(node, (Gen, Select, ScopeEnd))
        variable = Variable(node.name, site)
        if isinstance(node, Gen):
            variable.typed = node.typed
            if node.reasoning is not None:
                variable.thinking = Variable(node.name and f"{node.name}_reasoning_content", site)
                self.put(variable.thinking)
        self.put(variable)
        return variable

    def put(self, variable: Variable) -> None:
        """From now on its name means this variable."""
        if variable.name is not None:
            self.variables[variable.name] = variable
            self.own[variable.name] = None
            self.run.changed.notify()

    def fork(self, count: int, site: Site | None) -> tuple[Branch, ...]:
        """Children that continue from here as soon as everything appended so far is done."""
        first = len(self._children)
        prefix = f"{self.name}." if self.name else ""
        children = tuple(self._child(f"{prefix}{first + i}") for i in range(count))
        self.append((ForkPoint(children),), site)
        return children

    def _child(self, name: str) -> Branch:
        child = Branch(self.run, name, held=True)
        child.variables = dict(self.variables)
        child.role = self.role
        self._children.append(weakref.ref(child))
        return child

    def is_idle(self) -> bool:
        return not self._busy

    async def settle(self) -> None:
        """Until it is idle, and its children with it."""
        await self.progress.until(self.is_idle)
        for child in self._living():
            await child.settle()

    def failure(self) -> BaseException | None:
        """What went wrong first, here or in the program's function."""
        body = self.run.body
        return body.error if body.failed_first else self.error or body.error

    def is_over(self) -> bool:
        """Nothing is running, and nobody will append anything."""
        return self.ended and not self._busy

    def end(self) -> None:
        """Nobody will append to it any more."""
        self.ended = True
        self.progress.notify()
        self._tell_end()

    def finish(self) -> None:
        """The program's function is over, and with it this branch and its children."""
        self.end()
        for child in self._living():
            child.finish()

    def has_children(self) -> bool:
        """Whether anybody still holds a branch that was forked here."""
        return any(child() is not None for child in self._children)

    def cancel(self, reason: str = "the program was cancelled") -> None:
        """Aborts what is running, fails what is queued, here and in all children. Callable from any thread."""
        with suppress(ProgramError):  # the loop is gone, and with it everything that ran
            self.run.home.call(self._cancel, reason)

    def stop(self, variable: Variable) -> None:
        """Ends one generation early: it keeps the text it has, and the program goes on. Callable from any thread."""
        variable.stopped = True
        with suppress(ProgramError):
            self.run.home.call(self._interrupt, variable)

    # ---- for the nodes' handlers

    def write(self, text: str) -> None:
        """Shows text to whoever streams the whole branch."""
        if self.run.stream and text:
            self.log.append(text)
            self.progress.notify()

    def launch(self, parent: Branch) -> None:
        """Begins where the parent stands now."""
        self.transcript = parent.transcript.copy()
        self.turns = parent.turns.copy()
        self.marks = dict(parent.marks)
        self.born = self.transcript.mark()
        self._advance()

    def abandon(self, error: SgliteError) -> None:
        """The parent failed before this child could begin."""
        self.error = error
        self._advance()

    def start_call(self, kind: Literal["gen", "select"], name: str | None, site: Site | None) -> Call:
        call = self.run.trace.start(kind, name, self.name, site)
        self._request_id = call.request_id
        return call

    def program(self) -> ProgramInfo:
        """What the requests of the next gen or select say of their place in the program."""
        info, foreseen = self._program, next(self._foreseen, None)
        if foreseen is not None:
            info = ProgramInfo(self.run.id, self.name, *foreseen)
        elif self.ended and not any(type(item[0]) in _LEADING_TO_CALLS for item in self._queue):
            info = ProgramInfo(self.run.id, self.name, last=True)
        self._called = not info.last
        return info

    # ---- working through the queue

    def _advance(self) -> None:
        """By the owner: does what can be done at once, and leaves the rest to a task."""
        queue = self._queue
        while True:
            while queue and self._is_instant(queue[0][0]):
                item = queue.popleft()
                try:
                    waiting = self._start(item)
                    assert waiting is None, "an instant node does not wait"
                except Exception as error:
                    self._fail(item, error)
                except BaseException:
                    self._fail(item, AbortedError("the program was interrupted"))
                    self._advance()
                    raise
            if queue:
                self.run.home.call(self._begin)
                return
            if self._release():
                return

    def _release(self) -> bool:
        """Gives the branch up, unless something was appended meanwhile."""
        with self._lock:
            if self._queue:
                return False
            self._busy = False
        self.progress.notify()
        if self.ended:
            self._tell_end()
        return True

    def _tell_end(self) -> None:
        """A backend that keeps what a branch may come back to hears that this one will not, if it has called at all."""
        if self._called and self.is_over():
            self._called = False
            self.run.tell_end(self.name)

    def _is_instant(self, node: Expr) -> bool:
        kind = type(node)
        if self.error is not None:
            return True
        if kind in _TURNING:
            return self.run.info is not None
        if kind in _CALLING:
            return kind is Gen and self.run.answer is not None and self.run.info is not None
        return not isinstance(node, _JOINING) or all(child.is_idle() for child in node.children)

    def _begin(self) -> None:
        self._task = self.run.home.start(self._work(), self._after_work)

    def _after_work(self, task: asyncio.Task[None]) -> None:
        """A task that was cancelled before its first step has done nothing and still owns the branch."""
        if task.cancelled():
            self._task = None
            self.error = self.error or AbortedError("the program was cancelled")
            self._advance()

    async def _work(self) -> None:
        if self.run.info is None:
            await self._learn()
        while True:
            while self._queue:
                item = self._queue.popleft()
                try:
                    waiting = self._start(item)
                    if waiting is not None:
                        await waiting
                except asyncio.CancelledError:
                    take_back_cancellation()
                    self._fail(item, AbortedError("the program was cancelled"))
                except Exception as error:
                    self._fail(item, error)
            task, self._task = self._task, None
            if self._release():
                return
            self._task = task

    async def _learn(self) -> None:
        try:
            await self.run.load()
        except asyncio.CancelledError:
            take_back_cancellation()
            self._fail(self._queue[0], AbortedError("the program was cancelled"))
        except Exception as error:
            self._fail(self._queue[0], error)

    def _start(self, item: Item) -> Awaitable[None] | None:
        """Executes a node at once, or returns what has to be awaited for it. After a failure nodes are abandoned."""
        if self.error is not None:
            abandon(item[0], item[1], self.error)
            return None
        self._request_id = None
        return HANDLERS[type(item[0])](self, *item)

    def _fail(self, item: Item, error: Exception) -> None:
        """The branch ends here: this node and everything after it fail with the same error."""
        node, variable, site = item
        if self.error is None:
            self.error = located(as_written(error, node), describe(node), site, self._request_id)
        abandon(node, variable, self.error)
        self.run.changed.notify()

    def _cancel(self, reason: str) -> None:
        self.ended = True
        if self._busy and self.error is None:
            self.error = AbortedError(reason)
        if self._task is not None:
            self._task.cancel(reason)
        for child in self._living():
            child._cancel(reason)

    def _interrupt(self, variable: Variable) -> None:
        if self._task is not None and self.generating is variable:
            self._task.cancel("the reader has stopped")

    def _living(self) -> list[Branch]:
        return [child for ref in list(self._children) if (child := ref()) is not None]
