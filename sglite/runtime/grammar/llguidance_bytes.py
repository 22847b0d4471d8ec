"""llguidance over single bytes, for the search for a way out."""

from __future__ import annotations

from functools import cache
from typing import Any, ClassVar

import llguidance


class LLGuidanceBytes:
    """See way_out.ByteMatcher."""

    __slots__ = ("_ll",)

    def __init__(self, ll: Any) -> None:
        self._ll = ll

    @property
    def accepting(self) -> bool:
        return bool(self._ll.is_accepting()) and not self._ll.is_error()

    def accept(self, data: bytes) -> bool:
        return bool(self._ll.consume_tokens(list(data)))

    def allowed(self) -> bytes:
        if self._ll.is_stopped():
            return b""
        bits = self._ll.compute_bitmask()[: EOS_BYTE // 8]
        return b"".join(map(tuple.__getitem__, _BYTES_OF, bits))

    def forced(self) -> bytes:
        return b"" if self._ll.is_stopped() else bytes(self._ll.compute_ff_bytes())

    def clone(self) -> LLGuidanceBytes:
        return LLGuidanceBytes(self._ll.deep_copy())


EOS_BYTE = 256
_BYTES_OF = tuple(
    tuple(bytes(8 * i + bit for bit in range(8) if bits >> bit & 1) for bits in range(256))
    for i in range(EOS_BYTE // 8)
)
"""The bytes that the i-th byte of a mask allows."""


class _Bytes:
    """A tokenizer in which every byte is a token, as llguidance's TokenizerWrapper wants it."""

    eos_token_id = EOS_BYTE
    bos_token_id = None
    special_token_ids: ClassVar[list[int]] = [EOS_BYTE]
    tokens: ClassVar[list[bytes]] = [*(bytes([byte]) for byte in range(256)), b"<eos>"]

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


@cache
def byte_tokenizer() -> Any:
    return llguidance.LLTokenizer(
        llguidance.TokenizerWrapper(_Bytes()), n_vocab=EOS_BYTE + 1, eos_token=EOS_BYTE, slices=[]
    )
