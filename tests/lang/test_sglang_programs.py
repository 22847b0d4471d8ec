"""Whole programs of the kinds that SGLang's users write, with the import as the only change, on every backend."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import pytest

import sglite as sgl
from sglite.protocol import Backend
from sglite.testing import MockBackend

PAGE = 16

pytestmark = pytest.mark.usefixtures("backend")


def add(a: int, b: int) -> int:
    """The sum of two numbers."""
    return a + b


def multiply(a: int, b: int) -> int:
    """The product of two numbers."""
    return a * b


def test_few_shot_questions() -> None:
    examples = [("Who wrote Faust?", "Goethe"), ("What is the capital of France?", "Paris")]

    @sgl.function
    def few_shot(s, question):
        s += "Answer each question with a word.\n\n"
        for asked, answered in examples:
            s += f"Q: {asked}\nA: {answered}\n\n"
        s += "Q: " + question + "\nA:" + sgl.gen("answer", stop="\n", temperature=0)

    states = few_shot.run_batch([{"question": "And of Italy?"}] * 3, num_threads=2, progress_bar=True)
    assert [state["answer"] for state in states] == [" Rome"] * 3
    assert states[0].text().endswith("Q: And of Italy?\nA: Rome")


def test_react() -> None:
    documents = {"the tower": "The tower stands in Paris."}

    @sgl.function
    def react(s, question):
        s += f"Question: {question}\n"
        for step in range(1, 5):
            s += f"Thought {step}:" + sgl.gen(f"thought_{step}", stop="\nObservation", max_tokens=64)
            action = s[f"thought_{step}"].split(f"Action {step}: ")[1]
            if action.startswith("Finish["):
                return action[len("Finish[") : -1]
            s += f"\nObservation {step}: " + documents[action[len("Search[") : -1]] + "\n"
        return None

    state = react.run(question="Where does the tower stand?", temperature=0)
    assert state.ret_value == "Paris"
    assert "\nObservation 1: The tower stands in Paris.\nThought 2: I know." in state.text()
    assert "invented" not in state.text()


def test_json_by_regex() -> None:
    person = r'\{"name": "[A-Za-z ]{1,16}", "age": [0-9]{1,3}\}'

    @sgl.function
    def profile(s):
        s += "Ada's profile?" + sgl.gen("json", max_tokens=64, regex=person)

    assert json.loads(profile.run(temperature=0)["json"]) == {"name": "Ada", "age": 36}


def test_json_by_schema() -> None:
    properties = {"name": {"type": "string", "maxLength": 16}, "age": {"type": "integer"}}
    schema = {"type": "object", "properties": properties, "required": ["name", "age"], "additionalProperties": False}

    @sgl.function
    def profile(s):
        s += sgl.user("Ada's profile?") + sgl.assistant(sgl.gen("json", max_tokens=64, json_schema=json.dumps(schema)))

    assert json.loads(profile.run(temperature=0)["json"]) == {"name": "Ada", "age": 36}


def test_numbers_truth_and_texts() -> None:
    @sgl.function
    def typed(s):
        s += "a number?" + sgl.gen_int("int", max_tokens=8)
        s += " a half?" + sgl.gen("float", max_tokens=8, dtype=float)
        s += " is it true?" + sgl.gen("bool", max_tokens=8, dtype=bool)
        s += " a greeting?" + sgl.gen_string("str", max_tokens=16)

    state = typed.run(temperature=0)
    assert [state[name] for name in ("int", "float", "bool", "str")] == ["42", "0.5", "True", '"hello"']
    assert [state.value(name) for name in ("int", "float", "bool", "str")] == [42, 0.5, True, "hello"]


def test_the_tool_is_selected_and_then_asked() -> None:
    @sgl.function
    def tool_use(s, question):
        s += f"{question} The tool to use is a:" + sgl.select("tool", ["red", "blue"]) + ". "
        if s["tool"] in ("red", "blue"):
            s += "The expression's sum?" + sgl.gen("expression", stop="}}", max_tokens=64)

    state = tool_use.run("What is 2 + 3?", temperature=0)
    assert state["expression"] == '{"name": "add", "arguments": {"a": 2, "b": 3'


def test_tools_are_called_and_answered() -> None:
    @sgl.function
    def tool_use(s):
        s += sgl.user("2 and 3: what is the sum?")
        s += sgl.assistant(sgl.tool_call("call", [add, multiply], max_tokens=80))
        s += sgl.user(f"It is {s.value('call').call()}. The number?") + sgl.assistant(sgl.gen("said", max_tokens=8))

    state = tool_use.run(temperature=0)
    assert state.value("call").name == "add"
    assert state.messages()[2]["content"] == "It is 5. The number?"
    assert state["said"] == "42"


def test_parallel_tool_calls() -> None:
    @sgl.function
    def both(s):
        s += "2 and 3: "
        forks = s.fork(2)
        forks += lambda i: ["the sum?", "the product?"][i] + sgl.tool_call("call", [add, multiply], max_tokens=80)
        forks.join()
        return [call.call() for call in s.value("call")]

    assert both.run(temperature=0).ret_value == [5, 6]


def test_parallel_decoding() -> None:
    @sgl.function
    def tips(s, topic):
        s += f"Two tips about {topic}: 1. food. 2. sleep.\n"
        forks = s.fork(2)
        for i, fork in enumerate(forks):
            fork += f"More of tip {i}?" + sgl.gen("detail", max_tokens=32, stop="\n")
        for i in range(2):
            s += f"Tip {i}:" + forks[i]["detail"] + "\n"
        s += "In the end, the number?" + sgl.gen("summary", max_tokens=8)

    state = tips.run(topic="health", temperature=0)
    assert "Tip 0: Eat well.\nTip 1: Sleep well.\n" in state.text()
    assert state["summary"] == "42"


def test_parallel_encoding() -> None:
    @sgl.function
    def over(s, contexts, question):
        s += "Read this.\n"
        forks = s.fork(len(contexts))
        forks += lambda i: f"[{i}] {contexts[i]}\n"
        forks.join(mode="concate_and_append")
        s += question + sgl.gen("answer", max_tokens=16)

    state = over.run(["one", "two"], "The capital of France?", temperature=0)
    assert state.text() == "Read this.\n[0] one\n[1] two\nThe capital of France? Paris"


@pytest.mark.parametrize("asked", [4, 12])
def test_min_tokens(asked: int) -> None:
    @sgl.function
    def long(s):
        s += "number?" + sgl.gen("x", min_tokens=asked, max_tokens=16)

    state = long.run(temperature=0)
    assert state["x"].startswith("42")
    assert asked <= state.get_meta_info("x")["completion_tokens"] <= 16


def test_streaming_with_logprobs() -> None:
    @sgl.function
    def ask(s):
        s += "lines?" + sgl.gen("x", max_tokens=32, return_logprob=True, top_logprobs_num=2)

    async def stream() -> list[tuple[str, int]]:
        state = ask.run(temperature=0, stream=True)
        pairs = state.text_async_iter("x", return_meta_data=True)
        return [(text, len(meta["output_token_logprobs"])) async for text, meta in pairs]

    pairs = asyncio.run(stream())
    counts = [count for _, count in pairs]
    assert "".join(text for text, _ in pairs) == "one\ntwo\nthree"
    assert counts == sorted(counts), "pieces may come together, but their tokens with them"
    assert counts[-1] == len(ask.run(temperature=0).get_meta_info("x")["output_token_logprobs"]) > 0


def test_the_trace_of_a_run_and_of_a_program(backend: Backend) -> None:
    @sgl.function
    def both(s, country):
        s += f"The capital of {country}?" + sgl.gen("city", max_tokens=16)
        forks = s.fork(2)
        forks += " number?" + sgl.gen("n", max_tokens=4)
        forks.join()

    sgl.flush_cache(backend)
    traced = both.trace()
    assert traced.variables == ["city", "n"]
    assert str(traced).splitlines()[:4] == [
        "program both(country)",
        "  text 'The capital of '",
        "  text {country}",
        "  text '?'",
    ]
    calls = list(both.run("France", temperature=0).trace())
    assert [(call.name, call.branch, call.finish) for call in calls] == [
        ("city", "", "stop"),
        ("n", "0", "stop"),
        ("n", "1", "stop"),
    ]
    assert all(call.prompt_tokens and call.new_tokens and call.wall > 0 for call in calls)
    if not isinstance(backend, MockBackend):
        earlier = calls[0].prompt_tokens + calls[0].new_tokens
        assert all(call.cached_tokens > earlier - PAGE for call in calls[1:])


@pytest.mark.parametrize("run", [lambda program: program.run(temperature=0), lambda p: asyncio.run(p.arun())])
def test_an_async_program(run: Callable[[sgl.Program], sgl.ProgramState]) -> None:
    @sgl.function
    async def ask(s):
        s += "capital of France?" + sgl.gen("city", max_tokens=16, temperature=0)
        if (await s.get("city")) == " Paris":
            s += " capital of Italy?" + sgl.gen("next", max_tokens=16, temperature=0)

    assert run(ask)["next"] == " Rome"
