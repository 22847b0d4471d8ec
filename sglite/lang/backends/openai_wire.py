"""OpenAI's request bodies and stream chunks, from and to the protocol's types. Also what LiteLLM speaks."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import replace
from typing import Any, Literal

from sglite.errors import RequestError
from sglite.lang.backends.service import UNKNOWN_ID, drop_none
from sglite.protocol import (
    Chunk,
    Constraint,
    Finish,
    FinishReason,
    GenerateRequest,
    SamplingParams,
    TokenLogprob,
    Usage,
)

Dialect = Literal["openai", "vllm", "llama.cpp"]

COMMON = frozenset({"temperature", "top_p", "frequency_penalty", "presence_penalty", "seed", "stop", "logit_bias"})
_VLLM = {
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "min_new_tokens": "min_tokens",
    "stop_token_ids": "stop_token_ids",
    "ignore_eos": "ignore_eos",
    "skip_special_tokens": "skip_special_tokens",
}
_LLAMA = {"top_k": "top_k", "min_p": "min_p", "repetition_penalty": "repeat_penalty", "ignore_eos": "ignore_eos"}
_ADDED: dict[Dialect, dict[str, str]] = {"openai": {}, "vllm": _VLLM, "llama.cpp": _LLAMA}
"""Sampling options that a server has beyond OpenAI's: our name and its own."""
SAMPLING: dict[Dialect, frozenset[str]] = {dialect: COMMON | added.keys() for dialect, added in _ADDED.items()}
CONSTRAINTS: dict[Dialect, frozenset[str]] = {
    "openai": frozenset({"json_schema", "json_object"}),
    "vllm": frozenset({"json_schema", "json_object", "regex", "choices", "ebnf"}),
    "llama.cpp": frozenset({"json_schema", "json_object", "choices"}),
}
_STRUCTURED = {"regex": "regex", "choices": "choice", "ebnf": "grammar"}
_DEFAULT = SamplingParams()


