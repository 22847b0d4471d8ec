"""``/v1/completions``. Prompts are raw: special tokens spelled in a text prompt count, so that clients may render chat
templates themselves; use ``/v1/chat/completions`` for text of others."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import Field, model_validator
from starlette.responses import Response

from sglite.protocol import Chunk, GenerateRequest, LogprobParams, Prompt, TokenLogprob, Tokens, prompt_text
from sglite.runtime.server import fields as f
from sglite.runtime.server.context import Context, Ctx, new_id
from sglite.runtime.server.envelope import Envelope
from sglite.runtime.server.jsonbody import StrictRoute
from sglite.runtime.server.naming import Names, naming
from sglite.runtime.server.openai_fields import OpenAIBody, check_bounds, finish_reason, make_request, sure_of
from sglite.runtime.server.results import Result, Sample, collect, results_for
from sglite.runtime.server.shapes import completion_logprobs, openai_usage
from sglite.runtime.server.streams import STREAMED, Answer, EventStream, closing, together

DEFAULT_TOKENS = 16
"""OpenAI's default of max_tokens for this route."""

router = APIRouter(route_class=StrictRoute, tags=["openai"])


class Completion(OpenAIBody):
    prompt: f.Prompts
    best_of: f.Samples | None = None
    echo: bool | None = False
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    suffix: f.Unsupported = None

    @model_validator(mode="after")
    def _supported(self) -> Completion:
        if self.best_of is not None and self.best_of < (self.n or 1):
            raise f.bad(f"{self.best_of} is less than n {self.n or 1}", field="best_of")
        if self.best_of is not None and self.stream:
            raise f.bad("not supported in a stream: which is best is known at the end", "unsupported", "best_of")
        if self.field_confidence and self.logprobs is not None:
            raise f.bad("cannot be used together with logprobs", field="field_confidence")
        if self.echo and any(isinstance(segment, Tokens) for prompt in self.prompt for segment in prompt):
            raise f.bad("not supported for prompts of token ids", "unsupported", "echo")
        if self.echo and self.stream and self.logprobs is not None:
            raise f.bad("not supported with logprobs in a stream", "unsupported", "echo")
        return self

    def names(self) -> Names:
        return {**super().names(), "top_logprobs": "logprobs"}


class _Call:
    """A checked body, its requests, and the constant fields of its answers."""

    def __init__(self, body: Completion, context: Context, model: str) -> None:
        self.body = body
        self.n = body.n or 1
        check_bounds(context, len(body.prompt), len(body.prompt) * (body.best_of or self.n))
        self.head = {"id": new_id("cmpl"), "object": "text_completion", "created": int(time.time()), "model": model}
        self.requests = [self._request(context, i, prompt) for i, prompt in enumerate(body.prompt)]

    def _request(self, context: Context, i: int, prompt: Prompt) -> GenerateRequest:
        return make_request(
            self.body,
            context,
            id=f"{self.head['id']}-{i}",
            prompt=prompt,
            sampling=replace(self.body.sampling(DEFAULT_TOKENS), best_of=self._drawn()),
            logprobs=self._logprobs(),
        )

    def _drawn(self) -> int | None:
        """How many samples are drawn, where they are more than those shown."""
        return self.body.best_of if self.body.best_of != self.n else None

    def _logprobs(self) -> LogprobParams | None:
        if self.body.logprobs is None:
            return None
        return LogprobParams(output=True, prompt_start=0 if self.body.echo else None, top=self.body.logprobs)

    def choice(self, i: int, result: Result, index: int) -> dict[str, Any]:
        sample = result.samples[index]
        entries = (*result.prompt_logprobs, *sample.logprobs) if self.body.echo else sample.logprobs
        return {
            "index": i * self.n + index,
            "text": self.echoed(i) + sample.text,
            "logprobs": self._shown(entries, 0),
            "finish_reason": finish_reason(sample.finish),
            **sure_of(self.body, sample.text, sample.logprobs),
        }

    def delta(self, i: int, sample: Sample, chunk: Chunk, text: str) -> dict[str, Any]:
        """What a chunk adds to its choice."""
        return {
            "index": i * self.n + chunk.index,
            "text": text,
            "logprobs": self._shown(chunk.logprobs, len(sample.text) - len(chunk.text)),
            "finish_reason": finish_reason(chunk.finish),
        }

    def echoed(self, i: int) -> str:
        return prompt_text(self.requests[i].prompt) if self.body.echo else ""

    def _shown(self, entries: Sequence[TokenLogprob], offset: int) -> dict[str, Any] | None:
        return None if self.body.logprobs is None else completion_logprobs(entries, offset)


@router.post("/v1/completions", responses=STREAMED)
async def completions(body: Completion, context: Ctx) -> Response:
    """Continue one or several prompts."""
    if body.stream:
        return _Streamed(context, await _call(body, context)).response()
    return Answer(answer(body, context))


async def _call(body: Completion, context: Context) -> _Call:
    served = await context.check_model(body.model)
    with naming(body.names()):
        return _Call(body, context, served)


async def answer(body: Completion, context: Context) -> dict[str, Any]:
    """The answer to a body that asks for no stream."""
    call = await _call(body, context)
    with naming(body.names()):
        results = await collect(context.backend, call.requests)
    choices = [call.choice(i, result, index) for i, result in enumerate(results) for index in range(call.n)]
    return {**call.head, "choices": choices, "usage": openai_usage([result.usage for result in results])}


class _Streamed:
    """The events of an answer: of all its requests, as they come."""

    def __init__(self, context: Context, call: _Call) -> None:
        self._call = call
        self._context = context
        self._results = results_for(call.requests)
        self._envelope = Envelope(call.head, "text", include_usage=call.body.include_usage)

    def response(self) -> Response:
        events = together([self._events(i) for i in range(len(self._results))])
        return EventStream(events, self._context.config.write_timeout, self._usage)

    async def _events(self, i: int) -> AsyncGenerator[bytes]:
        result, begun = self._results[i], set[int]()
        with naming(self._call.body.names()):
            async with closing(self._context.backend.generate(self._call.requests[i])) as chunks:
                async for chunk in chunks:
                    result.add(chunk)
                    text = chunk.text if chunk.index in begun else self._call.echoed(i) + chunk.text
                    if text or chunk.logprobs or chunk.finish is not None:
                        begun.add(chunk.index)
                        yield self._event(i, chunk, text)

    def _event(self, i: int, chunk: Chunk, text: str) -> bytes:
        if not chunk.logprobs and chunk.finish is None:
            return self._envelope.text(i * self._call.n + chunk.index, text)
        return self._envelope.choice(self._call.delta(i, self._results[i].samples[chunk.index], chunk, text))

    def _usage(self) -> bytes:
        return self._envelope.usage(openai_usage([result.usage for result in self._results]))
