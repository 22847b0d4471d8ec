"""Sampling on the device: the plain form against the sampler's rules, and the kernels as machine code."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
import torch
from compiled import TARGETS, Launch, compile_for, launches_of

from sglite.kernels import sampling, triton_sampling
from sglite.kernels.sampling import Edits, SampleRows, exponential, kept_tokens
from sglite.protocol import SamplingParams
from sglite.runtime.gpu.sampling import asked
from sglite.runtime.sampler import Choice, SampleRow, sample

# ------------------------------------------------------------------------------------------------------ machine code

LLAMA3, QWEN3 = 128_256, 151_936
"""Widths of logits."""


def everything() -> None:
    params = SamplingParams(top_p=0.9)
    rows, words = rows_of(64, LLAMA3, params), torch.zeros((64, LLAMA3 // 32), dtype=torch.int32)
    edits = Edits(torch.zeros((2, 3), dtype=torch.int32), torch.zeros((2, 3)))
    triton_sampling.choose(torch.empty(64, LLAMA3), rows, words, edits, logprobs=True)


def one_row() -> None:
    rows = rows_of(1, QWEN3, SamplingParams())
    triton_sampling.choose(torch.empty(1, QWEN3), rows, None, None, filtered=False)


def one_row_filtered() -> None:
    triton_sampling.choose(torch.empty(1, QWEN3), rows_of(1, QWEN3, SamplingParams(top_k=20)), None, None)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("call", [everything, one_row, one_row_filtered])
def test_machine_code(call: Callable[[], None], target: str) -> None:
    launches = launches_of(call)
    assert len(launches) >= 2
    for launch in launches:
        needs = compile_for(target, launch)
        assert needs.spilled == 0, launch.name
        threads = 32 * dict(launch.options).get("num_warps", 4)
        assert needs.shared <= 16_384 and needs.registers * threads <= 49_152, launch.name


def test_steps_of_any_size_need_the_same_machine_code() -> None:
    """A step's parameters lie one after the other in one array, wherever its number of rows puts them."""

    def launches(n: int) -> set[Launch]:
        params = SamplingParams(top_p=0.9, logit_bias=((3, 1.0),))
        asks = asked([SampleRow(params, 0, i, 0) for i in range(n)], 320, range(n), np.zeros((n, 10), dtype=np.int32))
        flat = torch.from_numpy(asks.flat)
        staged = asks.staged(flat)
        parts = torch.empty(n, 320), staged.rows, staged.mask, staged.edits
        return set(launches_of(lambda: triton_sampling.choose(*parts, logprobs=True)))

    assert launches(5) == launches(7) == launches(6) == launches(16) == launches(1)


# --------------------------------------------------------------------------------------------- the plain form's rules


def rows_of(n: int, vocabulary: int, params: SamplingParams) -> SampleRows:
    top_k = vocabulary if params.top_k == -1 else min(params.top_k, vocabulary)
    return SampleRows(
        torch.arange(n) * 0x1E3779B97F4A7C15 % 2**62,
        torch.full((n,), params.temperature),
        torch.full((n,), top_k, dtype=torch.int32),
        torch.full((n,), params.top_p),
        torch.full((n,), params.min_p),
    )


def near(share: float, p: float, n: int) -> bool:
    return abs(share - p) < 5 * math.sqrt(p * (1 - p) / n) + 1 / n


def test_the_race_is_exponential_and_its_tokens_are_independent() -> None:
    keys, ids = torch.arange(-300, 300) * 2**40 + 17, torch.arange(400)
    race = torch.stack([exponential(key, ids) for key in keys])
    assert bool((race > 0).all()) and bool(race.isfinite().all())
    for quantile in (1e-3, 0.01, 0.1, 0.5, 0.9, 0.99, 0.999):
        assert near(float((race < -math.log1p(-quantile)).float().mean()), quantile, race.numel())
    for other in (race.roll(1, 0), race.roll(1, 1)):  # neighbouring keys, neighbouring tokens
        correlation = float(torch.corrcoef(torch.stack([race.flatten(), other.flatten()]))[0, 1])
        assert abs(correlation) < 5 / math.sqrt(race.numel())


PARAMS = [
    SamplingParams(),
    SamplingParams(temperature=0.5),
    SamplingParams(top_k=3),
    SamplingParams(top_p=0.8),
    SamplingParams(min_p=0.2),
    SamplingParams(temperature=2.0, top_k=5, top_p=0.9, min_p=0.05),
]


@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_the_distribution_is_the_samplers(params: SamplingParams) -> None:
    logits = torch.randn(12, generator=torch.Generator().manual_seed(8)) * 2
    n = 3000
    rows = rows_of(n, 12, params)
    drawn = Counter(sampling.choose(logits.repeat(n, 1), rows, None, None).token.tolist())
    values, ids = kept_tokens(logits, rows, 0)
    exact = dict(zip(ids.tolist(), torch.softmax(values / params.temperature, 0).tolist(), strict=True))
    assert drawn.keys() <= exact.keys()
    assert all(near(drawn[token] / n, p, n) for token, p in exact.items())
    choices = sample(logits.repeat(n, 1), [SampleRow(params, 0, 0, position) for position in range(n)])
    theirs = Counter(choice.id for choice in choices if isinstance(choice, Choice))
    assert theirs.keys() <= exact.keys()
    assert all(near(theirs[token] / n, p, n) for token, p in exact.items())
