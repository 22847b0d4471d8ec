"""Small routes that SGLang's clients and operators know: a deep health check, aborting."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import Field, model_validator

from sglite.protocol import GenerateRequest, SamplingParams, Text
from sglite.runtime.server import fields as f
from sglite.runtime.server.context import Ctx, new_id
from sglite.runtime.server.jsonbody import StrictRoute
from sglite.runtime.server.results import collect

router = APIRouter(route_class=StrictRoute, tags=["native"])

_DEEP_TIMEOUT = 20.0


class Abort(f.Body):
    rid: f.RequestId | None = None
    abort_all: bool = False

    @model_validator(mode="after")
    def _one(self) -> Abort:
        if (self.rid is None) == (not self.abort_all):
            raise f.bad("give either rid or abort_all: true")
        return self


@router.get("/health_generate")
async def health_generate(context: Ctx) -> dict[str, Any]:
    """The model makes a token."""
    sampling = SamplingParams(max_new_tokens=1, temperature=0.0)
    request = GenerateRequest(new_id("health"), (Text("a"),), sampling, priority=1000, deadline=_DEEP_TIMEOUT)
    await collect(context.backend, [request])
    return {"status": "ok"}


@router.post("/abort_request")
async def abort_request(body: Abort, context: Ctx) -> dict[str, Any]:
    """End a request by the rid its client gave it, or all of the caller's that have one."""
    if body.rid is None:
        return {"success": True, "aborted": context.abort_all()}
    context.abort(body.rid)
    return {"success": True, "aborted": 1}


class Concatenation(f.Body):
    src_rids: Annotated[list[str], Field(max_length=f.MAX_PROMPTS)]
    dst_rid: str


@router.post("/concate_and_append_request")
async def concatenate(body: Concatenation) -> dict[str, Any]:
    """A hint of SGLang's frontend that it joins forks' texts. Their prefixes are found without it: nothing to do."""
    return {"success": True}
