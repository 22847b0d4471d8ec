"""The compiled CPU kernels as an Ops: products, attention and the whole decoder in one call."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from ctypes import byref
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from sglite.errors import ConfigError
from sglite.kernels.decoder import DecoderWeights
from sglite.kernels.draws import Draw, PackedMask
from sglite.kernels.native import library
from sglite.kernels.native.build import BuildError
from sglite.kernels.native.decoder import FusedDecoder, as_attention, as_batch, fits, supported
from sglite.kernels.native.memory import Arena, prefer_huge_pages
from sglite.kernels.native.pack import NativeLinear, WeightFormat, pack
from sglite.kernels.ops import AttentionSpec, ForwardBatch, KVPool, KVShape, Linear, Table
from sglite.kernels.reference import ReferenceOps
from sglite.kernels.weights import WeightSource, dense

BLOCK = 16
"""Positions that lie together in the pool."""

_DRAW = np.dtype([("temperature", "f4"), ("top_k", "i4"), ("top_p", "f4"), ("min_p", "f4"), ("number", "f8")])
_LIKELIEST = Draw(0.0, -1, 1.0, 0.0, 0.0)


def available() -> str | None:
    """None where the compiled kernels work on this machine, else one line that says why they do not."""
    try:
        library.load()
    except BuildError as error:
        return str(error)
    return None


@dataclass(slots=True)
class NativeKV:
    """``data``: bf16 [2, layers, kv_heads, pages, page_size * head_dim], keys and values; within a page see pool.h."""

    shape: KVShape
    data: Tensor
    pool: library.Pool

    def nbytes(self) -> int:
        return self.data.nbytes

    def copy_pages(self, sources: list[int], targets: list[int]) -> None:
        copies = [self.data[:, :, :, source].clone() for source in sources]  # one by one: faster than lists as indices
        for target, copy in zip(targets, copies, strict=True):
            self.data[:, :, :, target] = copy


class NativeOps:
    """Implements :class:`sglite.kernels.ops.Ops` in bfloat16 on a CPU with AVX-512 VNNI.

    ``threads`` workers run every call together; the calling thread is one of them. ``amx=False`` does without tile
    instructions where the machine has them. Raises ConfigError where ``available()`` says why not.
    """

    name = "native"

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        weights: WeightFormat,
        threads: int,
        *,
        amx: bool = True,
    ) -> None:
        reason = available()
        if reason is not None:
            raise ConfigError(f"the compiled CPU kernels do not run here: {reason}; use kernels=cpu")
        if device.type != "cpu" or dtype != torch.bfloat16:
            raise ConfigError(f"the compiled CPU kernels compute in bfloat16 on a CPU, not in {dtype} on {device.type}")
        self.device = device
        self.dtype = dtype
        self.weights = weights
        self._library = library.load()
        self.amx = amx and bool(self._library.sglite_has_amx())
        self.context = self._library.sglite_open(threads, self.amx)
        weakref.finalize(self, self._library.sglite_close, self.context)
        self._arena = Arena()
        self._plain = ReferenceOps(device, dtype)

    def pack(self, weight: WeightSource, bias: Tensor | None = None) -> NativeLinear:
        return self.pack_many([weight], bias)

    def pack_many(self, weights: Sequence[WeightSource], bias: Tensor | None = None) -> NativeLinear:
        return pack(weights, bias, self.weights, self._arena)

    def linear(self, x: Tensor, weight: Linear) -> Tensor:
        """x [T, K] -> [T, N] in the dtype of x, which is bfloat16 or (for logits) float32."""
        matrix = cast(NativeLinear, weight).matrix
        half = x.dtype == torch.bfloat16
        x = x if x.stride(-1) == 1 or x.shape[1] == 1 else x.contiguous()
        y = torch.empty(len(x), matrix.rows, dtype=x.dtype)
        self._library.sglite_linear(self.context, byref(matrix), x.data_ptr(), x.stride(0), len(x), y.data_ptr(), half)
        return y

    def allocate_kv(self, shape: KVShape) -> KVPool:
        """A pool of the library's, or of plain torch (and its attention) for heads the library has no form for."""
        if not fits(shape.head_dim):
            return self._plain.allocate_kv(shape)
        size = (2, shape.layers, shape.kv_heads, shape.pages, shape.page_size * shape.head_dim)
        # numpy's zeros come from the system untouched, torch's are written: a pool costs memory only where it is used
        data = torch.from_numpy(np.zeros(size, dtype=np.int16)).view(torch.bfloat16)
        prefer_huge_pages(data)
        keys, values = data[0].data_ptr(), data[1].data_ptr()
        blocked = shape.page_size % BLOCK == 0
        pool = library.Pool(keys, values, shape.pages * shape.page_size, shape.kv_heads, shape.head_dim, blocked, 0)
        return NativeKV(shape, data, pool)

    def plan(self, batch: ForwardBatch, spec: AttentionSpec) -> library.Batch:
        """The batch as the library sees it; its own planning takes microseconds and happens in ``attend``."""
        return as_batch(batch)

    def write_kv(self, kv: KVPool, layer: int, k: Tensor, v: Tensor, batch: ForwardBatch) -> None:
        if not isinstance(kv, NativeKV):
            self._plain.write_kv(kv, layer, k, v, batch)
            return
        k, v = _dense_heads(k), _dense_heads(v)
        self._library.sglite_write_kv(
            self.context,
            byref(kv.pool),
            layer,
            k.data_ptr(),
            v.data_ptr(),
            k.stride(0),
            v.stride(0),
            batch.write_slots.data_ptr(),
            len(k),
        )

    def attend(self, q: Tensor, kv: KVPool, layer: int, batch: ForwardBatch, spec: AttentionSpec, plan: Any) -> Tensor:
        if not isinstance(kv, NativeKV):
            return self._plain.attend(q, kv, layer, batch, spec, None)
        q = q.contiguous()
        out = torch.empty_like(q)
        shape = as_attention(spec)
        self._library.sglite_attend(
            self.context, byref(kv.pool), layer, byref(plan), byref(shape), q.data_ptr(), out.data_ptr()
        )
        return out

    def table(self, weight: WeightSource, head: Linear | None) -> Table:
        return head if isinstance(head, NativeLinear) else dense(weight, self.dtype)

    def embed(self, ids: Tensor, table: Table) -> Tensor:
        if not isinstance(table, NativeLinear):
            return self._plain.embed(ids, table)
        rows = torch.empty(len(ids), table.in_features)
        self._library.sglite_rows(byref(table.matrix), ids.contiguous().data_ptr(), len(ids), rows.data_ptr())
        return rows.to(self.dtype)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._plain.rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return self._plain.add_rms_norm(x, residual, weight, eps)

    def rope(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return self._plain.rope(q, k, cos, sin)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return self._plain.silu_mul(gate_up)

    def choose(
        self, logits: Tensor, mask: PackedMask | None, draws: Sequence[Draw | None]
    ) -> tuple[list[int], list[float]]:
        """``kernels.draws.choose``, every row on one worker. The first of equally likely tokens is the likeliest."""
        logits = logits.contiguous()
        assert logits.dtype == torch.float32
        assert mask is None or (mask.dtype == np.int32 and mask.strides[1] == 4)
        rows, width = logits.shape
        ids, peaks = np.empty(rows, dtype=np.int64), np.empty(rows, dtype=np.float32)
        wanted = (
            None if all(draw is None for draw in draws) else np.array([d or _LIKELIEST for d in draws], dtype=_DRAW)
        )
        self._library.sglite_choose(
            self.context,
            logits.data_ptr(),
            None if mask is None else mask.ctypes.data,
            0 if mask is None else mask.strides[0] // 4,
            None if wanted is None else wanted.ctypes.data,
            rows,
            width,
            ids.ctypes.data,
            peaks.ctypes.data,
        )
        return ids.tolist(), peaks.tolist()

    def fused_decoder(self, weights: DecoderWeights) -> Callable[[ForwardBatch, KVPool], Tensor] | None:
        """The whole stack as one call; None for shapes the library has no form for (see ``decoder.supported``).

        Hidden states come in float32, so that the head's logits do too.
        """
        if not supported(weights):
            return None
        return FusedDecoder(self._library, weights, self)


def _dense_heads(x: Tensor) -> Tensor:
    """[T, G, D] whose heads lie together; tokens may be apart, as in a slice of a wider product."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()
