"""Anthropic's Messages API as a Backend, by HTTP alone."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from typing import Any

import httpx

from sglite.chat import MESSAGES
from sglite.errors import InvalidRequestError, RequestError
from sglite.lang.backends.client import Client
from sglite.lang.backends.service import Service, messages_of
from sglite.lang.backends.service import api_key as find_key
from sglite.protocol import Capabilities, Chunk, Finish, GenerateRequest, ModelInfo, SamplingParams, Usage

_VERSION = "2023-06-01"
_SAMPLING = frozenset({"temperature", "top_p", "top_k", "stop"})
_FINISH: Mapping[str, Finish] = {
    "end_turn": Finish("stop"),
    "stop_sequence": Finish("stop"),
    "max_tokens": Finish("length"),
}
_DEFAULT = SamplingParams()


class Anthropic(Service):
    """A Claude model. ``api_key`` defaults to ANTHROPIC_API_KEY. The service takes one sample per request, continues
    begun answers, and has neither constraints nor logprobs: those are refused with UnsupportedError."""

    def __init__(
        self,
        model_name: str,
        *,
        base_url: str = "https://api.anthropic.com/v1",
        api_key: str | None = None,
        context_length: int = 200_000,
        timeout: float = 600.0,
        retries: int = 2,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        headers = {
            "x-api-key": find_key(api_key, "ANTHROPIC_API_KEY", "Anthropic"),
            "anthropic-version": _VERSION,
        }
        self._client = Client(base_url, headers, timeout=timeout, retries=retries, transport=transport)
        capabilities = Capabilities(chat_only=True, n=False, sampling=_SAMPLING)
        super().__init__(ModelInfo(model_name, context_length, chat_template=MESSAGES, capabilities=capabilities))

    async def _answer(self, request: GenerateRequest) -> AsyncGenerator[Chunk]:
        events = self._client.events("/messages", self._body(request), is_last=_is_last)
        async with aclosing(events):
            async for chunk in _read(events):
                yield chunk

    async def aclose(self) -> None:
        await self._client.aclose()

    def _body(self, request: GenerateRequest) -> dict[str, Any]:
        messages = messages_of(request.prompt, self._info, may_begin=True)
        system = "\n\n".join(m["content"] for m in messages if m["role"] == "system")
        turns = [m for m in messages if m["role"] != "system"]
        if not turns:
            raise InvalidRequestError("the service needs at least one turn of a user", param="prompt")
        sampling = request.sampling
        body = {"model": self._info.name, "messages": turns, "max_tokens": sampling.max_new_tokens, "stream": True}
        body |= {"system": system} if system else {}
        body |= {"stop_sequences": list(sampling.stop)} if sampling.stop else {}
        given = ("temperature", "top_p", "top_k")
        return body | {n: getattr(sampling, n) for n in given if getattr(sampling, n) != getattr(_DEFAULT, n)}


async def _read(events: AsyncIterator[Mapping[str, Any]]) -> AsyncIterator[Chunk]:
    prompt = cached = 0
    finish: Finish | None = None
    async for event in events:
        kind = event.get("type")
        if kind == "message_start":
            usage = event["message"].get("usage") or {}
            cached = usage.get("cache_read_input_tokens") or 0
            prompt = (usage.get("input_tokens") or 0) + cached + (usage.get("cache_creation_input_tokens") or 0)
        elif kind == "content_block_delta" and event["delta"].get("text"):
            yield Chunk(text=event["delta"]["text"])
        elif kind == "message_delta":
            finish = _finish(event["delta"])
            completion = (event.get("usage") or {}).get("output_tokens") or 0
            yield Chunk(finish=finish, usage=Usage(prompt, cached, completion))
    if finish is None:
        raise RequestError("the service ended its answer without a reason")


def _finish(delta: Mapping[str, Any]) -> Finish:
    reason = delta.get("stop_reason") or "nothing"
    if reason not in _FINISH:
        raise RequestError(f"the service ended the answer because of {reason}")
    matched = delta.get("stop_sequence")
    return Finish("stop", matched=matched) if matched else _FINISH[reason]


def _is_last(event: Mapping[str, Any]) -> bool:
    return event.get("type") == "message_stop"
