"""Logprobs and usage in the shapes clients expect."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglite.protocol import TokenLogprob, Usage

LOWEST = -9999.0
"""Stands for minus infinity, which JSON cannot say."""


def finite(logprob: float) -> float:
    return max(logprob, LOWEST)


def _optional(logprob: float | None) -> float | None:
    return None if logprob is None else finite(logprob)


# ----------------------------------------------------------------------------------------------------------- SGLang


class NativeLogprobs:
    """Lists that grow with a sequence: every event of a stream repeats its logprobs whole, each entry is made once."""

    def __init__(self, named: bool) -> None:
        self._named = named
        self._done = 0
        self.tokens: list[list[Any]] = []
        """``[logprob, id, text]`` a position"""
        self.top: list[list[list[Any]] | None] = []
        self.given: list[list[list[Any]] | None] = []

    def grown(self, entries: Sequence[TokenLogprob]) -> NativeLogprobs:
        """After the entries that came since the last call."""
        for entry in entries[self._done :]:
            self.tokens.append([_optional(entry.logprob), entry.id, entry.text if self._named else None])
            self.top.append(self._alternatives(entry.top))
            self.given.append(self._alternatives(entry.given))
        self._done = len(entries)
        return self

    def _alternatives(self, among: Sequence[tuple[int, float, str]]) -> list[list[Any]] | None:
        return [[finite(logprob), i, text if self._named else None] for i, logprob, text in among] or None


# ----------------------------------------------------------------------------------------------------------- OpenAI


def chat_logprobs(entries: Sequence[TokenLogprob]) -> dict[str, Any]:
    return {"content": [_chat_entry(e) for e in entries], "refusal": None}


def _chat_entry(entry: TokenLogprob) -> dict[str, Any]:
    logprob = LOWEST if entry.logprob is None else finite(entry.logprob)
    top = [{"token": text, "logprob": finite(lp), "bytes": list(text.encode())} for _, lp, text in entry.top]
    return {"token": entry.text, "logprob": logprob, "bytes": list(entry.text.encode()), "top_logprobs": top}


def completion_logprobs(entries: Sequence[TokenLogprob], offset: int) -> dict[str, Any]:
    """Columns, as /v1/completions has them; ``offset`` is where the first token's text begins."""
    offsets = []
    for entry in entries:
        offsets.append(offset)
        offset += len(entry.text)
    return {
        "tokens": [e.text for e in entries],
        "token_logprobs": [_optional(e.logprob) for e in entries],
        "top_logprobs": [{text: finite(lp) for _, lp, text in e.top} or None for e in entries],
        "text_offset": offsets,
    }


def openai_usage(requests: Sequence[Usage]) -> dict[str, Any]:
    prompt, completion, cached = (
        sum(getattr(u, name) for u in requests) for name in ("prompt_tokens", "completion_tokens", "cached_tokens")
    )
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
