"""``/v1/chat/completions``: the model's own chat template around the messages, OpenAI's shapes around the answer."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import Field, model_validator
from starlette.responses import Response

from sglite.errors import UnsupportedError
from sglite.protocol import GenerateRequest, LogprobParams, ModelInfo, Prompt, TokenLogprob, Usage, prompt_text
from sglite.runtime.server import fields as f
from sglite.runtime.server.answers import Said
from sglite.runtime.server.context import Context, Ctx, new_id
from sglite.runtime.server.envelope import Envelope
from sglite.runtime.server.jsonbody import StrictRoute
from sglite.runtime.server.messages import AssistantMessage, Messages, said_in
from sglite.runtime.server.metrics import Metrics
from sglite.runtime.server.naming import Names, naming
from sglite.runtime.server.openai_fields import OpenAIBody, check_bounds, make_request, sure_of
from sglite.runtime.server.prompts import TemplateArguments, render, template_of
from sglite.runtime.server.results import total_usage
from sglite.runtime.server.shapes import chat_logprobs, openai_usage
from sglite.runtime.server.streams import STREAMED, Answer, EventStream
from sglite.runtime.server.toolformats import reasoning_for, tool_format
from sglite.runtime.server.tools import ToolChoice, Tools, toolbox
from sglite.runtime.server.turns import CallPiece, Piece, plain_turn, tool_turns

log = logging.getLogger("sglite.server")
router = APIRouter(route_class=StrictRoute, tags=["openai"])

TIER_PRIORITY = {"auto": 0, "default": 0, "flex": -10, "priority": 10}


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

    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    chat_template_kwargs: TemplateArguments | None = None
    add_generation_prompt: bool | None = True
    continue_final_message: bool | None = False

    audio: f.Unsupported = None
    chat_template: f.Unsupported = None
    function_call: f.Unsupported = None
    functions: f.Unsupported = None
    moderation: f.Unsupported = None
    prediction: f.Unsupported = None
    prompt_cache_key: f.Unsupported = None
    prompt_cache_options: f.Unsupported = None
    prompt_cache_retention: f.Unsupported = None
    reasoning_effort: f.Unsupported = None
    verbosity: f.Unsupported = None
    web_search_options: f.Unsupported = None

    @model_validator(mode="after")
    def _chat_consistent(self) -> ChatCompletion:
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise f.bad("differs from max_completion_tokens; give one", field="max_tokens")
        if self.top_logprobs is not None and not self.logprobs:
            raise f.bad("needs logprobs: true", field="top_logprobs")
        if self.field_confidence and self.logprobs:
            raise f.bad("cannot be used together with logprobs", field="field_confidence")
        return self

    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def names(self) -> Names:
        limit = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        tools = {"json_schema": "tools", "choices": "tools"} if self.tools and self.tool_choice != "none" else {}
        return {**super().names(), "prompt": "messages", "max_new_tokens": limit, "max_tokens": limit, **tools}


class _Call:
    """A checked body, its request, and the constant fields of its answers."""

    def __init__(self, body: ChatCompletion, context: Context, model: ModelInfo, served: str) -> None:
        self.body = body
        self.n = body.n or 1
        check_bounds(context, 1, self.n)
        self.id = new_id("chatcmpl")
        self._created = int(time.time())
        self._served = served
        self._backend = context.backend
        self._metrics = context.service.metrics
        self._model = model
        self._box = toolbox(body.tools, body.tool_choice, body.parallel_tool_calls)
        self._check_tools()
        template = template_of(model)
        self._format = tool_format(context.config.tool_format, template)
        prompt = render(
            model,
            body.messages,
            tools=body.tools if body.tool_choice != "none" else None,
            continues=bool(body.continue_final_message),
            generation=body.add_generation_prompt is not False,
            variables=body.chat_template_kwargs,
        )
        self._reasoning = reasoning_for(context.config.reasoning_format, template, prompt_text(prompt))
        if body.field_confidence and self._reasoning is not None:
            message = "field_confidence is not supported where the model's thoughts come before its answer"
            raise UnsupportedError(message, param="field_confidence")
        self._answers = context.service.answers
        self._request = self._make_request(context, self._recalled(context, prompt))

    def _check_tools(self) -> None:
        if self._box is None:
            return
        lacking = {"json_schema", "choices"} - self._model.capabilities.constraints
        if lacking:
            raise UnsupportedError(f"tools need constraints of kind {' and '.join(sorted(lacking))}", param="tools")
        if self.body.constraint() is not None:
            raise UnsupportedError("response_format cannot be combined with tools", param="response_format")
        if self.body.logprobs:
            raise UnsupportedError("logprobs cannot be combined with tools", param="logprobs")

    def _recalled(self, context: Context, prompt: Prompt) -> Prompt:
        """The prompt with the answers we gave before as the tokens they were made of."""
        said = [said_in(message) for message in self.body.messages if isinstance(message, AssistantMessage)]
        if not said:
            return prompt
        recalled = self._answers.recall(context.namespace(self.body.cache_salt), prompt, said)
        self._metrics.recalled.inc(recalled.exact)
        self._metrics.rewritten.inc(recalled.rewritten)
        if recalled.rewritten:
            log.info("%s: %d earlier answers stand otherwise than they were given", self.id, recalled.rewritten)
        return recalled.prompt

    def _remember(self, said: Said, written: Prompt) -> None:
        self._answers.remember(self._request.namespace, self._request.prompt, said, written)

    def _make_request(self, context: Context, prompt: Prompt) -> GenerateRequest:
        body = self.body
        return make_request(
            body,
            context,
            id=self.id,
            prompt=prompt,
            sampling=body.sampling(self._model.context_length),
            logprobs=LogprobParams(output=True, top=body.top_logprobs or 0) if body.logprobs else None,
            priority=TIER_PRIORITY[body.service_tier or "auto"],
        )

    def pieces(self) -> AsyncGenerator[Piece]:
        if self._box is None:
            return plain_turn(self._backend, self._request, self._reasoning, self._remember)
        special = self._model.special_tokens
        turns = tool_turns(
            self._backend, self._request, self._box, self._format, self._reasoning, special, self._remember
        )
        return _counting_calls(turns, self._metrics)

    def head(self, kind: str) -> dict[str, Any]:
        asked = self.body.service_tier
        tier = {"service_tier": "default" if asked == "auto" else asked} if asked else {}
        return {"id": self.id, "object": kind, "created": self._created, "model": self._served, **tier}

    def logprobs(self, entries: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        return chat_logprobs(entries) if self.body.logprobs else None


async def _counting_calls(turns: AsyncGenerator[Piece], metrics: Metrics) -> AsyncGenerator[Piece]:
    async with aclosing(turns) as pieces:
        async for piece in pieces:
            if piece.call is not None and piece.call.name is not None:
                metrics.tool_calls.inc()
            yield piece


@router.post("/v1/chat/completions", responses=STREAMED)
async def chat_completions(body: ChatCompletion, context: Ctx) -> Response:
    """Answer a conversation."""
    if body.stream:
        streamed = _Streamed(await _call(body, context))
        return EventStream(streamed.events(), context.config.write_timeout, streamed.usage)
    return Answer(answer(body, context))


async def _call(body: ChatCompletion, context: Context) -> _Call:
    served = await context.check_model(body.model)
    model = await context.model()
    with naming(body.names()):
        return _Call(body, context, model, served)


# --------------------------------------------------------------------------------------------------- the whole answer


@dataclass(slots=True)
class _Choice:
    """One choice's pieces put together."""

    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: str | None = None
    usage: Usage | None = None

    def add(self, piece: Piece) -> None:
        self.content += piece.content
        self.reasoning += piece.reasoning
        self.logprobs += piece.logprobs
        self.finish = piece.finish or self.finish
        self.usage = piece.usage or self.usage
        if piece.call is not None:
            self._add_call(piece.call)

    def _add_call(self, part: CallPiece) -> None:
        if part.name is not None:
            function = {"name": part.name, "arguments": ""}
            self.calls.append({"id": part.id, "type": "function", "function": function})
        self.calls[part.index]["function"]["arguments"] += part.arguments

    def message(self) -> dict[str, Any]:
        calls = {"tool_calls": self.calls} if self.calls else {}
        thought = {"reasoning_content": self.reasoning} if self.reasoning else {}
        content = self.content if self.content or not self.calls else None
        return {"role": "assistant", "content": content, "refusal": None, **thought, **calls}


