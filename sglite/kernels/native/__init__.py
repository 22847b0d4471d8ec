"""CPU kernels in C++, compiled on first use for the machine they run on."""

from sglite.kernels.native.ops import NativeKV, NativeOps, available

__all__ = ["NativeKV", "NativeOps", "available"]
