"""outlines-core behind the grammar seam: regex, choices and plain JSON Schema, as automata over tokens.

Compilation runs in a child with limits on time and memory (outlines_child.py); what comes back are tables. There is
no jump-forward here. Keywords that outlines-core ignores or mistranslates are refused by name.
"""

from __future__ import annotations

import json
import re
import select
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import outlines_core

from sglite.errors import GrammarError
from sglite.protocol import Constraint
from sglite.runtime.grammar.base import MaskRow
from sglite.runtime.grammar.llguidance_backend import allow, token_table
from sglite.runtime.grammar.outlines_child import read_frame, write_frame
from sglite.runtime.grammar.vocabulary import Vocabulary

VERSION = "outlines-core 0.2"
MEGABYTES = 1024
"""Address space of the child; the interpreter and its libraries take a part of it."""
KEYWORDS = frozenset(
    {"type", "properties", "required", "additionalProperties", "items", "minItems", "maxItems", "enum", "const"}
    | {"minLength", "maxLength", "pattern", "anyOf", "$ref", "$defs"}
)


class OutlinesBackend:
    name = "outlines"
    kinds: frozenset[str] = frozenset({"json_schema", "regex", "choices"})

    def __init__(self, vocabulary: Vocabulary, *, seconds: float = 1.8) -> None:
        self.vocabulary = vocabulary
        self.tokens = token_table(vocabulary)
        self._child = _Child([word.hex() for word in self.tokens.bytes_of], seconds)

    def compile(self, constraint: Constraint) -> OutlinesGrammar:
        """Takes 10 ms to seconds; ends in GrammarError (limit) when the child takes too long or too much."""
        if constraint.whitespace != "spaced":
            raise GrammarError(
                "grammar=outlines cannot choose the whitespace of JSON; use grammar=llguidance",
                kind="unsupported",
                param=constraint.kind,
            )
        tokens, singles = self._child.compile(_job(constraint), constraint.kind)
        return OutlinesGrammar(tokens, singles, self.vocabulary, constraint.kind)

    def close(self) -> None:
        self._child.kill()


class _Child:
    """One child at a time; killed when it overruns, started again when needed."""

    def __init__(self, words: list[str], seconds: float) -> None:
        self._words = json.dumps(words).encode()
        self._seconds = seconds
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._running()  # its start must not count against the first deadline

    def compile(self, job: dict[str, str], kind: str) -> tuple[bytes, bytes]:
        with self._lock:
            process = self._running()
            assert process.stdin is not None and process.stdout is not None
            try:
                write_frame(process.stdin, json.dumps(job).encode())
                frames = self._frames(process)
            except OSError:
                frames = None
            if frames is None:
                self.kill()
                raise GrammarError(f"{kind}: too large for grammar=outlines", kind="limit", param=kind)
            if len(frames) == 1:
                reason = json.loads(frames[0])["error"].split("\n")[0]
                raise GrammarError(f"{kind}: {reason}", param=kind)
            return frames[1], frames[2]

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            command = [sys.executable, "-m", "sglite.runtime.grammar.outlines_child", str(MEGABYTES)]
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0
            )
            assert self._process.stdin is not None
            write_frame(self._process.stdin, self._words)
        return self._process

    def _frames(self, process: subprocess.Popen[bytes]) -> list[bytes] | None:
        """The answer, or None when it does not come in time."""
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], self._seconds)
        first = read_frame(_Whole(process.stdout)) if ready else None
        if first is None or first != b"{}":
            return None if first is None else [first]
        rest = [read_frame(_Whole(process.stdout)) for _ in range(2)]
        return None if None in rest else [first, *(frame for frame in rest if frame is not None)]


class _Whole:
    """Reads exactly what is asked for from an unbuffered pipe (less at its end)."""

    def __init__(self, pipe: Any) -> None:
        self._pipe = pipe

    def read(self, size: int, /) -> bytes:
        parts: list[bytes] = []
        while size > 0 and (part := self._pipe.read(size)):
            parts.append(part)
            size -= len(part)
        return b"".join(parts)


def _job(constraint: Constraint) -> dict[str, str]:
    if constraint.kind == "choices":
        return {"regex": "|".join(re.escape(choice) for choice in json.loads(constraint.source))}
    if constraint.kind == "regex":
        return {"regex": _unanchored(constraint.source)}
    _refuse_unknown(json.loads(constraint.source), "")
    return {"schema": constraint.source}


def _unanchored(regex: str) -> str:
    """Whole texts are matched anyway, and a leading ``^`` is an error."""
    regex = regex.removeprefix("^")
    return regex[:-1] if regex.endswith("$") and not regex.endswith("\\$") else regex


