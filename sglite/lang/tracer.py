"""Programs as symbols."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglite.lang import nodes as n

if TYPE_CHECKING:
    from sglite.lang.program import Program


def constant_prefix(program: Program) -> tuple[n.Expr, ...]:
    return ()


def trace_program(program: Program, arguments: dict[str, Any]) -> Any:
    raise NotImplementedError
