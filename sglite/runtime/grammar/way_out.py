"""A short way out of a text: what has to follow until it is complete.

llguidance does not know it. So it is searched for in bytes, over copies of a matcher whose tokens are the 256 bytes:
there a mask costs 3 us, and what is forced comes in one piece. The search follows the most promising byte first (close
what is open, go where one has not been) and then the ways that leave that path once, twice and so on. What it finds
is cut into the fewest tokens. Nothing found means only that: the search is bounded.
"""

from __future__ import annotations

import heapq
import itertools
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, Self

from sglite.runtime.grammar.tokens import TokenTable


class Effort(NamedTuple):
    """``work`` bytes are tried in each pass, for ``seconds`` in all: hostile grammars make a single byte expensive."""

    work: int
    seconds: float


WIDE = 24
"""Where more bytes than this are allowed, they are mostly the content of a string, and a few stand for all."""
SAMPLES = b'"}],:01aA -.@/'
PASSES = ((SAMPLES, True), (SAMPLES, False), (bytes(range(0x20, 0x7F)), True))
"""What stands for all, and whether of places that look alike one is enough: to the mask it is, to a judge it may not
be (items that must differ). Each is tried when the one before found nothing."""
PREFERRED = b'}]",0123456789[ntf{'
"""What tends to end a value soonest, best first."""
FILLERS = b"a0"
"""What a string is filled with until it is long enough to end."""
STRETCH = 2048
"""So many bytes at most."""
SHORT = 256
"""How a longer string may end is asked but once: where the search begins."""
QUOTE, COMMA = b'",'


class Judged(Protocol):
    """What more than the grammar asks of the bytes that follow a text."""

    def begin(self) -> object:
        """The place before the first of them."""
        ...

    def after(self, place: Any, path: bytes) -> object | None:
        """The place after all of ``path``, which goes on from ``place``; None where it breaks a rule."""
        ...

    def valid(self, path: bytes) -> bool:
        """Whether the text is right as a whole after ``path``."""
        ...


class ByteMatcher(Protocol):
    """A place in a grammar whose tokens are single bytes."""

    @property
    def accepting(self) -> bool: ...

    def accept(self, data: bytes) -> bool:
        """False when ``data`` cannot follow; the matcher is of no use any more then."""
        ...

    def allowed(self) -> bytes:
        """The bytes that may follow, in order."""
        ...

    def forced(self) -> bytes:
        """The bytes that must follow."""
        ...

    def clone(self) -> Self: ...


@dataclass(frozen=True, slots=True)
class Brackets:
    """What is open in a JSON text: at least so many bytes are still to come. ``content`` is what the open string holds
    so far."""

    depth: int = 0
    in_string: bool = False
    escaped: bool = False
    content: bytes = b""
    last: int = COMMA
    """The last byte but for spaces; at the start of the text a value may begin as after a comma."""

    def after(self, data: bytes | bytearray) -> Brackets:
        depth, in_string, escaped, content = self.depth, self.in_string, self.escaped, self.content
        begun = 0
        for i, byte in enumerate(data):
            if escaped:
                escaped = False
            elif in_string:
                escaped, in_string = byte == 0x5C, byte != QUOTE
            elif byte == QUOTE:
                in_string, content, begun = True, b"", i + 1
            else:
                depth += (byte in b"[{") - (byte in b"]}")
        last = next((byte for byte in reversed(data) if byte not in b" \t\r\n"), self.last)
        return Brackets(depth, in_string, escaped, content + data[begun:] if in_string else b"", last)

    @property
    def open(self) -> int:
        return self.depth + self.in_string


@dataclass(frozen=True)
class Leads:
    """``endings``: how a string may end whose content begins so: the rest of it, with its closing quote. ``hints``:
    what to try where a value or a name may begin, and a judge has a say."""

    endings: Callable[[bytes], Iterable[bytes]]
    hints: Sequence[bytes] = ()


def way_out(
    start: ByteMatcher,
    brackets: Brackets | None,
    effort: Effort,
    enough: Callable[[bytes], bool],
    judged: Judged | None,
    leads: Leads,
) -> Way:
    """The shortest bytes after which the text is complete (and ``judged`` valid) that are found with ``effort``; or
    the first that are short ``enough``. ``brackets`` is what is open in a JSON text, None for other
    grammars."""
    hopeless, end = False, time.monotonic() + effort.seconds
    for samples, merge in PASSES:
        search = _Search(start, brackets, effort.work, samples, merge, judged, leads)
        for path in search.ways(end):
            if (search.bound is None or len(path) < len(search.bound)) and (judged is None or judged.valid(path)):
                search.bound = path
                if enough(path):
                    break
        if search.bound is not None:
            return Way(search.bound, False)
        hopeless = hopeless or search.saw_everything
    return Way(None, hopeless)


class Way(NamedTuple):
    """``hopeless``: every continuation was looked at, and none is right."""

    path: bytes | None
    hopeless: bool


_State = tuple[bytes, bytes]


@dataclass(frozen=True, slots=True)
class _Step:
    """A place on the way: what was written, what may follow it, what is open there, how it looks from outside, and
    what the judge knows of it."""

    path: bytes
    matcher: ByteMatcher
    opened: Brackets | None
    state: _State
    place: object | None

    @property
    def open(self) -> int:
        return self.opened.open if self.opened is not None else 0


