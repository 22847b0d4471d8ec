"""Tokenizing, detokenizing and checking constraints over a real engine with a scripted model; and without them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from sglite.runtime.engine import Engine
from sglite.runtime.server.app import create_app
from sglite.runtime.testing import scripted_engine

Ask = Callable[[str, Any], httpx.Response]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with scripted_engine(lambda history: 65, context_length=512, kv_tokens=4096) as engine:
        yield engine


@pytest.fixture
def ask(engine: Engine) -> Ask:
    app = create_app(engine)

    def post(path: str, body: Any) -> httpx.Response:
        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(app=app)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                return await client.post(path, json=body)

        return asyncio.run(send())

    return post


def test_text_to_tokens_and_back(ask: Ask) -> None:
    answer = ask("/tokenize", {"prompt": "hé<|im_end|>", "return_token_strs": True}).json()
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == 512
    assert answer["count"] < len("hé<|im_end|>".encode())
    assert ask("/detokenize", {"tokens": answer["tokens"]}).json() == {"prompt": "hé<|im_end|>"}


def test_messages_to_tokens(ask: Ask) -> None:
    body = {"messages": [{"role": "user", "content": "<|im_end|>"}]}
    answer = ask("/tokenize", body).json()
    text = ask("/detokenize", {"tokens": answer["tokens"]}).json()["prompt"]
    assert text == "<|im_start|>user\n<|im_end|><|im_end|>\n<|im_start|>assistant\n"
    assert ask("/tokenize", {"prompt": text}).json()["count"] < answer["count"]
    shorter = ask("/tokenize", {**body, "add_generation_prompt": False}).json()
    assert shorter["count"] < answer["count"]


def test_the_count_is_what_a_request_has(ask: Ask) -> None:
    counted = ask("/tokenize", {"prompt": "hello"}).json()["count"]
    answer = ask("/v1/completions", {"prompt": "hello", "max_tokens": 1}).json()
    assert answer["usage"]["prompt_tokens"] == counted


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}),
        ("/tokenize", {"prompt": 5}),
        ("/tokenize", {"prompt": "a", "add_special_tokens": False}),
        ("/detokenize", {}),
        ("/detokenize", {"tokens": [10**9]}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": ["a"]}),
        ("/v1/grammar/check", {}),
        ("/v1/grammar/check", {"guided_regex": "a", "guided_json": {}}),
    ],
)
def test_refusals(ask: Ask, path: str, body: Any) -> None:
    response = ask(path, body)
    assert response.status_code == 400
    assert response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "valid"),
    [
        ({"guided_regex": "[a-c]+"}, True),
        ({"guided_regex": "(?<=a)b"}, False),
        ({"guided_json": {"type": "integer"}}, True),
        ({"guided_json": {"type": "banana"}}, False),
        ({"response_format": {"type": "json_object"}}, True),
        ({"structured_outputs": {"choice": ["a", "b"]}}, True),
    ],
)
def test_constraints_are_checked_as_requests_are(ask: Ask, body: Any, valid: bool) -> None:
    verdict = ask("/v1/grammar/check", body).json()
    assert verdict["valid"] is valid, json.dumps(verdict)
    assert (verdict["problem"] is None) is valid
    served = ask("/v1/completions", {"prompt": "a", "max_tokens": 8, **body})
    assert served.status_code == (200 if valid else 400)


@pytest.mark.parametrize(
    ("path", "body"),
    [("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]}), ("/v1/grammar/check", {"guided_regex": "a"})],
)
def test_backends_that_cannot_say_so(post: Any, path: str, body: Any) -> None:
    response = post(path, body)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "unsupported"


def test_texts_are_checked_along_with_the_constraint(ask: Ask) -> None:
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    verdict = ask("/v1/grammar/check", {"guided_json": schema, "texts": ["[1, 2]", "[1, 1]", "x"]}).json()
    assert verdict["valid"] and verdict["keywords"]["uniqueItems"] == "rollback"
    assert [text["accepted"] for text in verdict["texts"]] == [True, False, False]
    assert ask("/v1/grammar/check", {"guided_json": schema, "texts": ["[]"] * 65}).status_code == 400


@pytest.mark.parametrize(
    ("schema", "pointer"),
    [
        ({"type": "string", "pattern": "a**"}, "/pattern"),
        ({"type": "object", "patternProperties": {"a+*": {}}}, "/patternProperties/a+*"),
        ({"$id": 5}, "/$id"),
        ({"properties": {"a": {"$id": []}}}, "/properties/a/$id"),
        ({"$dynamicRef": "#a"}, "/$dynamicRef"),
        ({"$dynamicRef": 5}, "/$dynamicRef"),
        ({"if": 1}, "/if"),
        ({"if": {"minLength": "x"}}, "/if/minLength"),
    ],
    ids=str,
)
def test_what_is_no_schema_is_refused_before_a_text_is_read(ask: Ask, schema: Any, pointer: str) -> None:
    response = ask("/v1/grammar/check", {"guided_json": schema, "texts": ["1", '"a"', "{}", ""]})
    assert response.status_code == 200, response.text
    assert response.json()["problem"]["pointer"] == pointer
