"""The child in which outlines-core compiles: it can neither be interrupted nor bounded, but a process can be killed.

Run as ``python -m sglite.runtime.grammar.outlines_child MEGABYTES``. Frames on both pipes are a length (8 bytes, big
end first) and so many bytes. In: first the vocabulary, a JSON list of hex strings by token id; then one JSON object
per job. Out, per job: one JSON object, and on success two binary indices, over tokens and over bytes.
"""

from __future__ import annotations

import json
import resource
import struct
import sys
from typing import IO, Any, Protocol

import outlines_core

SENTINEL = "\x00\x01\x00"
"""Stands before every text. Consumed first, it makes outlines-core keep what may follow an accepting place."""


class Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


def read_frame(stream: Readable) -> bytes | None:
    head = stream.read(8)
    if len(head) < 8:
        return None
    (size,) = struct.unpack(">Q", head)
    return stream.read(size)


def write_frame(stream: IO[bytes], data: bytes) -> None:
    stream.write(struct.pack(">Q", len(data)) + data)
    stream.flush()


def main() -> None:
    limit = int(sys.argv[1]) << 20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    words = read_frame(sys.stdin.buffer)
    if words is None:
        return
    tokens = _vocabulary([bytes.fromhex(word) for word in json.loads(words)])
    singles = _vocabulary([bytes([byte]) for byte in range(256)])
    while (job := read_frame(sys.stdin.buffer)) is not None:
        _answer(sys.stdout.buffer, json.loads(job), (tokens, singles))


def _vocabulary(words: list[bytes]) -> Any:
    """The sentinel gets the first id after the words; the one after that is EOS, which no state lists as a step."""
    ids: dict[bytes, list[int]] = {}
    for id, word in enumerate(words):
        if word:
            ids.setdefault(word, []).append(id)
    ids[SENTINEL.encode()] = [len(words)]
    return outlines_core.Vocabulary(len(words) + 1, ids)


def _answer(out: IO[bytes], job: dict[str, str], vocabularies: tuple[Any, Any]) -> None:
    try:
        regex = job["regex"] if "regex" in job else _regex_of(job["schema"])
        indices = [_index(regex, vocabulary) for vocabulary in vocabularies]
    except (ValueError, TypeError) as error:
        write_frame(out, json.dumps({"error": str(error)[:500]}).encode())
        return
    write_frame(out, b"{}")
    for index in indices:
        write_frame(out, index.__reduce__()[1][0])


def _regex_of(schema: str) -> str:
    return str(outlines_core.json_schema.build_regex_from_schema(schema, " ?"))


def _index(regex: str, vocabulary: Any) -> Any:
    return outlines_core.Index(f"\\x00\\x01\\x00(?:{regex})$", vocabulary)


if __name__ == "__main__":
    main()
