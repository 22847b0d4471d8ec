"""The grammar seam: a backend compiles a constraint into a Grammar, a Grammar hands out Matchers.

A Grammar is immutable, cached and shared; a Matcher is one sequence's place in it, owned by the engine thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from sglite.protocol import Constraint

MaskRow = npt.NDArray[np.int32]
"""int32 [ceil(V / 32)], bit t of word t // 32 set where token t is allowed; V is the width of the logits."""


class Matcher(Protocol):
    @property
    def accepting(self) -> bool:
        """The text so far may end here."""
        ...

    @property
    def terminated(self) -> bool:
        """The text so far can only end here."""
        ...

    def fill(self, row: MaskRow) -> None:
        """Write the mask of allowed next tokens; EOS ids are allowed exactly where the text may end."""
        ...

    def accept(self, ids: Sequence[int]) -> bool:
        """Consume tokens. False, and nothing consumed, when one of them is not allowed."""
        ...

    def rollback(self, n: int) -> None:
        """Take the last ``n`` accepted tokens back."""
        ...

    def forced(self) -> list[int]:
        """Tokens that must come next, canonical and safe to append without sampling; may be empty."""
        ...

    def clone(self) -> Matcher: ...


class Grammar(Protocol):
    def matcher(self) -> Matcher: ...


class GrammarBackend(Protocol):
    name: str
    kinds: frozenset[str]
    """The constraint kinds it can compile."""

    def compile(self, constraint: Constraint) -> Grammar:
        """Raises GrammarError naming what is malformed, unsupported or unsatisfiable. Callable from any thread."""
        ...
