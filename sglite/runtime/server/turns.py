"""An assistant's turn as pieces: what it thinks, says and calls, as it comes.

A turn without tools is one request. With tools it is a few: the model writes freely until it begins a call, then the
name is chosen among the tools and the arguments are generated under that tool's schema, so they match it whatever the
model. Each request continues the last one's tokens, and so finds them in the prefix cache.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from typing import Any

from sglite.errors import GrammarError
from sglite.protocol import (
    Backend,
    Chunk,
    Constraint,
    Finish,
    GenerateRequest,
    ProgramInfo,
    Prompt,
    SamplingParams,
    Text,
    TokenLogprob,
    Tokens,
    Usage,
)
from sglite.reasoning import ReasoningFormat, ReasoningSplitter
from sglite.runtime.server.answers import Said
from sglite.runtime.server.results import results_for
from sglite.runtime.server.streams import closing, merged
from sglite.runtime.server.toolformats import ToolFormat
from sglite.runtime.server.tools import Toolbox, takes_nothing

MAX_CALLS = 32


@dataclass(frozen=True, slots=True)
class CallPiece:
    """Part of call number ``index``; the first part has ``id`` and ``name``."""

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Piece:
    """What one step added to choice ``index``. The last one has ``finish``, OpenAI's word for why, and the usage."""

    index: int = 0
    content: str = ""
    reasoning: str = ""
    call: CallPiece | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: str | None = None
    usage: Usage | None = None

    @property
    def is_said(self) -> bool:
        """Some content, and nothing else."""
        return bool(self.content) and not (self.reasoning or self.call or self.logprobs or self.finish or self.usage)


Remember = Callable[[Said, Prompt], None]
"""Told of each sample that has come to its end: what the client was told, and what the model and we wrote for it."""


async def plain_turn(
    backend: Backend, request: GenerateRequest, reasoning: ReasoningFormat | None, remember: Remember
) -> AsyncGenerator[Piece]:
    """The pieces of all samples of a request without tools."""
    told = [_Told() for _ in range(request.sampling.n)]
    splitters = [_Splitter(reasoning) for _ in range(request.sampling.n)]
    (result,) = results_for([request])
    async with closing(backend.generate(request)) as chunks:
        async for chunk in chunks:
            result.add(chunk)
            thought, said = splitters[chunk.index].feed(chunk)
            told[chunk.index].add(thought, said)
            finish = chunk.finish.reason if chunk.finish else None
            if finish:
                sample = result.samples[chunk.index]
                told[chunk.index].remember(remember, _segments(sample.text, sample.ids, sample.uncovered))
            if thought or said or chunk.logprobs or finish:
                yield Piece(chunk.index, said, thought, None, chunk.logprobs, finish, chunk.usage)


async def tool_turns(
    backend: Backend,
    request: GenerateRequest,
    box: Toolbox,
    format: ToolFormat,
    reasoning: ReasoningFormat | None,
    special_tokens: Sequence[str],
    remember: Remember,
) -> AsyncGenerator[Piece]:
    """The pieces of all samples of a request with tools: as many turns side by side, each with a seed of its own."""
    turns = [
        _ToolTurn(backend, _sample_of(request, i), box, format, reasoning, special_tokens)
        for i in range(request.sampling.n)
    ]
    told = [_Told() for _ in turns]
    async with aclosing(merged([turn.pieces() for turn in turns])) as pieces:
        async for i, piece in pieces:
            told[i].add(piece.reasoning, piece.content, piece.call)
            if piece.finish is not None:
                told[i].remember(remember, turns[i].written)
            yield replace(piece, index=i)


class _Told:
    """What the client was told of a sample so far."""

    def __init__(self) -> None:
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._calls: list[tuple[str, list[str]]] = []

    def add(self, reasoning: str, content: str, call: CallPiece | None = None) -> None:
        self._reasoning.append(reasoning)
        self._content.append(content)
        if call is not None and call.name is not None:
            self._calls.append((call.name, []))
        if call is not None:
            self._calls[call.index][1].append(call.arguments)

    def remember(self, remember: Remember, written: Prompt) -> None:
        with suppress(ValueError):  # arguments that were cut short: nobody can send them back
            calls = tuple((name, json.dumps(json.loads("".join(parts)))) for name, parts in self._calls)
            remember(Said("".join(self._content), "".join(self._reasoning), calls), written)


