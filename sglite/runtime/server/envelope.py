"""OpenAI's streamed objects, mostly written beforehand: from one token to the next only a few letters differ."""

from __future__ import annotations

from collections.abc import Mapping
from json.encoder import encode_basestring_ascii as quoted
from typing import Any, Literal

from pydantic_core import to_json

_TEXT = {"text": ('"text":', ""), "delta": ('"delta":{"content":', "}")}
"""What stands before and behind the text of a choice, by the field that holds it."""


class Envelope:
    """``head`` are the fields that all events of a stream share; ``field`` says where a choice has its text."""

    def __init__(self, head: Mapping[str, Any], field: Literal["text", "delta"], *, include_usage: bool) -> None:
        self._head = dict(head)
        self._include_usage = include_usage
        before, behind = _TEXT[field]
        self._start = "data: " + _json(head)[:-1] + ',"choices":['
        self._end = ("]" if not include_usage else '],"usage":null') + "}\n\n"
        self._before = f",{before}"
        self._behind = behind + ',"logprobs":null,"finish_reason":null}' + self._end

    def text(self, index: int, text: str) -> bytes:
        """The event of a choice that goes on by ``text``, and of which nothing else is to be said."""
        return f'{self._start}{{"index":{index}{self._before}{quoted(text)}{self._behind}'.encode()

    def choice(self, choice: Mapping[str, Any]) -> bytes:
        return f"{self._start}{_json(choice)}{self._end}".encode()

    def usage(self, usage: Mapping[str, Any]) -> bytes:
        """The event without choices that tells what was used; nothing where nobody asked."""
        if not self._include_usage:
            return b""
        return b"data: " + _json({**self._head, "choices": [], "usage": usage}).encode() + b"\n\n"


def _json(value: Mapping[str, Any]) -> str:
    """ASCII only: some clients split lines at characters that JSON leaves as they are."""
    return to_json(value, ensure_ascii=True).decode()
