"""llama.cpp's grammar syntax as Lark: llguidance's parser, with our own reading of escapes and names.

llguidance reads terminals greedily, each by itself, and GBNF knows no terminals: a rule is a terminal here where it
does not recur. A grammar without recursion is thus a single terminal, which is exact; in others a terminal takes all
that it can, and texts where it would have to leave something to what follows are not accepted.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator

from llguidance.gbnf_to_lark import (
    ASTNode,
    GbnfToLarkError,
    GrammarParser,
    LiteralNode,
    RegexNode,
    RuleNode,
    RuleRefNode,
)

from sglite.errors import GrammarError

_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL)


def is_gbnf(source: str) -> bool:
    return re.search(r"^\s*[\w-]+\s*::=", source, re.MULTILINE) is not None


def lark_of(source: str) -> str:
    """Raises GrammarError: what is wrong, and where."""
    try:
        rules = GrammarParser().parse(_ESCAPE.sub(_spelled, source))
        return _lark(rules)
    except GbnfToLarkError as error:
        before = error.pos.text[: error.pos.pos]
        raise _error(str(error), f"{before.count(chr(10)) + 1}:{len(before.rpartition(chr(10))[2]) + 1}") from None
    except RecursionError:
        raise GrammarError("GBNF: nested too deeply", kind="limit", param="ebnf") from None


def _error(message: str, pointer: str | None = None, kind: str = "malformed") -> GrammarError:
    return GrammarError(f"GBNF: {message}", kind=kind, param="ebnf", pointer=pointer)


def _spelled(escape: re.Match[str]) -> str:
    """A character by its number as Lark and regular expressions both read it."""
    digits = next((group for group in escape.groups() if group), None)
    if digits is None:
        return escape.group()
    number = int(digits, 16)
    if number > 0x10FFFF or 0xD800 <= number < 0xE000:
        raise _error(f"{escape.group()} is no character")
    return chr(number) if number >= 0x80 else f"\\x{number:02x}"


def _lark(rules: dict[str, RuleNode]) -> str:
    if "root" not in rules:
        raise _error("there is no rule named root")
    uses = {name: _linked(rule, rules) for name, rule in rules.items()}
    terminals = _not_recursive(uses)
    for i, (name, rule) in enumerate(rules.items()):
        rule.name = f"T{i}" if name in terminals else "start" if name == "root" else f"n{i}"
    start = [f"start: {rules['root'].name}"] if "root" in terminals else []
    return "\n".join(["%llguidance {}", *start, *(f"{rule.name}: {rule.alternatives}" for rule in rules.values())])


def _linked(rule: RuleNode, rules: dict[str, RuleNode]) -> set[str]:
    """The names that a rule uses; each use points to its rule afterwards."""
    used = set()
    for node in _nodes(rule.alternatives):
        if isinstance(node, RegexNode):
            node.rx = _class(node.rx)
        if isinstance(node, LiteralNode):
            node.value = re.sub(r"\\(.)", lambda found: found[found[1] in "[]"], node.value)
        if isinstance(node, RuleRefNode):
            if node.name not in rules:
                raise _error(f"there is no rule named {node.name}")
            node.target = rules[node.name]
            used.add(node.name)
    return used


def _class(text: str) -> str:
    """A class of characters as a regular expression, in which && and the like would mean operations on sets."""
    if "--" in text:
        raise _error(f"-- in {text} is not supported; write \\x2d for a hyphen", kind="unsupported")
    return "(?s:.)" if text == "." else re.sub("[&~]", r"\\\g<0>", text)


def _nodes(node: ASTNode) -> Iterator[ASTNode]:
    yield node
    for child in node.children():
        yield from _nodes(child)


def _not_recursive(uses: dict[str, set[str]]) -> set[str]:
    """The rules that use, however far down, only rules that end."""
    users = defaultdict(list)
    for name, used in uses.items():
        for other in used:
            users[other].append(name)
    open_uses = {name: len(used) for name, used in uses.items()}
    found = [name for name, count in open_uses.items() if count == 0]
    for name in found:
        for user in users[name]:
            open_uses[user] -= 1
            if open_uses[user] == 0:
                found.append(user)
    return set(found)
