"""The engine through its one verb, over the scripted model: every paging or scheduling mistake changes the output."""

from __future__ import annotations

import asyncio
import json
import math
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, NoReturn

import pytest
import torch

from sglite.errors import (
    AbortedError,
    CapacityError,
    ConfigError,
    ContextLengthError,
    DeadlineError,
    GrammarError,
    InvalidRequestError,
    OverloadedError,
    RequestError,
    UnavailableError,
    UnsupportedError,
)
from sglite.protocol import (
    Chunk,
    Constraint,
    GenerateRequest,
    LogprobParams,
    ProgramInfo,
    SamplingParams,
    Text,
    Tokens,
)
from sglite.runtime import assembly
from sglite.runtime.byte_tokenizer import byte_tokenizer
from sglite.runtime.config import EngineConfig
from sglite.runtime.engine import Engine
from sglite.runtime.model.faults import FaultyModel, fail_at, fail_on_token
from sglite.runtime.model.scripted import ScriptedModel, hashed
from sglite.runtime.testing import EOS, answering, scripted_engine

VOCAB = byte_tokenizer().vocab_size
GREEDY = SamplingParams(temperature=0, ignore_eos=True, max_new_tokens=24)


def request(prompt: str | list[int], id: str = "r", **fields: Any) -> GenerateRequest:
    sampling = fields.pop("sampling", GREEDY)
    segment = Text(prompt) if isinstance(prompt, str) else Tokens(tuple(prompt))
    return GenerateRequest(id, (segment,), sampling, **fields)


async def collect(engine: Engine, req: GenerateRequest) -> list[Chunk]:
    return [chunk async for chunk in engine.generate(req)]


def ids_of(chunks: list[Chunk], index: int = 0) -> list[int]:
    return [i for chunk in chunks if chunk.index == index for i in chunk.ids]


def text_of(chunks: list[Chunk], index: int = 0) -> str:
    return "".join(chunk.text for chunk in chunks if chunk.index == index)


def run(engine: Engine, *requests: GenerateRequest) -> list[list[Chunk]]:
    async def main() -> list[list[Chunk]]:
        return await asyncio.gather(*[collect(engine, r) for r in requests])

    with engine:
        answers = asyncio.run(main())
        engine.close()
        engine._core.scheduler.check()
        assert not engine._core.busy
    return answers


def greedy_by_hand(prompt: list[int], count: int) -> list[int]:
    """The plain twin: the default script asked token by token, without engine, pages or cache."""
    history = list(prompt)
    for _ in range(count):
        logits = hashed(torch.tensor([[len(history), *history]]), VOCAB)
        history.append(int(logits.argmax()))
    return history[len(prompt) :]


# ------------------------------------------------------------------------------------------------ the equality table

PROMPTS = [list(range(i, i + n)) for i, n in enumerate((1, 15, 16, 17, 33, 64, 90, 5))]
SHARED = [list(range(40)) + [200 + i] * (i + 1) for i in range(8)]

VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "no cache": {"prefix_cache": False},
    "page size 1": {"page_size": 1},
    "page size 4": {"page_size": 4},
    "chunks of 7": {"max_step_tokens": 7},
    "one at a time": {"max_running": 1},
    "overlap": {"overlap": True},
    "overlap, page size 1, chunks of 5": {"overlap": True, "page_size": 1, "max_step_tokens": 5},
    "forced retraction": {"kv_tokens": 160},
    "forced retraction, no cache": {"kv_tokens": 160, "prefix_cache": False},
    "forced retraction, page size 1, overlap": {"kv_tokens": 130, "page_size": 1, "overlap": True},
    "longest prefix first": {"policy": "longest-prefix", "max_running": 3},
}


@pytest.mark.parametrize("prompts", [PROMPTS, SHARED], ids=["distinct", "shared"])
@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS.keys())
def test_greedy_tokens_are_the_plain_ones(options: dict[str, Any], prompts: list[list[int]]) -> None:
    engine = scripted_engine(**options)
    answers = run(engine, *[request(p, id=str(i)) for i, p in enumerate(prompts)])
    for prompt, chunks in zip(prompts, answers, strict=True):
        assert ids_of(chunks) == greedy_by_hand(prompt, 24)
    if "kv_tokens" in options:
        assert engine._core.scheduler.stats.retractions > 0, "this row is meant to force retractions"


