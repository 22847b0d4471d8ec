"""The one error body, and the one table from exceptions to statuses.

Every refusal of every route, the router's own 404 and 405 included, is
``{"error": {"message", "type", "param", "code"}}``; a failure in mid-stream is an event with the same body.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.datastructures import FormData
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from sglite import errors

log = logging.getLogger("sglite.server")

_STATUS: tuple[tuple[type[errors.SgliteError], int, str], ...] = (
    (errors.InvalidRequestError, 400, "invalid_request_error"),
    (errors.NotFoundError, 404, "not_found_error"),
    (errors.OverloadedError, 429, "rate_limit_error"),
    (errors.UnavailableError, 503, "server_error"),
    (errors.AbortedError, 409, "aborted_error"),
    (errors.DeadlineError, 504, "server_error"),
)
_RETRY_AFTER = {429: "1", 503: "5"}


@dataclass(frozen=True, slots=True)
class Failure:
    """A refusal or failure as a client sees it."""

    status: int
    message: str
    type: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        return JSONResponse(self.body, self.status, headers=dict(self.headers))


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every answer that is not a success."""

    error: ErrorDetail


RESPONSES: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorBody, "description": "The request cannot be served as it is"},
    500: {"model": ErrorBody, "description": "The request failed"},
    503: {"model": ErrorBody, "description": "The server is starting, shutting down, or lost its model"},
    504: {"model": ErrorBody, "description": "The request took too long"},
}
"""For the document of the API: what every route may answer."""


class Refusal(HTTPException):
    """A failure raised where a request is read, before any model is involved."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.status, failure.message)
        self.failure = failure


def refuse(status: int, message: str, code: str) -> Refusal:
    """A refusal after which the connection is of no use: what else it would bring was not read."""
    return Refusal(Failure(status, message, code=code, headers={"connection": "close"}))


def describe(error: BaseException) -> Failure:
    """How a client sees an exception. Only the text of our own typed errors leaves the process."""
    if isinstance(error, Refusal):
        return error.failure
    if isinstance(error, RequestValidationError):
        return _validation(error)
    if isinstance(error, HTTPException):
        return _http(error)
    for kind, status, name in _STATUS:
        if isinstance(error, kind):
            headers = {"retry-after": _RETRY_AFTER[status]} if status in _RETRY_AFTER else {}
            return Failure(status, str(error), name, _param(error), error.code, headers)
    if isinstance(error, errors.RequestError):
        return Failure(500, str(error), "server_error", code=error.code)
    log.error("unexpected %s", type(error).__name__, exc_info=error)
    return Failure(500, "internal error; the server's log has the details", "server_error", code="internal_error")


def install(app: FastAPI) -> None:
    """Make ``describe`` the answer to every exception that a route or the router raises."""

    def answer(request: Request, error: Exception) -> Response:
        return describe(error).response()

    for kind in (errors.SgliteError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, answer)


def _param(error: errors.SgliteError) -> str | None:
    param = getattr(error, "param", None)
    pointer = getattr(error, "pointer", None)
    return f"{param or 'constraint'}{pointer}" if pointer and pointer.startswith("/") else param


_HTTP_MESSAGES = {
    404: "this server has no such route; /openapi.json lists those it has",
    405: "this route does not take that method; the header Allow names those it takes",
}
"""What the router says no more of than a phrase."""


def _http(error: HTTPException) -> Failure:
    phrase = HTTPStatus(error.status_code).phrase
    kind = "not_found_error" if error.status_code == 404 else "invalid_request_error"
    if error.status_code >= 500:
        kind = "server_error"
    message = error.detail if error.detail != phrase else _HTTP_MESSAGES.get(error.status_code, phrase.lower())
    return Failure(
        error.status_code, message, kind, code=phrase.lower().replace(" ", "_"), headers=dict(error.headers or {})
    )


def _validation(error: RequestValidationError) -> Failure:
    shown = [(_place(detail, error.body), detail) for detail in error.errors()]
    same_field = [entry for entry in shown if entry[0][:1] == shown[0][0][:1]]
    path, detail = max(same_field, key=lambda entry: len(entry[0]))  # of a union's branches the one that got furthest
    kind, param = detail["type"], _dotted(path)
    code = kind if kind in ("unsupported", "missing") else "invalid_request"
    return Failure(400, _complaint(kind, param, detail["msg"]), param=param, code=code)


def _complaint(kind: str, param: str | None, text: str) -> str:
    if kind == "missing":
        return f"{param or 'the request body'} is missing"
    if kind == "extra_forbidden":
        return f"unknown field {param}"
    if kind in ("model_attributes_type", "model_type", "dict_type") and param is None:
        return "the request body must be a JSON object"
    return f"{param}: {text[:1].lower()}{text[1:]}" if param else text


Path = tuple[str | int, ...]


def _place(detail: Mapping[str, Any], body: Any) -> Path:
    """A whole object's validator names its field itself; where a field says which kind an object is, it is that one."""
    context = detail.get("ctx", {})
    field = context.get("field") or context.get("discriminator", "").strip("'")
    path = _path(detail, body)
    return (*path, *(int(part) if part.isdecimal() else part for part in field.split("."))) if field else path


def _path(detail: Mapping[str, Any], body: Any) -> Path:
    """Where in the body a complaint belongs: pydantic's location without the names of union branches it mixes in."""
    path: Path = ()
    here = dict(body) if isinstance(body, FormData) else body
    parts = detail["loc"][1:] if detail["loc"][:1] == ("body",) else detail["loc"]
    for i, part in enumerate(parts):
        named = i == len(parts) - 1 and detail["type"] in ("missing", "extra_forbidden")
        if _inside(here, part) or named:
            path = (*path, part)
            here = None if named else here[part]
    return path


def _dotted(path: Path) -> str | None:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.lstrip(".") or None


def _inside(value: Any, part: str | int) -> bool:
    if isinstance(value, dict):
        return part in value
    return isinstance(value, list) and isinstance(part, int) and part < len(value)
