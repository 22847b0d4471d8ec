"""Sequences driven through a model without an engine: the plainest loop, for tests of models."""

from __future__ import annotations

import torch
from torch import Tensor

from sglite.kernels.ops import ForwardBatch
from sglite.runtime.batch import PageTables, build_batch
from sglite.runtime.model import Model
from sglite.runtime.plan import Row


class Driver:
    """Sequences through a model step by step, each in pages of its own."""

    def __init__(self, model: Model, sequences: list[list[int]], page_size: int, room: int = 0) -> None:
        self.model, self.sequences, self.page_size = model, [list(s) for s in sequences], page_size
        width = -(-(max(map(len, sequences)) + room) // page_size)
        self.tables = PageTables(len(sequences), width)
        self.kv = model.allocate_kv(len(sequences) * width, page_size)
        pages = torch.randperm(len(sequences) * width, generator=torch.Generator().manual_seed(3)).tolist()
        whole = [
            Row(slot, 0, (), tuple(pages[slot * width : (slot + 1) * width]), reset=True)
            for slot in range(len(sequences))
        ]
        self.tables.apply(whole)
        self.done = [0] * len(sequences)

    def batch(self, counts: dict[int, int], wanted: int | None = None) -> ForwardBatch:
        """The next ``counts[slot]`` tokens of some sequences; logits of the ``wanted`` last of each (None: all)."""
        rows = []
        for slot, count in counts.items():
            start, self.done[slot] = self.done[slot], self.done[slot] + count
            ids = tuple(self.sequences[slot][start : start + count])
            rows.append(Row(slot, start, ids, logits=count if wanted is None else wanted))
        return build_batch(rows, self.tables, self.page_size)

    @torch.inference_mode()
    def step(self, counts: dict[int, int], wanted: int | None = None) -> Tensor:
        """Compute such a batch: logits [R, V]."""
        return self.model.logits(self.model.forward(self.batch(counts, wanted), self.kv))

    def greedy(self, new_tokens: int) -> list[list[int]]:
        """Each sequence's next tokens, all in one batch."""
        answers: list[list[int]] = [[] for _ in self.sequences]
        pending = {slot: len(ids) for slot, ids in enumerate(self.sequences)}
        for _ in range(new_tokens):
            chosen = self.step(pending, wanted=1).argmax(-1).tolist()
            for slot, token in enumerate(chosen):
                self.sequences[slot].append(token)
                answers[slot].append(token)
            pending = dict.fromkeys(pending, 1)
        return answers
