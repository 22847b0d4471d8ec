"""Structural tags: free text in which certain regions, as tool calls, must follow a schema.

The source is ``{"structures": [{"begin", "schema", "end"}, ...], "triggers": [str, ...]}``: where the text contains a
trigger, it must go on as one of the structures that begin with it. Regions are enforced by the mask alone, so a
schema that needs more than a mask is refused by name.
"""

from __future__ import annotations

import json
from typing import Any, NoReturn

from sglite.errors import GrammarError
from sglite.runtime.grammar.lower import EFFORTS, lower
from sglite.runtime.grammar.refs import dialect_of, root_scope

MAX_STRUCTURES = 128


def lowered_tags(source: str) -> str:
    """The source with every schema lowered, and with the trigger each structure has. Raises GrammarError."""
    value = json.loads(source)
    structures, triggers = (_list(value, name) for name in ("structures", "triggers"))
    if not structures or not triggers or not all(isinstance(trigger, str) and trigger for trigger in triggers):
        _refuse('it needs "structures" and "triggers", lists that are not empty', "")
    if len(structures) > MAX_STRUCTURES:
        _refuse(f"more than {MAX_STRUCTURES} structures", "/structures", "limit")
    placed = [_structure(item, triggers, f"/structures/{i}") for i, item in enumerate(structures)]
    for i, trigger in enumerate(triggers):
        if not any(item["begin"].startswith(trigger) for item in placed):
            _refuse("no structure begins with it", f"/triggers/{i}")
    return json.dumps(placed)


def _structure(item: Any, triggers: list[str], pointer: str) -> dict[str, Any]:
    if not isinstance(item, dict) or not all(isinstance(item.get(name), str) for name in ("begin", "end")):
        _refuse('a structure needs "begin" and "end", both strings, and "schema"', pointer)
    trigger = min((t for t in triggers if item["begin"].startswith(t)), key=len, default=None)
    if trigger is None:
        _refuse("no trigger is what it begins with", f"{pointer}/begin")
    return {**item, "trigger": trigger, "schema": _schema(item.get("schema", {}), f"{pointer}/schema")}


def _schema(schema: Any, pointer: str) -> dict[str, Any]:
    source = json.dumps(schema, separators=(",", ":"), ensure_ascii=False)
    dialect = dialect_of(schema, source)
    try:
        found = lower(schema, root_scope(schema, source, dialect), dialect, EFFORTS[0])
    except GrammarError as error:
        _refuse(str(error), pointer + (error.pointer or ""), error.kind)
    judged = [keyword for keyword, how in found.how.items() if how == "rollback"]
    if judged:
        _refuse(f"{judged[0]} cannot be enforced inside of free text", pointer, "unsupported")
    return found.mask


def _list(value: Any, name: str) -> list[Any]:
    found = value.get(name) if isinstance(value, dict) else None
    return found if isinstance(found, list) else []


def _refuse(message: str, pointer: str, kind: str = "malformed") -> NoReturn:
    text = f"structural_tag at {pointer or '/'}: {message}"
    raise GrammarError(text, kind=kind, param="structural_tag", pointer=pointer)
