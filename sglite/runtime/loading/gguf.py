"""The GGUF container: metadata and where each tensor lies, read straight out of a memory map.

The ``gguf`` package knows the constants; its reader makes a numpy view of every string of the vocabulary, which takes
seconds where this one takes a tenth, and it says little about damage. A test keeps the two in agreement. The format:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from gguf import GGML_QUANT_SIZES, GGUF_MAGIC, GGMLQuantizationType, GGUFValueType

from sglite.errors import ModelLoadError

VERSIONS = (2, 3)
MAX_DIMENSIONS = 4

_SCALARS: dict[int, struct.Struct] = {
    GGUFValueType.UINT8: struct.Struct("<B"),
    GGUFValueType.INT8: struct.Struct("<b"),
    GGUFValueType.UINT16: struct.Struct("<H"),
    GGUFValueType.INT16: struct.Struct("<h"),
    GGUFValueType.UINT32: struct.Struct("<I"),
    GGUFValueType.INT32: struct.Struct("<i"),
    GGUFValueType.FLOAT32: struct.Struct("<f"),
    GGUFValueType.BOOL: struct.Struct("<?"),
    GGUFValueType.UINT64: struct.Struct("<Q"),
    GGUFValueType.INT64: struct.Struct("<q"),
    GGUFValueType.FLOAT64: struct.Struct("<d"),
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """``shape`` has the rows first (GGUF itself writes it the other way round); offset and size in bytes."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    offset: int
    size: int


class GGUFFile:
    """An open file: ``metadata`` by key, ``tensors`` by name, and the raw bytes of each.

    Raises ModelLoadError naming the file if it is missing, truncated or malformed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bytes = memoryview(_map(path))
        try:
            self.metadata, self.tensors = _parse(self.bytes)
        except _DamagedError as error:
            raise ModelLoadError(f"{path} is not a sound GGUF file: {error}; fetch it again") from error

    def raw(self, tensor: TensorInfo) -> memoryview:
        return self.bytes[tensor.offset : tensor.offset + tensor.size]


class _DamagedError(Exception):
    """What is wrong with the file, as the end of a sentence."""


def _map(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            # Private, writable pages: torch wants writable memory, and nothing ever writes to them.
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:  # ValueError: an empty file
        reason = error.strerror or error if isinstance(error, OSError) else "it is empty; fetch it again"
        raise ModelLoadError(f"{path} cannot be read: {reason}") from error


def _parse(data: memoryview) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
    cursor = _Cursor(data)
    if cursor.scalar(GGUFValueType.UINT32) != GGUF_MAGIC:
        raise _DamagedError("it does not begin with 'GGUF'")
    if (version := cursor.scalar(GGUFValueType.UINT32)) not in VERSIONS:
        raise _DamagedError(f"its version is {version}, known are {VERSIONS}")
    tensor_count, key_count = cursor.length(), cursor.length()
    metadata = {cursor.string(): cursor.value(cursor.scalar(GGUFValueType.UINT32)) for _ in range(key_count)}
    described = [_tensor(cursor) for _ in range(tensor_count)]
    base = _aligned(cursor.at, metadata.get("general.alignment", 32))
    return metadata, _placed(described, base, len(data))


def _tensor(cursor: _Cursor) -> TensorInfo:
    name = cursor.string()
    dimensions = cursor.scalar(GGUFValueType.UINT32)
    if not 1 <= dimensions <= MAX_DIMENSIONS:
        raise _DamagedError(f"tensor {name} has {dimensions} dimensions")
    shape = tuple(cursor.scalar(GGUFValueType.UINT64) for _ in range(dimensions))[::-1]
    if 0 in shape:
        raise _DamagedError(f"tensor {name} has the shape {list(shape)}")
    code = cursor.scalar(GGUFValueType.UINT32)
    try:
        kind = GGMLQuantizationType(code)
    except ValueError:
        raise _DamagedError(f"tensor {name} has the unknown type {code}") from None
    block, size = GGML_QUANT_SIZES[kind]
    if shape[-1] % block:
        raise _DamagedError(f"tensor {name} has rows of {shape[-1]} numbers, {kind.name} needs whole blocks of {block}")
    return TensorInfo(name, shape, kind, cursor.scalar(GGUFValueType.UINT64), prod(shape) // block * size)


def _aligned(at: int, alignment: Any) -> int:
    if not isinstance(alignment, int) or alignment < 1:
        raise _DamagedError(f"general.alignment is {alignment!r}")
    return -(-at // alignment) * alignment


def _placed(tensors: list[TensorInfo], base: int, end: int) -> dict[str, TensorInfo]:
    placed: dict[str, TensorInfo] = {}
    for t in tensors:
        stop = base + t.offset + t.size
        if stop > end:
            raise _DamagedError(f"it is truncated: tensor {t.name} ends at byte {stop}, the file has {end}")
        if t.name in placed:
            raise _DamagedError(f"tensor {t.name} is there twice")
        placed[t.name] = TensorInfo(t.name, t.shape, t.type, base + t.offset, t.size)
    return placed


class _Cursor:
    """Reads forward, never past the end."""

    def __init__(self, data: memoryview) -> None:
        self.data = data
        self.at = 0

    def scalar(self, kind: int) -> Any:
        return self._unpack(_SCALARS[kind])[0]

    def length(self) -> int:
        """A count of things that take at least a byte each, so more than the file has bytes is damage."""
        count: int = self.scalar(GGUFValueType.UINT64)
        if count > len(self.data) - self.at:
            raise _DamagedError(f"it is truncated or damaged: {count} things announced at byte {self.at}")
        return count

    def string(self) -> str:
        start = self.at + 8
        self.at = start + self.length()
        if self.at > len(self.data):
            raise _DamagedError(f"it is truncated in a string at byte {start}")
        try:
            return str(self.data[start : self.at], "utf-8")
        except UnicodeDecodeError:
            raise _DamagedError(f"the string at byte {start} is not UTF-8") from None

    def value(self, kind: int) -> Any:
        if kind == GGUFValueType.ARRAY:
            return self._array(self.scalar(GGUFValueType.UINT32))
        return self._reader(kind)()

    def _array(self, kind: int) -> list[Any]:
        count = self.length()
        if kind in _SCALARS:
            scalar = _SCALARS[kind]
            return list(self._unpack(struct.Struct(f"<{count}{scalar.format[1:]}")))
        read = self._reader(kind)
        return [read() for _ in range(count)]

    def _reader(self, kind: int) -> Callable[[], Any]:
        if kind == GGUFValueType.STRING:
            return self.string
        if kind in _SCALARS:
            return lambda: self.scalar(kind)
        raise _DamagedError(f"a value at byte {self.at} has the unknown type {kind}")

    def _unpack(self, layout: struct.Struct) -> tuple[Any, ...]:
        start, self.at = self.at, self.at + layout.size
        if self.at > len(self.data):
            raise _DamagedError(f"it is truncated: it ends within its header, at byte {len(self.data)}")
        return layout.unpack_from(self.data, start)
