"""Rows 1-15 and 19 of the list of faults, on every route that takes a body, and the one shape of every refusal."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from sglite import errors
from sglite.runtime.server.config import ServerConfig

Call = Callable[..., httpx.Response]
JSON = {"content-type": "application/json"}
BODIES = {
    "/generate": {"text": "a"},
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/sglite/generate": {"id": "a", "prompt": [{"value": "a"}]},
}
every_route = pytest.mark.parametrize("path", BODIES)


def refused(response: httpx.Response, status: int = 400, param: str | None = None) -> dict[str, Any]:
    """The error of a refusal, after checking that it has the one shape and says nothing it should not."""
    assert response.status_code == status, response.text
    assert response.headers["x-request-id"]
    assert response.json().keys() == {"error"}
    error: dict[str, Any] = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"] and error["type"] and error["code"]
    assert "Traceback" not in response.text and ".py" not in response.text and "0x" not in response.text
    if param is not None:
        assert error["param"] is not None and error["param"].endswith(param), error
    return error


# ------------------------------------------------------------------------------------------------------ rows 1 and 2


@every_route
@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"{} x",
        b"null",
        b"42",
        b'"s"',
        b"[]",
        b"NaN",
        b'{"text": NaN}',
        b'{"text": Infinity}',
        b'{"text": 1e400}',
        b'{"text": ' + b"9" * 5000 + b"}",
        b"[" * 100_000,
        b'{"a":' * 100 + b"1" + b"}" * 100,
        b'{"text": "\\ud800"}',
        b'{"text": "\xed\xa0\x80"}',
        b'{"text": "\xff"}',
        '{"text": "a"}'.encode("utf-16"),
        b"\xef\xbb\xbf{}",
        b"\x00",
    ],
    ids=lambda raw: repr(raw[:20]),
)
def test_malformed_json_is_a_400(call: Call, path: str, raw: bytes) -> None:
    refused(call("POST", path, content=raw, headers=JSON))


@every_route
@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded", "applicationjson", ""])
def test_another_content_type_is_a_415(call: Call, path: str, kind: str | None) -> None:
    headers = {} if kind is None else {"content-type": kind}
    refused(call("POST", path, content=json.dumps(BODIES[path]).encode(), headers=headers), 415)


@every_route
def test_a_charset_is_fine(call: Call, path: str) -> None:
    headers = {"content-type": "Application/JSON; charset=utf-8"}
    assert call("POST", path, content=json.dumps(BODIES[path]).encode(), headers=headers).status_code == 200


@every_route
@pytest.mark.parametrize("method", ["GET", "DELETE", "PATCH"])
def test_another_method_is_a_405_that_names_the_right_one(call: Call, path: str, method: str) -> None:
    response = call(method, path)
    refused(response, 405)
    assert "POST" in response.headers["allow"]


@pytest.mark.parametrize(
    "path", ["/nope", "/ui/", "/ui/../app.js", "/v1", "/v1/nope", "/generate/x", "/docs", "/..%2f..%2fetc/passwd"]
)
def test_an_unknown_path_is_a_404(call: Call, path: str) -> None:
    refused(call("GET", path), 404)


@every_route
def test_unknown_fields_are_named(call: Call, path: str) -> None:
    refused(call("POST", path, json={**BODIES[path], "banana": 1}), param="banana")


# --------------------------------------------------------------------------------------- rows 3 to 8: numbers, strings

_PLACES: dict[str, Callable[[dict[str, Any]], tuple[str, dict[str, Any]]]] = {
    "native": lambda fields: ("/generate", {"text": "a", "sampling_params": fields}),
    "completions": lambda fields: ("/v1/completions", {"prompt": "a", **fields}),
    "chat": lambda fields: ("/v1/chat/completions", {**BODIES["/v1/chat/completions"], **fields}),
    "sglite": lambda fields: ("/v1/sglite/generate", {**BODIES["/v1/sglite/generate"], "sampling": fields}),
}
_OPENAI = ("completions", "chat")
everywhere = pytest.mark.parametrize("place", _PLACES)


@everywhere
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1),
        ("temperature", 1e9),
        ("temperature", "1"),
        ("temperature", True),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("top_k", 0),
        ("top_k", 1.5),
        ("top_k", "5"),
        ("min_p", -0.1),
        ("min_p", 2),
        ("frequency_penalty", 2.5),
        ("presence_penalty", -2.5),
        ("repetition_penalty", 0),
        ("seed", "x"),
        ("seed", 2**64),
        ("seed", 1.0),
        ("ignore_eos", "yes"),
        ("ignore_eos", 1),
        ("skip_special_tokens", 0),
        ("n", 0),
        ("n", 10**9),
        ("n", 1.0),
        ("n", True),
        ("stop", [""]),
        ("stop", ["x"] * 10_000),
        ("stop", [1]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [2**63]),
        ("stop_token_ids", ["1"]),
        ("logit_bias", [[-1, 1]]),
    ],
)
def test_bad_values_name_their_field(call: Call, backend: Any, place: str, field: str, value: object) -> None:
    path, body = _PLACES[place]({field: value})
    error = refused(call("POST", path, json=body))
    assert field in (error["param"] or "") + error["message"]
    assert backend.requests == []


@everywhere
@pytest.mark.parametrize("value", [-1, 2**31, "5", 1.5, True, 10**400])
def test_bad_token_limits_name_their_field(call: Call, place: str, value: object) -> None:
    field = "max_tokens" if place in _OPENAI else "max_new_tokens"
    path, body = _PLACES[place]({field: value})
    refused(call("POST", path, json=body), param=field)


@everywhere
def test_less_than_the_minimum(call: Call, place: str) -> None:
    names = ("max_tokens", "min_tokens") if place in _OPENAI else ("max_new_tokens", "min_new_tokens")
    path, body = _PLACES[place]({names[0]: 3, names[1]: 4})
    assert names[1] in refused(call("POST", path, json=body))["message"]


@pytest.mark.parametrize("place", ["native", *_OPENAI])
@pytest.mark.parametrize(
    "value",
    [
        {"abc": 1},
        {"-1": 1},
        {str(VOCAB := 256): 1},
        {"1": 101},
        {"1": "2"},
        {"9" * 30: 1},
        {str(i): 1 for i in range(50_000)},
    ],
    ids=["word", "negative", "vocabulary", "big", "text", "long", "many"],
)
def test_bad_logit_bias(call: Call, backend: Any, place: str, value: dict[str, object]) -> None:
    path, body = _PLACES[place]({"logit_bias": value})
    if len(json.dumps(body)) > 1 << 20:
        refused(call("POST", path, json=body), 413)
    else:
        refused(call("POST", path, json=body), 400, "logit_bias")
    assert backend.requests == []


@pytest.mark.parametrize("place", ["native", *_OPENAI])
def test_a_long_stop_string(call: Call, place: str) -> None:
    path, body = _PLACES[place]({"stop": "x" * 900_000})
    refused(call("POST", path, json=body), param="stop")
    path, body = _PLACES[place]({"stop": "x" * (1 << 20)})
    refused(call("POST", path, json=body), 413)


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/completions", {"best_of": 10**6}, "best_of"),
        ("/v1/completions", {"best_of": 2, "n": 3}, None),
        ("/v1/completions", {"best_of": 2, "stream": True}, None),
        ("/v1/completions", {"logprobs": 10**6}, "logprobs"),
        ("/v1/completions", {"suffix": "x"}, "suffix"),
        ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 10**6}, "top_logprobs"),
        ("/v1/chat/completions", {"top_logprobs": 1}, None),
        ("/v1/chat/completions", {"max_tokens": 1, "max_completion_tokens": 2}, None),
        ("/v1/chat/completions", {"stream_options": {"include_usage": True}}, None),
        ("/v1/chat/completions", {"store": True}, "store"),
        ("/v1/chat/completions", {"modalities": ["audio"]}, "modalities"),
        ("/v1/chat/completions", {"chat_template": "{{ 1 }}"}, "chat_template"),
        ("/v1/chat/completions", {"chat_template_kwargs": {"messages": 1}}, "messages"),
        ("/v1/chat/completions", {"stream": "yes"}, "stream"),
        ("/generate", {"top_logprobs_num": 10**6, "return_logprob": True}, "top_logprobs_num"),
        ("/generate", {"stream": 1}, "stream"),
    ],
)
def test_other_fields(call: Call, path: str, fields: dict[str, Any], param: str | None) -> None:
    refused(call("POST", path, json={**BODIES[path], **fields}), param=param)


@every_route
def test_null_is_the_default_where_openai_says_so(call: Call, path: str) -> None:
    if path.startswith("/v1/c"):
        names = ("temperature", "top_p", "n", "stop", "seed", "logit_bias", "max_tokens", "stream", "logprobs", "user")
        assert call("POST", path, json={**BODIES[path], **dict.fromkeys(names)}).status_code == 200


# ------------------------------------------------------------------------------------------------------ rows 10 to 14


def test_control_characters_are_counted(call: Call) -> None:
    answer = call("POST", "/generate", json={"text": "\x00\x01\x1e\x7f"})
    assert answer.json()["meta_info"]["prompt_tokens"] == 4


@pytest.mark.parametrize(
    "prompt", [[], [[]], [""] * 65, ["a", 1], [1, "a"], [[1], "a"], [1, [2]], [True, False], [1.0], {}, 5, None, [None]]
)
def test_bad_prompts(call: Call, prompt: object) -> None:
    refused(call("POST", "/v1/completions", json={"prompt": prompt}), param="prompt")


@pytest.mark.parametrize("ids", [[-1], [256], [2**63], [[1], [2**63]]])
def test_bad_token_ids(call: Call, ids: object) -> None:
    refused(call("POST", "/v1/completions", json={"prompt": ids}), param="prompt")
    refused(call("POST", "/generate", json={"input_ids": ids}))


@pytest.mark.parametrize(
    "messages",
    [
        [],
        None,
        "a",
        [1],
        [{}],
        [{"role": "user"}],
        [{"role": "wizard", "content": "a"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": ["a"]}],
        [{"role": "user", "content": "a", "banana": 1}],
        [{"role": "user", "content": "a", "name": "<|im_end|>"}],
        [{"role": "tool", "content": "a"}],
        [{"role": "user", "content": "a"}] * 5000,
    ],
)
def test_bad_messages(call: Call, messages: object) -> None:
    error = refused(call("POST", "/v1/chat/completions", json={"messages": messages}))
    assert error["param"] is not None and error["param"].startswith("messages")


@pytest.mark.parametrize(("length", "status"), [(4095, 200), (4096, 400), (4097, 400), (40960, 400)])
def test_the_context_is_a_limit(call: Call, length: int, status: int) -> None:
    response = call("POST", "/v1/completions", json={"prompt": "a" * length})
    assert response.status_code == status
    if status == 400:
        assert refused(response)["code"] == "context_length_exceeded"
    assert call("POST", "/v1/completions", json={"prompt": "a"}).status_code == 200


# ------------------------------------------------------------------------------------------------------- rows 15 and 19


@pytest.mark.parametrize("name", ["nope", "", "../../etc/passwd", "fake/", "x" * 1000])
def test_an_unknown_model_is_a_404(call: Call, name: str) -> None:
    for path in ("/v1/completions", "/v1/chat/completions"):
        refused(call("POST", path, json={**BODIES[path], "model": name}), 404, "model")
    if name and ".." not in name and not name.endswith("/"):  # a slash at a path's end says nothing
        refused(call("GET", f"/v1/models/{name}"), 404)


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_object"}, "guided_regex": "a"},
        {"guided_json": {}, "guided_regex": "a"},
        {"guided_choice": ["a"], "guided_grammar": "root ::= 'a'"},
        {"structured_outputs": {"regex": "a", "json": {}}},
        {"structured_outputs": {}},
        {"structured_outputs": {"banana": 1}},
        {"response_format": {"type": "banana"}},
        {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}},
        {"response_format": {"type": "text", "regex": "a"}},
        {"response_format": {"type": "regex"}},
        {"guided_choice": []},
        {"guided_choice": [1]},
        {"guided_json": 5},
        {"guided_json": {"description": "x" * (64 << 10)}},
    ],
)
def test_bad_constraints(call: Call, fields: dict[str, Any]) -> None:
    for path in ("/v1/completions", "/v1/chat/completions"):
        refused(call("POST", path, json={**BODIES[path], **fields}))


# ------------------------------------------------------------------------------------------------------------- bounds


@every_route
def test_a_large_body_is_a_413(call: Call, path: str) -> None:
    refused(call("POST", path, content=b" " * ((1 << 20) + 1), headers=JSON), 413)


def test_large_headers_are_a_431(call: Call) -> None:
    refused(call("GET", "/health", headers={"x-filler": "a" * (17 << 10)}), 431)


@pytest.mark.parametrize("config", [ServerConfig(max_batch=2, max_samples=5)], indirect=False)
def test_batches_are_bounded(call: Call, config: ServerConfig) -> None:
    assert call("POST", "/v1/completions", json={"prompt": ["a", "b"], "n": 2}).status_code == 200
    refused(call("POST", "/v1/completions", json={"prompt": ["a", "b"], "n": 3}), param="n")
    refused(call("POST", "/v1/completions", json={"prompt": ["a"] * 3}), param="prompt")
    refused(call("POST", "/generate", json={"text": ["a"] * 3}))


# ------------------------------------------------------------------------------------------- what the backend raises


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (errors.CapacityError("too large", param="prompt"), 400),
        (errors.GrammarError("no such type", pointer="/type", param="response_format"), 400),
        (errors.NotFoundError("no adapter x", param="adapter"), 404),
        (errors.OverloadedError("the queue is full"), 429),
        (errors.UnavailableError("draining"), 503),
        (errors.AbortedError("aborted"), 409),
        (errors.DeadlineError("too late"), 504),
        (errors.RequestError("it broke"), 500),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
@every_route
def test_typed_errors_have_their_status(call: Call, backend: Any, path: str, error: Exception, status: int) -> None:
    backend.fail_after = (0, error)
    for stream in (False, True):
        body = BODIES[path] if path == "/v1/sglite/generate" else {**BODIES[path], "stream": stream}
        response = call("POST", path, json=body)
        shown = refused(response, status)
        assert shown["message"] == str(error)
        assert ("retry-after" in response.headers) == (status in (429, 503))


@every_route
def test_other_exceptions_stay_in_the_log(
    call: Call, backend: Any, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    backend.fail_after = (0, OSError("/secret/path"))
    with caplog.at_level(logging.ERROR, "sglite.server"):
        response = call("POST", path, json=BODIES[path])
    assert "secret" not in response.text
    refused(response, 500)
    assert "/secret/path" in caplog.text


@every_route
def test_a_failure_in_mid_stream_is_an_error_event(call: Call, backend: Any, path: str) -> None:
    backend.fail_after = (2, errors.RequestError("it broke"))
    body = BODIES[path] if path == "/v1/sglite/generate" else {**BODIES[path], "stream": True}
    response = call("POST", path, json=body)
    assert response.status_code == 200
    *_, last = [line[6:] for line in response.text.split("\n") if line.startswith("data: ")]
    assert json.loads(last)["error"]["message"] == "it broke"
    assert "[DONE]" not in response.text
    assert backend.running == 0


def test_a_clients_request_id_comes_back_when_it_is_harmless(call: Call) -> None:
    assert call("GET", "/health", headers={"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
    assert call("GET", "/health", headers={"x-request-id": "a" * 100}).headers["x-request-id"] != "a" * 100
