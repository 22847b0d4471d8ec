"""Every request field that the openai package documents is honoured, or refused by name; none is dropped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_create_params

Post = Callable[..., httpx.Response]

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CHAT: dict[str, Any] = {
    "audio": {"voice": "alloy", "format": "wav"},
    "frequency_penalty": 0.5,
    "function_call": "auto",
    "functions": [{"name": "f"}],
    "logit_bias": {"65": 5},
    "logprobs": True,
    "max_completion_tokens": 4,
    "max_tokens": 4,
    "messages": [{"role": "user", "content": "hi"}],
    "metadata": {"a": "b"},
    "modalities": ["text", "audio"],
    "model": "fake",
    "moderation": {"model": "x"},
    "n": 2,
    "parallel_tool_calls": False,
    "prediction": {"type": "content", "content": "x"},
    "presence_penalty": 0.5,
    "prompt_cache_key": "k",
    "prompt_cache_options": {"a": 1},
    "prompt_cache_retention": "24h",
    "reasoning_effort": "low",
    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}},
    "safety_identifier": "u",
    "seed": 7,
    "service_tier": "flex",
    "stop": ["x"],
    "store": True,
    "stream_options": {"include_usage": True},
    "temperature": 0.5,
    "tool_choice": "none",
    "tools": [TOOL],
    "top_logprobs": 2,
    "top_p": 0.5,
    "user": "u",
    "verbosity": "low",
    "web_search_options": {},
}
COMPLETION: dict[str, Any] = {
    "best_of": 2,
    "echo": True,
    "logprobs": 2,
    "prompt": "hi",
    "suffix": "end",
    **{
        name: CHAT[name]
        for name in (
            *("frequency_penalty", "logit_bias", "max_tokens", "model", "n", "presence_penalty", "seed", "stop"),
            *("stream_options", "temperature", "top_p", "user"),
        )
    },
}
EMBEDDING: dict[str, Any] = {"dimensions": 8, "encoding_format": "base64", "input": "hi", "model": "fake", "user": "u"}
NEEDS: dict[str, dict[str, Any]] = {
    "best_of": {"n": 2},
    "top_logprobs": {"logprobs": True},
    "stream_options": {"stream": True},
    "tool_choice": {"tools": [TOOL]},
    "parallel_tool_calls": {"tools": [TOOL], "tool_choice": "none"},
    "tools": {"tool_choice": "none"},
}
REFUSED = {
    "chat": {
        *("audio", "function_call", "functions", "modalities", "moderation", "prediction", "prompt_cache_key"),
        *("prompt_cache_options", "prompt_cache_retention", "reasoning_effort", "store", "verbosity"),
        "web_search_options",
    },
    "completion": {"suffix"},
    "embedding": {"dimensions"},
}
ROUTES: dict[str, tuple[str, dict[str, Any], Any, dict[str, Any]]] = {
    "chat": (
        "/v1/chat/completions",
        {"messages": CHAT["messages"]},
        chat_create_params.CompletionCreateParamsBase,
        CHAT,
    ),
    "completion": (
        "/v1/completions",
        {"prompt": "hi"},
        completion_create_params.CompletionCreateParamsBase,
        COMPLETION,
    ),
    "embedding": ("/v1/embeddings", {"input": "hi"}, embedding_create_params.EmbeddingCreateParams, EMBEDDING),
}


@pytest.mark.parametrize("kind", ROUTES)
def test_every_documented_field_has_an_example_here(kind: str) -> None:
    *_, documented, examples = ROUTES[kind]
    assert set(documented.__annotations__) <= set(examples)


@pytest.mark.parametrize(("kind", "field"), [(kind, field) for kind in ROUTES for field in ROUTES[kind][3]])
def test_a_field_is_honoured_or_refused_by_name(post: Post, backend: Any, kind: str, field: str) -> None:
    async def embed(prompts: Any, namespace: str) -> Any:
        return [(2, (1.0, 0.0)) for _ in prompts]

    backend.embed, backend.pooling = embed, "last"
    path, least, _, examples = ROUTES[kind]
    response = post(path, {**least, **NEEDS.get(field, {}), field: examples[field]})
    if field in REFUSED[kind]:
        assert response.status_code == 400
        assert response.json()["error"]["param"].partition(".")[0] == field
        assert response.json()["error"]["code"] == "unsupported"
    else:
        assert response.status_code == 200, response.text


@pytest.mark.parametrize("kind", ROUTES)
def test_an_unknown_field_is_refused_by_name(post: Post, kind: str) -> None:
    path, least, *_ = ROUTES[kind]
    response = post(path, {**least, "nonsense": 1})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "nonsense")
