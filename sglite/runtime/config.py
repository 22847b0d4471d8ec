"""Every option of the engine, written once: the CLI, the docs and ``Engine(...)`` read this dataclass.

``resolve`` turns a config with "auto" values into one without; nothing downstream ever sees "auto".
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

from sglite.errors import ConfigError

Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
WeightFormat = Literal["auto", "dense", "int8", "int4", "fp8"]
KernelChoice = Literal["auto", "reference", "cpu", "native", "triton"]
GrammarChoice = Literal["llguidance", "outlines"]
PolicyName = Literal["program", "fcfs", "longest-prefix", "dfs-weight", "priority"]


DETERMINISTIC = ("native",)
"""Kernels whose results for a row are the same bits whatever is computed beside it and in whatever pieces."""


def _option(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, slots=True)
class EngineConfig:
    model: str = _option("smollm2-135m", "registry name, local folder, .gguf file or hub id of the model")
    device: Device = _option("auto", "where the model runs")
    dtype: Dtype = _option("auto", "type of activations and KV cache")
    weights: WeightFormat = _option("auto", "how the layers' matrices are held in memory")
    kernels: KernelChoice = _option("auto", "which implementation of the operations")
    threads: int = _option(0, "CPU threads for the model (0: the physical cores this process may use)")
    context_length: int = _option(0, "longest sequence in tokens (0: the model's own limit)")
    page_size: int = _option(16, "tokens in a KV page")
    kv_tokens: int = _option(0, "size of the KV pool in tokens (0: from free memory, at most 65,536 on a CPU)")
    prefix_cache: bool = _option(True, "reuse the KV of equal prefixes")
    policy: PolicyName = _option("program", "order of waiting requests")
    max_running: int = _option(64, "most sequences in one step")
    max_queue: int = _option(4096, "most waiting requests; more are refused")
    max_step_tokens: int = _option(2048, "most tokens computed in one step; longer prompts are chunked")
    deterministic: bool = _option(False, "equal bits in any batch, cache state and chunking, or refuse to start")
    overlap: bool = _option(False, "finish a step's output while the next one runs (always so on a GPU)")
    grammar: GrammarChoice = _option("llguidance", "engine for constrained decoding")
    jump_forward: bool = _option(True, "take tokens that a grammar forces without sampling them")
    seed: int = _option(0, "seed of requests that bring none")

    def resolve(self, *, cuda: bool, native: bool = False) -> EngineConfig:
        """A new config without "auto" and without 0 for "choose". Raises ConfigError on contradictions.

        ``cuda`` says whether a usable GPU is present, ``native`` whether the compiled CPU kernels run here. Limits that
        need the model stay for the engine: ``context_length`` and ``kv_tokens`` may still be 0 here.
        """
        self._check()
        device = self.device if self.device != "auto" else ("cuda" if cuda else "cpu")
        if device == "cuda" and not cuda:
            raise ConfigError("device=cuda, but torch sees no usable GPU; use device=cpu")
        kernels = self._kernels(device, native)
        if kernels in ("cpu", "native") and device != "cpu":
            raise ConfigError(f"kernels={kernels} does not run on device={device}; use kernels=triton")
        if kernels == "triton" and device == "cpu":
            raise ConfigError("kernels=triton needs device=cuda; on a CPU use kernels=native, cpu or reference")
        if self.deterministic and kernels not in DETERMINISTIC:
            raise ConfigError(
                f"deterministic: the results of kernels={kernels} depend on what is computed beside a request; "
                f"use kernels={' or '.join(DETERMINISTIC)}, which computes in bfloat16 on a CPU with AVX-512, or leave "
                "deterministic off"
            )
        return replace(
            self,
            device=device,
            dtype=self.dtype if self.dtype != "auto" else ("float32" if kernels == "cpu" else "bfloat16"),
            kernels=kernels,
            weights=self.weights if self.weights != "auto" else ("int8" if kernels == "native" else "dense"),
            threads=self.threads or _usable_cores(),
            overlap=self.overlap or device == "cuda",
        )

    def _kernels(self, device: str, native: bool) -> KernelChoice:
        """The compiled kernels compute in bfloat16, so whoever asks for another type gets torch's operators."""
        if self.kernels != "auto":
            return self.kernels
        if device != "cpu":
            return "triton"
        return "native" if native and self.dtype in ("auto", "bfloat16") else "cpu"

    def _check(self) -> None:
        for name, hint in get_type_hints(EngineConfig).items():
            _check_value(name, hint, getattr(self, name))
        for name in ("page_size", "max_running", "max_queue", "max_step_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("threads", "context_length", "kv_tokens"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be negative, not {getattr(self, name)}")


def _check_value(name: str, hint: Any, value: Any) -> None:
    if get_origin(hint) is Literal:
        if value not in get_args(hint):
            raise ConfigError(f"{name} must be one of {', '.join(get_args(hint))}, not {value!r}")
    elif type(value) is not hint:
        raise ConfigError(f"{name} must be of type {hint.__name__}, not {value!r}")


def config_from(options: dict[str, Any]) -> EngineConfig:
    """An EngineConfig from keyword arguments; an unknown one is an error that lists the known."""
    known = {f.name for f in fields(EngineConfig)}
    unknown = sorted(set(options) - known)
    if unknown:
        raise ConfigError(f"unknown engine option {', '.join(unknown)}; known are {', '.join(sorted(known))}")
    return EngineConfig(**options)


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0))
