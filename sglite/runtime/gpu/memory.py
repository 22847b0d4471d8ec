"""How large the KV pool may be: what the card has, less the weights, a step's working memory and a margin.

The working memory is measured: the largest step is run once on a pool of its own size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch

from sglite.errors import ConfigError
from sglite.kernels.ops import ForwardBatch, KVShape
from sglite.protocol import MAX_TOP_LOGPROBS, SamplingParams
from sglite.runtime.batch import PageTables, build_batch
from sglite.runtime.gpu.device import Device, out_of_memory
from sglite.runtime.gpu.sampling import Choose, asked, choose_staged
from sglite.runtime.gpu.staging import flatten, layout_of, unflatten
from sglite.runtime.model import Model
from sglite.runtime.plan import Row
from sglite.runtime.sampler import SampleRow

SHARE = 0.92
"""Of the card's memory that this process may fill: the rest is for the driver, the libraries and captured steps."""
_HEADROOM = 1.1
"""Working memory is counted a tenth larger than it was measured: blocks of other sizes do not pack as well."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes: of the card, of it free now, and what a step needs at most beyond what is allocated between steps."""

    total: int
    free: int
    working: int

    def pool(self) -> int:
        """Bytes left for the KV pool; not positive when there is no room for one."""
        reserve = int(self.total * (1 - SHARE)) + int(self.working * _HEADROOM)
        return self.free - reserve


def page_bytes(shape: KVShape) -> int:
    return 2 * shape.layers * shape.page_size * shape.kv_heads * shape.head_dim * shape.dtype.itemsize


def pool_tokens(memory: Memory, shape: KVShape, *, least: int) -> int:
    """Tokens of the largest pool, a multiple of the page size; ConfigError when not even ``least`` tokens fit."""
    tokens = max(0, memory.pool()) // page_bytes(shape) * shape.page_size
    if tokens < least:
        raise ConfigError(
            f"the GPU has {_gib(memory.free)} free beside the model, and steps of this size need "
            f"{_gib(memory.working)}: the KV pool would hold {tokens} tokens and not the {least} of one step; lower "
            "max_step_tokens or max_running, choose a smaller weights format, or end other processes on the card"
        )
    return tokens


@contextmanager
def room_for(what: str, remedy: str) -> Iterator[None]:
    """At load: memory that is not there is a ConfigError that says what to lower."""
    try:
        yield
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        raise ConfigError(
            f"the GPU has no memory for {what} beside the model; {remedy}, choose a smaller weights format, or end "
            "other processes on the card"
        ) from error


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"


@dataclass(frozen=True, slots=True)
class Largest:
    """The largest step: ``tokens`` of prompts no longer than ``context``, and ``rows`` samples."""

    tokens: int
    context: int
    rows: int
    page_size: int

    @property
    def prompts(self) -> list[int]:
        """Their lengths: as few as there can be, since attention and the tables are largest for long ones."""
        whole, rest = divmod(self.tokens, self.context)
        return [self.context] * whole + ([rest] if rest else [])


def measure(model: Model, device: Device, choose: Choose, largest: Largest) -> Memory:
    """Run the largest step once and see what it takes."""
    where = device.device
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(where)
    before = torch.cuda.memory_allocated(where)
    pool = run_largest(model, device, choose, largest)
    torch.cuda.synchronize(where)
    working = torch.cuda.max_memory_allocated(where) - before - pool
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(where)
    return Memory(total, free, working)


@torch.inference_mode()
def run_largest(model: Model, device: Device, choose: Choose, largest: Largest) -> int:
    """The step on a pool made for it, with samples of every kind: the pool's bytes."""
    with device.stream():
        pages = [-(-length // largest.page_size) for length in largest.prompts]
        kv = model.allocate_kv(sum(pages), largest.page_size)
        hidden = model.forward(_prompts(device, largest, pages), kv)
        logits = model.logits(hidden[-1:].expand(largest.rows, -1).contiguous())
        mask = np.full((largest.rows, -(-model.vocab_size // 32)), -1, dtype=np.int32)
        asks = asked(_all_kinds(largest.rows), model.vocab_size, range(largest.rows), mask)
        choose_staged(logits, asks, asks.staged(device.upload(asks.flat)), choose)
        return kv.nbytes()


def _all_kinds(rows: int) -> list[SampleRow]:
    """Everything that takes memory is asked for: edits, filters, logprobs under the mask, the likeliest tokens."""
    params = SamplingParams(top_k=50, top_p=0.9, logit_bias=((0, 1.0),))
    return [SampleRow(params, 0, i, 0, top_logprobs=MAX_TOP_LOGPROBS, constrained=True) for i in range(rows)]


def _prompts(device: Device, largest: Largest, pages: list[int]) -> ForwardBatch:
    tables = PageTables(len(pages), max(pages))
    free = iter(range(sum(pages)))
    rows = [
        Row(slot, 0, (0,) * length, tuple(islice(free, count)), reset=True, logits=1)
        for slot, (length, count) in enumerate(zip(largest.prompts, pages, strict=True))
    ]
    tables.apply(rows)
    batch = build_batch(rows, tables, largest.page_size)
    return unflatten(device.upload(flatten(batch)), layout_of(batch), batch)
