"""``sglite.testing``: the mock's scripts, and recordings that replay without the backend."""

from __future__ import annotations

import asyncio

import pytest

import sglite as sgl
from sglite.errors import InvalidRequestError, NotFoundError, RequestError
from sglite.protocol import Backend, Chunk, GenerateRequest, SamplingParams, Text
from sglite.testing import MockBackend, record, replay

pytest_plugins = ["sglite.testing.plugin"]


@sgl.function
def program(s, question):
    s += question + sgl.gen("a", max_tokens=16, temperature=0)
    forks = s.fork(2)
    forks += lambda i: [" a:", " b:"][i] + sgl.gen("c", max_tokens=16, temperature=0)
    forks.join()
    s += " number?" + sgl.gen("n", dtype=int, max_tokens=8, temperature=0)
    s += " " + sgl.select("d", ["red", "blue"])


def results(state):
    names = ("a", "c", "n", "d")
    return state.text(), [state[n] for n in names], [state.get_meta_info(n) for n in "an"]


def test_a_recorded_run_replays_without_the_backend(backend: Backend, tmp_path) -> None:
    path = tmp_path / "run.jsonl"
    recorded = program.run("The capital of France?", backend=record(backend, path))
    replayed = program.run("The capital of France?", backend=replay(path))
    texts, variables, metas = results(replayed)
    assert (texts, variables) == results(recorded)[:2]
    for new, old in zip(metas, results(recorded)[2], strict=True):
        assert {k: new[k] for k in ("output_ids", "finish_reason", "prompt_tokens")} == {
            k: old[k] for k in ("output_ids", "finish_reason", "prompt_tokens")
        }


def test_errors_replay_and_what_was_not_recorded_is_an_error(tmp_path) -> None:
    path = tmp_path / "run.jsonl"
    ask = sgl.function(lambda s, q: s.append(q + sgl.gen("a")))
    recorder = record(MockBackend({"bad": InvalidRequestError("no", param="prompt")}), path)
    with pytest.raises(InvalidRequestError):
        ask.run("bad", backend=recorder)["a"]
    with pytest.raises(InvalidRequestError, match="no") as caught:
        ask.run("bad", backend=replay(path))["a"]
    assert caught.value.param == "prompt"
    with pytest.raises(RequestError, match=r"no .further. answer"):
        ask.run("other", backend=replay(path))["a"]
    with pytest.raises(NotFoundError, match="no recording"):
        replay(tmp_path / "nothing")


def test_equal_requests_replay_in_order(tmp_path) -> None:
    path = tmp_path / "run.jsonl"
    ask = sgl.function(lambda s: s.append("q" + sgl.gen("a")))
    recorder = record(MockBackend(["one", "two"]), path)
    assert [ask.run(backend=recorder)["a"] for _ in range(2)] == ["one", "two"]
    replayer = replay(path)
    assert [ask.run(backend=replayer)["a"] for _ in range(2)] == ["one", "two"]


def ask(mock: MockBackend, question: str = "q", **options):
    return sgl.function(lambda s: s.append(question + sgl.gen("a", **options))).run(backend=mock)


def test_scripts() -> None:
    assert ask(MockBackend())["a"] == "ok"
    assert ask(MockBackend("always"))["a"] == "always"
    assert ask(MockBackend({"q": "first", "qu": "longer key", "z": "no"}), "a qu")["a"] == "longer key"
    assert ask(MockBackend(lambda request: request.prompt[0].value * 2))["a"] == "qq"

    async def later(request):
        await asyncio.sleep(0)
        return "later"

    assert ask(MockBackend(later))["a"] == "later"
    with pytest.raises(RequestError, match="one request more"):
        ask(MockBackend([]))["a"]


