"""``@function``: a program, and the ways to run it."""

from __future__ import annotations

import asyncio
import contextvars
import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, overload

from sglite.errors import ProgramError, UnsupportedError
from sglite.lang.batch import run_batch
from sglite.lang.bodies import await_body, bodies, ended, run_in_task, run_in_thread
from sglite.lang.branch import Branch
from sglite.lang.foresight import NOTHING_FORESEEN, Foresight
from sglite.lang.options import NAMES, Options, given_options
from sglite.lang.prefix import cache
from sglite.lang.run import Run, as_backend
from sglite.lang.state import ProgramState
from sglite.lang.tracer import TracedProgram, refuse_tracing, trace_program
from sglite.lang.waiting import Home, background, running_home
from sglite.protocol import Backend

_DEFAULTS = Options()


class Program:
    """A function whose first parameter is ``s``. Keywords that name sampling options set the program's defaults,
    unless the function has a parameter of that name; all others are its arguments."""

    def __init__(self, func: Callable[..., Any], bound: Mapping[str, Any] | None = None) -> None:
        self.func = func
        self.bound = dict(bound or {})
        self.signature = _signature(func)
        self.is_async = inspect.iscoroutinefunction(func)
        functools.update_wrapper(self, func)

    @property
    def name(self) -> str:
        return getattr(self.func, "__name__", "program")

    def bind(self, **kwargs: Any) -> Program:
        """The program with some arguments given."""
        self._check_names(kwargs)
        return Program(self.func, {**self.bound, **kwargs})

    def run(self, *args: Any, stream: bool = False, backend: Any = None, **kwargs: Any) -> ProgramState:
        """Runs the program and returns its state: at the end, or with ``stream`` at once.

        Sampling defaults: max_new_tokens 128, n 1, temperature 1.0, top_p 1.0, top_k -1, min_p 0, penalties 0,
        ignore_eos False, no stops, no logprobs; a gen's own argument wins. Raises what the function raises. A failed
        generation raises where its variable is read, and ``state.error()`` tells.
        """
        refuse_tracing(self.name)
        own, options = self.split(kwargs)
        state, arguments = self.prepare(args, own, options, as_backend(backend), background(), stream=stream)
        if self.is_async:
            run_home = state._branch.run.home
            run_home.refuse_blocking(f"{self.name}.run()")
            run_home.call(run_home.start, run_in_task(self.func, state, arguments))
            if not stream:
                await_body(state)
        elif stream:
            context = contextvars.copy_context()
            bodies().submit(context.run, run_in_thread, self.func, state, arguments)
        else:
            run_in_thread(self.func, state, arguments)
        return state if stream else ended(state)

    async def arun(self, *args: Any, stream: bool = False, backend: Any = None, **kwargs: Any) -> ProgramState:
        """``run`` for event loops. An ``async def`` program runs on the caller's loop, a plain one beside it.

        Cancelling the caller aborts the program's requests.
        """
        home = running_home() if self.is_async else background()
        refuse_tracing(self.name)
        own, options = self.split(kwargs)
        state, arguments = self.prepare(args, own, options, as_backend(backend), home, stream=stream)
        if self.is_async:
            body: asyncio.Future[None] = home.start(run_in_task(self.func, state, arguments))
        else:
            context = contextvars.copy_context()
            loop = asyncio.get_running_loop()
            body = loop.run_in_executor(bodies(), context.run, run_in_thread, self.func, state, arguments)
        if stream:
            return state
        try:
            await asyncio.shield(body)
            await state.wait()
        except asyncio.CancelledError:
            state.cancel()
            raise
        return ended(state)

    def run_batch(
        self,
        batch_kwargs: Sequence[Mapping[str, Any]] | Sequence[Sequence[Any]],
        *,
        backend: Any = None,
        num_threads: int | str = "auto",
        progress_bar: bool = False,
        generator_style: bool = False,
        **options: Any,
    ) -> Any:
        """Runs the program once per set of arguments; returns all states in order (or yields them).

        Never raises for a program that failed: ``state.error()`` tells. ``num_threads`` bounds how many run at once;
        "auto" is generous. Sampling defaults as in ``run``.
        """
        refuse_tracing(self.name)
        chosen, made = as_backend(backend), make_options(options)
        states = run_batch(self, batch_kwargs, chosen, num_threads, made, progress_bar, eager=generator_style)
        return states if generator_style else list(states)

    def trace(self, *, backend: Any = None, **kwargs: Any) -> TracedProgram:
        """The program as symbols: print it to see its calls, forks and where data decides. Needs no model."""
        return trace_program(self, kwargs)

    def cache(self, backend: Any = None) -> str:
        """Computes the constant beginning of the program once, so that later runs find it cached; returns it."""
        return cache(self, as_backend(backend))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)

    def prepare(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        options: Options,
        backend: Backend,
        home: Home,
        *,
        stream: bool = False,
        foresight: Foresight = NOTHING_FORESEEN,
    ) -> tuple[ProgramState, inspect.BoundArguments]:
        """A fresh state and the function's arguments. Raises ProgramError naming an argument that does not fit."""
        arguments = self.arguments(args, kwargs)
        run = Run(backend, home, options, self.name, stream=stream, foresight=foresight)
        return ProgramState(Branch(run, "")), arguments

    def split(self, kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], Options]:
        """The function's own keywords, and the options that the others are."""
        own = {k: v for k, v in kwargs.items() if k in self.signature.parameters or k not in NAMES}
        return own, make_options({k: v for k, v in kwargs.items() if k not in own})

    def arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> inspect.BoundArguments:
        self._check_names(kwargs)
        if args and isinstance(args[0], ProgramState):
            raise ProgramError(f"{self.name}() begins a state of its own; {self.name}.func(s, ...) goes on in another")
        bound = {k: v for k, v in self.bound.items() if k not in kwargs}
        try:
            return self.signature.bind(*args, **bound, **kwargs)
        except TypeError as error:
            raise ProgramError(f"{self.name}(): {error}") from None

    def _check_names(self, kwargs: Iterable[str]) -> None:
        parameters = self.signature.parameters
        if any(name not in parameters for name in kwargs) and not any(
            p.kind is p.VAR_KEYWORD for p in parameters.values()
        ):
            wrong = next(name for name in kwargs if name not in parameters)
            close = difflib.get_close_matches(wrong, [*parameters, *NAMES], 1)
            hint = f" (did you mean {close[0]}?)" if close else ""
            known = ", ".join(parameters) or "none"
            raise ProgramError(f"{self.name}() has no parameter {wrong!r}{hint}; it has: {known}")

    def __repr__(self) -> str:
        return f"<sglite program {self.name}{self.signature}>"


