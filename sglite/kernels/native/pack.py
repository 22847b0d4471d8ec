"""Weights into the panels that the compiled products read; the layouts are described in matrix.h."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor

from sglite.kernels.native.library import DENSE, INT4, INT8, Matrix
from sglite.kernels.native.memory import Arena
from sglite.kernels.weights import BLOCK, BlockQuantized, WeightSource, dense

PANEL = 16
"""Rows of a weight that lie together."""
_ROWS = 256
"""Rows that are rounded at a time: their values in fp32 stay in the cache."""

WeightFormat = Literal["dense", "int8", "int4"]


class NativeLinear:
    """A packed weight [N, K] with an optional bias [N]; ``matrix`` points into the tensors it keeps alive."""

    def __init__(self, matrix: Matrix, tensors: Sequence[Tensor | None]) -> None:
        self.matrix = matrix
        self.out_features: int = matrix.rows
        self.in_features: int = matrix.columns
        self._tensors = [tensor for tensor in tensors if tensor is not None]

    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors)


def pack(weights: Sequence[WeightSource], bias: Tensor | None, format: WeightFormat, arena: Arena) -> NativeLinear:
    """The weights, which share their K, stacked and packed as one matrix in the arena.

    What a file holds in 8-bit blocks keeps 8 bits when ``format`` is int4: GGUF files do so where 4 bits cost quality.
    """
    if format == "int4" and any(isinstance(w, BlockQuantized) and w.format == "Q8_0" for w in weights):
        format = "int8"
    packer = {"dense": _pack_dense, "int8": _pack_int8, "int4": _pack_int4}[format]
    return packer(weights, None if bias is None else _padded_rows(bias.float()), arena)


def address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _matrix(
    format: int,
    weights: Sequence[WeightSource],
    unit: int,
    codes: Tensor,
    scale: Tensor | None,
    minimum: Tensor | None,
    sums: Tensor | None,
    bias: Tensor | None,
    arena: Arena,
) -> NativeLinear:
    rows, columns = sum(w.shape[0] for w in weights), weights[0].shape[1]
    parts = [None if part is None else arena.keep(part) for part in (codes, scale, minimum, sums, bias)]
    return NativeLinear(Matrix(format, rows, columns, _ceil(columns, unit), *map(address, parts)), parts)


def _pack_dense(weights: Sequence[WeightSource], bias: Tensor | None, arena: Arena) -> NativeLinear:
    codes = torch.cat([_padded(dense(w, torch.float32), 1, 32).to(torch.bfloat16) for w in weights])
    return _matrix(DENSE, weights, 32, _in_panels(_padded_rows(codes)), None, None, None, bias, arena)


def _pack_int8(weights: Sequence[WeightSource], bias: Tensor | None, arena: Arena) -> NativeLinear:
    """One symmetric scale for each row of the weight."""
    pairs = [_int8_rows(part) for w in weights for part in _parts(w)]
    codes, scale = (_padded_rows(torch.cat(parts)) for parts in zip(*pairs, strict=True))
    sums = codes.sum(dim=1, dtype=torch.int32)
    return _matrix(INT8, weights, 64, _in_panels(codes), scale, None, sums, bias, arena)


def _parts(weight: WeightSource) -> Iterator[WeightSource]:
    for start in range(0, weight.shape[0], _ROWS):
        rows = slice(start, start + _ROWS)
        yield weight.rows(rows) if isinstance(weight, BlockQuantized) else weight[rows]


def _int8_rows(weight: WeightSource) -> tuple[Tensor, Tensor]:
    values = _padded(dense(weight, torch.float32), 1, 64)
    scale = values.abs().amax(dim=1).clamp_min(1e-30) / 127
    return (values / scale.unsqueeze(1)).round_().to(torch.int8), scale


def _pack_int4(weights: Sequence[WeightSource], bias: Tensor | None, arena: Arena) -> NativeLinear:
    """4-bit codes with a scale and a minimum for 32 columns: GGUF's Q4 blocks as they are, others rounded to it."""
    triples = [_int4_blocks(w) for w in weights]
    codes, scale, minimum = (_padded_rows(torch.cat(parts)) for parts in zip(*triples, strict=True))
    groups = codes.shape[1]
    quads = codes.view(-1, PANEL, groups, 2, 4, 4)  # [panel, n, group, half, i, j]
    nibbles = quads[:, :, :, 0] | (quads[:, :, :, 1] << 4)
    by_group = nibbles.view(torch.int32).squeeze(4).permute(0, 2, 3, 1)  # [panel, group, i, n], four bytes j each
    scale, minimum = (x.view(-1, PANEL, groups).transpose(1, 2).half() for x in (scale, minimum))
    return _matrix(INT4, weights, BLOCK, by_group, scale, minimum, None, bias, arena)


def _int4_blocks(weight: WeightSource) -> tuple[Tensor, Tensor, Tensor]:
    """codes uint8 [N, K / 32, 32] below 16, scale and minimum fp32 [N, K / 32]."""
    if isinstance(weight, BlockQuantized) and weight.format != "Q8_0":
        codes = torch.cat([weight.codes & 0x0F, weight.codes >> 4], dim=-1)
        offset = weight.offset if weight.offset is not None else -8 * weight.scale
        return codes, weight.scale.float(), offset.float()
    blocks = _padded(dense(weight, torch.float32), 1, BLOCK).view(weight.shape[0], -1, BLOCK)
    low, high = blocks.aminmax(dim=2)
    # what is stored is fp16, so the codes are chosen for the values that will be used
    minimum = low.half().float()
    scale = ((high - minimum).clamp_min(0) / 15).half().float()
    safe = torch.where(scale > 0, scale, 1.0)
    codes = (blocks - minimum.unsqueeze(2)).div_(safe.unsqueeze(2)).round_().clamp_(0, 15)
    return codes.to(torch.uint8), scale, minimum


def _in_panels(codes: Tensor) -> Tensor:
    """[N, K] -> [panel, unit, n], a unit being the codes of four bytes: moved as one number, they move fast."""
    units = codes.view(torch.int32)
    return units.view(-1, PANEL, units.shape[1]).transpose(1, 2)


def _ceil(n: int, unit: int) -> int:
    return -(-n // unit) * unit


def _padded(tensor: Tensor, dim: int, unit: int) -> Tensor:
    missing = _ceil(tensor.shape[dim], unit) - tensor.shape[dim]
    if not missing:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = missing
    return torch.cat([tensor, tensor.new_zeros(shape)], dim)


def _padded_rows(tensor: Tensor) -> Tensor:
    return _padded(tensor, 0, PANEL)