def _sample_of(request: GenerateRequest, index: int) -> GenerateRequest:
    seed = request.sampling.seed if index == 0 else (request.sampling.seed or 0) + index
    own = f"{request.id}-{index}"
    sampling = replace(request.sampling, n=1, seed=seed)
    return replace(request, id=own, sampling=sampling, program=request.program or ProgramInfo(request.id, str(index)))


class _Splitter:
    """Reasoning apart from what is said, where the model reasons."""

    def __init__(self, format: ReasoningFormat | None) -> None:
        self._inner = ReasoningSplitter(format) if format else None

    def feed(self, chunk: Chunk) -> tuple[str, str]:
        return self.split(chunk.text, last=chunk.finish is not None)

    def split(self, text: str, *, last: bool) -> tuple[str, str]:
        if self._inner is None:
            return "", text
        thought, said = self._inner.feed(text)
        if not last:
            return thought, said
        rest = self._inner.close()
        return thought + rest[0], said + rest[1]


class _ToolTurn:
    """One sample's turn. ``prompt`` grows by everything that is generated or written for the model."""

    def __init__(
        self,
        backend: Backend,
        request: GenerateRequest,
        box: Toolbox,
        format: ToolFormat,
        reasoning: ReasoningFormat | None,
        special_tokens: Sequence[str],
    ) -> None:
        self._backend = backend
        self._request = request
        self._box = box
        self._format = format
        self._splitter = _Splitter(reasoning)
        self._special = tuple(token for token in special_tokens if token)
        self._prompt: Prompt = request.prompt
        self._requests = 0
        self._left = request.sampling.max_new_tokens
        self._usage: Usage | None = None
        self._finish: Finish | None = None
        self._text = ""
        self._end = len(self._prompt)

    @property
    def written(self) -> Prompt:
        """What stands in the prompt for what the client was told."""
        return self._prompt[len(self._request.prompt) : self._end]

    async def pieces(self) -> AsyncGenerator[Piece]:
        calls = 0
        if self._box.must_call:
            self._begin_call(first=True)
        else:
            async with aclosing(self._free(loud=True)) as pieces:
                async for piece in pieces:
                    yield piece
        self._end = len(self._prompt)
        while self._calling:
            begun = False
            async with aclosing(self._call(calls)) as pieces:
                async for piece in pieces:
                    begun = True
                    yield piece
            if begun:
                calls, self._end = calls + 1, len(self._prompt)
            if not await self._goes_on(calls):
                break
        yield Piece(finish=self._reason(calls), usage=self._usage)

    async def _goes_on(self, calls: int) -> bool:
        """Whether another call follows the last one. How the text between them ends is no matter of the answer."""
        if not (self._format.repeats and self._box.repeats) or calls == MAX_CALLS or self._left <= 0:
            return False
        finish = self._finish
        async for _ in self._free(loud=False):
            pass
        if not self._calling:
            self._finish = finish
        return self._calling

    @property
    def _calling(self) -> bool:
        """The last thing in the prompt is the beginning of a call."""
        return bool(self._prompt) and self._prompt[-1] == Text(self._format.trigger, special=True)

    def _reason(self, calls: int) -> str:
        if self._finish is not None and self._finish.reason == "length":
            return "length"
        return "tool_calls" if calls else "stop"

    # ---- writing freely

    async def _free(self, *, loud: bool) -> AsyncGenerator[Piece]:
        """Free text up to a call or the end. After a call only white space may stand before the next: what else the
        model writes there is no part of the answer and ends it."""
        for triggers in (True, False):
            said = ""
            trigger = (self._format.prefix if loud else "") or self._format.trigger
            async with aclosing(self._generate(self._free_sampling(trigger if triggers else None))) as chunks:
                async for chunk in chunks:
                    said += chunk.text
                    if not loud and said.strip():
                        return
                    if loud and (piece := self._shown(chunk.text, last=False)):
                        yield piece
            if self._finish is None or self._finish.matched != trigger:
                break
            if not self._format.at_start or not self._text.strip():
                self._begin_call(first=loud)
                break
            self._prompt = (*self._prompt, Text(self._format.trigger))  # mentioned in the middle: just text
            if loud and (piece := self._shown(self._format.trigger, last=False)):
                yield piece
        if loud and (piece := self._shown("", last=True)):
            yield piece

    def _free_sampling(self, trigger: str | None) -> SamplingParams:
        own = self._request.sampling
        stop = (*own.stop, trigger) if trigger else own.stop
        return replace(own, stop=stop, skip_special_tokens=False)

    def _begin_call(self, *, first: bool) -> None:
        if first:
            self._write(self._format.prefix)
        self._write(self._format.trigger)

    def _shown(self, text: str, *, last: bool) -> Piece | None:
        for token in self._special:
            text = text.replace(token, "")
        thought, said = self._splitter.split(text, last=last)
        return Piece(content=said, reasoning=thought) if thought or said else None

    # ---- calling

    async def _call(self, index: int) -> AsyncGenerator[Piece]:
        """A call's pieces; none when the tokens run out before its arguments begin."""
        self._write(self._format.opening)
        name = await self._name()
        if name is None or self._left <= 0:
            self._finish = Finish("length")
            return
        self._write(self._format.between)
        head: CallPiece | None = CallPiece(index, id=f"call_{uuid.uuid4().hex[:24]}", name=name)
        async with aclosing(self._arguments(self._box.schemas[name])) as texts:
            async for text in texts:
                if head is not None:
                    yield Piece(call=head)
                    head = None
                yield Piece(call=CallPiece(index, arguments=text))
        self._write(self._format.closing)

    async def _arguments(self, schema: Mapping[str, Any]) -> AsyncGenerator[str]:
        if takes_nothing(schema):
            self._write("{}")
            yield "{}"
            return
        constraint = Constraint("json_schema", json.dumps(schema, ensure_ascii=False))
        try:
            async with aclosing(self._generate(self._constrained_sampling(), constraint)) as chunks:
                async for chunk in chunks:
                    if chunk.text:
                        yield chunk.text
        except GrammarError as error:
            if error.kind != "limit" or not self._requests:
                raise
            self._finish = Finish("length")  # too few tokens are left for any arguments

    async def _name(self) -> str | None:
        """The tool that the model names; None when its tokens ran out before."""
        names = list(self._box.schemas)
        if len(names) == 1:
            self._write(names[0])
            return names[0]
        # The closing quote tells get from get_weather. It is taken off again: ``between`` begins with it.
        constraint = Constraint("choices", json.dumps([f'{name}"' for name in names]))
        before, text = self._prompt, ""
        async with aclosing(self._generate(self._constrained_sampling(), constraint)) as chunks:
            async for chunk in chunks:
                text += chunk.text
        name = text.removesuffix('"')
        if name not in self._box.schemas:
            return None
        self._prompt = before
        self._write(name)
        return name

    def _constrained_sampling(self) -> SamplingParams:
        own = self._request.sampling
        return replace(own, stop=(), stop_token_ids=(), stop_regex=(), min_new_tokens=0, ignore_eos=False)

    # ---- one request of the turn

    def _write(self, text: str) -> None:
        """Write for the model, as its template would: special tokens count."""
        if text:
            self._prompt = (*self._prompt, Text(text, special=True))

    async def _generate(self, sampling: SamplingParams, constraint: Constraint | None = None) -> AsyncGenerator[Chunk]:
        request = replace(
            self._request,
            id=f"{self._request.id}-{self._requests}",
            prompt=self._prompt,
            sampling=replace(sampling, max_new_tokens=max(self._left, 0)),
            constraint=constraint,
        )
        self._requests += 1
        text, uncovered = "", 0
        ids: list[int] = []
        async with closing(self._backend.generate(request.validate())) as chunks:
            async for chunk in chunks:
                text, uncovered = text + chunk.text, chunk.uncovered
                ids += chunk.ids
                if chunk.finish is not None:
                    self._count(chunk)
                yield chunk
        self._text = text
        self._prompt = (*self._prompt, *_segments(text, ids, uncovered))

    def _count(self, chunk: Chunk) -> None:
        self._finish = chunk.finish
        usage = chunk.usage or Usage()
        self._left -= usage.completion_tokens
        before = self._usage
        completion = usage.completion_tokens + (before.completion_tokens if before else 0)
        self._usage = replace(before or usage, completion_tokens=completion)


def _segments(text: str, ids: Sequence[int], uncovered: int) -> Prompt:
    """What was generated, as exact tokens where the backend tells them."""
    if not text:
        return ()
    if not ids:
        return (Text(text),)
    covered = len(text) - uncovered
    rest = (Text(text[covered:]),) if uncovered else ()
    return (Tokens(tuple(ids), text[:covered]), *rest)
