"""Tools and reasoning in chat: choices, guaranteed arguments, streamed deltas that add up to the plain answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionMessageToolCall

from sglite.chat import CHATML
from sglite.lang.backends.mock import MockBackend
from sglite.protocol import Constraint, GenerateRequest, Text, Tokens, prompt_text
from sglite.runtime.server.app import create_app
from sglite.runtime.server.config import ServerConfig
from sglite.runtime.server.runner import running
from sglite.runtime.server.toolformats import FORMATS, HERMES, tool_format

CHAT = "/v1/chat/completions"
USER: Any = [{"role": "user", "content": "weather in Paris?"}]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "Weather now", "parameters": CITY}}
TIME: Any = {"type": "function", "function": {"name": "get_time"}}
QWEN = CHATML + "{% if tools %}<tool_call>{% endif %}"


class Model:
    """A scripted model: what it says freely, in turn, and what it fills in where it is constrained."""

    def __init__(self, *free: str, name: str = "get_weather", arguments: str = '{"city": "Paris"}') -> None:
        self.free = list(free)
        self.name = name
        self.arguments = arguments

    def __call__(self, request: GenerateRequest) -> str | None:
        if request.constraint is None:
            return self.free.pop(0) if self.free else ""
        return f'{self.name}"' if request.constraint.kind == "choices" else self.arguments


def ask(mock: MockBackend, config: ServerConfig | None = None, **body: Any) -> httpx.Response:
    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app=create_app(mock, config))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.post(CHAT, json={"messages": USER, **body})

    return asyncio.run(send())


def mocked(script: Any, template: str = CHATML) -> MockBackend:
    return MockBackend(script, chat_template=template)


def streamed(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    assert response.text.endswith("data: [DONE]\n\n")
    return [json.loads(block[6:]) for block in response.text.split("\n\n")[:-2]]


def put_together(chunks: list[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    """The message that a client makes of a stream, with ids left out."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "calls": [], "finish": None}
    for chunk in chunks:
        for choice in chunk["choices"]:
            if choice["index"] != index:
                continue
            delta = choice["delta"]
            message["content"] += delta.get("content") or ""
            message["reasoning"] += delta.get("reasoning_content") or ""
            for part in delta.get("tool_calls", ()):
                if "id" in part:
                    assert part["index"] == len(message["calls"])
                    message["calls"].append([part["function"]["name"], ""])
                message["calls"][part["index"]][1] += part["function"]["arguments"]
            message["finish"] = choice["finish_reason"] or message["finish"]
    return message


def plain(response: httpx.Response, index: int = 0) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][index]
    message = choice["message"]
    calls = message.get("tool_calls", [])
    assert all(c["id"].startswith("call_") and c["type"] == "function" for c in calls)
    assert len({c["id"] for c in calls}) == len(calls)
    return {
        "content": message["content"] or "",
        "reasoning": message.get("reasoning_content", ""),
        "calls": [[c["function"]["name"], c["function"]["arguments"]] for c in calls],
        "finish": choice["finish_reason"],
    }


def both(make: Callable[[], MockBackend], config: ServerConfig | None = None, **body: Any) -> dict[str, Any]:
    """The plain answer, which the streamed one must add up to."""
    answer = plain(ask(make(), config, **body))
    assert put_together(streamed(ask(make(), config, **body, stream=True))) == answer
    return answer


# -------------------------------------------------------------------------------------------------------------- tools


def test_the_model_may_just_answer() -> None:
    answer = both(lambda: mocked(Model("It is sunny.")), tools=[WEATHER])
    assert answer == {"content": "It is sunny.", "reasoning": "", "calls": [], "finish": "stop"}


def test_the_model_may_call() -> None:
    answer = both(lambda: mocked(Model("Let me look. <tool_call>ignored")), tools=[WEATHER, TIME])
    assert answer["content"].strip() == "Let me look."
    assert answer["calls"] == [["get_weather", '{"city": "Paris"}']]
    assert answer["finish"] == "tool_calls"


def test_content_is_null_beside_a_call() -> None:
    message = ask(mocked(Model("<tool_call>")), tools=[WEATHER]).json()["choices"][0]["message"]
    assert message["content"] is None


def test_several_calls_follow_one_another() -> None:
    said = ("<tool_call>", "\n<tool_call>", "\n")
    answer = both(lambda: mocked(Model(*said)), tools=[WEATHER])
    assert [name for name, _ in answer["calls"]] == ["get_weather", "get_weather"]
    answer = both(lambda: mocked(Model(*said)), tools=[WEATHER], parallel_tool_calls=False)
    assert len(answer["calls"]) == 1


def test_chatter_after_a_call_is_no_part_of_the_answer() -> None:
    answer = both(lambda: mocked(Model("<tool_call>", "and then I said <tool_call>")), tools=[WEATHER])
    assert (answer["content"], len(answer["calls"]), answer["finish"]) == ("", 1, "tool_calls")


def test_a_call_may_be_required() -> None:
    answer = both(lambda: mocked(Model(name="get_time")), tools=[WEATHER, TIME], tool_choice="required")
    assert answer["calls"] == [["get_time", "{}"]]


