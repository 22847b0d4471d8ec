"""Any service that the litellm package knows, as a Backend."""

from __future__ import annotations

import importlib
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from sglite.chat import MESSAGES
from sglite.errors import ConfigError, RequestError, SgliteError
from sglite.lang.backends import openai_wire as wire
from sglite.lang.backends.client import service_error
from sglite.lang.backends.service import Service, messages_of
from sglite.protocol import Capabilities, Chunk, GenerateRequest, ModelInfo


class LiteLLM(Service):
    """``LiteLLM("provider/model")``; further keywords go to every call of ``litellm.acompletion``.

    Needs the optional package: raises ConfigError that says how to get it.
    """

    def __init__(
        self, model_name: str, *, api_key: str | None = None, context_length: int = 128_000, **options: Any
    ) -> None:
        try:
            self._litellm = importlib.import_module("litellm")
        except ImportError:
            raise ConfigError('the LiteLLM backend needs the package litellm: pip install "sglite[litellm]"') from None
        self._options = {**options, **({"api_key": api_key} if api_key else {})}
        capabilities = Capabilities(
            constraints=wire.CONSTRAINTS["openai"], logprobs=True, chat_only=True, sampling=wire.COMMON
        )
        super().__init__(ModelInfo(model_name, context_length, chat_template=MESSAGES, capabilities=capabilities))

    async def _answer(self, request: GenerateRequest) -> AsyncGenerator[Chunk]:
        async with aclosing(self._events(request)) as events:
            async for chunk in wire.read_stream(events, request.sampling.n):
                yield chunk

    async def _events(self, request: GenerateRequest) -> Any:
        fields = {
            "model": self._info.name,
            "messages": messages_of(request.prompt, self._info, may_begin=False),
            **wire.sampling_fields(request.sampling, "openai", "max_tokens"),
            **wire.chat_logprob_fields(request),
            **wire.constraint_fields(request.constraint),
        }
        try:
            stream = await self._litellm.acompletion(
                **fields, **self._options, stream=True, stream_options={"include_usage": True}
            )
            async for chunk in stream:
                yield _plain(chunk)
        except SgliteError:
            raise
        except Exception as error:  # litellm raises a type of its own for every provider's failure
            raise _failure(error) from error


def _plain(chunk: Any) -> Mapping[str, Any]:
    plain: Mapping[str, Any] = chunk if isinstance(chunk, Mapping) else chunk.model_dump()
    return plain


def _failure(error: Exception) -> SgliteError:
    status = getattr(error, "status_code", None)
    known = service_error(status, {"message": str(error)}) if isinstance(status, int) else None
    return known or RequestError(f"{type(error).__name__}: {error}")
