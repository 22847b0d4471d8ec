"""Llama-3.1-8B's shape."""

from __future__ import annotations

from gpu.common import Context, Item
from gpu.end_to_end import end_to_end
from gpu.models import LLAMA_8B


def items(context: Context) -> list[Item]:
    return end_to_end(context, LLAMA_8B, (1, 16, 64, 256), 4096, 64)