@pytest.mark.parametrize("options", [{}, {"kv_tokens": 160}, {"max_running": 1}, {"overlap": True}])
def test_sampled_tokens_do_not_depend_on_the_batch(options: dict[str, Any]) -> None:
    sampling = SamplingParams(temperature=1.3, top_p=0.9, seed=7, ignore_eos=True, max_new_tokens=20)
    alone = [run(scripted_engine(), request(p, sampling=sampling))[0] for p in PROMPTS]
    together = run(scripted_engine(**options), *[request(p, sampling=sampling) for p in PROMPTS])
    assert [ids_of(a) for a in together] == [ids_of(a) for a in alone]


def test_a_second_call_finds_everything_the_first_computed() -> None:
    async def main(engine: Engine) -> tuple[list[Chunk], list[Chunk]]:
        first = await collect(engine, request(list(range(50))))
        return first, await collect(engine, request([*range(50), *ids_of(first), 9, 9]))

    with scripted_engine(page_size=4) as engine:
        first, second = asyncio.run(main(engine))
    usage = second[-1].usage
    assert usage is not None and usage.prompt_tokens == 50 + 24 + 2
    assert usage.cached_tokens >= 50 + 24 - 4
    assert ids_of(second) == greedy_by_hand([*range(50), *ids_of(first), 9, 9], 24)


def test_a_shared_prefix_is_computed_once() -> None:
    prompts = [[*range(128), 7, i] for i in range(16)]
    engine = scripted_engine()
    answers = run(
        engine, *[request(p, id=str(i), sampling=SamplingParams(max_new_tokens=1)) for i, p in enumerate(prompts)]
    )
    cached = [chunks[-1].usage.cached_tokens for chunks in answers if chunks[-1].usage]
    assert sorted(cached) == [0] + [129] * 15  # the page after the shared one begins alike


# -------------------------------------------------------------------------------------------------- when outputs end


def test_eos_ends_and_is_not_part_of_the_text() -> None:
    [chunks] = run(scripted_engine(answering("hi")), request("say?", sampling=SamplingParams(temperature=0)))
    assert text_of(chunks) == "hi" and ids_of(chunks) == list(b"hi")
    finish, usage = chunks[-1].finish, chunks[-1].usage
    assert finish is not None and (finish.reason, finish.matched) == ("stop", EOS)
    assert usage is not None and usage.completion_tokens == 3


def test_length_ends() -> None:
    [chunks] = run(
        scripted_engine(), request("abc", sampling=SamplingParams(temperature=0, max_new_tokens=3, ignore_eos=True))
    )
    assert len(ids_of(chunks)) == 3
    assert chunks[-1].finish is not None and chunks[-1].finish.reason == "length"


@pytest.mark.parametrize("overlap", [False, True])
def test_stop_string_across_tokens(overlap: bool) -> None:
    sampling = SamplingParams(temperature=0, stop=("lo wo",))
    [chunks] = run(scripted_engine(answering("hello world"), overlap=overlap), request("say?", sampling=sampling))
    assert text_of(chunks) == "hel" and chunks[-1].finish is not None and chunks[-1].finish.matched == "lo wo"
    assert sum(chunk.finish is not None for chunk in chunks) == 1


def test_stop_regex_and_one_that_would_take_a_backtracking_search_for_ever() -> None:
    stop = SamplingParams(temperature=0, stop_regex=(r"w[aeiou]r",))
    hostile = SamplingParams(temperature=0, stop_regex=(r"(?:a|aa)+[bc]",), max_new_tokens=60)
    outcomes = outcomes_of(scripted_engine(answering("hello world" + "a" * 60)), request("a?", sampling=stop))
    assert isinstance(outcomes[0], list) and text_of(outcomes[0]) == "hello "
    assert outcomes[0][-1].finish is not None and outcomes[0][-1].finish.matched == r"w[aeiou]r"
    outcomes = outcomes_of(
        scripted_engine(answering("a" * 60)), request("a?", sampling=hostile), request("b?", sampling=stop)
    )
    assert [len(text_of(outcome)) for outcome in outcomes if isinstance(outcome, list)] == [60, 60]


