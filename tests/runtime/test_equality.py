"""The equality table on the real model, fp32: equal greedy tokens whatever the cache, pages, chunks and neighbours."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
import torch

from sglite.kernels import get_ops
from sglite.protocol import Constraint, GenerateRequest, SamplingParams, Text
from sglite.runtime.assembly import assemble
from sglite.runtime.config import config_from
from sglite.runtime.engine import Engine
from sglite.runtime.hub import ModelSource
from sglite.runtime.loading import load_config, load_tokenizer, open_weights
from sglite.runtime.model.decoder import Decoder
from sglite.runtime.tokenizer import Tokenizer

NEW_TOKENS = 16
"""Every answer crosses a page, whatever their size."""
SYSTEM = "<|im_start|>system\nYou answer in one short sentence and you never make anything up.<|im_end|>\n"
QUESTIONS = (
    "What is the capital of France?",
    "Name three colours of the rainbow.",
    "How many legs does a spider have?",
    "Why is the sky blue?",
    "Who wrote Romeo and Juliet?",
    "What do bees make?",
    "Which planet is the largest?",
    "Say something about the sea.",
)
PROMPTS = [f"{SYSTEM}<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n" for question in QUESTIONS]

VARIANTS: dict[str, dict[str, Any]] = {
    "no cache": {"prefix_cache": False},
    "page size 16, fcfs": {"page_size": 16, "policy": "fcfs"},
    "page size 1": {"page_size": 1},
    "page size 4": {"page_size": 4},
    "chunks of 16": {"max_step_tokens": 16},
    "chunks of 37": {"max_step_tokens": 37},
    "one at a time": {"max_running": 1},
    "overlap": {"overlap": True},
    "forced retraction": {"kv_tokens": 144},
}


@pytest.fixture(scope="module")
def real(smollm2: ModelSource) -> tuple[Decoder, Tokenizer]:
    torch.set_num_threads(2)
    config = load_config(smollm2)
    ops = get_ops("cpu", torch.device("cpu"), torch.float32, "dense")
    return Decoder(config, open_weights(smollm2), ops), load_tokenizer(smollm2, config)


def engine(real: tuple[Decoder, Tokenizer], **options: Any) -> Engine:
    model, tokenizer = real
    defaults = {"device": "cpu", "kernels": "cpu", "context_length": 512, "kv_tokens": 8192}
    config = config_from({**defaults, **options}).resolve(cuda=False)
    return Engine.of(assemble(config, model, tokenizer, torch.device("cpu")))


async def answer(engine: Engine, prompt: str) -> list[int]:
    sampling = SamplingParams(temperature=0, max_new_tokens=NEW_TOKENS, ignore_eos=True)
    request = GenerateRequest("r", (Text(prompt, special=True),), sampling)
    return [i async for chunk in engine.generate(request) for i in chunk.ids]


async def answers(engine: Engine) -> list[list[int]]:
    return await asyncio.gather(*[answer(engine, prompt) for prompt in PROMPTS])


@pytest.fixture(scope="module")
def alone(real: tuple[Decoder, Tokenizer]) -> list[list[int]]:
    """Each prompt by itself in a cold engine: batch 1, nothing shared."""

    async def main(engine: Engine) -> list[list[int]]:
        results = []
        for prompt in PROMPTS:
            results.append(await answer(engine, prompt))
            await engine.flush_cache()
        return results

    with engine(real) as one:
        return asyncio.run(main(one))


def test_a_batch_of_eight_and_a_warm_cache(real: tuple[Decoder, Tokenizer], alone: list[list[int]]) -> None:
    async def main(engine: Engine) -> tuple[list[list[int]], list[list[int]]]:
        return await answers(engine), await answers(engine)

    with engine(real) as eight:
        cold, warm = asyncio.run(main(eight))
    assert cold == alone
    assert warm == alone


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS.keys())
def test_variants(real: tuple[Decoder, Tokenizer], alone: list[list[int]], options: dict[str, Any]) -> None:
    with engine(real, **options) as variant:
        assert asyncio.run(answers(variant)) == alone
        if "kv_tokens" in options:
            assert variant._core.scheduler.stats.retractions > 0


def test_a_batch_of_thirty_two(real: tuple[Decoder, Tokenizer], alone: list[list[int]]) -> None:
    async def main(engine: Engine) -> list[list[int]]:
        return await asyncio.gather(*[answer(engine, prompt) for prompt in PROMPTS * 4])

    with engine(real) as many:
        assert asyncio.run(main(many)) == alone * 4


def test_neighbours_that_are_aborted(real: tuple[Decoder, Tokenizer], alone: list[list[int]]) -> None:
    """Every other request is given up after some tokens, while the rest go on."""

    async def leave(engine: Engine, prompt: str, after: int) -> None:
        sampling = SamplingParams(temperature=0, max_new_tokens=NEW_TOKENS, ignore_eos=True)
        chunks = engine.generate(GenerateRequest("gone", (Text(prompt, special=True),), sampling))
        async for _ in chunks:
            after -= 1
            if after == 0:
                break
        await chunks.aclose()

    async def main(engine: Engine) -> list[list[int]]:
        leaving = [leave(engine, prompt, i + 1) for i, prompt in enumerate(reversed(PROMPTS))]
        staying = [answer(engine, prompt) for prompt in PROMPTS]
        return (await asyncio.gather(*staying, *leaving))[: len(PROMPTS)]

    with engine(real) as crowded:
        assert asyncio.run(main(crowded)) == alone


def test_jump_forward_on_and_off(real: tuple[Decoder, Tokenizer]) -> None:
    schema = {"type": "object", "properties": {"capital": {"type": "string", "maxLength": 12}}, "required": ["capital"]}
    constraint = Constraint("json_schema", json.dumps({**schema, "additionalProperties": False}))
    request = GenerateRequest(
        "r", (Text(PROMPTS[0], special=True),), SamplingParams(temperature=0, max_new_tokens=40), constraint
    )

    async def main(engine: Engine) -> tuple[str, int]:
        chunks = [chunk async for chunk in engine.generate(request)]
        assert chunks[-1].usage is not None
        return "".join(chunk.text for chunk in chunks), chunks[-1].usage.forced_tokens

    with engine(real) as jumping, engine(real, jump_forward=False) as sampling:
        (jumped, forced), (sampled, none) = asyncio.run(main(jumping)), asyncio.run(main(sampling))
    assert jumped == sampled
    assert forced > 0 and none == 0
