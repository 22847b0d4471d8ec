"""The Backend protocol over HTTP, without loss: what ``RuntimeEndpoint`` and other sglite processes speak.

``POST /v1/sglite/generate`` takes a GenerateRequest as ``sglite.codec`` writes it and answers with one event a Chunk
(not cumulative); a failure in mid-stream is an event with ``error``. Unlike the other routes it lets the caller
decide what is text and what are special tokens. ``POST /v1/sglite/end_program`` tells that no more calls come.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Body
from starlette.responses import Response

from sglite.codec import decode, encode
from sglite.protocol import GenerateRequest, end_program
from sglite.runtime.server import fields as f
from sglite.runtime.server.context import Context, Ctx
from sglite.runtime.server.jsonbody import StrictRoute
from sglite.runtime.server.openai_fields import check_bounds
from sglite.runtime.server.streams import STREAMED, EventStream, closing, event

router = APIRouter(route_class=StrictRoute, tags=["sglite"])


class Ended(f.Body):
    """A branch and those below it; "" is the whole program."""

    program: str
    branch: str = ""
    namespace: str = ""


@router.post("/v1/sglite/generate", responses=STREAMED)
async def generate(body: Annotated[dict[str, Any], Body()], context: Ctx) -> Response:
    """Run one GenerateRequest; the answer is always a stream."""
    request = decode(GenerateRequest, body).validate()
    check_bounds(context, 1, request.sampling.n)
    deadline = min(request.deadline or context.config.request_timeout, context.config.request_timeout)
    checked = replace(request, deadline=deadline, namespace=context.namespace(request.namespace))
    return EventStream(_events(context, checked), context.config.write_timeout)


@router.post("/v1/sglite/end_program")
async def end(body: Ended, context: Ctx) -> dict[str, Any]:
    """No more calls come from a program, or from one of its branches: what was kept for them may go."""
    namespace = context.namespace(body.namespace)
    await end_program(context.service.engine, body.program, body.branch, namespace=namespace)
    return {"success": True}


@router.get("/v1/sglite/info")
async def info(context: Ctx) -> Any:
    """The model's description: ModelInfo as ``sglite.codec`` writes it."""
    return encode(await context.model())


async def _events(context: Context, request: GenerateRequest) -> AsyncGenerator[bytes]:
    async with (
        context.in_flight([request.id]),
        closing(context.backend.generate(request)) as chunks,
    ):
        async for chunk in chunks:
            yield event(encode(chunk))
