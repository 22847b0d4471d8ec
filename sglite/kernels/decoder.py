"""A decoder-only transformer as data: packed weights and constants, ready for layer-by-layer or fused execution.

The model code builds a :class:`DecoderWeights` once; its own forward walks it operation by operation, and an Ops
that can run the whole stack in one call (``Ops.fused_decoder``) reads the same object.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sglite.kernels.ops import AttentionSpec, Linear, Table


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One block: x += o(attend(rope(qkv(norm(x))))); x += down(silu_mul(gate_up(norm(x))))."""

    attention_norm: Tensor
    """[E]"""
    qkv: Linear
    """[(H + 2 G) D, E], rows in the order q, k, v; bias inside where the family has one"""
    o: Linear
    """[E, H D]"""
    mlp_norm: Tensor
    """[E]"""
    gate_up: Linear
    """[2 F, E], gate then up"""
    down: Linear
    """[E, F]"""
    q_norm: Tensor | None = None
    """[D], Qwen3's norm over each head before RoPE"""
    k_norm: Tensor | None = None
    attention: AttentionSpec | None = None
    """Set where this layer's attention differs from the model's (sliding windows on some layers)."""


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    embedding: Table
    """[V, E]"""
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    """[E]"""
    head: Linear
    """[V, E]; the very object of ``embedding`` where the model ties the two and the Ops reads rows of it"""
    cos: Tensor
    """fp32 [context, D / 2]"""
    sin: Tensor
    attention: AttentionSpec
    eps: float
