"""What a program holds in its hands: its state, and the group of states that a fork gives."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from sglite.errors import ProgramError, SgliteError, UnsupportedError
from sglite.lang import nodes as n
from sglite.lang.branch import Branch
from sglite.lang.pieces import branch_pieces, variable_pieces
from sglite.lang.variables import Site, Variable, again, unknown


class ProgramState:
    """The text and the variables of a program so far. Appending never waits; reading waits for what it reads.

    In an ``async def`` program, ``await s.get("x")`` and ``await s.wait()`` wait; the plain ways of reading give what
    is there and raise ProgramError where they would have to block the event loop.
    """

    def __init__(self, branch: Branch) -> None:
        self._branch = branch
        self._ret_value: Any = None

    # ---- appending

    def __iadd__(self, other: n.Appendable) -> ProgramState:
        self._branch.append(n.flatten(other), _caller())
        return self

    def append(self, other: n.Appendable) -> None:
        """``s += other`` where an expression is wanted."""
        self._branch.append(n.flatten(other), _caller())

    def system(self, expr: n.Appendable | None = None) -> Any:
        """A system turn: ``s.system("...")``, or ``with s.system(): ...``."""
        return self._turn("system", expr)

    def user(self, expr: n.Appendable | None = None) -> Any:
        """A user turn: ``s.user("...")``, or ``with s.user(): ...``."""
        return self._turn("user", expr)

    def assistant(self, expr: n.Appendable | None = None) -> Any:
        """An assistant turn: ``s.assistant(gen("x"))``, or ``with s.assistant(): ...``."""
        return self._turn("assistant", expr)

    def _turn(self, role: str, expr: n.Appendable | None) -> Any:
        site = _caller(2)
        if expr is None:
            return self._between(n.RoleBegin(role), n.RoleEnd(role), site)
        row = n.role(role, expr)
        self._branch.append(row.nodes, site)
        return row

    def var_scope(self, name: str) -> Any:
        """``with s.var_scope("x"):`` makes a variable of everything appended inside."""
        n.check_name(name)
        return self._between(n.ScopeBegin(name), n.ScopeEnd(name), _caller())

    @contextmanager
    def _between(self, begin: n.Expr, end: n.Expr, site: Site) -> Iterator[None]:
        self._branch.append((begin,), site)
        yield
        self._branch.append((end,), site)

    # ---- forking

    def fork(self, size: int = 1, position_ids_offset: None = None) -> ProgramStateGroup:
        """``size`` states that continue from here, sharing everything so far."""
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ProgramError(f"fork needs a number of states of at least 1, not {size!r}")
        if position_ids_offset is not None:
            raise UnsupportedError("position_ids_offset is not supported; leave it out", param="position_ids_offset")
        return self._fork(size, _caller())

    def _fork(self, size: int, site: Site) -> ProgramStateGroup:
        return ProgramStateGroup([ProgramState(child) for child in self._branch.fork(size, site)], self)

    @contextmanager
    def copy(self, position_ids_offset: None = None) -> Iterator[ProgramState]:
        """A copy to try something on; its new variables come back as lists of one."""
        if position_ids_offset is not None:
            raise UnsupportedError("position_ids_offset is not supported; leave it out", param="position_ids_offset")
        group = self._fork(1, _caller(2))
        try:
            yield group[0]
        finally:
            group.join()

    # ---- reading

    def get_var(self, name: str) -> Any:
        """The variable's value, once it is there. Raises what its generation failed with, or ProgramError."""
        return self._finished(name).read()

    def __getitem__(self, name: str) -> Any:
        return self._finished(name).read()

    def value(self, name: str) -> Any:
        """The variable as its ``schema``, ``dtype`` or ``tools`` want it; a list of such for several samples."""
        return self._finished(name).read_typed()

    def get_meta_info(self, name: str, timeout: float | None = None) -> Any:
        """What is known about the variable's generation: tokens, finish reason, logprobs, scores; None for set ones."""
        variable = self._finished(name, timeout)
        variable.read()
        return None if variable.meta is None else variable.meta()

    async def get(self, name: str) -> Any:
        """``s[name]`` for ``async def`` programs: waits without blocking the loop."""
        variable = self._branch.variables.get(name) or await self._afind(name)
        if not variable.done:
            await variable.signal.until(variable.is_done)
        return variable.read()

    async def wait(self) -> None:
        """Until everything appended so far is done, here and in its forks. Does not raise; see ``error``."""
        await self._branch.settle()

    def sync(self) -> None:
        """Until everything appended so far is done, for programs that are plain functions. Does not raise."""
        branch = self._branch
        if not branch.is_idle():
            branch.run.home.refuse_blocking("waiting for a state")
            branch.progress.block_until(branch.is_idle)

    def text(self) -> str:
        """The whole text so far. Raises what the program failed with."""
        self._settle()
        return self._branch.transcript.text()

    def messages(self) -> list[dict[str, str]]:
        """The finished turns, as OpenAI messages. Raises what the program failed with."""
        self._settle()
        return self._branch.turns.messages()

    @property
    def ret_value(self) -> Any:
        """What the program's function returned, once it is over; None where it failed (see ``error``)."""
        run = self._branch.run
        if not run.body.over and not run.body.mine():
            if run.home.here:
                raise ProgramError("the program still runs: read its stream to the end, or await arun() without stream")
            run.changed.block_until(run.body.is_over)
        return self._ret_value

    @ret_value.setter
    def ret_value(self, value: Any) -> None:
        self._ret_value = value

    def error(self) -> BaseException | None:
        """What the program failed with, if it did: a generation, or its function."""
        self.sync()
        return self._branch.failure()

    def trace(self) -> Any:
        """The calls of the whole run: print it, or take ``to_json()``."""
        return self._branch.run.trace

    def set_var(self, name: str, value: Any) -> None:
        variable = Variable(name)
        variable.set(value)
        self._branch.put(variable)

    def __setitem__(self, name: str, value: Any) -> None:
        self.set_var(name, value)

    def __contains__(self, name: str) -> bool:
        return name in self._branch.variables

    def cancel(self) -> None:
        """Aborts the requests of this state and its forks; what was not generated raises AbortedError when read."""
        self._branch.cancel()

    # ---- streaming

    def text_iter(self, var_name: str | None = None) -> Iterator[str]:
        """New text as it comes: of one variable, or of the whole state. Closing it early stops the generation.

        Without ``stream=True`` the text of the whole state comes in one piece.
        """
        if var_name is None and not self._branch.run.stream:
            yield self.text()
            return
        branch = self._branch
        source = branch_pieces(branch) if var_name is None else variable_pieces(branch, self._find(var_name))
        try:
            while text := source.block():
                yield text
            source.check()
        except GeneratorExit:
            source.stop()
            raise
        except KeyboardInterrupt:
            self.cancel()
            raise

    async def text_async_iter(self, var_name: str | None = None, return_meta_data: bool = False) -> AsyncIterator[Any]:
        """``text_iter`` for event loops. With ``return_meta_data``: pairs of text and the meta info so far."""
        if return_meta_data and var_name is None:
            raise ProgramError("return_meta_data needs var_name: meta info belongs to a variable")
        branch = self._branch
        if var_name is None and not branch.run.stream:
            await self.wait()
            yield self.text()
            return
        source = branch_pieces(branch) if var_name is None else variable_pieces(branch, await self._afind(var_name))
        try:
            while text := await source.wait():
                yield (text, source.meta()) if return_meta_data else text
            source.check()
        finally:
            source.stop()

    # ---- inside

    def _finished(self, name: str, timeout: float | None = None) -> Variable:
        variable = self._branch.variables.get(name) or self._find(name)
        if not variable.done:
            self._branch.run.home.refuse_blocking(f"reading {name!r}")
            if not variable.signal.block_until(variable.is_done, timeout):
                raise TimeoutError(f"{name!r} was not there within {timeout} s")
        return variable

    def _find(self, name: str) -> Variable:
        branch = self._branch
        if name not in branch.variables and not self._hopeless():
            branch.run.home.refuse_blocking(f"waiting for {name!r}")
            branch.run.changed.block_until(lambda: name in branch.variables or self._hopeless())
        return self._known(name)

    async def _afind(self, name: str) -> Variable:
        branch = self._branch
        await branch.run.changed.until(lambda: name in branch.variables or self._hopeless())
        return self._known(name)

    def _hopeless(self) -> bool:
        """Nobody else is going to append anything."""
        body = self._branch.run.body
        return body.over or body.mine() or self._branch.error is not None

    def _known(self, name: str) -> Variable:
        branch = self._branch
        variable = branch.variables.get(name)
        if variable is not None:
            return variable
        failed = branch.failure()
        if isinstance(failed, SgliteError):
            raise again(failed)
        raise unknown(name, list(branch.variables)) from failed

    def _settle(self) -> None:
        self.sync()
        if self._branch.error is not None:
            raise again(self._branch.error)

    def __del__(self) -> None:
        branch = self.__dict__.get("_branch")
        if branch is None or branch.joined or branch.is_idle() or branch.has_children():  # those go on from here
            return
        branch.cancel("its state was dropped before it was done")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ProgramError(
            "a state cannot be pickled, nor copied by copy.copy or copy.deepcopy: it belongs to a backend that runs; "
            "keep its text(), messages() or values, and branch it with fork() or copy()"
        )

    def __repr__(self) -> str:
        branch = self._branch
        state = "failed" if branch.error else "idle" if branch.is_idle() else "running"
        return f"<ProgramState {branch.run.trace.function} {branch.name or 'root'}, {state}, {list(branch.variables)}>"


