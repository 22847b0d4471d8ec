"""Looking for the way out costs more than a mask, so a budget that is ample must hardly ever look."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sglite.runtime.grammar import budget as budget_module

NAMES = ["name", "order", "orderId", "note", "age", "list"]
SCHEMA = {
    "type": "object",
    "properties": {name: {"type": "string", "maxLength": 20} for name in NAMES}
    | {"items": {"type": "object", "properties": {"id": {"type": "integer"}}, "required": ["id"]}},
    "required": [*NAMES, "items"],
    "additionalProperties": False,
}
ANSWER = json.dumps(dict.fromkeys(NAMES, "foo bar") | {"items": {"id": 7}})


@pytest.mark.parametrize(("share", "most"), [(3.0, 0.2), (1.5, 0.5)])
def test_looks_are_rare(bench: Any, monkeypatch: pytest.MonkeyPatch, share: float, most: float) -> None:
    """``share``: the budget, as a multiple of the answer's tokens; ``most``: looks per token."""
    looks: list[int] = []
    inner = budget_module.way_out

    def counted(*args: Any) -> Any:
        looks.append(1)
        return inner(*args)

    monkeypatch.setattr(budget_module, "way_out", counted)
    ids = bench.ids(ANSWER)
    matcher = bench.compile("json_schema", json.dumps(SCHEMA)).matcher(int(share * len(ids)))
    looks.clear()
    for id in ids:
        assert id in bench.allowed(matcher)
        assert matcher.accept([id])
        assert not matcher.retreat()
    assert matcher.accepting
    assert len(looks) <= most * len(ids)
