"""Text to token ids and back, over the ``tokenizers`` library, with two things of our own.

Which part of a prompt may hold special tokens is decided segment by segment, so that no user can type one; and text
becomes ids in one piece across segments, so that how a program cut its prompt does not change the ids.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby, takewhile
from typing import Any, cast

import tokenizers

from sglite.errors import InvalidRequestError, ModelLoadError
from sglite.protocol import Prompt, Segment, Text, Tokens
from sglite.runtime.detokenizer import Detokenizer
from sglite.runtime.encoding import Encoding

SPACE = "▁"
"""SentencePiece's mark for a space."""


class Tokenizer:
    """``Tokenizer(encoder, eos_ids=...)`` takes the encoder over: it must not be used by anybody else any more.

    ``logits_width`` bounds the ids (default: the encoder's own vocabulary); ``bos_token`` and ``eos_token`` default to
    what the ids spell. Raises ModelLoadError for an encoder whose tokens do not stand for bytes.
    """

    def __init__(
        self,
        encoder: tokenizers.Tokenizer,
        *,
        eos_ids: Sequence[int],
        bos_id: int | None = None,
        bos_token: str | None = None,
        eos_token: str | None = None,
        chat_template: str | None = None,
        logits_width: int | None = None,
    ) -> None:
        encoder.no_padding()
        encoder.no_truncation()
        encoder.encode_special_tokens = True  # as text: _split has found those that are meant as tokens
        self._encoder = encoder
        self._to_bytes = _byte_reader(encoder)
        self._bytes: dict[int, bytes] = {}
        self._texts: dict[bool, dict[int, str]] = {False: {}, True: {}}
        """Of tokens that are whole characters, with and without special ones left out."""
        self._specials = {i: t for i, t in encoder.get_added_tokens_decoder().items() if t.special}
        self._special_ids = {t.content: i for i, t in self._specials.items()}
        self._special_pattern = _pattern(self._specials.values())
        self._begin = _begin_ids(encoder)
        self._prefixing = _space_prefixing(encoder)
        self._first = Encoding(encoder)
        self._continuing = Encoding(_without_prefix(encoder)) if self._prefixing else self._first
        self.vocab_size = encoder.get_vocab_size(with_added_tokens=True)
        self.logits_width = logits_width or self.vocab_size
        self.chat_template = chat_template
        self.eos_ids = tuple(eos_ids)
        self.bos_id = bos_id
        self.bos_token = bos_token or (None if bos_id is None else encoder.id_to_token(bos_id))
        self.eos_token = eos_token or (encoder.id_to_token(self.eos_ids[0]) if self.eos_ids else None)

    @property
    def special_tokens(self) -> tuple[str, ...]:
        return tuple(self._special_ids)

    @property
    def special_ids(self) -> frozenset[int]:
        return frozenset(self._specials)

    def to_json(self) -> str:
        """The text of a tokenizer.json file."""
        return str(self._encoder.to_str())

    # ---- encoding ----------------------------------------------------------------------------------------------

    def encode(self, prompt: Prompt) -> list[int]:
        """Ids of the whole prompt. What the tokenizer puts before every text (Llama 3's beginning of text) is put there
        unless the prompt begins with it already, or with Tokens.

        Raises InvalidRequestError for text that is not Unicode and for ids the model does not have.
        """
        segments = [s for s in prompt if not isinstance(s, Text) or s.value]
        ids: list[int] = []
        for kind, group in groupby(segments, type):
            run = list(group)
            ids += _spliced(run) if kind is Tokens else self._encode_texts(run, continuing=bool(ids))
        if not (segments and isinstance(segments[0], Tokens)) and ids[: len(self._begin)] != self._begin:
            ids = self._begin + ids
        return self._checked(ids)

    def _encode_texts(self, run: Iterable[Segment], *, continuing: bool) -> list[int]:
        ids: list[int] = []
        for kind, pieces in groupby(self._split(run), type):
            if kind is int:
                ids += cast("Iterator[int]", pieces)
            else:
                text = _unicode("".join(cast("Iterator[str]", pieces)))
                ids += self._encoding_after(bool(ids), continuing).ids(text)
        return ids

    def _encoding_after(self, special: bool, continuing: bool) -> Encoding:
        """SentencePiece puts a space before a text: before the first piece, or ("always") after special tokens too,
        but never where ids that came before go on."""
        prefixed = not continuing and (not special or self._prefixing == "always")
        return self._first if prefixed else self._continuing

    def _split(self, run: Iterable[Segment]) -> Iterable[str | int]:
        """Plain pieces of text, and the ids of the special tokens between them."""
        for segment in run:
            assert isinstance(segment, Text)
            at = 0
            if segment.special:
                for found in self._special_pattern.finditer(segment.value):
                    if found.start() > at:
                        yield segment.value[at : found.start()]
                    yield self._special_ids[found[found.lastindex or 0]]
                    at = found.end()
            if at < len(segment.value):
                yield segment.value[at:]

    def _checked(self, ids: list[int]) -> list[int]:
        for token in (min(ids, default=0), max(ids, default=0)):
            if not 0 <= token < self.logits_width:
                raise InvalidRequestError(
                    f"the prompt holds the token id {token}, the model has 0..{self.logits_width - 1}", param="prompt"
                )
        return ids

    # ---- decoding ----------------------------------------------------------------------------------------------

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Invalid bytes become replacement characters; the space SentencePiece puts before a text is left out."""
        stream = self.detokenizer(skip_special_tokens=skip_special_tokens, at_start=True)
        return stream.push(ids) + stream.flush()

    def detokenizer(self, *, skip_special_tokens: bool = True, at_start: bool = False) -> Detokenizer:
        """For ids that come one by one; ``at_start`` says that no others came before them."""
        skipped = self._specials if skip_special_tokens else ()
        return Detokenizer(
            self.token_bytes,
            skipped,
            drop_space=at_start and self._prefixing is not None,
            texts=self._texts[skip_special_tokens],
        )

    def token_text(self, token: int) -> str:
        """The token alone, for people: parts of characters become replacement characters."""
        return self.token_bytes(token).decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        """What the token adds to the text; b"" for ids between the vocabulary's end and the logits' width."""
        found = self._bytes.get(token)
        if found is None:
            piece = self._encoder.id_to_token(token) if 0 <= token < self.vocab_size else None
            found = self._bytes[token] = self._to_bytes(piece) if piece is not None else b""
        return found


def _spliced(run: Iterable[Segment]) -> list[int]:
    return [i for segment in run if isinstance(segment, Tokens) for i in segment.ids]


def _unicode(text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"the prompt holds a lone surrogate ({text[error.start]!a}), which is no Unicode text", param="prompt"
        ) from None
    return text


def _pattern(specials: Iterable[tokenizers.AddedToken]) -> re.Pattern[str]:
    """Finds special tokens as the library would: the longest at each place, with the white space they swallow."""
    longest_first = sorted(specials, key=lambda token: -len(token.content))
    return re.compile("|".join(map(_token_pattern, longest_first)) or r"(?!)")


def _token_pattern(token: tokenizers.AddedToken) -> str:
    before, after = (r"\s*" if token.lstrip else ""), (r"\s*" if token.rstrip else "")
    edges = (r"(?<!\w)", r"(?!\w)") if token.single_word else ("", "")
    return f"{before}{edges[0]}({re.escape(token.content)}){edges[1]}{after}"


def _begin_ids(encoder: tokenizers.Tokenizer) -> list[int]:
    """What the tokenizer's post-processor puts before a text."""
    encoded = encoder.encode("a")
    marked = zip(encoded.ids, encoded.special_tokens_mask, strict=True)
    return [token for token, _ in takewhile(lambda pair: pair[1], marked)]


