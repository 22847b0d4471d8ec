"""Choosing: the four methods' arithmetic, indifference to spaces and length, and what stands in for candidates."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import sglite as sgl
from sglite.errors import ProgramError, UnsupportedError
from sglite.lang.choices import (
    PREDICTABLE,
    Scored,
    exact,
    greedy_token_selection,
    log_sum,
    robust_mean,
    token_length_normalized,
    unconditional_likelihood_normalized,
)
from sglite.protocol import CandidateScore, Capabilities, Chunk, Finish, GenerateRequest, TokenLogprob, Usage
from sglite.testing import EVERYTHING, MockBackend


class Scorer(MockBackend):
    """Scores candidates with given logprobs, one per character token; unknown ones are unlikely."""

    def __init__(self, table: dict[str, list[float]]) -> None:
        super().__init__()
        self.table = table

    async def generate(self, request: GenerateRequest):
        self.requests.append(request)
        scores = tuple(CandidateScore(text, row(text, self.table.get(text))) for text in request.candidates)
        yield Chunk(finish=Finish("stop"), usage=Usage(prompt_tokens=3), scores=scores)


def row(text: str, logprobs: list[float] | None = None) -> tuple[TokenLogprob, ...]:
    values = logprobs if logprobs is not None else [-9.0] * len(text)
    pieces = [text[i : i + 1] for i in range(len(values) - 1)] + [text[len(values) - 1 :]]
    return tuple(TokenLogprob(sum(piece.encode()), lp, piece) for piece, lp in zip(pieces, values, strict=True))


def choose(backend, choices, **options):
    @sgl.function
    def pick(s):
        s += "Q:" + sgl.select("x", choices, **options)

    return pick.run(backend=backend)


def test_one_request_scores_everything() -> None:
    backend = Scorer({"yes": [-1.0], "no": [-2.0]})
    state = choose(backend, ["yes", "no"])
    assert state["x"] == "yes"
    assert len(backend.requests) == 1
    assert set(backend.requests[0].candidates) == {"yes", "no", " yes", " no"}
    assert state.text() == "Q:yes"


@pytest.mark.parametrize("choices", [["YES", "NO"], [" YES", " NO"], ["YES", " NO"]])
def test_a_leading_space_changes_nothing(choices) -> None:
    table = {"YES": [-1.0], "NO": [-2.0], " YES": [-12.0], " NO": [-11.0]}
    assert choose(Scorer(table), choices)["x"].strip() == "YES"


def test_logprob_lists_hold_exactly_the_choices_tokens_as_they_are_written() -> None:
    table = {" ab": [-1.0, 0.0], " cd": [-2.0, -3.0, -4.0], "ab": [-5.0, -5.0], "cd": [-5.0, -5.0]}
    meta = choose(Scorer(table), [" ab", " cd"]).get_meta_info("x")
    assert [["".join(t for _, _, t in row)] for row in meta["input_token_logprobs"]] == [[" ab"], [" cd"]]
    assert meta["normalized_prompt_logprobs"] == [-0.5, -3.0]
    assert meta["choices_method"] == "token_length_normalized"


def test_a_very_long_wrong_option_does_not_win() -> None:
    long = "London, " * 20
    table = {"Paris": [-1.2], long: [-4.0] + [-0.02] * 80}
    assert choose(Scorer(table), [long, "Paris"])["x"] == "Paris"
    fluent = "the city of London, as everybody knows"
    table = {"Paris": [-1.2], fluent: [-0.8, -0.3, -0.1, -6.0] + [-0.4] * 30}
    assert choose(Scorer(table), [fluent, "Paris"])["x"] == "Paris"


def test_a_long_right_option_wins_over_a_short_wrong_one() -> None:
    long = "it is Paris, of course"
    assert choose(Scorer({"Rome": [-3.0], long: [-0.5] + [-0.2] * 20}), ["Rome", long])["x"] == long


logprobs = st.lists(st.floats(-20, 0), min_size=1, max_size=12)


@given(logprobs, logprobs)
def test_what_follows_never_raises_a_score(beginning, more) -> None:
    for fewest in range(1, len(beginning) + 1):
        assert robust_mean([*beginning, *more], fewest) <= robust_mean(beginning, fewest) + 1e-9


@given(logprobs)
def test_equal_lengths_are_compared_by_their_mean(values) -> None:
    assert robust_mean(values, len(values)) == pytest.approx(math.fsum(values) / len(values))


@given(logprobs, st.lists(st.floats(PREDICTABLE + 1e-6, 0), max_size=20))
def test_predictable_tokens_change_nothing(values, padding) -> None:
    fewest = len(values)
    assert robust_mean([*values, *padding], fewest) == robust_mean(values, fewest)


def judge(method, *rows):
    return method.judge(Scored(tuple(map(str, range(len(rows)))), rows)).pick(0)


def test_a_logprob_of_zero_counts() -> None:
    assert judge(token_length_normalized, row("ab", [0.0, -2.0]), row("cd", [-1.1, -1.1])) == 0


def test_a_choice_that_another_one_continues() -> None:
    foo, foobar = row("foo", [-0.1]), (*row("foo", [-0.1]), TokenLogprob(7, math.log(0.9), "bar"))
    assert judge(token_length_normalized, foo, foobar) == 1
    foobar = (*row("foo", [-0.1]), TokenLogprob(7, math.log(0.1), "bar"))
    assert judge(token_length_normalized, foo, foobar) == 0
    assert judge(exact, foo, foobar) == 0


def test_greedy_goes_token_by_token() -> None:
    rows = row("ab", [-0.5, -9.0]), row("cd", [-0.6, -0.1])
    assert judge(greedy_token_selection, *rows) == 0
    assert judge(token_length_normalized, *rows) == 1
    overlapping = row("ab", [-0.5, -1.0]), row("abc", [-0.5, -1.0, -0.6])
    assert judge(greedy_token_selection, *overlapping) == 1, "the shorter one is extended with its mean, -0.75"


def test_unconditional_takes_away_what_is_common_anyway() -> None:
    scored = Scored(
        ("common", "rare"),
        (row("c", [-1.0]), row("r", [-2.0])),
        unconditional=(row("c", [-1.5]), row("r", [-8.0])),
    )
    verdict = unconditional_likelihood_normalized.judge(scored)
    assert verdict.pick(0) == 1
    assert verdict.details["normalized_unconditional_prompt_logprobs"] == [0.5, 6.0]


def test_unconditional_asks_a_second_time_without_the_prompt() -> None:
    backend = Scorer({"a": [-1.0], "b": [-1.5], " a": [-9.0], " b": [-9.0]})
    state = choose(backend, ["a", "b"], choices_method=sgl.unconditional_likelihood_normalized)
    assert len(backend.requests) == 2
    assert len(state.get_meta_info("x")["unconditional_token_logprobs"]) == 2
    assert len(state.trace()) == 2


def test_exact_sums_both_spellings() -> None:
    table = {"a": [-2.0], " a": [-2.0], "b": [-1.5], " b": [-20.0]}
    state = choose(Scorer(table), ["a", "b"], choices_method="exact")
    assert state["x"] == "a"
    scores = state.get_meta_info("x")["scores"]
    assert scores["a"] == pytest.approx(math.log(2 * math.exp(-2.0)), rel=1e-3)
    assert sum(state.get_meta_info("x")["probabilities"]) == pytest.approx(1)


@given(st.lists(st.floats(-50, 0), min_size=1))
def test_log_sum(values) -> None:
    assert log_sum(values) == pytest.approx(math.log(sum(map(math.exp, values))))


def test_temperature_draws_by_the_scores() -> None:
    table = {"a": [-1.0], "b": [-1.0], "c": [-60.0]}
    drawn = {choose(Scorer(table), ["a", "b", "c"], temperature=1.0)["x"] for _ in range(60)}
    assert drawn == {"a", "b"}
    with pytest.raises(ProgramError, match="temperature"):
        sgl.select("x", ["a"], temperature=-1)


@pytest.mark.parametrize("method", ["token_length_normalized", "greedy_token_selection", "exact"])
def test_scoring_requests_stand_in_for_candidates(method) -> None:
    backend = MockBackend(capabilities=replace(EVERYTHING, candidates=False))
    state = choose(backend, [" yes indeed", " no"], choices_method=method)
    assert state["x"] in (" yes indeed", " no")
    assert all(request.sampling.max_new_tokens == 0 for request in backend.requests)
    rows = state.get_meta_info("x")["input_token_logprobs"]
    assert ["".join(text for _, _, text in row) for row in rows] == [" yes indeed", " no"]


def test_a_choices_constraint_stands_in_last() -> None:
    capabilities = Capabilities(constraints=frozenset({"choices"}))
    backend = MockBackend("no", capabilities=capabilities)
    assert choose(backend, ["yes", "no"])["x"] == "no"
    with pytest.raises(UnsupportedError, match="greedy_token_selection"):
        choose(backend, ["yes", "no"], choices_method=sgl.greedy_token_selection)["x"]


def test_one_choice_is_a_choice() -> None:
    assert choose(Scorer({}), ["only"])["x"] == "only"
