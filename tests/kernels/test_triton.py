"""The Triton kernels where there is no GPU: in the interpreter for what they compute, compiled for what they need.

``make test`` runs a part of the matrix, ``make kernels`` (SGLITE_KERNELS=all) all of it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from compiled import TARGETS, Launch, compile_for, launches_of
from shapes import AttentionShape, batch_of, kv_shape, page_tables

from sglite.errors import ConfigError
from sglite.kernels import get_ops
from sglite.kernels import triton_elementwise as elementwise
from sglite.kernels import triton_lora as lora
from sglite.kernels.cascade import SharedPrefix, pack_shared, shared_views
from sglite.kernels.ops import Adapters, Ops
from sglite.kernels.triton_card import A100, H200, MI300
from sglite.kernels.triton_ops import TritonOps
from sglite.runtime.gpu.buckets import Bucket
from sglite.runtime.gpu.staging import flatten, layout_of, padded, unflatten

HERE = Path(__file__).parent
CPU = torch.device("cpu")
EVERYTHING = os.environ.get("SGLITE_KERNELS") == "all"

# ------------------------------------------------------------------------------------------------------- interpreter

FILES = (
    "test_ops.py",
    "test_adapters.py",
    "interpreted_kernels.py",
    "interpreted_sampling.py",
    "../runtime/test_models.py",
)
WHOLE = (
    "(test_ops and triton and (not attention or triton-float32 or triton-float16))"  # attention knows no weights
    " or (test_adapters and triton) or (interpreted_kernels and float) or interpreted_sampling"
    " or (test_models and triton)"
)
QUICK = (
    "(test_ops and triton and ((triton-float and not attention and not 130)"
    " or (int4-float32 and not attention and not 130)"
    " or ((int8 or fp8) and float32 and linear and plain and not 130)"
    " or (triton-float32 and attention and (mixed or 80 or softcap or (window and 5)))"
    " or (triton-float16 and attention and decode)))"
    " or (interpreted_kernels and float32 and not 256 and not softcap)"
    " or interpreted_sampling or (test_adapters and triton-float32)"
    " or (test_models and triton and qwen3 and not biases)"
)


@pytest.mark.timeout(1800)
def test_all_kernels_in_the_interpreter() -> None:
    """In a process of its own, whose Triton interprets."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    chosen = WHOLE if EVERYTHING else QUICK
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "-k", chosen]
    command += [str(HERE / file) for file in FILES]
    run = subprocess.run(command, cwd=HERE.parent.parent, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert " passed" in run.stdout


# ------------------------------------------------------------------------------------------------------ machine code

HEADS = {
    "8B": (32, 8, 128),
    "0.6B": (16, 8, 128),
    "96": (8, 2, 96),
    "256": (8, 4, 256),
    "80": (4, 4, 80),
    "64": (9, 3, 64),
}
DTYPES = torch.bfloat16, torch.float16, torch.float32
SMALL = ((100, 1), (5, 1))
MIXED = ((100, 1), (0, 600), (700, 90))


def attention(ops: Ops, shape: AttentionShape, *, cascade: bool = False) -> None:
    pool = kv_shape(shape, ops.dtype, CPU)
    kv = ops.allocate_kv(pool)
    batch = batch_of(page_tables(shape, pool), [(a, a + b) for a, b in shape.rows], shape.page_size, CPU)
    if cascade:
        assert isinstance(ops, TritonOps)
        tokens = ops.prefix_tokens(shape.spec)
        packed = torch.from_numpy(pack_shared([], batch.rows, tokens))
        batch = replace(batch, shared=shared_views(packed, batch.rows, tokens))
    q, k = (torch.empty(len(batch.ids), n, shape.head_dim, dtype=ops.dtype) for n in (shape.heads, shape.kv_heads))
    ops.write_kv(kv, 0, k, k, batch)
    ops.attend(q, kv, 0, batch, shape.spec, ops.plan(batch, shape.spec))


def attentions(ops: Ops, heads: str) -> None:
    h, g, d = HEADS[heads]
    attention(ops, AttentionShape(MIXED, h, g, d, 16))
    if EVERYTHING or heads == "8B":
        attention(ops, AttentionShape(SMALL * 20, h, g, d, 16), cascade=True)
        attention(ops, AttentionShape(MIXED, h, g, d, 1, window=50, softcap=30.0))
        attention(ops, AttentionShape(SMALL, h, g, d, 1, softcap=30.0))


def pointwise(ops: Ops) -> None:
    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=ops.dtype)

    for width in (4096, 1024, 576):
        x = zeros(64, width)
        ops.rms_norm(x, x[0], 1e-5)
        ops.add_rms_norm(x, x, x[0], 1e-5)
        ops.embed(torch.zeros(64, dtype=torch.int64), x)
    ops.silu_mul(zeros(64, 2 * 14336))
    qkv = zeros(64, 48, 128)
    ops.rms_norm(qkv[:, :32], qkv[0, 0], 1e-5)
    ops.rope(qkv[:, :32], qkv[:, 32:40], torch.zeros(64, 64), torch.zeros(64, 64))
    places = torch.zeros(64, dtype=torch.int64)
    tables, pool = (torch.zeros(64, 64), torch.zeros(64, 64)), zeros(2, 64, 8, 128)
    for norms in (None, (qkv[0, 0], qkv[0, 0])):
        elementwise.qkv_to_pages(qkv.flatten(1), 32, places, places, tables, norms, 1e-5, *pool)


