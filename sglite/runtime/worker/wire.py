"""What crosses the socket pair: frames of msgpack, each a kind and a value that is checked against its type.

A frame is four bytes of length (big endian), then ``[kind, value]``. Nothing is unpickled, an unknown kind or field
is refused, and a length beyond the bound ends the connection before anything is allocated. A Step's chunks are rows:
they come by the thousand a second, and most of them only add a few letters.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import msgpack

from sglite.codec import decode, encode
from sglite.errors import InvalidRequestError, SgliteError
from sglite.protocol import Chunk, Constraint, GenerateRequest, ModelInfo, Prompt

MAX_FRAME = 64 << 20
"""Bytes of one message. The largest honest one holds the logprobs of a whole context."""
_LENGTH = struct.Struct(">I")


class FrameError(SgliteError):
    """The other side sent what is no message: the connection is of no use any more."""

    code = "bad_frame"


# ------------------------------------------------------------------------------------------------- parent to worker


@dataclass(frozen=True, slots=True)
class Start:
    """The first message: the engine's options."""

    options: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Submit:
    """Generate, and tell of it under the number ``call``."""

    call: int
    request: GenerateRequest


@dataclass(frozen=True, slots=True)
class Cancel:
    call: int


@dataclass(frozen=True, slots=True)
class Ask:
    """A verb of the engine, with the encoded arguments that ``VERBS`` describes."""

    call: int
    verb: str
    arguments: tuple[Any, ...] = ()


# ------------------------------------------------------------------------------------------------- worker to parent


@dataclass(frozen=True, slots=True)
class Ready:
    info: ModelInfo


