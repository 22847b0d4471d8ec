"""One call of the model as it arrives: from chunks to samples, the variable, and the call's record."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from sglite.errors import AbortedError, RequestError
from sglite.lang.calls import Call
from sglite.lang.variables import Variable
from sglite.protocol import Chunk, Finish, GenerateRequest, TokenLogprob, Usage
from sglite.reasoning import ReasoningSplitter, reasoning_format


@dataclass(slots=True)
class Sample:
    """One answer as far as it is known. ``thoughts`` is what the ``splitter`` takes out of ``pieces``."""

    splitter: ReasoningSplitter | None = None
    pieces: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    uncovered: int = 0
    finish: Finish | None = None
    usage: Usage | None = None

    def take(self, chunk: Chunk) -> tuple[str, str]:
        """(text for the variable, reasoning) that the chunk adds."""
        self.ids += chunk.ids
        if chunk.logprobs:
            self.logprobs += chunk.logprobs
        if chunk.usage is not None:
            self.usage = chunk.usage
        if chunk.finish is not None:
            self.finish = chunk.finish
            self.uncovered = chunk.uncovered
            self.prompt_logprobs = chunk.prompt_logprobs
        if self.splitter is None:
            self.pieces.append(chunk.text)
            return chunk.text, ""
        thought, said = self.splitter.feed(chunk.text)
        if chunk.finish is not None:
            rest = self.splitter.close()
            thought, said = thought + rest[0], said + rest[1]
        self.pieces.append(said)
        self.thoughts.append(thought)
        return said, thought

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class Generation:
    """Fills ``variable``, and its ``thinking`` with what a model of type ``reasoning`` thinks, as chunks come in."""

    __slots__ = ("_began", "_format", "_log", "_thinking", "_variable", "call", "samples")

    def __init__(
        self,
        call: Call,
        variable: Variable,
        count: int = 1,
        *,
        reasoning: str | None = None,
        log: Callable[[str], None] | None = None,
    ) -> None:
        self.call = call
        self._variable = variable
        self._thinking = variable.thinking
        self._format = reasoning_format(reasoning) if reasoning is not None else None
        self._log = log
        self._began = time.perf_counter()
        self.samples = [self._sample() for _ in range(count)]

    async def collect(self, stream: AsyncIterator[Chunk]) -> None:
        """Reads the stream to its end. Closing it early (by cancellation) aborts the request."""
        self._begin_again()
        try:
            async for chunk in stream:
                self._take(chunk)
            self._check()
        except BaseException as error:
            self._note(error)
            await _close(stream)
            raise
        finally:
            self._record()

    def take(self, answer: Callable[[GenerateRequest], Iterable[Chunk]], request: GenerateRequest) -> None:
        """``collect`` from a backend that answers at once."""
        try:
            for chunk in answer(request):
                self._take(chunk)
            self._check()
        except BaseException as error:
            self._note(error)
            raise
        finally:
            self._record()

    def stop(self) -> None:
        """The reader has had enough: what is there is the answer."""
        for sample in self.samples:
            sample.finish = sample.finish or Finish("abort", message="stopped by the reader")
        self._record()

    def answer(self) -> tuple[tuple[int, ...], str, str]:
        """The first sample's exact ids, the text they decode to, and the text behind it that no id covers."""
        sample = self.samples[0]
        text = sample.text
        if sample.splitter is not None or not sample.ids:
            return (), text, ""
        if not sample.uncovered:
            return tuple(sample.ids), text, ""
        covered = len(text) - sample.uncovered
        return tuple(sample.ids), text[:covered], text[covered:]

    def publish(self) -> None:
        """The variables get their values: a text, or a list of texts when several samples were asked for."""
        several = len(self.samples) > 1
        if self._thinking is not None:
            thoughts = ["".join(sample.thoughts) for sample in self.samples]
            self._thinking.set(thoughts if several else thoughts[0])
        self._variable.set([s.text for s in self.samples] if several else self.samples[0].text)

    # ------------------------------------------------------------------------------------------------------------------

    def _begin_again(self) -> None:
        """Nothing is left of an attempt that was refused before this one."""
        self.call.error = None
        self.samples[:] = [self._sample() for _ in self.samples]

    def _note(self, error: BaseException) -> None:
        if isinstance(error, Exception):
            self.call.error = str(error) or type(error).__name__

    def _sample(self) -> Sample:
        return Sample(ReasoningSplitter(self._format) if self._format else None)

    def _take(self, chunk: Chunk) -> None:
        if self.call.ttft is None:
            self.call.ttft = time.perf_counter() - self._began
        said, thought = self.samples[chunk.index].take(chunk)
        if chunk.index == 0:
            self._show(said, thought)

    def _show(self, said: str, thought: str) -> None:
        """Only the first sample streams."""
        if said:
            self._variable.add(said)
            if self._log is not None:
                self._log(said)
        if thought and self._thinking is not None:
            self._thinking.add(thought)

    def _check(self) -> None:
        for sample in self.samples:
            finish = sample.finish
            if finish is not None and finish.reason in ("stop", "length"):
                continue
            if finish is None:
                raise RequestError("the backend ended its answer without saying why", request_id=self.call.request_id)
            if finish.reason == "abort":
                raise AbortedError(finish.message or "aborted by the backend", request_id=self.call.request_id)
            raise RequestError(finish.message or "failed in the backend", request_id=self.call.request_id)

    def _record(self) -> None:
        call = self.call
        call.wall = time.perf_counter() - self._began
        reasons = [sample.finish.reason for sample in self.samples if sample.finish is not None]
        call.finish = "length" if "length" in reasons else (reasons[0] if reasons else None)
        call.count([sample.usage for sample in self.samples if sample.usage is not None])


async def gather(call: Call, stream: AsyncIterator[Chunk]) -> list[Chunk]:
    """All chunks of a request that nobody streams, recorded in ``call``."""
    chunks: list[Chunk] = []
    recorder = Generation(call, Variable(None))

    async def pass_on() -> AsyncIterator[Chunk]:
        async for chunk in stream:
            chunks.append(chunk)
            yield chunk

    try:
        await recorder.collect(pass_on())
    finally:
        await _close(stream)
    return chunks


async def _close(stream: Any) -> None:
    close = getattr(stream, "aclose", None)
    if close is not None:
        await close()
