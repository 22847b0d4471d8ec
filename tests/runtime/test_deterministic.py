"""``deterministic=True``: the default weight format on a CPU gives equal bits, tokens and logprobs, in any batch."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from sglite.kernels import get_ops
from sglite.kernels.native import available
from sglite.protocol import Chunk, GenerateRequest, LogprobParams, SamplingParams, Text
from sglite.runtime.assembly import assemble
from sglite.runtime.config import config_from
from sglite.runtime.engine import Engine
from sglite.runtime.hub import ModelSource
from sglite.runtime.loading import load_config, load_tokenizer, open_weights
from sglite.runtime.model.decoder import Decoder
from sglite.runtime.tokenizer import Tokenizer

pytestmark = pytest.mark.skipif(available() is not None, reason=str(available()))

SYSTEM = "You are a careful assistant. You answer in one short sentence, and you never make anything up. "
PROMPTS = [
    SYSTEM + question
    for question in ("Where is Paris?", "Name a colour.", "Why is the sky blue?", "What do bees make all day long?")
]
Answer = tuple[tuple[int, ...], tuple[float | None, ...], tuple[float | None, ...]]
"""Ids, their logprobs, and the prompt's: compared as they are, to the last bit."""


@pytest.fixture(scope="module")
def native(smollm2: ModelSource) -> tuple[Decoder, Tokenizer]:
    config = load_config(smollm2)
    ops = get_ops("native", torch.device("cpu"), torch.bfloat16, "int8", 2)
    return Decoder(config, open_weights(smollm2), ops), load_tokenizer(smollm2, config)


def engine(native: tuple[Decoder, Tokenizer], **options: Any) -> Engine:
    defaults = {"device": "cpu", "context_length": 512, "kv_tokens": 8192, "deterministic": True}
    config = config_from({**defaults, **options}).resolve(cuda=False, native=True)
    assert (config.kernels, config.weights) == ("native", "int8")
    return Engine.of(assemble(config, *native, torch.device("cpu")))


async def answer(engine: Engine, i: int) -> Answer:
    sampling = SamplingParams(temperature=0.8 if i % 2 else 0.0, seed=i, max_new_tokens=16, ignore_eos=True)
    scored = LogprobParams(prompt_start=0, top=2)
    request = GenerateRequest(str(i), (Text(PROMPTS[i]),), sampling, logprobs=scored)
    chunks: list[Chunk] = [chunk async for chunk in engine.generate(request)]
    return (
        tuple(i for chunk in chunks for i in chunk.ids),
        tuple(entry.logprob for chunk in chunks for entry in chunk.logprobs),
        tuple(entry.logprob for entry in chunks[-1].prompt_logprobs),
    )


async def one_by_one(engine: Engine) -> list[Answer]:
    answers = []
    for i in range(len(PROMPTS)):
        answers.append(await answer(engine, i))
        await engine.flush_cache()
    return answers


async def together(engine: Engine) -> list[Answer]:
    return list(await asyncio.gather(*[answer(engine, i) for i in range(len(PROMPTS))]))


@pytest.fixture(scope="module")
def alone(native: tuple[Decoder, Tokenizer]) -> list[Answer]:
    with engine(native) as cold:
        return asyncio.run(one_by_one(cold))


def test_a_batch_cold_and_warm(native: tuple[Decoder, Tokenizer], alone: list[Answer]) -> None:
    async def main(engine: Engine) -> tuple[list[Answer], list[Answer]]:
        return await together(engine), await together(engine)

    with engine(native) as batch:
        cold, warm = asyncio.run(main(batch))
    assert cold == alone
    assert warm == alone


@pytest.mark.parametrize(
    "options",
    [
        {"max_step_tokens": 7},
        {"page_size": 1},
        {"page_size": 4, "prefix_cache": False},
        {"overlap": True},
        {"kv_tokens": 128},
    ],
    ids=str,
)
def test_any_chunking_pages_overlap_and_retraction(
    native: tuple[Decoder, Tokenizer], alone: list[Answer], options: dict[str, Any]
) -> None:
    with engine(native, **options) as variant:
        assert asyncio.run(together(variant)) == alone
