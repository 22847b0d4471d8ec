"""What clients really send: legal, if unusual, and mistakes that must be named."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

Call = Callable[..., httpx.Response]
USER: Any = {"role": "user", "content": "hi"}
CALL: Any = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
OWN_ANSWER: Any = {  # an openai package's message, given back as it is
    "role": "assistant",
    "content": None,
    "refusal": None,
    "annotations": [],
    "audio": None,
    "function_call": None,
    "tool_calls": [CALL],
}


def chat(post: Call, *messages: Any, **fields: Any) -> httpx.Response:
    return post("/v1/chat/completions", json={"messages": list(messages), **fields})


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics", "/v1/models", "/v1/models/fake", "/"])
def test_head_is_get_without_its_body(call: Call, path: str) -> None:
    assert call("HEAD", path).status_code == 200
    assert call("HEAD", "/generate").status_code == 405
    assert call("HEAD", "/generate").headers["allow"] == "POST"


@pytest.mark.parametrize("path", ["/v1/models/", "/health/", "/v1/models/fake/"])
def test_a_slash_at_the_end_says_nothing(call: Call, path: str) -> None:
    assert call("GET", path).status_code == 200


def test_a_slash_opens_no_route(call: Call) -> None:
    answer = call("POST", "/v1/chat/completions/", json={"messages": [USER]})
    assert answer.json()["object"] == "chat.completion"
    assert call("POST", "//v1/chat/completions", json={"messages": [USER]}).status_code == 404


def test_browsers_of_other_sites_are_not_let_in(call: Call) -> None:
    headers = {"origin": "http://other.example", "access-control-request-method": "POST"}
    answer = call("OPTIONS", "/v1/chat/completions", headers=headers)
    assert answer.status_code == 405
    assert not any(name.startswith("access-control") for name in answer.headers)


def test_a_packed_body_is_refused_by_name(call: Call) -> None:
    body = gzip.compress(json.dumps({"messages": [USER]}).encode())
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    answer = call("POST", "/v1/chat/completions", content=body, headers=headers)
    assert (answer.status_code, "gzip" in answer.json()["error"]["message"]) == (415, True)


@pytest.mark.parametrize("result", ["42", [{"type": "text", "text": "42"}]], ids=["text", "parts"])
def test_a_conversation_with_a_tool_is_read_back(post: Call, backend: Any, result: Any) -> None:
    tool = {"role": "tool", "tool_call_id": "c1", "name": "f", "content": result}
    assert chat(post, USER, OWN_ANSWER, tool).status_code == 200
    text = "".join(getattr(segment, "value", "") for segment in backend.requests[0].prompt)
    assert "42" in text and "annotations" not in text and "None" not in text


def test_an_answer_to_no_call_is_refused(post: Call) -> None:
    answer = chat(post, USER, OWN_ANSWER, {"role": "tool", "tool_call_id": "zz", "content": "42"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages[2].tool_call_id")


def test_an_assistant_who_says_nothing_is_refused(post: Call) -> None:
    answer = chat(post, USER, {"role": "assistant", "content": None}, USER)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages[1].content")


def test_an_unknown_role_is_named(post: Call) -> None:
    for message in ({"role": "robot", "content": "x"}, {"content": "x"}):
        answer = chat(post, USER, message)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages[1].role")


def test_annotations_of_others_are_refused(post: Call) -> None:
    answer = chat(post, USER, {"role": "assistant", "content": "x", "annotations": [{"type": "url_citation"}]}, USER)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages[1].annotations")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", {"stream_options": {"include_usage": True}}, "stream_options"),
        ("/v1/chat/completions", {"top_logprobs": 3}, "top_logprobs"),
        ("/v1/chat/completions", {"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
        ("/v1/chat/completions", {"max_tokens": 5, "min_tokens": 6}, "min_tokens"),
        ("/v1/chat/completions", {"guided_regex": "a", "guided_json": {}}, "guided_json"),
        ("/v1/chat/completions", {"structured_outputs": {}}, "structured_outputs"),
        ("/v1/chat/completions", {"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ("/v1/completions", {"best_of": 1, "n": 2}, "best_of"),
        ("/v1/completions", {"best_of": 2, "stream": True}, "best_of"),
        (
            "/generate",
            {"sampling_params": {"min_new_tokens": 5, "max_new_tokens": 1}},
            "sampling_params.min_new_tokens",
        ),
    ],
)
def test_fields_that_contradict_each_other_are_named(post: Call, path: str, body: Any, param: str) -> None:
    own = {"/generate": {"text": "a"}, "/v1/completions": {"prompt": "a"}}.get(path, {"messages": [USER]})
    answer = post(path, json={**own, **body})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert answer.json()["error"]["message"].startswith(f"{param}: ")


def test_null_is_the_default_on_sglangs_route_too(post: Call) -> None:
    names = ("rid", "stream", "return_logprob", "return_text_in_logprobs", "return_hidden_states", "image_data")
    assert post("/generate", json={"text": "a", **dict.fromkeys(names)}).status_code == 200
