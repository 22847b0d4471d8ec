"""Strict JSON: what Python's own parser lets through and our models must never see is refused here.

UTF-8 only, no byte order mark, no NaN or Infinity or number that overflows into one, no lone surrogates, bounded
depth, no integer beyond what Python converts in linear time. The parser is pydantic's (jiter).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Coroutine
from itertools import accumulate
from typing import Any

import anyio.to_thread
from fastapi.routing import APIRoute
from pydantic_core import from_json
from starlette.requests import Request
from starlette.responses import Response

from sglite.runtime.server.failures import Failure, Refusal

_STRINGS = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_STEP = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
_MAY_OVERFLOW = re.compile(rb"\d[eE]\+?\d{3}|\d{309}")
_THREAD_FROM = 32 << 10
"""Bodies from this size on are parsed off the event loop."""


def parse_json(body: bytes, max_depth: int = 64) -> Any:
    """The value of a JSON text. Raises Refusal (400) that says what is wrong and where."""
    if depth(body) > max_depth:
        raise _refusal(f"the JSON body is nested deeper than {max_depth} levels")
    try:
        value = from_json(body, allow_inf_nan=False, cache_strings="keys")
        if _MAY_OVERFLOW.search(body):
            json.dumps(value, allow_nan=False)
    except ValueError as error:
        raise _refusal(f"the body is not valid JSON: {error}") from None
    return value


def depth(body: bytes) -> int:
    """How deep a JSON text nests, without parsing it; an upper bound where it is malformed."""
    if body.count(b"[") + body.count(b"{") <= 16:
        return 16
    brackets = _STRINGS.sub(b"", body).translate(None, _NOT_BRACKETS)
    return max(accumulate(map(_STEP.__getitem__, brackets)), default=0)


class StrictRequest(Request):
    """A request whose ``json()`` is strict and does not hold up the event loop."""

    async def json(self) -> Any:
        body = await self.body()
        limit: int = self.app.state.service.config.max_depth
        if len(body) < _THREAD_FROM:
            return parse_json(body, limit)
        return await anyio.to_thread.run_sync(parse_json, body, limit)


class StrictRoute(APIRoute):
    """FastAPI's route, with its body read by StrictRequest."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        inner = super().get_route_handler()

        async def handler(request: Request) -> Response:
            return await inner(StrictRequest(request.scope, request.receive))

        return handler


def _refusal(message: str) -> Refusal:
    return Refusal(Failure(400, message, code="invalid_json"))
