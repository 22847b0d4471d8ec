"""The document of our API: it is true. `make schemathesis` looks much longer."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import httpx
import pytest

Call = Callable[..., httpx.Response]


@pytest.mark.timeout(200)
def test_a_quick_look_by_schemathesis() -> None:
    if find_spec("schemathesis") is None:
        pytest.skip("schemathesis is not installed: pip install 'sglite[dev]'")
    from fuzz_openapi import fuzz

    done = fuzz(examples=2, seconds=9, seed=1)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]


def test_every_operation_documents_its_refusals(call: Call) -> None:
    paths = call("GET", "/openapi.json").json()["paths"]
    for path, operations in paths.items():
        for method, operation in operations.items():
            assert {"200", "4XX", "503"} <= set(operation["responses"]), (method, path)
            assert operation.get("description") or operation.get("summary"), (method, path)
