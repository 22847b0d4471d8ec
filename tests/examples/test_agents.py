"""Every example on the mock: what it asks, what it makes of the answers, and that it prints them."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import httpx
import pytest

import sglite as sgl
from sglite.chat import CHATML
from sglite.protocol import GenerateRequest, prompt_text
from sglite.runtime.server.runner import running
from sglite.testing import MockBackend

FOLDER = Path(__file__).parents[2] / "examples" / "agents"
Load = Callable[[str], ModuleType]
NAMES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "common")


def use(script: object, **options: object) -> MockBackend:
    backend = MockBackend(script, chat_template=CHATML, **options)
    sgl.set_default_backend(backend)
    return backend


def test_there_are_eleven_and_each_is_short() -> None:
    assert len(NAMES) == 11
    for name in NAMES:
        assert len((FOLDER / f"{name}.py").read_text(encoding="utf-8").splitlines()) < 120, name


@pytest.mark.parametrize("name", NAMES)
def test_help_teaches(name: str, load: Load, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        load(name).main(["--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert "--backend URL" in text
    assert "sglite serve" in text


@pytest.mark.parametrize("name", NAMES)
def test_each_runs_on_a_backend_that_knows_nothing(name: str, load: Load, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever a model says, the constraints keep every value in form."""
    backend = use(None)
    load(name).main(["--demo"] if name == "chat" else [])
    assert capsys.readouterr().out.strip()
    assert backend.requests
    assert backend.running == 0


@pytest.mark.parametrize("arguments", [["--backend", "{url}"], ["--backend", "{url}/v1", "--model", "mock"]])
def test_over_http(arguments: list[str]) -> None:
    """As a program of its own, with a server's address or with that of its OpenAI routes."""
    mock = MockBackend("Rome is nice", chat_template=CHATML)
    with running(mock) as url:
        command = [sys.executable, str(FOLDER / "chat.py"), "--demo", *(word.format(url=url) for word in arguments)]
        environment = {**os.environ, "NO_PROXY": "127.0.0.1"}
        result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("Rome is nice") == 3
    assert len(mock.requests) == 3


@pytest.mark.parametrize(
    ("owner", "asked"), [("llamacpp", "llama.cpp"), ("vllm", "vllm"), ("sglang", "vllm"), ("somebody", "openai")]
)
def test_a_server_is_asked_for_its_model_and_its_dialect(load: Load, owner: str, asked: str) -> None:
    def models(request: httpx.Request) -> httpx.Response:
        assert str(request.url) == "http://test/v1/models"
        return httpx.Response(200, json={"data": [{"id": "theirs", "owned_by": owner}]})

    common = load("common")
    with httpx.Client(transport=httpx.MockTransport(models)) as client:
        found = common.service("http://test/v1", None, None, client.get)
    expected = sgl.OpenAI("theirs", base_url="http://test/v1", dialect=asked)
    assert asyncio.run(found.info()) == asyncio.run(expected.info())


def test_a_server_that_is_told_everything_is_not_asked(load: Load) -> None:
    common = load("common")
    backend = common.service("http://127.0.0.1:9/v1", "m", "llama.cpp")
    assert "regex" not in asyncio.run(backend.info()).capabilities.constraints


@pytest.mark.parametrize("name", ["judge", "tree_of_thought", "classification"])
def test_choices_on_a_service_that_only_generates(name: str, load: Load, capsys: pytest.CaptureFixture[str]) -> None:
    with running(MockBackend(None, chat_template=CHATML)) as url:
        load(name).main(["--backend", f"{url}/v1"])
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("address", ["http://127.0.0.1:9", "http://127.0.0.1:9/v1", "127.0.0.1:9"])
def test_what_goes_wrong_is_told_in_a_sentence(load: Load, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["rag.py"])
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with pytest.raises(SystemExit) as end:
        load("common").run(lambda: load("rag").main(["--backend", address]))
    assert str(end.value.code).startswith("rag.py: error: ")
    assert address in str(end.value.code)


# --------------------------------------------------------------------------------------------------------- one by one


def test_json_extraction_reads_notes(load: Load, capsys: pytest.CaptureFixture[str]) -> None:
    facts = '{"customer": "Tom", "city": "Oslo", "amount": 2}'
    backend = use({"Which thing": "chairs", "as JSON": facts, "should the shop": " apologise."})
    load("json_extraction").main([])
    out = capsys.readouterr().out
    assert out.count("chairs") >= 3
    assert "Facts(customer='Tom', city='Oslo', amount=2)" in out
    assert "apologise" in out
    assert {request.program.branch for request in backend.requests if request.program} >= {"0", "1", "2"}


