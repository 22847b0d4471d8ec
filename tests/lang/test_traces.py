"""What a run did (``state.trace()``), what a program would do (``f.trace()``), and its constant beginning."""

from __future__ import annotations

import asyncio
import io
import json
import threading

import pytest
from rich.console import Console

import sglite as sgl
from sglite.errors import ProgramError
from sglite.lang.tracer import constant_prefix
from sglite.protocol import Chunk, Finish, ModelInfo, Usage, prompt_text
from sglite.testing import EVERYTHING, MockBackend


@sgl.function
def tree(s, question, count=2):
    s += sgl.system("You know a lot, and you say it in as few words as you can, always.")
    s += sgl.user("Question: " + question)
    s += sgl.assistant(sgl.gen("plan", max_tokens=10))
    forks = s.fork(2)
    forks += lambda i: sgl.user(f"Do step {i} of {s['plan']}") + sgl.assistant(sgl.gen("step", temperature=0))
    forks.join()
    s += sgl.user(f"Is {question} solved?") + sgl.assistant(sgl.select("done", ["yes", "no"]))
    if s["done"] == "no":
        s += sgl.gen("more")


def test_every_call_is_recorded_with_its_branch() -> None:
    trace = tree.run("why?", backend=MockBackend(["a plan", "one", "two", "yes"])).trace()
    assert [(call.kind, call.name, call.branch) for call in trace] == [
        ("gen", "plan", ""),
        ("gen", "step", "0"),
        ("gen", "step", "1"),
        ("select", "done", ""),
    ]
    assert all(call.finish == "stop" and call.prompt_tokens > 0 and call.ttft is not None for call in trace)
    assert all("test_traces.py:" in call.site for call in trace)
    assert len({call.request_id for call in trace}) == 4


def test_usage_and_times_come_from_the_backend() -> None:
    usage = Usage(10, 8, 4, 1, queue_time=0.1, prefill_time=0.2, decode_time=0.5)

    class Backend(MockBackend):
        async def generate(self, request):
            self.requests.append(request)
            yield Chunk("text", (1, 2, 3, 4), finish=Finish("length"), usage=usage)

    @sgl.function
    def program(s):
        s += "x" + sgl.gen("x")

    state = program.run(backend=Backend())
    (call,) = state.trace()
    counts = (call.prompt_tokens, call.cached_tokens, call.new_tokens, call.forced_tokens)
    assert counts == (10, 8, 4, 1)
    assert (call.queue_time, call.prefill_time, call.decode_time) == (0.1, 0.2, 0.5)
    assert call.tokens_per_second == 8
    meta = state.get_meta_info("x")
    assert (meta["prompt_tokens"], meta["cached_tokens"], meta["completion_tokens"]) == (10, 8, 4)


def test_a_trace_is_printed_as_a_tree_and_written_as_json() -> None:
    trace = tree.run("why?", backend=MockBackend(["a plan", "one", ValueError("[oh] no"), "yes"])).trace()
    console = Console(file=io.StringIO(), width=200)
    console.print(trace)
    printed = console.file.getvalue()
    assert "branch 0" in printed
    assert "[oh] no" in printed
    assert str(trace).count("gen ") == 3
    assert str(trace) == str(trace).strip()
    value = json.loads(json.dumps(trace.to_json()))
    assert [call["branch"] for call in value["calls"]] == ["", "0", "1", ""]
    assert value["function"] == "tree"


def test_requests_say_which_program_and_branch_they_belong_to() -> None:
    mock = MockBackend("x")

    @sgl.function
    def nested(s):
        s += "a" + sgl.gen("a")
        (child,) = s.fork(1)
        inner = child.fork(2)
        inner += sgl.gen("b")
        inner.join()
        s["a"], child["b"]
        s += sgl.gen("last")

    nested.run(backend=mock)
    programs = [request.program for request in mock.requests]
    assert len({program.program for program in programs}) == 1
    assert [program.branch for program in programs] == ["", "0.0", "0.1", ""]
    assert programs[0].last is False


