"""Fixtures every test may ask for."""

from __future__ import annotations

import pytest

from sglite.runtime.hub import ModelSource, resolve_model


@pytest.fixture(scope="session")
def smollm2() -> ModelSource:
    """The embedded model's files, fetched into the user's cache folder if they are not there yet."""
    return resolve_model("smollm2-135m")