def test_stop_token_ids_and_min_new_tokens() -> None:
    stop = SamplingParams(temperature=0, stop_token_ids=(ord("l"),))
    late = SamplingParams(temperature=0, min_new_tokens=5)
    a, b = run(scripted_engine(answering("hello")), request("a?", sampling=stop), request("b?", sampling=late))
    assert text_of(a) == "he" and a[-1].finish is not None and a[-1].finish.matched == ord("l")
    assert text_of(b) == "hello"
    [c] = run(scripted_engine(answering("hi")), request("c?", sampling=late))
    assert len(ids_of(c)) >= 5


def test_n_samples_differ_and_are_reproducible() -> None:
    sampling = SamplingParams(n=4, seed=3, max_new_tokens=8, ignore_eos=True, temperature=2.0)
    [chunks] = run(scripted_engine(), request(list(range(40)), sampling=sampling))
    outputs = [tuple(ids_of(chunks, index)) for index in range(4)]
    assert len(set(outputs)) == 4 and all(len(o) == 8 for o in outputs)
    [again] = run(scripted_engine(page_size=1, max_running=2), request(list(range(40)), sampling=sampling))
    assert [tuple(ids_of(again, index)) for index in range(4)] == outputs


# ----------------------------------------------------------------------------------------------- logprobs and scores


def test_output_and_prompt_logprobs_are_the_scripts() -> None:
    prompt = list(range(10, 45))
    logprobs = LogprobParams(prompt_start=0, top=3)
    [chunks] = run(scripted_engine(page_size=4, max_step_tokens=8), request(prompt, logprobs=logprobs))
    history, output = list(prompt), [entry for chunk in chunks for entry in chunk.logprobs]
    entries = chunks[-1].prompt_logprobs
    assert [e.id for e in entries] == prompt and entries[0].logprob is None
    assert [e.id for e in output] == ids_of(chunks) == greedy_by_hand(prompt, 24)
    for i, entry in enumerate([*entries, *output]):
        known = [*prompt, *ids_of(chunks)][:i]
        if known:
            exact = torch.log_softmax(hashed(torch.tensor([[len(known), *known]]), VOCAB)[0], 0)
            assert entry.logprob == pytest.approx(float(exact[entry.id]), abs=1e-5)
            assert [t for t, _, _ in entry.top] == exact.topk(3).indices.tolist()
    assert len(history) == len(prompt)


def test_prompt_logprobs_are_the_same_cold_and_warm() -> None:
    async def main(engine: Engine) -> list[list[Chunk]]:
        req = request(
            list(range(60)), logprobs=LogprobParams(prompt_start=20), sampling=SamplingParams(max_new_tokens=0)
        )
        return [await collect(engine, req) for _ in range(2)]

    with scripted_engine(page_size=4) as engine:
        cold, warm = asyncio.run(main(engine))
    assert cold[-1].prompt_logprobs == warm[-1].prompt_logprobs and len(cold[-1].prompt_logprobs) == 40
    assert warm[-1].usage is not None and warm[-1].usage.cached_tokens >= 16


def test_prefill_only_fills_the_cache() -> None:
    async def main(engine: Engine) -> tuple[list[Chunk], list[Chunk]]:
        prefill = await collect(engine, request(list(range(64)), sampling=SamplingParams(max_new_tokens=0)))
        return prefill, await collect(engine, request([*range(64), 3]))

    with scripted_engine() as engine:
        prefill, after = asyncio.run(main(engine))
    assert len(prefill) == 1 and prefill[0].ids == () and prefill[0].usage is not None
    assert after[-1].usage is not None and after[-1].usage.cached_tokens == 64


@pytest.mark.parametrize("candidates", [("x", "y", "z"), ("red", "green", "greenish", "gre"), ("only",)])
@pytest.mark.parametrize("options", [{}, {"prefix_cache": False}, {"page_size": 1, "max_step_tokens": 3}])
def test_candidates_are_scored_as_the_model_would(candidates: tuple[str, ...], options: dict[str, Any]) -> None:
    prompt = "which colour is it, please tell me:"
    [[chunk]] = run(scripted_engine(**options), request(prompt, candidates=candidates))
    assert [score.text for score in chunk.scores] == list(candidates)
    for score in chunk.scores:
        history = list(prompt.encode())
        assert [entry.id for entry in score.tokens] == list(score.text.encode())
        for entry in score.tokens:
            exact = torch.log_softmax(hashed(torch.tensor([[len(history), *history]]), VOCAB)[0], 0)
            assert entry.logprob == pytest.approx(float(exact[entry.id]), abs=1e-5)
            history.append(entry.id)
    assert chunk.usage is not None and chunk.usage.prompt_tokens == len(prompt)


