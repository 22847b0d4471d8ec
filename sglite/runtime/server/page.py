"""The page at ``/``: status, a playground, and what programs did. Plain files, and the two routes they need."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from sglite.errors import NotFoundError
from sglite.runtime.server.context import Ctx
from sglite.runtime.server.jsonbody import StrictRoute

router = APIRouter(route_class=StrictRoute, tags=["sglite"])

PATHS = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/ui/app.js": ("app.js", "text/javascript; charset=utf-8"),
    "/ui/style.css": ("style.css", "text/css; charset=utf-8"),
}
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


@cache
def _content(name: str) -> bytes:
    return files("sglite.runtime.server.page_files").joinpath(name).read_bytes()


async def _index() -> Response:
    return _file("/")


async def _script() -> Response:
    return _file("/ui/app.js")


async def _style() -> Response:
    return _file("/ui/style.css")


def _file(path: str) -> Response:
    name, kind = PATHS[path]
    return Response(_content(name), media_type=kind, headers=HEADERS)


for path, endpoint in zip(PATHS, (_index, _script, _style), strict=True):
    router.add_api_route(path, endpoint, methods=["GET"], include_in_schema=False)


@router.get("/v1/sglite/programs")
async def programs(context: Ctx) -> dict[str, Any]:
    """The caller's latest programs, and requests that belong to none."""
    return {"object": "list", "data": context.service.traces.programs(context.caller.namespace)}


@router.get("/v1/sglite/programs/{program}")
async def program(program: str, context: Ctx) -> dict[str, Any]:
    """The calls of one of them, as ``sglite run --trace`` writes them."""
    found = context.service.traces.program(context.caller.namespace, program)
    if found is None:
        raise NotFoundError(f"no program {program!r:.80} ran lately", param="program")
    return found
