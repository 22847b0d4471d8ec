"""The codec is lossless for every protocol type, strict about every field, and keeps errors' types."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglite import errors
from sglite.codec import decode, decode_error, encode, encode_error
from sglite.protocol import (
    CandidateScore,
    Capabilities,
    Chunk,
    Constraint,
    Finish,
    GenerateRequest,
    LogprobParams,
    ModelInfo,
    ProgramInfo,
    SamplingParams,
    Text,
    TokenLogprob,
    Tokens,
    Usage,
)

token = st.integers(0, 2**31 - 1)
text = st.text(max_size=8)
number = st.floats(allow_nan=False, allow_infinity=False)
logprob = st.builds(
    TokenLogprob, token, st.none() | number, text, st.lists(st.tuples(token, number, text), max_size=2).map(tuple)
)
logprobs = st.lists(logprob, max_size=2).map(tuple)
segment = st.builds(Text, text, st.booleans()) | st.builds(Tokens, st.lists(token, max_size=3).map(tuple), text)
requests = st.builds(
    GenerateRequest,
    id=text,
    prompt=st.lists(segment, min_size=1, max_size=3).map(tuple),
    sampling=st.builds(
        SamplingParams,
        max_new_tokens=token,
        temperature=number,
        seed=st.none() | st.integers(),
        stop=st.lists(text, max_size=2).map(tuple),
        logit_bias=st.lists(st.tuples(token, number), max_size=2).map(tuple),
    ),
    constraint=st.none() | st.builds(Constraint, st.sampled_from(["regex", "json_object"]), text),
    logprobs=st.none() | st.builds(LogprobParams, st.booleans(), st.none() | token, token),
    candidates=st.lists(text, max_size=2).map(tuple),
    adapter=st.none() | text,
    priority=st.integers(-5, 5),
    deadline=st.none() | number,
    program=st.none() | st.builds(ProgramInfo, text, text, st.booleans()),
    namespace=text,
)
chunks = st.builds(
    Chunk,
    text=text,
    ids=st.lists(token, max_size=3).map(tuple),
    index=token,
    logprobs=logprobs,
    finish=st.none()
    | st.builds(Finish, st.sampled_from(["stop", "length"]), st.none() | text | token, st.none() | text),
    usage=st.none() | st.builds(Usage, prompt_tokens=token, completion_tokens=token, decode_time=number),
    prompt_logprobs=logprobs,
    scores=st.lists(st.builds(CandidateScore, text, logprobs), max_size=2).map(tuple),
)


@settings(max_examples=50, deadline=None)
@given(requests)
def test_requests_survive_the_wire(request: GenerateRequest) -> None:
    assert decode(GenerateRequest, json.loads(json.dumps(encode(request)))) == request


@settings(max_examples=50, deadline=None)
@given(chunks)
def test_chunks_survive_the_wire(chunk: Chunk) -> None:
    assert decode(Chunk, json.loads(json.dumps(encode(chunk)))) == chunk


def test_model_info_survives_the_wire() -> None:
    capabilities = Capabilities(constraints=frozenset({"regex"}), candidates=True, sampling=frozenset({"top_p"}))
    info = ModelInfo("m", 10, eos_token_ids=(1, 2), capabilities=capabilities, details={"a": {"b": [1]}})
    assert decode(ModelInfo, json.loads(json.dumps(encode(info)))) == info


def test_defaults_take_no_room() -> None:
    assert encode(Chunk(text="a", ids=(1,))) == {"text": "a", "ids": (1,)}


@pytest.mark.parametrize(
    ("value", "field"),
    [
        ([], None),
        ({"id": "a"}, "prompt"),
        ({"id": 1, "prompt": []}, "id"),
        ({"id": "a", "prompt": "text"}, "prompt"),
        ({"id": "a", "prompt": [{"value": 3}]}, "prompt[0].value"),
        ({"id": "a", "prompt": [{"ids": [1, True]}]}, "prompt[0].ids[1]"),
        ({"id": "a", "prompt": [{"ids": [1, 2.0]}]}, "prompt[0].ids[1]"),
        ({"id": "a", "prompt": [{"value": "x", "special": 1}]}, "prompt[0].special"),
        ({"id": "a", "prompt": [], "banana": 1}, "banana"),
        ({"id": "a", "prompt": [], "sampling": {"top_k": 1.5}}, "sampling.top_k"),
        ({"id": "a", "prompt": [], "sampling": {"temperature": "1"}}, "sampling.temperature"),
        ({"id": "a", "prompt": [], "sampling": {"temperature": True}}, "sampling.temperature"),
        ({"id": "a", "prompt": [], "sampling": {"logit_bias": [[1, 2, 3]]}}, "sampling.logit_bias[0]"),
        ({"id": "a", "prompt": [], "constraint": {"kind": "banana"}}, "constraint.kind"),
        ({"id": "a", "prompt": [], "constraint": {"kind": ["regex"]}}, "constraint.kind"),
        ({"id": "a", "prompt": [], "constraint": 7}, "constraint"),
        ({"id": "a", "prompt": [], "adapter": 7}, "adapter"),
    ],
)
def test_a_wrong_field_is_named(value: object, field: str | None) -> None:
    with pytest.raises(errors.InvalidRequestError) as caught:
        decode(GenerateRequest, value)
    assert caught.value.param == field


OURS = [
    errors.InvalidRequestError("bad", param="top_p"),
    errors.ContextLengthError("long", param="prompt"),
    errors.GrammarError("no", kind="unsupported", pointer="/a", param="constraint"),
    errors.NotFoundError("who", param="model"),
    errors.OverloadedError("full"),
    errors.UnavailableError("later"),
    errors.RequestError("broke", request_id="r1"),
    errors.DeadlineError("late", request_id="r1"),
]


@pytest.mark.parametrize("error", OURS, ids=lambda e: type(e).__name__)
def test_errors_keep_their_type_and_fields(error: errors.SgliteError) -> None:
    back = decode_error(json.loads(json.dumps(encode_error(error))))
    assert (type(back), str(back), vars(back)) == (type(error), str(error), vars(error))


def test_foreign_errors_do_not_leak_their_text() -> None:
    plain = encode_error(OSError("/secret/path"))
    assert "secret" not in json.dumps(plain)
    assert type(decode_error(plain)) is errors.RequestError
