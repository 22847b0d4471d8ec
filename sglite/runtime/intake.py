"""The door: from a GenerateRequest to a Job the core can run, or a typed refusal that names the field."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from sglite.errors import CapacityError, ContextLengthError, InvalidRequestError, UnsupportedError
from sglite.protocol import GenerateRequest, Prompt, SamplingParams, Text, Tokens
from sglite.runtime.candidates import CandidateGroup, CandidateTrack, build_trie
from sglite.runtime.grammar.base import Grammar
from sglite.runtime.output import Detokenizer, OutputStream
from sglite.runtime.sequence import Sequence as TokenSequence
from sglite.runtime.stoppattern import stop_pattern
from sglite.runtime.tracks import GenerateTrack, Job, Rules, Sink, Track, is_whole


class Tokenizer(Protocol):
    """What the engine needs of ``runtime.tokenizer.Tokenizer``."""

    @property
    def bos_id(self) -> int | None: ...

    def encode(self, prompt: Prompt) -> list[int]: ...

    def token_text(self, token: int) -> str: ...

    def detokenizer(self, *, skip_special_tokens: bool = True) -> Detokenizer: ...


@dataclass(frozen=True, slots=True)
class Limits:
    """``context_length`` and ``pool`` (what the KV pool holds) in tokens; ``vocab_size`` is the width of the logits,
    which may exceed the tokenizer's."""

    context_length: int
    pool: int
    vocab_size: int


class Intake:
    def __init__(self, tokenizer: Tokenizer, limits: Limits, rules: Rules) -> None:
        self._tokenizer = tokenizer
        self._limits = limits
        self._rules = rules

    def job(self, request: GenerateRequest, sink: Sink, now: float, grammar: Grammar | None = None) -> Job:
        """Raises InvalidRequestError and kin; callable from any thread."""
        request.validate()
        self._check_supported(request)
        self._check_ids(request)
        prompt_ids = self.encode(request.prompt)
        return Job(
            request=request,
            prompt_ids=prompt_ids,
            max_new_tokens=self._budget(request.sampling, len(prompt_ids)),
            sink=sink,
            submitted=now,
            grammar=grammar,
            candidate_ids=self._candidates(request, prompt_ids),
        )

    def tracks(self, job: Job) -> list[Track]:
        """The job's sequences, ready to be scheduled. Raises InvalidRequestError for impossible candidates."""
        if job.candidate_ids:
            return self._candidate_tracks(job)
        return [self._generate_track(job, index) for index in range(job.request.sampling.n)]

    def _generate_track(self, job: Job, index: int) -> Track:
        sequence = TokenSequence(
            request=job.request,
            tokens=list(job.prompt_ids),
            prompt_length=len(job.prompt_ids),
            limit=len(job.prompt_ids) + job.max_new_tokens,
            index=index,
            score_from=_score_from(job),
        )
        sampling = job.request.sampling
        detokenizer = self._tokenizer.detokenizer(skip_special_tokens=sampling.skip_special_tokens)
        return GenerateTrack(job, sequence, _stream(job.request, detokenizer), self._rules)

    def _candidate_tracks(self, job: Job) -> list[Track]:
        trie = build_trie(job.prompt_ids, job.candidate_ids)
        group = CandidateGroup(trie, job.request.candidates, self._rules.token_text)
        root = len(trie.root)
        return [
            CandidateTrack(
                job,
                TokenSequence(
                    request=job.request,
                    tokens=[*trie.root, *path],
                    prompt_length=root + len(path),
                    limit=root + len(path),
                    index=index,
                    score_from=root if index else root - 1,
                ),
                group,
            )
            for index, path in enumerate(trie.branches())
        ]

    def encode(self, prompt: Prompt) -> list[int]:
        """The ids that a request with this prompt begins with: never none. Raises InvalidRequestError."""
        ids = self._tokenizer.encode(prompt)
        if ids:
            return ids
        if all(isinstance(segment, Tokens) for segment in prompt):
            raise InvalidRequestError("the prompt is an empty list of tokens", param="prompt")
        if self._tokenizer.bos_id is None:
            raise InvalidRequestError(
                "the prompt is empty, and this model has no beginning-of-text token to start from", param="prompt"
            )
        return [self._tokenizer.bos_id]

    def _candidates(self, request: GenerateRequest, prompt_ids: list[int]) -> tuple[tuple[int, ...], ...]:
        """Each with the prompt as one text, which begins as the prompt alone does."""
        if not request.candidates:
            return ()
        alone = len(prompt_ids) == 1 and not self._tokenizer.encode(request.prompt)  # a beginning-of-text token
        head = prompt_ids if alone else ()
        prompts = ((*request.prompt, Text(candidate)) for candidate in request.candidates)
        return tuple((*head, *self._tokenizer.encode(prompt)) for prompt in prompts)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of any ids of this model, special tokens included."""
        _inside("tokens", ids, self._limits.vocab_size)
        detokenizer = self._tokenizer.detokenizer(skip_special_tokens=False)
        return "".join(map(detokenizer.push_one, ids)) + detokenizer.flush()

    def _budget(self, sampling: SamplingParams, prompt_length: int) -> int:
        """New tokens that fit: the request's number, cut to what context and pool leave."""
        least = min(1, sampling.max_new_tokens)
        for room, error, what in (
            (self._limits.context_length, ContextLengthError, "the model's context"),
            (self._limits.pool, CapacityError, "the engine's KV pool (kv_tokens)"),
        ):
            if prompt_length + least > room:
                raise error(
                    f"the prompt has {prompt_length} tokens; {what} holds {room}, with at least one new token: "
                    "shorten the prompt",
                    param="prompt",
                )
        return min(
            sampling.max_new_tokens, self._limits.context_length - prompt_length, self._limits.pool - prompt_length
        )

    def _check_supported(self, request: GenerateRequest) -> None:
        for pattern in request.sampling.stop_regex:
            stop_pattern(pattern)
        if request.adapter is not None:
            raise UnsupportedError("this engine has no adapters loaded", param="adapter")

    def _check_ids(self, request: GenerateRequest) -> None:
        sampling = request.sampling
        _inside("logit_bias", [token for token, _ in sampling.logit_bias], self._limits.vocab_size)
        _inside("stop_token_ids", sampling.stop_token_ids, self._limits.vocab_size)
        if request.logprobs is not None:
            _inside("token_ids_logprob", request.logprobs.ids, self._limits.vocab_size)
        for segment in request.prompt:
            if isinstance(segment, Tokens):
                _inside("prompt", segment.ids, self._limits.vocab_size)


def _inside(field: str, ids: Sequence[int], vocab_size: int) -> None:
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            raise InvalidRequestError(
                f"{field} holds a token id outside 0..{vocab_size - 1}: {str(token)[:40]}", param=field
            )


def _stream(request: GenerateRequest, detokenizer: Detokenizer) -> OutputStream:
    """Answers that are whole by their constraint are not cut by a stop that happens to be inside one."""
    if is_whole(request.constraint):
        return OutputStream(detokenizer)
    patterns = [stop_pattern(pattern) for pattern in request.sampling.stop_regex]
    return OutputStream(detokenizer, request.sampling.stop, patterns)


def _score_from(job: Job) -> int | None:
    """First position whose logits are wanted: see ``Sequence.score_from``."""
    logprobs = job.request.logprobs
    if logprobs is not None and logprobs.prompt_start is not None:
        return max(0, min(logprobs.prompt_start, len(job.prompt_ids)) - 1)
    return len(job.prompt_ids) if job.max_new_tokens == 0 else None
