"""The small parts: transcripts against a plain text, reasoning piece by piece, waiting, options."""

from __future__ import annotations

import asyncio
import gc
import itertools
import threading
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglite.errors import InvalidRequestError, ProgramError
from sglite.lang.memo import PerBackend
from sglite.lang.options import NAMES, Options, changed, plan
from sglite.lang.transcript import Transcript
from sglite.lang.waiting import Signal
from sglite.protocol import SamplingParams, Tokens, prompt_text
from sglite.reasoning import FORMATS, ReasoningSplitter, reasoning_format, split_reasoning

text = st.text(max_size=4)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("say"), text, st.booleans()),
        st.tuples(st.just("add"), text),
        st.tuples(st.just("mark")),
        st.tuples(st.just("fork")),
        st.tuples(st.just("prompt")),
        st.tuples(st.just("cut")),
    ),
    max_size=30,
)


@given(steps)
def test_a_transcript_reads_like_a_plain_text(history) -> None:
    transcript, plain = Transcript(), ""
    marks = []
    for step in history:
        match step:
            case ("say", value, special):
                transcript.say(value, special=special)
                plain += value
            case ("add", value):
                transcript.add((1,), value)
                plain += value
            case ("mark",):
                marks.append((transcript.mark(), len(plain)))
            case ("fork",):
                before = transcript
                transcript = transcript.copy()
                before.say("never seen")
            case ("prompt",):
                assert prompt_text(transcript.prompt()) == plain
            case ("cut",) if marks:
                mark, at = marks.pop()
                assert prompt_text(transcript.cut(mark)) == plain[at:]
                plain = plain[:at]
        assert transcript.text() == plain
        for mark, at in marks:
            assert prompt_text(transcript.since(mark)) == plain[at:]


@given(steps)
def test_text_that_is_contiguous_is_one_segment(history) -> None:
    transcript = Transcript()
    for step in history:
        if step[0] == "say":
            transcript.say(step[1], special=step[2])
        elif step[0] == "add":
            transcript.add((1,), step[1])
    prompt = transcript.prompt()
    for a, b in itertools.pairwise(prompt):
        assert isinstance(a, Tokens) or isinstance(b, Tokens) or a.special is not b.special
    assert all(isinstance(s, Tokens) or s.value for s in prompt)


def test_copies_share_their_segments() -> None:
    transcript = Transcript()
    transcript.say("x" * 1000)
    first = transcript.prompt()
    assert all(transcript.copy().prompt() is first for _ in range(3))


def test_marks_of_before_a_restart_are_refused() -> None:
    transcript = Transcript()
    transcript.say("x")
    mark = transcript.mark()
    transcript.restart()
    with pytest.raises(ProgramError, match="rewritten"):
        transcript.since(mark)


@given(st.text(alphabet="<>/thinkx \n", max_size=40), st.integers(1, 5), st.sampled_from(["qwen3", "deepseek-r1"]))
def test_reasoning_is_split_alike_however_it_arrives(tail, size, model) -> None:
    for whole in (tail, f"<think>{tail}", f"<think> a </think>{tail}", f"a</think> {tail}"):
        splitter = ReasoningSplitter(reasoning_format(model))
        pieces = [splitter.feed(whole[i : i + size]) for i in range(0, len(whole), size)] + [splitter.close()]
        assert ("".join(p[0] for p in pieces), "".join(p[1] for p in pieces)) == split_reasoning(whole, model)


@pytest.mark.parametrize(
    ("whole", "model", "parts"),
    [
        ("<think>\nwhy\n</think>\n\nbecause", "qwen3", ("why", "because")),
        ("because", "qwen3", ("", "because")),
        ("why</think>because", "deepseek-r1", ("why", "because")),
        ("<think>why</think>because", "deepseek-r1", ("why", "because")),
        ("<think>why", "qwen3", ("why", "")),
        ("a <think>b</think>", "qwen3", ("", "a <think>b</think>")),
        ("◁think▷why◁/think▷because", "kimi", ("why", "because")),
    ],
)
def test_reasoning_formats(whole, model, parts) -> None:
    assert split_reasoning(whole, model) == parts
    with pytest.raises(InvalidRequestError, match="known: deepseek"):
        reasoning_format("gpt-2")
    assert "qwen3" in FORMATS


def test_a_signal_wakes_threads_and_loops() -> None:
    signal, flag = Signal(), []

    async def wait():
        await signal.until(lambda: bool(flag))
        return "awake"

    async def main():
        task = asyncio.ensure_future(wait())
        await asyncio.sleep(0)
        threading.Thread(target=lambda: (flag.append(1), signal.notify())).start()
        return await task

    assert not signal.block_until(lambda: bool(flag), timeout=0.01)
    assert asyncio.run(main()) == "awake"
    assert signal.block_until(lambda: bool(flag))


def test_a_signal_acts_once() -> None:
    signal, flag, acts = Signal(), [], []
    signal.when(lambda: bool(flag), lambda: acts.append(1))
    signal.notify()
    assert acts == []
    flag.append(1)
    signal.notify()
    signal.notify()
    signal.when(lambda: True, lambda: acts.append(2))
    assert acts == [1, 2]


def test_options_are_merged_once_and_the_authors_win() -> None:
    base = Options(SamplingParams(temperature=0.5, top_p=0.9))
    made = plan(base, (("temperature", 0.0),))
    assert (made.sampling.temperature, made.sampling.top_p) == (0.0, 0.9)
    assert plan(base, (("temperature", 0.0),)) is made
    assert changed(made.sampling) == {"temperature", "top_p"}
    assert {"max_new_tokens", "return_logprob", "stop"} <= NAMES


def test_names_are_what_sglang_calls_them() -> None:
    expected = "max_new_tokens n temperature top_p top_k min_p frequency_penalty presence_penalty ignore_eos stop "
    expected += "stop_token_ids stop_regex return_logprob logprob_start_len top_logprobs_num return_text_in_logprobs"
    assert set(expected.split()) <= NAMES


def test_what_is_remembered_goes_by_identity_and_ends_with_the_backend() -> None:
    @dataclass
    class Unhashable:
        name: str = "equal"

    class Slotted:
        __slots__ = ()

    memo: PerBackend[int] = PerBackend()
    first, second = Unhashable(), Unhashable()
    assert (memo.put(first, 1), memo.get(first), memo.get(second)) == (1, 1, None)
    assert (memo.put(Slotted(), 2), memo.get(Slotted())) == (2, None)
    del first
    gc.collect()
    assert memo._known == {}
    memo.put(second, 3)
    memo.forget(second)
    assert memo.get(second) is None