def test_json_extraction_of_a_file(load: Load, tmp_path: Path) -> None:
    """One line per note, in order; one that fails says so and loses none of the others."""

    def answer(request: GenerateRequest) -> str | Exception:
        if "secret" in prompt_text(request.prompt):
            return sgl.OverloadedError("too much")
        return '{"customer": "Bo", "city": "Rome", "amount": 7}'

    use(answer)
    notes, out = tmp_path / "notes.txt", tmp_path / "facts.jsonl"
    notes.write_text("Bo bought 7 cups\n\na secret\nBo again\n", encoding="utf-8")
    load("json_extraction").main(["--notes", str(notes), "--out", str(out)])
    lines = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [line["note"] for line in lines] == ["Bo bought 7 cups", "a secret", "Bo again"]
    assert [line.get("amount") for line in lines] == [7, None, 7]
    assert "too much" in lines[1]["error"]


def test_rag_finds_passages_and_cites_one_of_them(load: Load, capsys: pytest.CaptureFixture[str]) -> None:
    rag = load("rag")
    index = rag.Index(FOLDER / "documents")
    assert "harbour-2" in index.search("When does the ferry leave?", 1)
    assert list(index.search("lighthouse steps harbour", 4)) == sorted(index.search("lighthouse steps harbour", 4))
    assert index.search("xylophone", 3) == {}
    assert index.search("?!", 3) == {}
    backend = use('{"answer": "At 9:30.", "source": "harbour-2"}')
    rag.main(["When does the ferry leave?", "xylophone?"])
    out = capsys.readouterr().out
    assert "At 9:30.  (harbour-2)" in out
    assert "no passage speaks of this" in out
    assert "The ferry to Skerry Island" in backend.prompts[-1]
    with pytest.raises(ValueError, match="source"):
        rag.cited(["harbour-2"])(answer="x", source="elsewhere-9")


def test_react_calls_tools_until_it_finishes(load: Load) -> None:
    react = load("react")
    script = [" I look up Mars.", react.action("lookup", name="Mars"), " I add.", react.action("add", a=2, b=1)]
    backend = use([*script, " Done.", react.action("finish", answer="3")])
    state = react.react.run("How many moons do Mars and the Earth have together?")
    assert state.ret_value == "3"
    assert "Observation: Mars is the fourth planet" in state.text()
    assert "Observation: 2 + 1 = 3" in backend.prompts[-1]


def test_react_gives_up_when_steps_run_out(load: Load) -> None:
    react = load("react")
    answers = [" Hm.", react.action("lookup", name="Vulcan")] * 2
    use(answers)
    state = react.react.run("Where is Vulcan?", steps=2)
    assert state.ret_value is None
    assert "There is nothing about Vulcan" in state.text()


def test_tree_of_thought_keeps_the_best_of_each_level(load: Load) -> None:
    tot = load("tree_of_thought")

    def answer(request: GenerateRequest) -> str:
        text = prompt_text(request.prompt)
        if request.candidates:
            return "practical" if text.count("good") else "silly"
        return "a good idea" if request.sampling.seed == 1 else "a bad one"

    backend = use(answer)
    state = tot.think.run("How?", 3, 2)
    first, second = state.ret_value
    assert [thought.text for thought in first] == ["a bad one", "a good idea", "a bad one"]
    assert sum(thought.kept for thought in first) == sum(thought.kept for thought in second) == 2
    assert first[1].kept
    assert max(first, key=lambda thought: thought.score) is first[1]
    assert {thought.parent for thought in second} == {i for i, thought in enumerate(first) if thought.kept}
    proposals = [prompt_text(request.prompt) for request in backend.requests if not request.candidates]
    assert len(proposals) == 9
    assert not any("silly" in text for text in proposals)


def test_skeleton_of_thought_expands_all_points_at_once(load: Load) -> None:
    sot = load("skeleton_of_thought")
    backend = use({"Give 2 points": '["Warm bed", "Dark room"]', "point: Warm bed": "Be warm", "Dark room": "Be dark"})
    state = sot.explain.run("How do I sleep well?", 2)
    assert state.ret_value == [("Warm bed", "Be warm"), ("Dark room", "Be dark")]
    assert len(backend.requests) == 3
    assert "Be warm" not in backend.prompts[-1]


def test_judge_merges_grades_and_comments(load: Load) -> None:
    judge = load("judge")
    report = '{"verdict": "accept", "advice": "Add an example."}'
    backend = use({"clear and easy": "It is clear", "Give a grade": "5", "verdict and one": report})
    grades, merged = (state := judge.review.run("A text.")).ret_value
    assert set(grades) == set(judge.RESPECTS)
    assert all(4 < value <= 5 for value in grades.values())
    assert merged.verdict == "accept"
    assert state["clarity"] == "It is clear"
    assert "It is clear. Grade 5 of 5." in backend.prompts[-1]


