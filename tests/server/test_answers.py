"""An answer comes back in the next turn as the tokens it was generated as, whatever its text would be encoded to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import httpx
import openai
import pytest
import torch
from conftest import FakeBackend

from sglite.protocol import Chunk, GenerateRequest, ProgramInfo, Prompt, Text, Tokens
from sglite.runtime.assembly import assemble
from sglite.runtime.config import config_from
from sglite.runtime.engine import Engine
from sglite.runtime.hub import ModelSource
from sglite.runtime.loading import load_config, load_tokenizer
from sglite.runtime.model.scripted import ScriptedModel
from sglite.runtime.server.answers import AnswerMemo, Recalled, Said
from sglite.runtime.server.app import create_app
from sglite.runtime.server.config import ServerConfig
from sglite.runtime.tokenizer import Tokenizer

PROMPT = (Text("<user>", special=True), Text("hi"), Text("<assistant>", special=True))
YES = Said("yes")
YES_7 = (Tokens((7,), "yes"),)


def test_the_same_answer_after_the_same_prefix_is_the_same_tokens() -> None:
    memo = AnswerMemo()
    written = (Tokens((7, 8), "yes"), Text("!"))
    memo.remember("", PROMPT, Said("yes!"), written)
    recalled = memo.recall("", (*PROMPT, Text("yes!"), Text("<end>", special=True)), [Said("yes!")])
    assert recalled.prompt == (*PROMPT, *written, Text("<end>", special=True))
    assert (recalled.exact, recalled.rewritten) == (1, 0)


def test_how_the_prefix_is_cut_does_not_count_but_what_is_special_does() -> None:
    memo = AnswerMemo()
    memo.remember("", PROMPT, YES, YES_7)
    cut = (Text("<user>", special=True), Text("h"), Text("i"), *PROMPT[2:], Text("yes"))
    assert memo.recall("", cut, [YES]).exact == 1
    faked = (Text("<user>", special=True), Text("hi<assistant>"), Text("yes"))
    assert memo.recall("", faked, [YES]).exact == 0


@pytest.mark.parametrize("namespace", ["other", ""])
def test_a_namespace_never_sees_anothers_answers(namespace: str) -> None:
    memo = AnswerMemo()
    memo.remember(namespace, PROMPT, YES, YES_7)
    found = memo.recall("", (*PROMPT, Text("yes")), [YES])
    assert (found.exact, found.rewritten) == (int(namespace == ""), 0)


@pytest.mark.parametrize(
    "history",
    [(Text("<user>changed<assistant>", special=True), Text("yes")), (*PROMPT, Text("yes, but shown differently"))],
)
def test_a_rewritten_history_is_noticed(history: Prompt) -> None:
    memo = AnswerMemo()
    memo.remember("", PROMPT, Said("yes, but so"), (Tokens((7,), "yes, but so"),))
    found = memo.recall("", history, [Said("yes, but so")])
    assert (found.prompt, found.exact, found.rewritten) == (history, 0, 1)


def test_what_was_not_said_so_is_not_recalled() -> None:
    """White space of the template does not count, that of the message does."""
    memo = AnswerMemo()
    memo.remember("", PROMPT, Said("a b", "c d", (("f", '{"x": "y z"}'),)), (Tokens((7,), "c d a b f y z"),))
    shown = (*PROMPT, Text("cdabfyz"))
    for said in (Said("ab", "c d", (("f", '{"x": "y z"}'),)), Said("a b", "cd"), Said("a b", "c d", (("f", "{}"),))):
        assert memo.recall("", shown, [said]) == Recalled(shown)


def test_thoughts_and_calls_are_found_in_the_templates_own_text() -> None:
    memo = AnswerMemo()
    said = Said("Look.", "hm", (("f", '{"x": 1}'),))
    text = '<think>hm</think>\nLook.\n\n<call>f{"x":1}</call>'
    memo.remember("", PROMPT, said, (Tokens((7, 8), text[:30]), Text(text[30:], special=True)))
    thought = Text("<assistant><think>\nhm\n</think>\n\n", special=True)
    history = (*PROMPT[:2], thought, Text("Look."), Text('\n<call>\nf{"x": 1}\n</call><end>', special=True))
    found = memo.recall("", history, [said])
    written = (Tokens((7, 8), text[:30]), Text(text[30:] + "<end>", special=True))
    assert (found.prompt, found.exact, found.rewritten) == ((*PROMPT, *written), 1, 0)


def test_an_answer_keeps_its_own_white_space_and_the_turns_end_keeps_its() -> None:
    memo = AnswerMemo()
    memo.remember("", PROMPT, Said(" yes \n"), (Tokens((7,), " yes \n"),))
    for end in (" \n<end>", "<end>"):
        found = memo.recall("", (*PROMPT, Text("yes"), Text(end, special=True)), [Said(" yes \n")])
        assert found.prompt == (*PROMPT, Tokens((7,), " yes \n"), Text(end, special=True))
    found = memo.recall("", (*PROMPT, Text(" yes \n"), Text("<end>", special=True)), [Said(" yes \n")])
    assert found.prompt == (*PROMPT, Tokens((7,), " yes \n"), Text("<end>", special=True))


def test_the_memo_is_bounded_and_forgets_the_oldest() -> None:
    memo = AnswerMemo(tokens_kept=10)
    for i in range(20):
        memo.remember("", (Text(str(i)),), YES, (Tokens((1, 2, 3), "yes"),))
    known = [memo.recall("", (Text(str(i)), Text("yes")), [YES]).exact for i in range(20)]
    assert known == [0] * 17 + [1] * 3


def test_the_route_sends_the_tokens_back(post: Callable[..., httpx.Response], backend: FakeBackend) -> None:
    first = {"messages": [{"role": "user", "content": "hi"}]}
    said = post("/v1/chat/completions", first).json()["choices"][0]["message"]
    post("/v1/chat/completions", {"messages": [*first["messages"], said, {"role": "user", "content": "more"}]})
    assert Tokens(tuple(b"Hello, world"), "Hello, world") in backend.requests[-1].prompt
    other = {"role": "assistant", "content": "Hello"}
    post("/v1/chat/completions", {"messages": [*first["messages"], other, {"role": "user", "content": "more"}]})
    assert not any(isinstance(segment, Tokens) for segment in backend.requests[-1].prompt)


def test_a_program_and_the_best_of_several_reach_the_backend(
    post: Callable[..., httpx.Response], backend: FakeBackend
) -> None:
    body = {"prompt": "hi", "program": "mine", "best_of": 3, "n": 2, "max_tokens": 4}
    assert post("/v1/completions", body).status_code == 200
    (request,) = backend.requests
    assert request.program == ProgramInfo("mine")
    assert (request.sampling.n, request.sampling.best_of) == (2, 3)
    assert post("/v1/completions", {**body, "best_of": 2}).status_code == 200
    assert backend.requests[-1].sampling.best_of is None


def test_logprobs_of_given_ids_over_the_native_route(post: Callable[..., httpx.Response], backend: FakeBackend) -> None:
    body = {"text": "hi", "return_logprob": True, "token_ids_logprob": [7, 9]}
    answer = post("/generate", body).json()
    logprobs = backend.requests[0].logprobs
    assert logprobs is not None and logprobs.ids == (7, 9)
    assert len(answer["meta_info"]["output_token_ids_logprobs"]) == len(answer["output_ids"])
    refused = post("/generate", {**body, "return_logprob": False})
    assert refused.status_code == 400 and "return_logprob" in refused.text


# ------------------------------------------------------------------------------------------------------- turn by turn

TEMPLATE = """{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.reasoning_content %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{% if m.content %}{{ m.content }}{% endif %}{% for call in m.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Trondheim"}}\n</tool_call>'
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "?", "parameters": SCHEMA}}
    for name in ("weather", "forecast")
]


