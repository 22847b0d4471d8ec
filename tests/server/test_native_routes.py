"""SGLang's native route: shapes, cumulative streams, batches, and the calls its client makes for select."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from sglite.protocol import Constraint, LogprobParams, SamplingParams, Text, Tokens

Post = Callable[..., httpx.Response]


def events(response: httpx.Response) -> list[dict[str, Any]]:
    lines = [line[6:] for line in response.text.split("\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_one_prompt(post: Post, backend: Any) -> None:
    answer = post("/generate", {"text": "hi", "sampling_params": {"max_new_tokens": 4, "top_k": 3}}).json()
    assert answer["text"] == "Hell"
    assert answer["output_ids"] == [72, 101, 108, 108]
    meta = answer["meta_info"]
    assert meta.pop("id").startswith("gen-")
    assert meta == {
        "finish_reason": {"type": "length", "length": 4},
        "prompt_tokens": 2,
        "cached_tokens": 1,
        "completion_tokens": 4,
    }
    assert backend.requests[0].prompt == (Text("hi", special=True),)
    assert backend.requests[0].sampling == SamplingParams(max_new_tokens=4, top_k=3)


def test_stop_is_reported_with_what_matched(post: Post) -> None:
    meta = post("/generate", {"text": "hi"}).json()["meta_info"]
    assert meta["finish_reason"] == {"type": "stop", "matched": 0}


def test_every_sampling_field_arrives(post: Post, backend: Any) -> None:
    given = {
        "max_new_tokens": 7,
        "min_new_tokens": 1,
        "n": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "frequency_penalty": 0.2,
        "presence_penalty": 0.3,
        "repetition_penalty": 1.1,
        "seed": 11,
        "stop": "x",
        "stop_token_ids": [3],
        "stop_regex": ["a+"],
        "ignore_eos": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": True,
        "logit_bias": {"5": -1},
        "regex": "a+",
    }
    assert post("/generate", {"input_ids": [1, 2], "sampling_params": given}).status_code == 200
    request = backend.requests[0]
    assert request.prompt == (Tokens((1, 2)),)
    assert request.constraint == Constraint("regex", "a+")
    assert request.sampling == SamplingParams(
        max_new_tokens=7,
        min_new_tokens=1,
        n=2,
        temperature=0.5,
        top_p=0.9,
        top_k=5,
        min_p=0.1,
        frequency_penalty=0.2,
        presence_penalty=0.3,
        repetition_penalty=1.1,
        seed=11,
        stop=("x",),
        stop_token_ids=(3,),
        stop_regex=("a+",),
        ignore_eos=True,
        skip_special_tokens=False,
        logit_bias=((5, -1.0),),
    )


def test_batches_answer_in_order_with_options_of_their_own(post: Post, backend: Any) -> None:
    backend.answer = lambda request: request.prompt[0].value.upper()
    body = {
        "text": ["ab", "cdef"],
        "sampling_params": [{"max_new_tokens": 1}, {"max_new_tokens": 3}],
        "rid": ["r1", "r2"],
        "return_logprob": [False, True],
    }
    first, second = post("/generate", body).json()
    assert (first["text"], second["text"]) == ("A", "CDE")
    assert (first["meta_info"]["id"], second["meta_info"]["id"]) == ("r1", "r2")
    assert "output_token_logprobs" not in first["meta_info"]
    assert len(second["meta_info"]["output_token_logprobs"]) == 3


def test_several_samples_are_a_flat_list(post: Post) -> None:
    answers = post("/generate", {"text": "hi", "sampling_params": {"n": 3, "max_new_tokens": 1}}).json()
    assert [a["text"] for a in answers] == ["H", "H", "H"]


def test_streams_are_cumulative_and_end_with_done(post: Post) -> None:
    body = {"text": "hi", "stream": True, "sampling_params": {"max_new_tokens": 3}, "return_logprob": True}
    response = post("/generate", body)
    assert response.headers["content-type"].startswith("text/event-stream")
    steps = events(response)
    assert [s["text"] for s in steps] == ["H", "He", "Hel", "Hel"]
    assert [len(s["meta_info"]["output_token_logprobs"]) for s in steps] == [1, 2, 3, 3]
    assert [s["meta_info"]["finish_reason"] for s in steps[:-1]] == [None] * 3
    assert steps[-1]["meta_info"]["prompt_tokens"] == 2
    assert steps[-1]["meta_info"]["completion_tokens"] == 3
    assert "index" not in steps[0]


def test_a_streamed_batch_tells_its_items_apart(post: Post, backend: Any) -> None:
    backend.answer = lambda request: request.prompt[0].value.upper()
    body = {"text": ["ab", "cd"], "stream": True, "sampling_params": {"n": 2}}
    last: dict[int, str] = {}
    for step in events(post("/generate", body)):
        last[step["index"]] = step["text"]
    assert last == {0: "AB", 1: "AB", 2: "CD", 3: "CD"}


def test_prefill_alone_counts_the_prompt(post: Post, backend: Any) -> None:
    answer = post("/generate", {"text": "hi", "sampling_params": {"max_new_tokens": 0}}).json()
    assert answer["text"] == ""
    assert answer["meta_info"]["prompt_tokens"] == 2
    assert backend.requests[0].sampling.max_new_tokens == 0


def test_select_reads_the_prompts_logprobs(post: Post) -> None:
    """The second of the three calls of SGLang's select."""
    body = {
        "text": ["abc", "abd"],
        "sampling_params": {"max_new_tokens": 0, "temperature": 0},
        "return_logprob": True,
        "return_text_in_logprobs": True,
        "logprob_start_len": 1,
    }
    first, second = (a["meta_info"] for a in post("/generate", body).json())
    assert first["input_token_logprobs"] == [[-0.5, 98, "b"], [-0.5, 99, "c"]]
    assert second["input_token_logprobs"][-1] == [-0.5, 100, "d"]
    assert first["output_token_logprobs"] == []


