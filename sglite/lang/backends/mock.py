"""A backend without a model: answers from a script or a function, obeys constraints, counts calls."""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import lru_cache
from typing import Any

from sglite.errors import InvalidRequestError, RequestError
from sglite.lang.backends.instances import least_text, satisfies
from sglite.protocol import (
    CandidateScore,
    Capabilities,
    Chunk,
    Finish,
    GenerateRequest,
    ModelInfo,
    SamplingParams,
    TokenLogprob,
    Tokens,
    Usage,
    prompt_text,
)

Answer = str | Exception | None
Responder = Callable[[GenerateRequest], Answer | Awaitable[Answer]]
Script = str | Sequence[Answer] | Mapping[str, Answer] | Responder | None

EVERYTHING = Capabilities(
    constraints=frozenset({"json_schema", "json_object", "regex", "choices"}),
    candidates=True,
    logprobs=True,
    prompt_logprobs=True,
    token_prompts=True,
    sampling=frozenset(f.name for f in fields(SamplingParams)),
)

_STOP = Finish("stop")
_PIECES = re.compile(r"\s?[^\W\d_]+|\s?\d|\s|[^\w\s]|_")


class MockBackend:
    """Answers every request from ``script``:

    - a text: always that;
    - a list: one after the other, in the order in which requests come;
    - a mapping: the value whose key stands last in the prompt;
    - a function of the request, plain or ``async``.

    An answer that is an exception is raised. Where the script has no answer (None), or its text or mapping none that
    satisfies the constraint, the mock gives the least text that does, or "ok"; an answer of a list or function that
    violates the constraint fails the request. For candidates the answer is the winner. ``latency`` (seconds) passes
    before the first piece, ``pace`` before each one. An answer shorter than ``min_tokens`` is followed by " ok"s.
    A piece is a word with the space before it, and counts as one token of the answer; the prompt's tokens are guessed.
    """

    def __init__(
        self,
        script: Script = None,
        *,
        latency: float = 0.0,
        pace: float = 0.0,
        chat_template: str | None = None,
        capabilities: Capabilities = EVERYTHING,
        name: str = "mock",
        context_length: int = 1_000_000,
    ) -> None:
        self._script = script
        self._answers: Iterator[Answer] = iter(()) if isinstance(script, str) else _listed(script)
        self._latency = latency
        self._pace = pace
        self._waits = bool(latency or pace or callable(script)) or type(self).generate is not MockBackend.generate
        self._info = ModelInfo(
            name=name, context_length=context_length, chat_template=chat_template, capabilities=capabilities
        )
        self._ids: dict[str, int] = {}
        self._validated: SamplingParams | None = None
        self.requests: list[GenerateRequest] = []
        """Every request, in the order in which they came."""
        self.aborted: list[str] = []
        """Ids of the requests whose reader left before the end."""
        self.flushes = 0
        self.running = 0
        self.most_running = 0
        self.closed = False

    @property
    def prompts(self) -> list[str]:
        """What each request's prompt reads as."""
        return [prompt_text(request.prompt) for request in self.requests]

    @property
    def answer(self) -> Callable[[GenerateRequest], list[Chunk]] | None:
        """What ``generate`` gives, at once; None where time passes, a function is asked or ``generate`` is another."""
        return None if self._waits else self._answer

    def _answer(self, request: GenerateRequest) -> list[Chunk]:
        self._accept(request)
        return self._chunks(request, self._allowed(request, self._scripted(request)))

    def _accept(self, request: GenerateRequest) -> None:
        if request.sampling is not self._validated:
            request.validate()
            self._validated = request.sampling
        self.requests.append(request)

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        self._accept(request)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            if self._latency:
                await asyncio.sleep(self._latency)
            answer = self._scripted(request)
            if inspect.isawaitable(answer):
                answer = await answer
            for chunk in self._chunks(request, self._allowed(request, answer)):
                if self._pace:
                    await asyncio.sleep(self._pace)
                yield chunk
        except (GeneratorExit, asyncio.CancelledError):
            self.aborted.append(request.id)
            raise
        finally:
            self.running -= 1

    async def info(self) -> ModelInfo:
        return self._info

    async def flush_cache(self) -> None:
        self.flushes += 1

    async def aclose(self) -> None:
        self.closed = True

    # ---- answers

    def _allowed(self, request: GenerateRequest, answer: Any) -> str:
        """What to say, given the script's answer. Raises the answer when it is an exception."""
        if isinstance(answer, Exception):
            raise answer
        constraint = request.constraint
        if constraint is None:
            return "ok" if answer is None else str(answer)
        if answer is not None and satisfies(answer, constraint):
            return str(answer)
        if answer is None or isinstance(self._script, str | Mapping):
            return least_text(constraint)
        raise RequestError(f"the scripted answer {answer!r} violates {constraint}", request_id=request.id)

    def _scripted(self, request: GenerateRequest) -> Any:
        script = self._script
        if script is None or isinstance(script, str):
            return script
        if request.sampling.max_new_tokens == 0 and not request.candidates:
            return None  # scoring: there is nothing to say
        if isinstance(script, Mapping):
            return _last_key(script, prompt_text(request.prompt))
        if callable(script):
            return script(request)
        return next(self._answers)

    def _chunks(self, request: GenerateRequest, answer: str) -> list[Chunk]:
        if request.candidates:
            return [self._scores(request, answer)]
        if request.sampling.max_new_tokens == 0:
            return [self._scored_prompt(request)]
        return [chunk for index in range(request.sampling.n) for chunk in self._sample(request, answer, index)]

    def _sample(self, request: GenerateRequest, answer: str, index: int) -> list[Chunk]:
        """All samples are the script's answer. Under ``best_of`` the first one's usage counts those not shown."""
        text, finish = _cut(answer, request.sampling)
        pieces: Sequence[str] = _split(text)
        missing = request.sampling.min_new_tokens - len(pieces)
        if missing > 0 and finish is _STOP and request.constraint is None:
            pieces = (*pieces, *(" ok",) * missing)
        if len(pieces) > request.sampling.max_new_tokens:
            pieces, finish = pieces[: request.sampling.max_new_tokens], Finish("length")
        *before, last = pieces or ("",)
        chunks = [Chunk(piece, self._ids_of(piece), index, self._logprobs(request, piece)) for piece in before]
        drawn = 1 if index or request.sampling.best_of is None else 1 + request.sampling.best_of - request.sampling.n
        usage, start = self._usage(request, drawn * len(pieces)), self._prompt_logprobs(request)
        logprobs = self._logprobs(request, last)
        return [*chunks, Chunk(last, self._ids_of(last), index, logprobs, 0, finish, usage, start)]

    def _logprobs(self, request: GenerateRequest, piece: str) -> tuple[TokenLogprob, ...]:
        return () if request.logprobs is None or not piece else (self._logprob(piece),)

    def _ids_of(self, piece: str) -> tuple[int, ...]:
        return (self._id(piece),) if piece else ()

    def _scores(self, request: GenerateRequest, answer: str) -> Chunk:
        texts = [text.strip() for text in request.candidates]
        winner = answer.strip() if answer.strip() in texts else texts[0]
        scores = tuple(
            CandidateScore(
                text, tuple(self._logprob(piece, -0.1 if bare == winner else -3.0) for piece in _split(text))
            )
            for text, bare in zip(request.candidates, texts, strict=True)
        )
        return Chunk(finish=Finish("stop"), usage=self._usage(request, 0), scores=scores)

    def _scored_prompt(self, request: GenerateRequest) -> Chunk:
        logprobs = self._prompt_logprobs(request)
        return Chunk(finish=Finish("length"), usage=self._usage(request, 0), prompt_logprobs=logprobs)

    def _prompt_logprobs(self, request: GenerateRequest) -> tuple[TokenLogprob, ...]:
        if request.logprobs is None or request.logprobs.prompt_start is None:
            return ()
        pieces = _split(prompt_text(request.prompt))
        known = [self._logprob(piece, None if i == 0 else -0.5) for i, piece in enumerate(pieces)]
        return tuple(known[request.logprobs.prompt_start :])

    def _usage(self, request: GenerateRequest, completion: int) -> Usage:
        count = sum([len(s.ids) if isinstance(s, Tokens) else s.value.count(" ") + 1 for s in request.prompt])
        return _counted(count, completion)

    def _logprob(self, piece: str, logprob: float | None = -0.5) -> TokenLogprob:
        return TokenLogprob(self._id(piece), logprob, piece)

    def _id(self, piece: str) -> int:
        return self._ids.setdefault(piece, len(self._ids))