@overload
def function(func: Callable[..., Any], num_api_spec_tokens: None = None) -> Program: ...
@overload
def function(func: None = None, num_api_spec_tokens: None = None) -> Callable[[Callable[..., Any]], Program]: ...
def function(
    func: Callable[..., Any] | None = None, num_api_spec_tokens: None = None
) -> Program | Callable[[Callable[..., Any]], Program]:
    """Makes a program of a function (plain or ``async def``) whose first parameter is ``s``."""
    if num_api_spec_tokens is not None:
        raise UnsupportedError("num_api_spec_tokens is not supported; leave it out", param="num_api_spec_tokens")
    return Program(func) if func is not None else Program


def _signature(func: Callable[..., Any]) -> inspect.Signature:
    """The function's own arguments: without ``s``."""
    if not callable(func):
        raise ProgramError(f"@function needs a function, not {type(func).__name__}")
    name = getattr(func, "__name__", "the program")
    if inspect.isgeneratorfunction(func) or inspect.isasyncgenfunction(func):
        raise ProgramError(f"{name}() has a yield, and would never be run: return its result, or run(stream=True)")
    parameters = list(inspect.signature(func).parameters.values())
    if not parameters or parameters[0].name != "s":
        raise ProgramError(f"{name}() must take the program's state as its first parameter, named s")
    return inspect.Signature(parameters[1:])


def make_options(given: Mapping[str, Any]) -> Options:
    """Raises ProgramError for names that are no options."""
    unknown = sorted(given.keys() - NAMES)
    if unknown:
        raise ProgramError(f"unknown option {unknown[0]!r}; known: {', '.join(sorted(NAMES))}")
    return _DEFAULTS.over(given_options(given)) if given else _DEFAULTS
