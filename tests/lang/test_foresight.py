"""What a batch tells the runtime ahead: how many calls are still to come, and which is a branch's last."""

from __future__ import annotations

import json
import threading

import pytest

import sglite as sgl
from sglite.lang.foresight import foresee
from sglite.lang.unnoticed import is_unnoticed
from sglite.protocol import Backend, GenerateRequest
from sglite.testing import MockBackend

EXAMPLES = [("two", "2"), ("three", "3")]
LOG: list[str] = []


def shown(example: tuple[str, str]) -> str:
    return f"{example[0]}: {example[1]}\n"


@sgl.function
def tips(s, topic):
    for example in EXAMPLES:
        s += shown(example)
    s += f"{topic}:" + sgl.gen("plan", max_tokens=4)
    forks = s.fork(2)
    for i, fork in enumerate(forks):
        fork += f"tip {i}: " + sgl.gen("tip", max_tokens=4)
    forks.join()
    s += forks[0]["tip"] + sgl.gen("end", max_tokens=4)


def infos(requests: list[GenerateRequest]) -> list[tuple[str, bool, int | None]]:
    """Of the first program among ``requests``."""
    first = next(request.program for request in requests if request.program is not None)
    found = [r.program for r in requests if r.program is not None and r.program.program == first.program]
    return [(info.branch, info.last, info.ahead) for info in found]


def test_requests_of_a_batch_say_how_many_calls_are_ahead() -> None:
    mock = MockBackend("x")
    tips.run_batch([{"topic": "a"}, {"topic": "b"}], backend=mock)
    assert infos(mock.requests) == [("", False, 3), ("0", True, 2), ("1", True, 1), ("", True, 0)]


def test_a_single_run_is_not_traced() -> None:
    mock = MockBackend("x")
    tips.run("a", backend=mock)
    assert {ahead for _, _, ahead in infos(mock.requests)} == {None}


def test_no_message_follows_a_last_call() -> None:
    ends: list[str] = []
    told = threading.Semaphore(0)

    class Keeping(MockBackend):
        async def end_program(self, program: str, branch: str = "", *, namespace: str = "") -> None:
            ends.append(branch)
            told.release()

    @sgl.function
    def one(s, i):
        s += f"{i}" + sgl.gen("x")
        s["x"]

    one.run_batch([(0,), (1,)], backend=Keeping("x"))
    one.run(0, backend=Keeping("x"))
    assert told.acquire(timeout=60)
    assert ends == [""], "only where nothing was foreseen"


def test_a_program_that_branches_on_its_data_is_not_foreseen() -> None:
    @sgl.function
    def loop(s, questions):
        for question in questions:
            s += question + sgl.gen("x")

    @sgl.function
    def asks(s):
        s += "a" + sgl.gen("x")
        if s["x"] == "more":
            s += sgl.gen("y")

    assert foresee(loop).calls == foresee(asks).calls == {}


def test_calls_behind_a_fork_are_a_branchs_too() -> None:
    @sgl.function
    def program(s):
        s += "a" + sgl.gen("x")
        with s.copy() as c:
            c += sgl.gen("y")
            for inner in c.fork(2):
                inner += "z"
        for child in s.fork(2):
            child += "b" + sgl.select("z", ["p", "q"])

    found = {branch: [tuple(call) for call in calls] for branch, calls in foresee(program).calls.items()}
    assert found == {"": [(False, 3)], "0": [(True, 2)], "1": [(True, 1)], "2": [(True, 0)]}


@sgl.function
def about(s, question, document):
    s += f"Read this: {document}\nNow answer: {question}" + sgl.gen("answer", max_tokens=4)


def test_parameters_are_known_in_the_order_of_the_text() -> None:
    assert foresee(about).leading == ("document", "question")
    assert foresee(tips).leading == ("topic",)


@pytest.mark.parametrize("eager", [False, True])
def test_of_a_large_batch_those_that_begin_alike_run_together(eager: bool) -> None:
    rows = [{"question": f"{i}", "document": "AB"[i % 2]} for i in range(1100)]
    mock = MockBackend("x")
    states = about.run_batch(rows, backend=mock, num_threads=1, generator_style=eager)
    asked = [state.text().removesuffix("x").split("answer: ")[1] for state in states]
    assert asked == [row["question"] for row in rows], "the results come in the order of the rows"
    documents = "".join(prompt[len("Read this: ")] for prompt in mock.prompts if "Now answer" in prompt)
    assert documents == ("AB" * 550 if eager else "A" * 550 + "B" * 550)


def noticed() -> list[object]:
    seen, count = [], 0

    def printing(s, q):
        print(q)

    def logging(s, q):
        LOG.append(q)

    def noting(s, q):
        seen[0] = q

    def counting(s, q):
        nonlocal count
        count += 1

    def importing(s, q):
        import json.tool

        s += json.tool.__name__

    def a_library(s, q):
        s += json.dumps(1)

    def identity(s, q=None):
        if q is None:
            s += "none"

    def catching(s, q):
        try:
            s += int(q)
        except TypeError:
            s += "none"

    def through_another(s, q):
        logging(s, q)

    return [printing, logging, noting, counting, importing, a_library, identity, catching, through_another, len]


@pytest.mark.parametrize("function", noticed(), ids=lambda function: function.__name__)
def test_a_function_whose_trace_could_be_noticed_is_not_traced(function: object) -> None:
    assert not is_unnoticed(function)


def test_a_batch_runs_no_function_once_more_that_could_be_noticed() -> None:
    ran: list[str] = []

    @sgl.function
    def program(s, q):
        s += q + sgl.gen("x")
        ran.append("once")

    program.run_batch([("a",), ("b",)], backend=MockBackend("x"))
    assert ran == ["once"] * 2


def test_what_was_foreseen_wrongly_changes_no_answer(backend: Backend) -> None:
    """A symbol's text is a text: what is compared to it decides, and no trace can see that."""

    @sgl.function
    def asks(s, country):
        s += f"capital of {country}?" + sgl.gen("city", max_tokens=16)
        if str(country) == "Italy":
            s += " number?" + sgl.gen("n", max_tokens=4)

    assert [len(calls) for calls in foresee(asks).calls.values()] == [1]
    france, italy = asks.run_batch([("France",), ("Italy",)], temperature=0)
    assert (france["city"], italy["city"], italy["n"]) == (" Paris", " Rome", "42")
