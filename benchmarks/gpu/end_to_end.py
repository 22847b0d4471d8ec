"""A whole model with random weights: the engine as a user has it, then transformers, in the same process.

Decoding counts the tokens after each request's first; a step's floor is reading every weight once at the card's copy
bandwidth. transformers' ``generate`` gets all prompts of a batch at once, the same lengths for all.
"""

from __future__ import annotations

import asyncio
import gc
import random
import time

import torch

from gpu import models
from gpu.common import Context, Item, Record, timed
from sglite.protocol import Chunk, GenerateRequest, LogprobParams, SamplingParams, Tokens


class EndToEnd:
    """The items of one model; the engine is made by the first and closed before transformers' model is made."""

    def __init__(self, context: Context, model, batches: tuple[int, ...], new: int, prefill: int, fan: int) -> None:
        self._context, self._model = context, model
        self._batches, self._new, self._prefill, self._fan = batches, new, prefill, fan
        self._engine = self._peer = None
        self._loop = asyncio.Runner()
        self._ours: dict[str, float] = {}

    def items(self) -> list[Item]:
        prompt = 16 if self._context.tiny else 128
        found: list[Item] = [("sglite: load", self._load)]
        found += [(f"sglite: decode, batch {b}", lambda b=b: self._decode(b, prompt)) for b in self._batches]
        found.append((f"sglite: prefill {self._prefill}", self._time_prefill))
        fan = f"{self._fan} x ({self._prefill} shared + {self._new} new)"
        found.append((f"sglite: {fan}", self._time_fan))
        found.append(("transformers: load, logits compared", self._load_peer))
        few = [b for b in self._batches if b <= 64]
        found += [(f"transformers: decode, batch {b}", lambda b=b: self._decode_peer(b, prompt)) for b in few]
        found.append((f"transformers: {fan}", self._time_fan_peer))
        return found

    # ---------------------------------------------------------------------------------------------------------- sglite

    def _load(self) -> Record:
        began = time.perf_counter()
        most = max(self._batches)
        self._engine = models.engine(self._context, self._model, max_running=most, max_step_tokens=self._step_tokens)
        pool = self._engine.config.kv_tokens
        # a first request compiles; what comes later is measured
        self._answers([self._prompt(8)] * 2, 4)
        return {"ok": True, "load_s": time.perf_counter() - began, "pool_tokens": pool}

    @property
    def _step_tokens(self) -> int:
        return 64 if self._context.tiny else 8192

    def _prompt(self, length: int) -> tuple[int, ...]:
        return tuple(random.randrange(self._model.vocab_size) for _ in range(length))

    def _answers(self, prompts: list[tuple[int, ...]], new: int) -> list[list[tuple[float, Chunk]]]:
        sampling = SamplingParams(temperature=0, max_new_tokens=new, ignore_eos=True)

        async def one(ids):
            chunks = self._engine.generate(GenerateRequest("r", (Tokens(ids),), sampling))
            return [(time.perf_counter(), chunk) async for chunk in chunks]

        async def main():
            return await asyncio.gather(*[one(ids) for ids in prompts])

        return self._loop.run(main())

    def _decode(self, rows: int, length: int) -> Record:
        """Twice: the first time captures the step of that size (in the interpreter nothing is captured)."""
        for _ in range(1 if self._context.tiny else 2):
            began = time.perf_counter()
            answers = self._answers([self._prompt(length) for _ in range(rows)], self._new)
            firsts, lasts = [a[0][0] for a in answers], [a[-1][0] for a in answers]
        tokens = sum(len(chunk.ids) for answer in answers for _, chunk in answer)
        if tokens != rows * self._new:
            return {"ok": False, "error": f"WRONG: {tokens} tokens, not {rows * self._new}"}
        # of a step with all rows in it; chunks that a busy reader takes late hold several tokens
        steps = self._new - max(len(answer[0][1].ids) for answer in answers)
        seconds = (max(lasts) - max(firsts)) / steps if steps else (max(lasts) - began) / self._new
        self._ours[f"decode {rows}"] = seconds
        share = self._context.share_of_copy(models.weight_bytes(self._model, 2), seconds)
        goal = 0.8 if rows == 1 else None
        return {"ok": True, **timed(seconds, share=share, goal=goal, of="floor", tokens_per_s=rows / seconds)}

    def _time_prefill(self) -> Record:
        took = []
        for _ in range(1 if self._context.tiny else 3):
            began = time.perf_counter()
            (answer,) = self._answers([self._prompt(self._prefill)], 1)
            took.append(answer[0][0] - began)
        flops = models.prompt_flops(self._model, self._prefill)
        share = self._context.share_of_matmul(flops, min(took))
        return {
            "ok": True,
            "us": min(took) * 1e6,
            "share": share,
            "of": "matmul",
            "tokens_per_s": self._prefill / min(took),
        }

    def _fan_prompts(self) -> list[tuple[int, ...]]:
        draw = random.Random(3)
        shared = [draw.randrange(self._model.vocab_size) for _ in range(self._prefill)]
        tails = [[draw.randrange(self._model.vocab_size) for _ in range(8)] for _ in range(self._fan)]
        return [(*shared, *tail) for tail in tails]

    def _time_fan(self) -> Record:
        """Twice from an empty cache: the first time compiles and captures what only such steps need."""
        for _ in range(1 if self._context.tiny else 2):
            self._loop.run(self._engine.flush_cache())
            began = time.perf_counter()
            answers = self._answers(self._fan_prompts(), self._new)
            seconds = time.perf_counter() - began
        self._ours["fan"] = seconds
        tokens = sum(len(chunk.ids) for answer in answers for _, chunk in answer)
        right = tokens == self._fan * self._new
        return {"ok": right, "us": seconds * 1e6, "tokens_per_s": tokens / seconds}

    # ---------------------------------------------------------------------------------------------------- transformers

    def _load_peer(self) -> Record:
        """One prompt's best token and its logprob must be those of transformers, up to the type's rounding."""
        prompt = self._prompt(24 if self._context.tiny else 200)
        sampling = SamplingParams(temperature=0, max_new_tokens=1)

        async def ours():
            request = GenerateRequest("r", (Tokens(prompt),), sampling, logprobs=LogprobParams(top=5, prompt_start=0))
            return [chunk async for chunk in self._engine.generate(request)]

        chunks = self._loop.run(ours())
        mine = [entry.logprob for chunk in chunks for entry in chunk.prompt_logprobs][1:]
        self._engine.close()
        self._engine = None
        gc.collect()
        left = 0
        if not self._context.tiny:
            torch.cuda.empty_cache()
            left = torch.cuda.memory_allocated(self._context.device)
        self._peer = models.peer(self._context, self._model)
        with torch.inference_mode():
            ids = torch.tensor([prompt], device=self._context.device)
            scores = self._peer(ids).logits[0].float().log_softmax(-1)
        theirs = scores[:-1].gather(1, ids[0, 1:, None])[:, 0].cpu()
        difference = (torch.tensor(mine) - theirs).abs()
        record = {"mean_apart": float(difference.mean()), "most_apart": float(difference.max())}
        record["gib_left_by_sglite"] = left / 2**30
        spread = float(theirs.std())
        right = record["mean_apart"] < 0.1 * spread and len(mine) == len(theirs)
        return record | {"ok": right, **({} if right else {"error": "WRONG: logprobs differ from transformers'"})}

    @torch.inference_mode()
    def _generate(self, prompts: list[tuple[int, ...]], new: int) -> float:
        ids = torch.tensor(prompts, device=self._context.device)
        mask = torch.ones_like(ids)
        self._context.sync()
        began = time.perf_counter()
        out = self._peer.generate(ids, attention_mask=mask, max_new_tokens=new, do_sample=False, use_cache=True)
        self._context.sync()
        assert out.shape[1] == len(prompts[0]) + new
        return time.perf_counter() - began

    def _decode_peer(self, rows: int, length: int) -> Record:
        prompts = [self._prompt(length) for _ in range(rows)]
        new = min(self._new, 33)
        self._generate(prompts, 3)
        first, all_of_them = self._generate(prompts, 1), self._generate(prompts, new)
        seconds = (all_of_them - first) / (new - 1)
        ours = self._ours.get(f"decode {rows}")
        return {"us": seconds * 1e6, "tokens_per_s": rows / seconds, "sglite_times_faster": ours and seconds / ours}

    def _time_fan_peer(self) -> Record:
        """In smaller batches where all at once do not fit."""
        prompts, size = self._fan_prompts(), self._fan
        while True:
            try:
                seconds = sum(self._generate(prompts[i : i + size], self._new) for i in range(0, len(prompts), size))
                break
            except torch.OutOfMemoryError:
                size //= 2
                torch.cuda.empty_cache()
        ours = self._ours.get("fan")
        ratio = seconds / ours if ours else None
        told = {"us": seconds * 1e6, "batch": size, "sglite_times_faster": ratio}
        return told if ratio is None else told | {"goal_times": 3.0, "met": ratio >= 3}


def end_to_end(context: Context, model, batches: tuple[int, ...], prefill: int, fan: int) -> list[Item]:
    if context.tiny:
        return EndToEnd(context, models.TINY, (1, 2), 3, 24, 2).items()
    if context.quick:
        return EndToEnd(context, model, tuple(b for b in batches if b in (1, 64)), 48, prefill, fan).items()
    return EndToEnd(context, model, batches, 128, prefill, fan).items()
