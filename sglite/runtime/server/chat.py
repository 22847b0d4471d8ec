"""``/v1/chat/completions``: the model's own chat template around the messages, OpenAI's shapes around the answer."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import Field, model_validator
from starlette.responses import Response

from sglite.chat import render_messages
from sglite.errors import UnsupportedError
from sglite.protocol import Chunk, GenerateRequest, LogprobParams, ModelInfo, Prompt, Text
from sglite.runtime.server import fields as f
from sglite.runtime.server.context import Context, Ctx, new_id
from sglite.runtime.server.jsonbody import StrictRoute
from sglite.runtime.server.messages import Messages, for_template
from sglite.runtime.server.openai_fields import OpenAIBody, check_bounds, finish_reason, make_request
from sglite.runtime.server.results import Result, collect, follow, results_for
from sglite.runtime.server.shapes import chat_logprobs, openai_usage
from sglite.runtime.server.streams import DONE, Answer, EventStream, event

router = APIRouter(route_class=StrictRoute, tags=["openai"])

TIER_PRIORITY = {"auto": 0, "default": 0, "flex": -10, "priority": 10}


class TemplateArguments(f.Body):
    """The template variables a client may set."""

    enable_thinking: bool | None = None
    thinking: bool | None = None


class ChatCompletion(OpenAIBody):
    messages: Messages
    max_completion_tokens: f.Count | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    service_tier: Literal["auto", "default", "flex", "priority"] | None = None
    metadata: Annotated[dict[str, f.Label], Field(max_length=16)] | None = None
    safety_identifier: f.Label | None = None
    store: Annotated[bool | None, f.only(False)] = None
    modalities: Annotated[list[str] | None, f.only(["text"])] = None

    chat_template_kwargs: TemplateArguments | None = None
    add_generation_prompt: bool | None = True
    continue_final_message: bool | None = False

    audio: f.Unsupported = None
    chat_template: f.Unsupported = None
    function_call: f.Unsupported = None
    functions: f.Unsupported = None
    moderation: f.Unsupported = None
    parallel_tool_calls: f.Unsupported = None
    prediction: f.Unsupported = None
    prompt_cache_key: f.Unsupported = None
    prompt_cache_options: f.Unsupported = None
    prompt_cache_retention: f.Unsupported = None
    reasoning_effort: f.Unsupported = None
    tool_choice: f.Unsupported = None
    tools: f.Unsupported = None
    verbosity: f.Unsupported = None
    web_search_options: f.Unsupported = None

    @model_validator(mode="after")
    def _chat_consistent(self) -> ChatCompletion:
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise f.bad("max_tokens and max_completion_tokens differ; give one")
        if self.top_logprobs is not None and not self.logprobs:
            raise f.bad("top_logprobs needs logprobs: true")
        if self.continue_final_message and (self.messages[-1].role != "assistant" or len(self.messages) < 2):
            raise f.bad("continue_final_message needs an assistant's message at the end of a conversation")
        return self

    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class _Call:
    """A checked body, its request, and the constant fields of its answers."""

    def __init__(self, body: ChatCompletion, context: Context, model: ModelInfo, served: str) -> None:
        self.body = body
        self.n = body.n or 1
        check_bounds(context, 1, self.n)
        self.id = new_id("chatcmpl")
        self._created = int(time.time())
        self._served = served
        self.request = self._request(context, model)

    def _request(self, context: Context, model: ModelInfo) -> GenerateRequest:
        body = self.body
        logprobs = LogprobParams(output=True, top=body.top_logprobs or 0) if body.logprobs else None
        return make_request(
            body,
            context,
            id=self.id,
            prompt=render(body, model),
            sampling=body.sampling(model.context_length),
            logprobs=logprobs,
            priority=TIER_PRIORITY[body.service_tier or "auto"],
        )

    def head(self, kind: str) -> dict[str, Any]:
        asked = self.body.service_tier
        tier = {"service_tier": "default" if asked == "auto" else asked} if asked else {}
        return {"id": self.id, "object": kind, "created": self._created, "model": self._served, **tier}


def render(body: ChatCompletion, model: ModelInfo) -> Prompt:
    """The prompt of a conversation. Contents never become special tokens."""
    if model.chat_template is None:
        raise UnsupportedError("this model has no chat template; use /v1/completions", param="messages")
    *before, last = [for_template(message) for message in body.messages]
    begun = (Text(last["content"] or ""),) if body.continue_final_message else ()
    given = body.chat_template_kwargs.model_dump(exclude_none=True) if body.chat_template_kwargs else {}
    prompt = render_messages(
        model.chat_template,
        before if begun else [*before, last],
        bos_token=model.bos_token,
        eos_token=model.eos_token,
        special_tokens=model.special_tokens,
        add_generation_prompt=bool(begun) or body.add_generation_prompt is not False,
        **given,
    )
    return (*prompt, *begun)


@router.post("/v1/chat/completions")
async def chat_completions(body: ChatCompletion, context: Ctx) -> Response:
    """Answer a conversation."""
    served = await context.check_model(body.model)
    call = _Call(body, context, await context.model(), served)
    if body.stream:
        return EventStream(_events(context, call), context.config.write_timeout)
    return Answer(_answer(context, call))


async def _answer(context: Context, call: _Call) -> dict[str, Any]:
    (result,) = await collect(context.backend, [call.request])
    choices = [_choice(call, result, index) for index in range(call.n)]
    echoed = {"metadata": call.body.metadata} if call.body.metadata else {}
    return {**call.head("chat.completion"), "choices": choices, "usage": openai_usage([result]), **echoed}


def _choice(call: _Call, result: Result, index: int) -> dict[str, Any]:
    sample = result.samples[index]
    return {
        "index": index,
        "message": {"role": "assistant", "content": sample.text, "refusal": None},
        "logprobs": chat_logprobs(sample.logprobs) if call.body.logprobs else None,
        "finish_reason": finish_reason(sample.finish),
    }


async def _events(context: Context, call: _Call) -> AsyncGenerator[bytes]:
    """A role chunk per choice, deltas, a finish chunk per choice, and the usage if it was asked for."""
    tail = {"usage": None} if call.body.include_usage else {}
    head = call.head("chat.completion.chunk")
    begun: set[int] = set()
    results = results_for([call.request])
    async with aclosing(follow(context.backend, [call.request], results)) as steps:
        async for _, chunk in steps:
            for choice in _deltas(call, chunk, first=chunk.index not in begun):
                begun.add(chunk.index)
                yield event({**head, "choices": [choice], **tail})
    if call.body.include_usage:
        yield event({**head, "choices": [], "usage": openai_usage(results)})
    yield DONE


def _deltas(call: _Call, chunk: Chunk, *, first: bool) -> list[dict[str, Any]]:
    found = []
    if first:
        found.append(_delta(chunk.index, {"role": "assistant", "content": "", "refusal": None}))
    if chunk.text or chunk.logprobs:
        logprobs = chat_logprobs(chunk.logprobs) if call.body.logprobs else None
        found.append(_delta(chunk.index, {"content": chunk.text}, logprobs))
    if chunk.finish is not None:
        found.append({**_delta(chunk.index, {}), "finish_reason": finish_reason(chunk.finish)})
    return found


def _delta(index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}
