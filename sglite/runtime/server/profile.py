"""Profiling the engine, by the routes of SGLang's clients; admin only. What was recorded is the second one's answer."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from fastapi import APIRouter
from starlette.responses import Response

from sglite.errors import UnsupportedError
from sglite.runtime.server.context import Context, Ctx
from sglite.runtime.server.jsonbody import StrictRoute

router = APIRouter(route_class=StrictRoute, tags=["native"])


@runtime_checkable
class Profiled(Protocol):
    async def start_profile(self) -> None:
        """Raises InvalidRequestError where one is being recorded."""
        ...

    async def stop_profile(self) -> str:
        """The recorded profile in Chrome's trace format. Raises InvalidRequestError where none is being recorded."""
        ...


@router.get("/start_profile")
@router.post("/start_profile", include_in_schema=False)
async def start_profile(context: Ctx) -> dict[str, Any]:
    """Record what the engine's thread does, until /stop_profile or for a minute at most."""
    await _profiled(context).start_profile()
    return {"success": True, "message": "recording; GET /stop_profile gives the profile"}


@router.get("/stop_profile", response_class=Response, responses={200: {"content": {"application/json": {}}}})
@router.post("/stop_profile", include_in_schema=False)
async def stop_profile(context: Ctx) -> Response:
    """The profile in Chrome's trace format, for chrome://tracing or ui.perfetto.dev."""
    return Response(await _profiled(context).stop_profile(), media_type="application/json")


def _profiled(context: Context) -> Profiled:
    engine = context.service.engine
    if not isinstance(engine, Profiled):
        raise UnsupportedError("this server's backend cannot be profiled")
    return engine
