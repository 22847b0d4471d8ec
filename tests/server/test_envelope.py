"""What is written beforehand reads as what would be written anew."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sglite.runtime.server.envelope import Envelope

HEAD = {"id": "x", "model": 'a "model" \u2028 é'}
TEXTS = ["", " token", 'say "hi"\\', "\n\t\x00\x7f", "é 😀 \u2028", "</script>"]


def read(event: bytes) -> dict[str, Any]:
    assert event.isascii() and event.startswith(b"data: ") and event.endswith(b"\n\n") and event.count(b"\n") == 2
    found: dict[str, Any] = json.loads(event[6:])
    return found


@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize("text", TEXTS)
def test_a_text_is_a_choice_that_has_nothing_else(text: str, usage: bool) -> None:
    nothing = {"logprobs": None, "finish_reason": None}
    tail = {"usage": None} if usage else {}
    for field, said in (("text", {"text": text}), ("delta", {"delta": {"content": text}})):
        envelope = Envelope(HEAD, field, include_usage=usage)  # type: ignore[arg-type]
        choice = {"index": 3, **said, **nothing}
        assert read(envelope.text(3, text)) == read(envelope.choice(choice))
        assert read(envelope.text(3, text)) == {**HEAD, "choices": [choice], **tail}


def test_the_usage_comes_where_it_was_asked_for() -> None:
    assert Envelope(HEAD, "text", include_usage=False).usage({"total_tokens": 1}) == b""
    found = read(Envelope(HEAD, "text", include_usage=True).usage({"total_tokens": 1}))
    assert found == {**HEAD, "choices": [], "usage": {"total_tokens": 1}}
