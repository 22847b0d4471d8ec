"""What a forward pass gave, by track."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from sglite.runtime.plan import Row
from sglite.runtime.tracks import Track


class States:
    """``hidden`` [sum of row.logits, E] of the wanted positions of ``rows``, in their order."""

    def __init__(self, hidden: Tensor, rows: Sequence[tuple[Row, Track]]) -> None:
        self.rows = rows
        self._hidden = hidden
        self._stops: dict[Track, tuple[int, int]] = {}
        stop = 0
        for row, track in rows:
            start, stop = stop, stop + row.logits
            self._stops[track] = (start, stop)
        assert stop == len(hidden)

    def __contains__(self, track: Track) -> bool:
        return track in self._stops

    def of(self, track: Track) -> Tensor:
        """[row.logits, E]"""
        start, stop = self._stops[track]
        return self._hidden[start:stop]

    def last(self, tracks: Sequence[Track]) -> Tensor:
        """[T, E], each track's last; no copy where that is all there is, as in most steps."""
        where = [self._stops[track][1] - 1 for track in tracks]
        return self._hidden if where == list(range(len(self._hidden))) else _rows(self._hidden, where)


def _rows(hidden: Tensor, where: Sequence[int]) -> Tensor:
    """These rows. As slices: a list of indices would be a copy to the device that waits for it."""
    starts = [i for i, row in enumerate(where) if i == 0 or row != where[i - 1] + 1]
    return torch.cat([hidden[where[a] : where[b - 1] + 1] for a, b in pairwise([*starts, len(where)])])