# ------------------------------------------------------------------------------------------------ kinds of encoders


def _part(component: Any) -> Any:
    """A component of a tokenizer as plain JSON."""
    return None if component is None else json.loads(component.__getstate__())


def _parts(component: Any) -> list[dict[str, Any]]:
    part = _part(component)
    if part is None:
        return []
    return part.get("decoders") or part.get("pretokenizers") or part.get("normalizers") or [part]


def _byte_reader(encoder: tokenizers.Tokenizer) -> Callable[[str], bytes]:
    kinds = [part["type"] for part in _parts(encoder.decoder)]
    if kinds == ["ByteLevel"]:
        return _byte_level
    if "ByteFallback" in kinds or kinds == ["Metaspace"]:
        return _sentence_piece
    raise ModelLoadError(
        f"a tokenizer with the decoder {'+'.join(kinds) or 'none'} is not supported; supported are byte-level BPE and "
        "SentencePiece with byte fallback"
    )


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE spells each byte as a printable character: itself, or the next unused one from 256 on
    (GPT-2, ``bytes_to_unicode``)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(hidden)}


BYTE_OF = _byte_alphabet()


def _byte_level(piece: str) -> bytes:
    try:
        return bytes(map(BYTE_OF.__getitem__, piece))
    except KeyError:  # an added token is spelled as it is
        return piece.encode("utf-8")


_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _sentence_piece(piece: str) -> bytes:
    if found := _BYTE_PIECE.fullmatch(piece):
        return bytes([int(found[1], 16)])
    return piece.replace(SPACE, " ").encode("utf-8")


def _space_prefixing(encoder: tokenizers.Tokenizer) -> str | None:
    """Where the encoder puts a space before a text: "first", "always", or nowhere."""
    if any(part["type"] == "Prepend" for part in _parts(encoder.normalizer)):
        return "always"
    schemes = [p["prepend_scheme"] for p in _parts(encoder.pre_tokenizer) if p["type"] == "Metaspace"]
    return schemes[0] if schemes and schemes[0] != "never" else None


def _without_prefix(encoder: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """The same encoder for text that goes on where other text ended."""
    spec = json.loads(encoder.to_str())
    normalizers = [n for n in _parts(encoder.normalizer) if n["type"] != "Prepend"]
    spec["normalizer"] = {"type": "Sequence", "normalizers": normalizers} if normalizers else None
    pre_tokenizers = [
        p | {"prepend_scheme": "never"} if p["type"] == "Metaspace" else p for p in _parts(encoder.pre_tokenizer)
    ]
    spec["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": pre_tokenizers} if pre_tokenizers else None
    continuing = tokenizers.Tokenizer.from_str(json.dumps(spec))
    continuing.encode_special_tokens = True
    return continuing
