"""The frozen types that cross every boundary, and the one verb: ``Backend.generate``.

A caller (the DSL, the REST server, a test) builds a :class:`GenerateRequest`; a backend (the in-process engine, an
HTTP client, the mock) answers with an async iterator of :class:`Chunk`. Nothing here imports anything but the
standard library, and nothing here is ever changed after it is built: use ``dataclasses.replace``.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from sglite.errors import InvalidRequestError

# ---------------------------------------------------------------------------------------------------------- prompts


@dataclass(frozen=True, slots=True)
class Text:
    """Text that is still to be encoded. Special tokens spelled in it count only when ``special`` is set.

    ``special=True`` is for text a chat template wrote; user text keeps the default, so that a user who types
    ``<|im_end|>`` gets those ten characters and not the token.
    """

    value: str
    special: bool = False


@dataclass(frozen=True, slots=True)
class Tokens:
    """Exact token ids, usually a span generated earlier; ``text`` is what they decode to."""

    ids: tuple[int, ...]
    text: str = ""


Segment = Text | Tokens
Prompt = tuple[Segment, ...]


def prompt_text(prompt: Prompt) -> str:
    """The prompt as a person reads it."""
    return "".join(s.value if isinstance(s, Text) else s.text for s in prompt)


# ------------------------------------------------------------------------------------------------------- parameters

MAX_N = 128
MAX_STOPS = 64
MAX_TOP_LOGPROBS = 64
MAX_GIVEN_LOGPROBS = 1024


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens. ``temperature=0`` is greedy; ``top_k=-1`` means no limit. Stop strings are not part of the
    text; an answer under a JSON or choices constraint ends where it is complete, and none of them cuts it. With
    ``best_of`` so many samples are drawn, and the ``n`` whose tokens are likeliest on average are the answer.

    ``validate`` raises InvalidRequestError naming the field. Limits that depend on the model (token ids, context)
    are checked by the engine.
    """

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    n: int = 1
    best_of: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    stop_regex: tuple[str, ...] = ()
    ignore_eos: bool = False
    logit_bias: tuple[tuple[int, float], ...] = ()
    skip_special_tokens: bool = True

    def validate(self) -> SamplingParams:
        _integer("max_new_tokens", self.max_new_tokens, 0, 2**31 - 1)
        _integer("min_new_tokens", self.min_new_tokens, 0, self.max_new_tokens)
        _integer("n", self.n, 1, MAX_N)
        if self.best_of is not None:
            _integer("best_of", self.best_of, self.n, MAX_N)
        _number("temperature", self.temperature, 0.0, 100.0)
        _number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, 2.0, open_low=True)
        _integer("top_k", self.top_k, -1, 2**31 - 1)
        if self.top_k == 0:
            raise InvalidRequestError(
                "top_k must be -1 (no limit) or at least 1; use temperature=0 for greedy",
                param="top_k",
            )
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), 2**63 - 1)
        for name in ("stop", "stop_regex"):
            _strings(name, getattr(self, name))
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token, 0, 2**31 - 1)
        for token, bias in self.logit_bias:
            _integer("logit_bias", token, 0, 2**31 - 1)
            _number("logit_bias", bias, -100.0, 100.0)
        return self


@dataclass(frozen=True, slots=True)
class LogprobParams:
    """Which logprobs to return. ``prompt_start`` asks for the prompt's own from that position on (None: none).

    The very first position of a prompt has no known probability; its logprob is None. ``top`` adds that many
    most likely alternatives to each position. ``constrained``: the output's are those under the request's constraint,
    where a token that has to come is certain, instead of the model's own. ``ids`` are tokens whose logprobs are wanted
    at each position too.
    """

    output: bool = True
    prompt_start: int | None = None
    top: int = 0
    constrained: bool = False
    ids: tuple[int, ...] = ()

    def validate(self) -> LogprobParams:
        _integer("top_logprobs", self.top, 0, MAX_TOP_LOGPROBS)
        if len(self.ids) > MAX_GIVEN_LOGPROBS:
            raise InvalidRequestError(f"token_ids_logprob holds more than {MAX_GIVEN_LOGPROBS} ids", param=_GIVEN)
        for token in self.ids:
            _integer(_GIVEN, token, 0, 2**31 - 1)
        if self.prompt_start is not None:
            _integer("logprob_start_len", self.prompt_start, 0, 2**31 - 1)
        return self


