"""Text to ids that remembers: prompts begin alike, and the turns of a conversation come again with every call.

A long text is encoded piece by piece, cut where every tokenizer of its kind cuts it too (between a word and the space
before the next), so the ids are those of the whole. Where cuts lie depends on what stands before them alone: texts that
begin alike have their first pieces in common.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import tokenizers

PIECE = 512
"""Characters, about. Longer pieces save less, and shorter ones cost more calls."""
REMEMBERED = 1024
LONGEST = 8 * PIECE
"""Pieces without a place to cut may be longer than this; they are not remembered, so that memory stays bounded."""
_SEAM = re.compile(r"(?<=[a-z])(?= [a-z])")
_PROBE = "seam seam"


class Encoding:
    """An encoder's ids of plain text, safe to use from many threads."""

    def __init__(self, encoder: tokenizers.Tokenizer) -> None:
        self._encoder = encoder
        self._cuts = _cuts_between_words(encoder)
        self._remembered = lru_cache(REMEMBERED)(self._encoded)

    def ids(self, text: str) -> list[int]:
        found: list[int] = []
        for piece in _pieces(text) if self._cuts else (text,):
            found += self._remembered(piece) if len(piece) <= LONGEST else self._encoded(piece)
        return found

    def _encoded(self, piece: str) -> array[int]:
        return array("i", self._encoder.encode(piece, add_special_tokens=False).ids)


def _pieces(text: str) -> Iterator[str]:
    at = 0
    while (seam := _SEAM.search(text, at + PIECE)) is not None:
        yield text[at : seam.start()]
        at = seam.start()
    yield text[at:]


def _cuts_between_words(encoder: tokenizers.Tokenizer) -> bool:
    """Whether a word and the space behind it never share a token: of byte-level encoders that cut at spaces, whose
    normalizers only compose characters."""
    kinds = {part["type"] for part in _parts(encoder.normalizer)}
    if encoder.pre_tokenizer is None or not kinds <= {"NFC", "NFD", "NFKC", "NFKD"}:
        return False
    own = [token for token in encoder.get_added_tokens_decoder().values() if not token.special]
    if any(token.rstrip or token.single_word or re.search(r"\S\s", token.content) for token in own):
        return False
    pieces = encoder.pre_tokenizer.pre_tokenize_str(_PROBE)
    return [text for text, _ in pieces] == ["seam", "Ġseam"]


def _parts(normalizer: Any) -> list[dict[str, Any]]:
    if normalizer is None:
        return []
    part = json.loads(normalizer.__getstate__())
    return list(part.get("normalizers") or [part])
