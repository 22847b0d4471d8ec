"""Where tensors begin: the runner turns a plan into hidden states, over a KV pool that it owns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from sglite.runtime.batch import PageTables, build_batch
from sglite.runtime.model import Model
from sglite.runtime.plan import Row


class Runner:
    """``start`` a plan's rows together; after a failure ``forward`` them again one by one.

    With ``overlaps`` the forward pass runs on a thread of its own, so the caller can finish the previous step
    meanwhile; it has ended when the future has.
    """

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
    ) -> None:
        self.model = model
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

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()


def _done(work: Callable[[Sequence[Row]], Tensor], rows: Sequence[Row]) -> Future[Tensor]:
    """The same future without a thread: computed on the spot."""
    future: Future[Tensor] = Future()
    try:
        future.set_result(work(rows))
    except Exception as error:
        future.set_exception(error)
    return future
