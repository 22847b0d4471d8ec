"""The same programs on three backends: the mock, the real engine over a scripted model, and that engine over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping

import httpx
import pytest

from sglite.lang.backends.http import RuntimeEndpoint
from sglite.lang.run import set_default
from sglite.lang.waiting import background
from sglite.protocol import Backend
from sglite.runtime.engine import Engine
from sglite.runtime.server.app import create_app
from sglite.runtime.server.config import ServerConfig
from sglite.runtime.testing import EOS, scripted_engine
from sglite.testing import MockBackend

Answers = Mapping[str, str]
ANSWERS: Answers = {
    "capital of France?": " Paris",
    "capital of Italy?": " Rome",
    "number?": "42",
    "think?": "<think>hm</think>said",
    "lines?": "one\ntwo\nthree",
    "cjk?": "日本 🎉 ok",
    "a:": "red",
    "b:": "blue",
    "Italy?\nA:": " Rome\n\nQ: The next question?",
    "Thought 1:": " I look it up.\nAction 1: Search[the tower]\nObservation 1: invented",
    "Thought 2:": " I know.\nAction 2: Finish[Paris]\nObservation 2: invented",
    "profile?": '{"name": "Ada", "age": 36}',
    "sum?": '{"name": "add", "arguments": {"a": 2, "b": 3}}',
    "product?": '{"name": "multiply", "arguments": {"a": 2, "b": 3}}',
    "half?": "0.5",
    "true?": "True",
    "greeting?": '"hello"',
    "tip 0?": " Eat well.",
    "tip 1?": " Sleep well.",
}
ASSISTANT = b"<|im_start|>assistant\n"


def following(answers: Answers) -> Callable[[list[int]], int]:
    """A script for the byte tokenizer: after the key that stands last in the text comes its answer, then the end."""

    keys = {key.encode(): answer.encode() for key, answer in answers.items()}

    def script(history: list[int]) -> int:
        data = b"".join(bytes([i]) if i < 256 else b"<|im_start|>" if i == 257 else b"" for i in history)
        found = [(at + len(key), key) for key in keys if (at := data.rfind(key)) >= 0]
        if not found:
            return EOS
        end, key = max(found)
        begun = data.rfind(ASSISTANT)
        done = len(data) - (begun + len(ASSISTANT) if begun >= end else end)
        answer = keys[key]
        return answer[done] if done < len(answer) else EOS

    return script


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    engine = scripted_engine(following(ANSWERS), context_length=2048, kv_tokens=32768)
    yield engine
    asyncio.run(engine.aclose())


@pytest.fixture(scope="session")
def endpoint(engine: Engine) -> Iterator[RuntimeEndpoint]:
    transport = httpx.ASGITransport(app=create_app(engine, ServerConfig()))
    endpoint = RuntimeEndpoint("http://test", transport=transport)
    yield endpoint
    asyncio.run_coroutine_threadsafe(endpoint.aclose(), background().loop).result()


@pytest.fixture(params=["mock", "engine", "http"])
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """The default backend of the test, one that knows ANSWERS."""
    made = MockBackend(ANSWERS) if request.param == "mock" else None
    chosen = made or request.getfixturevalue("engine" if request.param == "engine" else "endpoint")
    set_default(chosen)
    yield chosen
    set_default(None)


@pytest.fixture
def mock() -> Iterator[MockBackend]:
    """A mock that knows ANSWERS, as the default backend."""
    backend = MockBackend(ANSWERS)
    set_default(backend)
    yield backend
    set_default(None)
