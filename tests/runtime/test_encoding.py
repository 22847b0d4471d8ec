"""Encoding that remembers gives the ids of the whole text, whatever was encoded before and wherever it was cut."""

from __future__ import annotations

from typing import Any

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from sglite.runtime import encoding
from sglite.runtime.encoding import Encoding
from sglite.runtime.hub import ModelSource
from sglite.runtime.loading import load_config, load_tokenizer

LLAMA3 = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
WORDS = [
    "the",
    "cat",
    "it's",
    "we'll",
    "x",
    "ab1",
    "Zé",
    "é",
    "cafe\u0301",
    "漢字",
    "12",
    "don't.",
    "a\n",
    "\t",
    " ",
    "—",
    "😀",
]
TEXTS = st.lists(st.one_of(st.sampled_from(WORDS), st.text(max_size=4)), max_size=30).map(" ".join)
PROPERTY = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def byte_level(*, pattern: str | None = None, prefix: bool = False) -> tokenizers.Tokenizer:
    """Trained on running text, so that it would have tokens across words if it could."""
    encoder = tokenizers.Tokenizer(models.BPE())
    split = [] if pattern is None else [pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")]
    last = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=pattern is None)
    encoder.pre_tokenizer = pre_tokenizers.Sequence([*split, last])
    encoder.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    encoder.train_from_iterator(["the cat the cat it's we'll don't the cat"] * 20, trainer)
    return encoder


def whole(encoder: tokenizers.Tokenizer, text: str) -> list[int]:
    return list(encoder.encode(text, add_special_tokens=False).ids)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "PIECE", 3)


@pytest.fixture(scope="module")
def smol(smollm2: ModelSource) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(load_tokenizer(smollm2, load_config(smollm2)).to_json())


@PROPERTY
@given(text=TEXTS)
def test_the_ids_are_those_of_the_whole_text(text: str, smol: tokenizers.Tokenizer, small_pieces: None) -> None:
    memory = Encoding(smol)
    assert memory.ids(text) == memory.ids(text) == whole(smol, text)


@pytest.mark.parametrize("pattern", [None, LLAMA3])
@pytest.mark.parametrize("composing", [False, True])
@PROPERTY
@given(texts=st.lists(TEXTS, min_size=1, max_size=3))
def test_it_holds_for_other_ways_to_cut(
    texts: list[str], pattern: str | None, composing: bool, small_pieces: None
) -> None:
    encoder = byte_level(pattern=pattern)
    if composing:
        encoder.normalizer = normalizers.NFC()
    memory = Encoding(encoder)
    assert [memory.ids(text) for text in texts] == [whole(encoder, text) for text in texts]


def spaced(encoder: tokenizers.Tokenizer, content: str = "cat the", **options: Any) -> tokenizers.Tokenizer:
    encoder.add_tokens([AddedToken(content, normalized=False, **options)])
    return encoder


@pytest.mark.parametrize(
    "encoder",
    [
        byte_level(pattern=r"[^\n]+\n?"),  # whole lines
        byte_level(prefix=True),
        spaced(byte_level()),
        spaced(byte_level(), " the", single_word=True),
    ],
)
def test_what_puts_a_word_and_a_space_together_is_never_cut(encoder: tokenizers.Tokenizer, small_pieces: None) -> None:
    text = "the cat the cat it the cat"
    assert Encoding(encoder).ids(text) == whole(encoder, text)


def test_what_texts_begin_with_is_encoded_once(smol: tokenizers.Tokenizer) -> None:
    calls = []

    class Counting:
        def __getattr__(self, name: str) -> Any:
            return getattr(smol, name)

        def encode(self, text: str, **options: Any) -> Any:
            calls.append(len(text))
            return smol.encode(text, **options)

    memory = Encoding(Counting())  # type: ignore[arg-type]
    shared = "so it goes on and on " * 200
    for question in ("who?", "why did it?", "when was that?"):
        assert memory.ids(shared + question) == whole(smol, shared + question)
    assert sum(calls) < len(shared) + 3 * 2 * encoding.PIECE


def test_a_text_without_words_is_not_remembered_beyond_bounds(smol: tokenizers.Tokenizer) -> None:
    memory = Encoding(smol)
    for length in (encoding.LONGEST, encoding.LONGEST + 1):
        memory.ids("漢" * length)
    assert memory._remembered.cache_info().currsize == 1
