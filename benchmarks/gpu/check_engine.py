"""The engine on the GPU against the reference: a small model, greedy, in every way a prompt can reach the kernels.

Each token is judged by the reference's own logits (fp32) after the same history: it must be the best, or so near it
that half precision may turn the two. So one early tie does not hide what comes after it.
"""

from __future__ import annotations

import asyncio
import random

import torch

from gpu import models
from gpu.common import Context, Item, Record
from sglite.kernels.ops import KVShape
from sglite.kernels.reference import ReferenceOps
from sglite.protocol import GenerateRequest, LogprobParams, SamplingParams, Tokens
from sglite.runtime.batch import PageTables, build_batch
from sglite.runtime.model.decoder import Decoder
from sglite.runtime.plan import Row

NEAR = 0.12
"""Logits apart, where the model's logits have a spread of about one."""


def items(context: Context) -> list[Item]:
    variants = {"as it is": {}, "page size 1": {"page_size": 1}, "chunks of 32": {"max_step_tokens": 32}}
    if context.tiny:
        variants = {"as it is": {}}
    found: list[Item] = [(name, lambda o=options: _greedy(context, o)) for name, options in variants.items()]
    if not context.tiny:
        found.append(("forced retraction", lambda: _greedy(context, {"kv_tokens": 1024, "max_running": 12})))
    found.append(("a seed alone and twice", lambda: _seeded(context)))
    return found


def _prompts(context: Context, vocabulary: int) -> list[tuple[int, ...]]:
    draw = random.Random(7)
    length, count = (24, 3) if context.tiny else (700, 11)
    shared = tuple(draw.randrange(vocabulary) for _ in range(length))
    own = [tuple(draw.randrange(vocabulary) for _ in range(draw.randrange(1, length))) for _ in range(count)]
    return [*(shared[: length - 8] + tail[:9] for tail in own[: count // 2]), *own[count // 2 :]]


def _request(ids: tuple[int, ...], sampling: SamplingParams, logprobs: bool = False) -> GenerateRequest:
    return GenerateRequest("r", (Tokens(ids),), sampling, logprobs=LogprobParams() if logprobs else None)


async def _answer(engine, request) -> tuple[list[int], list[float]]:
    chunks = [chunk async for chunk in engine.generate(request)]
    return [i for c in chunks for i in c.ids], [e.logprob for c in chunks for e in c.logprobs]


def _greedy(context: Context, options: dict) -> Record:
    model = models.TINY if context.tiny else models.SMALL
    new = 4 if context.tiny else 48
    sampling = SamplingParams(temperature=0, max_new_tokens=new, ignore_eos=True)
    prompts = _prompts(context, model.vocab_size)
    requests = [_request(ids, sampling, logprobs=n % 3 == 0) for n, ids in enumerate(prompts)]

    async def main(engine):
        return [await asyncio.gather(*[_answer(engine, r) for r in requests]) for _ in range(1 if context.tiny else 2)]

    with models.engine(context, model, max_running=options.pop("max_running", 8), **options) as engine:
        rounds = asyncio.run(main(engine))
        stats = asyncio.run(engine.stats())
    judge = _Judge(context, model)
    exact = close = total = 0
    for answers in rounds:  # cold, then from the cache
        for ids, (tokens, logprobs) in zip(prompts, answers, strict=True):
            if len(tokens) != new:
                return {"ok": False, "error": f"WRONG: {len(tokens)} tokens instead of {new}"}
            best, behind, apart = judge(ids, tokens, logprobs)
            total, exact, close = total + new, exact + best, max(close, behind)
            if behind > NEAR or apart > NEAR:
                return {"ok": False, "error": f"WRONG: a token is {behind:g} behind the best, a logprob {apart:g} off"}
    return {
        "ok": True,
        "tokens": total,
        "best_of_reference": exact / total,
        "farthest_behind": close,
        "hit_rate": stats["hit_rate"],
        "retractions": stats["retractions"],
    }


class _Judge:
    """The reference: fp32 arithmetic on the weights as the engine has them (rounded to its type)."""

    def __init__(self, context: Context, model) -> None:
        self._device = context.device
        ops = ReferenceOps(context.device, torch.float32)
        self._model = Decoder(model, models.RandomWeights(model, context.device, context.half), ops)

    @torch.inference_mode()
    def __call__(self, prompt, tokens, logprobs) -> tuple[int, float, float]:
        """(tokens that are the best, the farthest behind it, the largest difference of a logprob)"""
        history = (*prompt, *tokens[:-1])
        tables = PageTables(1, len(history))
        row = Row(0, 0, history, tuple(range(len(history))), reset=True, logits=len(tokens))
        tables.apply((row,))
        kv_shape: KVShape = self._model.kv_shape(len(history), 1)
        kv = self._model.allocate_kv(kv_shape.pages, 1)
        logits = self._model.logits(self._model.forward(build_batch((row,), tables, 1, self._device), kv))
        chosen = logits.gather(1, torch.tensor(tokens, device=self._device)[:, None])[:, 0]
        behind = logits.max(-1).values - chosen
        apart = 0.0
        if logprobs:
            exact = logits.log_softmax(-1).gather(1, torch.tensor(tokens, device=self._device)[:, None])[:, 0]
            apart = float((exact - torch.tensor(logprobs, device=self._device)).abs().max())
        return int((behind == 0).sum()), float(behind.max()), apart


def _seeded(context: Context) -> Record:
    """The same request twice, with everything the sampler can be asked for."""
    model = models.TINY if context.tiny else models.SMALL
    sampling = SamplingParams(
        seed=11, temperature=0.8, top_p=0.9, top_k=40, frequency_penalty=0.3, repetition_penalty=1.1,
        max_new_tokens=3 if context.tiny else 40, ignore_eos=True,
    )  # fmt: skip
    request = _request(_prompts(context, model.vocab_size)[0], sampling)

    async def main(engine):
        first = (await _answer(engine, request))[0]
        await engine.flush_cache()
        return first, (await _answer(engine, request))[0]

    with models.engine(context, model) as engine:
        first, second = asyncio.run(main(engine))
    same = first == second and len(first) == sampling.max_new_tokens
    return {"ok": same, **({} if same else {"error": f"WRONG: {first[:12]} then {second[:12]}"})}
