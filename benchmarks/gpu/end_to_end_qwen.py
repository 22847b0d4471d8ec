"""Qwen3-0.6B's shape."""

from __future__ import annotations

from gpu.common import Context, Item
from gpu.end_to_end import end_to_end
from gpu.models import QWEN3_06B


def items(context: Context) -> list[Item]:
    return end_to_end(context, QWEN3_06B, (1, 64), 2048, 32)
