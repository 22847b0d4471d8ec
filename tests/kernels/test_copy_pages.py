"""Copying pages of a KV pool: all layers, and every source as it was before."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from sglite.kernels.native.ops import NativeKV, NativeOps, available
from sglite.kernels.ops import KVPool, KVShape
from sglite.kernels.reference import PagedKV, allocate_paged_kv

CPU = torch.device("cpu")
SHAPE = KVShape(2, 6, 16, 2, 64, torch.bfloat16, CPU)


def filled(kv: KVPool) -> torch.Tensor:
    """[pages, all else] of a pool with random contents, keys before values."""
    for tensor in tensors(kv):
        tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(3)))
    return contents(kv)


def tensors(kv: KVPool) -> list[torch.Tensor]:
    if isinstance(kv, PagedKV):
        return [kv.k.transpose(0, 1), kv.v.transpose(0, 1)]
    assert isinstance(kv, NativeKV)
    return [kv.data.movedim(3, 0)]


def contents(kv: KVPool) -> torch.Tensor:
    return torch.cat([tensor.flatten(1) for tensor in tensors(kv)], dim=1).clone()


def native_pool() -> KVPool:
    if reason := available():
        pytest.skip(reason)
    return NativeOps(CPU, torch.bfloat16, "int8", 1).allocate_kv(SHAPE)


@pytest.mark.parametrize("make", [lambda: allocate_paged_kv(SHAPE), native_pool], ids=["plain", "native"])
def test_pages_are_copied_as_they_were(make: Callable[[], KVPool]) -> None:
    kv = make()
    before = filled(kv)
    kv.copy_pages([0, 1, 4], [1, 2, 5])
    assert torch.equal(contents(kv), before[[0, 0, 1, 3, 4, 4]])
