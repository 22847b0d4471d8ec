"""The examples as people run them: each file's main() with a command line, on a backend that is set already."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import sglite as sgl

FOLDER = Path(__file__).parents[2] / "examples" / "agents"


@pytest.fixture
def agents(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The folder is importable, and afterwards nothing is left of it, nor a default backend."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setenv("COLUMNS", "120")
    yield
    sgl.set_default_backend(None)
    for name in set(sys.modules) - before:
        if str(FOLDER) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.fixture
def load(agents: None):
    def load(name: str) -> ModuleType:
        return importlib.import_module(name)

    return load
