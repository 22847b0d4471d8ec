"""Who may import whom, read from the source: the layers of docs/architecture.md, as a test."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import sglite

ROOT = Path(sglite.__file__).parent
SHARED = {"sglite.protocol", "sglite.errors"}
PAGES = "pages", "tree", "idle", "tails", "radix", "ledger", "pins"
ORDER = "policy", "programs", "gaps", "waiting", "holding", "slots", "order", "room", "tally", "admission", "scheduler"
POLICY = {f"sglite.runtime.{name}" for name in ("plan", "sequence", *PAGES, *ORDER)}

MODULES = {
    ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(ROOT.rglob("*.py"))
}


def imports(module: str, *, typing: bool = False) -> Iterator[str]:
    """Full names of what a module imports, inside functions too; ``if TYPE_CHECKING`` only with ``typing``."""
    tree = ast.parse(MODULES[module].read_text(encoding="utf-8"))
    skipped = {
        inner
        for node in ast.walk(tree)
        if not typing and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} uses a relative import"
            assert node.module is not None
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in MODULES else node.module


def inside(name: str, *packages: str) -> bool:
    return any(name == p or name.startswith(p + ".") for p in packages)


def ours(module: str, *, typing: bool = False) -> set[str]:
    return {name for name in imports(module, typing=typing) if inside(name, "sglite")}


def modules_in(*packages: str) -> list[str]:
    found = [m for m in MODULES if inside(m, *packages)]
    assert found, f"nothing in {packages}: the rule checks nothing"
    return found


def test_protocol_and_errors_stand_alone() -> None:
    assert ours("sglite.protocol") <= {"sglite.errors"}
    assert ours("sglite.errors") == set()


def test_lang_knows_the_protocol_and_nothing_of_the_runtime() -> None:
    for module in modules_in("sglite.lang"):
        plain = ("sglite.chat", "sglite.templating", "sglite.reasoning", "sglite.codec", "sglite.confidence")
        allowed = (*SHARED, "sglite.lang", *plain)
        for name in ours(module, typing=True):
            assert inside(name, *allowed), f"{module} imports {name}"
        assert not any(inside(name, "torch", "fastapi", "starlette") for name in imports(module)), module


def test_kernels_know_torch_and_triton_only() -> None:
    for module in modules_in("sglite.kernels"):
        for name in ours(module, typing=True):
            assert inside(name, "sglite.kernels", "sglite.errors"), f"{module} imports {name}"


def test_policy_is_plain_python() -> None:
    for module in POLICY:
        assert not any(inside(name, "torch", "numpy") for name in imports(module, typing=True)), module
        assert ours(module, typing=True) <= SHARED | POLICY, module


def test_the_server_is_given_a_backend() -> None:
    for module in modules_in("sglite.runtime.server"):
        shared = (*SHARED, "sglite.chat", "sglite.templating", "sglite.reasoning", "sglite.codec", "sglite.confidence")
        loop = ("sglite.runtime.pace", "sglite.runtime.garbage")  # of any process that serves
        allowed = (*shared, *loop, "sglite.runtime.server")
        for name in ours(module, typing=True) - {"sglite"}:  # the package itself, for its version
            assert inside(name, *allowed), f"{module} imports {name}"


def test_nothing_but_the_cli_imports_the_server() -> None:
    for module in MODULES:
        if not inside(module, "sglite.runtime.server", "sglite.cli"):
            assert not any(inside(name, "sglite.runtime.server") for name in ours(module, typing=True)), module


@pytest.mark.parametrize(
    ("library", "homes"),
    [
        ("fastapi", ["sglite.runtime.server"]),
        ("triton", ["sglite.kernels"]),
        ("llguidance", ["sglite.runtime.grammar"]),
        ("outlines_core", ["sglite.runtime.grammar"]),
        ("gguf", ["sglite.runtime.loading"]),
        ("safetensors", ["sglite.runtime.loading"]),
        ("ray", ["sglite.runtime.cluster"]),
    ],
)
def test_a_library_is_imported_only_where_it_is_adapted(library: str, homes: list[str]) -> None:
    for module in MODULES:
        if any(inside(name, library) for name in imports(module)):
            assert inside(module, *homes), f"{module} imports {library}"


def test_no_cycles() -> None:
    graph = {module: ours(module) - {module} for module in MODULES}
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join([*path[path.index(module) :], module])
        if module not in done:
            for name in sorted(graph.get(module, ())):
                visit(name, (*path, module))
            done.add(module)

    for module in MODULES:
        visit(module, ())


def test_importing_sglite_is_light() -> None:
    heavy = "torch", "transformers", "fastapi", "triton", "llguidance", "outlines_core", "pydantic"
    code = f"import sys, sglite; print([m for m in {heavy!r} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
