"""Load on the scripted engine behind the real HTTP server, and the figures that come of it."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from sglite import cli
from sglite.bench.command import bench_engine
from sglite.bench.figures import Slo, figures, quantile, read_slo, times
from sglite.bench.load import Job, Piece, Shot, closed_loop, made_jobs, open_loop
from sglite.errors import ConfigError, OverloadedError
from sglite.runtime.server.runner import running
from sglite.runtime.testing import scripted_engine


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    engine = scripted_engine(script=lambda history: ord("a"), context_length=2048, kv_tokens=16_384)
    with engine, running(engine) as url:
        yield url


def bench(*arguments: str, file: Path) -> tuple[int, dict[str, Any]]:
    code = cli.main(["bench", *arguments, "--json", str(file)])
    return code, json.loads(file.read_text(encoding="utf-8"))


# ------------------------------------------------------------------------------------------------- on the real server


def test_a_closed_loop(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load = ["--requests", "12", "--concurrency", "4", "--prompt-tokens", "20", "--output-tokens", "10"]
    code, run = bench("serve", "--url", url, *load, "--slo", "ttft=60000", file=tmp_path / "run.json")
    found = run["figures"]
    assert code == 0
    assert (found["requests"], found["failed"], found["tokens"]) == (12, 0, 120)
    assert found["tokens_per_second"] == pytest.approx(120 / found["seconds"])
    assert found["goodput"] == pytest.approx(found["requests_per_second"])
    for each in found["times"].values():
        assert 0 <= each["p50"] <= each["p95"] <= each["p99"] <= found["seconds"]
    assert found["times"]["ttft"]["p50"] <= found["times"]["e2e"]["p50"]
    out = capsys.readouterr().out
    assert "TTFT" in out
    assert "goodput" in out


def test_a_shared_prefix_is_hit(url: str, tmp_path: Path) -> None:
    load = ["--requests", "8", "--concurrency", "1", "--output-tokens", "4", "--prompt-tokens"]
    _, alone = bench("serve", "--url", url, *load, "20", "--load-seed", "1", file=tmp_path / "alone.json")
    shared = ["60", "--shared-prefix", "50", "--load-seed", "2"]
    _, together = bench("serve", "--url", url, *load, *shared, file=tmp_path / "together.json")
    assert alone["figures"]["hit_rate"] < 0.2
    assert together["figures"]["hit_rate"] > 0.6


def test_an_open_loop_over_the_chat_route(url: str, tmp_path: Path) -> None:
    load = ["--requests", "6", "--rate", "200", "--chat", "--prompt-tokens", "10", "--output-tokens", "4"]
    code, run = bench("serve", "--url", f"{url}/v1", *load, file=tmp_path / "run.json")
    assert code == 0
    assert run["figures"]["tokens"] == 24
    assert run["settings"]["rate"] == 200


def test_prompts_of_a_file(url: str, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "hello", "max_tokens": 3}\n\n{"prompt": "world"}\n', encoding="utf-8")
    load = ["--prompts", str(prompts), "--output-tokens", "5"]
    _, run = bench("serve", "--url", url, *load, file=tmp_path / "run.json")
    assert run["figures"]["tokens"] == 8


def test_failed_requests_are_told(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "x" * 3000}) + '\n{"prompt": "hello"}\n', encoding="utf-8")
    code, run = bench("serve", "--url", url, "--prompts", str(prompts), file=tmp_path / "run.json")
    assert code == 1
    assert (run["figures"]["requests"], run["figures"]["failed"]) == (2, 1)
    assert "ContextLengthError" in capsys.readouterr().err


def test_an_engine_without_a_network(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load = ["--requests", "5", "--prompt-tokens", "10", "--output-tokens", "6", "--json", str(tmp_path / "run.json")]
    options = cli.parser().parse_args(["bench", "engine", *load])
    engine = scripted_engine(script=lambda history: ord("a"))
    assert bench_engine(options, engine) == 0
    run = json.loads((tmp_path / "run.json").read_text(encoding="utf-8"))
    assert (run["command"], run["figures"]["tokens"], run["settings"]["concurrency"]) == ("engine", 30, 32)
    assert "tokens/s" in capsys.readouterr().out


def test_report_of_a_server(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench("serve", "--url", url, "--requests", "4", "--prompt-tokens", "10", file=tmp_path / "run.json")
    capsys.readouterr()
    assert cli.main(["report", url, "--price", "2", "--json"]) == 0
    lines = {line["name"]: line for line in json.loads(capsys.readouterr().out)}
    assert lines["tokens"]["value"] > 0
    assert lines["tokens per money"]["value"] == pytest.approx(lines["tokens"]["value"] * 1800, rel=0.01)
    assert lines["ttft P50"]["value"] > 0
    assert 0 <= lines["hit rate"]["value"] < 1
    assert 0 < lines["KV in use"]["value"] <= 1
    assert all(line["reading"] for line in lines.values())


@pytest.mark.parametrize("route", ["/", "/metrics", "/v1"])
def test_report_takes_whatever_address_of_the_server(url: str, route: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", url + route]) == 0
    assert "KV in use" in capsys.readouterr().out


def test_report_of_a_run(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, run = bench("serve", "--url", url, "--requests", "4", "--prompt-tokens", "10", file=tmp_path / "run.json")
    assert cli.main(["report", str(tmp_path / "run.json"), "--price", "0.5"]) == 0
    out = capsys.readouterr().out
    assert f"{run['figures']['tokens_per_second'] * 7200:,.0f}" in out
    assert "what it says" in out


# ----------------------------------------------------------------------------------------------- wrong command lines


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["bench", "serve", "--url", "http://127.0.0.1:9", "--rate", "1", "--concurrency", "2"], "--rate"),
        (["bench", "serve", "--url", "http://127.0.0.1:9", "--rate", "0"], "--rate must be greater than 0"),
        (["bench", "serve", "--url", "http://127.0.0.1:9", "--slo", "ttft=fast"], "slo: ttft"),
        (["bench", "serve", "--url", "http://127.0.0.1:9", "--slo", "speed=1"], "'speed' is none of"),
        (["bench", "serve", "--url", "http://127.0.0.1:9", "--shared-prefix", "128"], "--shared-prefix"),
        (["bench", "serve", "--url", "http://127.0.0.1:9", "--prompts", "/nowhere"], "cannot read"),
        (["report", "/nowhere.json"], "cannot read"),
        (["report", "http://127.0.0.1:9", "--price", "0"], "--price"),
    ],
)
def test_what_cannot_be_is_refused(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("value", ["0", "-1", "x", "1.5"])
def test_counts_are_whole_numbers(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["bench", "serve", "--url", "http://127.0.0.1:9", "--requests", value])
    assert f"--requests: must be a whole number of at least 1, not '{value}'" in capsys.readouterr().err


def test_nobody_answers(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "serve", "--url", "http://127.0.0.1:9"]) == 1
    assert cli.main(["report", "http://127.0.0.1:9"]) == 1
    assert "127.0.0.1:9" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["[1]", "{}", '{"kind": "other"}', "no JSON"])
def test_files_that_are_no_run(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "x.json"
    file.write_text(text, encoding="utf-8")
    assert cli.main(["report", str(file)]) == 2
    assert str(file) in capsys.readouterr().err


@pytest.mark.parametrize("line", ['{"prompt": ""}', '{"max_tokens": 3}', "[]", '{"prompt": "x", "max_tokens": 0}', "?"])
def test_lines_that_are_no_prompt(line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "fine"}\n' + line + "\n", encoding="utf-8")
    assert cli.main(["bench", "serve", "--url", "http://127.0.0.1:9", "--prompts", str(file)]) == 2
    assert "line 2" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------- the arithmetic


class Steady:
    """Answers with three pieces of text at once; every third job fails."""

    def __init__(self) -> None:
        self.running = 0
        self.most = 0
        self.asked = 0

    async def ask(self, job: Job) -> AsyncIterator[Piece]:
        self.running += 1
        self.most = max(self.most, self.running)
        self.asked += 1
        number = self.asked
        try:
            await asyncio.sleep(0)
            if number % 3 == 0:
                raise OverloadedError("full")
            for _ in range(3):
                yield Piece("x")
            yield Piece(prompt_tokens=10, cached_tokens=5, tokens=3)
        finally:
            self.running -= 1


def test_a_closed_loop_keeps_to_its_callers_and_its_order() -> None:
    target, done = Steady(), []
    shots = asyncio.run(closed_loop(target, made_jobs(9, 4, 2), 2, done.append))
    assert target.most == 2
    assert len(shots) == len(done) == 9
    assert sum(shot.error is not None for shot in shots) == 3
    assert [shot.due for shot in shots] == sorted(shot.due for shot in shots)


def test_open_loop_times_count_from_when_a_job_was_due() -> None:
    """The loop is held up; what came late is charged to the jobs that waited."""

    class Blocking(Steady):
        async def ask(self, job: Job) -> AsyncIterator[Piece]:
            if not self.asked:
                time.sleep(0.2)  # a server that hangs, as seen from one loop
            async for piece in super().ask(job):
                yield piece

    shots = asyncio.run(open_loop(Blocking(), made_jobs(4, 4, 2), 100.0, 0, lambda shot: None))
    dice = random.Random(0)
    gaps = [dice.expovariate(100.0) for _ in range(3)]
    assert [b.due - a.due for a, b in pairwise(shots)] == pytest.approx(gaps)
    assert shots[1].e2e > 0.1


def test_figures_of_known_shots() -> None:
    shots = [
        Shot(0.0, [1.0, 1.5, 2.0], 2.0, 100, 60, 3),
        Shot(1.0, [4.0], 4.0, 100, 20, 1),
        Shot(2.0, [], 3.0, error="x"),
    ]
    found = figures(shots, Slo(ttft=2.0))
    assert (found.requests, found.failed, found.seconds) == (3, 1, 4.0)
    assert found.tokens_per_second == 1.0
    assert found.hit_rate == 0.4
    assert found.goodput == 0.25
    assert found.times["ttft"].p50 == 1.0
    assert found.times["ttft"].p99 == 3.0
    assert found.times["itl"].mean == 0.5
    assert found.times["tpot"].p50 == 0.5
    assert times([None, None]) is None
    with pytest.raises(ConfigError):
        figures([])


def test_quantiles_are_values_that_were_measured() -> None:
    values = sorted(random.Random(1).random() for _ in range(37))
    for share in (0.01, 0.5, 0.95, 0.99, 1.0):
        value = quantile(values, share)
        assert value in values
        assert sum(v <= value for v in values) >= share * len(values)
        assert sum(v < value for v in values) < share * len(values)


def test_slo() -> None:
    assert read_slo("ttft=200, e2e=1500") == Slo(ttft=0.2, e2e=1.5)
    assert not Slo(tpot=0.1).kept(Shot(0.0, [1.0, 2.0], 2.0, tokens=2))
    with pytest.raises(ConfigError):
        read_slo("ttft=-1")


def test_made_jobs_depend_on_the_seed_alone_and_share_what_was_asked() -> None:
    jobs = made_jobs(5, 30, 7, shared_tokens=20, seed=3)
    assert jobs == made_jobs(5, 30, 7, shared_tokens=20, seed=3)
    assert jobs != made_jobs(5, 30, 7, shared_tokens=20, seed=4)
    words = [job.prompt.split() for job in jobs]
    assert all(len(each) == 30 and each[:20] == words[0][:20] for each in words)
    assert len({job.prompt for job in jobs}) == 5
