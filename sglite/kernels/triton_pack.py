"""Weights into the formats of triton_linear.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from sglite.kernels.triton_linear import GROUP, HALF, ChannelLinear, GroupLinear
from sglite.kernels.weights import BlockQuantized, WeightSource, dense

FP8_LIMIT = 448.0
"""The largest float8_e4m3fn."""


def pack(
    weights: Sequence[WeightSource], bias: Tensor | None, format: Literal["int8", "int4", "fp8"], device: torch.device
) -> ChannelLinear | GroupLinear:
    """The weights, which share their K, stacked as one [sum N, K].

    Blocks of a file stay exact where the format has room for them: 8-bit blocks keep 8 bits also under int4.
    """
    blocks = [w for w in weights if isinstance(w, BlockQuantized)]
    eight = any(w.format == "Q8_0" for w in blocks)
    if format == "int4" and not eight:
        return _pack_groups(weights, bias, 4, device)
    if format != "fp8" and eight:
        return _pack_groups(weights, bias, 8, device)
    return _pack_channels(weights, bias, torch.float8_e4m3fn if format == "fp8" else torch.int8, device)


def _pack_channels(
    weights: Sequence[WeightSource], bias: Tensor | None, dtype: torch.dtype, device: torch.device
) -> ChannelLinear:
    weight = torch.cat([dense(w).to(device) for w in weights])
    limit = FP8_LIMIT if dtype.is_floating_point else 127.0
    scale = weight.abs().amax(dim=1).clamp_min(1e-30) / limit
    codes = weight / scale.unsqueeze(1)
    codes = codes.clamp(-limit, limit) if dtype.is_floating_point else codes.round()
    return ChannelLinear(weight.shape[0], weight.shape[1], codes.to(dtype), scale, bias)


def _pack_groups(weights: Sequence[WeightSource], bias: Tensor | None, bits: int, device: torch.device) -> GroupLinear:
    parts = [_groups(w, bits) for w in weights]
    codes, scale, offset = (torch.cat([part[i] for part in parts]).to(device) for i in range(3))
    rows, columns = codes.shape[0], weights[0].shape[1]
    shifted = bits == 4 and bool(offset.any())
    if shifted:  # codes without a sign, the shift in the offsets
        codes, offset = codes + 8, offset - 8 * scale
    elif bits == 4:
        codes = codes + 8
    short = -codes.shape[1] % (2 * HALF // GROUP)
    codes, scale, offset = (pad(t, (0, 0) * (t.dim() - 2) + (0, short)) for t in (codes, scale, offset))
    halves = codes.view(rows, -1, 2, HALF)
    lie = (halves[:, :, 0] | halves[:, :, 1] << 4).view(torch.uint8) if bits == 4 else codes
    kept = offset.half() if shifted else None
    return GroupLinear(rows, columns, bits, lie.reshape(rows, -1).contiguous(), scale.half(), kept, bias)


def _groups(weight: WeightSource, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """weight = code * scale + offset: int8 [N, K / 32, 32] (from -8 to 7 with 4 bits), fp32 [N, K / 32] twice."""
    if isinstance(weight, BlockQuantized) and (bits == 8) == (weight.format == "Q8_0"):
        codes = weight.unpacked_codes()
        if weight.offset is None:
            return codes, weight.scale, torch.zeros_like(weight.scale)
        return codes - 8, weight.scale, weight.offset + 8 * weight.scale
    groups = dense(weight)
    groups = pad(groups, (0, -groups.shape[1] % GROUP)).view(len(groups), -1, GROUP)
    extreme = groups.gather(2, groups.abs().argmax(dim=2, keepdim=True))
    scale = extreme / -8 if bits == 4 else extreme.abs() / 127
    scale = scale.half().float()
    codes = torch.where(scale == 0, 0, groups / scale).round().clamp(-8 if bits == 4 else -127, 7 if bits == 4 else 127)
    return codes.to(torch.int8), scale.squeeze(2), torch.zeros_like(scale.squeeze(2))