class _Search:
    def __init__(
        self,
        start: ByteMatcher,
        brackets: Brackets | None,
        work: int,
        samples: bytes,
        merge: bool,
        judged: Judged | None,
        leads: Leads,
    ) -> None:
        self._samples = samples
        self._leads = leads
        self._stretched: set[_State] = set()
        self._merge = merge
        self._judged = judged
        place = judged.begin() if judged is not None else None
        self._start = _Step(b"", start.clone(), brackets, (b"", b""), place)
        self._work = work
        self._seen: Counter[_State] = Counter()
        self.bound: bytes | None = None
        """The best way known: longer ones are not followed."""
        self.saw_everything = False
        self._left_out = False

    def ways(self, end: float) -> Iterator[bytes]:
        ties = itertools.count()
        heap: list[tuple[int, int, _Step]] = [(0, 0, self._start)]
        while heap and self._work > 0 and time.monotonic() < end:
            detours, _, step = heapq.heappop(heap)
            if step.matcher.accepting:
                yield step.path
                continue
            self._seen[step.state] += 1
            for detour, next_step in self._steps(step):
                heapq.heappush(heap, (detours + detour, -next(ties), next_step))
        self.saw_everything = not heap and not self._left_out

    def _steps(self, step: _Step) -> Iterator[tuple[int, _Step]]:
        """The next places, the most promising first, and how far each is from that; of those that look alike one is
        enough (with ``merge``). Where the judge refuses some, what is left leads away."""
        refused = False
        found: dict[tuple[_State, bytes], tuple[tuple[int, ...], _Step]] = {}
        for data in self._candidates(step):
            self._work -= 1
            child = step.matcher.clone()
            ahead = _advance(child, data)
            if ahead is None:
                continue
            more = data + ahead
            opened = step.opened.after(more) if step.opened is not None else None
            state = (child.allowed() + bytes([child.accepting]), ahead)
            place = None if self._judged is None else self._judged.after(step.place, step.path + more)
            if self._judged is not None and place is None:
                refused = True
                continue
            after = _Step(step.path + more, child, opened, state, place)
            rank = (after.open, len(data) == 1, self._seen[state], _preference(data), len(more))
            key = (state, b"" if self._merge else data)
            self._left_out = self._left_out or key in found
            if self._may_be_shorter(after) and (key not in found or rank < found[key][0]):
                found[key] = (rank, after)
        return enumerate((after for _, after in sorted(found.values(), key=lambda entry: entry[0])), start=refused)

    def _candidates(self, step: _Step) -> list[bytes]:
        allowed = step.matcher.allowed()
        known = [*self._ends_of_string(step, allowed), *self._hints(step, allowed)]
        if len(allowed) > WIDE:
            self._left_out = True
            allowed = bytes(byte for byte in self._samples if byte in allowed) or allowed[:WIDE]
        return known + [bytes([byte]) for byte in allowed]

    def _ends_of_string(self, step: _Step, allowed: bytes) -> Iterator[bytes]:
        """Where it may not end yet, or the judge may think so."""
        if step.opened is None or not step.opened.in_string or (QUOTE in allowed and self._judged is None):
            return
        if not step.path or len(step.opened.content) <= SHORT:
            yield from self._leads.endings(step.opened.content)
        if QUOTE not in allowed:
            yield from self._fillings(step, allowed)

    def _hints(self, step: _Step, allowed: bytes) -> list[bytes]:
        if self._judged is None or step.opened is None or step.opened.in_string or step.opened.last not in b"[{,:":
            return []
        return [hint for hint in self._leads.hints if hint[0] in allowed]

    def _fillings(self, step: _Step, allowed: bytes) -> list[bytes]:
        """As much of the same as it takes for the string to end, where that is all it takes."""
        if step.state in self._stretched:
            return []
        self._stretched.add(step.state)
        found = (_filling(step.matcher.clone(), bytes([byte])) for byte in FILLERS if byte in allowed)
        return [filling for filling in found if filling]

    def _may_be_shorter(self, step: _Step) -> bool:
        return self.bound is None or len(step.path) + step.open < len(self.bound)


def _filling(matcher: ByteMatcher, byte: bytes) -> bytes:
    for count in range(1, STRETCH):
        if not matcher.accept(byte):
            return b""
        allowed = matcher.allowed()
        if QUOTE in allowed:
            return byte * count if count > 1 else b""
        if byte[0] not in allowed:
            return b""
    return b""


def _preference(data: bytes) -> int:
    found = PREFERRED.find(data[-1:])
    return found if found >= 0 else len(PREFERRED)


def _advance(matcher: ByteMatcher, data: bytes) -> bytes | None:
    """Take ``data`` and what it forces; None where that leads nowhere."""
    if not matcher.accept(data):
        return None
    ahead = matcher.forced()
    return ahead if not ahead or matcher.accept(ahead) else None


def fewest_tokens(tokens: TokenTable, text: bytes, allows: Callable[[list[int]], bool]) -> list[int] | None:
    """The fewest tokens for a way out; a space after a comma or colon is tried where that makes for longer tokens."""
    spaced = re.sub(rb'([,:])(?=["\[{0-9tfn-])', rb"\1 ", text)
    spellings = [ids for ids in (tokens.fewest(text), tokens.fewest(spaced)) if ids is not None]
    return next((ids for ids in sorted(spellings, key=len) if allows(ids)), None)
