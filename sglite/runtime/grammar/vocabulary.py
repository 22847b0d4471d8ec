"""What a grammar engine needs to know of the tokenizer and of the logits."""

from __future__ import annotations

from dataclasses import dataclass

from sglite.errors import ConfigError


@dataclass(frozen=True)
class Vocabulary:
    """``tokenizer_json`` is a whole tokenizer.json as text; ``width`` the number of logits; every id in ``eos_ids``
    may end a text. Special tokens are those the JSON marks so."""

    tokenizer_json: str
    width: int
    eos_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.eos_ids:
            raise ConfigError("constrained decoding needs a model with at least one EOS token")
        outside = [id for id in self.eos_ids if not 0 <= id < self.width]
        if outside:
            raise ConfigError(f"EOS ids {outside} lie outside the model's {self.width} logits")

    @property
    def words(self) -> int:
        """Length of a mask row."""
        return (self.width + 31) // 32