def test_a_call_may_be_named() -> None:
    choice = {"type": "function", "function": {"name": "get_weather"}}
    answer = both(lambda: mocked(Model("never said")), tools=[WEATHER, TIME], tool_choice=choice)
    assert answer["calls"] == [["get_weather", '{"city": "Paris"}']]
    assert (answer["content"], answer["finish"]) == ("", "tool_calls")


def test_none_means_none() -> None:
    mock = mocked(Model("<tool_call> is how one would call"))
    answer = plain(ask(mock, tools=[WEATHER], tool_choice="none"))
    assert answer["content"] == "<tool_call> is how one would call"
    assert "get_weather" not in mock.prompts[0]


def test_arguments_are_generated_under_the_tools_schema() -> None:
    mock = mocked(Model("<tool_call>"))
    ask(mock, tools=[WEATHER, TIME], temperature=0, stop=["\n"], min_tokens=1)
    free, name, arguments = mock.requests[:3]
    assert free.constraint is None
    assert free.sampling.stop == ("\n", "<tool_call>")
    assert name.constraint == Constraint("choices", '["get_weather\\"", "get_time\\""]')
    assert arguments.constraint is not None
    assert json.loads(arguments.constraint.source) == {**CITY, "additionalProperties": False}
    assert arguments.sampling.stop == () and arguments.sampling.min_new_tokens == 0
    assert prompt_text(arguments.prompt).endswith('<tool_call>\n{"name": "get_weather", "arguments": ')
    assert {r.program.program for r in mock.requests if r.program} == {free.program and free.program.program}


def test_what_was_generated_goes_on_as_tokens() -> None:
    mock = mocked(Model("Wait.<tool_call>"))
    ask(mock, tools=[WEATHER])
    said = mock.requests[1].prompt[len(mock.requests[0].prompt) :]
    assert isinstance(said[0], Tokens) and said[0].text == "Wait."
    assert said[1] == Text("<tool_call>", special=True)


def test_choices_of_their_own() -> None:
    models = {"0": Model("Sunny."), "1": Model("<tool_call>")}
    mock = mocked(lambda request: models[request.id.split("-")[2]](request))
    response = ask(mock, tools=[WEATHER], n=2, seed=5)
    assert plain(response, 0)["content"] == "Sunny."
    assert plain(response, 1)["calls"] == [["get_weather", '{"city": "Paris"}']]
    assert {r.sampling.seed for r in mock.requests} == {5, 6}


def test_usage_counts_all_requests_of_a_turn() -> None:
    response = ask(mocked(Model("one two <tool_call>")), tools=[WEATHER])
    usage = response.json()["usage"]
    alone = ask(mocked(Model("one two")), tools=[WEATHER]).json()["usage"]
    assert usage["prompt_tokens"] == alone["prompt_tokens"]
    assert usage["completion_tokens"] > alone["completion_tokens"]


def test_tokens_that_run_out_end_the_answer_with_length() -> None:
    answer = both(lambda: mocked(Model("one two three <tool_call>")), tools=[WEATHER], max_tokens=3)
    assert (answer["calls"], answer["finish"]) == ([], "length")


def test_the_template_is_told_of_the_tools() -> None:
    mock = mocked(Model("ok"), "{{ tools | tojson }}" + CHATML)
    ask(mock, tools=[WEATHER])
    assert '"get_weather"' in mock.prompts[0]
    assert "You can call functions" not in mock.prompts[0]


def test_a_template_without_tools_gets_them_as_text() -> None:
    mock = mocked(Model("ok"))
    history = [
        {"role": "system", "content": "Be kind."},
        *USER,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "get_time", "arguments": '{"a": 1}'}}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "noon"},
    ]
    assert ask(mock, messages=history, tools=[WEATHER]).status_code == 200
    (prompt,) = mock.prompts
    assert prompt.startswith("<|im_start|>system\nBe kind.\n\nYou can call functions.")
    assert '"name": "get_weather"' in prompt
    assert '<tool_call>\n{"name": "get_time", "arguments": {"a": 1}}\n</tool_call><|im_end|>' in prompt
    assert "<|im_start|>user\n<tool_response>\nnoon\n</tool_response><|im_end|>" in prompt


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [], "tool_choice": "auto"}, "tool_choice"),
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "nope"}}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": "banana"}, "tool_choice"),
        ({"tools": [{"type": "retrieval"}]}, "type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "name"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "array"}}}]}, "parameters"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": 5}}]}, "parameters"),
        ({"tools": [{"type": "function", "function": {"name": "\N{GRINNING FACE}"}}]}, "name"),
        ({"tools": [WEATHER], "logprobs": True}, "logprobs"),
        ({"tools": [WEATHER], "response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": "x"}, "tools"),
        ({"functions": []}, "functions"),
        ({"function_call": "auto"}, "function_call"),
    ],
)
def test_refusals(fields: dict[str, Any], param: str) -> None:
    response = ask(mocked(Model("x")), **fields)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"].endswith(param)


