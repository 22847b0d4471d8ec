"""Backends over the network: what they send, what they make of the answers, and how failures arrive."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from types import SimpleNamespace
from typing import Any, ClassVar

import httpx
import pytest

import sglite as sgl
from sglite import errors
from sglite.lang.backends import client
from sglite.lang.backends.anthropic import Anthropic
from sglite.lang.backends.client import sse_data
from sglite.lang.backends.http import RuntimeEndpoint
from sglite.lang.backends.litellm import LiteLLM
from sglite.lang.backends.mock import MockBackend
from sglite.lang.backends.openai import OpenAI
from sglite.lang.backends.process import Runtime
from sglite.protocol import (
    Backend,
    Chunk,
    Constraint,
    Finish,
    GenerateRequest,
    LogprobParams,
    ProgramInfo,
    SamplingParams,
    Text,
    TokenLogprob,
    Tokens,
    Usage,
)
from sglite.runtime.server.app import create_app
from sglite.runtime.server.runner import running

CHAT = (
    Text("\x1erole=system\n", special=True),
    Text("be brief"),
    Text("\x1eend\n\x1erole=user\n", special=True),
    Text("hi"),
    Text("\x1eend\n\x1erole=assistant\n", special=True),
)


def run(backend: Backend, request: GenerateRequest) -> list[Chunk]:
    async def collect() -> list[Chunk]:
        try:
            return [chunk async for chunk in backend.generate(request)]
        finally:
            await backend.aclose()

    return asyncio.run(collect())


def chat(**sampling: Any) -> GenerateRequest:
    return GenerateRequest("r", CHAT, SamplingParams(**sampling))


# --------------------------------------------------------------------------------------------------- RuntimeEndpoint


def over_http(backend: Backend, **options: Any) -> RuntimeEndpoint:
    transport = httpx.ASGITransport(app=create_app(backend))
    return RuntimeEndpoint("http://test", transport=transport, **options)


def test_requests_and_chunks_cross_http_unchanged() -> None:
    mock = MockBackend("one two three")
    request = GenerateRequest(
        "r1",
        (Text("<|a|>", special=True), Text("héllo\u2028\x1e"), Tokens((1, 2), "x")),
        SamplingParams(max_new_tokens=9, temperature=0.3, stop=("\n",), seed=4, logit_bias=((3, 1.5),)),
        logprobs=LogprobParams(top=2),
        priority=3,
        program=ProgramInfo("p", "b", last=True),
    )
    chunks = run(over_http(mock), request)
    assert chunks == run(MockBackend("one two three"), request)
    (sent,) = mock.requests
    assert sent.deadline == 600.0
    assert (sent.prompt, sent.sampling, sent.logprobs, sent.program) == (
        request.prompt,
        request.sampling,
        request.logprobs,
        request.program,
    )


def test_candidates_and_constraints_cross_http() -> None:
    request = GenerateRequest("r1", (Text("a"),), candidates=("yes", "no"))
    assert run(over_http(MockBackend("no")), request) == run(MockBackend("no"), request)
    request = GenerateRequest("r1", (Text("a"),), constraint=Constraint("regex", "a{3}"))
    assert "".join(c.text for c in run(over_http(MockBackend()), request)) == "aaa"


def test_the_models_description_crosses_http() -> None:
    mock = MockBackend(name="m", chat_template="{{ messages }}")

    async def both() -> None:
        endpoint = over_http(mock)
        assert await endpoint.info() == await mock.info()
        await endpoint.flush_cache()
        assert (await endpoint.server_info())["model_path"] == "m"
        await endpoint.aclose()

    asyncio.run(both())
    assert mock.flushes == 1


def test_the_end_of_a_program_crosses_http() -> None:
    class Keeping(MockBackend):
        ends: ClassVar[list[tuple[str, str, str]]] = []

        async def end_program(self, program: str, branch: str = "", *, namespace: str = "") -> None:
            self.ends.append((program, branch, namespace))

    async def end(backend: Backend) -> None:
        endpoint = over_http(backend)
        await endpoint.end_program("p", "0.1")
        await endpoint.end_program("p")
        with pytest.raises(errors.InvalidRequestError, match="program"):
            await endpoint.end_program(3)  # type: ignore[arg-type]
        await endpoint.aclose()
        await endpoint.end_program("too late")

    backend = Keeping()
    asyncio.run(end(backend))
    assert [(program, branch) for program, branch, _ in backend.ends] == [("p", "0.1"), ("p", "")]
    asyncio.run(over_http(MockBackend()).end_program("p"))  # a backend that keeps nothing is not asked


def test_a_program_over_http_tells_its_end_and_does_not_wait_for_it() -> None:
    told, go = threading.Semaphore(0), threading.Event()

    class Keeping(MockBackend):
        async def end_program(self, program: str, branch: str = "", *, namespace: str = "") -> None:
            await asyncio.to_thread(go.wait, 60)
            told.release()

    @sgl.function
    def program(s: Any) -> None:
        s += "a" + sgl.gen("x")
        s["x"]

    assert program.run(backend=over_http(Keeping("x")))["x"] == "x"
    assert not told.acquire(blocking=False)
    go.set()
    assert told.acquire(timeout=60)


REFUSALS = [
    errors.InvalidRequestError("bad", param="top_p"),
    errors.ContextLengthError("too long", param="prompt"),
    errors.CapacityError("too much", param="prompt"),
    errors.UnsupportedError("no", param="adapter"),
    errors.GrammarError("bad schema"),
    errors.NotFoundError("who?", param="adapter"),
    errors.OverloadedError("full"),
    errors.UnavailableError("draining"),
    errors.AbortedError("gone"),
    errors.DeadlineError("late"),
    errors.RequestError("broke"),
]


@pytest.mark.parametrize("error", REFUSALS, ids=lambda e: type(e).__name__)
def test_refusals_keep_their_type(error: Exception) -> None:
    with pytest.raises(errors.SgliteError) as caught:
        run(over_http(MockBackend([error]), retries=0), chat())
    assert (type(caught.value), str(caught.value)) == (type(error), str(error))
    assert getattr(caught.value, "param", None) == getattr(error, "param", None)


def test_a_bad_request_is_refused_by_name() -> None:
    with pytest.raises(errors.InvalidRequestError) as caught:
        run(over_http(MockBackend()), chat(top_p=2.0))
    assert caught.value.param == "top_p"


def test_an_overloaded_server_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    asked = client._wait

    def wait(response: httpx.Response, attempt: int) -> float:
        waits.append(asked(response, attempt))
        return 0.0

    monkeypatch.setattr(client, "_wait", wait)
    mock = MockBackend([errors.OverloadedError("full"), errors.UnavailableError("loading"), "ok"])
    assert "".join(c.text for c in run(over_http(mock), chat())) == "ok"
    assert waits == [1.0, 5.0]


def test_a_server_that_is_not_there() -> None:
    with pytest.raises(errors.UnavailableError, match="is the server running"):
        run(RuntimeEndpoint("http://127.0.0.1:9"), chat())
    with pytest.raises(errors.ConfigError, match="http://"):
        RuntimeEndpoint("localhost:30000")


def test_a_stream_that_just_stops_is_an_error() -> None:
    transport = httpx.MockTransport(lambda request: httpx.Response(200, content=b'data: {"text":"a"}\n\n'))
    with pytest.raises(errors.RequestError, match="without saying why"):
        run(RuntimeEndpoint("http://test", transport=transport), chat())


def test_events_split_anywhere() -> None:
    raw = 'data: {"a":"x\u2028y"}\n\nevent: z\ndata: [DONE]\n\n'.encode()

    async def parts() -> AsyncIterator[bytes]:
        for i in range(len(raw)):
            yield raw[i : i + 1]

    async def collect() -> list[bytes]:
        return [data async for data in sse_data(parts())]

    assert asyncio.run(collect()) == ['{"a":"x\u2028y"}'.encode(), b"[DONE]"]


def test_programs_run_over_a_real_socket() -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += sgl.user("pick") + sgl.assistant(sgl.gen("a") + sgl.select("b", ["yes", "no"]))
        forks = s.fork(3)
        for fork in forks:
            fork += sgl.user("go") + sgl.assistant(sgl.gen("c"))
        s.set_var("all", [fork["c"] for fork in forks])

    mock = MockBackend(lambda request: "no" if request.candidates else "fine")
    with running(mock) as url:
        endpoint = RuntimeEndpoint(url)
        state = program.run(backend=endpoint)
        assert (state["a"], state["b"], state["all"]) == ("fine", "no", ["fine"] * 3)
        assert len({r.program.program for r in mock.requests if r.program}) == 1
        asyncio.run(endpoint.aclose())


ENDING = """
import time

