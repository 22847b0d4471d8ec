"""A small byte-level BPE tokenizer with the traps of a real one, made here: no file, no download."""

from __future__ import annotations

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from sglite.protocol import Constraint
from sglite.runtime.grammar.guard import GuardedBackend
from sglite.runtime.grammar.llguidance_backend import LLGuidanceBackend
from sglite.runtime.grammar.vocabulary import Vocabulary

SPECIALS = ["<|end|>", "<|im_start|>", "<|im_end|>"]
NO_TOKEN = b"\x04"
"""A byte that no token can spell, as SmolLM2 has 21 of."""

TEXTS = [
    '{"name": "Ada Lovelace", "age": 36, "tags": ["math", "poetry"], "ok": true}',
    '{"order":1,"orderId":"A-17","items":[{"id":1.5,"note":null},{"id":2,"note":"foo foobar"}]}',
    "The orders were red, green and blue; the names are in the list of 2024-01-31.",
    "żółw naïve café 漢字 😀",
] * 4


def small_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    missing = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(NO_TOKEN.decode())[0][0]
    alphabet = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - {missing})
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        initial_alphabet=alphabet,
        special_tokens=[AddedToken(text, special=True) for text in SPECIALS],
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


class Bench:
    """A vocabulary, a backend and short ways to ask a grammar about texts."""

    def __init__(self) -> None:
        self.tokenizer = small_tokenizer()
        self.eos = (0, 2)
        self.size = self.tokenizer.get_vocab_size()
        self.vocabulary = Vocabulary(self.tokenizer.to_str(), self.size + 70, self.eos)
        self.masks = LLGuidanceBackend(self.vocabulary)
        self.backend = GuardedBackend(self.masks)

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def compile(self, kind: str, source: str = ""):
        return self.backend.compile(Constraint(kind, source))

    def accepts(self, grammar, text: str) -> bool:
        """Token by token, with the mask asked before each, and EOS at the end."""
        matcher = grammar.matcher()
        for id in [*self.ids(text), self.eos[0]]:
            if id not in self.allowed(matcher) or not matcher.accept([id]) or matcher.retreat():
                return False
        return True

    def allowed(self, matcher) -> set[int]:
        row = np.full(self.vocabulary.words, -1, np.int32)
        matcher.fill(row)
        return set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist())


@pytest.fixture(scope="session")
def bench() -> Bench:
    return Bench()


def drive(bench: Bench, grammar, rng, *, budget: int | None = None, limit: int = 400, pick=None) -> tuple[str, object]:
    """Write an answer the way the engine does, with a model that knows nothing but likes to come to an end.

    Returns the text and its matcher; the text is incomplete when ``limit`` tokens were not enough.
    """
    matcher = grammar.matcher(budget)
    ids: list[int] = []
    shown = 0
    for _ in range(20 * limit):
        if matcher.terminated or len(ids) >= (limit if budget is None else budget):
            break
        allowed = sorted(bench.allowed(matcher))
        id = (pick or likes_endings)(bench, allowed, rng)
        if id in bench.eos:
            assert matcher.accepting
            break
        assert matcher.accept([id])
        ids.append(id)
        taken_back = matcher.retreat()
        assert len(ids) - taken_back >= shown, "what was shown must never be taken back"
        del ids[len(ids) - taken_back :]
        assert matcher.settled >= shown
        shown = matcher.settled
    text = bench.masks.tokens.text(ids).decode("utf-8", "replace")
    return text, matcher


def likes_endings(bench: Bench, allowed: list[int], rng) -> int:
    closing = [id for id in allowed if bench.masks.tokens.bytes_of[id][:1] in (b'"', b"}", b"]", b",", b":", b"")]
    return int(rng.choice(closing if closing and rng.random() < 0.4 else allowed))
