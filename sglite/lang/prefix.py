"""A program's constant beginning, computed once ahead of many runs."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from sglite.errors import SgliteError
from sglite.lang.branch import Branch
from sglite.lang.options import Options
from sglite.lang.requests import sendable
from sglite.lang.run import Run
from sglite.lang.tracer import constant_prefix
from sglite.lang.waiting import Home, background
from sglite.protocol import Backend, GenerateRequest, Prompt, SamplingParams, prompt_text

if TYPE_CHECKING:
    from sglite.lang.program import Program

_WORTH_IT = 64
"""Characters below which computing a prefix ahead gains nothing."""


async def warm(program: Program, backend: Backend) -> str:
    """Prefills the constant prefix and returns it; an empty text where there is nothing to gain."""
    with contextlib.suppress(SgliteError):  # the runs themselves will tell what is wrong
        run, prompt = await _prefix(program, backend, background())
        if len(prompt_text(prompt)) > _WORTH_IT and run.known_info.capabilities.token_prompts:
            await _prefill(run, prompt)
            return prompt_text(prompt)
    return ""


def cache(program: Program, backend: Backend) -> str:
    """``warm`` for functions that are no coroutines. Raises what the backend raises."""
    home = background()
    home.refuse_blocking(f"{program.name}.cache()")
    return asyncio.run_coroutine_threadsafe(_cache(program, backend, home), home.loop).result()


async def _cache(program: Program, backend: Backend, home: Home) -> str:
    run, prompt = await _prefix(program, backend, home)
    if prompt:
        await _prefill(run, prompt)
    return prompt_text(prompt)


async def _prefix(program: Program, backend: Backend, home: Home) -> tuple[Run, Prompt]:
    run = Run(backend, home, Options(), program.name, stream=False)
    await run.load()
    branch = Branch(run, "")
    branch.append(constant_prefix(program), None)
    return run, branch.transcript.prompt()


async def _prefill(run: Run, prompt: Prompt) -> None:
    sampling = SamplingParams(max_new_tokens=0, temperature=0.0)
    request = GenerateRequest(id=f"{run.id}-prefix", prompt=sendable(prompt, run.known_info), sampling=sampling)
    async for _ in run.backend.generate(request):
        pass
