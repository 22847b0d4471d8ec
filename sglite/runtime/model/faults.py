"""Any model, made to fail on command: for tests of what must survive a failing step."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from sglite.kernels.ops import ForwardBatch, KVPool, KVShape
from sglite.runtime.model import Model

BeforeStep = Callable[[int, ForwardBatch], None]
"""Called with the step's number (from 0) and its batch before each forward; may raise."""


class FaultyModel:
    """``model`` behind a hook that may raise. ``steps`` counts the calls of ``forward``.

    NaN in one row's logits needs no wrapper: a script may answer ``{token: math.nan}``.
    """

    def __init__(self, model: Model, before_step: BeforeStep) -> None:
        self.vocab_size = model.vocab_size
        self.steps = 0
        self._model = model
        self._before_step = before_step

    def kv_shape(self, pages: int, page_size: int) -> KVShape:
        return self._model.kv_shape(pages, page_size)

    def allocate_kv(self, pages: int, page_size: int) -> KVPool:
        return self._model.allocate_kv(pages, page_size)

    def forward(self, batch: ForwardBatch, kv: KVPool) -> Tensor:
        step, self.steps = self.steps, self.steps + 1
        self._before_step(step, batch)
        return self._model.forward(batch, kv)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._model.logits(hidden)


def fail_at(step: int, error: Exception) -> BeforeStep:
    """Raise ``error`` in that one step."""

    def before_step(current: int, batch: ForwardBatch) -> None:
        if current == step:
            raise error

    return before_step


def fail_on_token(token: int, error: Exception) -> BeforeStep:
    """Raise ``error`` in every step that computes ``token``: a request that poisons whatever batch it is in."""

    def before_step(current: int, batch: ForwardBatch) -> None:
        if bool((batch.ids == token).any()):
            raise error

    return before_step
