"""Chunks collected into samples: what a non-streamed answer and a cumulative stream are made of."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from sglite.errors import AbortedError, RequestError
from sglite.protocol import Backend, CandidateScore, Chunk, Finish, GenerateRequest, TokenLogprob, Usage
from sglite.runtime.server.streams import generate_all


@dataclass(slots=True)
class Sample:
    """One answer so far."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: Finish | None = None
    usage: Usage | None = None
    uncovered: int = 0
    """Characters at the text's end that no id covers."""

    @property
    def completion_tokens(self) -> int:
        """The backend's count once it is known: an id that ends an answer is no part of it, but was computed."""
        return self.usage.completion_tokens if self.usage else len(self.ids)

    def add(self, chunk: Chunk) -> None:
        self.text += chunk.text
        self.ids += chunk.ids
        self.uncovered = chunk.uncovered
        self.logprobs += chunk.logprobs
        self.finish = chunk.finish or self.finish
        self.usage = chunk.usage or self.usage


@dataclass(slots=True)
class Result:
    """Everything one request has brought so far."""

    samples: list[Sample]
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    scores: tuple[CandidateScore, ...] = ()

    def add(self, chunk: Chunk) -> None:
        """Raises when the backend says that the sample failed."""
        sample = self.samples[chunk.index]
        sample.add(chunk)
        self.prompt_logprobs = chunk.prompt_logprobs or self.prompt_logprobs
        self.scores = chunk.scores or self.scores
        if sample.finish is not None:
            _raise_failure(sample.finish)

    @property
    def usage(self) -> Usage:
        """Of the request as a whole."""
        known = total_usage(sample.usage for sample in self.samples)
        return replace(known, completion_tokens=sum(sample.completion_tokens for sample in self.samples))


def total_usage(usages: Iterable[Usage | None]) -> Usage:
    """Of a request, from its samples': the prompt is one, however many samples it has."""
    known = [usage for usage in usages if usage is not None]
    return Usage(
        prompt_tokens=max((u.prompt_tokens for u in known), default=0),
        cached_tokens=max((u.cached_tokens for u in known), default=0),
        completion_tokens=sum(u.completion_tokens for u in known),
    )


def results_for(requests: Sequence[GenerateRequest]) -> list[Result]:
    return [Result([Sample() for _ in range(request.sampling.n)]) for request in requests]


async def follow(
    backend: Backend, requests: Sequence[GenerateRequest], results: Sequence[Result]
) -> AsyncGenerator[tuple[int, Chunk]]:
    """Each chunk with its request's position, after it was added to that request's result."""
    async with aclosing(generate_all(backend, requests)) as chunks:
        async for i, chunk in chunks:
            results[i].add(chunk)
            yield i, chunk


async def collect(backend: Backend, requests: Sequence[GenerateRequest]) -> list[Result]:
    """All requests run to their end."""
    results = results_for(requests)
    async for _ in follow(backend, [replace(request, whole=True) for request in requests], results):
        pass
    return results


def _raise_failure(finish: Finish) -> None:
    if finish.reason == "abort":
        raise AbortedError(finish.message or "the request was aborted")
    if finish.reason == "error":
        raise RequestError(finish.message or "the request failed")
