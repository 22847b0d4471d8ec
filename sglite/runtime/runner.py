"""Where tensors begin: the runner turns a plan into hidden states, over a KV pool that it owns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from sglite.kernels.ops import ForwardBatch, KVPool
from sglite.runtime.batch import PageTables, build_batch
from sglite.runtime.plan import Row


class Model(Protocol):
    """What the runner needs of a model: see ``runtime.model``."""

    vocab_size: int
    """Width of the logits."""

    def allocate_kv(self, pages: int, page_size: int) -> KVPool: ...

    def forward(self, batch: ForwardBatch, kv: KVPool) -> Tensor:
        """Hidden states [R, E] of the wanted positions."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 [R, V]"""
        ...


class Runner:
    """``apply`` the plan's pages once, then ``forward`` its rows, together or (after a failure) one by one."""

    def __init__(
        self, model: Model, *, device: torch.device, pages: int, page_size: int, slots: int, context_length: int
    ) -> None:
        self.model = model
        self.device = device
        self.page_size = page_size
        self.tables = PageTables(slots, -(-context_length // page_size))
        self.kv = model.allocate_kv(pages, page_size)

    def apply(self, rows: Sequence[Row]) -> None:
        self.tables.apply(rows)

    @torch.inference_mode()
    def forward(self, rows: Sequence[Row]) -> Tensor:
        """Hidden states of the rows' wanted positions, in row order: [sum of row.logits, E]."""
        batch = build_batch(rows, self.tables, self.page_size, self.device)
        return self.model.forward(batch, self.kv)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        return self.model.logits(hidden)
