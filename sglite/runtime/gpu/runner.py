"""The runner of a GPU: every call queues work and returns; only a sample's ``result`` waits.

A decode step is padded to a bucket and replayed from a graph that was captured when the bucket was first met. A row may
ask for the token that was just sampled, before the host knows it (``pending``): it is read on the device, so the next
step is queued while the host still works on this one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sglite.kernels.cascade import SharedPrefix, find_shared
from sglite.kernels.ops import ForwardBatch
from sglite.runtime.batch import PageTables, build_batch
from sglite.runtime.gpu.buckets import Recent, bucket_of
from sglite.runtime.gpu.device import Device, out_of_memory
from sglite.runtime.gpu.sampling import Choose, Sampled, asked, choose_staged
from sglite.runtime.gpu.staging import flatten, layout_of, padded, unflatten
from sglite.runtime.model import Model
from sglite.runtime.plan import Row
from sglite.runtime.runner import DeviceMemoryError
from sglite.runtime.sampler import SampleRow

log = logging.getLogger("sglite.engine")

GRAPHS = 128
"""Captured steps kept at once; each holds a few megabytes of launch parameters."""


class GpuRunner:
    """What ``runtime.runner.Runner`` is, on a device.

    ``captures``: whether the model's decode steps can be captured; ``tile_tokens``: see ``kernels.cascade``, 0 where
    the model knows nothing of shared prefixes. A step that finds no memory on the device raises DeviceMemoryError out
    of its future.
    """

    overlaps = True
    pipelined = True

    def __init__(
        self,
        model: Model,
        *,
        device: Device,
        choose: Choose,
        captures: bool,
        tile_tokens: int,
        pages: int,
        page_size: int,
        slots: int,
        context_length: int,
    ) -> None:
        self.model = model
        self._device = device
        self._choose = choose
        self._captures = captures
        self._tile_tokens = tile_tokens
        self._page_size = page_size
        self._tables = PageTables(slots, -(-context_length // page_size))
        self._steps: Recent[_CapturedStep] = Recent(GRAPHS)
        with device.stream():
            self._kv = model.allocate_kv(pages, page_size)
            self._last = torch.zeros(slots, dtype=torch.int64, device=device.device)
            """By slot, the token sampled last."""

    def start(self, rows: Sequence[Row]) -> Future[Tensor]:
        """Take over the plan's new pages (exactly once per plan) and queue its forward pass: see ``forward``."""
        self._device.adopt()  # what the core computes from the result belongs to the stream as well
        self._tables.apply(rows)
        future: Future[Tensor] = Future()
        try:
            future.set_result(self._forward(rows))
        except Exception as error:
            future.set_exception(error)
        return future

    @torch.inference_mode()
    def forward(self, rows: Sequence[Row]) -> Tensor:
        """Hidden states of the rows' wanted positions, in row order: [sum of row.logits, E].

        A negative id names a slot: see ``pending``. What ``start`` gives is good until the next step, this for ever.
        """
        hidden = self._forward(rows)
        with self._device.stream():
            return hidden.clone()

    @torch.inference_mode()
    def _forward(self, rows: Sequence[Row]) -> Tensor:
        batch = build_batch(rows, self._tables, self._page_size)
        decodes = self._captures and all(len(row.ids) == 1 and row.logits == 1 for row in rows)
        with self._device.stream(), _memory(self._device):
            return self._decode(batch) if decodes else self._run(batch)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 [R, V]"""
        with self._device.stream(), _memory(self._device):
            return self.model.logits(hidden)

    @torch.inference_mode()
    def sample(
        self,
        hidden: Tensor,
        rows: Sequence[SampleRow],
        slots: Sequence[int],
        mask: npt.NDArray[np.int32] | None,
    ) -> Sampled:
        """Choose a token for each row of ``hidden``; from then on ``pending(slot)`` stands for it."""
        with self._device.stream(), _memory(self._device):
            logits = self.model.logits(hidden)
            asks = asked(rows, logits.shape[1], slots, mask)
            staged = asks.staged(self._device.upload(asks.flat))
            chosen, further = choose_staged(logits, asks, staged, self._choose)
            self._last[staged.slots] = chosen.token.long()
            answer = torch.stack([chosen.token, chosen.status, chosen.logprob.view(torch.int32)])
            fetch_further = None if further is None else self._device.download(further)
            return Sampled(rows, asks, self._device.download(answer), fetch_further)

    def close(self) -> None:
        """Forget the captured steps; nothing else outlives the runner."""
        self._steps.clear()

    def _run(self, batch: ForwardBatch) -> Tensor:
        on_device = unflatten(self._device.upload(flatten(batch)), layout_of(batch), batch)
        return self._compute(on_device)

    def _compute(self, batch: ForwardBatch) -> Tensor:
        """The forward pass of a batch on the device, its pending ids looked up first."""
        sampled = self._last[(-1 - batch.ids).clamp(min=0)]
        ids = torch.where(batch.ids < 0, sampled, batch.ids)
        return self.model.forward(replace(batch, ids=ids), self._kv)

    def _decode(self, batch: ForwardBatch) -> Tensor:
        """A step of one token a row, by the captured step of its size."""
        groups = self._shared(batch)
        rows, pages = batch.page_table.shape
        most_rows, most_pages = self._tables.table.shape
        bucket = bucket_of(rows, pages, most_rows=most_rows, most_pages=most_pages, shares=bool(groups))
        whole = padded(batch, bucket, groups, self._tile_tokens)
        step = self._steps.get(bucket, lambda _: _CapturedStep(self._device, whole, self._compute))
        return step.run(whole)[:rows]

    def _shared(self, batch: ForwardBatch) -> list[SharedPrefix]:
        if not self._tile_tokens or batch.rows < 2:
            return []
        return find_shared(batch.page_table.numpy(), batch.kv_lengths.numpy(), self._page_size)


class _CapturedStep:
    """A decode step of one bucket. The first run computes as usual and then records; from then on it is repeated."""

    def __init__(self, device: Device, example: ForwardBatch, compute: Callable[[ForwardBatch], Tensor]) -> None:
        self._device = device
        self._flat = device.upload(flatten(example))
        self._batch = unflatten(self._flat, layout_of(example), example)
        self._compute = compute
        self._replay: Callable[[], Tensor] | None = None

    def run(self, batch: ForwardBatch) -> Tensor:
        """Hidden states [rows, E], in a tensor that the next run of any captured step overwrites."""
        self._device.write(self._flat, flatten(batch))
        if self._replay is not None:
            return self._replay()
        hidden = self._compute(self._batch)
        try:
            self._replay = self._device.capture(self._again)
        except RuntimeError as error:
            log.warning("decode steps of %d rows cannot be captured and run launch by launch: %s", batch.rows, error)
            self._device.trim()
            self._replay = self._again
        return hidden

    def _again(self) -> Tensor:
        return self._compute(self._batch)


class _memory:  # noqa: N801  (reads as a word in `with`)
    """Running out of memory on the device becomes DeviceMemoryError, after cached blocks were given back."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None and out_of_memory(error):
            self._device.trim()
            raise DeviceMemoryError(str(error)) from error