import sglite as sgl

backend = sgl.RuntimeEndpoint({url!r})


@sgl.function
def program(s):
    s += "a" + sgl.gen("x")


states = [program.run(backend=backend, stream=True) for _ in range(20)]
time.sleep({seconds})
"""


@pytest.mark.parametrize("seconds", [0, 0.05])
def test_a_process_that_ends_in_the_middle_of_its_requests_ends_quietly(seconds: float) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        source = ENDING.format(url=f"http://127.0.0.1:{silent.getsockname()[1]}", seconds=seconds)
        command = [sys.executable, "-W", "default", "-c", source]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert ended.stderr == ""


# ------------------------------------------------------------------------------------------------------------- OpenAI


def sse(*events: Any, done: bool = True) -> bytes:
    blocks = [f"data: {json.dumps(e)}\n\n" for e in events]
    return "".join([*blocks, "data: [DONE]\n\n" if done else ""]).encode()


@pytest.mark.parametrize("make", [lambda **o: RuntimeEndpoint("http://test", **o), lambda **o: OpenAI("m", **o)])
def test_a_lone_surrogate_is_the_callers_fault(make: Callable[..., Backend]) -> None:
    sent: list[Any] = []
    options = {"transport": service(b"", sent), "api_key": "k"}
    request = GenerateRequest("r", (*CHAT[:3], Text("a\ud800"), *CHAT[4:]))
    with pytest.raises(errors.InvalidRequestError, match="lone surrogate") as caught:
        run(make(**options), request)
    assert caught.value.param == "prompt" and sent == []


def service(reply: bytes | httpx.Response, sent: list[Any]) -> httpx.MockTransport:
    def answer(request: httpx.Request) -> httpx.Response:
        sent.append((str(request.url), dict(request.headers), json.loads(request.content)))
        return reply if isinstance(reply, httpx.Response) else httpx.Response(200, content=reply)

    return httpx.MockTransport(answer)


def delta(text: str, index: int = 0, finish: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": index, "delta": {"content": text}, "finish_reason": finish, **fields}]}


USAGE = {
    "choices": [],
    "usage": {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}},
}


def test_an_openai_chat() -> None:
    sent: list[Any] = []
    reply = sse(delta("Hel"), delta("lo"), delta("", finish="stop"), USAGE)
    backend = OpenAI("gpt-x", api_key="k", transport=service(reply, sent))
    chunks = run(backend, chat(max_new_tokens=5, temperature=0.5, stop=("a",), seed=3, logit_bias=((7, -1.0),)))
    assert chunks == [
        Chunk(text="Hel"),
        Chunk(text="lo"),
        Chunk(finish=Finish("stop"), usage=Usage(prompt_tokens=9, cached_tokens=4, completion_tokens=2)),
    ]
    ((url, headers, body),) = sent
    assert url == "https://api.openai.com/v1/chat/completions"
    assert headers["authorization"] == "Bearer k"
    assert body == {
        "model": "gpt-x",
        "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}],
        "max_completion_tokens": 5,
        "temperature": 0.5,
        "stop": ["a"],
        "seed": 3,
        "logit_bias": {"7": -1.0},
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_several_openai_answers_count_their_tokens_once() -> None:
    reply = sse(delta("a", 1), delta("b", 0), delta("", 0, "length"), delta("", 1, "stop"), USAGE)
    backend = OpenAI("m", base_url="http://test", transport=service(reply, []))
    chunks = run(backend, chat(n=2))
    assert [(c.index, c.finish.reason) for c in chunks if c.finish] == [(0, "length"), (1, "stop")]
    assert sum(c.usage.completion_tokens for c in chunks if c.usage) == 2


def test_an_openai_schema_and_logprobs() -> None:
    sent: list[Any] = []
    entry = {"token": "a", "logprob": -0.1, "bytes": [97], "top_logprobs": [{"token": "b", "logprob": -2.0}]}
    reply = sse(delta("a", logprobs={"content": [entry]}), delta("", finish="stop"), USAGE)
    request = GenerateRequest(
        "r", CHAT, constraint=Constraint("json_schema", '{"type":"object"}'), logprobs=LogprobParams(top=1)
    )
    chunks = run(OpenAI("m", base_url="http://test", transport=service(reply, sent)), request)
    assert chunks[0].logprobs == (TokenLogprob(-1, -0.1, "a", ((-1, -2.0, "b"),)),)
    body = sent[0][2]
    assert body["logprobs"] is True and body["top_logprobs"] == 1
    assert body["response_format"]["json_schema"] == {"name": "answer", "strict": True, "schema": {"type": "object"}}


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        (chat(top_k=3), "top_k"),
        (chat(ignore_eos=True), "ignore_eos"),
        (GenerateRequest("r", CHAT, constraint=Constraint("regex", "a")), "constraint"),
        (GenerateRequest("r", CHAT, candidates=("a",)), "candidates"),
        (GenerateRequest("r", CHAT, adapter="x"), "adapter"),
        (GenerateRequest("r", CHAT, logprobs=LogprobParams(prompt_start=0)), "logprobs"),
        (GenerateRequest("r", (*CHAT, Text("So"))), "prompt"),
    ],
)
def test_what_openai_lacks_is_refused_before_anything_is_sent(request_: GenerateRequest, param: str) -> None:
    sent: list[Any] = []
    with pytest.raises(errors.UnsupportedError) as caught:
        run(OpenAI("m", base_url="http://test", transport=service(b"", sent)), request_)
    assert caught.value.param == param
    assert sent == []


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, errors.InvalidRequestError),
        (401, errors.ConfigError),
        (404, errors.NotFoundError),
        (429, errors.OverloadedError),
        (500, errors.RequestError),
        (503, errors.UnavailableError),
    ],
)
def test_a_services_refusals_have_our_types(status: int, kind: type[Exception]) -> None:
    reply = httpx.Response(status, json={"error": {"message": "because", "type": "x", "param": None, "code": None}})
    with pytest.raises(kind, match="because"):
        run(OpenAI("m", base_url="http://test", transport=service(reply, []), retries=0), chat())


@pytest.mark.parametrize("reason", ["content_filter", "tool_calls"])
def test_other_endings_are_failures(reason: str) -> None:
    reply = sse(delta("a"), delta("", finish=reason))
    with pytest.raises(errors.RequestError, match=reason):
        run(OpenAI("m", base_url="http://test", transport=service(reply, [])), chat())


def test_an_answer_that_never_finished_is_a_failure() -> None:
    with pytest.raises(errors.RequestError, match="0 of 1"):
        run(OpenAI("m", base_url="http://test", transport=service(sse(delta("a")), [])), chat())


def test_openai_needs_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(errors.ConfigError, match="OPENAI_API_KEY"):
        OpenAI("m")


def test_prefilling_a_service_sends_nothing() -> None:
    sent: list[Any] = []
    backend = OpenAI("m", base_url="http://test", transport=service(b"", sent))
    assert [c.finish for c in run(backend, chat(max_new_tokens=0))] == [Finish("length")]
    assert sent == []


def ours(mock: MockBackend, **options: Any) -> OpenAI:
    transport = httpx.ASGITransport(app=create_app(mock))
    return OpenAI("mock", base_url="http://test/v1", dialect="vllm", transport=transport, **options)


def test_our_own_server_speaks_openai() -> None:
    mock = MockBackend("one two", chat_template=sgl.chat.CHATML)
    chunks = run(ours(mock), chat(top_k=3, min_p=0.1, ignore_eos=True, stop_token_ids=(5,), n=2))
    assert "".join(c.text for c in chunks if c.index == 1) == "one two"
    sampling = mock.requests[0].sampling
    assert (sampling.top_k, sampling.min_p, sampling.ignore_eos, sampling.stop_token_ids) == (3, 0.1, True, (5,))


def test_our_own_server_continues_and_constrains() -> None:
    mock = MockBackend(chat_template=sgl.chat.CHATML)
    constraint = Constraint("choices", '["left", "right"]')
    run(ours(mock), GenerateRequest("r", (*CHAT, Text("Turn ")), constraint=constraint))
    assert mock.requests[0].constraint == constraint
    assert mock.prompts[0].endswith("<|im_start|>assistant\nTurn ")


def test_our_own_server_completes() -> None:
    mock = MockBackend("one two")
    chunks = run(ours(mock, is_chat_model=False), GenerateRequest("r", (Text("a"), Text("b")), SamplingParams(n=2)))
    assert "".join(c.text for c in chunks if c.index == 0) == "one two"
    assert mock.prompts == ["ab"]


def test_a_program_on_a_chat_service() -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += sgl.system("be brief") + sgl.user("<|im_end|> hi") + sgl.assistant(sgl.gen("a", max_tokens=3))

    sent: list[Any] = []
    reply = sse(delta("yes"), delta("", finish="stop"), USAGE)
    state = program.run(backend=OpenAI("m", base_url="http://test", transport=service(reply, sent)))
    assert state["a"] == "yes"
    assert sent[0][2]["messages"] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "<|im_end|> hi"},
    ]


# ---------------------------------------------------------------------------------------------------------- Anthropic


def claude(*deltas: str, stop: dict[str, Any]) -> bytes:
    start = {"type": "message_start", "message": {"usage": {"input_tokens": 5, "cache_read_input_tokens": 2}}}
    blocks = [{"type": "content_block_delta", "delta": {"type": "text_delta", "text": text}} for text in deltas]
    end = {"type": "message_delta", "delta": stop, "usage": {"output_tokens": 3}}
    return sse(start, {"type": "ping"}, *blocks, end, {"type": "message_stop"}, done=False)


def test_an_anthropic_message() -> None:
    sent: list[Any] = []
    reply = claude("Hel", "lo", stop={"stop_reason": "stop_sequence", "stop_sequence": "END"})
    backend = Anthropic("claude-x", api_key="k", transport=service(reply, sent))
    chunks = run(backend, chat(max_new_tokens=9, temperature=0.2, top_k=4, stop=("END",)))
    assert "".join(c.text for c in chunks) == "Hello"
    assert chunks[-1].finish == Finish("stop", matched="END")
    assert chunks[-1].usage == Usage(prompt_tokens=7, cached_tokens=2, completion_tokens=3)
    ((url, headers, body),) = sent
    assert url == "https://api.anthropic.com/v1/messages"
    assert headers["x-api-key"] == "k"
    assert body == {
        "model": "claude-x",
        "system": "be brief",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 9,
        "temperature": 0.2,
        "top_k": 4,
        "stop_sequences": ["END"],
        "stream": True,
    }


def test_an_answer_begun_is_sent_along() -> None:
    sent: list[Any] = []
    reply = claude("x", stop={"stop_reason": "max_tokens"})
    chunks = run(Anthropic("c", api_key="k", transport=service(reply, sent)), GenerateRequest("r", (*CHAT, Text("So"))))
    assert sent[0][2]["messages"][-1] == {"role": "assistant", "content": "So"}
    assert chunks[-1].finish == Finish("length")


@pytest.mark.parametrize(
    ("reply", "match"),
    [
        (sse({"type": "error", "error": {"type": "overloaded_error", "message": "busy"}}, done=False), "busy"),
        (claude("x", stop={"stop_reason": "refusal"}), "refusal"),
        (sse({"type": "message_stop"}, done=False), "without a reason"),
    ],
)
def test_anthropic_failures(reply: bytes, match: str) -> None:
    with pytest.raises(errors.RequestError, match=match):
        run(Anthropic("c", api_key="k", transport=service(reply, [])), chat())


def test_what_anthropic_lacks_is_refused() -> None:
    backend = Anthropic("c", api_key="k", transport=service(b"", []))
    with pytest.raises(errors.UnsupportedError, match="several samples"):
        run(backend, chat(n=2))
    with pytest.raises(errors.UnsupportedError, match="seed"):
        run(backend, chat(seed=2))


# ------------------------------------------------------------------------------------------------------------ LiteLLM


def test_litellm_is_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "litellm", None)
    with pytest.raises(errors.ConfigError, match="pip install"):
        LiteLLM("x/y")


def fake_litellm(monkeypatch: pytest.MonkeyPatch, answer: Callable[..., Any]) -> None:
    monkeypatch.setitem(sys.modules, "litellm", SimpleNamespace(acompletion=answer))


def test_litellm(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Mapping[str, Any]] = []

    async def stream() -> AsyncIterator[Any]:
        for event in (delta("a"), delta("", finish="stop"), USAGE):
            yield event

    async def acompletion(**fields: Any) -> Any:
        sent.append(fields)
        return stream()

    fake_litellm(monkeypatch, acompletion)
    chunks = run(LiteLLM("x/y", api_key="k", region="eu"), chat(max_new_tokens=3))
    assert "".join(c.text for c in chunks) == "a"
    assert sent[0]["model"] == "x/y" and sent[0]["region"] == "eu" and sent[0]["max_tokens"] == 3


def test_litellm_failures_have_our_types(monkeypatch: pytest.MonkeyPatch) -> None:
    class RateLimitError(Exception):
        status_code = 429

    async def acompletion(**fields: Any) -> Any:
        raise RateLimitError("slow down")

    fake_litellm(monkeypatch, acompletion)
    with pytest.raises(errors.OverloadedError, match="slow down"):
        run(LiteLLM("x/y"), chat())


# ------------------------------------------------------------------------------------------------------------ Runtime


def test_a_child_that_cannot_start_says_why() -> None:
    with pytest.raises(errors.ConfigError, match="no model 'nope'"):
        Runtime("nope")
    with pytest.raises(errors.ConfigError, match="give one"):
        Runtime("a", model_path="b")