def adapters(ops: Ops) -> None:
    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=ops.dtype)

    for rank in (8, 16, 64):
        pair = Adapters(zeros(2, rank, 4096), zeros(2, 4096, rank))
        lora.add(zeros(40, 4096), zeros(40, 4096), pair, lora.plan([0, 1, 40], [0, 1], CPU))


def products(weights: Literal["int8", "int4", "fp8"]) -> Callable[[Ops], None]:
    def run(ops: Ops) -> None:
        quantized = TritonOps(CPU, ops.dtype, weights, ops.card)  # type: ignore[attr-defined]
        for n, k in ((512, 1024), (20_000, 576)):
            packed = quantized.pack(torch.zeros(n, k), torch.zeros(n))
            for rows in (1, 64, 300):
                quantized.linear(torch.zeros(rows, k, dtype=ops.dtype), packed)

    return run


WORK: dict[str, Callable[[Any], None]] = {
    "pointwise": pointwise,
    "lora": adapters,
    "int8": products("int8"),
    "int4": products("int4"),
    "fp8": products("fp8"),
} | {f"attention {name}": lambda ops, name=name: attentions(ops, name) for name in HEADS}

CODE = [(work, target, dtype) for work in WORK for target in TARGETS for dtype in DTYPES]
if not EVERYTHING:
    common = "pointwise", "lora", "int8", "int4", "fp8", "attention 8B"
    CODE = [(work, "sm_90", torch.bfloat16) for work in common]
    CODE += [("attention 0.6B", target, torch.bfloat16) for target in TARGETS if target != "sm_90"]


SPILLED = 8
"""Bytes a thread that are tolerated: sm_80 is two registers short for a few forms of the whole matrix."""


def needs(launch: Launch) -> int:
    """Registers a thread may use so that all of a program's warps fit a processor's 65,536."""
    warps = dict(launch.options)["num_warps"]
    return min(255, 65_536 // (32 * warps))


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("work", "target", "dtype"), CODE, ids=str)
def test_machine_code_fits_the_card(work: str, target: str, dtype: torch.dtype) -> None:
    card = TARGETS[target][1]
    if work == "fp8" and not card.has_fp8:
        pytest.skip("refused at load: see below")
    launches = launches_of(lambda: WORK[work](TritonOps(CPU, dtype, card=card)))
    assert launches
    for launch in launches:
        code = compile_for(target, launch)
        said = f"{launch.name} {dict(launch.constants)} {launch.options}: {code.registers} registers"
        if dtype != torch.float32:  # a type for checking, not for speed
            assert code.spilled <= SPILLED, f"{said}, {code.spilled} bytes spilled"
        assert code.shared <= card.shared, f"{said}, {code.shared} bytes of shared memory"
        if card.maker == "nvidia":
            assert code.registers <= needs(launch), said


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_decoding_attention_keeps_two_programs_a_processor(target: str) -> None:
    """Bytes in flight hide memory's latency: keys and values come by asynchronous copies, for two programs at once."""
    card = TARGETS[target][1]
    ops = TritonOps(CPU, torch.bfloat16, card=card)
    launches = launches_of(lambda: attention(ops, AttentionShape(SMALL, 32, 8, 128, 16)))
    [launch] = [launch for launch in launches if launch.name == "attend_kernel"]
    code = compile_for(target, launch)
    assert 2 * code.shared <= card.shared
    assert 2 * 32 * dict(launch.options)["num_warps"] * code.registers <= 65_536
    assert code.text.count("cp.async") >= 8


