"""A GPU's runner around a model: the pool's size measured, the fast kernels chosen where they run."""

from __future__ import annotations

import logging

import torch

from sglite.kernels import sampling
from sglite.runtime.config import EngineConfig
from sglite.runtime.gpu.device import Cuda, Device
from sglite.runtime.gpu.memory import Largest, measure, pool_tokens, room_for
from sglite.runtime.gpu.runner import GpuRunner
from sglite.runtime.gpu.sampling import Choose
from sglite.runtime.model import Model
from sglite.runtime.model.decoder import Decoder

log = logging.getLogger("sglite.engine")


class Gpu:
    """One card for one engine: first it sizes the pool, then it makes the runner."""

    copies = False

    def __init__(self, device: torch.device) -> None:
        self._device: Device = Cuda(device)

    def pool(self, config: EngineConfig, model: Model) -> int:
        """Tokens that the KV pool can hold beside the largest step. Raises ConfigError when that is too few."""
        largest = Largest(config.max_step_tokens, config.context_length, config.max_running, config.page_size)
        with room_for("its largest step", "lower max_step_tokens or max_running"):
            memory = measure(model, self._device, choose_of(config), largest)
        tokens = pool_tokens(memory, model.kv_shape(1, config.page_size), least=config.max_step_tokens)
        log.info("KV pool of %d tokens; the largest step takes %.2f GiB", tokens, memory.working / 2**30)
        return tokens

    def runner(self, config: EngineConfig, model: Model, pages: int) -> GpuRunner:
        captures = isinstance(model, Decoder) and model.captures
        with room_for(f"a KV pool of {config.kv_tokens} tokens", "lower kv_tokens"):
            return GpuRunner(
                model,
                device=self._device,
                choose=choose_of(config),
                captures=captures,
                tile_tokens=model.prefix_tokens if isinstance(model, Decoder) and captures else 0,
                pages=pages,
                page_size=config.page_size,
                slots=config.max_running,
                context_length=config.context_length,
            )


def choose_of(config: EngineConfig) -> Choose:
    """Sampling by the kernels, or in plain torch where the model's operations are plain too."""
    if config.kernels != "triton":
        return sampling.choose
    from sglite.kernels import triton_sampling

    return triton_sampling.choose
