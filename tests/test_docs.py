"""The documents are true: their programs run, their outputs are what comes out, their links and commands exist.

A block marked ``python`` is run, in one namespace per document; ``python notest`` is not. A ``text`` block right behind
it is what it prints, compared exactly where the documents' kernels run; in ``text varies`` numbers and ids may differ.
``SGLITE_UPDATE_DOCS=1`` writes the outputs into the documents instead of comparing them.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import io
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest

import sglite as sgl
import sglite.testing
from sglite import cli
from sglite.kernels.native.build import cpu_features
from sglite.lang.options import NAMES
from sglite.lang.waiting import background
from sglite.runtime.engine import Engine
from sglite.runtime.server.runner import running

ROOT = Path(__file__).parents[1]
README, DOCS = ROOT / "README.md", ROOT / "docs"
DOCUMENTS = [README, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted(DOCS.glob("*.md"))]
SERVER = "http://127.0.0.1:30000"
UPDATE = bool(os.environ.get("SGLITE_UPDATE_DOCS"))

FENCE = re.compile(r"^```(\w+)(.*)\n((?:.*\n)*?)```$", re.MULTILINE)
NUMBER = re.compile(r"\b[0-9a-f]{8,32}\b|\d+")


@dataclass(frozen=True)
class Block:
    """``text`` lies in the file's ``span``; ``output`` is the block behind it, where that is one."""

    path: Path
    language: str
    words: tuple[str, ...]
    text: str
    span: tuple[int, int]
    output: Block | None = None

    def run(self, namespace: dict[str, Any]) -> str:
        """What it prints. Tracebacks and messages name the document's own lines."""
        line = self.path.read_text(encoding="utf-8").count("\n", 0, self.span[0])
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("\n" * line + self.text, str(self.path), "exec", dont_inherit=True), namespace)
        return printed.getvalue()


def blocks(path: Path, *languages: str) -> list[Block]:
    source = path.read_text(encoding="utf-8")
    found: list[Block] = []
    following: Block | None = None
    for match in reversed(list(FENCE.finditer(source))):
        language, words, text = match[1], tuple(match[2].split()), match[3]
        adjoins = following is not None and not source[match.end() : following.span[0]].partition("```")[0].strip()
        output = following if adjoins and following and following.language == "text" else None
        following = Block(path, language, words, text, match.span(3), output)
        found.append(following)
    return [block for block in reversed(found) if block.language in languages]


def check(block: Block, printed: str, *, exact: bool) -> None:
    if block.output is None or UPDATE:
        return
    expected, printed = block.output.text.rstrip(), printed.rstrip()
    if not exact:
        assert bool(printed) == bool(expected)
    elif "varies" in block.output.words:
        assert NUMBER.sub("#", printed) == NUMBER.sub("#", expected)
    else:
        assert printed == expected


def run_all(path: Path, namespace: dict[str, Any], *, exact: bool, server: str = SERVER) -> None:
    """``server`` stands in for the address that the documents name."""
    outputs = []
    for block in blocks(path, "python"):
        if "notest" in block.words:
            continue
        printed = replace(block, text=block.text.replace(SERVER, server)).run(namespace)
        check(block, printed, exact=exact)
        if block.output is not None:
            outputs.append((block.output, printed))
    if UPDATE:
        rewrite(path, outputs)


def rewrite(path: Path, outputs: list[tuple[Block, str]]) -> None:
    source = path.read_text(encoding="utf-8")
    for output, text in reversed(outputs):
        assert source[slice(*output.span)] == output.text, "somebody else has changed the document meanwhile"
        source = source[: output.span[0]] + text.rstrip() + "\n" + source[output.span[1] :]
    path.write_text(source, encoding="utf-8")