def test_the_last_call_of_a_branch_is_marked() -> None:
    gate: list[int] = []
    mock = MockBackend("x", latency=0.001)

    @sgl.function
    async def two(s):
        s += "a" + sgl.gen("a")
        await s.get("a")
        gate.append(1)
        forks = s.fork(2)
        forks += sgl.gen("b")
        forks.join()

    two.run(backend=mock)
    assert [request.program.last for request in mock.requests] == [False, True, True]


def test_the_symbolic_program_is_readable() -> None:
    traced = tree.trace()
    assert str(traced).splitlines() == [
        "program tree(question, count)",
        "  system:",
        "  text 'You know a lot, and you say it in as few words as you can, always.'",
        "  end of system",
        "  user:",
        "  text 'Question: '",
        "  text {question}",
        "  end of user",
        "  assistant:",
        "  plan = gen(max_new_tokens=10)",
        "  end of assistant",
        "  fork 2",
        "    [0]",
        "      user:",
        "      text 'Do step 0 of '",
        "      text {plan}",
        "      end of user",
        "      assistant:",
        "      step = gen(temperature=0)",
        "      end of assistant",
        "    [1]",
        "      user:",
        "      text 'Do step 1 of '",
        "      text {plan}",
        "      end of user",
        "      assistant:",
        "      step = gen(temperature=0)",
        "      end of assistant",
        "  join gather_variable",
        "  user:",
        "  text 'Is '",
        "  text {question}",
        "  text ' solved?'",
        "  end of user",
        "  assistant:",
        "  done = select(['yes', 'no'])",
        "  end of assistant",
        "  ... done == 'no' depends on data",
    ]
    assert traced.variables == ["plan", "step", "done"]
    assert len(traced.calls) == 4


def test_tracing_with_arguments_and_async() -> None:
    @sgl.function
    async def program(s, a, b):
        s += f"{a}-{b} " + sgl.gen("x")
        value = await s.get("x")
        with s.copy() as c:
            c += "copy " + value
        with s.var_scope("all"):
            s += "z"
        inner(s["x"])

    @sgl.function
    def inner(s, x):
        pass

    traced = program.trace(a="A")
    assert "text 'A-'" in str(traced)
    assert "text {b}" in str(traced)
    assert "fork 1" in str(traced)
    assert "runs inner" in traced.ended


def test_tracing_stops_where_a_library_meets_a_symbol() -> None:
    @sgl.function
    def program(s, items):
        s += "before "
        s += json.dumps(items)

    traced = program.trace()
    assert "TypeError" in traced.ended
    assert "text 'before '" in str(traced)


@pytest.mark.parametrize(
    "use",
    [len, bool, list, int, float, lambda x: "a" in x, lambda x: x < 3, lambda x: x == 3, lambda x: x.upper()],
)
def test_a_symbol_has_no_value(use) -> None:
    assert "depends on data" in sgl.function(lambda s, x: use(x)).trace().ended


def test_the_constant_prefix_ends_at_the_first_argument() -> None:
    touched = []

    @sgl.function
    def program(s, name):
        s += "You are "
        s += f"helpful to {name}."
        touched.append(name)

    prefix = constant_prefix(program)
    assert "".join(node.text for node in prefix) == "You are helpful to "
    assert touched == [], "the function runs no further"


def test_a_batch_computes_the_constant_prefix_once_and_first() -> None:
    mock = MockBackend("x")
    prefix = "A long beginning that all of the programs in this batch have in common. "

    @sgl.function
    def program(s, i):
        s += prefix
        s += f"{i}" + sgl.gen("x")

    program.run_batch([(i,) for i in range(20)], backend=mock)
    assert mock.prompts[0] == prefix
    assert mock.requests[0].sampling.max_new_tokens == 0
    assert mock.prompts.count(prefix) == 1
    assert len(mock.requests) == 21


def test_cache_renders_turns() -> None:
    assert tree.cache(MockBackend()).startswith("SYSTEM: You know a lot")
    assert sgl.function(lambda s, x: s.append(x)).cache(MockBackend()) == ""