def test_constraints_are_obeyed() -> None:
    assert ask(MockBackend("no number"), dtype=int)["a"] == "0"
    assert ask(MockBackend(), choices=["x", "y"])["a"] == "x"
    assert ask(MockBackend("y"), choices=["x", "y"])["a"] == "y"
    with pytest.raises(RequestError, match="violates"):
        ask(MockBackend(["no number"]), dtype=int)["a"]


def test_counting(mock_backend: MockBackend) -> None:
    state = sgl.function(lambda s: s.append("two words" + sgl.gen("a"))).run()
    assert len(mock_backend.requests) == 1
    assert mock_backend.prompts == ["two words"]
    assert state.get_meta_info("a")["completion_tokens"] == 1
    assert mock_backend.running == 0


def test_the_mock_obeys_stop_regex() -> None:
    @sgl.function
    def counting(s, pattern):
        s += "count" + sgl.gen("x", stop_regex=pattern)
        return s["x"]

    mock = MockBackend("one two 3 four")
    state = counting.run("[0-9]", backend=mock)
    assert state.ret_value == "one two "
    assert state.get_meta_info("x")["finish_reason"] == {"type": "stop", "matched": "[0-9]"}
    with pytest.raises(InvalidRequestError, match="stop_regex"):
        counting.run("[", backend=mock)


@sgl.function
def everything(s):
    s += sgl.user("q") + sgl.assistant(sgl.gen("a", stop=["z"], return_logprob=True, n=2))
    forks = s.fork(2)
    forks += sgl.gen("b", min_tokens=3)
    forks.join("concate_and_append")
    s += sgl.gen("c", choices=["yes", "no"]) + sgl.gen("d", regex="[0-9]{2}")


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_at_once_is_the_answer_that_streams(stream: bool) -> None:
    """The fast path and its plain twin: chunks out of ``answer``, and the same chunks over the event loop."""

    class Streaming(MockBackend):
        async def generate(self, request):
            async for chunk in super().generate(request):
                yield chunk

    fast, plain = MockBackend("one twoz"), Streaming("one twoz")
    assert fast.answer is not None and plain.answer is None
    states = [everything.run(backend=backend, stream=stream) for backend in (fast, plain)]
    texts = ["".join(state.text_iter()) for state in states]
    assert texts[0] == texts[1] and "one two" in texts[0]
    assert states[0].messages() == states[1].messages()
    assert [state["a"] for state in states] == [["one two"] * 2] * 2
    assert [state["d"] for state in states] == [states[0]["d"]] * 2
    tokens = [[entry["output_token_logprobs"] for entry in state.get_meta_info("a")] for state in states]
    assert tokens[0] == tokens[1]
    for ours, theirs in zip(fast.requests, plain.requests, strict=True):
        assert (ours.prompt, ours.sampling) == (theirs.prompt, theirs.sampling)


def test_min_tokens_are_there() -> None:
    @sgl.function
    def program(s):
        s += "q" + sgl.gen("a", min_tokens=4)

    state = program.run(backend=MockBackend("one"))
    assert state["a"] == "one ok ok ok"
    assert state.get_meta_info("a")["completion_tokens"] == 4


@pytest.mark.parametrize("script", [None, "text"])
def test_a_regex_that_is_none_is_refused_in_words(script: str | None) -> None:
    @sgl.function
    def program(s):
        s += "q" + sgl.gen("a", regex="(")

    with pytest.raises(sgl.GrammarError, match=r"regex '\(': \S+"):
        program.run(backend=MockBackend(script))["a"]


def test_the_mock_counts_the_samples_that_best_of_does_not_show() -> None:
    request = GenerateRequest("r", (Text("hi"),), SamplingParams(n=2, best_of=5, max_new_tokens=8))

    async def chunks() -> list[Chunk]:
        return [chunk async for chunk in MockBackend("one two").generate(request)]

    usages = {chunk.index: chunk.usage for chunk in asyncio.run(chunks()) if chunk.usage}
    assert {index: usage.completion_tokens for index, usage in usages.items()} == {0: 4 * 2, 1: 2}
