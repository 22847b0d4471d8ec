"""What a request may ask of sampling and scoring, beyond a plain answer: through the engine, on the scripted model."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from sglite.errors import CapacityError, InvalidRequestError
from sglite.protocol import Chunk, GenerateRequest, LogprobParams, ProgramInfo, SamplingParams, Tokens
from sglite.runtime.byte_tokenizer import byte_tokenizer
from sglite.runtime.core import SCORE_ROWS
from sglite.runtime.engine import Engine
from sglite.runtime.model.scripted import ScriptedModel
from sglite.runtime.testing import scripted_engine

PROMPT = (Tokens((1, 2, 3)),)


def run(engine: Engine, *requests: GenerateRequest) -> list[list[Chunk]]:
    async def collect(request: GenerateRequest) -> list[Chunk]:
        return [chunk async for chunk in engine.generate(request)]

    async def main() -> list[list[Chunk]]:
        return await asyncio.gather(*[collect(request) for request in requests])

    return asyncio.run(main())


def request(logprobs: LogprobParams | None = None, **sampling: Any) -> GenerateRequest:
    params = SamplingParams(**{"max_new_tokens": 6, "ignore_eos": True, **sampling})
    return GenerateRequest("r", PROMPT, params, logprobs=logprobs)


def tokens(chunks: list[Chunk], index: int = 0) -> list[int]:
    return [i for chunk in chunks if chunk.index == index for i in chunk.ids]


def mean_logprob(chunks: list[Chunk], index: int) -> float:
    values = [entry.logprob or 0.0 for chunk in chunks if chunk.index == index for entry in chunk.logprobs]
    return sum(values) / len(values)


def test_best_of_is_the_likeliest_of_as_many_samples() -> None:
    with scripted_engine() as engine:
        every, best = run(
            engine,
            request(LogprobParams(), n=8, seed=5, temperature=2.0),
            request(n=2, best_of=8, seed=5, temperature=2.0),
        )
    ranked = sorted(range(8), key=lambda i: -mean_logprob(every, i))
    assert [tokens(best, i) for i in (0, 1)] == [tokens(every, i) for i in ranked[:2]]
    assert not any(chunk.logprobs for chunk in best)
    usages = [chunk.usage.completion_tokens for chunk in best if chunk.finish and chunk.usage]
    assert usages == [7 * 6, 6]


@pytest.mark.parametrize("best_of", [1, 129, True, 2.0])
def test_best_of_is_at_least_n_and_bounded(best_of: Any) -> None:
    with scripted_engine() as engine, pytest.raises(InvalidRequestError) as caught:
        run(engine, request(n=2, best_of=best_of))
    assert caught.value.param == "best_of"


def test_logprobs_of_given_ids_at_every_position() -> None:
    ids = (7, 250, 7)
    asked = LogprobParams(prompt_start=0, top=64, ids=ids)
    with scripted_engine() as engine:
        (chunks,) = run(engine, request(asked, temperature=0))
    entries = [entry for chunk in chunks for entry in chunk.logprobs]
    prompt = chunks[-1].prompt_logprobs
    assert prompt[0].given == ()
    for entry in (*entries, *prompt[1:]):
        assert [i for i, _, _ in entry.given] == list(ids)
        assert entry.given[0] == entry.given[2]
        known = {i: value for i, value, _ in entry.top}
        assert all(math.isclose(known[i], value, abs_tol=1e-5) for i, value, _ in entry.given if i in known)


def test_a_given_id_that_was_chosen_has_the_choices_logprob() -> None:
    with scripted_engine(lambda history: 65) as engine:
        (chunks,) = run(engine, request(LogprobParams(ids=(65,)), temperature=0))
    assert all(entry.given[0][1] == entry.logprob for chunk in chunks for entry in chunk.logprobs)


@pytest.mark.parametrize("ids", [(-1,), (10**6,), (True,), tuple(range(2000))])
def test_given_ids_are_checked_at_the_door(ids: tuple[int, ...]) -> None:
    with scripted_engine() as engine, pytest.raises(InvalidRequestError) as caught:
        run(engine, request(LogprobParams(ids=ids)))
    assert caught.value.param == "token_ids_logprob"


class Counting(ScriptedModel):
    """Remembers for how many positions logits existed at once."""

    most = 0

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.most = max(self.most, len(hidden))
        return super().logits(hidden)


def test_scoring_many_long_prompts_keeps_few_logits_at_once() -> None:
    model = Counting(byte_tokenizer().vocab_size)
    scored = LogprobParams(prompt_start=0)
    prompts = [tuple((i * j) % 251 for j in range(1, 701)) for i in range(1, 9)]
    requests = [
        GenerateRequest(str(i), (Tokens(ids),), SamplingParams(max_new_tokens=0), logprobs=scored)
        for i, ids in enumerate(prompts)
    ]
    with scripted_engine(model=model, context_length=1024, kv_tokens=8192) as engine:
        answers = run(engine, *requests)
    assert [len(chunks[-1].prompt_logprobs) for chunks in answers] == [700] * 8
    assert SCORE_ROWS // 2 < model.most <= SCORE_ROWS


NAN = float("nan")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", NAN),
        ("temperature", -1.0),
        ("top_p", 0.0),
        ("top_p", NAN),
        ("min_p", 1.5),
        ("top_k", 0),
        ("top_k", -2),
        ("frequency_penalty", NAN),
        ("presence_penalty", 3.0),
        ("repetition_penalty", 0.0),
        ("n", 0),
        ("n", 129),
        ("max_new_tokens", -1),
        ("min_new_tokens", 7),
        ("seed", 2**70),
        ("stop", ("",)),
        ("stop_regex", ("(",)),
        ("stop_regex", ("a*",)),
        ("stop_token_ids", (10**6,)),
        ("logit_bias", ((10**6, 1.0),)),
        ("logit_bias", ((1, NAN),)),
    ],
)
def test_bad_parameters_are_refused_by_name(field: str, value: Any) -> None:
    with scripted_engine() as engine, pytest.raises(InvalidRequestError) as caught:
        run(engine, request(**{field: value}))
    assert caught.value.param == field


def test_a_prompt_that_fits_the_context_and_not_the_pool() -> None:
    with scripted_engine(kv_tokens=64) as engine, pytest.raises(CapacityError) as caught:
        run(engine, GenerateRequest("r", (Tokens((1,) * 100),), SamplingParams(max_new_tokens=1)))
    assert caught.value.param == "prompt"


@pytest.mark.parametrize("asked", [{"n": 9}, {"n": 2, "best_of": 9}])
def test_more_samples_than_the_queue_ever_holds_are_no_overload(asked: dict[str, int]) -> None:
    with scripted_engine(max_queue=8) as engine:
        run(engine, request(n=8))
        with pytest.raises(CapacityError) as caught:
            run(engine, request(**asked))
    assert caught.value.param == "n"


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("priority", {"priority": NAN}),
        ("priority", {"priority": 1.5}),
        ("priority", {"priority": 2**31}),
        ("deadline", {"deadline": NAN}),
        ("ahead", {"program": ProgramInfo("p", ahead=-1)}),
        ("branch", {"program": ProgramInfo("p", None)}),  # type: ignore[arg-type]
    ],
)
def test_a_requests_place_in_line_is_checked(param: str, fields: dict[str, Any]) -> None:
    with scripted_engine() as engine, pytest.raises(InvalidRequestError) as caught:
        run(engine, replace(request(), **fields))
    assert caught.value.param == param


@pytest.mark.parametrize("ttl", [0, -1.0, NAN, float("inf"), True, "1"])
def test_a_pins_time_is_checked(ttl: Any) -> None:
    with scripted_engine() as engine, pytest.raises(InvalidRequestError) as caught:
        asyncio.run(engine.pin(PROMPT, ttl))
    assert caught.value.param == "ttl"


def test_a_pin_keeps_what_is_cached_and_is_counted() -> None:
    async def main(engine: Engine) -> tuple[int, int]:
        prompt = (Tokens(tuple(range(40))),)
        before = await engine.pin(prompt, 60)
        async for _ in engine.generate(GenerateRequest("r", prompt, SamplingParams(max_new_tokens=0))):
            pass
        pinned = await engine.pin(prompt, 60)
        assert (await engine.stats())["pinned_tokens"] == pinned
        return before, pinned

    with scripted_engine(page_size=4) as engine:
        assert asyncio.run(main(engine)) == (0, 40)
