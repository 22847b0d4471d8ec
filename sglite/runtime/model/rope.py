"""Rotary position embeddings: the frequencies of each variant, and the tables of a whole context.

RoPE: Su et al., "RoFormer" (2021). Linear scaling: position interpolation, Chen et al. (2023). Llama-3 scaling: as in
Meta's reference implementation of Llama 3.1: long wavelengths are stretched by ``factor``, short ones are kept, those
between are blended.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sglite.runtime.loading.config import RopeConfig


def rope_tables(rope: RopeConfig, head_dim: int, context: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin of every angle: fp32 [context, head_dim / 2] each."""
    positions = torch.arange(context, dtype=torch.float32, device=device)
    angles = torch.outer(positions, frequencies(rope, head_dim).to(device))
    return angles.cos(), angles.sin()


def frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Radians per position of each pair of components: fp32 [head_dim / 2]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    plain = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(plain, rope)
    return plain


def _llama3(plain: Tensor, rope: RopeConfig) -> Tensor:
    turns = rope.original_context * plain / (2 * math.pi)  # full turns of each pair within the original context
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    return torch.lerp(plain / rope.factor, plain, blend.clamp(0.0, 1.0))
