"""``/v1/embeddings`` in OpenAI's shape, over backends that can embed; refused by name over those that cannot."""

from __future__ import annotations

import asyncio
import base64
import struct
from collections.abc import Sequence
from typing import Any, Literal, Protocol, runtime_checkable

from fastapi import APIRouter
from starlette.responses import Response

from sglite.errors import DeadlineError, UnsupportedError
from sglite.protocol import Prompt
from sglite.runtime.server import fields as f
from sglite.runtime.server.context import Context, Ctx
from sglite.runtime.server.jsonbody import StrictRoute
from sglite.runtime.server.naming import naming
from sglite.runtime.server.openai_fields import check_bounds
from sglite.runtime.server.streams import Answer

router = APIRouter(route_class=StrictRoute, tags=["openai"])


@runtime_checkable
class Embedding(Protocol):
    """``pooling`` tells how a prompt's positions become one vector."""

    pooling: str

    async def embed(self, prompts: Sequence[Prompt], namespace: str = "") -> Sequence[tuple[int, Sequence[float]]]:
        """Each prompt's count of tokens and its vector of length 1."""
        ...


class Embeddings(f.Body):
    input: f.Prompts
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    user: f.Label | None = None
    dimensions: f.Unsupported = None


@router.post("/v1/embeddings", response_model=None)
async def embeddings(body: Embeddings, context: Ctx) -> Response:
    """A vector for each input."""
    return Answer(answer(body, context))


async def answer(body: Embeddings, context: Context) -> dict[str, Any]:
    served = await context.check_model(body.model)
    engine = context.service.engine
    if not isinstance(engine, Embedding):
        raise UnsupportedError("this server's backend cannot embed", param="model")
    with naming({"prompt": "input", "n": "input"}):
        found = await _embedded(engine, body, context)
    tokens = sum(count for count, _ in found)
    context.service.metrics.prompt.inc(tokens)
    data = [
        {"object": "embedding", "index": i, "embedding": _encoded(vector, body.encoding_format)}
        for i, (_, vector) in enumerate(found)
    ]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "data": data, "model": served, "usage": usage, "pooling": engine.pooling}


async def _embedded(engine: Embedding, body: Embeddings, context: Context) -> Sequence[tuple[int, Sequence[float]]]:
    check_bounds(context, len(body.input), len(body.input))
    try:
        async with asyncio.timeout(context.config.request_timeout):
            return await engine.embed(body.input, context.namespace())
    except TimeoutError:
        raise DeadlineError("the request's deadline passed") from None


def _encoded(vector: Sequence[float], encoding: str) -> list[float] | str:
    if encoding == "float":
        return list(vector)
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