def load(script: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(script.stem, script)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[script.stem] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with sgl.Engine(model="smollm2-135m") as engine:
        yield engine


@pytest.fixture
def namespace(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[dict[str, Any]]:
    """For one document, which may write files and set the default backend."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "document"}
    yield names
    for remote in [*names.values(), sgl.get_default_backend()]:
        if isinstance(remote, sgl.RuntimeEndpoint | sgl.OpenAI):
            asyncio.run_coroutine_threadsafe(remote.aclose(), background().loop).result()
    sgl.set_default_backend(None)


@pytest.fixture
def same_engine(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """Every document makes the same engine; here it is made once."""

    def make(model: str) -> Engine:
        assert model == "smollm2-135m"
        return engine

    monkeypatch.setattr(sgl, "Engine", make)
    return engine


def is_exact(engine: Engine) -> bool:
    """Whether this machine computes bit for bit what the one computed that the outputs were written on."""
    return engine.config.kernels == "native" and "amx_bf16" in cpu_features()


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    return load(DOCS / "generate_reference.py")


# -------------------------------------------------------------------------------------------------------- the programs


def test_readme(same_engine: Engine, namespace: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its programs, and its calls of a server, which here is a real one on a free port."""
    with running(same_engine) as url:
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")  # clients follow the environment
        run_all(README, namespace, exact=is_exact(same_engine), server=url)
        for request in curls(README):
            answer = request(url)
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["message"]["content"]


@pytest.mark.timeout(300)
def test_tutorial(same_engine: Engine, namespace: dict[str, Any]) -> None:
    run_all(DOCS / "tutorial.md", namespace, exact=is_exact(same_engine))


LONG = DOCS / "tutorial.md", DOCS / "coming-from-sglang.md", DOCS / "reference.md"
"""Pages with tests of their own; the reference's blocks are signatures."""


@pytest.mark.parametrize("path", sorted(set(DOCUMENTS) - {README, *LONG}), ids=lambda path: path.name)
def test_page(path: Path, same_engine: Engine, namespace: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The programs of every other page; most have none."""
    if any("notest" not in block.words for block in blocks(path, "python")):
        with running(same_engine) as url:
            monkeypatch.setenv("NO_PROXY", "127.0.0.1")
            run_all(path, namespace, exact=is_exact(same_engine), server=url)


def test_no_placeholders_are_left() -> None:
    for path in [README, *sorted(DOCS.glob("*.md"))]:
        words = set(path.read_text(encoding="utf-8").splitlines())
        assert not words & {"TABLE", "OUTPUT", "TODO"}, path.name


def test_coming_from_sglang(namespace: dict[str, Any]) -> None:
    run_all(DOCS / "coming-from-sglang.md", namespace, exact=True)


def curls(path: Path) -> Iterator[Callable[[str], httpx.Response]]:
    for block in blocks(path, "sh"):
        words = shlex.split(block.text.replace("\\\n", " "), comments=True)
        if words[:1] == ["curl"]:
            body, header = words[words.index("-d") + 1], words[words.index("-H") + 1]
            name, _, value = header.partition(": ")
            path_of = words[1].removeprefix(SERVER)
            yield lambda url, p=path_of, h={name: value}, b=body: httpx.post(url + p, headers=h, content=b, timeout=60)


# -------------------------------------------------------------------------------------------------------- the reference


def test_the_reference_is_up_to_date(reference: ModuleType) -> None:
    written = reference.PAGE.read_text(encoding="utf-8")
    assert written == reference.page(), "run: .venv/bin/python docs/generate_reference.py"


def test_the_reference_has_every_public_name(reference: ModuleType) -> None:
    names = reference.documented()
    assert sorted(names) == sorted(set(sgl.__all__) - {"__version__"})
    assert reference.OPTIONS.keys() == NAMES


def test_every_public_callable_has_a_docstring(reference: ModuleType) -> None:
    public = [(n, getattr(module, n)) for module in (sgl, sglite.testing) for n in module.__all__]
    missing = {name for name, thing in public if callable(thing) and not reference.docstring(thing)}
    assert not missing


# ---------------------------------------------------------------------------------------------- the gallery, the site


def test_the_gallery_shows_every_example_and_both_pages_the_same() -> None:
    gallery = load(DOCS / "generate_gallery.py")
    outputs = gallery.read(gallery.PAGE.read_text(encoding="utf-8"))
    examples = {path.stem for path in (ROOT / "examples" / "agents").glob("*.py")} - {"common"}
    assert outputs.keys() == gallery.AGENTS.keys() == examples
    assert all(outputs.values())
    assert README.read_text(encoding="utf-8") == gallery.with_gallery(outputs)
    assert gallery.PAGE.read_text(encoding="utf-8") == gallery.page(outputs)


def test_the_site_has_every_page() -> None:
    """``make docs`` checks the links; its library is none of the tests'."""
    pages = set(re.findall(r"^  - .*: ([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE))
    assert pages == {path.name for path in DOCS.glob("*.md")}


# ------------------------------------------------------------------------------------------------- links and commands

LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"`([^`\n]+)`")
FILE = re.compile(r"[\w.-]+(/[\w.-]+)*/([\w.-]+\.(py|md|toml))?")


def prose(path: Path) -> str:
    """Without the blocks."""
    return FENCE.sub("", path.read_text(encoding="utf-8"))


def anchors(path: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", prose(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links(path: Path) -> None:
    for link in LINK.findall(prose(path)):
        name, _, anchor = link.partition("#")
        if "://" in link:
            continue
        target = (path.parent / name).resolve() if name else path
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_files_that_are_named(path: Path) -> None:
    for word in CODE.findall(prose(path)):
        if FILE.fullmatch(word):
            assert any((base / word).exists() for base in (ROOT, ROOT / "sglite")), word


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_commands(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A command line is parsed as it is written; of a command that is only named, its help is asked."""
    targets = (ROOT / "Makefile").read_text(encoding="utf-8")
    for program, *words in commands(path):
        if program == "make":
            assert re.search(rf"^{words[0]}:", targets, re.MULTILINE), words
        else:
            assert exit_code(words if len(words) > 1 else [*words, "--help"]) == 0, capsys.readouterr().err
    capsys.readouterr()


def exit_code(words: list[str]) -> int | str | None:
    try:
        cli.parser().parse_args(words)
    except SystemExit as end:
        return end.code
    return 0


def commands(path: Path) -> Iterator[list[str]]:
    """Every ``sglite ...`` and ``make ...`` in blocks and in the text; ``sglite a, b`` are two."""
    lines = [line for block in blocks(path, "sh") for line in block.text.splitlines()]
    for line in [*lines, *CODE.findall(prose(path))]:
        program, *words = line.partition("#")[0].split() or [""]
        name = program.rpartition("/")[2]
        if name in ("sglite", "make") and words:
            several = any(word.endswith(",") for word in words)
            yield from ([name, word.strip(",")] for word in words) if several else [[name, *words]]