# ------------------------------------------------------------------------------------------------------- constraints


def schema(value: dict[str, Any]) -> Constraint:
    return Constraint("json_schema", json.dumps(value))


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    "options", [{}, {"jump_forward": False}, {"kv_tokens": 160}, {"overlap": True}, {"page_size": 1}]
)
def test_schema_answers_validate_whatever_the_model_wants(options: dict[str, Any]) -> None:
    sampling = SamplingParams(temperature=1.5, seed=5, max_new_tokens=100)
    answers = run(
        scripted_engine(**options),
        *[request(f"person {i}:", constraint=schema(PERSON), sampling=sampling) for i in range(6)],
    )
    for chunks in answers:
        value = json.loads(text_of(chunks))
        assert set(value) == {"name", "age"} and 0 <= value["age"] <= 150 and len(value["name"]) <= 8
        assert chunks[-1].finish is not None and chunks[-1].finish.reason == "stop"


def test_jump_forward_changes_no_text_and_saves_samples() -> None:
    sampling = SamplingParams(temperature=0, max_new_tokens=60)
    fixed = Constraint("regex", "the name is (Ann|Bob), and nothing else will be said")
    [jumped] = run(scripted_engine(), request("q:", constraint=fixed, sampling=sampling))
    [plain] = run(scripted_engine(jump_forward=False), request("q:", constraint=fixed, sampling=sampling))
    assert text_of(jumped) == text_of(plain)
    assert jumped[-1].usage is not None and plain[-1].usage is not None
    assert plain[-1].usage.forced_tokens == 0 and jumped[-1].usage.forced_tokens > 30


def test_a_stop_string_does_not_cut_json() -> None:
    sampling = SamplingParams(temperature=1.5, seed=5, max_new_tokens=100, stop=(",", "}"))
    [chunks] = run(scripted_engine(), request("person:", constraint=schema(PERSON), sampling=sampling))
    assert set(json.loads(text_of(chunks))) == {"name", "age"}


@pytest.mark.parametrize("extra", [0, 1, 20])
def test_a_small_budget_still_gives_whole_json(extra: int) -> None:
    async def main(engine: Engine) -> list[Chunk]:
        with pytest.raises(GrammarError, match="shortest answer has 19"):
            await collect(engine, request("p:", constraint=schema(PERSON), sampling=SamplingParams(max_new_tokens=3)))
        sampling = SamplingParams(temperature=1.5, seed=5, max_new_tokens=len('{"name":"","age":0}') + extra)
        return await collect(engine, request("p:", constraint=schema(PERSON), sampling=sampling))

    with scripted_engine() as engine:
        chunks = asyncio.run(main(engine))
    assert set(json.loads(text_of(chunks))) == {"name", "age"}


def test_unique_items_are_unique_though_no_mask_can_say_so() -> None:
    """The matcher takes tokens back, the engine samples again, and nothing taken back was shown."""
    value = {"type": "array", "items": {"enum": [1, 2, 3]}, "uniqueItems": True, "minItems": 3, "maxItems": 3}
    for options in ({}, {"overlap": True}, {"page_size": 1}, {"kv_tokens": 64}):
        sampling = [SamplingParams(temperature=1.0, seed=seed, max_new_tokens=30) for seed in range(6)]
        engine = scripted_engine(**options)
        answers = run(
            engine, *[request("a:", str(i), constraint=schema(value), sampling=s) for i, s in enumerate(sampling)]
        )
        assert [sorted(json.loads(text_of(chunks))) for chunks in answers] == [[1, 2, 3]] * 6
        assert sum(chunks[-1].usage.rollbacks for chunks in answers if chunks[-1].usage) > 0


