"""What the kernels need to know of the card they run on, and the tiles that follow from it.

Tiles come from this small table and not from timing on the user's machine: every launch is known before the first
request, can be compiled ahead of time and captured in a CUDA graph, and two runs give equal bits.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

import torch

from sglite.errors import ConfigError

HEAD_DIM_LIMIT = 256
_KIB = 1024


@dataclass(frozen=True, slots=True)
class Card:
    """``generation``: compute capability times ten (90: Hopper) or 0 for AMD. ``shared``: bytes a program may use."""

    maker: Literal["nvidia", "amd"]
    generation: int
    processors: int
    shared: int

    @property
    def has_fp8(self) -> bool:
        return self.generation >= 89

    @property
    def precision(self) -> str:
        """How float32 is multiplied: as three products of tf32, whose error is float32's, or in full."""
        return "tf32x3" if self.maker == "nvidia" else "ieee"


A100 = Card("nvidia", 80, 108, 163 * _KIB)
L4 = Card("nvidia", 89, 58, 99 * _KIB)
H200 = Card("nvidia", 90, 132, 227 * _KIB)
B200 = Card("nvidia", 100, 148, 227 * _KIB)
MI300 = Card("amd", 0, 304, 64 * _KIB)
INTERPRETER = Card("nvidia", 90, 4, 227 * _KIB)
"""No card: Triton's interpreter, which runs the kernels on a CPU in the tests."""


def card_of(device: torch.device) -> Card:
    """The card behind a torch device. Raises ConfigError naming what is supported."""
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1":
        return INTERPRETER
    if device.type != "cuda":
        raise ConfigError(f"kernels=triton needs device=cuda, not {device.type}; use kernels=reference")
    found = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        return Card("amd", 0, found.multi_processor_count, 64 * _KIB)
    generation = 10 * found.major + found.minor
    if generation < 80:
        raise ConfigError(
            f"kernels=triton needs compute capability 8.0 or newer, not {found.major}.{found.minor} ({found.name}); "
            "use kernels=reference"
        )
    return Card("nvidia", generation, found.multi_processor_count, found.shared_memory_per_block_optin)  # type: ignore[attr-defined]


# --------------------------------------------------------------------------------------------------------- attention


@dataclass(frozen=True, slots=True)
class Tile:
    """Launch constants of ``attend_kernel``: m query rows by n keys, of head size d rounded up to a power of two."""

    m: int
    n: int
    d: int
    warps: int
    stages: int
    precision: str


def padded(size: int) -> int:
    return max(16, 1 << (size - 1).bit_length())


def decode_tile(card: Card, ratio: int, head_dim: int, itemsize: int) -> Tile:
    """A few queries against long keys: memory-bound, so many bytes in flight from two programs a processor."""
    return _fitted(card, max(16, padded(ratio)), 64, padded(head_dim), itemsize, warps=4, programs=2)


def prompt_tile(card: Card, ratio: int, head_dim: int, itemsize: int) -> Tile:
    """Many queries: compute-bound, so the largest tile whose accumulator stays in registers."""
    d = padded(head_dim)
    large = d <= 128 and itemsize <= 2 and card.maker == "nvidia"
    m = max(128 if large else 16 if d * itemsize > 512 else 64, padded(ratio))
    wide = itemsize > 2 or (card.generation < 90 and d >= 128)  # before Hopper scores and results are both in registers
    return _fitted(card, m, 32 if wide else 64, d, itemsize, warps=8 if m * d > 64 * 64 else 4, programs=1)


def _fitted(card: Card, m: int, n: int, d: int, itemsize: int, *, warps: int, programs: int) -> Tile:
    """Keys and values come one or two steps of n ahead, as the shared memory of ``programs`` programs allows.

    Triton divides its stages among a chain of loads, and the pages' numbers are the first link: one step ahead takes
    three stages, two take five. The step being multiplied holds memory too where the products run asynchronously;
    where they do not, the scores pass through it from one product to the next.
    """
    nvidia, asynchronous = card.maker == "nvidia", m >= 64 and card.generation >= 90
    free = card.shared // programs - m * d * itemsize - (m * n * itemsize if nvidia and not asynchronous else 0)
    held = 1 if asynchronous else 0
    if itemsize > 2 and nvidia:  # each of its three products reads a step's numbers from there again
        held = 2
    while n > 16 and free < (1 + held) * 2 * n * d * itemsize:
        n //= 2
    ahead = min(2, max(1, free // (2 * n * d * itemsize) - held))
    return Tile(m, n, d, warps, 2 * ahead + 1 if nvidia else 2, card.precision)