@lru_cache(256)
def _split(text: str) -> tuple[str, ...]:
    return tuple(_PIECES.findall(text))


@lru_cache(256)
def _counted(prompt: int, completion: int) -> Usage:
    return Usage(prompt_tokens=prompt, completion_tokens=completion)


def _listed(script: Any) -> Iterator[Answer]:
    if isinstance(script, Sequence):
        yield from script
        yield_error = RequestError(f"the script has {len(script)} answers, and this is one request more")
        while True:
            yield yield_error


def _last_key(script: Mapping[str, Answer], prompt: str) -> Answer:
    """The value of the key that stands last in the prompt."""
    found = [(at, len(key), key) for key in script if (at := prompt.rfind(key)) >= 0]
    return script[max(found)[2]] if found else None


def _search(pattern: str, answer: str) -> re.Match[str] | None:
    try:
        return re.search(pattern, answer)
    except re.error as error:
        raise InvalidRequestError(f"stop_regex {pattern!r}: {error}", param="stop_regex") from None


def _cut(answer: str, sampling: SamplingParams) -> tuple[str, Finish]:
    if not sampling.stop and not sampling.stop_regex:
        return answer, _STOP
    hits = [(at, stop) for stop in sampling.stop if (at := answer.find(stop)) >= 0]
    hits += [(found.start(), pattern) for pattern in sampling.stop_regex if (found := _search(pattern, answer))]
    if not hits:
        return answer, _STOP
    at, stop = min(hits)
    return answer[:at], Finish("stop", matched=stop)