def test_generative_agents_recall_what_fits(load: Load) -> None:
    agents = load("generative_agents")
    ada = agents.Person("Ada", ["Ada likes roses.", *[f"Ada had lunch {i}." for i in range(5)]])
    assert "roses" in ada.recall("The roses are sick", limit=2)
    assert "roses" not in ada.recall("What about lunch?", limit=2)
    ben = agents.Person("Ben", ["Ben is here."])
    use(["Hello Ada", "Hello again"])
    talk = agents.converse(ada, ben, "Hi", 2)
    assert talk == [("Ada", "Hi"), ("Ben", "Hello Ada"), ("Ada", "Hello again")]
    assert 'Ada said: "Hi"' in ben.memory[-1]
    assert 'Ben said: "Hello Ada"' in ada.memory[-1]


def test_chat_remembers_and_tells_what_was_cut(load: Load, capsys: pytest.CaptureFixture[str]) -> None:
    backend = use("one two three four five")
    load("chat").main(["--demo", "--max-tokens", "3"])
    out = capsys.readouterr().out
    assert "3 turns" in out
    assert out.count("cut off") == 3
    assert backend.prompts[-1].count("one two three") == 2


def test_multi_document_qa_reads_side_by_side(load: Load) -> None:
    qa = load("multi_document_qa")
    backend = use({"Document A": "12\n", "Document B": "7\n", "The most was": "A"}, pace=0.01)
    state = qa.ask.run("How many?", {"A": "twelve", "B": "seven"})
    assert [(answer.document, answer.number) for answer in state.ret_value] == [("B", 7), ("A", 12)]
    assert state["best"] == "A"
    assert backend.most_running == 2
    assert "Number in A: 12" in backend.prompts[-1]
    assert "Number in B: 7" in backend.prompts[-1]


def test_classification_of_a_file_with_labels(load: Load, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    use({"cup final": "sports", "shares": "business"})
    texts = tmp_path / "texts.tsv"
    texts.write_text("The cup final\tsports\nAll shares fall\tweather\n", encoding="utf-8")
    load("classification").main(["--texts", str(texts)])
    assert "1 of 2 right" in capsys.readouterr().out


# -------------------------------------------------------------------------------------------------------- coding helper


def write(text: str, name: str = "solution.py") -> str:
    return json.dumps({"name": "write_file", "arguments": {"name": name, "text": text}})


def test_coding_helper_tries_again_with_the_error(load: Load, tmp_path: Path) -> None:
    helper = load("coding_helper")
    backend = use([write("def add(a, b):\n    return a - b\n"), write("def add(a, b):\n    return a + b\n")])
    state = helper.solve.run(helper.TASK, helper.CHECKS, helper.Sandbox(tmp_path), 4)
    assert state.ret_value is True
    assert len(backend.requests) == 2
    assert "AssertionError" in backend.prompts[1]


def test_coding_helper_gives_up(load: Load, tmp_path: Path) -> None:
    helper = load("coding_helper")
    use([write("nonsense(")] * 2)
    assert helper.solve.run(helper.TASK, helper.CHECKS, helper.Sandbox(tmp_path), 2).ret_value is False


@pytest.mark.parametrize("name", ["../out.txt", "/tmp/out.txt", ".", "a/../../out.txt"])
def test_the_sandbox_refuses_paths_that_leave_it(name: str, load: Load, tmp_path: Path) -> None:
    folder = tmp_path / "inside"
    folder.mkdir()
    sandbox = load("coding_helper").Sandbox(folder)
    assert "cannot write" in sandbox.write_file(name, "x")
    assert "cannot run" in sandbox.run_file(name)
    assert not (tmp_path / "out.txt").exists()


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import os; print(sorted(os.environ.keys() - {'LC_CTYPE'}))", "[]"),
        ("x = 'a' * (1 << 30)", "MemoryError"),
        ("open('big', 'wb').write(bytes(2 << 20)); print('written')", "exit status|File too large"),
        ("print('fine')", "fine"),
    ],
)
def test_the_sandbox_bounds_what_code_can_use(code: str, expected: str, load: Load, tmp_path: Path) -> None:
    sandbox = load("coding_helper").Sandbox(tmp_path)
    sandbox.write_file("run.py", code)
    said = sandbox.run_file("run.py")
    assert any(part in said for part in expected.split("|")), said
