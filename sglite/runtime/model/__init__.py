"""Models: what the runner needs of one, and the seam that decoders, the scripted model and fault injection share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from sglite.kernels.ops import ForwardBatch, KVPool, KVShape


class Model(Protocol):
    """R: wanted positions of the batch; E: whatever width the model likes; V: ``vocab_size``."""

    vocab_size: int
    """Width of the logits."""

    def kv_shape(self, pages: int, page_size: int) -> KVShape:
        """What ``allocate_kv`` would make: to size a pool before it exists."""
        ...

    def allocate_kv(self, pages: int, page_size: int) -> KVPool: ...

    def forward(self, batch: ForwardBatch, kv: KVPool) -> Tensor:
        """Compute all tokens of the batch, keep their KV, and return hidden states [R, E] of the wanted positions."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 [R, V], the caller's to change."""
        ...
