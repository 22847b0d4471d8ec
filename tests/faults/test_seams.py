"""Row 30: a fault in the middle of the engine, put in at its seams, is that of one request and of nobody else."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest

from sglite.errors import RequestError
from sglite.protocol import Constraint, GenerateRequest, SamplingParams, Text
from sglite.runtime.byte_tokenizer import byte_tokenizer
from sglite.runtime.model.faults import FaultyModel, fail_at
from sglite.runtime.model.scripted import ScriptedModel
from sglite.runtime.pages import PageBook
from sglite.runtime.radix import PrefixCache
from sglite.runtime.scheduler import Scheduler
from sglite.runtime.testing import scripted_engine


def request(prompt: str, constraint: Constraint | None = None) -> GenerateRequest:
    return GenerateRequest("r", (Text(prompt),), SamplingParams(temperature=0, max_new_tokens=40), constraint)


async def text_of(engine: Any, asked: GenerateRequest) -> str:
    return "".join([chunk.text async for chunk in engine.generate(asked)])


async def texts(engine: Any, requests: list[GenerateRequest]) -> list[str]:
    return await asyncio.gather(*[text_of(engine, asked) for asked in requests])


@pytest.mark.parametrize("step", range(0, 12, 3))
def test_row_30_a_forward_pass_that_raises_loses_nobody(step: int) -> None:
    """The step is run again row by row: the answers are those of an engine without faults."""
    requests = [request(text) for text in ("a", "neighbour", "third one")]
    with scripted_engine() as engine:
        alone = asyncio.run(texts(engine, requests))
    model = FaultyModel(
        ScriptedModel(byte_tokenizer().vocab_size), fail_at(step, RuntimeError("a fault at /secret/path"))
    )
    with scripted_engine(model=model) as engine:
        assert asyncio.run(texts(engine, requests)) == alone
        engine._core.scheduler.check()


def test_row_30_a_sampler_that_raises_for_one_row_ends_its_request_alone() -> None:
    def script(history: list[int]) -> int:
        if history[0] == ord("c") and len(history) > 5:
            raise RuntimeError("a fault at /secret/path")
        return 97 + sum(history) % 26

    async def story(engine: Any) -> list[Any]:
        asked = [request(text) for text in ("a", "c", "neighbour", "third one")]
        return await asyncio.gather(*[text_of(engine, r) for r in asked], return_exceptions=True)

    with scripted_engine(script) as engine:
        a, bad, b, c = asyncio.run(story(engine))
        assert [a, b, c] == asyncio.run(texts(engine, [request("a"), request("neighbour"), request("third one")]))
        engine._core.scheduler.check()
    assert isinstance(bad, RequestError) and "secret" not in str(bad)


class FaultyBook(PageBook):
    """Fails at one call, before it hands anything out."""

    def __init__(self, total: int, call: int) -> None:
        super().__init__(total)
        self.left = call

    def allocate(self, n: int) -> list[int]:
        self.left -= 1
        if self.left == -1:
            raise MemoryError("a fault at 0x7f00")
        return super().allocate(n)


def test_row_30_the_allocator_fails_at_every_call() -> None:
    """The sequence whose pages cannot be had ends alone, whichever call it is; the others are bitwise right."""
    requests = [request(text) for text in ("a" * 40, "neighbour", "third one", "a" * 40 + "b")]
    with scripted_engine(page_size=4) as engine:
        alone = asyncio.run(texts(engine, requests))

    async def story(engine: Any) -> list[Any]:
        return await asyncio.gather(*[text_of(engine, r) for r in requests], return_exceptions=True)

    failures = 0
    for call in range(0, 60, 2):
        with scripted_engine(page_size=4) as engine:
            book = FaultyBook(engine._core.scheduler.stats.pages_total, call)
            engine._core.scheduler = Scheduler(book, PrefixCache(book, 4), page_size=4)
            outcomes = asyncio.run(story(engine))
            book.left = -2  # no more faults
            engine._core.scheduler.check()
            assert asyncio.run(texts(engine, requests)) == alone
        bad = [outcome for outcome in outcomes if not isinstance(outcome, str)]
        assert all(isinstance(error, RequestError) and "0x" not in str(error) for error in bad) and len(bad) <= 1
        assert all(outcome in (expected, *bad) for outcome, expected in zip(outcomes, alone, strict=True))
        failures += len(bad)
    assert failures > 10


class FaultyMatcher:
    """A matcher whose ``accept`` raises what no caller expects."""

    def __init__(self, inner: Any) -> None:
        self._matcher = inner

    def accept(self, ids: Any) -> bool:
        raise RuntimeError("a fault at /secret/path")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._matcher, name)


class FaultyGrammars:
    """The grammar cache's place: every grammar's matchers raise."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def compile_async(self, constraint: Constraint) -> Future[Any]:
        grammar = self._inner.compile_async(constraint).result()

        class Faulty:
            min_tokens = grammar.min_tokens
            nbytes = grammar.nbytes

            def is_ready(self, budget: int | None) -> bool:
                return True

            def matcher(self, budget: int | None = None) -> FaultyMatcher:
                return FaultyMatcher(grammar.matcher(budget))

        future: Future[Any] = Future()
        future.set_result(Faulty())
        return future

    def counters(self) -> dict[str, Any]:
        return dict(self._inner.counters())

    def close(self) -> None:
        self._inner.close()


def test_row_30_a_grammar_that_raises_ends_its_request_alone() -> None:
    async def story(engine: Any) -> list[Any]:
        constrained = request("c", Constraint("regex", "[a-z]{30}"))
        return await asyncio.gather(*[text_of(engine, r) for r in (request("a"), constrained)], return_exceptions=True)

    with scripted_engine() as engine:
        alone = asyncio.run(text_of(engine, request("a")))
        engine._parts = replace(engine._parts, grammars=FaultyGrammars(engine._parts.grammars))
        good, bad = asyncio.run(story(engine))
        assert good == alone
        assert isinstance(bad, RequestError) and "secret" not in str(bad)
        assert asyncio.run(text_of(engine, request("a"))) == alone
        engine._core.scheduler.check()