def sampling_fields(sampling: SamplingParams, dialect: Dialect, limit_name: str) -> dict[str, Any]:
    """The fields that differ from the service's defaults, under its names."""
    fields: dict[str, Any] = {limit_name: sampling.max_new_tokens, "temperature": sampling.temperature}
    for name in ("top_p", "frequency_penalty", "presence_penalty", "seed", "n"):
        if getattr(sampling, name) != getattr(_DEFAULT, name):
            fields[name] = getattr(sampling, name)
    if sampling.stop:
        fields["stop"] = list(sampling.stop)
    if sampling.logit_bias:
        fields["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias}
    added = _ADDED[dialect].items()
    given = {theirs: getattr(sampling, ours) for ours, theirs in added if _differs(sampling, ours)}
    return fields | {name: list(value) if isinstance(value, tuple) else value for name, value in given.items()}


def constraint_fields(constraint: Constraint | None, dialect: Dialect = "openai") -> dict[str, Any]:
    if constraint is None:
        return {}
    if dialect == "llama.cpp":
        return _llama_fields(constraint)
    if constraint.kind == "json_object":
        return {"response_format": {"type": "json_object"}}
    if constraint.kind == "json_schema":
        schema = {"name": "answer", "strict": True, "schema": json.loads(constraint.source)}
        return {"response_format": {"type": "json_schema", "json_schema": schema}}
    source = json.loads(constraint.source) if constraint.kind == "choices" else constraint.source
    return {"structured_outputs": {_STRUCTURED[constraint.kind]: source}}


def _llama_fields(constraint: Constraint) -> dict[str, Any]:
    """A schema, or a grammar in llama.cpp's own notation, where a quoted text is written as in JSON."""
    if constraint.kind == "choices":
        texts = [json.dumps(choice, ensure_ascii=False) for choice in json.loads(constraint.source)]
        return {"grammar": "root ::= " + " | ".join(texts)}
    return {"json_schema": json.loads(constraint.source) if constraint.kind == "json_schema" else {"type": "object"}}


def chat_logprob_fields(request: GenerateRequest) -> dict[str, Any]:
    if request.logprobs is None:
        return {}
    return drop_none({"logprobs": True, "top_logprobs": request.logprobs.top or None})


def begun_answer(fields: Mapping[str, Any]) -> str:
    """The beginning of the answer that the request asks to be continued."""
    last = (fields.get("messages") or [{}])[-1]
    return str(last["content"]) if last.get("role") == "assistant" else ""


async def without_echo(chunks: AsyncIterator[Chunk], begun: str) -> AsyncIterator[Chunk]:
    """llama.cpp's server repeats the answer's beginning before what it adds: each sample without it."""
    so_far: dict[int, str | None] = {}
    async for chunk in chunks:
        held = so_far.get(chunk.index, "")
        if held is None:
            yield chunk
            continue
        text = held + chunk.text
        if begun.startswith(text) and len(text) < len(begun) and chunk.finish is None:
            so_far[chunk.index] = text
        else:
            so_far[chunk.index] = None
            yield replace(chunk, text=text.removeprefix(begun))


async def read_stream(events: AsyncIterator[Mapping[str, Any]], samples: int) -> AsyncGenerator[Chunk]:
    """A chunk per delta. Finishes are held back until the usage is known, which comes last."""
    finishes: dict[int, Finish] = {}
    usage = Usage()
    async for event in events:
        usage = _usage(event.get("usage")) or usage
        for choice in event.get("choices") or ():
            index = choice.get("index", 0)
            text, logprobs = _text(choice), _logprobs(choice.get("logprobs"))
            if text or logprobs:
                yield Chunk(text=text, index=index, logprobs=logprobs)
            if choice.get("finish_reason"):
                finishes[index] = _finish(choice)
    if len(finishes) != samples:
        raise RequestError(f"the service finished {len(finishes)} of {samples} answers")
    for index, finish in sorted(finishes.items()):
        yield Chunk(index=index, finish=finish, usage=usage if index == 0 else replace(usage, completion_tokens=0))


def _text(choice: Mapping[str, Any]) -> str:
    delta = choice.get("delta") or {}
    if delta.get("refusal"):
        raise RequestError(f"the model refused: {delta['refusal']}")
    return delta.get("content") or choice.get("text") or ""


def _finish(choice: Mapping[str, Any]) -> Finish:
    reason = choice["finish_reason"]
    if reason not in ("stop", "length"):
        raise RequestError(f"the service ended the answer because of {reason}")
    matched = choice.get("stop_reason")
    known: FinishReason = reason
    return Finish(known, matched=matched if isinstance(matched, str | int) else None)


def _usage(usage: Any) -> Usage | None:
    if not usage:
        return None
    details = usage.get("prompt_tokens_details") or {}
    return Usage(
        prompt_tokens=usage.get("prompt_tokens") or 0,
        cached_tokens=details.get("cached_tokens") or 0,
        completion_tokens=usage.get("completion_tokens") or 0,
    )


def _logprobs(value: Any) -> tuple[TokenLogprob, ...]:
    if not value:
        return ()
    if value.get("content") is not None:
        return tuple(_chat_logprob(entry) for entry in value["content"])
    columns = zip(
        value.get("tokens") or (), value.get("token_logprobs") or (), value.get("top_logprobs") or (), strict=False
    )
    return tuple(TokenLogprob(UNKNOWN_ID, lp, token, _top((top or {}).items())) for token, lp, top in columns)


def _chat_logprob(entry: Mapping[str, Any]) -> TokenLogprob:
    top = ((t["token"], t["logprob"]) for t in entry.get("top_logprobs") or ())
    return TokenLogprob(UNKNOWN_ID, entry["logprob"], entry["token"], _top(top))


def _top(pairs: Any) -> tuple[tuple[int, float, str], ...]:
    return tuple((UNKNOWN_ID, logprob, token) for token, logprob in pairs)


def _differs(sampling: SamplingParams, name: str) -> bool:
    return bool(getattr(sampling, name) != getattr(_DEFAULT, name))
