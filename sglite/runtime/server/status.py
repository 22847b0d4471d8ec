"""What is served and how it is: models, health, and what SGLang's clients ask before they start."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import PlainTextResponse, Response

import sglite
from sglite.errors import NotFoundError, UnavailableError
from sglite.runtime.server import fields as f
from sglite.runtime.server.context import Context, Ctx, Watched
from sglite.runtime.server.jsonbody import StrictRoute

router = APIRouter(route_class=StrictRoute, tags=["status"])


class Flush(f.Body):
    """SGLang's clients send ``empty_cache``; the memory stays with the pool either way."""

    empty_cache: bool = True


@router.get("/health")
@router.get("/ping", include_in_schema=False)
async def health() -> dict[str, Any]:
    """The HTTP process answers."""
    return {"status": "ok"}


@router.get("/ready")
async def ready(context: Ctx) -> dict[str, Any]:
    """The model is loaded and the server takes requests."""
    await _check_ready(context)
    return {"status": "ready"}


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(context: Ctx) -> Response:
    """Prometheus' text format."""
    found = context.service.metrics
    try:
        await _check_ready(context)
        found.ready.set(1)
    except UnavailableError:
        found.ready.set(0)
    return Response(await found.exposition(context.service.engine), media_type=CONTENT_TYPE_LATEST)


@router.get("/v1/models")
async def models(context: Ctx) -> dict[str, Any]:
    return {"object": "list", "data": [await _model_card(context)]}


@router.get("/v1/models/{model:path}")
async def model(model: str, context: Ctx) -> dict[str, Any]:
    await context.check_model(model)
    return await _model_card(context)


@router.get("/get_model_info")
@router.get("/model_info", include_in_schema=False)
async def get_model_info(context: Ctx) -> dict[str, Any]:
    model = await context.model()
    return {
        "model_path": model.name,
        "tokenizer_path": model.name,
        "served_model_name": await context.served_name(),
        "is_generation": True,
        "context_length": model.context_length,
        "vocab_size": model.vocab_size,
        "chat_template": model.chat_template,
    }


@router.get("/server_info")
@router.get("/get_server_info", include_in_schema=False)
async def server_info(context: Ctx) -> dict[str, Any]:
    model = await context.model()
    return {
        "version": sglite.__version__,
        "model_path": model.name,
        "uptime_seconds": time.time() - context.service.started,
        "max_total_num_tokens": model.details.get("kv_tokens"),
        "engine": dict(model.details),
        "status": "ready",
    }


@router.post("/flush_cache")
async def flush_cache(context: Ctx, body: Flush | None = None) -> dict[str, Any]:
    """Forget every cached prefix that no running request uses."""
    await context.backend.flush_cache()
    return {"success": True, "message": "cache flushed"}


async def _check_ready(context: Context) -> None:
    """Raises UnavailableError."""
    if context.service.draining:
        raise UnavailableError("the server is shutting down")
    await context.model()
    if isinstance(context.service.engine, Watched):
        context.service.engine.check_ready()


async def _model_card(context: Context) -> dict[str, Any]:
    model = await context.model()
    served = await context.served_name()
    if not served:
        raise NotFoundError("no model is served")
    return {
        "id": served,
        "object": "model",
        "created": int(context.service.started),
        "owned_by": "sglite",
        "root": model.name,
        "parent": None,
        "max_model_len": model.context_length,
    }
