"""Low-rank adapters by row, on every Ops that has them."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from implementations import CPU, IMPLEMENTATIONS, ROUNDING
from shapes import batch_of
from test_ops import assert_close

from sglite.kernels.ops import Adapters, Adapting

CASES = [
    (name, dtype)
    for name, implementation in IMPLEMENTATIONS.items()
    if name in ("reference", "triton")
    for dtype in implementation.dtypes
]
LENGTHS, CHOSEN = (1, 17, 2, 33, 3), (1, 0, -1, 2, 2)
"""Tokens of each row and its adapter: units of one token, of more than a tile, two rows of one adapter."""


@pytest.mark.parametrize(("name", "dtype"), CASES, ids=[f"{name}-{str(dtype)[6:]}" for name, dtype in CASES])
@pytest.mark.parametrize(("rank", "k", "n"), [(1, 1, 1), (8, 33, 70), (17, 640, 64)])
def test_each_row_gets_its_own(name: str, dtype: torch.dtype, rank: int, k: int, n: int) -> None:
    torch.manual_seed(4)
    ops = IMPLEMENTATIONS[name].make(dtype)
    assert isinstance(ops, Adapting)
    batch = batch_of([[1 + row] for row in range(5)], [(0, length) for length in LENGTHS], 64, CPU)
    a, b = torch.randn(3, rank, k).to(dtype), torch.randn(3, n, rank).to(dtype)
    x, y = torch.randn(56, k).to(dtype), torch.randn(56, n).to(dtype)
    expected = y.double()
    for which, (start, stop) in zip(CHOSEN, pairwise(batch.indptr_host), strict=True):
        if which >= 0:
            expected[start:stop] += x[start:stop].double() @ a[which].double().T @ b[which].double().T
    alone = y[18:20].clone()
    ops.add_adapters(y, x, Adapters(a, b), ops.plan_adapters(batch, CHOSEN))
    assert_close(y, expected, ROUNDING[dtype])
    assert torch.equal(y[18:20], alone)