def test_scoring_token_ids_needs_no_start(post: Post, backend: Any) -> None:
    """The third call: unconditional logprobs of a batch of token ids."""
    body = {"input_ids": [[97, 98], [99]], "sampling_params": {"max_new_tokens": 0}, "return_logprob": True}
    first, second = (a["meta_info"]["input_token_logprobs"] for a in post("/generate", body).json())
    assert first == [[None, 97, None], [-0.5, 98, None]]
    assert second == [[None, 99, None]]
    assert backend.requests[0].logprobs == LogprobParams(prompt_start=0)


def test_top_logprobs_have_no_infinities(post: Post) -> None:
    body = {"text": "hi", "return_logprob": True, "top_logprobs_num": 5, "sampling_params": {"max_new_tokens": 1}}
    response = post("/generate", body)
    assert "Infinity" not in response.text
    assert response.json()["meta_info"]["output_top_logprobs"][0][-1][0] == -9999.0


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "text"),
        ({"text": "a", "input_ids": [1]}, "text"),
        ({"text": []}, "text"),
        ({"text": ["a", 1]}, "text[1]"),
        ({"text": ["a", "b"], "rid": ["x"]}, "rid"),
        ({"text": "a", "rid": "x y"}, "rid"),
        ({"text": "a", "image_data": "x.png"}, "image_data"),
        ({"text": "a", "sampling_params": {"banana": 1}}, "sampling_params.banana"),
        ({"text": "a", "sampling_params": {"top_p": 0}}, "sampling_params.top_p"),
        ({"text": "a", "sampling_params": {"regex": "a", "json_schema": "{}"}}, "sampling_params.regex"),
        ({"text": "a", "sampling_params": {"no_stop_trim": True}}, "sampling_params.no_stop_trim"),
        ({"text": "a", "sampling_params": [{}, {}]}, "sampling_params"),
        ({"text": "a", "return_hidden_states": True}, "return_hidden_states"),
        ({"text": "a", "sampling_params": []}, "sampling_params"),
        ({"text": "a", "return_logprob": []}, "return_logprob"),
    ],
)
def test_refusals_name_the_field(post: Post, body: dict[str, Any], param: str) -> None:
    response = post("/generate", body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_a_request_id_cannot_be_used_twice_at_once(post: Post) -> None:
    response = post("/generate", {"text": ["a", "b"], "rid": ["x", "x"]})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "rid"
    assert post("/generate", {"text": "a", "rid": "x"}).status_code == 200


def test_what_clients_ask_before_they_start(call: Callable[..., httpx.Response], backend: Any) -> None:
    assert call("GET", "/get_model_info").json()["model_path"] == "fake"
    for path in ("/server_info", "/get_server_info"):
        assert call("GET", path).json()["model_path"] == "fake"
    assert call("POST", "/flush_cache", json={"empty_cache": True}).status_code == 200
    assert call("POST", "/flush_cache").status_code == 200
    assert backend.flushed == 2


def test_joining_forks_needs_nothing_of_us(post: Post) -> None:
    assert post("/concate_and_append_request", {"src_rids": ["a", "b"], "dst_rid": "c"}).status_code == 200
    assert post("/concate_and_append_request", {"src_rids": "a", "dst_rid": "c"}).status_code == 400
