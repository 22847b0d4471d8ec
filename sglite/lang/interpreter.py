"""What nodes mean: a Branch is one line of a program, its queue of nodes, and the task that works through them.

Appending never waits. Nodes that need nothing from outside (text, turns, forks) are executed by whoever appends them,
when nothing is before them; all else is done by a task on the branch's event loop. ``_busy`` says who may touch the
transcript: whoever sets it under the lock owns the branch until the queue is empty.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, Literal, Protocol

from sglite.errors import AbortedError, ProgramError, SgliteError
from sglite.lang import nodes as n
from sglite.lang.calls import Call
from sglite.lang.generation import Generation, gather
from sglite.lang.meta import meta_of
from sglite.lang.options import plan
from sglite.lang.requests import check, sendable
from sglite.lang.run import Run
from sglite.lang.select import decide, scoring_request
from sglite.lang.transcript import Mark, Transcript
from sglite.lang.turns import Turns
from sglite.lang.variables import Site, Variable, located
from sglite.lang.waiting import Signal
from sglite.protocol import Chunk, GenerateRequest, ProgramInfo, Prompt, prompt_text


class Sender(Protocol):
    """Sends a request made of ``prompt`` and GenerateRequest's fields, and returns all its chunks."""

    async def __call__(self, prompt: Prompt, **request: Any) -> list[Chunk]: ...


Item = tuple[n.Expr, Variable | None, Site | None]