def test_a_failing_warm_up_leaves_the_batch_alone() -> None:
    class Backend(MockBackend):
        async def generate(self, request):
            if request.sampling.max_new_tokens == 0:
                raise sgl.OverloadedError("not now")
            async for chunk in super().generate(request):
                yield chunk

    @sgl.function
    def program(s, i):
        s += "A long beginning that all of the programs in this batch have in common. " + sgl.gen("x")

    assert [state["x"] for state in program.run_batch([(0,), (1,)], backend=Backend("y"))] == ["y", "y"]
    with pytest.raises(sgl.OverloadedError):
        program.cache(Backend())


def test_trace_of_unknown_parameters() -> None:
    with pytest.raises(ProgramError, match="no parameter 'x'"):
        tree.trace(x=1)


def test_what_is_known_of_a_model_is_asked_once() -> None:
    asked = []

    class Backend(MockBackend):
        async def info(self):
            asked.append(1)
            return ModelInfo("m", 100, capabilities=EVERYTHING)

    backend = Backend()
    for _ in range(3):
        tree.run("why?", backend=backend)
    assert asked == [1]
    assert prompt_text(backend.requests[0].prompt).startswith("SYSTEM: ")


class Keeping(MockBackend):
    """Remembers which branches it was told have ended."""

    def __init__(self) -> None:
        super().__init__("x")
        self.ends: list[tuple[str, str]] = []
        self.told = threading.Semaphore(0)

    async def end_program(self, program: str, branch: str = "", *, namespace: str = "") -> None:
        self.ends.append((program, branch))
        self.told.release()


def test_a_backend_hears_of_each_branch_that_ends() -> None:
    backend = Keeping()

    @sgl.function
    def program(s):
        s += "a" + sgl.gen("a")
        forks = s.fork(2)
        forks[1] += sgl.gen("b")
        forks[1]["b"]  # so that its call cannot be marked as the last one
        forks.join()
        assert backend.told.acquire(timeout=60)
        assert [branch for _, branch in backend.ends] == ["1"]

    program.run(backend=backend)
    assert backend.told.acquire(timeout=60)
    name = backend.requests[0].program.program
    assert backend.ends == [(name, "1"), (name, "")], "a branch that never called is not mentioned"


def test_a_program_that_ends_as_a_whole_is_told_once() -> None:
    backend = Keeping()

    @sgl.function
    async def program(s):
        s += "a" + sgl.gen("a")
        forks = s.fork(3)
        forks += sgl.gen("b")
        for fork in forks:
            await fork.get("b")

    program.run(backend=backend)
    program.run(backend=backend)
    for _ in range(2):
        assert backend.told.acquire(timeout=60)
    first, second = dict.fromkeys(request.program.program for request in backend.requests)
    assert backend.ends == [(first, ""), (second, "")], "and not each of its branches"


def test_an_end_is_told_though_the_programs_own_loop_has_ended() -> None:
    """``asyncio.run(program.arun())`` closes its loop at once; the message needs longer."""

    class Slow(Keeping):
        async def end_program(self, program: str, branch: str = "", *, namespace: str = "") -> None:
            await asyncio.to_thread(loop_has_ended.wait)
            await super().end_program(program, branch)

    @sgl.function
    async def program(s):
        s += "a" + sgl.gen("a")
        return await s.get("a")

    loop_has_ended = threading.Event()
    backend = Slow()
    asyncio.run(program.arun(backend=backend))
    loop_has_ended.set()
    assert backend.told.acquire(timeout=60)


def test_a_backend_that_cannot_be_told_disturbs_nobody() -> None:
    class Broken(Keeping):
        async def end_program(self, program: str, branch: str = "", *, namespace: str = "") -> None:
            await super().end_program(program, branch)
            raise RuntimeError("lost")

    @sgl.function
    def program(s):
        s += "a" + sgl.gen("a")
        return s["a"]  # read here, so that the call cannot be marked as the last one

    backend = Broken()
    assert [program.run(backend=backend).ret_value for _ in range(2)] == ["x", "x"]
    for _ in range(2):
        assert backend.told.acquire(timeout=60)