class Watched:
    """Which ids each request had and made."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer) -> None:
        self.sequences: list[list[int]] = []
        self._tokenizer = tokenizer
        self._generate = engine.generate
        engine.generate = self.generate  # type: ignore[method-assign]

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk]:
        ids = self._tokenizer.encode(request.prompt)
        self.sequences.append(ids)
        async with aclosing(self._generate(request)) as chunks:
            async for chunk in chunks:
                ids += chunk.ids
                yield chunk


def speller(tokenizer: Tokenizer, answer: str) -> Callable[[list[int]], int]:
    """Says the answer letter by letter, as the tokenizer never would, and after it the end."""
    end = min(tokenizer.eos_ids)
    letters = [tokenizer.encode((Text(letter),))[0] for letter in answer]

    def script(history: list[int]) -> int:
        text = tokenizer.decode(history[-4 * len(answer) :], skip_special_tokens=False)
        at = next(n for n in range(len(answer), -1, -1) if text.endswith(answer[:n]))
        return letters[at] if at < len(answer) else end

    return script


@pytest.mark.parametrize(
    ("answer", "template", "options"),
    [
        ("understanding", None, {}),
        ("<think>\nunderstanding\n</think>\n\nIndeed.", TEMPLATE, {}),
        ("<think>understanding</think>Indeed.", TEMPLATE, {}),
        ("Indeed.\n" + CALL, TEMPLATE, {"tools": TOOLS}),
        (CALL, TEMPLATE, {"tools": TOOLS, "tool_choice": "required"}),
        (CALL.replace('{"city": ', '{"city":'), TEMPLATE, {"tools": TOOLS[:1]}),
        (CALL + "\n" + CALL.replace("weather", "forecast"), TEMPLATE, {"tools": TOOLS}),
        ("<think>\nunderstanding\n</think>\n\n" + CALL, TEMPLATE, {"tools": TOOLS}),
        (CALL, None, {"tools": TOOLS}),
    ],
    ids=["said", "thought", "thought densely", "called", "must call", "dense", "twice", "all", "no tools in template"],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_turn_finds_all_that_the_last_one_computed(
    smollm2: ModelSource, answer: str, template: str | None, options: dict[str, Any], stream: bool
) -> None:
    config = load_config(smollm2)
    tokenizer = load_tokenizer(smollm2, config)
    tokenizer.chat_template = template or tokenizer.chat_template
    resolved = config_from(
        {"device": "cpu", "kernels": "reference", "context_length": 2048, "kv_tokens": 8192, "page_size": 16}
    ).resolve(cuda=False)
    model = ScriptedModel(config.vocab_size, speller(tokenizer, answer))

    async def main(engine: Engine, watched: Watched) -> None:
        transport = httpx.ASGITransport(app=create_app(engine, ServerConfig()))
        async with openai.AsyncOpenAI(
            api_key="-", base_url="http://test/v1", http_client=httpx.AsyncClient(transport=transport)
        ) as client:
            messages, last = list[Any]([{"role": "user", "content": "Say it."}]), list[int]()
            for _ in range(3):
                before = len(watched.sequences)
                message, cached = await turn_of(client, messages, options, stream=stream)
                first = watched.sequences[before]
                assert first[: len(last)] == last, "the prompt begins with all that was computed and said"
                assert cached == len(last)
                last = watched.sequences[-1]
                calls = message.get("tool_calls") or ()
                assert len(calls) == answer.count("<tool_call>")
                assert ("reasoning_content" in message) == ("<think>" in answer)
                results = [{"role": "tool", "tool_call_id": c["id"], "content": "sunny"} for c in calls]
                messages += [message, *results, {"role": "user", "content": "Again."}]

    with Engine.of(assemble(resolved, model, tokenizer, torch.device("cpu"))) as engine:
        asyncio.run(main(engine, Watched(engine, tokenizer)))


async def turn_of(
    client: openai.AsyncOpenAI, messages: list[Any], options: dict[str, Any], *, stream: bool
) -> tuple[dict[str, Any], int]:
    """The assistant's message, as a client sends it back, and the tokens that were found."""
    create = client.chat.completions.create
    if not stream:
        answer = await create(model="smollm2-135m", messages=messages, max_tokens=400, **options)
        return answer.choices[0].message.model_dump(exclude_none=True), cached_of(answer.usage)
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    usage = None
    events = await create(
        model="smollm2-135m",
        messages=messages,
        max_tokens=400,
        stream=True,
        stream_options={"include_usage": True},
        **options,
    )
    async for event in events:
        usage = event.usage or usage
        for choice in event.choices:
            delta = choice.delta.model_dump(exclude_none=True)
            for key in ("content", "reasoning_content"):
                message[key] = message.get(key, "") + delta.get(key, "")
            for call in delta.get("tool_calls", ()):
                calls = message.setdefault("tool_calls", [])
                if "id" in call:
                    calls.append({**call, "function": {"name": call["function"]["name"], "arguments": ""}})
                    calls[-1].pop("index")
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    return {key: value for key, value in message.items() if value}, cached_of(usage)


def cached_of(usage: Any) -> int:
    return int(usage.prompt_tokens_details.cached_tokens)
