"""The published openai package against a real server on a loopback socket."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from sglite.errors import ConfigError, RequestError
from sglite.runtime.server.config import ServerConfig
from sglite.runtime.server.runner import listen, running

USER: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture
def url(backend: Any) -> Iterator[str]:
    with running(backend) as url:
        yield url


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="fake", messages=USER, n=2, logprobs=True, top_logprobs=1)
    assert [c.message.content for c in answer.choices] == ["Hello, world"] * 2
    assert [c.finish_reason for c in answer.choices] == ["stop", "stop"]
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    assert answer.usage.completion_tokens == 24
    assert answer.choices[0].logprobs is not None and answer.choices[0].logprobs.content is not None
    assert answer.choices[0].logprobs.content[0].token == "H"


def test_streamed_chat(client: openai.OpenAI) -> None:
    options: Any = {"include_usage": True}
    stream = client.chat.completions.create(
        model="fake", messages=USER, stream=True, stream_options=options, temperature=0
    )
    text, usage = "", None
    for chunk in stream:
        text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
        usage = chunk.usage or usage
    assert text == "Hello, world"
    assert usage is not None and usage.completion_tokens == 12


def test_a_schema_reaches_the_backend(client: openai.OpenAI, backend: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    backend.answer = lambda request: '{"a": 5}'
    response_format: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    answer = client.chat.completions.create(model="fake", messages=USER, response_format=response_format)
    assert json.loads(answer.choices[0].message.content or "") == {"a": 5}
    assert json.loads(backend.requests[0].constraint.source) == schema


def test_completions_with_extra_fields(client: openai.OpenAI, backend: Any) -> None:
    answer = client.completions.create(model="fake", prompt=["a", "b"], max_tokens=3, extra_body={"top_k": 2})
    assert [c.text for c in answer.choices] == ["Hel", "Hel"]
    assert backend.requests[0].sampling.top_k == 2


def test_streamed_completions(client: openai.OpenAI) -> None:
    stream = client.completions.create(model="fake", prompt="a", max_tokens=3, stream=True)
    assert "".join(c.choices[0].text for c in stream) == "Hel"


def test_models(client: openai.OpenAI) -> None:
    assert [m.id for m in client.models.list()] == ["fake"]
    assert client.models.retrieve("fake").id == "fake"


def test_embeddings_where_the_backend_can(client: openai.OpenAI, backend: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="cannot embed"):
        client.embeddings.create(model="fake", input="a")

    async def embed(prompts: Any, namespace: str) -> Any:
        return [(1, (0.6, 0.8)) for _ in prompts]

    backend.embed, backend.pooling = embed, "last"
    for encoding in ("float", "base64"):
        format: Any = encoding
        answer = client.embeddings.create(model="fake", input=["a", "b"], encoding_format=format)
        assert [d.index for d in answer.data] == [0, 1]
        assert answer.usage.prompt_tokens == 2
    assert client.embeddings.create(model="fake", input=[1, 2]).data[0].embedding == pytest.approx([0.6, 0.8])
    with pytest.raises(openai.BadRequestError, match="dimensions"):
        client.embeddings.create(model="fake", input="a", dimensions=5)


def test_errors_have_the_clients_own_types(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="nope"):
        client.chat.completions.create(model="nope", messages=USER)
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="fake", messages=USER, temperature=-1)
    assert caught.value.param == "temperature"


def test_a_failure_in_mid_stream_raises(client: openai.OpenAI, backend: Any) -> None:
    backend.fail_after = (2, RequestError("it broke"))
    stream = client.chat.completions.create(model="fake", messages=USER, stream=True)
    with pytest.raises(openai.APIError, match="it broke"):
        list(stream)


def test_leaving_closes_the_request(client: openai.OpenAI, backend: Any, url: str) -> None:
    backend.gate = asyncio.Event()  # the answer stops after its first token: only leaving can end it
    stream = client.chat.completions.create(model="fake", messages=USER, stream=True)
    assert next(chunk for chunk in stream if chunk.choices[0].delta.content)
    stream.close()
    while backend.running:
        assert httpx.get(f"{url}/health").status_code == 200
    assert backend.aborted == 1


def test_a_lying_content_length_and_garbage_hurt_nobody(url: str) -> None:
    host, port = url.removeprefix("http://").split(":")
    head = b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    for request, status in [
        (head + b"Content-Length: 3\r\n\r\n{}{}{}", b" 400 "),
        (head + b"Content-Length: -5\r\n\r\n{}", b" 400 "),
        (head + b"Content-Length: 99999999\r\n\r\n", b" 413 "),
        (head + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", b" 400 "),
        (b"GARBAGE\r\n\r\n", b" 400 "),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 100_000, b" 4"),
    ]:
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall(request)
            assert status in connection.recv(4096).partition(b"\r\n")[0] + b" "
    assert httpx.get(f"{url}/health").status_code == 200


def test_a_port_in_use_is_one_clear_line(url: str) -> None:
    with pytest.raises(ConfigError, match="cannot listen on"):
        listen(ServerConfig(port=int(url.rpartition(":")[2])))