class ProgramStateGroup:
    """The states of a fork. ``group += x`` appends to each: one expression, a list of them, or ``lambda i: ...``."""

    def __init__(self, states: Sequence[ProgramState], source: ProgramState) -> None:
        self.states = list(states)
        self._source = source
        self._joined = False

    def __len__(self) -> int:
        return len(self.states)

    def __iter__(self) -> Iterator[ProgramState]:
        return iter(self.states)

    def __getitem__(self, i: int) -> ProgramState:
        return self.states[i]

    def __setitem__(self, i: int, value: ProgramState) -> None:
        if self.states[i] is not value:
            raise ProgramError("a state of a group cannot be replaced; append to it with +=")

    def __iadd__(self, other: Any) -> ProgramStateGroup:
        site = _caller()
        for state, row in zip(self.states, self._rows(other), strict=True):
            state._branch.append(row, site)
        return self

    def _rows(self, other: Any) -> list[tuple[n.Expr, ...]]:
        if isinstance(other, list | tuple):
            if len(other) != len(self.states):
                raise ProgramError(f"{len(other)} expressions for a fork of {len(self.states)}")
            return [n.flatten(each) for each in other]
        if isinstance(other, Callable):  # type: ignore[arg-type]
            return [n.flatten(other(i)) for i in range(len(self.states))]
        return [n.flatten(other)] * len(self.states)

    def join(self, mode: str = "gather_variable") -> None:
        """Ends the states and gives their results to where they were forked from; does not wait.

        ``gather_variable``: each variable they defined becomes a list there. ``concate_and_append``: their text since
        the fork is appended there, in order.
        """
        if self._joined:
            raise ProgramError("this group has been joined already")
        if mode not in ("gather_variable", "concate_and_append"):
            raise ProgramError(f"join mode must be gather_variable or concate_and_append, not {mode!r}")
        site = _caller()
        children = tuple(state._branch for state in self.states)
        target = self._source._branch
        if mode == "concate_and_append":
            target.append((n.Concatenate(children),), site)
        else:
            names = dict.fromkeys(name for child in children for name in child.own)
            variables = {name: Variable(name, site) for name in names}
            target.append((n.Gather(children, variables),), site)
            for variable in variables.values():
                target.put(variable)
        self._joined = True
        for child in children:
            child.joined = True
            child.end()

    async def wait(self) -> None:
        """Until all of them are done."""
        for state in self.states:
            await state.wait()


def _caller(depth: int = 1) -> Site:
    """File and line of the program, ``depth`` calls above the caller of this function."""
    frame = sys._getframe(depth + 1)
    return frame.f_code.co_filename, frame.f_lineno
