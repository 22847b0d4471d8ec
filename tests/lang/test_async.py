"""``async def`` programs, streams, cancellation: one loop, no thread per anything."""

from __future__ import annotations

import asyncio
import gc
import signal
import threading
import time

import pytest

import sglite as sgl
from sglite.errors import AbortedError, ProgramError
from sglite.runtime.testing import scripted_engine
from sglite.testing import MockBackend


def run(coroutine):
    return asyncio.run(coroutine)


@sgl.function
async def ask(s, question):
    s += question + sgl.gen("a")
    return await s.get("a")


def test_awaiting_a_variable() -> None:
    async def main():
        return await ask.arun("q", backend=MockBackend("yes"))

    state = run(main())
    assert (state.ret_value, state["a"], state.text()) == ("yes", "yes", "qyes")


def test_async_programs_run_from_plain_code_too() -> None:
    mock = MockBackend("yes")
    assert ask.run("q", backend=mock).ret_value == "yes"
    assert [s.ret_value for s in ask.run_batch([{"question": "q"}] * 3, backend=mock)] == ["yes"] * 3
    assert "".join(ask.run("q", backend=mock, stream=True).text_iter("a")) == "yes"


def test_plain_programs_are_awaited_too() -> None:
    @sgl.function
    def plain(s):
        s += "q" + sgl.gen("a")
        return s["a"]

    async def main():
        states = await asyncio.gather(*(plain.arun(backend=mock) for _ in range(5)))
        return [state.ret_value for state in states]

    mock = MockBackend("yes", latency=0.01)
    assert run(main()) == ["yes"] * 5


def test_four_forks_streamed_side_by_side() -> None:
    @sgl.function
    async def streams(s):
        s += "go"
        forks = s.fork(4)
        forks += lambda i: f" {i}" + sgl.gen("x")
        order = []

        async def read(i):
            async for piece in forks[i].text_async_iter("x"):
                order.append((i, piece))  # noqa: PERF401  (the order between streams counts)

        await asyncio.gather(*(read(i) for i in range(4)))
        forks.join()
        return order, await s.get("x")

    answers = {str(i): f"a{i} b{i} c{i}" for i in range(4)}

    async def main():
        return await streams.arun(backend=MockBackend(answers, pace=0.005))

    order, texts = run(main()).ret_value
    assert texts == list(answers.values())
    for i in range(4):
        assert "".join(piece for j, piece in order if j == i) == answers[str(i)]
    first = [i for i, _ in order][:8]
    assert len(set(first)) == 4, "the streams take turns"


def test_blocking_the_loop_is_refused() -> None:
    @sgl.function
    async def wrong(s):
        s += "q" + sgl.gen("a")
        return s["a"]

    @sgl.function
    async def nested(s):
        ask.run("q", backend=MockBackend("x"))

    async def main(program):
        await program.arun(backend=MockBackend("x", latency=0.01))

    with pytest.raises(ProgramError, match="await it instead"):
        run(main(wrong))
    run(main(nested))  # its own loop is not the one the inner program needs
    with pytest.raises(ProgramError, match="await it instead"):
        nested.run(backend=MockBackend("x"))


def test_an_unknown_name_does_not_hang() -> None:
    @sgl.function
    async def unknown(s):
        s += "q" + sgl.gen("a")
        await s.get("b")

    async def main():
        await unknown.arun(backend=MockBackend())

    with pytest.raises(ProgramError, match="'b'"):
        run(main())
    state = ask.run("q", backend=MockBackend(), stream=True)
    with pytest.raises(ProgramError, match="'b'"):
        list(state.text_iter("b"))


@pytest.mark.parametrize("count", [100, 1000])
def test_many_programs_at_once_take_the_time_of_a_few(count) -> None:
    mock = MockBackend("x", latency=0.05)
    before = threading.active_count()

    async def main():
        states = [asyncio.ensure_future(ask.arun("q", backend=mock)) for _ in range(count)]
        await asyncio.gather(*states)
        return threading.active_count()

    began = time.perf_counter()
    threads = run(main())
    assert time.perf_counter() - began < count * 0.05 / 5
    assert mock.most_running == count
    assert threads <= before + 1


def test_a_thousand_plain_programs_with_four_forks_each() -> None:
    @sgl.function
    def tree(s, i):
        s += f"{i}"
        forks = s.fork(4)
        forks += lambda k: f" {k}" + sgl.gen("x")
        forks.join()
        return s["x"]

    mock = MockBackend("x", latency=0.001)
    states = tree.run_batch([{"i": i} for i in range(1000)], backend=mock)
    assert all(state.ret_value == ["x"] * 4 for state in states)
    assert len(mock.requests) == 4000


