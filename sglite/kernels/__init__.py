"""The operations a model asks of the hardware, and who implements them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from sglite.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from sglite.kernels.ops import Ops


def get_ops(
    kernels: Literal["reference", "cpu", "native", "triton"],
    device: torch.device,
    dtype: torch.dtype,
    weights: Literal["dense", "int8", "int4", "fp8"],
    threads: int = 1,
) -> Ops:
    """The Ops of that name. Raises ConfigError where it does not exist or cannot hold weights in that format.

    ``threads`` is for the compiled kernels, which bring their own; the others use torch's.
    """
    if kernels == "reference":
        if weights != "dense":
            raise ConfigError(f"kernels=reference holds weights only as weights=dense, not {weights}")
        from sglite.kernels.reference import ReferenceOps

        return ReferenceOps(device, dtype)
    if kernels == "triton":
        return _triton_ops(device, dtype, weights)
    if weights == "fp8":
        raise ConfigError(f"weights=fp8 needs kernels=triton, not kernels={kernels}")
    if kernels == "cpu":
        from sglite.kernels.cpu import CpuOps

        return CpuOps(device, dtype, weights)
    if kernels == "native":
        from sglite.kernels.native import NativeOps

        return NativeOps(device, dtype, weights, threads)
    raise ConfigError(f"unknown kernels {kernels!r}; known are reference, cpu, native and triton")


def _triton_ops(device: torch.device, dtype: torch.dtype, weights: Literal["dense", "int8", "int4", "fp8"]) -> Ops:
    try:
        from sglite.kernels.triton_ops import TritonOps
    except ImportError as missing:
        raise ConfigError(f"kernels=triton needs the triton package ({missing}); use kernels=reference") from missing
    return TritonOps(device, dtype, weights)
