"""A tokenizer from the vocabulary inside a GGUF file.

The file names its pre-tokenizer (how text is cut before merging) by a word; what each word means is in llama.cpp's
``llama-vocab.cpp``. Only those of the architectures we run are known here, the others are refused by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from sglite.errors import ModelLoadError
from sglite.runtime.loading.config import Fields, ModelConfig
from sglite.runtime.loading.gguf import GGUFFile
from sglite.runtime.tokenizer import Tokenizer

CONTROL, USER_DEFINED = 3, 4

PreTokenizer = pre_tokenizers.PreTokenizer


@dataclass(frozen=True, slots=True)
class Rules:
    """``ignore_merges``: a word that is a token stays one, whatever the merges say."""

    pre_tokenizer: Callable[[], PreTokenizer]
    ignore_merges: bool = False
    add_bos: bool = False
    nfc: bool = False


def _gpt2() -> PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def _digits_then_gpt2() -> PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _split_by(*patterns: str) -> Callable[[], PreTokenizer]:
    def build() -> PreTokenizer:
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
        return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])

    return build


def _words(digits: str) -> str:
    """The expression of Llama 3 and Qwen 2, which differ in how many digits make a piece."""
    return (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|" + digits + r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"

_LLAMA3 = Rules(_split_by(_words(r"\p{N}{1,3}")), ignore_merges=True, add_bos=True)
_QWEN2 = Rules(_split_by(_words(r"\p{N}")), nfc=True)
_DIGITS = Rules(_digits_then_gpt2)

RULES: dict[str, Rules] = {
    "default": Rules(_split_by(r"[\p{P}\$\+<=>\^~\|]+", _GPT2_WORDS, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "gpt-2": Rules(_gpt2),
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
}


def tokenizer_from_gguf(file: GGUFFile, config: ModelConfig) -> Tokenizer:
    """Raises ModelLoadError naming the file and the kind of vocabulary that is not supported."""
    metadata, path = file.metadata, file.path
    rules = _rules(metadata, path)
    tokens = _strings(metadata, "tokenizer.ggml.tokens", path)
    encoder = _encoder(tokens, _strings(metadata, "tokenizer.ggml.merges", path), rules, path)
    _add_tokens(encoder, tokens, metadata.get("tokenizer.ggml.token_type", []))
    if config.bos_id is not None and Fields(metadata, str(path)).flag("tokenizer.ggml.add_bos_token", rules.add_bos):
        _add_bos(encoder, tokens, config.bos_id, path)
    template = metadata.get("tokenizer.chat_template")
    return Tokenizer(
        encoder,
        eos_ids=config.eos_ids,
        bos_id=config.bos_id,
        chat_template=template if isinstance(template, str) else None,
        logits_width=config.vocab_size,
    )


def _rules(metadata: dict[str, Any], path: Path) -> Rules:
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "default")
    if kind != "gpt2":
        raise ModelLoadError(
            f"{path}: a tokenizer of kind {kind!r} is not supported in GGUF files; supported is 'gpt2' (byte-level "
            "BPE); the same model as a folder with tokenizer.json may work"
        )
    if pre not in RULES:
        raise ModelLoadError(f"{path}: pre-tokenizer {pre!r} is not supported; supported are {', '.join(RULES)}")
    return RULES[pre]


def _strings(metadata: dict[str, Any], key: str, path: Path) -> list[str]:
    values = metadata.get(key)
    if not isinstance(values, list) or not values or not isinstance(values[0], str):  # one type in a list
        raise ModelLoadError(f"{path}: {key} is missing or not a list of strings")
    return values


def _encoder(tokens: list[str], merges: list[str], rules: Rules, path: Path) -> tokenizers.Tokenizer:
    vocabulary = {token: index for index, token in enumerate(tokens)}
    encoder = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary, merges=_pairs(merges, vocabulary, path), ignore_merges=rules.ignore_merges)
    )
    encoder.pre_tokenizer = rules.pre_tokenizer()
    encoder.decoder = decoders.ByteLevel()
    if rules.nfc:
        encoder.normalizer = normalizers.NFC()
    return encoder


def _pairs(merges: list[str], vocabulary: dict[str, int], path: Path) -> list[tuple[str, str]]:
    """Each merge is two pieces with a space between them. Checked here, since the library panics on unknown ones."""
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    for left, right in pairs:
        if not (left in vocabulary and right in vocabulary and left + right in vocabulary):
            raise ModelLoadError(
                f"{path}: its merges do not fit its vocabulary (at {left!r} {right!r}); fetch it again"
            )
    return pairs


def _add_tokens(encoder: tokenizers.Tokenizer, tokens: list[str], types: list[int]) -> None:
    """Control tokens are special; user-defined ones are found in any text but are not."""
    for token, kind in zip(tokens, types, strict=False):
        if kind in (CONTROL, USER_DEFINED) and token:
            encoder.add_tokens([AddedToken(token, normalized=False, special=kind == CONTROL)])


def _add_bos(encoder: tokenizers.Tokenizer, tokens: list[str], bos_id: int, path: Path) -> None:
    if bos_id >= len(tokens):
        raise ModelLoadError(f"{path}: the beginning-of-text token {bos_id} is outside its vocabulary")
    bos = tokens[bos_id]
    encoder.post_processor = processors.TemplateProcessing(single=[bos, "$A"], special_tokens=[(bos, bos_id)])