def test_a_thousand_programs_with_four_forks_each_on_the_real_scheduler() -> None:
    """More than the engine runs at once and more than its queue holds: it is waited for, and nothing is lost."""

    @sgl.function
    def forking(s, i):
        s += f"Program {i % 7}: "
        forks = s.fork(4)
        forks += lambda k: f"branch {k}" + sgl.gen("v", max_tokens=2)
        forks.join()
        s += sgl.gen("end", max_tokens=2)

    threads = threading.active_count()
    with scripted_engine(kv_tokens=16_384, max_queue=512) as engine:
        began = time.perf_counter()
        states = forking.run_batch([{"i": i} for i in range(1_000)], backend=engine, temperature=0)
        assert time.perf_counter() - began < 60, "bounded, on a machine that is busy too"
        assert threading.active_count() < threads + 50
    assert [state.error() for state in states] == [None] * 1_000
    assert len({(tuple(state["v"]), state["end"]) for state in states}) == 7, "equal programs, equal answers"
    assert all(len(state.trace()) == 5 for state in states)


def test_what_a_streaming_program_returns_is_waited_for() -> None:
    assert ask.run("q", backend=MockBackend("yes"), stream=True).ret_value == "yes"

    async def main():
        state = await ask.arun("q", backend=MockBackend("yes"), stream=True)
        with pytest.raises(ProgramError, match="the program still runs"):
            _ = state.ret_value
        async for _ in state.text_async_iter():
            pass
        return state.ret_value

    assert run(main()) == "yes"


def test_forks_of_one_program_run_at_once_without_threads() -> None:
    @sgl.function
    def wide(s):
        forks = s.fork(50)
        forks += "q" + sgl.gen("x")
        forks.join()
        return threading.active_count()

    mock = MockBackend("x", latency=0.02)
    before = threading.active_count()
    state = wide.run(backend=mock)
    assert state["x"] == ["x"] * 50
    assert mock.most_running == 50
    assert state.ret_value <= before + 1


def test_cancelling_the_caller_aborts_the_requests() -> None:
    mock = MockBackend("x", latency=60)

    @sgl.function
    async def two(s):
        forks = s.fork(2)
        forks += "q" + sgl.gen("x")
        await forks.wait()

    async def main():
        task = asyncio.ensure_future(two.arun(backend=mock))
        while mock.running < 2:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while mock.running:
            await asyncio.sleep(0)

    run(asyncio.wait_for(main(), 20))
    assert len(mock.aborted) == 2


def until(condition) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_closing_a_stream_stops_that_generation_and_the_program_goes_on() -> None:
    mock = MockBackend(["one two three four five", "after"], pace=0.02)

    @sgl.function
    def program(s):
        s += "q" + sgl.gen("x")
        s += "|" + sgl.gen("y")

    state = program.run(backend=mock, stream=True)
    stream = state.text_iter("x")
    assert next(stream) == "one"
    stream.close()
    text = state["x"]
    assert "one two three four five".startswith(text)
    assert text != "one two three four five"
    assert state.get_meta_info("x")["finish_reason"]["type"] == "abort"
    assert state["y"] == "after"
    assert state.text() == f"q{text}|after"
    assert mock.aborted == [mock.requests[0].id]


def test_closing_the_stream_of_a_whole_program_ends_it() -> None:
    mock = MockBackend("one two three", pace=0.02)

    @sgl.function
    def program(s):
        s += "q" + sgl.gen("x")
        s += sgl.gen("y")

    state = program.run(backend=mock, stream=True)
    stream = state.text_iter()
    next(stream)
    stream.close()
    until(lambda: not mock.running)
    with pytest.raises(AbortedError):
        state["y"]


def test_streaming_with_meta_data() -> None:
    @sgl.function
    def program(s):
        s += "q" + sgl.gen("x", return_logprob=True)

    async def main():
        state = program.run(backend=MockBackend("one two three", pace=0.002), stream=True)
        return [pair async for pair in state.text_async_iter("x", return_meta_data=True)]

    pairs = run(main())
    assert "".join(text for text, _ in pairs) == "one two three"
    counts = [len(meta["output_token_logprobs"]) for _, meta in pairs]
    assert counts == sorted(counts)
    assert counts[-1] == 3


def test_a_stream_that_fails_raises_at_its_end() -> None:
    async def broken(request):
        raise ValueError("boom")

    @sgl.function
    def program(s):
        s += "begin " + sgl.gen("x")

    state = program.run(backend=MockBackend(broken), stream=True)
    pieces = []
    with pytest.raises(sgl.RequestError, match="boom"):
        for piece in state.text_iter():
            pieces.append(piece)  # noqa: PERF402  (what came before the error counts)
    assert "".join(pieces) == "begin "


def test_a_streaming_body_that_raises() -> None:
    @sgl.function
    def program(s):
        s += "text"
        raise KeyError("mine")

    state = program.run(backend=MockBackend(), stream=True)
    with pytest.raises(KeyError, match="mine"):
        list(state.text_iter())
    assert isinstance(state.error(), KeyError)


