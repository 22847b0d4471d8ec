"""Mask and sample in Triton: the fast form of ``kernels.sampling.choose``.

Without filters two launches do it: ``scan`` reads the logits once, split over the vocabulary, and ``finish`` merges the
splits. With top-k, top-p or min-p in the batch, ``scan`` also keeps the largest logit of each small group of tokens,
and four more launches (triton_filters.py) draw again from what the filters keep.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from sglite.kernels.sampling import Chosen, Edits, SampleRows
from sglite.kernels.triton_filters import bound_kernel, gather_kernel, narrow_kernel, whole_kernel
from sglite.kernels.triton_logits import GROUP, ID_BITS
from sglite.kernels.triton_scan import edit_kernel, finish_kernel, logprob_kernel, scan_kernel

CANDIDATES = 1024
"""Tokens of a row that are sorted."""
MAX_VOCABULARY = 1 << ID_BITS.value


def choose(
    logits: Tensor,
    rows: SampleRows,
    mask: Tensor | None,
    edits: Edits | None,
    *,
    filtered: bool = True,
    logprobs: bool = False,
    own: Tensor | None = None,
    candidates: int = CANDIDATES,
) -> Chosen:
    """See ``sampling.choose``. ``filtered=False`` promises that no row has a filter: four launches fewer.

    ``candidates`` (a power of two) changes the speed, never the answer.
    """
    call = _Call(logits, rows, mask, candidates)
    if own is None:
        own = logits.clone() if logprobs and edits is not None else logits
    if edits is not None:
        _edit(logits, edits)
    call.scan(own, filtered, logprobs)
    if filtered:
        call.filter()
    if logprobs:
        call.measure(own)
    return call.chosen


def split_of(vocabulary: int) -> tuple[int, int]:
    """(tokens of a split, splits): enough programs to fill a GPU, and few enough splits to merge in one program.

    The same for any number of rows, so that sums are added in the same order and a row's cut is the same in any batch.
    """
    split = 1024 if vocabulary < 1 << 16 else 2048
    while -(-vocabulary // split) > 128:
        split *= 2
    split = min(split, max(2 * GROUP.value, _power(vocabulary)))
    return split, -(-vocabulary // split)


class _Call:
    """The kernels' arguments and intermediate results. ``state``: fp32 [3, R] peak, mass and bound."""

    def __init__(self, logits: Tensor, rows: SampleRows, mask: Tensor | None, candidates: int) -> None:
        self.count, self.vocabulary = logits.shape
        assert logits.stride(1) == 1 and logits.dtype == torch.float32 and self.vocabulary <= MAX_VOCABULARY
        self.logits, self.rows, self.candidates = logits, rows, candidates
        self.masked, words = mask is not None, logits if mask is None else mask
        self.row = (logits, logits.stride(0), words, words.stride(0), self.vocabulary)
        self.filters = (rows.temperature, rows.top_k, rows.top_p, rows.min_p)
        self.split, self.splits = split_of(self.vocabulary)
        self.block = min(self.split, 1024)
        self.groups = self.splits * self.split // GROUP.value
        self.parts = self._empty(self.count, self.splits, 5)
        self.state = self._empty(3, self.count)
        self.taken = self._empty(self.count, dtype=torch.int32)
        answer = self._empty(3, self.count, dtype=torch.int32)
        self.chosen = Chosen(answer[0], answer[1], answer[2].view(torch.float32))

    def _empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.logits.device)

    def scan(self, own: Tensor, filtered: bool, logprobs: bool) -> None:
        """Every row's token as if it had no filters."""
        marks = self._empty(self.count, self.splits, 2, dtype=torch.int32)
        self.maxima = self._empty(self.count, self.groups) if filtered else self.parts
        scan_kernel[(self.count, self.splits)](
            *self.row, self.rows.key, *self.filters, own, own.stride(0), self.parts, marks, self.maxima, self.groups,
            MASKED=self.masked, FILTERED=filtered, LOGPROBS=logprobs, SPLIT=self.split, BLOCK=self.block, num_warps=8,
        )  # fmt: skip
        finish_kernel[(self.count,)](
            self.parts, marks, self.rows.temperature, self.state,
            self.chosen.token, self.chosen.status, self.chosen.logprob, self.splits, self.count,
            FILTERED=filtered, SPLITS=_power(self.splits), num_warps=1,
        )  # fmt: skip

    def filter(self) -> None:
        """The tokens of rows with filters are drawn again, from what the filters keep."""
        keys = self._empty(self.count, self.candidates, dtype=torch.int64)
        chosen, draw = self.chosen, (self.state, self.taken)
        bound_kernel[(self.count,)](
            *self.filters, self.vocabulary, self.maxima, self.groups, *draw, chosen.status, self.count,
            CANDIDATES=self.candidates, GROUPS=_power(self.groups), num_warps=8,
        )  # fmt: skip
        gather_kernel[(self.count, self.splits)](
            *self.row, *draw, keys, self.count,
            MASKED=self.masked, SPLIT=self.split, BLOCK=self.block, CANDIDATES=self.candidates, num_warps=4,
        )  # fmt: skip
        narrow_kernel[(self.count,)](
            self.rows.key, *self.filters, self.vocabulary, *draw, keys, chosen.token, self.count,
            CANDIDATES=self.candidates, num_warps=4,
        )  # fmt: skip
        whole_kernel[(self.count,)](
            *self.row, self.rows.key, *self.filters, *draw, chosen.token, self.count,
            MASKED=self.masked, BLOCK=min(4096, _power(self.vocabulary)), num_warps=16,
        )  # fmt: skip

    def measure(self, own: Tensor) -> None:
        """The chosen tokens' logprobs."""
        logprob_kernel[(self.count,)](
            own, own.stride(0), self.parts, self.chosen.token, self.chosen.logprob, self.splits,
            SPLITS=_power(self.splits), num_warps=1,
        )  # fmt: skip


def _edit(logits: Tensor, edits: Edits) -> None:
    count = edits.where.shape[1]
    edit_kernel[(-(-count // 256),)](
        logits, logits.stride(0), edits.where, edits.how, count, edits.where.stride(0), edits.how.stride(0), BLOCK=256
    )


def _power(n: int) -> int:
    return int(triton.next_power_of_2(n))
