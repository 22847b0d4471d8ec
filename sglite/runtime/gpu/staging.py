"""A batch as one flat array of int32, so that it reaches the device in one copy; and padded to a bucket.

Layout: the int64 tensors first (ids, positions, write slots, wanted tokens), so that each begins on eight bytes, then
the int32 ones (indptr, lengths, page table, and prefixes that rows share).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sglite.kernels.cascade import SharedPrefix, SharedPrefixes, pack_shared, packed_size, shared_views
from sglite.kernels.ops import ForwardBatch
from sglite.runtime.gpu.buckets import Bucket

Flat = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes from which every tensor's place follows: T tokens, B rows, P pages a row, R wanted tokens.

    ``tile_tokens``: see ``kernels.cascade``; 0 where the batch says nothing of shared prefixes.
    """

    tokens: int
    rows: int
    width: int
    wanted: int
    tile_tokens: int = 0

    @property
    def words(self) -> int:
        rows = 2 * self.rows + 1 + self.rows * self.width
        return 2 * (3 * self.tokens + self.wanted) + rows + self._shared

    @property
    def _shared(self) -> int:
        return packed_size(self.rows, self.tile_tokens) if self.tile_tokens else 0

    def views(self, flat: Tensor) -> Iterator[Tensor]:
        """ids, positions, write_slots, logit_index; indptr, kv_lengths, page_table; shared prefixes, packed."""
        start = 0
        for length in (self.tokens, self.tokens, self.tokens, self.wanted):
            yield flat[start : start + 2 * length].view(torch.int64)
            start += 2 * length
        for length in (self.rows + 1, self.rows):
            yield flat[start : start + length]
            start += length
        yield flat[start : start + self.rows * self.width].view(self.rows, self.width)
        yield flat[start + self.rows * self.width :]


def layout_of(batch: ForwardBatch) -> Layout:
    rows, width = batch.page_table.shape
    tile_tokens = 0 if batch.shared is None else batch.shared.tile_tokens
    return Layout(len(batch.ids), rows, width, len(batch.logit_index), tile_tokens)


def flatten(batch: ForwardBatch) -> Flat:
    """A batch on the host as one array."""
    layout = layout_of(batch)
    flat = torch.empty(layout.words, dtype=torch.int32)
    for view, tensor in zip(layout.views(flat), _tensors(batch), strict=True):
        view.copy_(tensor)
    array: Flat = flat.numpy()
    return array


def unflatten(flat: Tensor, layout: Layout, like: ForwardBatch) -> ForwardBatch:
    """Views into the flat array on the device as a batch; the host's copies come from ``like``."""
    ids, positions, write_slots, logit_index, indptr, kv_lengths, page_table, shared = layout.views(flat)
    return ForwardBatch(
        ids=ids,
        positions=positions,
        indptr=indptr,
        kv_lengths=kv_lengths,
        page_table=page_table,
        page_size=like.page_size,
        write_slots=write_slots,
        logit_index=logit_index,
        indptr_host=like.indptr_host,
        kv_lengths_host=like.kv_lengths_host,
        shared=shared_views(shared, layout.rows, layout.tile_tokens) if layout.tile_tokens else None,
    )


def padded(
    batch: ForwardBatch, bucket: Bucket, groups: Sequence[SharedPrefix] = (), tile_tokens: int = 0
) -> ForwardBatch:
    """A step of one token a row, brought to a bucket's size. Padding has length 0 and is written nowhere (slot -1).

    The host's lengths say what the bucket allows and not what this step needs, since a captured graph serves both.
    ``groups``: prefixes that rows share, for a bucket that knows of them.
    """
    assert len(batch.ids) == batch.rows <= bucket.rows and batch.page_table.shape[1] <= bucket.width
    more, wider = bucket.rows - batch.rows, bucket.width - batch.page_table.shape[1]
    pad = torch.nn.functional.pad
    shared = None
    if bucket.shares:
        packed = torch.from_numpy(pack_shared(groups, bucket.rows, tile_tokens))
        shared = shared_views(packed, bucket.rows, tile_tokens)
    return ForwardBatch(
        ids=pad(batch.ids, (0, more)),
        positions=pad(batch.positions, (0, more)),
        indptr=torch.arange(bucket.rows + 1, dtype=torch.int32),
        kv_lengths=pad(batch.kv_lengths, (0, more)),
        page_table=pad(batch.page_table, (0, wider, 0, more)),
        page_size=batch.page_size,
        write_slots=pad(batch.write_slots, (0, more), value=-1),
        logit_index=torch.arange(bucket.rows),
        indptr_host=tuple(range(bucket.rows + 1)),
        kv_lengths_host=(bucket.width * batch.page_size,) * bucket.rows,
        shared=shared,
    )


def _tensors(batch: ForwardBatch) -> tuple[Tensor, ...]:
    first = batch.ids, batch.positions, batch.write_slots, batch.logit_index
    return *first, batch.indptr, batch.kv_lengths, batch.page_table, _packed(batch.shared)


def _packed(shared: SharedPrefixes | None) -> Tensor:
    if shared is None:
        return torch.empty(0, dtype=torch.int32)
    parts = shared.lengths, shared.order, shared.unit, shared.place, shared.start, shared.stop, shared.row, shared.high
    return torch.cat(parts)
