"""Where tensors begin: the runner turns a plan into hidden states, over a KV pool that it owns."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sglite.kernels import draws
from sglite.kernels.draws import Choose
from sglite.kernels.ops import ForwardBatch
from sglite.runtime.batch import DecodeBatches, PageTables, general_batch, one_each
from sglite.runtime.model import Model
from sglite.runtime.plan import Row
from sglite.runtime.sampler import BadLogitsError, Choice, SampleRow, sample


class DeviceMemoryError(RuntimeError):
    """The device has no room for this step; a smaller one may still fit."""


class Sampled(Protocol):
    """A step's chosen tokens, perhaps still being computed."""

    def result(self) -> list[Choice | BadLogitsError]:
        """Waits for them; one entry per row."""
        ...


class Flight(Protocol):
    """A forward pass that was started."""

    def result(self) -> Tensor:
        """Waits for its hidden states; raises what it failed with."""
        ...


class StepRunner(Protocol):
    """What the core needs: this module's Runner, or the one of a GPU.

    ``overlaps``: after ``start`` the caller has time for other work. ``pipelined``: more, the next step may be started
    before ``sample``'s result is known, with ``pending(slot)`` in place of the token.
    """

    model: Model
    overlaps: bool
    pipelined: bool

    def start(self, rows: Sequence[Row]) -> Flight: ...

    def forward(self, rows: Sequence[Row]) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...

    def sample(
        self, hidden: Tensor, rows: Sequence[SampleRow], slots: Sequence[int], mask: npt.NDArray[np.int32] | None
    ) -> Sampled:
        """Choose a token for each row of ``hidden`` [R, E]; ``slots`` are their sequences', ``mask`` is packed."""
        ...

    def close(self) -> None: ...


class Runner:
    """``start`` a plan's rows together; after a failure ``forward`` them again one by one.

    Nothing here asks torch for gradients, and the engine's thread is in inference mode for good: entering it anew costs
    as much as a small kernel. With ``overlaps`` the forward pass runs on a thread of its own, so the caller can finish
    the previous step meanwhile; it has ended when the future has.
    """

    pipelined = False

    def __init__(
        self,
        model: Model,
        *,
        pages: int,
        page_size: int,
        slots: int,
        context_length: int,
        overlap: bool = False,
        choose: Choose = draws.choose,
    ) -> None:
        self.model = model
        self._choose = choose
        self.overlaps = overlap
        self._page_size = page_size
        self._tables = PageTables(slots, -(-context_length // page_size))
        self._decodes = DecodeBatches(self._tables, page_size)
        self._kv = model.allocate_kv(pages, page_size)
        self._thread = ThreadPoolExecutor(1, "sglite-forward") if overlap else None

    def start(self, rows: Sequence[Row]) -> Flight:
        """Take over the plan's new pages (exactly once per plan) and compute: see ``forward``."""
        self._tables.apply(rows)
        self._copy_begun(rows)
        if self._thread is not None:
            return self._thread.submit(self._forward_aside, rows)
        try:
            return _Landed(self.forward(rows))
        except Exception as error:
            return _Crashed(error)

    def forward(self, rows: Sequence[Row]) -> Tensor:
        """Hidden states of the rows' wanted positions, in row order: [sum of row.logits, E]."""
        return self.model.forward(self._batch(rows), self._kv)

    def _copy_begun(self, rows: Sequence[Row]) -> None:
        """Pages that begin as others do."""
        begun = [row for row in rows if row.copied >= 0]
        if begun:
            targets = [self._tables.lists[row.slot][row.start // self._page_size] for row in begun]
            self._kv.copy_pages([row.copied for row in begun], targets)

    @torch.inference_mode()
    def _forward_aside(self, rows: Sequence[Row]) -> Tensor:
        return self.forward(rows)

    def _batch(self, rows: Sequence[Row]) -> ForwardBatch:
        return self._decodes.of(rows) if one_each(rows) else general_batch(rows, self._tables, self._page_size)

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 [R, V]"""
        return self.model.logits(hidden)

    def sample(
        self, hidden: Tensor, rows: Sequence[SampleRow], slots: Sequence[int], mask: npt.NDArray[np.int32] | None
    ) -> Sampled:
        return _Chosen(sample(self.logits(hidden), rows, mask, self._choose))

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()


class _Chosen:
    """Tokens that are known already."""

    def __init__(self, choices: list[Choice | BadLogitsError]) -> None:
        self._choices = choices

    def result(self) -> list[Choice | BadLogitsError]:
        return self._choices


class _Landed:
    """A forward pass that is over."""

    def __init__(self, hidden: Tensor) -> None:
        self._hidden = hidden

    def result(self) -> Tensor:
        return self._hidden


class _Crashed:
    def __init__(self, error: Exception) -> None:
        self._error = error

    def result(self) -> Tensor:
        raise self._error