async def answer(body: ChatCompletion, context: Context) -> dict[str, Any]:
    """The answer to a body that asks for no stream."""
    call = await _call(body, context)
    choices = [_Choice() for _ in range(call.n)]
    with naming(body.names()):
        async for piece in call.pieces():
            choices[piece.index].add(piece)
    shown = [
        {
            "index": index,
            "message": choice.message(),
            "logprobs": call.logprobs(choice.logprobs),
            "finish_reason": choice.finish,
            **sure_of(body, choice.content, choice.logprobs),
        }
        for index, choice in enumerate(choices)
    ]
    usage = openai_usage([total_usage(choice.usage for choice in choices)])
    echoed = {"metadata": call.body.metadata} if call.body.metadata else {}
    return {**call.head("chat.completion"), "choices": shown, "usage": usage, **echoed}


# ----------------------------------------------------------------------------------------------------------- streamed


class _Streamed:
    """A role chunk per choice, deltas, a finish chunk per choice, and the usage if it was asked for."""

    def __init__(self, call: _Call) -> None:
        self._call = call
        head = call.head("chat.completion.chunk")
        self._envelope = Envelope(head, "delta", include_usage=call.body.include_usage)
        self._begun: set[int] = set()
        self._usages: dict[int, Usage | None] = {}
        """By choice: it may be told before the end, then up to there."""

    async def events(self) -> AsyncGenerator[bytes]:
        with naming(self._call.body.names()):
            async with aclosing(self._call.pieces()) as pieces:
                async for piece in pieces:
                    yield self._event(piece)

    def usage(self) -> bytes:
        return self._envelope.usage(openai_usage([total_usage(self._usages.values())]))

    def _event(self, piece: Piece) -> bytes:
        if piece.index in self._begun and piece.is_said:
            return self._envelope.text(piece.index, piece.content)
        first = piece.index not in self._begun
        self._begun.add(piece.index)
        self._usages[piece.index] = piece.usage or self._usages.get(piece.index)
        return b"".join(map(self._envelope.choice, _deltas(self._call, piece, first=first)))


def _deltas(call: _Call, piece: Piece, *, first: bool) -> list[dict[str, Any]]:
    found = [_delta(piece, {"role": "assistant", "content": "", "refusal": None})] if first else []
    if piece.reasoning:
        found.append(_delta(piece, {"reasoning_content": piece.reasoning}))
    if piece.content or piece.logprobs:
        found.append({**_delta(piece, {"content": piece.content}), "logprobs": call.logprobs(piece.logprobs)})
    if piece.call is not None:
        found.append(_delta(piece, {"tool_calls": [_call_delta(piece.call)]}))
    if piece.finish is not None:
        found.append({**_delta(piece, {}), "finish_reason": piece.finish})
    return found


def _delta(piece: Piece, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": piece.index, "delta": delta, "logprobs": None, "finish_reason": None}


def _call_delta(part: CallPiece) -> dict[str, Any]:
    if part.name is None:
        return {"index": part.index, "function": {"arguments": part.arguments}}
    function = {"name": part.name, "arguments": part.arguments}
    return {"index": part.index, "id": part.id, "type": "function", "function": function}
