"""``/v1/embeddings`` in OpenAI's shape, over backends that can embed; refused by name over those that cannot."""

from __future__ import annotations

import base64
import struct
from collections.abc import Sequence
from typing import Any, Literal, Protocol, runtime_checkable

from fastapi import APIRouter

from sglite.errors import UnsupportedError
from sglite.protocol import Prompt
from sglite.runtime.server import fields as f
from sglite.runtime.server.context import Ctx
from sglite.runtime.server.jsonbody import StrictRoute
from sglite.runtime.server.openai_fields import check_bounds

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


@router.post("/v1/embeddings")
async def embeddings(body: Embeddings, context: Ctx) -> dict[str, Any]:
    """A vector for each input."""
    served = await context.check_model(body.model)
    check_bounds(context, len(body.input), 1)
    engine = context.service.engine
    if not isinstance(engine, Embedding):
        raise UnsupportedError("this server's backend cannot embed", param="model")
    found = await engine.embed(body.input, context.namespace())
    tokens = sum(count for count, _ in found)
    data = [
        {"object": "embedding", "index": i, "embedding": _encoded(vector, body.encoding_format)}
        for i, (_, vector) in enumerate(found)
    ]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "data": data, "model": served, "usage": usage, "pooling": engine.pooling}


def _encoded(vector: Sequence[float], encoding: str) -> list[float] | str:
    if encoding == "float":
        return list(vector)
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
