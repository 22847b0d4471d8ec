"""Programs as symbols: what a program would append, without a model and without its arguments.

The function runs on a state that only records. Arguments and variables are Symbols, which can be appended and put into
f-strings; where the program needs a symbol's value (to compare, count or convert it), the trace ends and says where.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

from sglite.errors import ProgramError
from sglite.lang import nodes as n

if TYPE_CHECKING:
    from sglite.lang.program import Program

_MARK = re.compile("\ue000([^\ue001]*)\ue001")
tracing: ContextVar[bool] = ContextVar("sglite_tracing", default=False)


class StopTracing(BaseException):
    """Not an Exception, so that a program's own ``except`` does not catch it."""


def refuse_tracing(name: str) -> None:
    """Programs do not run inside a trace: it has no values to run them on."""
    if tracing.get():
        raise StopTracing(f"the program runs {name}")


class Symbol(n.Expr):
    """A value that is not known yet: an argument, or a variable of the state."""

    __slots__ = ("label",)

    def __init__(self, label: str) -> None:
        self.label = label

    def __format__(self, spec: str) -> str:
        return f"\ue000{self.label}\ue001"

    __str__ = lambda self: self.__format__("")  # noqa: E731

    def __repr__(self) -> str:
        return f"{{{self.label}}}"

    def __getitem__(self, key: Any) -> Symbol:
        return Symbol(f"{self.label}[{key!r}]")

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        self._stop(f".{name}")

    def _stop(self, how: str) -> NoReturn:
        raise StopTracing(f"{self.label}{how} depends on data")

    def __bool__(self) -> bool:
        self._stop(" (true or false?)")

    def __len__(self) -> int:
        self._stop(" (its length)")

    def __iter__(self) -> Iterator[Any]:
        self._stop(" (its items)")

    def __int__(self) -> int:
        self._stop(" (as an int)")

    def __float__(self) -> float:
        self._stop(" (as a float)")

    def __contains__(self, item: Any) -> bool:
        self._stop(f" (contains {item!r}?)")

    def __eq__(self, other: object) -> bool:
        self._stop(f" == {other!r}")

    def __lt__(self, other: object) -> bool:
        self._stop(f" < {other!r}")

    __hash__ = None  # type: ignore[assignment]


@dataclass(slots=True)
class Forked:
    branches: list[TracedBranch]


@dataclass(slots=True)
class Joined:
    mode: str


@dataclass(slots=True)
class TracedBranch:
    """What one branch appends, in order: nodes, Symbols, forks and joins."""

    entries: list[n.Expr | Forked | Joined] = field(default_factory=list)

    def lines(self, depth: int) -> Iterator[str]:
        pad = "  " * depth
        for entry in self.entries:
            if isinstance(entry, Forked):
                yield f"{pad}fork {len(entry.branches)}"
                for i, branch in enumerate(entry.branches):
                    yield f"{pad}  [{i}]"
                    yield from branch.lines(depth + 2)
            else:
                yield pad + _show(entry)

    def all_entries(self) -> Iterator[n.Expr | Forked | Joined]:
        for entry in self.entries:
            yield entry
            if isinstance(entry, Forked):
                for branch in entry.branches:
                    yield from branch.all_entries()


@dataclass(slots=True)
class TracedProgram:
    """``print`` it. ``ended`` says where and why the trace ends before the program does, and is empty otherwise."""

    name: str
    parameters: tuple[str, ...]
    root: TracedBranch
    ended: str = ""

    @property
    def calls(self) -> list[n.Gen | n.Select]:
        """Every gen and select, also those of forks."""
        return [entry for entry in self.root.all_entries() if isinstance(entry, n.Gen | n.Select)]

    @property
    def variables(self) -> list[str]:
        """Their names, in order."""
        return list(dict.fromkeys(call.name for call in self.calls if call.name is not None))

    @property
    def prefix(self) -> tuple[n.Expr, ...]:
        """The beginning that does not depend on arguments or answers."""
        return _constant(self.root)

    def __str__(self) -> str:
        lines = [f"program {self.name}({', '.join(self.parameters)})", *self.root.lines(1)]
        return "\n".join(lines + ([f"  ... {self.ended}"] if self.ended else []))


def _constant(branch: TracedBranch) -> tuple[n.Expr, ...]:
    taken: list[n.Expr] = []
    for entry in branch.entries:
        if not isinstance(entry, n.Say | n.RoleBegin | n.RoleEnd):
            break
        taken.append(entry)
    return tuple(taken)


def _show(entry: Any) -> str:
    match entry:
        case n.Say(text=text):
            return f"text {text!r}"
        case Symbol(label=label):
            return f"text {{{label}}}"
        case n.Gen(name=name, given=given, argument=argument):
            options = [f"{key}={value!r}" for key, value in given] + ([argument] if argument else [])
            return f"{name or '_'} = gen({', '.join(options)})"
        case n.Select(name=name, choices=choices):
            return f"{name or '_'} = select({list(choices)!r})"
        case n.RoleBegin(role=role):
            return f"{role}:"
        case n.RoleEnd(role=role):
            return f"end of {role}"
        case n.ScopeBegin(name=name):
            return f"{name} = everything until its end:"
        case n.ScopeEnd(name=name):
            return f"end of {name}"
        case Joined(mode=mode):
            return f"join {mode}"
    return type(entry).__name__