def _refuse_unknown(node: Any, pointer: str) -> None:
    if not isinstance(node, dict):
        return
    unknown = sorted(node.keys() - KEYWORDS)
    if unknown:
        message = f"json_schema at {pointer or '/'}: grammar=outlines does not support {unknown[0]}"
        raise GrammarError(message, kind="unsupported", param="json_schema", pointer=f"{pointer}/{unknown[0]}")
    for keyword in ("properties", "$defs"):
        for name, part in node.get(keyword, {}).items():
            _refuse_unknown(part, f"{pointer}/{keyword}/{name}")
    for i, part in enumerate(node.get("anyOf", ())):
        _refuse_unknown(part, f"{pointer}/anyOf/{i}")
    _refuse_unknown(node.get("items"), f"{pointer}/items")


class _Index:
    """An automaton, begun after the sentinel. ``width`` is the number of tokens before it."""

    def __init__(self, data: bytes, width: int) -> None:
        self._index = outlines_core.Index.from_binary(data)
        self._width = width
        self.start: int | None = self._index.get_next_state(self._index.get_initial_state(), width)

    def next(self, state: int | None, token: int) -> int | None:
        found: int | None = None if state is None else self._index.get_next_state(state, token)
        return found

    def final(self, state: int | None) -> bool:
        return state is not None and bool(self._index.is_final_state(state))

    def allowed(self, state: int | None) -> list[int]:
        ids = None if state is None else self._index.get_allowed_tokens(state)
        return [id for id in ids or () if id < self._width]


class OutlinesGrammar:
    def __init__(self, tokens: bytes, singles: bytes, vocabulary: Vocabulary, kind: str) -> None:
        self.index = _Index(tokens, vocabulary.width)
        self.bytes_index = _Index(singles, 256)
        self.vocabulary = vocabulary
        self.kind = kind
        self.nbytes = 4 * (len(tokens) + len(singles))
        if not self.index.allowed(self.index.start) and not self.index.final(self.index.start):
            raise GrammarError("no text can satisfy the constraint", kind="unsatisfiable", param=kind)

    def matcher(self) -> OutlinesMatcher:
        return OutlinesMatcher(self, [self.index.start])

    def byte_matcher(self) -> OutlinesBytes:
        return OutlinesBytes(self.bytes_index, [self.bytes_index.start])


class OutlinesMatcher:
    """``states[i]`` is the automaton's state after i tokens."""

    def __init__(self, grammar: OutlinesGrammar, states: list[int | None], ended: bool = False) -> None:
        self._grammar = grammar
        self._states = states
        self._ended = ended

    @property
    def accepting(self) -> bool:
        return self._grammar.index.final(self._states[-1])

    @property
    def terminated(self) -> bool:
        return self._ended or not self._grammar.index.allowed(self._states[-1])

    def fill(self, row: MaskRow) -> None:
        row.fill(0)
        if not self._ended:
            ids = np.array(self._grammar.index.allowed(self._states[-1]), np.int64)
            bits = row.view(np.uint32)
            np.bitwise_or.at(bits, ids // 32, np.uint32(1) << (ids % 32).astype(np.uint32))
        if self.accepting:
            allow(row, self._grammar.vocabulary.eos_ids)
        if not row.any():
            message = "nothing the model's tokens can spell satisfies the constraint"
            raise GrammarError(message, kind="unsatisfiable", param=self._grammar.kind)

    def accept(self, ids: Sequence[int]) -> bool:
        states, ended = list(self._states), self._ended
        for id in ids:
            if ended:
                return False
            if id in self._grammar.vocabulary.eos_ids:
                if not self._grammar.index.final(states[-1]):
                    return False
                ended = True
                continue
            state = self._grammar.index.next(states[-1], id) if 0 <= id < self._grammar.vocabulary.width else None
            if state is None:
                return False
            states.append(state)
        self._states, self._ended = states, ended
        return True

    def rollback(self, n: int) -> None:
        if n and self._ended:
            self._ended = False
            n -= 1
        assert n < len(self._states)
        del self._states[len(self._states) - n :]

    def forced(self) -> list[int]:
        return []

    def clone(self) -> OutlinesMatcher:
        return OutlinesMatcher(self._grammar, list(self._states), self._ended)


class OutlinesBytes:
    """See way_out.ByteMatcher."""

    def __init__(self, index: _Index, states: list[int | None]) -> None:
        self._index = index
        self._states = states

    @property
    def accepting(self) -> bool:
        return self._index.final(self._states[-1])

    def accept(self, data: bytes) -> bool:
        for byte in data:
            self._states.append(self._index.next(self._states[-1], byte))
        return self._states[-1] is not None

    def allowed(self) -> bytes:
        return bytes(sorted(self._index.allowed(self._states[-1])))

    def forced(self) -> bytes:
        return b""

    def clone(self) -> OutlinesBytes:
        return OutlinesBytes(self._index, list(self._states))
