"""Tracks at their sequence's end: what the sampler is asked for them, and placeholders for tokens it still owes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from sglite.runtime.grammar.base import MaskRow
from sglite.runtime.plan import pending
from sglite.runtime.runner import Sampled
from sglite.runtime.sampler import SampleRow
from sglite.runtime.tracks import Track

if TYPE_CHECKING:
    from sglite.runtime.sequence import Sequence as TokenSequence


class End(NamedTuple):
    """A track at its sequence's end. ``row`` None: it takes no token. ``mask`` None: any token may follow."""

    track: Track
    row: SampleRow | None
    mask: MaskRow | None


@dataclass(frozen=True, slots=True)
class Draw:
    """Tokens that were asked for and are not taken yet."""

    ends: Sequence[End]
    sampled: Sampled


def stack_masks(ends: Sequence[End], vocabulary: int) -> npt.NDArray[np.int32] | None:
    """One packed mask for the batch; all ones where a row has none. None when no row has one."""
    if all(end.mask is None for end in ends):
        return None
    free = np.full(-(-vocabulary // 32), -1, dtype=np.int32)
    return np.stack([free if end.mask is None else end.mask for end in ends])


def promise_token(sequence: TokenSequence, slot: int) -> None:
    """Its next token was asked for and will be known on the device: the next plan may count on it.

    A sequence that the token completes has no use for another step.
    """
    if len(sequence.tokens) + 1 < sequence.limit:
        sequence.tokens.append(pending(slot))


def drop_promise(sequence: TokenSequence) -> None:
    if sequence.tokens[-1] < 0:
        sequence.tokens.pop()
