"""Weights as they lie in files: plain tensors, or the quantised blocks of GGUF, kept as they are.

A packer may repack blocks into its own groups without going through bf16; whoever cannot, dequantises.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

BlockFormat = Literal["Q4_0", "Q4_1", "Q8_0"]
BLOCK = 32
_LOW = 0x0F0F0F0F0F0F0F0F


@dataclass(frozen=True, slots=True)
class BlockQuantized:
    """A [rows, columns] matrix in blocks of 32 along each row.

    weight = scale * code + offset, per block:
    Q4_0: code = nibble - 8, no offset; Q4_1: code = nibble, offset = the block's minimum; Q8_0: code = int8.

    ``codes`` int8 [rows, columns] would waste half the space of 4-bit data, so nibbles stay packed:
    Q4_*: uint8 [rows, columns / 32, 16], low nibble = element j, high nibble = element j + 16 of the block;
    Q8_0: int8 [rows, columns / 32, 32]. ``scale`` and ``offset``: fp32 [rows, columns / 32].
    """

    format: BlockFormat
    codes: Tensor
    scale: Tensor
    offset: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return (self.codes.shape[0], self.codes.shape[1] * BLOCK)

    def unpacked_codes(self) -> Tensor:
        """int8 [rows, columns / 32, 32] with Q4_0's shift applied."""
        if self.format == "Q8_0":
            return self.codes
        eights = self.codes.view(torch.int64)  # of nibbles that move together
        nibbles = torch.cat([eights & _LOW, (eights >> 4) & _LOW], dim=-1).view(torch.int8)
        return nibbles - 8 if self.format == "Q4_0" else nibbles

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        values = self.unpacked_codes().to(torch.float32) * self.scale.unsqueeze(-1)
        if self.offset is not None:
            values = values + self.offset.unsqueeze(-1)
        return values.reshape(self.shape).to(dtype)

    def rows(self, index: Tensor | slice) -> BlockQuantized:
        """The same matrix with its rows taken in another order (or a part of them)."""
        offset = None if self.offset is None else self.offset[index]
        return BlockQuantized(self.format, self.codes[index], self.scale[index], offset)


WeightSource = Tensor | BlockQuantized


def dense(weight: WeightSource, dtype: torch.dtype = torch.float32) -> Tensor:
    """The weight as a plain tensor of ``dtype``."""
    if isinstance(weight, BlockQuantized):
        return weight.dequantize(dtype)
    return weight.to(dtype)
