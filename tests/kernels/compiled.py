"""Launches compiled for cards that are not here: what the host code would launch is recorded and compiled."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction, KernelParam

from sglite.kernels.triton_card import A100, B200, H200, L4, MI300, Card

TARGETS: dict[str, tuple[GPUTarget, Card]] = {
    "sm_80": (GPUTarget("cuda", 80, 32), A100),
    "sm_89": (GPUTarget("cuda", 89, 32), L4),
    "sm_90": (GPUTarget("cuda", 90, 32), H200),
    "sm_100": (GPUTarget("cuda", 100, 32), B200),
    "gfx942": (GPUTarget("hip", "gfx942", 64), MI300),
}

TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "i1",
    torch.float8_e4m3fn: "fp8e4nv",
}


@dataclass(frozen=True)
class Launch:
    """One specialisation of a kernel: types of the arguments, constants, and which arguments are multiples of 16."""

    kernel: JITFunction
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[tuple[int, ...], Any], ...]
    aligned: tuple[int, ...]
    options: tuple[tuple[str, int], ...]

    @property
    def name(self) -> str:
        return self.kernel.__name__


@dataclass(frozen=True)
class Compiled:
    """What the machine code needs: bytes of shared memory a program, registers a thread, bytes spilled a thread."""

    shared: int
    registers: int
    spilled: int
    text: str


@contextmanager
def recording() -> Iterator[list[Launch]]:
    """Launches inside are listed (each specialisation once) and not run; their results are uninitialised memory."""
    launches: dict[Launch, None] = {}

    def record(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        launches[_launch(kernel, args, kwargs)] = None

    original, JITFunction.run = JITFunction.run, record  # type: ignore[method-assign]
    found: list[Launch] = []
    try:
        yield found
    finally:
        JITFunction.run = original  # type: ignore[method-assign]
        found.extend(launches)


def launches_of(work: Callable[[], Any]) -> list[Launch]:
    with recording() as found:
        work()
    return found


def _launch(kernel: JITFunction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Launch:
    options = {name: kwargs.pop(name) for name in ("num_warps", "num_stages") if name in kwargs}
    values = dict(zip([p.name for p in kernel.params], args, strict=False)) | kwargs
    signature, constants, aligned = {}, {}, []
    for index, parameter in enumerate(kernel.params):
        value = values.pop(parameter.name)
        kind = "constexpr" if parameter.is_constexpr or value is None else _type(value)
        if kind == "i32" and value == 1 and not parameter.do_not_specialize:
            kind = "constexpr"
        elif kind != "constexpr" and _is_aligned(value, parameter):
            aligned.append(index)
        if kind == "constexpr":
            constants[(index,)] = value
        signature[parameter.name] = kind
    assert not values, f"{kernel.__name__} has no {', '.join(values)}"
    return Launch(
        kernel, tuple(signature.items()), tuple(constants.items()), tuple(aligned), tuple(sorted(options.items()))
    )


def _is_aligned(value: Any, parameter: KernelParam) -> bool:
    if parameter.do_not_specialize or parameter.do_not_specialize_on_alignment:
        return False
    if isinstance(value, torch.Tensor):
        return value.data_ptr() % 16 == 0
    return isinstance(value, int) and value % 16 == 0


def _type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return "*" + TYPES[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


@cache
def compile_for(target: str, launch: Launch) -> Compiled:
    """Machine code for that card. Raises what the compiler raises."""
    attrs = {(index,): [["tt.divisibility", 16]] for index in launch.aligned}
    source = ASTSource(launch.kernel, dict(launch.signature), dict(launch.constants), attrs)
    made = triton.compile(source, target=TARGETS[target][0], options=dict(launch.options))
    if "amdgcn" in made.asm:
        return _amd(made.metadata.shared, made.asm["amdgcn"])
    return _nvidia(made.metadata.shared, made.asm["cubin"], made.asm["ptx"])


def _amd(shared: int, text: str) -> Compiled:
    def number(name: str) -> int:
        return int(re.findall(rf"\.{name}:\s+(\d+)", text)[-1])

    # scalar registers spill into lanes of vector registers, not into memory
    return Compiled(shared, number("vgpr_count"), 4 * number("vgpr_spill_count"), text)


def _nvidia(shared: int, cubin: bytes, text: str) -> Compiled:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        said = subprocess.run([tool, "--dump-resource-usage", file], capture_output=True, text=True, check=True).stdout
    registers, stack, local = (int(re.findall(rf"{name}:(\d+)", said)[0]) for name in ("REG", "STACK", "LOCAL"))
    return Compiled(shared, registers, stack + local, text)
