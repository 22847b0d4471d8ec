"""How a string that has begun may end, read off the automata of a schema's patterns.

From outside, places in ``^[a-z.]+@([a-z]+[.])+[a-z]+$`` look alike, so a search by what is allowed next does not find
the dot. The automaton knows it.
"""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import interegular.fsm

from sglite.runtime.grammar import proofs

MOST = 16
"""So many patterns of one schema are looked at."""
LONGEST = 240
"""So long may they be."""
_SPARE = "a0-_ .é"
"""Of these one is no character of its own in nearly every pattern."""
Exits = dict[int, tuple[str, int]]
"""For each state of an automaton that is not final: a character on a shortest way to one, and the next state."""


@dataclass(frozen=True)
class Endings:
    patterns: tuple[str, ...]

    def of(self, content: bytes) -> Iterator[bytes]:
        """What may follow ``content``, which stands in a JSON string, to its closing quote: one for each pattern that
        can still match and does not yet."""
        try:
            text = json.loads(b'"' + content + b'"')
        except ValueError:  # in the middle of a character or an escape
            return
        for pattern in self.patterns[:MOST]:
            rest = ending(pattern, text)
            if rest:
                yield json.dumps(rest, ensure_ascii=False)[1:].encode()


def ending(pattern: str, text: str) -> str | None:
    """The shortest text after which ``pattern`` matches (somewhere) in ``text`` and it; None where it is not known or
    there is none."""
    automaton = proofs.automaton(pattern, LONGEST)
    if automaton is None:
        return None
    state, rest = automaton.initial, ""
    for char in text:
        state = automaton.map.get(state, {}).get(automaton.alphabet[char])
        if state is None:
            return None
    exits = _exits(pattern)
    while state not in automaton.finals:
        if state not in exits:
            return None
        char, state = exits[state]
        rest += char
    return rest


@lru_cache(256)
def _exits(pattern: str) -> Exits:
    automaton = proofs.automaton(pattern, LONGEST)
    before: defaultdict[int, list[tuple[str, int]]] = defaultdict(list)
    spelled = {key: _spelling(chars, automaton.alphabet) for key, chars in automaton.alphabet.by_transition.items()}
    for state, ways in automaton.map.items():
        for key, after in ways.items():
            if spelled[key]:
                before[after].append((spelled[key], state))
    found: Exits = {}
    todo = deque(sorted(automaton.finals))
    while todo:
        state = todo.popleft()
        for char, earlier in sorted(before[state]):
            if earlier not in found and earlier not in automaton.finals:
                found[earlier] = (char, state)
                todo.append(earlier)
    return found


def _spelling(chars: list[Any], alphabet: Any) -> str:
    """One of the characters, a plain one if there is any; "" where none can be named."""
    named = [char for char in chars if isinstance(char, str)]
    if interegular.fsm.anything_else in chars:
        named += [char for char in _SPARE if char not in alphabet]
    return min(
        named, key=lambda char: (not char.isalnum(), not char.isascii(), not char.isprintable(), char), default=""
    )
