"""Nodes that no lease is on, in the order in which they are evicted: in one line, and in one of each namespace.

Least recently released first. A release files the deepest node of its path first, and a parent has at least as many
references as any child: so the first in either line is always a leaf, and eviction needs no search, no heap, no clock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator

from sglite.runtime.tree import Node


class IdleNodes:
    def __init__(self) -> None:
        self.pages = 0
        """Of all nodes in line: as many can be evicted now."""
        self._line: OrderedDict[Node, None] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._line)

    def __iter__(self) -> Iterator[Node]:
        return iter(self._line)

    @property
    def first(self) -> Node:
        return next(iter(self._line))

    def add(self, node: Node) -> None:
        """Last in line."""
        self.pages += len(node.pages)
        self.cut(node)

    def cut(self, upper: Node) -> None:
        """The upper part of a node in line, cut off: last in line, and its pages are counted already."""
        self._line[upper] = upper.space.idle[upper] = None

    def remove(self, node: Node) -> None:
        self.pages -= len(node.pages)
        del self._line[node], node.space.idle[node]

    def touch(self, node: Node) -> None:
        """Last in line again."""
        self._move(node, last=True)

    def prefer(self, nodes: Iterable[Node]) -> None:
        """First in line, the last of them before all others."""
        for node in nodes:
            self._move(node, last=False)

    def _move(self, node: Node, *, last: bool) -> None:
        self._line.move_to_end(node, last)
        node.space.idle.move_to_end(node, last)
