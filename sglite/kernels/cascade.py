"""Prefixes that many decoding rows share, read once for all of them.

The host finds them in the page table (:func:`find_shared`) and lays them out as one array of fixed size
(:func:`pack_shared`), so that a captured step can be given other prefixes by one copy; :func:`shared_views` is what
attention reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """``rows`` of a batch whose first ``length`` positions are the same pages; ``length`` is whole pages."""

    rows: tuple[int, ...]
    length: int


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """Views of one int32 tensor, for a batch of B rows with one token each; X units of at most ``tile_tokens`` rows."""

    tile_tokens: int
    lengths: Tensor
    """[B], positions that a row shares; 0: none"""
    order: Tensor
    """[B], rows of the same unit side by side"""
    unit: Tensor
    """[B], a row's unit; -1: none"""
    place: Tensor
    """[B], a row's place in its unit"""
    start: Tensor
    """[X], where a unit begins in ``order``; units nobody needs are empty"""
    stop: Tensor
    """[X]"""
    row: Tensor
    """[X], the row whose pages are read"""
    high: Tensor
    """[X], the unit's shared positions"""


def find_shared(
    page_table: npt.NDArray[np.integer], lengths: npt.NDArray[np.integer], page_size: int, *, least: int = 512
) -> list[SharedPrefix]:
    """Groups of rows that share at least ``least`` positions, each as long as all its rows agree.

    ``page_table`` [B, P]; ``lengths`` [B] count the step's own token, which nobody shares. A page belongs to one
    prefix, so rows with the same page at the same place agree on everything before it.
    """
    depth = max(1, -(-least // page_size))
    whole = (lengths - 1) // page_size
    long = np.flatnonzero(whole >= depth)
    if not len(long):
        return []  # the table may have fewer columns than the least prefix has pages
    found = []
    for page in np.unique(page_table[long, depth - 1]):
        rows = long[page_table[long, depth - 1] == page]
        if len(rows) > 1:
            candidates = page_table[rows, : int(whole[rows].min())]
            equal = (candidates == candidates[0]).all(axis=0)
            pages = len(equal) if equal.all() else int(equal.argmin())
            found.append(SharedPrefix(tuple(rows.tolist()), pages * page_size))
    return found


def most_units(rows: int, tile_tokens: int) -> int:
    """Units that any grouping of that many rows needs at most: each group has two rows or more."""
    return rows // 2 if tile_tokens > 2 else rows


def packed_size(rows: int, tile_tokens: int) -> int:
    """Integers that :func:`pack_shared` returns."""
    return 4 * rows + 4 * most_units(rows, tile_tokens)


def pack_shared(groups: Sequence[SharedPrefix], rows: int, tile_tokens: int) -> Ints:
    """The groups (disjoint) of a batch of ``rows`` as int32 [packed_size]; no groups is a valid case."""
    lengths, order, unit, place = np.zeros((4, rows), dtype=np.int32)
    unit -= 1
    start, stop, row, high = np.zeros((4, most_units(rows, tile_tokens)), dtype=np.int32)
    used = units = 0
    for group in groups:
        members = np.array(group.rows)
        assert (lengths[members] == 0).all(), "groups overlap"
        lengths[members] = group.length
        order[used : used + len(members)] = members
        for first in range(0, len(members), tile_tokens):
            some = members[first : first + tile_tokens]
            start[units], stop[units] = used + first, used + first + len(some)
            row[units], high[units] = some[0], group.length
            unit[some], place[some] = units, np.arange(len(some))
            units += 1
        used += len(members)
    return np.concatenate([lengths, order, unit, place, start, stop, row, high])


def shared_views(packed: Tensor, rows: int, tile_tokens: int) -> SharedPrefixes:
    """What attention reads, out of ``pack_shared``'s array on the device."""
    units = most_units(rows, tile_tokens)
    return SharedPrefixes(tile_tokens, *torch.split(packed, [rows] * 4 + [units] * 4))
