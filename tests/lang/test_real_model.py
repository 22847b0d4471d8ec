"""Programs on the embedded model: prefixes found token for token, choices that make sense, recordings that replay."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

import sglite as sgl
from sglite.runtime.engine import Engine
from sglite.testing import record, replay

PAGE = 16


@pytest.fixture(scope="module")
def model(smollm2) -> Iterator[Engine]:
    engine = Engine(model="smollm2-135m", threads=2, context_length=1024, kv_tokens=4096, page_size=PAGE)
    yield engine
    asyncio.run(engine.aclose())


@sgl.function
def six_turns(s):
    s += sgl.system("You are a guide.")
    for i, question in enumerate(["Where is Paris?", "And Rome?", "A river?", "Food?", "Warm?", "Bye!"]):
        s += sgl.user(question) + sgl.assistant(sgl.gen(f"a{i}", max_tokens=6, temperature=0))


def test_each_turn_computes_its_new_tokens_only(model) -> None:
    trace = six_turns.run(backend=model).trace()
    earlier = 0
    for call in trace:
        assert call.cached_tokens >= earlier - PAGE, call
        earlier = call.prompt_tokens + call.new_tokens
    assert len(trace) == 6
    assert trace.divergences == []


def test_forks_share_one_prefix(model) -> None:
    @sgl.function
    def forked(s):
        s += sgl.user("Tell me about the city of Paris, its river, its food, its weather and its people, please.")
        s += sgl.assistant_begin()
        forks = s.fork(4)
        forks += lambda i: ["River:", "Food:", "Weather:", "People:"][i] + sgl.gen("x", max_tokens=3, temperature=0)
        forks.join()

    calls = forked.run(backend=model).trace().calls
    prefix = min(call.prompt_tokens for call in calls)
    assert sum(call.cached_tokens >= prefix - 2 * PAGE for call in calls) >= 3


@pytest.mark.parametrize("method", ["token_length_normalized", "greedy_token_selection", "exact"])
@pytest.mark.parametrize("choices", [["Paris", "Rome"], [" Rome", " Paris"], [" Paris", " the city of London," * 12]])
def test_the_right_choice_whatever_its_space_and_length(model, method, choices) -> None:
    @sgl.function
    def capital(s):
        s += "The capital of France is" + sgl.select("city", choices, choices_method=method)

    assert capital.run(backend=model)["city"].strip() == "Paris"


def test_a_space_changes_nothing_at_the_start_of_a_turn(model) -> None:
    @sgl.function
    def answer(s, choices):
        s += sgl.user("Is Paris in France? Answer YES or NO.") + sgl.assistant(sgl.select("x", choices))

    bare, spaced = (answer.run(choices, backend=model) for choices in (["YES", "NO"], [" YES", " NO"]))
    assert bare["x"] == spaced["x"].strip()
    scores = [list(state.get_meta_info("x")["scores"].values()) for state in (bare, spaced)]
    assert scores[0] == pytest.approx(scores[1])


def test_a_recorded_run_replays_without_the_model(model, tmp_path) -> None:
    recorded = six_turns.run(backend=record(model, tmp_path / "run.jsonl"))
    replayed = six_turns.run(backend=replay(tmp_path / "run.jsonl"))
    assert replayed.text() == recorded.text()
    assert [replayed[f"a{i}"] for i in range(6)] == [recorded[f"a{i}"] for i in range(6)]


def test_stops_and_typed_values(model) -> None:
    @sgl.function
    def typed(s):
        s += "Q: How many legs has a dog?\nA: " + sgl.gen("n", dtype=int, max_tokens=6, temperature=0)
        s += "\nA list: one, two," + sgl.gen("word", stop=",", max_tokens=8, temperature=0)

    state = typed.run(backend=model)
    assert isinstance(state.value("n"), int)
    assert "," not in state["word"]
