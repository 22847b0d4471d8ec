"""Memory on large pages: streaming through weights and keys then costs few page walks (about a tenth of a step)."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

_MADV_HUGEPAGE = 14
_HUGE_PAGE = 2 << 20
_REGION = 16 * _HUGE_PAGE
_LINE = 64


def prefer_huge_pages(tensor: Tensor) -> None:
    """To be called before the memory is first touched. Where the system has no large pages, nothing happens."""
    start = _ceil(tensor.data_ptr(), _HUGE_PAGE)
    length = (tensor.data_ptr() + tensor.nbytes - start) // _HUGE_PAGE * _HUGE_PAGE
    if length > 0:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), _MADV_HUGEPAGE)


class Arena:
    """Copies of tensors side by side in a few regions; a region lives as long as any tensor in it."""

    def __init__(self) -> None:
        self._region = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def keep(self, tensor: Tensor) -> Tensor:
        """The same values at an address that is a multiple of 64."""
        size = tensor.nbytes
        if self._used + size > self._region.nbytes:
            self._region = torch.empty(max(_REGION, _ceil(size, _HUGE_PAGE)) + _HUGE_PAGE, dtype=torch.uint8)
            prefer_huge_pages(self._region)
            self._used = -self._region.data_ptr() % _HUGE_PAGE
        place = self._region[self._used : self._used + size].view(tensor.dtype).view(tensor.shape)
        self._used = _ceil(self._used + size, _LINE)
        return place.copy_(tensor)


def _ceil(n: int, unit: int) -> int:
    return -(-n // unit) * unit
