"""What the engine refuses names the field as the client wrote it, on every route, streamed or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from sglite.errors import ContextLengthError, GrammarError, InvalidRequestError

Call = Callable[..., httpx.Response]
CHAT, COMPLETIONS, NATIVE = "/v1/chat/completions", "/v1/completions", "/generate"
BASE: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}]},
    COMPLETIONS: {"prompt": "hi"},
    NATIVE: {"text": "hi"},
}
TOOL = {"type": "function", "function": {"name": "a", "parameters": {"properties": {"b": {"type": "string"}}}}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "fields", "engines", "clients"),
    [
        (CHAT, {}, "prompt", "messages"),
        (CHAT, {}, "max_new_tokens", "max_tokens"),
        (CHAT, {"max_completion_tokens": 5}, "max_new_tokens", "max_completion_tokens"),
        (CHAT, {"max_completion_tokens": 5}, "max_tokens", "max_completion_tokens"),
        (CHAT, {"guided_regex": "a"}, "regex", "guided_regex"),
        (CHAT, {"structured_outputs": {"grammar": "a"}}, "ebnf", "structured_outputs.grammar"),
        (CHAT, {"response_format": {"type": "regex", "regex": "a"}}, "regex", "response_format"),
        (CHAT, {"tools": [TOOL], "tool_choice": "required"}, "json_schema", "tools"),
        (CHAT, {"tools": [TOOL], "tool_choice": "none", "guided_json": {}}, "json_schema", "guided_json"),
        (CHAT, {"logprobs": True, "top_logprobs": 1}, "top_logprobs", "top_logprobs"),
        (COMPLETIONS, {}, "prompt", "prompt"),
        (COMPLETIONS, {}, "min_new_tokens", "min_tokens"),
        (COMPLETIONS, {"logprobs": 1}, "top_logprobs", "logprobs"),
        (COMPLETIONS, {"guided_choice": ["a"]}, "choices", "guided_choice"),
        (NATIVE, {}, "prompt", "text"),
        (NATIVE, {"text": None, "input_ids": [1]}, "prompt", "input_ids"),
        (NATIVE, {}, "max_tokens", "sampling_params.max_new_tokens"),
        (NATIVE, {"sampling_params": {"stop_regex": "a"}}, "stop_regex", "sampling_params.stop_regex"),
        (NATIVE, {"lora_path": "x"}, "adapter", "lora_path"),
        (NATIVE, {"return_logprob": True, "token_ids_logprob": [1]}, "token_ids_logprob", "token_ids_logprob"),
    ],
)
def test_the_field_is_the_clients(
    call: Call, backend: Any, stream: bool, path: str, fields: dict[str, Any], engines: str, clients: str
) -> None:
    error = InvalidRequestError("no", param=engines)
    backend.fail_after = (0, error)
    answer = call("POST", path, json={**BASE[path], **fields, "stream": stream})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, clients)
    assert error.param == engines, "others may be told of the same error"


def test_what_else_an_error_tells_is_kept(call: Call, backend: Any) -> None:
    backend.fail_after = (0, GrammarError("no", kind="limit", param="json_schema", pointer="/properties/a"))
    answer = call("POST", COMPLETIONS, json={"prompt": "a", "guided_json": {}}).json()["error"]
    assert (answer["param"], answer["code"]) == ("guided_json/properties/a", "invalid_grammar")
    backend.fail_after = (0, ContextLengthError("no", param="prompt"))
    assert call("POST", CHAT, json=BASE[CHAT]).json()["error"]["code"] == "context_length_exceeded"


def test_bounds_of_a_request_name_its_own_fields(call: Call) -> None:
    def param(path: str, **fields: Any) -> str:
        answer = call("POST", path, json=fields)
        assert answer.status_code == 400
        return str(answer.json()["error"]["param"])

    assert param(NATIVE, input_ids=[[1]] * 65) == "input_ids"
    assert param(NATIVE, text=["a"] * 65) == "text"
    assert param(NATIVE, text=["a"] * 64, sampling_params={"n": 5}) == "sampling_params.n"
    assert param(COMPLETIONS, prompt=["a"] * 64, n=5) == "n"


@pytest.mark.parametrize(
    "idle",
    [
        {"logprob_start_len": 0},
        {"top_logprobs_num": [2]},
        {"token_ids_logprob": [1]},
        {"return_text_in_logprobs": True},
    ],
    ids=str,
)
def test_options_of_logprobs_need_logprobs(call: Call, idle: dict[str, Any]) -> None:
    (name,) = idle
    body = {"text": ["hi"], **idle}
    answer = call("POST", NATIVE, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)
    assert "needs return_logprob" in answer.json()["error"]["message"]
    assert call("POST", NATIVE, json={**body, "return_logprob": True}).status_code == 200


def test_the_defaults_of_sglangs_own_clients_pass(call: Call) -> None:
    idle = {"return_logprob": False, "logprob_start_len": -1, "top_logprobs_num": 0, "return_text_in_logprobs": False}
    assert call("POST", NATIVE, json={"text": "hi", **idle}).status_code == 200


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/moderations", "/completion", "/v1/audio/speech"])
def test_a_route_of_others_is_refused_with_a_way_out(call: Call, path: str) -> None:
    error = call("POST", path, json={}).json()["error"]
    assert error["code"] == "not_found" and "/openapi.json" in error["message"]