def test_a_program_that_never_reads_its_variables_is_done_when_run_returns() -> None:
    mock = MockBackend("x", latency=0.01)

    @sgl.function
    def silent(s):
        for _ in range(3):
            s += "q" + sgl.gen()

    silent.run(backend=mock)
    assert (len(mock.requests), mock.running) == (3, 0)


def test_a_dropped_state_aborts_what_nobody_can_read() -> None:
    mock = MockBackend("x", latency=60)

    @sgl.function
    def program(s):
        s += "q"
        forks = s.fork(2)
        forks += sgl.gen("x")
        until(lambda: mock.running == 2)
        del forks
        gc.collect()

    program.run(backend=mock)
    until(lambda: not mock.running)
    assert len(mock.aborted) == 2


def test_a_joined_group_may_be_dropped() -> None:
    mock = MockBackend("x", latency=0.02)

    @sgl.function
    def program(s):
        forks = s.fork(2)
        forks += "q" + sgl.gen("x")
        forks.join()
        del forks
        gc.collect()

    assert program.run(backend=mock)["x"] == ["x", "x"]


def test_reading_from_another_thread_waits_for_the_body() -> None:
    gate = threading.Event()

    @sgl.function
    def program(s):
        gate.wait(20)
        s += "q" + sgl.gen("x")

    state = program.run(backend=MockBackend("late"), stream=True)
    threading.Timer(0.01, gate.set).start()
    assert state["x"] == "late"


def test_leaving_a_generator_of_a_batch_early_aborts_the_rest() -> None:
    async def answer(request):
        if request.prompt[0].value != "0":
            await asyncio.sleep(60)
        return "x"

    mock = MockBackend(answer)

    @sgl.function
    def program(s, i):
        s += f"{i}" + sgl.gen("x")

    states = program.run_batch([(i,) for i in range(10)], backend=mock, generator_style=True, num_threads=4)
    assert next(states)["x"] == "x"
    until(lambda: mock.running == 4)
    states.close()
    until(lambda: not mock.running)
    assert len(mock.requests) == 5


class Narrow(MockBackend):
    """Takes two requests at a time and refuses the others."""

    async def generate(self, request):
        if self.running >= 2:
            raise sgl.OverloadedError("full")
        async for chunk in super().generate(request):
            yield chunk


def test_a_full_queue_makes_programs_wait() -> None:
    mock = Narrow("x", latency=0.001)

    @sgl.function
    def wide(s):
        forks = s.fork(30)
        forks += "q" + sgl.gen("x")
        forks.join()

    assert wide.run(backend=mock)["x"] == ["x"] * 30
    assert len(mock.requests) == 30


def test_a_queue_full_of_others_is_an_error() -> None:
    mock = Narrow("x")
    mock.running = 2

    @sgl.function
    def wide(s):
        forks = s.fork(5)
        forks += "q" + sgl.gen("x")
        forks.join()

    with pytest.raises(sgl.OverloadedError, match="full"):
        wide.run(backend=mock)["x"]


def test_waiting_for_room_can_be_cancelled() -> None:
    mock = Narrow("x", latency=60)

    @sgl.function
    def wide(s):
        forks = s.fork(5)
        forks += "q" + sgl.gen("x")
        until(lambda: mock.running == 2)
        s.cancel()
        return forks

    forks = wide.run(backend=mock).ret_value
    for fork in forks:
        with pytest.raises(AbortedError):
            fork["x"]
    until(lambda: not mock.running)


def test_ctrl_c_aborts_the_requests() -> None:
    mock = MockBackend("x", latency=60)

    @sgl.function
    def program(s):
        forks = s.fork(3)
        forks += "q" + sgl.gen("x")
        forks.join()
        s["x"]

    def interrupt() -> None:
        until(lambda: mock.running == 3)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        program.run(backend=mock)
    until(lambda: not mock.running)
    assert len(mock.aborted) == 3


def test_ctrl_c_ends_a_batch() -> None:
    mock = MockBackend("x", latency=60)

    @sgl.function
    def program(s, i):
        s += "q" + sgl.gen("x")
        return s["x"]

    def interrupt() -> None:
        until(lambda: mock.running == 4)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        program.run_batch([(i,) for i in range(10)], backend=mock, num_threads=4)
    until(lambda: not mock.running)
    assert len(mock.requests) == 4


def test_thousands_of_states_in_one_process() -> None:
    before = threading.active_count()
    states = ask.run_batch([{"question": "q"}] * 3000, backend=MockBackend("x"))
    assert all(state.ret_value == "x" for state in states)
    assert threading.active_count() <= before + 1


def test_waiting_for_a_state_waits_for_its_forks() -> None:
    @sgl.function
    async def program(s):
        forks = s.fork(2)
        forks += "q" + sgl.gen("x")
        await s.wait()
        return [fork["x"] for fork in forks]

    assert program.run(backend=MockBackend("ok", latency=0.01)).ret_value == ["ok", "ok"]