@pytest.mark.parametrize("arguments", ["", "{", "[]", "5", None, {}])
def test_past_calls_need_arguments_that_are_objects(arguments: object) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [*USER, {"role": "assistant", "tool_calls": [call]}]
    response = ask(mocked(Model("x")), messages=messages)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages[1].tool_calls[0].function.arguments"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>\n{"name": "get_weather", "arguments": '),
        ("llama3", '{"name": "get_weather", "parameters": '),
        ("mistral", '[TOOL_CALLS] [{"name": "get_weather", "arguments": '),
        ("deepseek", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"),
        ("deepseek-v3.1", "<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"),
    ],
)
def test_formats(name: str, text: str) -> None:
    format = tool_format(name, "")
    trigger = format.prefix or format.trigger
    mocks: list[MockBackend] = []

    def make() -> MockBackend:
        mocks.append(mocked(Model(trigger)))
        return mocks[-1]

    answer = both(make, ServerConfig(tool_format=name), tools=[WEATHER])
    assert answer["calls"] == [["get_weather", '{"city": "Paris"}']]
    assert mocks[0].prompts[1].endswith(text)


def test_deepseek_s_calls_begin_once() -> None:
    begin, call = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"
    config = ServerConfig(tool_format="deepseek")
    answer = both(lambda: mocked(Model(f"Wait.{begin}", f"\n{call}", "end")), config, tools=[WEATHER])
    assert (answer["content"], len(answer["calls"])) == ("Wait.", 2)
    mock = mocked(Model("end"))
    assert len(plain(ask(mock, config, tools=[WEATHER], tool_choice="required"))["calls"]) == 1
    assert mock.prompts[0].count(begin) == 1


def test_llama_s_trigger_counts_only_at_the_start() -> None:
    script = ('Write {"name": 1} like so', " 1} like so")
    answer = both(lambda: mocked(Model(*script)), ServerConfig(tool_format="llama3"), tools=[WEATHER])
    assert answer["content"] == 'Write {"name": 1} like so'
    assert answer["calls"] == []


def test_the_format_follows_the_template() -> None:
    assert tool_format("auto", "...[TOOL_CALLS]...").trigger == "[TOOL_CALLS]"
    assert tool_format("auto", '<|start_header_id|> {"name": x, "parameters": y}').trigger == '{"name":'
    assert tool_format("auto", "x<｜tool▁calls▁begin｜>```json") is FORMATS["deepseek"]
    assert tool_format("auto", "x<｜tool▁calls▁begin｜>") is FORMATS["deepseek-v3.1"]
    assert tool_format("auto", "<tool_call>") is HERMES
    assert tool_format("auto", "nothing") is HERMES


# ---------------------------------------------------------------------------------------------------------- reasoning

THINKING = CHATML + "{# <think> </think> #}"
THOUGHT = "<think>\nParis... it rains.\n</think>\n\nIt rains."


def test_reasoning_is_told_apart() -> None:
    answer = both(lambda: mocked(THOUGHT, THINKING))
    assert (answer["reasoning"], answer["content"]) == ("Paris... it rains.", "It rains.")


def test_reasoning_that_the_template_began() -> None:
    template = CHATML.replace("<|im_start|>assistant\n", "<|im_start|>assistant\n<think>\n") + "{# </think> #}"
    answer = both(lambda: mocked("It rains.\n</think>\n\nRain.", template))
    assert (answer["reasoning"], answer["content"]) == ("It rains.", "Rain.")


def test_reasoning_and_then_a_call() -> None:
    answer = both(lambda: mocked(Model("<think>hm</think> So:<tool_call>"), THINKING), tools=[WEATHER])
    assert (answer["reasoning"], answer["content"]) == ("hm", "So:")
    assert answer["calls"] == [["get_weather", '{"city": "Paris"}']]


def test_models_that_do_not_reason_keep_their_tags() -> None:
    assert both(lambda: mocked(THOUGHT))["content"] == THOUGHT
    assert both(lambda: mocked(THOUGHT, THINKING), ServerConfig(reasoning_format="none"))["content"] == THOUGHT


# ----------------------------------------------------------------------------------------------------- openai's client


def test_the_openai_package_reads_calls() -> None:
    with (
        running(mocked(Model("<tool_call>", ""))) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        tools: Any = [WEATHER]
        answer = client.chat.completions.create(model="mock", messages=USER, tools=tools)
        assert answer.choices[0].message.tool_calls is not None
        (call,) = answer.choices[0].message.tool_calls
        assert isinstance(call, ChatCompletionMessageToolCall)
        assert json.loads(call.function.arguments) == {"city": "Paris"}


def test_the_openai_package_reads_streamed_calls() -> None:
    with (
        running(mocked(Model("<tool_call>", ""))) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        tools: Any = [WEATHER]
        with client.chat.completions.stream(model="mock", messages=USER, tools=tools) as stream:
            final = stream.get_final_completion()
        assert final.choices[0].finish_reason == "tool_calls"
        assert final.choices[0].message.tool_calls is not None
        assert final.choices[0].message.tool_calls[0].function.name == "get_weather"