class TracingState:
    """Takes what a ProgramState takes, and records it."""

    def __init__(self, branch: TracedBranch, *, only_constant: bool = False) -> None:
        self._branch = branch
        self._only_constant = only_constant
        self.ret_value: Any = None

    def _append(self, row: Sequence[n.Expr]) -> None:
        for node in row:
            if isinstance(node, n.Say) and _MARK.search(node.text):
                self._append(_unmark(node.text))
                continue
            if self._only_constant and not isinstance(node, n.Say | n.RoleBegin | n.RoleEnd):
                raise StopTracing("not constant")
            self._branch.entries.append(node)

    def __iadd__(self, other: Any) -> TracingState:
        self._append(n.flatten(other))
        return self

    def append(self, other: Any) -> None:
        self._append(n.flatten(other))

    def _turn(self, role: str, expr: Any) -> Any:
        if expr is not None:
            return self._append(n.role(role, expr).nodes)
        return self._between(n.RoleBegin(role), n.RoleEnd(role))

    def system(self, expr: Any = None) -> Any:
        return self._turn("system", expr)

    def user(self, expr: Any = None) -> Any:
        return self._turn("user", expr)

    def assistant(self, expr: Any = None) -> Any:
        return self._turn("assistant", expr)

    def var_scope(self, name: str) -> Any:
        return self._between(n.ScopeBegin(name), n.ScopeEnd(name))

    @contextmanager
    def _between(self, begin: n.Expr, end: n.Expr) -> Iterator[None]:
        self._append((begin,))
        yield
        self._append((end,))

    def fork(self, size: int = 1, position_ids_offset: None = None) -> TracingGroup:
        if self._only_constant:
            raise StopTracing("not constant")
        branches = [TracedBranch() for _ in range(size)]
        self._branch.entries.append(Forked(branches))
        return TracingGroup([TracingState(branch) for branch in branches], self._branch)

    @contextmanager
    def copy(self, position_ids_offset: None = None) -> Iterator[TracingState]:
        group = self.fork(1)
        yield group[0]
        group.join()

    def __getitem__(self, name: str) -> Symbol:
        return self.get_var(name)

    def get_var(self, name: str) -> Symbol:
        if self._only_constant:
            raise StopTracing("not constant")
        return Symbol(name)

    def value(self, name: str) -> Symbol:
        return Symbol(f"value of {name}")

    async def get(self, name: str) -> Symbol:
        return self.get_var(name)

    async def wait(self) -> None:
        return None

    def sync(self) -> None:
        return None

    def text(self) -> Symbol:
        return Symbol("the text so far")

    def get_meta_info(self, name: str, timeout: float | None = None) -> Symbol:
        return Symbol(f"meta info of {name}")

    def set_var(self, name: str, value: Any) -> None:
        return None

    def __setitem__(self, name: str, value: Any) -> None:
        return None

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise StopTracing(f"s.{name} depends on data")


class TracingGroup:
    def __init__(self, states: list[TracingState], source: TracedBranch) -> None:
        self.states = states
        self._source = source

    def __len__(self) -> int:
        return len(self.states)

    def __iter__(self) -> Iterator[TracingState]:
        return iter(self.states)

    def __getitem__(self, i: int) -> TracingState:
        return self.states[i]

    def __setitem__(self, i: int, value: TracingState) -> None:
        return None

    def __iadd__(self, other: Any) -> TracingGroup:
        for i, state in enumerate(self.states):
            state.append(other[i] if isinstance(other, list | tuple) else other(i) if callable(other) else other)
        return self

    def join(self, mode: str = "gather_variable") -> None:
        self._source.entries.append(Joined(mode))

    async def wait(self) -> None:
        return None


def _unmark(text: str) -> list[n.Expr]:
    """The pieces of a text that symbols were formatted into."""
    parts = _MARK.split(text)
    return [Symbol(part) if i % 2 else n.Say(part) for i, part in enumerate(parts) if i % 2 or part]


def trace_program(program: Program, arguments: dict[str, Any]) -> TracedProgram:
    """Arguments that are not given are Symbols. Raises ProgramError for names the program does not have."""
    unknown = [name for name in arguments if name not in program.signature.parameters]
    if unknown:
        raise ProgramError(f"{program.name}() has no parameter {unknown[0]!r}")
    traced = TracedProgram(program.name, tuple(program.signature.parameters), TracedBranch())
    traced.ended = _record(program, arguments, TracingState(traced.root))
    return traced


def constant_prefix(program: Program) -> tuple[n.Expr, ...]:
    """What every run begins with. The function runs up to the first thing that is not constant, and no further."""
    branch = TracedBranch()
    _record(program, {}, TracingState(branch, only_constant=True))
    return _constant(branch)


def _record(program: Program, arguments: dict[str, Any], state: TracingState) -> str:
    """Runs the function on ``state``; returns why it ended early, or nothing."""
    named = [p for p in program.signature.parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    symbols = {parameter.name: Symbol(parameter.name) for parameter in named}
    token = tracing.set(True)
    try:
        result = program.func(state, **{**symbols, **program.bound, **arguments})
        if program.is_async:
            _drive(result)
    except StopTracing as stop:
        return str(stop)
    except Exception as error:  # a library that was given a symbol
        place = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__} with symbols for values, at {place.filename}:{place.lineno}: {error}"
    finally:
        tracing.reset(token)
    return ""


def _drive(coroutine: Any) -> None:
    """Runs a coroutine as long as it waits for nothing but the state."""
    try:
        coroutine.send(None)
    except StopIteration:
        return
    coroutine.close()
    raise StopTracing("the program waits for something outside")