_GIVEN = "token_ids_logprob"

Whitespace = Literal["compact", "spaced", "pretty"]
ConstraintKind = Literal["json_schema", "json_object", "regex", "choices", "ebnf", "structural_tag"]


@dataclass(frozen=True, slots=True)
class Constraint:
    """What the answer must look like. ``source`` is the schema as JSON text, the regex, the grammar, or for
    ``choices`` a JSON list of strings; it is empty for ``json_object``. ``whitespace`` is what JSON may have between
    its parts: nothing, at most one space behind a comma or colon, or also line breaks with up to 16 spaces."""

    kind: ConstraintKind
    source: str = ""
    whitespace: Whitespace = "spaced"


@dataclass(frozen=True, slots=True)
class ProgramInfo:
    """Which program and which of its branches a request belongs to, so the scheduler can serve whole programs.

    ``last`` says the program will make no further call on this branch; ``ahead`` how many it will still make on all
    its branches after this one, as far as that is known beforehand.
    """

    program: str
    branch: str = ""
    last: bool = False
    ahead: int | None = None

    def validate(self) -> ProgramInfo:
        for name, value in (("program", self.program), ("branch", self.branch)):
            if not isinstance(value, str):
                raise InvalidRequestError(f"{name} must be a string, not {value!r:.40}", param=name)
        if self.ahead is not None:
            _integer("ahead", self.ahead, 0, 2**31 - 1)
        return self


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One call of the model.

    Exactly one of three things is asked: sampling (the default), scoring the prompt (``max_new_tokens=0``,
    optionally with ``logprobs.prompt_start``), or scoring ``candidates``: alternative continuations of the prompt,
    answered by one chunk whose ``scores`` has one entry per candidate.

    ``namespace`` separates prefix caches; ``deadline`` is in seconds from submission; ``whole`` says that nobody looks
    before the end, so a backend may join a sample's chunks after its first.
    """

    id: str
    prompt: Prompt
    sampling: SamplingParams = field(default_factory=SamplingParams)
    constraint: Constraint | None = None
    logprobs: LogprobParams | None = None
    candidates: tuple[str, ...] = ()
    adapter: str | None = None
    priority: int = 0
    deadline: float | None = None
    program: ProgramInfo | None = None
    namespace: str = ""
    whole: bool = False

    def validate(self) -> GenerateRequest:
        """Everything that can be judged without the model. Raises InvalidRequestError."""
        if not self.prompt:
            raise InvalidRequestError("the prompt is empty", param="prompt")
        self.sampling.validate()
        if self.logprobs is not None:
            self.logprobs.validate()
        if self.candidates and (self.constraint is not None or self.sampling.n != 1):
            raise InvalidRequestError("candidates cannot be combined with a constraint or n > 1", param="candidates")
        if self.deadline is not None:
            _number("deadline", self.deadline, 0.0, math.inf, open_low=True)
        _integer("priority", self.priority, -(2**31), 2**31 - 1)
        if self.program is not None:
            self.program.validate()
        return self


# ---------------------------------------------------------------------------------------------------------- answers

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class Finish:
    """Why a sample ended. ``matched`` is the stop string, stop token id or EOS id that ended it."""

    reason: FinishReason
    matched: str | int | None = None
    message: str | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One position: the token, the logarithm of its probability (None: unknown), the likeliest alternatives, and the
    tokens of ``LogprobParams.ids`` in their order."""

    id: int
    logprob: float | None
    text: str = ""
    top: tuple[tuple[int, float, str], ...] = ()
    given: tuple[tuple[int, float, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts and times of one request so far. Times are seconds of wall clock."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    forced_tokens: int = 0
    rollbacks: int = 0
    queue_time: float = 0.0
    prefill_time: float = 0.0
    decode_time: float = 0.0
    retractions: int = 0


@dataclass(frozen=True, slots=True)
class CandidateScore:
    """A candidate's own tokens with their logprobs, in order, given the prompt."""

    text: str
    tokens: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one step added to sample ``index``: text and ids, and at the end ``finish`` and ``usage``.

    All ids of a sample decode to all its text but the last ``uncovered`` characters, which are there when a stop
    string cut a token in two. EOS and stop token ids are not among the ids; ``finish.matched`` names them.
    Each sample gets exactly one chunk with ``finish`` set. ``prompt_logprobs`` and ``scores`` come with it; ``usage``
    comes with it and may come earlier, counting up to there.
    A request that failed ends by an exception out of the iterator, not by a chunk.
    """

    text: str = ""
    ids: tuple[int, ...] = ()
    index: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()
    uncovered: int = 0
    finish: Finish | None = None
    usage: Usage | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    scores: tuple[CandidateScore, ...] = ()


# ---------------------------------------------------------------------------------------------------------- backend


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend can do. A program that needs more is refused before anything is sent."""

    constraints: frozenset[str] = frozenset()
    candidates: bool = False
    logprobs: bool = False
    prompt_logprobs: bool = False
    token_prompts: bool = False
    chat_only: bool = False
    n: bool = True
    sampling: frozenset[str] = frozenset()
    """Names of SamplingParams fields that are honoured."""
    json_whitespace: bool = False
    """Constraints may choose their ``whitespace``."""
    field_confidence: bool = False
    """Logprobs may be those under the constraint (``LogprobParams.constrained``)."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What callers need to know of the model behind a backend. ``context_length`` and ``vocab_size`` in tokens."""

    name: str
    context_length: int
    vocab_size: int = 0
    chat_template: str | None = None
    bos_token: str | None = None
    eos_token: str | None = None
    eos_token_ids: tuple[int, ...] = ()
    special_tokens: tuple[str, ...] = ()
    capabilities: Capabilities = field(default_factory=Capabilities)
    details: Mapping[str, Any] = field(default_factory=dict)


@runtime_checkable
class Backend(Protocol):
    """The one seam between programs and whatever runs models.

    ``generate`` raises before the first chunk when the request is refused (InvalidRequestError and kin) and raises
    RequestError when an accepted request fails. Closing the iterator aborts the request.
    """

    def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]: ...

    async def info(self) -> ModelInfo: ...

    async def flush_cache(self) -> None: ...

    async def aclose(self) -> None: ...


class AnswersAtOnce(Protocol):
    """A backend that never waits. Its whole answers are taken where a program asks, without an event loop."""

    @property
    def answer(self) -> Callable[[GenerateRequest], Sequence[Chunk]] | None:
        """What ``generate`` would give and raise, in one go; None where this one has to wait after all."""
        ...


@runtime_checkable
class KeepsPrograms(Protocol):
    """A backend that keeps the prefixes of live programs between their calls, and lets go of them when it is told."""

    async def end_program(self, program: str, branch: str = "", *, namespace: str = "") -> None:
        """No more calls come from a branch (``ProgramInfo.branch``) and those below it; from "" that is all of them."""
        ...


async def end_program(backend: Backend, program: str, branch: str = "", *, namespace: str = "") -> None:
    """Tell a backend that a program's branch has ended; where the backend keeps nothing, do nothing."""
    if isinstance(backend, KeepsPrograms):
        await backend.end_program(program, branch, namespace=namespace)


# ----------------------------------------------------------------------------------------------------------- checks


def _integer(name: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequestError(f"{name} must be an integer, not {value!r}", param=name)
    if value.bit_length() > 64:  # too long to print
        raise InvalidRequestError(f"{name} must be between {low} and {high}", param=name)
    if not low <= value <= high:
        raise InvalidRequestError(f"{name} must be between {low} and {high}, not {value}", param=name)


def _number(name: str, value: Any, low: float, high: float, *, open_low: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequestError(f"{name} must be a number, not {value!r}", param=name)
    inside = (low < value if open_low else low <= value) and value <= high
    if not inside:  # also catches NaN
        bracket = "(" if open_low else "["
        raise InvalidRequestError(f"{name} must be in {bracket}{low:g}, {high:g}], not {value}", param=name)


def _strings(name: str, values: Sequence[str]) -> None:
    if len(values) > MAX_STOPS:
        raise InvalidRequestError(f"{name} may hold at most {MAX_STOPS} strings", param=name)
    for value in values:
        if not isinstance(value, str) or not value:
            raise InvalidRequestError(f"{name} must hold non-empty strings", param=name)
