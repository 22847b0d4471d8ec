"""Errors in the author's words: ``gen`` calls some things differently than the protocol does."""

from __future__ import annotations

import copy
import re

from sglite.errors import InvalidRequestError
from sglite.lang.nodes import Expr, Gen, Select

GEN_WORDS = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens"}
"""What the protocol calls arguments of ``gen``, where it has other words."""
_CONSTRAINT = frozenset({"constraint", "regex", "json_schema", "choices"})


def as_written(error: Exception, node: Expr) -> Exception:
    """``error`` about the arguments that stand in the program: the ones of ``gen``. What was said to ``run`` has the
    protocol's names there."""
    if not isinstance(error, InvalidRequestError):
        return error
    words = _words(node)
    said = copy.copy(error)
    said.args = (re.sub(r"\w+", lambda found: words.get(found[0], found[0]), str(error)),)
    if isinstance(node, Select) and error.param == "candidates":
        said.param = "choices"
    elif isinstance(node, Gen) and node.argument and error.param in _CONSTRAINT:
        said.param = node.argument
    elif error.param is not None:
        said.param = words.get(error.param, error.param)
    return said.with_traceback(error.__traceback__)


def _words(node: Expr) -> dict[str, str]:
    """The protocol's words for what ``node`` was given, and the author's."""
    given = {name for name, _ in node.given} if isinstance(node, Gen) else set()
    return {theirs: ours for ours, theirs in GEN_WORDS.items() if theirs in given}
