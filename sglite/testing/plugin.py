"""Fixtures for pytest: ``pytest_plugins = ["sglite.testing.plugin"]`` in a conftest.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sglite.lang.api import set_default_backend
from sglite.testing import MockBackend


@pytest.fixture
def mock_backend() -> Iterator[MockBackend]:
    """A MockBackend without a script, the default backend while the test runs."""
    backend = MockBackend()
    set_default_backend(backend)
    yield backend
    set_default_backend(None)