def test_prompt_attention_uses_the_widest_instruction() -> None:
    ops = TritonOps(CPU, torch.bfloat16, card=H200)
    launches = launches_of(lambda: attention(ops, AttentionShape(((0, 600),), 32, 8, 128, 16)))
    [launch] = [launch for launch in launches if launch.name == "attend_kernel"]
    code = compile_for("sm_90", launch).text
    assert "wgmma.mma_async" in code
    assert "mma.sync" not in code


@pytest.mark.parametrize("shares", [False, True])
def test_decode_steps_of_any_size_need_the_same_machine_code(shares: bool) -> None:
    """A batch is views of one array: where its parts lie in it depends on its size."""
    ops = TritonOps(CPU, torch.bfloat16, card=H200)

    def launches(rows: int) -> set[Launch]:
        shape = AttentionShape(((100, 1),) * rows, 32, 8, 128, 16)
        pool = kv_shape(shape, ops.dtype, CPU)
        plain = batch_of(page_tables(shape, pool), [(100, 101)] * rows, 16, CPU)
        groups = [SharedPrefix(tuple(range(rows)), 96)] if rows > 1 else []
        wide = padded(plain, Bucket(rows, 7, shares), groups, ops.prefix_tokens(shape.spec))
        batch = unflatten(torch.from_numpy(flatten(wide)), layout_of(wide), wide)
        q, k = (torch.empty(rows, n, 128, dtype=ops.dtype) for n in (32, 8))
        kv = ops.allocate_kv(pool)

        def step() -> None:
            ops.write_kv(kv, 0, k, k, batch)
            ops.embed(batch.logit_index, ops.embed(batch.ids, q.flatten(1)))
            ops.attend(q, kv, 0, batch, shape.spec, ops.plan(batch, shape.spec))

        return set(launches_of(step))

    assert launches(3) == launches(5) == launches(6) == launches(8) == launches(2)
    assert shares or launches(3) == launches(1)


# ------------------------------------------------------------------------------------------------------------ choosing


@pytest.mark.parametrize("card", [A100, MI300], ids=["A100", "MI300"])
def test_fp8_is_refused_where_the_card_has_none(card) -> None:
    with pytest.raises(ConfigError, match="capability"):
        TritonOps(CPU, torch.bfloat16, "fp8", card)


def test_a_type_without_kernels_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="bfloat16"):
        TritonOps(CPU, torch.float64, card=H200)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_device_without_kernels_is_refused(device: str) -> None:
    with pytest.raises(ConfigError, match="device=cuda"):
        get_ops("triton", torch.device(device), torch.bfloat16, "dense")


def test_a_missing_triton_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sglite.kernels.triton_ops", None)
    with pytest.raises(ConfigError, match="kernels=reference"):
        get_ops("triton", CPU, torch.bfloat16, "dense")


def test_heads_too_large_are_said_once_and_go_through_plain_torch(caplog: pytest.LogCaptureFixture) -> None:
    ops = TritonOps(CPU, torch.float32, card=H200)
    shape = AttentionShape(((0, 2),), head_dim=2048)
    batch = batch_of([[1]], [(0, 2)], 4, CPU)
    for _ in range(2):
        assert ops.plan(batch, shape.spec) is None
    assert [record.message.count("2048") for record in caplog.records] == [1]
    assert not ops.captures(shape.spec)
