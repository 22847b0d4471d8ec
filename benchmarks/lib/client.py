"""A client of ``/v1/completions``, the same for every server: prompts are token ids, and a batch is sent at once."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from typing import Any

import httpx

from lib.works import Batch, Outcome, Request


@dataclass(frozen=True, slots=True)
class Dialect:
    """How a server spells constraints, and where it has a route that forgets cached prefixes."""

    abilities: frozenset[str] = frozenset({"choices", "schema", "prefix"})
    flush: str = ""

    def constraint(self, request: Request) -> dict[str, Any]:
        """The field that vLLM introduced and sglite also knows."""
        if request.choices:
            return {"structured_outputs": {"choice": list(request.choices)}}
        return {"structured_outputs": {"json": request.schema}}


class LlamaDialect(Dialect):
    """llama.cpp's server."""

    def constraint(self, request: Request) -> dict[str, Any]:
        if request.choices:
            return {"grammar": "root ::= " + " | ".join(json.dumps(choice) for choice in request.choices)}
        return {"json_schema": request.schema}


class Client:
    def __init__(self, url: str, dialect: Dialect, timeout: float) -> None:
        self._dialect = dialect
        self._runner = asyncio.Runner()
        limits = httpx.Limits(max_connections=64)
        self._http = httpx.AsyncClient(base_url=url, timeout=timeout, limits=limits, trust_env=False)
        self._model = ""

    def ready(self) -> bool:
        """Whether the server answers; from then on its model's name is known."""
        try:
            answer = self._runner.run(self._http.get("/v1/models"))
            self._model = answer.raise_for_status().json()["data"][0]["id"]
        except (httpx.HTTPError, KeyError, IndexError, ValueError):
            return False
        return True

    def run(self, batch: Batch) -> Outcome:
        bodies = [self._body(request, batch.stream) for request in batch.requests]
        return self._runner.run(self._all(bodies, self._streamed if batch.stream else self._whole))

    def flush(self) -> None:
        if self._dialect.flush:
            self._runner.run(self._http.post(self._dialect.flush)).raise_for_status()

    def close(self) -> None:
        self._runner.run(self._http.aclose())
        self._runner.close()

    def _body(self, request: Request, stream: bool) -> dict[str, Any]:
        body = {"model": self._model, "prompt": request.ids, "max_tokens": request.max_tokens, "temperature": 0}
        body |= {"ignore_eos": True} if request.free else self._dialect.constraint(request)
        return body | ({"stream": True, "stream_options": {"include_usage": True}} if stream else {})

    async def _all(self, bodies: list[dict[str, Any]], ask: Any) -> Outcome:
        began = time.perf_counter()
        answers = await asyncio.gather(*(ask(body) for body in bodies))
        wall = time.perf_counter() - began
        first = max(0.0, answers[0][2] - began)
        return Outcome(wall, tuple(a[0] for a in answers), tuple(a[1] for a in answers), first)

    async def _whole(self, body: dict[str, Any]) -> tuple[int, str, float]:
        answer = await self._http.post("/v1/completions", json=body)
        _check(answer, answer.text)
        value = answer.json()
        return value["usage"]["completion_tokens"], value["choices"][0]["text"], 0.0

    async def _streamed(self, body: dict[str, Any]) -> tuple[int, str, float]:
        """Tokens, text, and when the first text came."""
        first, text, tokens = 0.0, "", 0
        async with self._http.stream("POST", "/v1/completions", json=body) as answer:
            if answer.is_error:
                _check(answer, (await answer.aread()).decode(errors="replace"))
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line[6:])
                first = first or time.perf_counter()
                text += "".join(choice["text"] for choice in event["choices"])
                tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
        return tokens, text, first


def _check(answer: httpx.Response, text: str) -> None:
    if answer.is_error:
        raise RuntimeError(f"status {answer.status_code}: {text[:200]}")
