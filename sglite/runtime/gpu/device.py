"""What the runner asks of a device: copies that nobody waits for, captured work, and its stream of commands.

:class:`Cuda` is thin on purpose: everything with a decision in it is elsewhere and runs on :class:`Host` too, where all
work is done on the spot.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[Any]


class Device(Protocol):
    device: torch.device

    def stream(self) -> AbstractContextManager[Any]:
        """All work on the device is queued within it, in order; for threads that have other work there too."""
        ...

    def adopt(self) -> None:
        """From here on, all of the calling thread's work belongs to the stream."""
        ...

    def upload(self, values: Array) -> Tensor:
        """A new tensor on the device; the copy is queued, and ``values`` may change at once."""
        ...

    def write(self, target: Tensor, values: Array) -> None:
        """The same, into a tensor that captured work reads."""
        ...

    def download(self, tensor: Tensor) -> Callable[[], Array]:
        """Queue a copy to the host; the result waits for it."""
        ...

    def capture(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """``work`` recorded, to be repeated on whatever its input tensors hold then; its result tensor is reused.

        ``work`` has run at least once before.
        """
        ...

    def trim(self) -> None:
        """Give cached memory back before trying something smaller."""
        ...


class Host:
    """A device for tests: the processor itself."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def stream(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def adopt(self) -> None:
        pass

    def upload(self, values: Array) -> Tensor:
        return torch.from_numpy(values.copy())

    def write(self, target: Tensor, values: Array) -> None:
        target.copy_(torch.from_numpy(values))

    def download(self, tensor: Tensor) -> Callable[[], Array]:
        array = tensor.clone().numpy()
        return lambda: array

    def capture(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        return work

    def trim(self) -> None:
        pass


class Cuda:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.default_stream(device))  # the weights were loaded there
        self._pool: Any = torch.cuda.graph_pool_handle()

    def stream(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._stream)

    def adopt(self) -> None:
        torch.cuda.set_stream(self._stream)

    def upload(self, values: Array) -> Tensor:
        # pinned blocks come from torch's cache, which hands one out again only after the copy from it has ended
        return torch.from_numpy(values).pin_memory().to(self.device, non_blocking=True)

    def write(self, target: Tensor, values: Array) -> None:
        target.copy_(torch.from_numpy(values).pin_memory(), non_blocking=True)

    def download(self, tensor: Tensor) -> Callable[[], Array]:
        pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        pinned.copy_(tensor, non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record(self._stream)

        def result() -> Array:
            copied.synchronize()
            array: Array = pinned.numpy()
            return array

        return result

    def capture(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            out = work()

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay

    def trim(self) -> None:
        torch.cuda.empty_cache()


def ints(*parts: npt.ArrayLike) -> npt.NDArray[np.int32]:
    """The bytes of several arrays, one after the other, as int32."""
    return np.concatenate([np.ascontiguousarray(part).view(np.int32).reshape(-1) for part in parts])


_NO_MEMORY = "out of memory", "alloc_failed", "cublas_status_not_initialized"
"""How the driver, the libraries and the loader of kernels say it; cuBLAS also says that it could not be set up."""


def out_of_memory(error: BaseException) -> bool:
    """Whether the device's memory was not enough, for torch's tensors or for what others keep there: graphs, handles
    and workspaces of libraries, the kernels themselves. A graph's capture hides it behind an error of its own."""
    seen: BaseException | None = error
    while seen is not None:
        said = str(seen).lower()
        if isinstance(seen, RuntimeError) and any(words in said for words in _NO_MEMORY):
            return True
        seen = seen.__cause__ or seen.__context__
    return False
