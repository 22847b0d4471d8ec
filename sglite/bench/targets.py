"""What load is put on: an OpenAI-compatible server, or any Backend of this process."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import httpx

from sglite.bench.load import Job, Piece
from sglite.lang.backends.client import Client
from sglite.protocol import Backend, Chunk, GenerateRequest, SamplingParams, Text


class OpenAITarget:
    """``url`` with or without ``/v1`` at its end. ``chat`` asks the chat route; the model is the first that is served.

    ``exact`` asks for answers of full length (``ignore_eos``, which vLLM, SGLang, llama.cpp and sglite know).
    """

    def __init__(
        self,
        url: str,
        *,
        model: str = "",
        api_key: str | None = None,
        chat: bool = False,
        exact: bool = True,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        base = url.rstrip("/").removesuffix("/v1") + "/v1"
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._client = Client(base, headers, retries=0, transport=transport)
        self._model = model
        self._chat = chat
        self._exact = exact

    async def ready(self) -> str:
        """The model's name. Raises UnavailableError where nobody answers."""
        if not self._model:
            self._model = (await self._client.get("/models"))["data"][0]["id"]
        return self._model

    async def ask(self, job: Job) -> AsyncIterator[Piece]:
        path = "/chat/completions" if self._chat else "/completions"
        async with aclosing(self._client.events(path, self._body(job))) as events:
            async for event in events:
                yield _piece(event)

    async def aclose(self) -> None:
        await self._client.aclose()

    def _body(self, job: Job) -> dict[str, Any]:
        asked = {"messages": [{"role": "user", "content": job.prompt}]} if self._chat else {"prompt": job.prompt}
        exact = {"ignore_eos": True} if self._exact else {}
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        return {"model": self._model, **asked, "max_tokens": job.max_tokens, "temperature": 0, **stream, **exact}


def _piece(event: dict[str, Any]) -> Piece:
    texts = [(choice.get("delta") or {}).get("content") or choice.get("text") or "" for choice in event["choices"]]
    usage = event.get("usage") or {}
    details = usage.get("prompt_tokens_details") or {}
    return Piece(
        "".join(texts),
        usage.get("prompt_tokens") or 0,
        details.get("cached_tokens") or 0,
        usage.get("completion_tokens") or 0,
    )


class BackendTarget:
    """A Backend without a network: the engine in this process."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._numbers = itertools.count()

    async def ask(self, job: Job) -> AsyncIterator[Piece]:
        sampling = SamplingParams(temperature=0, max_new_tokens=job.max_tokens, ignore_eos=True)
        request = GenerateRequest(f"bench-{next(self._numbers)}", (Text(job.prompt),), sampling)
        async with aclosing(self._backend.generate(request)) as chunks:  # type: ignore[type-var]
            async for chunk in chunks:
                yield _of_chunk(chunk)


def _of_chunk(chunk: Chunk) -> Piece:
    usage = chunk.usage
    if usage is None:
        return Piece(chunk.text)
    return Piece(chunk.text, usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)
