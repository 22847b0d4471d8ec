"""What backends over other people's services share: refusing what the service lacks, and prompts as messages."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import fields
from typing import Any

from sglite.chat import split_messages
from sglite.errors import ConfigError, UnsupportedError
from sglite.protocol import Chunk, Finish, GenerateRequest, ModelInfo, Prompt, SamplingParams, Usage

ALWAYS = frozenset({"n", "max_new_tokens"})
UNKNOWN_ID = -1
"""Services tell a token's text, not its id."""


class Service(ABC):
    """A backend over somebody else's service: what that lacks is refused before anything is sent."""

    def __init__(self, info: ModelInfo) -> None:
        self._info = info

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        check(request, self._info)
        if request.sampling.max_new_tokens == 0:
            for chunk in prefilled(request):
                yield chunk
            return
        async with aclosing(self._answer(request)) as chunks:
            async for chunk in chunks:
                yield chunk

    @abstractmethod
    def _answer(self, request: GenerateRequest) -> AsyncGenerator[Chunk]:
        """The answer to a request that the service can honour, and that is for at least one token."""

    async def info(self) -> ModelInfo:
        return self._info

    async def flush_cache(self) -> None:
        raise UnsupportedError("the service has no cache that it would let us flush")

    async def aclose(self) -> None:
        return


def check(request: GenerateRequest, info: ModelInfo) -> None:
    """Raises UnsupportedError for the first thing in ``request`` that the service behind ``info`` lacks."""
    request.validate()
    can = info.capabilities
    for name in sorted(_changed(request.sampling) - can.sampling - ALWAYS):
        raise _lacks(info, f"the sampling option {name}", name)
    if request.sampling.n > 1 and not can.n:
        raise _lacks(info, "several samples per request", "n")
    if request.constraint is not None and request.constraint.kind not in can.constraints:
        raise _lacks(info, f"constraints of kind {request.constraint.kind}", "constraint")
    if request.candidates:
        raise _lacks(info, "scoring of candidates", "candidates")
    if request.adapter is not None:
        raise _lacks(info, "adapters", "adapter")
    if request.logprobs is not None and not can.logprobs:
        raise _lacks(info, "logprobs", "logprobs")
    if request.logprobs is not None and request.logprobs.prompt_start is not None:
        raise _lacks(info, "logprobs of the prompt", "logprobs")


def prefilled(request: GenerateRequest) -> list[Chunk]:
    """The whole answer to a request for no token: services have no cache that it could fill."""
    return [Chunk(index=i, finish=Finish("length"), usage=Usage()) for i in range(request.sampling.n)]


def messages_of(prompt: Prompt, info: ModelInfo, *, may_begin: bool) -> list[dict[str, str]]:
    """The prompt as messages that end with a user's, or with the beginning of an answer where services continue one."""
    messages = split_messages(prompt)
    if messages and messages[-1]["role"] == "assistant":
        if not messages[-1]["content"]:
            messages.pop()
        elif not may_begin:
            raise UnsupportedError(
                f"{info.name} cannot continue an answer that the program began: put the text into a user's turn",
                param="prompt",
            )
    return messages


def api_key(given: str | None, variable: str, service: str) -> str:
    """The key given, or the environment's. Raises ConfigError that names the variable."""
    key = given or os.environ.get(variable)
    if not key:
        raise ConfigError(f"{service} needs an API key: pass api_key or set {variable}")
    return key


def drop_none(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


_DEFAULT = SamplingParams()


def _changed(sampling: SamplingParams) -> set[str]:
    return {f.name for f in fields(SamplingParams) if getattr(sampling, f.name) != getattr(_DEFAULT, f.name)}


def _lacks(info: ModelInfo, what: str, param: str) -> UnsupportedError:
    return UnsupportedError(f"the service behind {info.name} has no {what}", param=param)