class Branch:
    """One line of a program. The author appends to it and reads its variables; the rest happens as its turn comes."""

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

        self._lock = threading.Lock()
        self._queue: deque[Item] = deque()
        self._busy = held
        self._task: asyncio.Task[None] | None = None
        self._generating: Variable | None = None
        self._request_id: str | None = None
        self._transcript = Transcript()
        self._turns = Turns()
        self._born: Mark | None = None
        self._marks: dict[str, Mark] = {}
        self._children: list[weakref.ref[Branch]] = []

    # ------------------------------------------------------------------------------------------------ the author's side

    def append(self, row: Sequence[n.Expr], site: Site | None) -> None:
        """Checks what can be checked where the author stands, and queues the rest. Raises ProgramError."""
        if self.ended:
            raise ProgramError("this state has ended (joined, cancelled or returned); nothing can be appended to it")
        self.role = self._role_after(row)
        self._queue.extend([(node, self._declare(node, site), site) for node in row])
        with self._lock:
            if self._busy:
                return
            self._busy = True
        self._advance()

    def _role_after(self, row: Sequence[n.Expr]) -> str | None:
        role = self.role
        for node in row:
            if isinstance(node, n.RoleBegin):
                if role is not None:
                    raise ProgramError(f"the {role} turn is still open: a turn cannot be inside another")
                role = node.role
            elif isinstance(node, n.RoleEnd):
                if role != node.role:
                    raise ProgramError(f"no {node.role} turn is open here, so it cannot end (open: {role})")
                role = None
        return role

    def _declare(self, node: n.Expr, site: Site | None) -> Variable | None:
        """The variable that ``node`` will fill, known by its name from now on."""
        if not isinstance(node, n.Gen | n.Select | n.ScopeEnd):
            return None
        variable = Variable(node.name, site)
        if isinstance(node, n.Gen):
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
        self.append((n.ForkPoint(children),), site)
        return children

    def _child(self, name: str) -> Branch:
        child = Branch(self.run, name, held=True)
        child.variables = dict(self.variables)
        child.role = self.role
        self._children.append(weakref.ref(child))
        return child

    def is_idle(self) -> bool:
        return not self._busy

    def is_over(self) -> bool:
        """Nothing is running, and nobody will append anything."""
        return self.ended and not self._busy

    def text(self) -> str:
        return self._transcript.text()

    def prompt(self) -> Prompt:
        return self._transcript.prompt()

    def messages(self) -> list[dict[str, str]]:
        return self._turns.messages()

    def end(self) -> None:
        """Nobody will append to it any more."""
        self.ended = True
        self.progress.notify()

    def finish(self) -> None:
        """The program's function is over, and with it this branch and its children."""
        self.end()
        for child in [ref() for ref in self._children]:
            if child is not None:
                child.finish()

    def cancel(self, reason: str = "the program was cancelled") -> None:
        """Aborts what is running, fails what is queued, here and in all children. Callable from any thread."""
        with suppress(ProgramError):  # the loop is gone, and with it everything that ran
            self.run.home.call(self._cancel, reason)

    def stop(self, variable: Variable) -> None:
        """Ends one generation early: it keeps the text it has, and the program goes on. Callable from any thread."""
        variable.stopped = True
        with suppress(ProgramError):
            self.run.home.call(self._interrupt, variable)

    # ---------------------------------------------------------------------------------------------------- running nodes

    def _advance(self) -> None:
        """By the owner: does what can be done at once, and leaves the rest to a task."""
        while True:
            while self._queue and self._is_instant(self._queue[0][0]):
                item = self._queue.popleft()
                try:
                    waiting = self._start(item)
                    assert waiting is None, "an instant node does not wait"
                except Exception as error:
                    self._fail(item, error)
            if self._queue:
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
        return True

    def _is_instant(self, node: n.Expr) -> bool:
        if self.error is not None:
            return True
        if isinstance(node, n.Gen | n.Select):
            return False
        if isinstance(node, n.RoleBegin | n.RoleEnd):
            return self.run.info is not None
        if isinstance(node, n.Gather | n.Concatenate):
            return all(child.is_idle() for child in node.children)
        return True

    def _begin(self) -> None:
        self._task = self.run.home.start(self._work())
        self._task.add_done_callback(self._after_work)

    def _after_work(self, task: asyncio.Task[None]) -> None:
        """A task that was cancelled before its first step has done nothing and still owns the branch."""
        if task.cancelled():
            self._task = None
            self.error = self.error or AbortedError("the program was cancelled")
            self._advance()

    async def _work(self) -> None:
        while True:
            while self._queue:
                await self._execute(self._queue.popleft())
            task, self._task = self._task, None
            if self._release():
                return
            self._task = task

    async def _execute(self, item: Item) -> None:
        try:
            if self.run.info is None and self.error is None:
                await self.run.load()
            waiting = self._start(item)
            if waiting is not None:
                await waiting
        except asyncio.CancelledError:
            _uncancel()
            self._fail(item, AbortedError("the program was cancelled"))
        except Exception as error:
            self._fail(item, error)

    def _start(self, item: Item) -> Awaitable[None] | None:
        """Executes a node at once, or returns what has to be awaited for it. After a failure nodes are abandoned."""
        if self.error is not None:
            _abandon(item, self.error)
            return None
        self._request_id = None
        return _HANDLERS[type(item[0])](self, *item)

    def _fail(self, item: Item, error: Exception) -> None:
        """The branch ends here: this node and everything after it fail with the same error."""
        if self.error is None:
            node, _, site = item
            self.error = located(error, _describe(node), site, self._request_id)
        _abandon(item, self.error)
        self.run.changed.notify()

    def _cancel(self, reason: str) -> None:
        self.ended = True
        if self._busy and self.error is None:
            self.error = AbortedError(reason)
        if self._task is not None:
            self._task.cancel(reason)
        for child in [ref() for ref in self._children]:
            if child is not None:
                child._cancel(reason)

    def _interrupt(self, variable: Variable) -> None:
        if self._task is not None and self._generating is variable:
            self._task.cancel("the reader has stopped")

    # --------------------------------------------------------------------------------------------------------- handlers

    def _say(self, node: n.Say, variable: None, site: Site | None) -> None:
        self._transcript.say(node.text)
        self._turns.said(node.text)
        self._write(node.text)

    def _role_begin(self, node: n.RoleBegin, variable: None, site: Site | None) -> None:
        run = self.run
        self._write(self._turns.begin(node.role, self._transcript, run.frames, run.trace.divergences))

    def _role_end(self, node: n.RoleEnd, variable: None, site: Site | None) -> None:
        run = self.run
        self._write(self._turns.end(self._transcript, run.frames, run.trace.divergences))

    def _scope_begin(self, node: n.ScopeBegin, variable: None, site: Site | None) -> None:
        self._marks[node.name] = self._transcript.mark()

    def _scope_end(self, node: n.ScopeEnd, variable: Variable, site: Site | None) -> None:
        variable.set(prompt_text(self._transcript.since(self._marks[node.name])))

    def _fork_point(self, node: n.ForkPoint, variable: None, site: Site | None) -> None:
        self._transcript.prompt()  # closes open text, so that all children share the segment
        for child in node.children:
            child._launch(self)

    def _launch(self, parent: Branch) -> None:
        self._transcript = parent._transcript.copy()
        self._turns = parent._turns.copy()
        self._marks = dict(parent._marks)
        self._born = self._transcript.mark()
        self._advance()

    def abandon(self, error: SgliteError) -> None:
        """The parent failed before this child could begin."""
        self.error = error
        self._advance()

    def _gather(self, node: n.Gather, variable: None, site: Site | None) -> Awaitable[None] | None:
        return _after(node.children, lambda: self._collect(node))

    def _collect(self, node: n.Gather) -> None:
        for name, variable in node.targets.items():
            sources = tuple(child.variables[name] for child in node.children if name in child.own)
            failed = next((source.error for source in sources if source.error is not None), None)
            if failed is not None:
                variable.fail(failed)
                continue
            variable.parts = sources
            variable.meta = _each_meta(sources)
            variable.set([source.value for source in sources])

    def _concatenate(self, node: n.Concatenate, variable: None, site: Site | None) -> Awaitable[None] | None:
        return _after(node.children, lambda: self._take_over(node))

    def _take_over(self, node: n.Concatenate) -> None:
        for child in node.children:
            if child.error is not None:
                raise child.error
            assert child._born is not None, "an idle child has been launched"
            added = child._transcript.since(child._born)
            self._transcript.extend(added)
            self._write(prompt_text(added))

    async def _gen(self, node: n.Gen, variable: Variable, site: Site | None) -> None:
        info = self.run.known_info
        made = plan(self.run.options, node.given)
        check(node, made, info)
        call = self._call("gen", node, site)
        request = GenerateRequest(
            id=call.request_id,
            prompt=sendable(self._transcript.prompt(), info),
            sampling=made.sampling,
            constraint=node.constraint,
            logprobs=made.logprobs,
            program=self._program(),
        )
        self._turns.generated()
        log = self._write if self.run.stream else None
        generation = Generation(call, variable, reasoning=node.reasoning, log=log)
        variable.meta = meta_of(generation, with_text=made.with_text)
        self._generating = variable
        try:
            await generation.collect(self.run.backend.generate(request), made.sampling.n)
        except asyncio.CancelledError:
            if not variable.stopped:
                raise
            _uncancel()
            generation.stop()
        finally:
            self._generating = None
        self._take_answer(generation)
        generation.publish()

    def _take_answer(self, generation: Generation) -> None:
        ids, text, rest = generation.answer()
        if ids and self.run.known_info.capabilities.token_prompts:
            self._transcript.add(ids, text)
            self._transcript.say(rest)
        else:
            self._transcript.say(text + rest)

    async def _select(self, node: n.Select, variable: Variable, site: Site | None) -> None:
        self._turns.generated()
        info = self.run.known_info

        async def send(prompt: Prompt, **request: Any) -> list[Chunk]:
            call = self._call("select", node, site)
            made = scoring_request(call.request_id, prompt, info, program=self._program(), **request)
            return await gather(call, self.run.backend.generate(made))

        decision = await decide(node, self._transcript.prompt(), info, send)
        variable.meta = lambda: decision.meta
        self._transcript.say(decision.choice)
        self._write(decision.choice)
        variable.set(decision.choice)

    def _call(self, kind: Literal["gen", "select"], node: n.Gen | n.Select, site: Site | None) -> Call:
        call = self.run.trace.start(kind, node.name, self.name, site)
        self._request_id = call.request_id
        return call

    def _program(self) -> ProgramInfo:
        coming = any(isinstance(item[0], n.Gen | n.Select | n.ForkPoint) for item in self._queue)
        return ProgramInfo(self.run.id, self.name, last=self.ended and not coming)

    def _write(self, text: str) -> None:
        if self.run.stream and text:
            self.log.append(text)
            self.progress.notify()


