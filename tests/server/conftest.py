"""A backend that plays a script byte by byte, and clients of the server around it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import httpx
import pytest

from sglite.chat import CHATML
from sglite.errors import ContextLengthError, InvalidRequestError
from sglite.protocol import (
    CandidateScore,
    Capabilities,
    Chunk,
    Finish,
    GenerateRequest,
    ModelInfo,
    Text,
    TokenLogprob,
    Usage,
)
from sglite.runtime.server.app import create_app
from sglite.runtime.server.config import ServerConfig

CONTEXT = 4096
VOCAB = 256


@dataclass(eq=False)
class FakeBackend:
    """Tokens are bytes. ``answer`` gives the text for a request; ``gate`` holds every step after the first chunk."""

    answer: Callable[[GenerateRequest], str] = lambda request: "Hello, world"
    gate: asyncio.Event | None = None
    fail_after: tuple[int, Exception] | None = None
    requests: list[GenerateRequest] = field(default_factory=list)
    running: int = 0
    aborted: int = 0
    flushed: int = 0
    template: str | None = CHATML
    loop: asyncio.AbstractEventLoop | None = None

    def open(self) -> None:
        """The gate, from any thread."""
        assert self.gate is not None and self.loop is not None
        self.loop.call_soon_threadsafe(self.gate.set)

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        self.loop = asyncio.get_running_loop()
        request.validate()
        prompt = prompt_ids(request)
        self._check(request, prompt)
        self.requests.append(request)
        self.running += 1
        finished = False
        try:
            if request.candidates:
                scores = tuple(CandidateScore(c, logprobs(list(c.encode()))) for c in request.candidates)
                yield Chunk(finish=Finish("stop"), scores=scores, usage=Usage(prompt_tokens=len(prompt)))
                finished = True
                return
            for index in range(request.sampling.n):
                async for chunk in self._sample(request, prompt, index):
                    finished = chunk.finish is not None and index == request.sampling.n - 1
                    yield chunk
        finally:
            self.aborted += not finished
            self.running -= 1  # last: a test in another thread waits for it

    def _check(self, request: GenerateRequest, prompt: list[int]) -> None:
        if len(prompt) >= CONTEXT:
            raise ContextLengthError(f"the prompt has {len(prompt)} tokens", param="prompt")
        for token, _ in request.sampling.logit_bias:
            if token >= VOCAB:
                raise InvalidRequestError("logit_bias holds an unknown token id", param="logit_bias")
        if any(token >= VOCAB for token in prompt):
            raise InvalidRequestError("prompt holds an unknown token id", param="prompt")

    async def _sample(self, request: GenerateRequest, prompt: list[int], index: int) -> AsyncIterator[Chunk]:
        limit = request.sampling.max_new_tokens
        ids = list(self.answer(request).encode())[:limit]
        short = len(ids) < limit
        for k, token in enumerate(ids):
            if self.fail_after is not None and k == self.fail_after[0]:
                raise self.fail_after[1]
            scores = logprobs([token], request.logprobs.top) if request.logprobs and request.logprobs.output else ()
            yield Chunk(chr(token), (token,), index, logprobs=scores)
            if self.gate is not None:
                await self.gate.wait()
            await asyncio.sleep(0)
        yield Chunk(
            index=index,
            finish=Finish("stop", matched=0) if short else Finish("length"),
            usage=Usage(prompt_tokens=len(prompt), cached_tokens=len(prompt) // 2, completion_tokens=len(ids)),
            prompt_logprobs=prompt_logprobs(request, prompt),
        )

    async def info(self) -> ModelInfo:
        capabilities = Capabilities(frozenset({"regex", "json_schema"}), candidates=True, logprobs=True)
        return ModelInfo(
            "fake",
            CONTEXT,
            VOCAB,
            chat_template=self.template,
            eos_token="<|im_end|>",
            eos_token_ids=(0,),
            special_tokens=("<|im_start|>", "<|im_end|>"),
            capabilities=capabilities,
        )

    async def flush_cache(self) -> None:
        self.flushed += 1

    async def aclose(self) -> None:
        pass


def prompt_ids(request: GenerateRequest) -> list[int]:
    return [i for s in request.prompt for i in (s.value.encode() if isinstance(s, Text) else s.ids)]


def logprobs(ids: list[int], top: int = 0) -> tuple[TokenLogprob, ...]:
    return tuple(
        TokenLogprob(
            i, -0.5, chr(i), tuple((i + k, -0.5 - k if k < 3 else float("-inf"), chr(i + k)) for k in range(top))
        )
        for i in ids
    )


def prompt_logprobs(request: GenerateRequest, prompt: list[int]) -> tuple[TokenLogprob, ...]:
    if request.logprobs is None or request.logprobs.prompt_start is None:
        return ()
    start = request.logprobs.prompt_start
    scored = logprobs(prompt, request.logprobs.top)
    return (TokenLogprob(prompt[0], None, chr(prompt[0])), *scored[1:])[start:]


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend()


@pytest.fixture
def config() -> ServerConfig:
    return ServerConfig()


@pytest.fixture
def call(backend: FakeBackend, config: ServerConfig) -> Callable[..., httpx.Response]:
    """``call(method, path, json=..., content=..., headers=...)`` against the app, without a socket."""
    app = create_app(backend, config)

    def request(method: str, path: str, **options: object) -> httpx.Response:
        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                return await client.request(method, path, **options)  # type: ignore[arg-type]

        return asyncio.run(send())

    return request


@pytest.fixture
def post(call: Callable[..., httpx.Response]) -> Callable[..., httpx.Response]:
    return lambda path, json=None, **options: call("POST", path, json=json, **options)
