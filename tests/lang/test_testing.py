"""``sglite.testing``: the mock's scripts, and recordings that replay without the backend."""

from __future__ import annotations

import asyncio

import pytest

import sglite as sgl
from sglite.errors import InvalidRequestError, NotFoundError, RequestError
from sglite.protocol import Backend
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
