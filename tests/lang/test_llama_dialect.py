"""What llama.cpp's server is sent: its own names for options and constraints, and nothing that it lacks."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

import sglite as sgl

ANSWER = (
    b'data: {"choices": [{"index": 0, "text": "%s", "finish_reason": null}]}\n\n'
    b'data: {"choices": [{"index": 0, "text": "", "finish_reason": "stop"}]}\n\n'
    b'data: {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 1}}\n\ndata: [DONE]\n\n'
)


class Server:
    def __init__(self, text: bytes, *, chat: bool = False) -> None:
        self.bodies: list[dict[str, Any]] = []
        transport = httpx.MockTransport(lambda request: self._answer(request, text))
        self.backend = sgl.OpenAI(
            "m", base_url="http://test/v1", is_chat_model=chat, dialect="llama.cpp", transport=transport
        )

    def _answer(self, request: httpx.Request, text: bytes) -> httpx.Response:
        self.bodies.append(json.loads(request.content))
        return httpx.Response(200, content=ANSWER.replace(b"%s", text))


def test_select_is_a_grammar_of_the_choices() -> None:
    server = Server(b'say \\"no\\"')

    @sgl.function
    def program(s: sgl.ProgramState) -> None:
        s += "Well: " + sgl.select("x", ["yes", 'say "no"'])

    assert program.run(backend=server.backend)["x"] == 'say "no"'
    assert server.bodies[0]["grammar"] == r'root ::= "yes" | "say \"no\""'


def test_a_schema_goes_into_its_own_field() -> None:
    server = Server(b"{}")

    @sgl.function
    def program(s: sgl.ProgramState) -> None:
        s += "JSON: " + sgl.gen("x", json_schema={"type": "object"}, ignore_eos=False, top_k=4)

    program.run(backend=server.backend, repetition_penalty=1.5)["x"]
    (body,) = server.bodies
    assert body["json_schema"] == {"type": "object"}
    assert "response_format" not in body
    assert (body["top_k"], body["repeat_penalty"]) == (4, 1.5)


@pytest.mark.parametrize("option", [{"regex": "a+"}, {"stop_token_ids": [3]}])
def test_what_it_lacks_is_refused(option: dict[str, Any]) -> None:
    server = Server(b"a")

    @sgl.function
    def program(s: sgl.ProgramState) -> None:
        s += "Well: " + sgl.gen("x", **option)

    with pytest.raises(sgl.UnsupportedError):
        program.run(backend=server.backend)["x"]
    assert not server.bodies


@pytest.mark.parametrize(
    "pieces",
    [["It is red"], ["It ", "is ", "r", "ed"], ["It is ", "red"], ["red"], ["r", "ed"], ["", "It is re", "d"]],
)
def test_a_begun_answer_is_continued_and_its_echo_taken_off(pieces: list[str]) -> None:
    """The server may repeat what the answer begins with, in whatever pieces, or not."""
    first, *others = [piece.encode() for piece in pieces]
    between = b'", "finish_reason": null}]}\n\ndata: {"choices": [{"index": 0, "text": "'
    server = Server(first + b"".join(between + other for other in others), chat=True)

    @sgl.function
    def program(s: sgl.ProgramState) -> None:
        s += sgl.user("Which colour?") + sgl.assistant("It is " + sgl.gen("x", max_tokens=4))

    state = program.run(backend=server.backend)
    assert state["x"] == "red"
    assert state.messages()[-1]["content"] == "It is red"
    assert server.bodies[0]["messages"][-1] == {"role": "assistant", "content": "It is "}


def test_an_answer_that_ends_within_what_could_be_an_echo() -> None:
    server = Server(b"It", chat=True)

    @sgl.function
    def program(s: sgl.ProgramState) -> None:
        s += sgl.user("Which colour?") + sgl.assistant("It is " + sgl.gen("x", max_tokens=4))

    assert program.run(backend=server.backend)["x"] == "It"
