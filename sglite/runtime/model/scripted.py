"""A model without weights whose answers are a function of the history: for tests of everything around a model.

Its KV pool holds the token ids themselves. Each answer is computed from the whole history, read back through the
page table, so a wrong page, a stale prefix or a lost write changes the output (and most such mistakes fail an assert).
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

FLOOR = -30.0
"""The logit of tokens an answer does not name. Finite, so that masks and penalties still find a best token."""
UNWRITTEN = -1


@dataclass(slots=True)
class TokenPool:
    """``ids`` int64 [pages * page_size], UNWRITTEN where nothing was stored yet."""

    shape: KVShape
    ids: Tensor

    def nbytes(self) -> int:
        return self.ids.nbytes


class ScriptedModel:
    """``script`` answers for each wanted position; without one, logits are a hash of the history (see ``hashed``).

    A script may raise (the step fails) and may answer NaN. Steps take well under 2 ms for 64 rows.
    """

    def __init__(self, vocab_size: int, script: Script | None = None, device: torch.device | None = None) -> None:
        self.vocab_size = vocab_size
        self._script = script
        self._device = device or torch.device("cpu")

    def kv_shape(self, pages: int, page_size: int) -> KVShape:
        return KVShape(1, pages, page_size, 1, 1, torch.int64, self._device)

    def allocate_kv(self, pages: int, page_size: int) -> TokenPool:
        ids = torch.full((pages * page_size,), UNWRITTEN, device=self._device)
        return TokenPool(self.kv_shape(pages, page_size), ids)

    def forward(self, batch: ForwardBatch, kv: KVPool) -> Tensor:
        """The histories of the wanted positions: int64 [R, 1 + longest], the length first, UNWRITTEN behind the end."""
        assert isinstance(kv, TokenPool)
        rows = _row_of_token(batch)
        _check(batch, rows, kv, self.vocab_size)
        kv.ids[batch.write_slots] = batch.ids
        wanted = batch.logit_index
        return _histories(kv, batch, rows[wanted], batch.positions[wanted] + 1)

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 [R, V]"""
        if self._script is None:
            return hashed(hidden, self.vocab_size)
        logits = np.full((len(hidden), self.vocab_size), FLOOR, dtype=np.float32)
        for row, history in zip(logits, hidden.cpu().numpy(), strict=True):
            _write_answer(row, self._script(history[1 : 1 + history[0]].tolist()))
        return torch.from_numpy(logits).to(hidden.device)


def _row_of_token(batch: ForwardBatch) -> Tensor:
    lengths = batch.indptr.diff().to(torch.int64)
    return torch.arange(batch.rows, device=lengths.device).repeat_interleave(lengths, output_size=len(batch.ids))


def _slots(batch: ForwardBatch, rows: Tensor, positions: Tensor) -> Tensor:
    """Where in the pool ``positions`` of ``rows`` lie, by the page table; the two broadcast together."""
    pages = batch.page_table[rows, positions // batch.page_size].to(torch.int64)
    return pages * batch.page_size + positions % batch.page_size


def _check(batch: ForwardBatch, rows: Tensor, kv: TokenPool, vocab_size: int) -> None:
    """The parts of the batch must agree with each other: a mistake here is the runner's."""
    assert batch.page_size == kv.shape.page_size
    assert int(batch.ids.min()) >= 0 and int(batch.ids.max()) < vocab_size, "a token id outside the vocabulary"
    from_the_end = batch.indptr[1:][rows] - torch.arange(len(rows), device=rows.device)
    assert torch.equal(batch.positions, batch.kv_lengths[rows] - from_the_end), "positions against kv_lengths"
    assert torch.equal(batch.write_slots, _slots(batch, rows, batch.positions)), "write_slots against page_table"
    assert bool((batch.write_slots.sort().values.diff() > 0).all()), "two tokens are written to one slot"


def _histories(kv: TokenPool, batch: ForwardBatch, rows: Tensor, lengths: Tensor) -> Tensor:
    if not len(rows):
        return torch.empty((0, 1), dtype=torch.int64, device=rows.device)
    longest = int(lengths.max())
    pages = kv.ids.view(-1, batch.page_size)
    ids = pages[batch.page_table[rows].to(torch.int64)].flatten(1)[:, :longest]
    outside = torch.arange(longest, device=rows.device) >= lengths.unsqueeze(1)
    ids = ids.masked_fill(outside, UNWRITTEN)
    assert torch.equal(ids == UNWRITTEN, outside), "a position is read that was never written"
    return torch.cat([lengths.unsqueeze(1), ids], dim=1)


def _write_answer(row: npt.NDArray[np.float32], answer: Answer) -> None:
    if isinstance(answer, Tensor):
        row[:] = answer.cpu().numpy()
    elif isinstance(answer, Mapping):
        row[list(answer)] = list(answer.values())
    else:
        row[answer] = 0.0


# --------------------------------------------------------------------------------------------------- default script

_ODD = 0x5851F42D4C957F2D
"""Multiplier of the polynomial hash over a history; any large odd number would do."""


def hashed(hidden: Tensor, vocab_size: int) -> Tensor:
    """Pseudo-random logits in [-8, 8), fp32 [R, V], from histories as ``ScriptedModel.forward`` returns them.

    The hash of a history is a polynomial in its tokens modulo 2^64, so every token and its place count.
    """
    lengths, ids = hidden[:, :1], hidden[:, 1:]
    terms = (ids + 1) * _powers(ids.shape[1], hidden.device)  # UNWRITTEN adds nothing
    seeds = _mix(terms.sum(dim=1, keepdim=True) + lengths)
    bits = _mix(seeds + torch.arange(vocab_size, device=hidden.device)) & 0xFFFFFF
    return bits.to(torch.float32) * (16 / 2**24) - 8


def _powers(count: int, device: torch.device) -> Tensor:
    return torch.full((count,), _ODD, device=device).cumprod(dim=0)


def _mix(z: Tensor) -> Tensor:
    """SplitMix64's finaliser (Steele, Lea and Flood, OOPSLA 2014) on int64; products wrap around as they should."""
    z = (z ^ _shift(z, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    z = (z ^ _shift(z, 27)) * (0x94D049BB133111EB - 2**64)
    return z ^ _shift(z, 31)


def _shift(z: Tensor, bits: int) -> Tensor:
    """Logical right shift; torch's own keeps the sign."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)
