"""What nodes mean: one function each. It acts at once, or returns something to await.

A handler runs while its branch is owned, so it may touch the transcript; it raises where the node cannot be done.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from sglite.confidence import confidence_logprobs
from sglite.errors import SgliteError
from sglite.lang import nodes as n
from sglite.lang.generation import Generation, gather
from sglite.lang.meta import meta_of
from sglite.lang.options import plan
from sglite.lang.requests import check, sendable
from sglite.lang.select import decide, scoring_request
from sglite.lang.variables import Site, Variable
from sglite.lang.waiting import take_back_cancellation
from sglite.protocol import Chunk, GenerateRequest, Prompt, prompt_text

if TYPE_CHECKING:
    from sglite.lang.branch import Branch


class Sender(Protocol):
    """Sends a request made of ``prompt`` and GenerateRequest's fields, and returns all its chunks."""

    async def __call__(self, prompt: Prompt, **request: Any) -> list[Chunk]: ...


def _say(branch: Branch, node: n.Say, variable: None, site: Site | None) -> None:
    branch.transcript.say(node.text)
    branch.turns.said(node.text)
    branch.write(node.text)


def _role_begin(branch: Branch, node: n.RoleBegin, variable: None, site: Site | None) -> None:
    run = branch.run
    branch.write(branch.turns.begin(node.role, branch.transcript, run.frames, run.trace.divergences))


def _role_end(branch: Branch, node: n.RoleEnd, variable: None, site: Site | None) -> None:
    run = branch.run
    branch.write(branch.turns.end(branch.transcript, run.frames, run.trace.divergences))


def _scope_begin(branch: Branch, node: n.ScopeBegin, variable: None, site: Site | None) -> None:
    branch.marks[node.name] = branch.transcript.mark()


def _scope_end(branch: Branch, node: n.ScopeEnd, variable: Variable, site: Site | None) -> None:
    variable.set(prompt_text(branch.transcript.since(branch.marks[node.name])))


def _fork_point(branch: Branch, node: n.ForkPoint, variable: None, site: Site | None) -> None:
    branch.transcript.prompt()  # closes open text, so that all children share the segment
    for child in node.children:
        child.launch(branch)


def _gather(branch: Branch, node: n.Gather, variable: None, site: Site | None) -> Awaitable[None] | None:
    return _after(node.children, lambda: _collect(node))


def _collect(node: n.Gather) -> None:
    for name, variable in node.targets.items():
        sources = tuple(child.variables[name] for child in node.children if name in child.own)
        failed = next((source.error for source in sources if source.error is not None), None)
        if failed is not None:
            variable.fail(failed)
            continue
        variable.parts = sources
        variable.meta = _each_meta(sources)
        variable.set([source.value for source in sources])


def _each_meta(variables: Sequence[Variable]) -> Callable[[], list[Any]]:
    return lambda: [variable.meta() if variable.meta is not None else None for variable in variables]


def _concatenate(branch: Branch, node: n.Concatenate, variable: None, site: Site | None) -> Awaitable[None] | None:
    return _after(node.children, lambda: _take_over(branch, node))


def _take_over(branch: Branch, node: n.Concatenate) -> None:
    for child in node.children:
        if child.error is not None:
            raise child.error
        assert child.born is not None, "an idle child has been launched"
        added = child.transcript.since(child.born)
        branch.transcript.extend(added)
        branch.write(prompt_text(added))


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


def _gen(branch: Branch, node: n.Gen, variable: Variable, site: Site | None) -> Awaitable[None] | None:
    run = branch.run
    made = plan(run.options, node.given)
    check(node, made, run.known_info)
    call = branch.start_call("gen", node.name, site)
    request = GenerateRequest(
        id=call.request_id,
        prompt=sendable(branch.transcript.prompt(), run.known_info),
        sampling=made.sampling,
        constraint=node.constraint,
        logprobs=confidence_logprobs(node.constraint) if node.field_confidence else made.logprobs,
        program=branch.program(),
    )
    branch.turns.generated()
    log = branch.write if run.stream else None
    generation = Generation(call, variable, made.sampling.n, reasoning=node.reasoning, log=log)
    sure_of = node.constraint if node.field_confidence else None
    variable.meta = meta_of(call, generation.samples, with_text=made.with_text, sure_of=sure_of)
    if run.answer is None:
        return _receive(branch, variable, generation, request)
    generation.take(run.answer, request)
    _publish(branch, generation)
    return None


async def _receive(branch: Branch, variable: Variable, generation: Generation, request: GenerateRequest) -> None:
    run = branch.run
    branch.generating = variable
    try:
        await run.traffic.send(lambda: generation.collect(run.backend.generate(request)))
    except asyncio.CancelledError:
        if not variable.stopped:
            raise
        take_back_cancellation()
        generation.stop()
    finally:
        branch.generating = None
    _publish(branch, generation)


def _publish(branch: Branch, generation: Generation) -> None:
    """The answer becomes part of the state, and then its variable's value."""
    ids, text, rest = generation.answer()
    if ids and branch.run.known_info.capabilities.token_prompts:
        branch.transcript.add(ids, text)
        branch.transcript.say(rest)
    else:
        branch.transcript.say(text + rest)
    generation.publish()


async def _select(branch: Branch, node: n.Select, variable: Variable, site: Site | None) -> None:
    branch.turns.generated()
    info, program = branch.run.known_info, branch.program()

    async def send(prompt: Prompt, **request: Any) -> list[Chunk]:
        call = branch.start_call("select", node.name, site)
        made = scoring_request(call.request_id, prompt, info, program=program, **request)
        return await branch.run.traffic.send(lambda: gather(call, branch.run.backend.generate(made)))

    decision = await decide(node, branch.transcript.prompt(), info, send)
    variable.meta = lambda: decision.meta
    branch.transcript.say(decision.choice)
    branch.write(decision.choice)
    variable.set(decision.choice)


HANDLERS: dict[type[n.Expr], Callable[..., Awaitable[None] | None]] = {
    n.Say: _say,
    n.RoleBegin: _role_begin,
    n.RoleEnd: _role_end,
    n.ScopeBegin: _scope_begin,
    n.ScopeEnd: _scope_end,
    n.ForkPoint: _fork_point,
    n.Gather: _gather,
    n.Concatenate: _concatenate,
    n.Gen: _gen,
    n.Select: _select,
}


def abandon(node: n.Expr, variable: Variable | None, error: SgliteError) -> None:
    """``node`` will not be executed: whatever waits for it gets the error."""
    if variable is not None:
        variable.fail(error)
    if isinstance(node, n.ForkPoint):
        for child in node.children:
            child.abandon(error)
    elif isinstance(node, n.Gather):
        for target in node.targets.values():
            target.fail(error)


def describe(node: n.Expr) -> str:
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
