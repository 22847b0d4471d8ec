"""Any OpenAI-compatible service as a Backend, by HTTP alone."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import httpx

from sglite.chat import MESSAGES, find_chat_template
from sglite.errors import UnsupportedError
from sglite.lang.backends import openai_wire as wire
from sglite.lang.backends.client import Client
from sglite.lang.backends.service import Service, messages_of
from sglite.lang.backends.service import api_key as find_key
from sglite.protocol import Capabilities, Chunk, GenerateRequest, ModelInfo, prompt_text

_OPENAI = "https://api.openai.com/v1"
_COMPLETION_MODELS = frozenset({"gpt-3.5-turbo-instruct", "davinci-002", "babbage-002"})


class OpenAI(Service):
    """A model behind an OpenAI-compatible API.

    ``is_chat_model=False`` uses ``/completions`` with the prompt as text, rendered with ``chat_template`` (a registered
    name or a template). ``dialect="vllm"`` allows the fields that vLLM, SGLang and sglite servers add to OpenAI's:
    more sampling options, more constraints, continuing a begun answer; ``dialect="llama.cpp"`` those of llama.cpp's
    server, which continues one, too. ``api_key`` defaults to OPENAI_API_KEY, and is needed only at OpenAI itself. What
    the service lacks is refused with UnsupportedError before anything is sent.
    """

    def __init__(
        self,
        model_name: str,
        *,
        base_url: str = _OPENAI,
        api_key: str | None = None,
        is_chat_model: bool | None = None,
        chat_template: str | None = None,
        dialect: wire.Dialect = "openai",
        context_length: int = 128_000,
        timeout: float = 600.0,
        retries: int = 2,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._official = base_url == _OPENAI
        key = find_key(api_key, "OPENAI_API_KEY", "OpenAI") if self._official else api_key
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self._client = Client(base_url, headers, timeout=timeout, retries=retries, transport=transport)
        self._dialect = dialect
        self._chat = model_name not in _COMPLETION_MODELS if is_chat_model is None else is_chat_model
        if self._chat and chat_template is not None:
            raise UnsupportedError("a chat model's service renders its own template", param="chat_template")
        template = MESSAGES if self._chat else chat_template and find_chat_template(chat_template)
        capabilities = self._capabilities(self._chat, dialect)
        super().__init__(ModelInfo(model_name, context_length, chat_template=template, capabilities=capabilities))

    @staticmethod
    def _capabilities(chat: bool, dialect: wire.Dialect) -> Capabilities:
        return Capabilities(
            constraints=wire.CONSTRAINTS[dialect] if chat or dialect != "openai" else frozenset(),
            logprobs=True,
            chat_only=chat,
            sampling=wire.SAMPLING[dialect],
        )

    async def _answer(self, request: GenerateRequest) -> AsyncGenerator[Chunk]:
        path, fields = self._chat_call(request) if self._chat else self._completion_call(request)
        body = {
            "model": self._info.name,
            **fields,
            **wire.constraint_fields(request.constraint, self._dialect),
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        begun = wire.begun_answer(fields) if self._dialect == "llama.cpp" else ""
        async with (
            aclosing(self._client.events(path, body)) as events,
            aclosing(wire.read_stream(events, request.sampling.n)) as chunks,
        ):
            async for chunk in wire.without_echo(chunks, begun) if begun else chunks:
                yield chunk

    async def aclose(self) -> None:
        await self._client.aclose()

    def _chat_call(self, request: GenerateRequest) -> tuple[str, dict[str, Any]]:
        messages = messages_of(request.prompt, self._info, may_begin=self._dialect != "openai")
        begun = messages and messages[-1]["role"] == "assistant"
        limit = "max_completion_tokens" if self._official else "max_tokens"
        return "/chat/completions", {
            "messages": messages,
            **wire.sampling_fields(request.sampling, self._dialect, limit),
            **wire.chat_logprob_fields(request),
            **({"continue_final_message": True, "add_generation_prompt": False} if begun else {}),
        }

    def _completion_call(self, request: GenerateRequest) -> tuple[str, dict[str, Any]]:
        logprobs = {} if request.logprobs is None else {"logprobs": request.logprobs.top}
        sampling = wire.sampling_fields(request.sampling, self._dialect, "max_tokens")
        return "/completions", {"prompt": prompt_text(request.prompt), **sampling, **logprobs}
