"""Pages that are not full, where sequences ended: tails of the node above.

Nobody leases one. A sequence that goes on in the same way, or in the way a whole page below the node begins, copies
that page and so finds every token.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import chain, islice

from sglite.runtime.tree import Node

WAYS_ON = 32
"""Of the ways on from a node, how many are looked at for one that begins alike: the latest tails, then pages."""


def most_alike(node: Node, tokens: Sequence[int]) -> tuple[Node | None, int]:
    """The tail or the child whose page begins most like ``tokens``, and for how long; (None, 0) if none does."""
    best, longest = None, 0
    for other in islice(chain(reversed(node.tails.values()), reversed(node.children.values())), WAYS_ON):
        shared = shared_start(other.tokens, tokens)
        if shared > longest:
            best, longest = other, shared
    return best, longest


def superseded(node: Node, run: array[int]) -> Iterator[Node]:
    """Tails that are a beginning of a new one, which add nothing any more. (Those that are a beginning of a page stay:
    the page may go with the branch that went on so.)"""
    for n in range(1, len(run) + 1) if node.tails else ():
        tail = node.tails.get(run[:n].tobytes())
        if tail is not None:
            yield tail


def shared_start(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common beginning; for short ones."""
    n = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        n += 1
    return n
