"""A model without weights whose answers are a function of the history: for tests of everything around a model.

Its KV pool holds the token ids themselves. Each answer is computed from the whole history, read back through the
page table, so a wrong page, a stale prefix or a lost write changes the output (and most such mistakes fail an assert).

All in NumPy on one thread: torch's threads would cost more than the work, above all on a machine that is busy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sglite.kernels.ops import ForwardBatch, KVPool, KVShape

Answer = int | Mapping[int, float] | Tensor
"""A token that is all but certain, some tokens' logits, or all logits [V]."""
Script = Callable[[list[int]], Answer]
"""From a sequence's tokens so far to the next one."""
Ints = npt.NDArray[np.int64]

FLOOR = -30.0
"""The logit of tokens an answer does not name. Finite, so that masks and penalties still find a best token."""
UNWRITTEN = -1


@dataclass(slots=True)
class TokenPool:
    """``ids`` int64 [pages, page_size], UNWRITTEN where nothing was stored yet."""

    shape: KVShape
    ids: Ints

    def nbytes(self) -> int:
        return self.ids.nbytes

    def copy_pages(self, sources: list[int], targets: list[int]) -> None:
        self.ids[targets] = self.ids[sources]


class ScriptedModel:
    """``script`` answers for each wanted position; without one, logits are a hash of the history (see ``hashed``).

    A script may raise (the step fails) and may answer NaN. Steps take well under 2 ms for 64 rows.
    """

    def __init__(self, vocab_size: int, script: Script | None = None) -> None:
        self.vocab_size = vocab_size
        self._script = script

    def kv_shape(self, pages: int, page_size: int) -> KVShape:
        return KVShape(1, pages, page_size, 1, 1, torch.int64, torch.device("cpu"))

    def allocate_kv(self, pages: int, page_size: int) -> TokenPool:
        return TokenPool(self.kv_shape(pages, page_size), np.full((pages, page_size), UNWRITTEN, dtype=np.int64))

    def forward(self, batch: ForwardBatch, kv: KVPool) -> Tensor:
        """The histories of the wanted positions: int64 [R, 1 + longest], the length first, UNWRITTEN behind the end."""
        assert isinstance(kv, TokenPool) and batch.page_size == kv.shape.page_size
        step = _Step(batch)
        step.check(self.vocab_size)
        kv.ids.reshape(-1)[step.write_slots] = step.ids
        return torch.from_numpy(step.histories(kv.ids)).to(batch.ids.device)

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 [R, V]"""
        if self._script is None:
            return hashed(hidden, self.vocab_size)
        logits = np.full((len(hidden), self.vocab_size), FLOOR, dtype=np.float32)
        for row, history in zip(logits, hidden.cpu().numpy(), strict=True):
            _write_answer(row, self._script(history[1 : 1 + history[0]].tolist()))
        return torch.from_numpy(logits).to(hidden.device)


def _write_answer(row: npt.NDArray[np.float32], answer: Answer) -> None:
    if isinstance(answer, Tensor):
        row[:] = answer.cpu().numpy()
    elif isinstance(answer, Mapping):
        row[list(answer)] = list(answer.values())
    else:
        row[answer] = 0.0


class _Step:
    """A batch as arrays of the host."""

    def __init__(self, batch: ForwardBatch) -> None:
        self.ids, self.positions, self.write_slots, self.wanted, self.pages = (
            tensor.cpu().numpy()
            for tensor in (batch.ids, batch.positions, batch.write_slots, batch.logit_index, batch.page_table)
        )
        self.page_size = batch.page_size
        self.stops = np.array(batch.indptr_host[1:])
        self.kv_lengths = np.array(batch.kv_lengths_host)
        self.row_of_token = np.repeat(np.arange(batch.rows), np.diff(batch.indptr_host))

    def check(self, vocab_size: int) -> None:
        """The parts of the batch must agree with each other: a mistake here is the runner's."""
        rows = self.row_of_token
        assert self.ids.min() >= 0 and self.ids.max() < vocab_size, "a token id outside the vocabulary"
        from_the_end = self.stops[rows] - np.arange(len(rows))
        assert np.array_equal(self.positions, self.kv_lengths[rows] - from_the_end), "positions against kv_lengths"
        page, place = np.divmod(self.positions, self.page_size)
        slots = self.pages[rows, page].astype(np.int64) * self.page_size + place
        assert np.array_equal(self.write_slots, slots), "write_slots against page_table"
        assert len(np.unique(slots)) == len(slots), "two tokens are written to one slot"

    def histories(self, pool: Ints) -> Ints:
        rows, lengths = self.row_of_token[self.wanted], self.positions[self.wanted] + 1
        longest = int(lengths.max(initial=0))
        ids = pool[self.pages[rows]].reshape(len(rows), self.pages.shape[1] * self.page_size)[:, :longest]
        outside = np.arange(longest) >= lengths[:, None]
        ids[outside] = UNWRITTEN
        assert np.array_equal(ids == UNWRITTEN, outside), "a position is read that was never written"
        return np.concatenate([lengths[:, None], ids], axis=1)


# --------------------------------------------------------------------------------------------------- default script

_ODD = np.uint64(0x5851F42D4C957F2D)
"""Multiplier of the polynomial hash over a history; any large odd number would do."""


def hashed(hidden: Tensor, vocab_size: int) -> Tensor:
    """Pseudo-random logits in [-8, 8), fp32 [R, V], from histories as ``ScriptedModel.forward`` returns them.

    The hash of a history is a polynomial in its tokens modulo 2^64, so every token and its place count.
    """
    lengths, ids = np.split(hidden.cpu().numpy(), [1], axis=1)
    powers: npt.NDArray[np.uint64] = np.full(ids.shape[1], _ODD).cumprod(dtype=np.uint64)
    terms = (ids + 1).astype(np.uint64) * powers  # UNWRITTEN adds nothing
    seeds = _mix(terms.sum(axis=1, keepdims=True, dtype=np.uint64) + lengths.astype(np.uint64))
    tokens: npt.NDArray[np.uint64] = np.arange(vocab_size, dtype=np.uint64)
    bits = _mix(seeds + tokens) & np.uint64(0xFFFFFF)
    logits = bits.astype(np.float32) * np.float32(16 / 2**24) - np.float32(8)
    return torch.from_numpy(logits).to(hidden.device)


def _mix(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64's finaliser (Steele, Lea and Flood, OOPSLA 2014); products wrap around as they should."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
