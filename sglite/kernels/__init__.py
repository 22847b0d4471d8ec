"""The operations a model asks of the hardware, and who implements them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from sglite.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from sglite.kernels.ops import Ops


def get_ops(
    kernels: Literal["reference", "cpu", "triton"],
    device: torch.device,
    dtype: torch.dtype,
    weights: Literal["dense", "int8", "int4"],
) -> Ops:
    """The Ops of that name. Raises ConfigError where it does not exist or cannot hold weights in that format."""
    if kernels == "reference":
        if weights != "dense":
            raise ConfigError(f"kernels=reference holds weights only as weights=dense, not {weights}")
        from sglite.kernels.reference import ReferenceOps

        return ReferenceOps(device, dtype)
    if kernels == "cpu":
        from sglite.kernels.cpu import CpuOps

        return CpuOps(device, dtype, weights)
    raise ConfigError(f"kernels={kernels} is not available in this build; use kernels=reference")
