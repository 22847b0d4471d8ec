"""What the prefix cache is made of: nodes, a tree of them per namespace, and leases on their paths."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

Namespace = tuple[str, ...]


class Node:
    """A run of ``len(pages)`` pages below ``parent``; a child is found by the bytes of its first page's tokens."""

    __slots__ = ("children", "pages", "parent", "refs", "space", "tails", "tokens")

    def __init__(self, space: Space, parent: Node | None, tokens: array[int], pages: array[int], refs: int) -> None:
        self.space = space
        self.parent = parent
        self.tokens = tokens
        self.pages = pages
        self.refs = refs
        self.children: dict[bytes, Node] = {}
        self.tails: dict[bytes, Node] = {}


class Space:
    """The tree of one namespace. ``alive`` ends with a flush: nothing matches it any more.

    ``used`` says how many pages the whole cache had ever taken in when this namespace was last looked up.
    """

    __slots__ = ("alive", "idle", "name", "pages", "root", "used")

    def __init__(self, name: Namespace) -> None:
        self.name = name
        self.alive = True
        self.pages = 0
        self.used = 0
        self.idle: OrderedDict[Node, None] = OrderedDict()
        self.root = Node(self, None, array("i"), array("i"), 0)


class Lease:
    """The first ``length`` positions of some sequence, kept in the tree until the lease is released.

    ``begun``: a page, and how many of its first positions are the ones that follow; to be copied before pages change.
    ``spent`` says from which position on nobody will come back to it: that is the first to be evicted, or with
    ``dropped`` evicted at once.
    """

    __slots__ = ("begun", "dropped", "length", "node", "spent")

    def __init__(self, node: Node, length: int) -> None:
        self.node: Node | None = node
        self.length = length
        self.begun: tuple[int, int] | None = None
        self.spent: int | None = None
        self.dropped = False


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Pages now in the tree, by whether they may be evicted, and what happened since the start. ``depth``: nodes on the
    path of a lease when it was given, on average."""

    evictable: int
    protected: int
    nodes: int
    namespaces: int
    leases: int
    inserted: int
    duplicates: int
    evicted: int
    depth: float


def key(node: Node, page_size: int) -> bytes:
    """By which its parent knows it."""
    return node.tokens[:page_size].tobytes()


def walk(spaces: Iterable[Space]) -> Iterator[Node]:
    """All nodes, roots and tails included."""
    stack = [space.root for space in spaces]
    while stack:
        node = stack.pop()
        yield node
        stack += (*node.children.values(), *node.tails.values())


def check_node(node: Node, page_size: int) -> None:
    """Assert what is true of every node."""
    assert node.refs >= sum(child.refs for child in node.children.values())
    for name, child in node.children.items():
        assert child.parent is node and child.space is node.space and name == key(child, page_size)
        assert len(child.tokens) == len(child.pages) * page_size > 0
        assert node.space.alive or child.refs, "flushed nodes live as long as their leases"
    for name, tail in node.tails.items():
        assert tail.parent is node and tail.space is node.space and name == key(tail, page_size)
        assert 0 < len(tail.tokens) < page_size and len(tail.pages) == 1
        assert tail.refs == 0 and not tail.children and not tail.tails and tail.space.alive
    if node.parent is None:
        assert node.refs or node.children or node.tails, "an empty namespace is forgotten"
