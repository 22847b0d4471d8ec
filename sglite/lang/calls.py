"""What a run did: one record per call of the model, printed as a tree or written as JSON."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from sglite.lang.variables import Site
from sglite.protocol import Usage

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.tree import Tree


@dataclass(slots=True)
class Call:
    """Times are seconds. ``start`` counts from the program's beginning; ``ttft`` is None where nothing came."""

    name: str | None
    kind: Literal["gen", "select", "score"]
    branch: str
    request_id: str
    site: str
    start: float
    prompt_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0
    forced_tokens: int = 0
    queue_time: float = 0.0
    prefill_time: float = 0.0
    decode_time: float = 0.0
    ttft: float | None = None
    wall: float = 0.0
    finish: str | None = None
    error: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second of decoding (of the whole call, where the backend does not say)."""
        seconds = self.decode_time or self.wall
        return self.new_tokens / seconds if seconds else 0.0

    def count(self, usages: Sequence[Usage]) -> None:
        """Puts the samples' usage in; the prompt's part is shared by all of them."""
        if not usages:
            return
        first, *others = usages
        self.prompt_tokens, self.cached_tokens = first.prompt_tokens, first.cached_tokens
        self.new_tokens, self.forced_tokens = first.completion_tokens, first.forced_tokens
        self.queue_time, self.prefill_time, self.decode_time = first.queue_time, first.prefill_time, first.decode_time
        for usage in others:
            self.cached_tokens = max(self.cached_tokens, usage.cached_tokens)
            self.new_tokens += usage.completion_tokens
            self.forced_tokens += usage.forced_tokens
            self.decode_time = max(self.decode_time, usage.decode_time)

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "notes": list(self.notes), "tokens_per_second": self.tokens_per_second}


_watchers: list[Callable[[ProgramTrace], None]] = []


def watch_traces(watcher: Callable[[ProgramTrace], None]) -> None:
    """Have ``watcher`` called with the trace of every run that begins in this process from now on."""
    _watchers.append(watcher)


@dataclass(slots=True)
class ProgramTrace:
    """The calls of one run in the order in which they were sent, and places where templates diverged."""

    program: str
    function: str
    began: float = field(default_factory=time.perf_counter)
    calls: list[Call] = field(default_factory=list)
    divergences: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        for watcher in _watchers:
            watcher(self)

    def __iter__(self) -> Iterator[Call]:
        return iter(self.calls)

    def __len__(self) -> int:
        return len(self.calls)

    @property
    def truncated(self) -> list[Call]:
        """The calls that ended because their tokens ran out."""
        return [call for call in self.calls if call.finish == "length"]

    def clock(self) -> float:
        return time.perf_counter() - self.began

    def start(self, kind: Literal["gen", "select", "score"], name: str | None, branch: str, site: Site | None) -> Call:
        """A record for a call that is about to be sent; its number makes the request's id."""
        file, line = site or ("?", 0)
        request_id = f"{self.program}-{len(self.calls)}"
        call = Call(name, kind, branch, request_id, f"{file}:{line}", self.clock())
        self.calls.append(call)
        return call

    def to_json(self) -> dict[str, Any]:
        return {
            "program": self.program,
            "function": self.function,
            "calls": [call.as_json() for call in self.calls],
            "divergences": list(self.divergences),
        }

    def tree(self) -> Tree:
        """Branches as a tree, one line per call."""
        from rich.tree import Tree

        root = Tree(f"[bold]{self.function}[/bold] {self.program[:8]}")
        nodes = {"": root}
        for call in self.calls:
            _branch_node(nodes, call.branch).add(_line(call))
        for note in self.divergences:
            root.add(f"[yellow]{_escape(note)}[/yellow]")
        return root

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.tree()

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(width=140, no_color=True)
        with console.capture() as capture:
            console.print(self.tree())
        return capture.get().rstrip("\n")


def _branch_node(nodes: dict[str, Tree], branch: str) -> Tree:
    if branch not in nodes:
        parent, _, _ = branch.rpartition(".")
        nodes[branch] = _branch_node(nodes, parent).add(f"branch {branch}")
    return nodes[branch]


def _line(call: Call) -> str:
    forced = f", {call.forced_tokens} forced" if call.forced_tokens else ""
    ttft = "" if call.ttft is None else f", first after {call.ttft * 1000:.0f} ms"
    ending = f"[red]{_escape(call.error)}[/red]" if call.error else (call.finish or "unfinished")
    name = "" if call.name is None else f" [bold]{_escape(call.name)}[/bold]"
    return (
        f"{call.kind}{name}: {call.prompt_tokens} prompt ({call.cached_tokens} cached), {call.new_tokens} new{forced}"
        f"{ttft}, {call.tokens_per_second:.0f} tok/s, {ending}"
    )


def _escape(text: str) -> str:
    from rich.markup import escape

    return escape(text)
