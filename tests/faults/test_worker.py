"""Rows 31 and 32 of the list: the worker dies, hangs, crashes again and again; its parent dies or is told to end."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgpack
import pytest
from bench import children
from scripted_worker import DEADLY

from sglite.errors import InvalidRequestError, ModelLoadError, RequestError, SgliteError, UnavailableError
from sglite.protocol import Chunk, Constraint, Finish, GenerateRequest, SamplingParams, Text, Tokens, Usage
from sglite.runtime.testing import scripted_engine
from sglite.runtime.worker import process, wire
from sglite.runtime.worker.config import WorkerConfig
from sglite.runtime.worker.supervisor import Hooks, Supervisor

COMMAND = (sys.executable, str(Path(__file__).parent / "scripted_worker.py"))
GREEDY = SamplingParams(temperature=0, max_new_tokens=40)
ENDLESS = SamplingParams(temperature=0, max_new_tokens=100_000, ignore_eos=True)
ROOM = {"context_length": 200_000, "kv_tokens": 400_000}


def request(prompt: str | list[int] = "hello", sampling: SamplingParams = GREEDY) -> GenerateRequest:
    segment = Text(prompt) if isinstance(prompt, str) else Tokens(tuple(prompt))
    return GenerateRequest("r", (segment,), sampling)


async def text(backend: Any, asked: GenerateRequest) -> str:
    return "".join([chunk.text async for chunk in backend.generate(asked)])


@asynccontextmanager
async def supervised(options: dict[str, Any] | None = None, **config: Any) -> AsyncIterator[Supervisor]:
    """A supervisor whose first worker is ready, unless it gave up first."""
    told = asyncio.Event()
    supervisor = Supervisor(options or {}, WorkerConfig(**config), command=COMMAND, hooks=Hooks(told.set, told.set))
    supervisor.start()
    try:
        await told.wait()
        yield supervisor
    finally:
        await supervisor.aclose()


async def ready_again(supervisor: Supervisor, previous: int | None) -> None:
    async with asyncio.timeout(60):
        while True:
            try:
                supervisor.check_ready()
                if supervisor.pid != previous:
                    return
            except UnavailableError:
                pass
            await asyncio.sleep(0.02)


def story(tell: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(tell())  # type: ignore[arg-type]
    assert children() == [], "no orphans"


# ------------------------------------------------------------------------------------------------------- the same verb


def test_a_worker_answers_as_the_engine_does() -> None:
    async def tell() -> None:
        from scripted_worker import _script

        with scripted_engine(_script) as engine:
            async with supervised() as worker:
                asked = [
                    request("a" * n, SamplingParams(temperature=0, max_new_tokens=30, n=1 + n % 3)) for n in (1, 5, 20)
                ]
                for one in asked:
                    ours = [c async for c in engine.generate(one)]
                    theirs = [c async for c in worker.generate(one)]
                    assert [(c.index, c.text, c.ids) for c in theirs] == [(c.index, c.text, c.ids) for c in ours]
                    assert [c.finish for c in theirs] == [c.finish for c in ours]
                assert await worker.info() == await engine.info()
                assert await worker.tokenize((Text("héllo"),)) == await engine.tokenize((Text("héllo"),))
                assert await worker.detokenize([104, 105]) == "hi"
                await worker.check_constraint(Constraint("regex", "[0-9]+"))
                with pytest.raises(InvalidRequestError, match="unclosed group"):
                    await worker.check_constraint(Constraint("regex", "(("))
                await worker.flush_cache()
                await worker.abort("nobody")
                await worker.end_program("none")
                assert (await worker.stats())["pages_total"] == (await engine.stats())["pages_total"]

    story(tell)


def test_refusals_keep_their_type_and_field() -> None:
    async def tell() -> None:
        async with supervised() as worker:
            for bad in (request([]), request([-1]), request([10**30]), request("\ud800"), request("a" * 5000)):
                with pytest.raises(InvalidRequestError) as caught:
                    await text(worker, bad)
                assert caught.value.param == "prompt" or "sent" in str(caught.value)
            assert await text(worker, request())

    story(tell)


def test_leaving_aborts_within_a_step_and_neighbours_go_on() -> None:
    async def tell() -> None:
        async with supervised(ROOM) as worker:
            alone = await text(worker, request("neighbour"))
            chunks = worker.generate(request("x", ENDLESS))
            await anext(chunks)
            neighbour = asyncio.create_task(text(worker, request("neighbour")))
            await chunks.aclose()  # type: ignore[attr-defined]
            assert await neighbour == alone
            async with asyncio.timeout(5):
                while (await worker._ask("stats"))["running"]:
                    pass

    story(tell)


def test_an_answer_nobody_reads_is_not_kept_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "MAX_WAITING", 50)

    async def tell() -> None:
        async with supervised(ROOM) as worker:
            chunks = worker.generate(request("x", ENDLESS))
            await anext(chunks)
            async with asyncio.timeout(10):
                while (await worker._ask("stats"))["running"]:
                    pass
            seen = 0
            with pytest.raises(RequestError, match="not read in time"):
                async for _ in chunks:
                    seen += 1
            assert seen == 50
            assert await text(worker, request())

    story(tell)


# ------------------------------------------------------------------------------------------------------ row 31: kill -9


def test_a_killed_worker_ends_its_calls_with_an_error_and_is_replaced() -> None:
    async def tell() -> None:
        async with supervised(ROOM) as worker:
            canary = await text(worker, request())
            chunks = worker.generate(request("x", ENDLESS))
            await anext(chunks)
            queued = [asyncio.create_task(text(worker, request("y", ENDLESS))) for _ in range(3)]
            await asyncio.sleep(0)
            dead = worker.pid
            assert dead is not None
            began = time.monotonic()
            os.kill(dead, signal.SIGKILL)
            with pytest.raises(UnavailableError, match="process ended"):
                async for _ in chunks:
                    pass
            for outcome in await asyncio.gather(*queued, return_exceptions=True):
                assert isinstance(outcome, UnavailableError)
            assert time.monotonic() - began < 2.0, "nobody waits for a dead worker"
            with pytest.raises(UnavailableError, match="starting again"):
                await text(worker, request())
            with pytest.raises(UnavailableError):
                worker.check_ready()
            assert (await worker.info()).name == "scripted"  # what is known stays known
            await ready_again(worker, dead)
            assert await text(worker, request()) == canary
            assert (await worker.stats())["worker_restarts"] == 1

    story(tell)


def test_a_frozen_worker_is_not_ready_and_goes_on_when_it_thaws() -> None:
    async def tell() -> None:
        async with supervised(ROOM, stale_after=1.0) as worker:
            canary, pid = await text(worker, request()), worker.pid
            assert pid is not None
            os.kill(pid, signal.SIGSTOP)
            running = asyncio.create_task(text(worker, request()))
            async with asyncio.timeout(10):
                while True:
                    try:
                        worker.check_ready()
                    except UnavailableError as error:
                        assert "not answered" in str(error)
                        break
                    await asyncio.sleep(0.05)
            assert not running.done()
            os.kill(pid, signal.SIGCONT)
            assert await running == canary
            async with asyncio.timeout(10):
                while (await worker.stats())["worker_silence"] > 1.0:
                    await asyncio.sleep(0.05)
            assert worker.pid == pid

    story(tell)


def test_a_worker_that_stays_frozen_is_killed_and_replaced() -> None:
    async def tell() -> None:
        async with supervised(hang_timeout=1.5) as worker:
            pid = worker.pid
            assert pid is not None
            os.kill(pid, signal.SIGSTOP)
            with pytest.raises(UnavailableError, match="process ended"):
                await text(worker, request())
            await ready_again(worker, pid)
            assert await text(worker, request())

    story(tell)


def test_a_crash_loop_backs_off_and_gives_up_with_the_reason() -> None:
    async def tell() -> None:
        async with supervised(max_crashes=2) as worker:
            given_up = asyncio.Event()
            worker._hooks = Hooks(given_up=given_up.set)
            for crash in range(2):
                pid = worker.pid
                with pytest.raises(UnavailableError):
                    await text(worker, request([DEADLY]))
                if crash == 0:
                    await ready_again(worker, pid)
            async with asyncio.timeout(30):
                await given_up.wait()
            assert "signal 9" in str(worker.failure) and "2 times in a row" in str(worker.failure)

    story(tell)


@pytest.mark.parametrize(("seed", "kind", "word"), [(1, ModelLoadError, "damaged"), (3, UnavailableError, "signal 9")])
def test_a_first_start_that_fails_is_not_repeated(seed: int, kind: type[SgliteError], word: str) -> None:
    async def tell() -> None:
        async with supervised({"seed": seed}) as worker:
            assert isinstance(worker.failure, kind) and word in str(worker.failure)
            with pytest.raises(UnavailableError):
                await text(worker, request())

    story(tell)


# ------------------------------------------------------------------------------------------------------------- the wire


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        msgpack.packb(5),
        msgpack.packb(["Step"]),
        msgpack.packb(["Nothing", {}]),
        msgpack.packb(["Submit", {"call": "x", "request": {}}]),
        msgpack.packb(["Submit", {"call": 1}]),
        msgpack.packb(["Answer", {"call": 1, "banana": 2}]),
        msgpack.packb(["Step", {"chunks": [[1, {"text": 5}]]}]),
        msgpack.packb(["Step", {"chunks": [[1, {"index": "0"}]]}]),
        msgpack.packb({1: 2}),
        b"\x92\xa4Step" + b"\x91" * 100_000,
        msgpack.packb(["Step", [[[1, 0, 2, [3]]], []]]),
        msgpack.packb(["Step", [[[1, 0, "a", [True]]], []]]),
        msgpack.packb(["Step", [["1234"], []]]),
        msgpack.packb(["Step", [[[1, {"text": 2}]], []]]),
        b"\x80\x04\x95",  # how a pickle begins
    ],
)
def test_what_is_no_message_is_refused(body: bytes) -> None:
    with pytest.raises(wire.FrameError):
        wire.unpack(body)


def test_frames_come_whole_however_the_bytes_arrive() -> None:
    messages = [wire.Answer(i, "x" * i) for i in (0, 1, 300, 70_000)]
    stream = b"".join(wire.pack(message) for message in messages)
    for size in (1, 3, 1000, len(stream)):
        frames = wire.Frames()
        parts = [stream[i : i + size] for i in range(0, len(stream), size)]
        assert [wire.unpack(body) for part in parts for body in frames.feed(part)] == messages


def test_a_length_beyond_the_bound_is_refused_before_anything_is_allocated() -> None:
    with pytest.raises(wire.FrameError, match="at most"):
        list(wire.Frames().feed(b"\xff\xff\xff\xff"))
    with pytest.raises(InvalidRequestError, match="at most"):
        wire.pack(wire.Answer(1, "x" * (wire.MAX_FRAME + 1)))


@pytest.mark.parametrize("more", [{}, {"uncovered": 1}, {"finish": Finish("stop", "x")}, {"usage": Usage(3, 2, 1)}])
def test_a_chunk_survives_the_wire(more: Any) -> None:
    step = wire.Step(((7, Chunk("é", (1, 2), 3, **more)), (8, Chunk(" b", (5,)))), ((9, {"code": "x"}),))
    assert wire.unpack(wire.pack(step)[4:]) == step


def test_the_parents_side_is_light() -> None:
    """HTTP is up in a second, and stays small, because nothing of the engine is imported there."""
    heavy = "torch", "transformers", "llguidance"
    code = (
        "import sys, sglite.cli, sglite.runtime.loading, sglite.runtime.hub, sglite.runtime.server.runner, "
        f"sglite.runtime.worker.supervisor; print([m for m in {heavy!r} if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
