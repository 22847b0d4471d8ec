"""Stop strings and stop tokens beside constraints: what is whole by its constraint is never cut by them."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass

import pytest

from sglite.protocol import Chunk, Constraint, GenerateRequest, SamplingParams, Text
from sglite.runtime.testing import EOS, scripted_engine

SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["xENDy", "z"]}, "b": {"type": "integer"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
VALUE = '{"a": "xENDy", "b": 7}'
CALL = '<tool>{"a": "xENDy", "b": 7}</tool>'
TAGS = {"structures": [{"begin": "<tool>", "schema": SCHEMA, "end": "</tool>"}], "triggers": ["<tool"]}


@dataclass
class Answer:
    text: str = ""
    reason: str | None = None
    matched: object = None


def ask(says: str, constraint: Constraint, n: int = 1, **sampling) -> list[Answer]:
    """The samples, put together from their chunks: nothing that was streamed is ever taken back."""
    params = SamplingParams(temperature=0.0, n=n, **{"max_new_tokens": 120, **sampling})
    request = GenerateRequest("r", (Text("?"),), params, constraint=constraint)
    with scripted_engine(lambda history: _next(says, history)) as engine:
        return asyncio.run(_collect(engine, request, n))


def _next(says: str, history: list[int]) -> int:
    """The byte of ``says`` at this place after the prompt's mark, then the end."""
    return [*says.encode(), EOS][min(len(history) - 1 - history.index(ord("?")), len(says))]


async def _collect(engine, request: GenerateRequest, n: int) -> list[Answer]:
    answers = [Answer() for _ in range(n)]
    async for chunk in engine.generate(request):
        _add(answers[chunk.index], chunk)
    return answers


def _add(answer: Answer, chunk: Chunk) -> None:
    answer.text += chunk.text
    if chunk.finish is not None:
        answer.reason, answer.matched = chunk.finish.reason, chunk.finish.matched


WHOLE = [
    (Constraint("json_schema", json.dumps(SCHEMA)), VALUE),
    (Constraint("json_object"), VALUE),
    (Constraint("choices", '["xENDy", "q"]'), "xENDy"),
]
STOPS = [{"stop": ("END",)}, {"stop_regex": ("E.D",)}, {"stop_token_ids": (ord("N"), ord("y"))}, {"stop": ("}", "y")}]


@pytest.mark.parametrize("stops", STOPS, ids=str)
@pytest.mark.parametrize(("constraint", "text"), WHOLE, ids=["schema", "object", "choices"])
def test_a_stop_never_cuts_what_is_whole(constraint: Constraint, text: str, stops: dict) -> None:
    for answer in ask(text, constraint, n=2, **stops):
        assert (answer.text, answer.reason) == (text, "stop")


def test_a_stop_and_a_budget_that_is_used_up() -> None:
    (answer,) = ask("{" * 50, WHOLE[0][0], max_new_tokens=20, stop=('"',), stop_token_ids=(ord("}"),))
    assert json.loads(answer.text)["a"] in SCHEMA["properties"]["a"]["enum"]


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        ("END", 'hi <tool>{"a": "x'),
        ("hi", ""),
        (" bye", f"hi {CALL}"),
        ("</tool>", f"hi {CALL[:-7]}"),
        ("<tool>", "hi "),
    ],
)
def test_text_with_regions_ends_at_a_stop_as_free_text_does(stop: str, text: str) -> None:
    (answer,) = ask(f"hi {CALL} bye now", Constraint("structural_tag", json.dumps(TAGS)), stop=(stop,))
    assert (answer.text, answer.reason, answer.matched) == (text, "stop", stop)


def test_a_regex_ends_at_a_stop() -> None:
    (answer,) = ask("abcabc", Constraint("regex", "[abc]{6}"), stop=("ca",))
    assert (answer.text, answer.matched) == ("ab", "ca")