def test_without_its_library_a_constraint_is_refused_and_the_rest_served(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(engine: Engine) -> list[Chunk]:
        with pytest.raises(UnsupportedError, match="pip install llguidance"):
            await collect(engine, request("p:", constraint=schema(PERSON)))
        return await collect(engine, request([5]))

    for name in [
        m for m in sys.modules if (m.startswith("sglite.runtime.grammar.") and "guard" in m) or "llguidance" in m
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with scripted_engine() as engine:
        assert ids_of(asyncio.run(main(engine))) == greedy_by_hand([5], 24)


def test_a_grammar_with_one_answer_needs_no_model() -> None:
    [chunks] = run(scripted_engine(), request("q:", constraint=Constraint("choices", '["yes"]')))
    assert text_of(chunks) == "yes" and chunks[-1].finish is not None and chunks[-1].finish.reason == "stop"


# --------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("make", "error", "param"),
    [
        (lambda: request([1] * 512), ContextLengthError, "prompt"),
        (lambda: request([1] * 600), ContextLengthError, "prompt"),
        (lambda: request([VOCAB]), InvalidRequestError, "prompt"),
        (lambda: request([-1]), InvalidRequestError, "prompt"),
        (lambda: request([]), InvalidRequestError, "prompt"),
        (lambda: GenerateRequest("r", ()), InvalidRequestError, "prompt"),
        (lambda: request("a", sampling=SamplingParams(logit_bias=((VOCAB, 1.0),))), InvalidRequestError, "logit_bias"),
        (lambda: request("a", sampling=SamplingParams(stop_token_ids=(VOCAB,))), InvalidRequestError, "stop_token_ids"),
        (lambda: request("a", sampling=SamplingParams(temperature=float("nan"))), InvalidRequestError, "temperature"),
        (lambda: request("a", sampling=SamplingParams(stop_regex=("(",))), InvalidRequestError, "stop_regex"),
        (lambda: request("a", sampling=SamplingParams(stop_regex=("a*",))), InvalidRequestError, "stop_regex"),
        (lambda: request("a", adapter="nobody"), UnsupportedError, "adapter"),
        (lambda: request("a", constraint=Constraint("regex", "(")), GrammarError, None),
    ],
)
def test_refusals_name_the_field_and_the_engine_goes_on(
    make: Callable[[], GenerateRequest], error: type[InvalidRequestError], param: str | None
) -> None:
    async def main(engine: Engine) -> list[Chunk]:
        with pytest.raises(error) as caught:
            await collect(engine, make())
        if param is not None:
            assert caught.value.param == param
        return await collect(engine, request([5]))

    with scripted_engine() as engine:
        assert ids_of(asyncio.run(main(engine))) == greedy_by_hand([5], 24)


def test_an_empty_text_starts_from_the_beginning_of_text_token() -> None:
    [chunks] = run(scripted_engine(), request(""))
    assert ids_of(chunks) == greedy_by_hand([257], 24)


def test_candidates_of_an_empty_text_are_scored_from_there() -> None:
    [[chunk]] = run(scripted_engine(), request("", candidates=("a", "bc")))
    exact = torch.log_softmax(hashed(torch.tensor([[1, 257]]), VOCAB)[0], 0)
    assert [score.tokens[0].logprob for score in chunk.scores] == [
        pytest.approx(float(exact[ord(text[0])]), abs=1e-5) for text in ("a", "bc")
    ]


def test_the_largest_prompt_that_fits_is_served() -> None:
    [chunks] = run(scripted_engine(), request([1] * 511))
    assert len(ids_of(chunks)) == 1 and chunks[-1].finish is not None and chunks[-1].finish.reason == "length"


def test_what_can_never_fit_the_pool_is_refused() -> None:
    async def main(engine: Engine) -> None:
        with pytest.raises(CapacityError) as caught:
            await collect(engine, request([1] * 112))
        assert caught.value.param == "prompt"
        assert len(ids_of(await collect(engine, request([1] * 100)))) == 12, "output is cut to what the pool leaves"

    with scripted_engine(kv_tokens=112) as engine:
        asyncio.run(main(engine))


def test_a_full_queue_refuses_the_next() -> None:
    async def main(engine: Engine) -> list[object]:
        long = SamplingParams(temperature=0, max_new_tokens=200, ignore_eos=True)
        return await asyncio.gather(
            *[collect(engine, request([i], sampling=long)) for i in range(8)], return_exceptions=True
        )

    with scripted_engine(max_running=1, max_queue=3) as engine:
        outcomes = asyncio.run(main(engine))
    refused = [o for o in outcomes if isinstance(o, OverloadedError)]
    assert 1 <= len(refused) <= 5 and all(isinstance(o, list) for o in outcomes if o not in refused)


# ------------------------------------------------------------------------------------------------- aborts and faults


async def until_idle(engine: Engine) -> None:
    async with asyncio.timeout(10):
        while (await engine.stats())["running"] or (await engine.stats())["waiting"]:
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("overlap", [False, True])
def test_closing_the_iterator_aborts_and_neighbours_go_on(overlap: bool) -> None:
    async def main(engine: Engine) -> list[Chunk]:
        endless = SamplingParams(temperature=0, max_new_tokens=400, ignore_eos=True)
        neighbour = asyncio.create_task(collect(engine, request([9] * 20)))
        async with aclosing(engine.generate(request([1, 2, 3], sampling=endless))) as chunks:
            async for _ in chunks:
                break
        answer = await neighbour
        await until_idle(engine)
        return answer

    with scripted_engine(overlap=overlap) as engine:
        assert ids_of(asyncio.run(main(engine))) == greedy_by_hand([9] * 20, 24)
        engine._core.scheduler.check()


def test_cancelling_a_task_aborts_its_request() -> None:
    async def main(engine: Engine) -> None:
        endless = SamplingParams(temperature=0, max_new_tokens=400, ignore_eos=True)
        tasks = [asyncio.create_task(collect(engine, request([i], sampling=endless))) for i in range(20)]
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await until_idle(engine)

    with scripted_engine(max_running=4) as engine:
        asyncio.run(main(engine))


def test_a_deadline_ends_the_request() -> None:
    async def main(engine: Engine) -> None:
        endless = SamplingParams(temperature=0, max_new_tokens=500, ignore_eos=True)
        with pytest.raises(DeadlineError):
            await collect(engine, request([1], sampling=endless, deadline=1e-6))
        await until_idle(engine)

    with scripted_engine() as engine:
        asyncio.run(main(engine))


def outcomes_of(engine: Engine, *requests: GenerateRequest) -> list[object]:
    async def main() -> list[object]:
        return await asyncio.gather(*[collect(engine, r) for r in requests], return_exceptions=True)

    with engine:
        result = asyncio.run(main())
        engine.close()
        engine._core.scheduler.check()
    return result


def test_a_step_that_fails_once_loses_nobody() -> None:
    for step in range(6):
        model = FaultyModel(ScriptedModel(VOCAB), fail_at(step, RuntimeError("boom")))
        outcomes = outcomes_of(scripted_engine(model=model), *[request(p) for p in PROMPTS])
        for prompt, outcome in zip(PROMPTS, outcomes, strict=True):
            assert isinstance(outcome, list) and ids_of(outcome) == greedy_by_hand(prompt, 24)


def test_a_request_that_poisons_its_batch_fails_alone() -> None:
    model = FaultyModel(ScriptedModel(VOCAB), fail_on_token(250, RuntimeError("poison")))
    outcomes = outcomes_of(scripted_engine(model=model), *[request(p) for p in PROMPTS[:4]], request([3, 250, 3]))
    assert isinstance(outcomes[4], RequestError) and "poison" in str(outcomes[4].__cause__)
    assert "poison" not in str(outcomes[4])
    for prompt, outcome in zip(PROMPTS, outcomes[:4], strict=False):
        assert isinstance(outcome, RequestError) or ids_of(outcome) == greedy_by_hand(prompt, 24)  # type: ignore[arg-type]
        generated = greedy_by_hand(prompt, 24)
        assert isinstance(outcome, list) or 250 in generated


def test_nan_logits_fail_their_row_only() -> None:
    def script(history: list[int]) -> dict[int, float]:
        return {5: math.nan if history[0] == 1 else 0.0}

    outcomes = outcomes_of(scripted_engine(script), request([1]), request([2]))
    assert isinstance(outcomes[0], RequestError) and "finite" in str(outcomes[0])
    assert isinstance(outcomes[1], list) and ids_of(outcomes[1]) == [5] * 24


def test_a_mistake_of_the_engine_itself_ends_its_step_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one place that patches: no seam lets our own loop fail."""
    broken = iter([True])

    async def main(engine: Engine) -> list[Chunk]:
        commit = engine._core.scheduler.commit

        def failing(plan: Any) -> None:
            if next(broken, False):
                raise RuntimeError("a bug of ours")
            commit(plan)

        monkeypatch.setattr(engine._core.scheduler, "commit", failing)
        with pytest.raises(RequestError, match="failed in a step") as caught:
            await collect(engine, request([7]))
        assert "a bug of ours" in str(caught.value.__cause__)
        return await collect(engine, request([7]))

    with scripted_engine() as engine:
        answer = asyncio.run(main(engine))
        engine._core.scheduler.check()
    assert ids_of(answer) == greedy_by_hand([7], 24)


def test_closing_the_engine_ends_running_requests() -> None:
    async def main(engine: Engine) -> None:
        endless = SamplingParams(temperature=0, max_new_tokens=500, ignore_eos=True)
        task = asyncio.create_task(collect(engine, request([1], sampling=endless)))
        await asyncio.sleep(0.01)
        await engine.aclose()
        with pytest.raises(UnavailableError):
            await task
        with pytest.raises(UnavailableError):
            await collect(engine, request([1]))

    engine = scripted_engine(context_length=100_000, kv_tokens=200_000)
    asyncio.run(main(engine))
    engine.close()


def test_a_loop_that_dies_takes_its_requests_along() -> None:
    engine = scripted_engine(context_length=100_000, kv_tokens=200_000)
    endless = SamplingParams(temperature=0, max_new_tokens=50_000, ignore_eos=True)

    async def start() -> AsyncIterator[Chunk]:
        chunks = engine.generate(request([1], sampling=endless))
        await anext(chunks)
        return chunks

    loop = asyncio.new_event_loop()
    chunks = loop.run_until_complete(start())
    loop.close()  # without shutdown_asyncgens: as a crashed caller would leave it

    async def wait(idle: Callable[[Engine], Awaitable[None]]) -> None:
        await idle(engine)

    asyncio.run(wait(until_idle))
    engine.close()
    del chunks


def test_flush_during_a_run_is_safe() -> None:
    async def main(engine: Engine) -> list[Chunk]:
        running = asyncio.create_task(collect(engine, request(list(range(60)))))
        for _ in range(5):
            await engine.flush_cache()
        answer = await running
        await engine.flush_cache()
        again = await collect(engine, request(list(range(60))))
        assert again[-1].usage is not None and again[-1].usage.cached_tokens == 0
        return answer

    with scripted_engine() as engine:
        assert ids_of(asyncio.run(main(engine))) == greedy_by_hand(list(range(60)), 24)


def test_program_info_travels_without_changing_the_answer() -> None:
    req = request([4, 5, 6], program=ProgramInfo("p", "0.1"))
    [chunks] = run(scripted_engine(), req)
    assert ids_of(chunks) == greedy_by_hand([4, 5, 6], 24)


def test_aborted_error_is_what_an_abort_raises() -> None:
    async def main(engine: Engine) -> None:
        endless = SamplingParams(temperature=0, max_new_tokens=500, ignore_eos=True)
        task = asyncio.create_task(collect(engine, request([1], id="a", sampling=endless)))
        await asyncio.sleep(0.01)
        await engine.abort("a")
        with pytest.raises(AbortedError):
            await task

    with scripted_engine(context_length=100_000, kv_tokens=200_000) as engine:
        asyncio.run(main(engine))


def test_model_path_is_another_name_for_model(monkeypatch: pytest.MonkeyPatch) -> None:
    class BuiltError(Exception):
        """With the config that an engine was to be built from."""

    def build(config: EngineConfig) -> NoReturn:
        raise BuiltError(config)

    monkeypatch.setattr(assembly, "build", build)
    with pytest.raises(BuiltError) as built:
        Engine(model_path="a")
    assert built.value.args[0].model == "a"
    with pytest.raises(ConfigError, match="model and model_path are the same"):
        Engine("a", model_path="b")
