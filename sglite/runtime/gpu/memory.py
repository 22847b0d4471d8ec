"""How large the KV pool may be: what the card has, less the weights, a step's working memory and a margin.

The working memory is measured: the largest step is run once on a pool of its own size.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from sglite.errors import ConfigError
from sglite.kernels.ops import ForwardBatch, KVShape
from sglite.protocol import SamplingParams
from sglite.runtime.batch import PageTables, build_batch
from sglite.runtime.gpu.device import Device
from sglite.runtime.gpu.runner import Choose
from sglite.runtime.gpu.sampling import asked
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


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"


def measure(model: Model, device: Device, choose: Choose, *, page_size: int, rows: int, tokens: int) -> Memory:
    """Run the largest step once (``tokens`` of one prompt, then ``rows`` samples) and see what it takes."""
    where = device.device
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(where)
    before = torch.cuda.memory_allocated(where)
    pool = largest_step(model, device, choose, page_size=page_size, rows=rows, tokens=tokens)
    torch.cuda.synchronize(where)
    working = torch.cuda.max_memory_allocated(where) - before - pool
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(where)
    return Memory(total, free, working)


@torch.inference_mode()
def largest_step(model: Model, device: Device, choose: Choose, *, page_size: int, rows: int, tokens: int) -> int:
    """One prompt of ``tokens`` tokens on a pool made for it, and ``rows`` samples of every kind: the pool's bytes."""
    pages = -(-tokens // page_size)
    with device.stream():
        kv = model.allocate_kv(pages, page_size)
        hidden = model.forward(_prompt(device, page_size, tokens), kv)
        logits = model.logits(hidden[-1:].expand(rows, -1).contiguous())
        mask = np.full((rows, -(-model.vocab_size // 32)), -1, dtype=np.int32)
        params = SamplingParams(top_k=50, top_p=0.9, logit_bias=((0, 1.0),))
        asks = asked([SampleRow(params, 0, i, 0, top_logprobs=0) for i in range(rows)], model.vocab_size, mask)
        parameters, edits, words = asks.tensors(device.upload(asks.flat))
        choose(logits, parameters, words, edits, filtered=True, logprobs=True)
        return kv.nbytes()


def _prompt(device: Device, page_size: int, tokens: int) -> ForwardBatch:
    pages = -(-tokens // page_size)
    tables = PageTables(1, pages)
    row = Row(0, 0, (0,) * tokens, tuple(range(pages)), reset=True, logits=1)
    tables.apply((row,))
    batch = build_batch((row,), tables, page_size)
    return unflatten(device.upload(flatten(batch)), layout_of(batch), batch)
