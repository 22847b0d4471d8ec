"""Running a program's function: in a thread or as a task, with its end and its failure written into the run."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

from sglite.lang.state import ProgramState

_MAX_BODIES = 10_000


@lru_cache(1)
def bodies() -> ThreadPoolExecutor:
    """Threads for functions that run beside their caller. It grows as long as all of its threads are busy, so that
    programs that wait for each other never wait for a thread."""
    return ThreadPoolExecutor(_MAX_BODIES, thread_name_prefix="sglite-body")


def run_in_thread(func: Callable[..., Any], state: ProgramState, arguments: inspect.BoundArguments) -> None:
    body = state._branch.run.body
    body.enter_thread()
    try:
        state.ret_value = func(state, *arguments.args, **arguments.kwargs)
    except BaseException as error:
        _fail(state, error)
    finally:
        _finish(state)


async def run_in_task(func: Callable[..., Any], state: ProgramState, arguments: inspect.BoundArguments) -> None:
    body = state._branch.run.body
    body.enter_task()
    try:
        state.ret_value = await func(state, *arguments.args, **arguments.kwargs)
    except BaseException as error:
        _fail(state, error)
    finally:
        _finish(state)


def _fail(state: ProgramState, error: BaseException) -> None:
    """What the function left running is cancelled, and whoever reads it is told why."""
    branch = state._branch
    body = branch.run.body
    body.error, body.failed_first = error, isinstance(error, Exception) and branch.error is None
    if body.failed_first:
        branch.cancel(f"the program's function failed: {type(error).__name__}: {error}")
    else:
        branch.cancel()


def _finish(state: ProgramState) -> None:
    run = state._branch.run
    run.body.over = True
    state._branch.finish()
    run.changed.notify()


def await_body(state: ProgramState) -> None:
    run = state._branch.run
    try:
        run.changed.block_until(run.body.is_over)
    except BaseException:
        state.cancel()
        raise


def ended(state: ProgramState) -> ProgramState:
    """The state at the end of its run. Raises what its function raised."""
    error = state._branch.run.body.error
    if error is not None:
        raise error
    try:
        state.sync()
    except BaseException:
        state.cancel()
        raise
    return state