def _after(children: Sequence[Branch], act: Callable[[], None]) -> Awaitable[None] | None:
    """Acts at once when the children are done; else the result, awaited, does it when they are."""
    if all(child.is_idle() for child in children):
        act()
        return None
    return _wait_for(children, act)


async def _wait_for(children: Sequence[Branch], act: Callable[[], None]) -> None:
    for child in children:
        await child.progress.until(child.is_idle)
    act()


def _each_meta(variables: Sequence[Variable]) -> Callable[[], list[Any]]:
    return lambda: [variable.meta() if variable.meta is not None else None for variable in variables]


def _abandon(item: Item, error: SgliteError) -> None:
    node, variable, _ = item
    if variable is not None:
        variable.fail(error)
    if isinstance(node, n.ForkPoint):
        for child in node.children:
            child.abandon(error)
    elif isinstance(node, n.Gather):
        for target in node.targets.values():
            target.fail(error)


def _describe(node: n.Expr) -> str:
    """As the author wrote it, in a message."""
    match node:
        case n.Gen(name=name) | n.Select(name=name):
            shown = "" if name is None else repr(name)
            return f"{type(node).__name__.lower()}({shown})"
        case n.RoleBegin(role=role) | n.RoleEnd(role=role):
            return f"the {role} turn"
        case n.ScopeBegin(name=name) | n.ScopeEnd(name=name):
            return f"var_scope({name!r})"
        case n.Concatenate() | n.Gather():
            return "join"
    return "the program"


def _uncancel() -> None:
    task = asyncio.current_task()
    if task is not None:
        task.uncancel()


_HANDLERS: dict[type[n.Expr], Callable[..., Awaitable[None] | None]] = {
    n.Say: Branch._say,
    n.RoleBegin: Branch._role_begin,
    n.RoleEnd: Branch._role_end,
    n.ScopeBegin: Branch._scope_begin,
    n.ScopeEnd: Branch._scope_end,
    n.ForkPoint: Branch._fork_point,
    n.Gather: Branch._gather,
    n.Concatenate: Branch._concatenate,
    n.Gen: Branch._gen,
    n.Select: Branch._select,
}
