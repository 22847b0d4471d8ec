"""One line of a batch: a request to one of our routes, run without HTTP, and its outcome as a line of output."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Coroutine, Mapping
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from fastapi.exceptions import RequestValidationError
from pydantic import Field, TypeAdapter, ValidationError

from sglite.errors import InvalidRequestError, NotFoundError
from sglite.runtime.server import chat, completions, embeddings
from sglite.runtime.server import fields as f
from sglite.runtime.server.context import Context
from sglite.runtime.server.failures import describe
from sglite.runtime.server.jsonbody import parse_json

T = TypeVar("T")
Answerer = Callable[[Any, Context], Coroutine[Any, Any, Mapping[str, Any]]]
ENDPOINTS: dict[str, tuple[TypeAdapter[Any], Answerer]] = {
    "/v1/chat/completions": (TypeAdapter(chat.ChatCompletion), chat.answer),
    "/v1/completions": (TypeAdapter(completions.Completion), completions.answer),
    "/v1/embeddings": (TypeAdapter(embeddings.Embeddings), embeddings.answer),
}
SORT_LENGTH = 400
"""Characters of a prompt by which lines are put next to those they share a prefix with."""


class BatchLine(f.Body):
    custom_id: Annotated[str, Field(min_length=1, max_length=512)]
    method: Literal["POST"] = "POST"
    url: str
    body: dict[str, Any]


_LINE: TypeAdapter[BatchLine] = TypeAdapter(BatchLine)


def read_line(raw: bytes) -> BatchLine:
    """Raises InvalidRequestError and kin for a line that is no request to a route we know."""
    line = checked(_LINE, parse_json(raw))
    if line.url not in ENDPOINTS:
        raise NotFoundError(f"no batches for {line.url!r:.80}; there are for {', '.join(ENDPOINTS)}", param="url")
    if line.body.get("stream"):
        raise InvalidRequestError("a batch's requests cannot be streamed", param="body.stream")
    return line


def sort_key(line: BatchLine) -> str:
    prompt = next((line.body[name] for name in ("messages", "prompt", "input") if name in line.body), None)
    return json.dumps(prompt, ensure_ascii=False)[:SORT_LENGTH]


class Outcome(NamedTuple):
    """The status that the request would have had over HTTP, and the line of output."""

    status: int
    output: str


async def run_line(line: BatchLine, context: Context) -> Outcome:
    """Run a request. It never raises: what goes wrong is its outcome."""
    kind, answer = ENDPOINTS[line.url]
    try:
        status, body = 200, await answer(checked(kind, line.body), context)
    except Exception as error:
        failure = describe(error)
        status, body = failure.status, failure.body
    response = {"status_code": status, "request_id": uuid.uuid4().hex, "body": body}
    return Outcome(status, _output(line.custom_id, response, None))


def failed_line(custom_id: str | None, code: str, message: str) -> str:
    """The line of output for a request that never ran."""
    return _output(custom_id, None, {"code": code, "message": message})


def checked(kind: TypeAdapter[T], value: Any) -> T:
    try:
        return kind.validate_python(value)
    except ValidationError as error:
        raise RequestValidationError(error.errors(include_url=False), body=value) from None


def _output(custom_id: str | None, response: Any, error: Any) -> str:
    line = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": custom_id, "response": response, "error": error}
    return json.dumps(line, ensure_ascii=False)
