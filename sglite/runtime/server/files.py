"""``/v1/files`` and ``/v1/batches``, as the openai package uses them. What one key keeps, no other sees."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Literal

from fastapi import APIRouter, File, Form, Query, UploadFile
from pydantic import Field
from starlette.responses import FileResponse, Response

from sglite.errors import InvalidRequestError, UnsupportedError
from sglite.runtime.server import fields as f
from sglite.runtime.server.batches import BatchRunner, new_batch
from sglite.runtime.server.batchlines import ENDPOINTS
from sglite.runtime.server.context import Context, Ctx
from sglite.runtime.server.jsonbody import StrictRoute
from sglite.runtime.server.store import Store, page

UPLOADS = frozenset({"/v1/files"})
MAX_NAME = 255
Limit = Annotated[int, Query(ge=1, le=10_000)]
After = Annotated[str | None, Query(max_length=128)]

router = APIRouter(route_class=StrictRoute, tags=["batches"])


class BatchBody(f.Body):
    input_file_id: Annotated[str, Field(max_length=128)]
    endpoint: str
    completion_window: Annotated[str, Field(pattern=r"^[1-9][0-9]{0,2}h$")]
    metadata: Annotated[dict[str, f.Label], Field(max_length=16)] | None = None
    output_expires_after: f.Unsupported = None


# -------------------------------------------------------------------------------------------------------------- files


@router.post("/v1/files")
async def upload(
    context: Ctx, file: Annotated[UploadFile, File()], purpose: Annotated[Literal["batch"], Form()]
) -> dict[str, Any]:
    """Keep a file of requests, one JSON object a line."""
    name = (file.filename or "upload")[:MAX_NAME]
    return await asyncio.to_thread(_store(context).add_file, context.caller.namespace, name, purpose, file.file)


@router.get("/v1/files")
async def list_files(
    context: Ctx,
    after: After = None,
    limit: Limit = 10_000,
    order: Literal["asc", "desc"] = "desc",
    purpose: Annotated[str | None, Query(max_length=64)] = None,
) -> dict[str, Any]:
    files = await asyncio.to_thread(_store(context).files, context.caller.namespace, purpose)
    return page(files if order == "desc" else files[::-1], after, limit)


@router.get("/v1/files/{file_id}")
async def get_file(file_id: str, context: Ctx) -> dict[str, Any]:
    return await asyncio.to_thread(_store(context).file, context.caller.namespace, file_id)


@router.get("/v1/files/{file_id}/content", response_class=FileResponse)
async def get_content(file_id: str, context: Ctx) -> Response:
    path = await asyncio.to_thread(_store(context).content, context.caller.namespace, file_id)
    return FileResponse(path, media_type="application/octet-stream")


@router.delete("/v1/files/{file_id}")
async def delete_file(file_id: str, context: Ctx) -> dict[str, Any]:
    await asyncio.to_thread(_store(context).delete_file, context.caller.namespace, file_id)
    return {"id": file_id, "object": "file", "deleted": True}


# ------------------------------------------------------------------------------------------------------------ batches


@router.post("/v1/batches")
async def create_batch(body: BatchBody, context: Ctx) -> dict[str, Any]:
    """Run a file of requests at low priority; it goes on after a restart."""
    if body.endpoint not in ENDPOINTS:
        raise InvalidRequestError(f"endpoint must be one of {', '.join(ENDPOINTS)}", param="endpoint")
    await asyncio.to_thread(_store(context).file, context.caller.namespace, body.input_file_id)
    batch = new_batch(body.endpoint, body.input_file_id, body.completion_window, body.metadata)
    await _runner(context).submit(context.caller.namespace, batch)
    return batch


@router.get("/v1/batches")
async def list_batches(context: Ctx, after: After = None, limit: Limit = 20) -> dict[str, Any]:
    return page(await asyncio.to_thread(_store(context).batches, context.caller.namespace), after, limit)


@router.get("/v1/batches/{batch_id}")
async def get_batch(batch_id: str, context: Ctx) -> dict[str, Any]:
    return await asyncio.to_thread(_store(context).batch, context.caller.namespace, batch_id)


@router.post("/v1/batches/{batch_id}/cancel")
async def cancel_batch(batch_id: str, context: Ctx) -> dict[str, Any]:
    return await _runner(context).cancel(context.caller.namespace, batch_id)


def _runner(context: Context) -> BatchRunner:
    runner = context.service.batches
    if runner is None:
        raise UnsupportedError("this server keeps no files and batches; start it with --data-folder")
    return runner


def _store(context: Context) -> Store:
    return _runner(context).store
