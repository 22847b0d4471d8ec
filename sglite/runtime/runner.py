"""Where tensors begin: the runner turns a plan into hidden states, over a KV pool that it owns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sglite.kernels import draws
from sglite.kernels.draws import Choose
from sglite.runtime.batch import PageTables, build_batch
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


class StepRunner(Protocol):
    """What the core needs: this module's Runner, or the one of a GPU.

    ``overlaps``: after ``start`` the caller has time for other work. ``pipelined``: more, the next step may be started
    before ``sample``'s result is known, with ``pending(slot)`` in place of the token.
    """

    model: Model
    overlaps: bool
    pipelined: bool

    def start(self, rows: Sequence[Row]) -> Future[Tensor]: ...

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

    With ``overlaps`` the forward pass runs on a thread of its own, so the caller can finish the previous step
    meanwhile; it has ended when the future has.
    """

    pipelined = False

    def __init__(
        self,
        model: Model,
        *,
        device: torch.device,
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
        self._device = device
        self._page_size = page_size
        self._tables = PageTables(slots, -(-context_length // page_size))
        self._kv = model.allocate_kv(pages, page_size)
        self._thread = ThreadPoolExecutor(1, "sglite-forward") if overlap else None

    def start(self, rows: Sequence[Row]) -> Future[Tensor]:
        """Take over the plan's new pages (exactly once per plan) and compute: see ``forward``."""
        self._tables.apply(rows)
        if self._thread is not None:
            return self._thread.submit(self.forward, rows)
        return _done(self.forward, rows)

    @torch.inference_mode()
    def forward(self, rows: Sequence[Row]) -> Tensor:
        """Hidden states of the rows' wanted positions, in row order: [sum of row.logits, E]."""
        batch = build_batch(rows, self._tables, self._page_size, self._device)
        return self.model.forward(batch, self._kv)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 [R, V]"""
        return self.model.logits(hidden)

    @torch.inference_mode()
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


def _done(work: Callable[[Sequence[Row]], Tensor], rows: Sequence[Row]) -> Future[Tensor]:
    """The same future without a thread: computed on the spot."""
    future: Future[Tensor] = Future()
    try:
        future.set_result(work(rows))
    except Exception as error:
        future.set_exception(error)
    return future
