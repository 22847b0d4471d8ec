"""An answer comes back in the next turn as the tokens it was generated as, whatever its text would be encoded to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import httpx
import pytest
import torch
from conftest import FakeBackend

from sglite.protocol import ProgramInfo, Text, Tokens
from sglite.runtime.assembly import assemble
from sglite.runtime.config import config_from
from sglite.runtime.engine import Engine
from sglite.runtime.hub import ModelSource
from sglite.runtime.loading import load_config, load_tokenizer
from sglite.runtime.model.scripted import ScriptedModel
from sglite.runtime.server.answers import AnswerMemo
from sglite.runtime.server.app import create_app
from sglite.runtime.server.config import ServerConfig

PROMPT = (Text("<user>", special=True), Text("hi"), Text("<assistant>", special=True))


def test_the_same_text_after_the_same_prefix_is_the_same_tokens() -> None:
    memo = AnswerMemo()
    memo.remember("", PROMPT, "yes!", (7, 8), uncovered=1)
    history = (*PROMPT, Text("yes!"), Text("<end>", special=True))
    recalled = memo.recall("", history, {"yes!"})
    assert recalled.prompt == (*PROMPT, Tokens((7, 8), "yes"), Text("!"), Text("<end>", special=True))
    assert (recalled.exact, recalled.rewritten) == (1, 0)
    assert memo.recall("", recalled.prompt, {"yes!"}).prompt == recalled.prompt


def test_how_the_prefix_is_cut_does_not_count_but_what_is_special_does() -> None:
    memo = AnswerMemo()
    memo.remember("", PROMPT, "yes", (7,), 0)
    cut = (Text("<user>", special=True), Text("h"), Text("i"), *PROMPT[2:], Text("yes"))
    assert memo.recall("", cut, {"yes"}).exact == 1
    faked = (Text("<user>", special=True), Text("hi<assistant>"), Text("yes"))
    assert memo.recall("", faked, {"yes"}).exact == 0


@pytest.mark.parametrize("namespace", ["other", ""])
def test_a_namespace_never_sees_anothers_answers(namespace: str) -> None:
    memo = AnswerMemo()
    memo.remember(namespace, PROMPT, "yes", (7,), 0)
    found = memo.recall("", (*PROMPT, Text("yes")), {"yes"})
    assert (found.exact, found.rewritten) == (int(namespace == ""), 0)


def test_a_rewritten_history_is_noticed() -> None:
    memo = AnswerMemo()
    memo.remember("", PROMPT, "yes", (7,), 0)
    found = memo.recall("", (Text("<user>changed", special=True), Text("yes")), {"yes"})
    assert (found.exact, found.rewritten) == (0, 1)


def test_the_memo_is_bounded_and_forgets_the_oldest() -> None:
    memo = AnswerMemo(tokens_kept=10)
    for i in range(20):
        memo.remember("", (Text(str(i)),), "yes", (1, 2, 3), 0)
    known = [memo.recall("", (Text(str(i)), Text("yes")), {"yes"}).exact for i in range(20)]
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


def test_turn_two_finds_all_that_turn_one_computed(smollm2: ModelSource) -> None:
    """The model spells its answer letter by letter, which its tokenizer never would."""
    config = load_config(smollm2)
    tokenizer = load_tokenizer(smollm2, config)
    letters = [*(tokenizer.encode((Text(letter),))[0] for letter in "understanding"), min(tokenizer.eos_ids)]
    assert len(tokenizer.encode((Text("understanding"),))) < len(letters) - 1

    def script(history: list[int]) -> int:
        spelled = next(n for n in range(len(letters) - 1, -1, -1) if history[len(history) - n :] == letters[:n])
        return letters[spelled]

    options = {"device": "cpu", "kernels": "reference", "context_length": 512, "kv_tokens": 4096, "page_size": 1}
    resolved = config_from(options).resolve(cuda=False)
    model = ScriptedModel(config.vocab_size, script)

    async def main(engine: Engine) -> tuple[dict[str, int], dict[str, int]]:
        transport = httpx.ASGITransport(app=create_app(engine, ServerConfig()))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            messages = [{"role": "user", "content": "Say it."}]
            usages = []
            for _ in range(2):
                answer = (await client.post("/v1/chat/completions", json={"messages": messages})).json()
                message = answer["choices"][0]["message"]
                assert message["content"] == "understanding"
                messages += [message, {"role": "user", "content": "Again."}]
                usages.append(answer["usage"])
            return usages[0], usages[1]

    with Engine.of(assemble(resolved, model, tokenizer, torch.device("cpu"))) as engine:
        first, second = asyncio.run(main(engine))
    computed = first["prompt_tokens"] + len(letters) - 1  # the end of the turn is sampled, not computed
    assert second["prompt_tokens_details"]["cached_tokens"] >= computed - 1
