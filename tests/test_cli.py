"""The command line: help that teaches, exit codes, one clear line per error, and every command once for real."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import httpx
import pytest

import sglite
from sglite import cli
from sglite.lang.backends.mock import MockBackend
from sglite.options import add_file, read_options
from sglite.runtime.config import EngineConfig
from sglite.runtime.server.config import ServerConfig
from sglite.runtime.server.runner import running
from sglite.runtime.worker.config import WorkerConfig
from sglite.terminal import Conversation, talk

PROGRAM = """
import sys
import sglite as sgl

@sgl.function
def greet(s, name):
    s += sgl.user("Greet " + name) + sgl.assistant(sgl.gen("greeting", max_tokens=4))

print(greet.run(name=sys.argv[1])["greeting"], sys.argv[2:])
"""


def run(*arguments: str) -> int:
    try:
        return cli.main(arguments)
    except SystemExit as end:
        return int(end.code or 0)


@pytest.fixture
def url() -> Iterator[str]:
    with running(MockBackend("hello", chat_template=sglite.chat.CHATML)) as url:
        yield url


# --------------------------------------------------------------------------------------------------------------- help


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    text = capsys.readouterr().out
    assert "examples:" in text
    for command in ("serve", "run", "chat", "batch", "models"):
        assert command in text
        assert run(command, "--help") == 0
    assert run("--version") == 0


@pytest.mark.parametrize("config", [EngineConfig, ServerConfig, WorkerConfig])
def test_every_option_is_a_flag(config: type, capsys: pytest.CaptureFixture[str]) -> None:
    run("serve", "--help")
    text = capsys.readouterr().out
    for field in fields(config):
        assert f"--{field.name.replace('_', '-')}" in text


def test_options_become_configs() -> None:
    arguments = ["serve", "--port", "5", "--model", "m", "--no-prefix-cache", "--dtype", "float32", "--page-size", "4"]
    options = cli.parser().parse_args(arguments)
    assert read_options(ServerConfig, options) == ServerConfig(port=5)
    assert read_options(EngineConfig, options) == EngineConfig(
        model="m", prefix_cache=False, dtype="float32", page_size=4
    )


def test_help_is_quick_and_imports_no_torch() -> None:
    code = (
        "import sys; from sglite.cli import parser; parser(); print('torch' in sys.modules, 'fastapi' in sys.modules)"
    )
    began = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
    assert time.perf_counter() - began < 5


def test_a_file_gives_what_flags_do_not(tmp_path: Path) -> None:
    file = tmp_path / "server.toml"
    file.write_text('port = 5\ndtype = "float32"\nprefix_cache = false\napi-keys = ["a"]\ndrain_timeout = 3\n')
    options = cli.parser().parse_args(["serve", "--port", "6", "--config", str(file)])
    add_file(file, [ServerConfig, EngineConfig], options)
    assert read_options(ServerConfig, options) == ServerConfig(port=6, api_keys=("a",), drain_timeout=3)
    assert read_options(EngineConfig, options) == EngineConfig(dtype="float32", prefix_cache=False)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("banana = 1", "unknown option 'banana'"),
        ("port = '5'", "port must be of type int"),
        ("port = true", "port must be of type int"),
        ("dtype = 'int3'", "one of auto"),
        ("api_keys = 'a'", "a list of strings"),
        ("port =", "cannot read"),
        ("port = 99999", "port must be between"),
    ],
)
def test_bad_files(tmp_path: Path, text: str, word: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "server.toml"
    file.write_text(text)
    assert run("serve", "--config", str(file)) == 2
    assert word in capsys.readouterr().err


def test_keys_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLITE_API_KEYS", "a, b")
    monkeypatch.setenv("SGLITE_ADMIN_KEY", "c")
    config = cli._with_keys(ServerConfig())
    assert (config.api_keys, config.admin_key) == (("a", "b"), "c")
    assert "'a'" not in repr(config)


# ------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("arguments", "code", "word"),
    [
        ([], 2, "COMMAND"),
        (["banana"], 2, "banana"),
        (["serve", "--banana"], 2, "--banana"),
        (["serve", "--port", "x"], 2, "--port"),
        (["serve", "--port", "99999"], 2, "port must be between"),
        (["serve", "--dtype", "int3"], 2, "--dtype"),
        (["serve", "--port", "0", "--model", "nope"], 1, "no model 'nope'"),
        (["serve", "--port", "0", "--page-size", "0"], 2, "page_size"),
        (["run", "missing.py"], 2, "no program 'missing.py'"),
        (["chat", "--backend", "localhost:1"], 2, "http://"),
        (["chat", "--backend", "http://127.0.0.1:9", "--dtype", "float32"], 2, "dtype"),
        (["chat", "--model", "nope"], 1, "no model 'nope'"),
    ],
)
def test_errors_are_one_line(arguments: list[str], code: int, word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*arguments) == code
    error = capsys.readouterr().err
    assert word in error
    assert error.splitlines()[-1].startswith("sglite: error: ") or "sglite" in error.splitlines()[-1]
    assert "Traceback" not in error


def test_debug_shows_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("run", "--debug", "missing.py") == 2
    assert "Traceback" in capsys.readouterr().err


def test_a_port_in_use_is_known_before_a_model_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert run("serve", "--port", str(taken.getsockname()[1]), "--model", "nope") == 2
    assert "cannot listen on 127.0.0.1:" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------------- models


def test_models(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("models") == 0
    assert "smollm2-135m" in capsys.readouterr().out
    assert run("models", "--json") == 0
    assert json.loads(capsys.readouterr().out)[0]["name"] == "smollm2-135m"


# ---------------------------------------------------------------------------------------------------------------- run


@pytest.fixture
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """``run`` changes what a process of its own may change."""
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sglite.set_default_backend(None)


@pytest.mark.usefixtures("restored")
def test_run(tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    program, trace = tmp_path / "program.py", tmp_path / "trace.json"
    program.write_text(PROGRAM)
    assert run("run", "--backend", url, "--trace", str(trace), str(program), "Ann", "--own", "3") == 0
    assert capsys.readouterr().out == "hello ['--own', '3']\n"
    (written,) = json.loads(trace.read_text())
    assert [call["name"] for call in written["calls"]] == ["greeting"]


@pytest.mark.usefixtures("restored")
def test_a_programs_failure_names_its_line(tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.replace('["greeting"]', '["nothing"]'))
    assert run("run", "--backend", url, str(program), "Ann") == 1
    error = capsys.readouterr().err
    assert error.startswith("sglite: error: ")
    assert "nothing" in error
    assert f"{program}, line 9" in error


@pytest.mark.usefixtures("restored")
def test_a_programs_own_exception_is_python_s_business(tmp_path: Path, url: str) -> None:
    program = tmp_path / "program.py"
    program.write_text("raise ZeroDivisionError")
    with pytest.raises(ZeroDivisionError):
        run("run", "--backend", url, str(program))
    program.write_text("raise SystemExit(7)")
    assert run("run", "--backend", url, str(program)) == 7


@pytest.mark.usefixtures("restored")
def test_a_trace_that_cannot_be_written_is_known_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = tmp_path / "program.py"
    program.write_text("print('ran')")
    assert run("run", "--model", "nope", "--trace", str(tmp_path / "no" / "t.json"), str(program)) == 2
    assert "cannot write the trace" in capsys.readouterr().err


# --------------------------------------------------------------------------------------------------------------- chat


def test_chat_keeps_the_conversation() -> None:
    mock = MockBackend(["Hi Ann", "You are Ann"], chat_template=sglite.chat.CHATML)
    out = io.StringIO()
    conversation = Conversation(mock, "be brief", max_new_tokens=9, temperature=0.0)
    assert talk(conversation, io.StringIO("I am Ann\n\nWho am I?"), out) == 0
    assert out.getvalue() == "Hi Ann\nYou are Ann\n"
    assert mock.prompts[1] == (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nI am Ann<|im_end|>\n"
        "<|im_start|>assistant\nHi Ann<|im_end|>\n<|im_start|>user\nWho am I?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert mock.closed


def test_chat_in_a_pipe_ends_with_its_error(capsys: pytest.CaptureFixture[str], monkeypatch: Any, url: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    assert run("chat", "--backend", url) == 0
    assert capsys.readouterr().out == "hello\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    assert run("chat", "--backend", "http://127.0.0.1:9") == 1
    assert "cannot reach" in capsys.readouterr().err
    assert run("chat", "--backend", url, "--temperature", "-1") == 1


# -------------------------------------------------------------------------------------------------------------- batch


def batch_file(path: Path, *texts: str) -> Path:
    lines = [
        {"custom_id": text, "url": "/v1/chat/completions", "body": {"messages": [{"role": "user", "content": text}]}}
        for text in texts
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_batch(tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = batch_file(tmp_path / "in.jsonl", "a", "b"), tmp_path / "out.jsonl"
    assert run("batch", str(source), "-o", str(out), "--backend", url) == 0
    assert "2 completed, 0 failed" in capsys.readouterr().err
    answers = [json.loads(line) for line in out.read_text().splitlines()]
    assert sorted(a["custom_id"] for a in answers) == ["a", "b"]
    assert answers[0]["response"]["body"]["choices"][0]["message"]["content"] == "hello"


def test_batch_goes_on_where_it_ended(tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = batch_file(tmp_path / "in.jsonl", "a", "b", "c"), tmp_path / "out.jsonl"
    out.write_text('{"custom_id": "b"}\n{"custom_id": "c", "resp')  # the second was being written
    assert run("batch", str(source), "-o", str(out), "--backend", url) == 2
    assert "--resume" in capsys.readouterr().err
    assert run("batch", str(source), "-o", str(out), "--backend", url, "--resume") == 0
    first, *others = [json.loads(line)["custom_id"] for line in out.read_text().splitlines()]
    assert (first, sorted(others)) == ("b", ["a", "c"])
    out.write_text("prose\n")
    assert run("batch", str(source), "-o", str(out), "--backend", url, "--resume") == 2


def test_batch_tells_of_failures(tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = batch_file(tmp_path / "in.jsonl", "a"), tmp_path / "out.jsonl"
    source.write_text(source.read_text().replace('"messages"', '"temperature": -1, "messages"'))
    assert run("batch", str(source), "-o", str(out), "--backend", url) == 1
    assert "0 completed, 1 failed" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["{", '{"custom_id": "a"}', '{"custom_id": "a", "url": "/nope", "body": {}}'])
def test_batch_with_a_bad_line(tmp_path: Path, text: str, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in.jsonl").write_text(f"\n{text}\n")
    assert run("batch", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out"), "--backend", url) == 2
    assert "in.jsonl, line 2: " in capsys.readouterr().err
    assert run("batch", str(tmp_path / "nope"), "-o", str(tmp_path / "out"), "--backend", url) == 2


# ------------------------------------------------------------------------------------------ serve, with the real model


@pytest.mark.usefixtures("smollm2")
def test_serve_answers_and_ends_cleanly() -> None:
    command = [sys.executable, "-m", "sglite", "serve", "--port", "0", "--threads", "1", "--kv-tokens", "2048"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        url = server.stderr.readline().removeprefix("sglite: serving at ").strip()
        body = {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 3, "temperature": 0}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()
        assert answer["usage"]["completion_tokens"] == 3
        server.send_signal(signal.SIGTERM)
        assert server.wait(20) == 0
        assert server.stderr.read() == ""


@pytest.mark.usefixtures("smollm2")
def test_a_runtime_is_a_child_that_ends_with_us() -> None:
    @sglite.function
    def program(s: Any) -> None:
        s += sglite.user("Say hello.") + sglite.assistant(sglite.gen("a", max_tokens=3, temperature=0))

    with sglite.Runtime("smollm2-135m", threads=1, kv_tokens=2048) as runtime:
        assert program.run(backend=runtime)["a"]
        pid = runtime.pid
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