@dataclass(frozen=True, slots=True)
class Refused:
    """The engine could not be built; ``error`` as ``codec.encode_error`` gives it."""

    error: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Step:
    """Everything that calls have to be told since the last one: their chunks, then how some of them failed."""

    chunks: tuple[tuple[int, Chunk], ...] = ()
    failures: tuple[tuple[int, Mapping[str, Any]], ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    call: int
    value: Any = None


@dataclass(frozen=True, slots=True)
class Beat:
    """``silence``: seconds since the engine's own loop last answered; ``stats``: what it said."""

    silence: float
    stats: Mapping[str, Any]


Message = Start | Submit | Cancel | Ask | Ready | Refused | Step | Answer | Beat
_KINDS: dict[str, type] = {
    kind.__name__: kind for kind in (Start, Submit, Cancel, Ask, Ready, Refused, Step, Answer, Beat)
}


@dataclass(frozen=True, slots=True)
class Verb:
    """Types of a verb's arguments and of its result; the last arguments may be ``keywords``."""

    arguments: tuple[Any, ...]
    result: Any
    keywords: tuple[str, ...] = ()


VERBS: Mapping[str, Verb] = {
    "flush_cache": Verb((), type(None)),
    "stats": Verb((), Mapping[str, Any]),
    "abort": Verb((str,), type(None)),
    "check_constraint": Verb((Constraint,), type(None)),
    "check_texts": Verb((Constraint, tuple[str, ...]), Mapping[str, Any]),
    "embed": Verb((tuple[Prompt, ...], str), tuple[tuple[int, tuple[float, ...]], ...]),
    "start_profile": Verb((), type(None)),
    "stop_profile": Verb((), str),
    "tokenize": Verb((Prompt,), tuple[int, ...]),
    "detokenize": Verb((tuple[int, ...],), str),
    "pin": Verb((Prompt, float, str), int, ("namespace",)),
    "end_program": Verb((str, str, str), type(None), ("namespace",)),
}
"""What a worker can be asked besides generating."""


# ------------------------------------------------------------------------------------------------------------ frames


def pack(message: Message) -> bytes:
    """A message as a frame. Raises InvalidRequestError for values that no frame can hold."""
    try:
        value = _rows(message) if isinstance(message, Step) else encode(message)
        body: bytes = msgpack.packb([type(message).__name__, value])
    except (ValueError, OverflowError, TypeError, UnicodeEncodeError) as error:
        raise InvalidRequestError(f"a value of the request cannot be sent: {error}"[:200]) from None
    if len(body) > MAX_FRAME:
        raise InvalidRequestError(f"the message has {len(body)} bytes; at most {MAX_FRAME} can be sent")
    return _LENGTH.pack(len(body)) + body


def unpack(body: bytes | bytearray | memoryview) -> Message:
    """The message in a frame's body. Raises FrameError."""
    try:
        kind, value = msgpack.unpackb(body, strict_map_key=True)
        return _step(*value) if kind == Step.__name__ else cast(Message, decode(_KINDS[kind], value))
    except InvalidRequestError as error:
        raise FrameError(f"a message with a wrong field: {error}") from None
    except FrameError:
        raise
    except Exception as error:  # msgpack's own errors share no root
        raise FrameError(f"no message: {type(error).__name__}") from None


def _rows(step: Step) -> list[Any]:
    return [[_row(call, chunk) for call, chunk in step.chunks], encode(step.failures)]


def _row(call: int, chunk: Chunk) -> tuple[Any, ...]:
    if chunk.finish or chunk.usage or chunk.logprobs or chunk.uncovered or chunk.prompt_logprobs or chunk.scores:
        return call, encode(chunk)
    return call, chunk.index, chunk.text, chunk.ids


def _step(rows: Any, failures: Any) -> Step:
    return Step(tuple(map(_told, rows)), decode(_FAILURES, failures))


def _told(row: list[Any]) -> tuple[int, Chunk]:
    if len(row) == 2:
        return decode(int, row[0]), decode(Chunk, row[1])
    call, index, text, ids = row
    if not (
        type(call) is type(index) is int and type(text) is str and type(ids) is list and _INT.issuperset(map(type, ids))
    ):
        raise FrameError("a message with a wrong chunk")
    return call, Chunk(text, tuple(ids), index)


_INT = frozenset({int})
_FAILURES: Any = tuple[tuple[int, Mapping[str, Any]], ...]


class Frames:
    """Cuts a stream of bytes into the bodies of frames."""

    def __init__(self, limit: int = MAX_FRAME) -> None:
        self._limit = limit
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The bodies that ``data`` completes. Raises FrameError for a length beyond the limit."""
        self._buffer += data
        start = 0
        while (end := self._end(start)) is not None:
            yield bytes(self._buffer[start + _LENGTH.size : end])
            start = end
        del self._buffer[:start]

    def _end(self, start: int) -> int | None:
        if len(self._buffer) < start + _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._buffer, start)
        if length > self._limit:
            raise FrameError(f"a frame of {length} bytes; at most {self._limit} are accepted")
        end: int = start + _LENGTH.size + length
        return end if end <= len(self._buffer) else None


class Link(asyncio.Protocol):
    """One end of the socket pair on an event loop. ``received`` gets each message, ``lost`` is told once of the end."""

    def __init__(self, received: Callable[[Message], None], lost: Callable[[Exception | None], None]) -> None:
        self._received = received
        self._lost = lost
        self._frames = Frames()
        self._transport: asyncio.Transport | None = None
        self._error: Exception | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            for body in self._frames.feed(data):
                self._received(unpack(body))
        except FrameError as error:
            self._error = error
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._lost(self._error or error)

    @property
    def waiting_bytes(self) -> int:
        """Bytes that the other side has not read yet."""
        return self._transport.get_write_buffer_size() if self._transport else 0

    def send(self, message: Message) -> None:
        """Raises InvalidRequestError where ``pack`` does. After the end it does nothing: ``lost`` tells."""
        frame = pack(message)
        if self._transport is not None:
            self._transport.write(frame)

    def close(self) -> None:
        """Drop the connection and what is not sent yet."""
        if self._transport is not None:
            self._transport.abort()
