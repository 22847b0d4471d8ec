"""``/generate``: SGLang's native route, for its clients. Streamed text and meta_info are cumulative, as theirs are.

``text`` is raw: special tokens spelled in it count, because SGLang's clients render chat templates themselves.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter
from pydantic import AliasChoices, Field, model_validator
from starlette.responses import Response

from sglite import confidence
from sglite.errors import InvalidRequestError
from sglite.protocol import (
    MAX_TOP_LOGPROBS,
    Constraint,
    GenerateRequest,
    LogprobParams,
    ProgramInfo,
    Prompt,
    SamplingParams,
    Whitespace,
)
from sglite.runtime.server import fields as f
from sglite.runtime.server.context import Context, Ctx, new_id
from sglite.runtime.server.jsonbody import StrictRoute
from sglite.runtime.server.naming import Names, naming
from sglite.runtime.server.openai_fields import check_bounds
from sglite.runtime.server.results import Result, Sample, collect, follow, results_for
from sglite.runtime.server.shapes import NativeLogprobs
from sglite.runtime.server.streams import STREAMED, Answer, EventStream, event

T = TypeVar("T")
router = APIRouter(route_class=StrictRoute, tags=["native"])


class Sampling(f.Body):
    """SGLang's sampling_params."""

    max_new_tokens: f.Count | None = 128
    min_new_tokens: f.Count = 0
    n: f.Samples = 1
    temperature: f.Temperature = 1.0
    top_p: f.TopP = 1.0
    top_k: f.TopK = -1
    min_p: f.MinP = 0.0
    frequency_penalty: f.Penalty = 0.0
    presence_penalty: f.Penalty = 0.0
    repetition_penalty: f.RepetitionPenalty = 1.0
    seed: f.Seed | None = Field(default=None, validation_alias=AliasChoices("seed", "sampling_seed"))
    stop: f.Strings = ()
    stop_token_ids: f.StopIds = ()
    stop_regex: f.Strings = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: Annotated[bool, f.only(True)] = True
    no_stop_trim: Annotated[bool, f.only(False)] = False
    logit_bias: f.LogitBias = ()
    regex: f.ConstraintText | None = None
    json_schema: f.SchemaSource | None = None
    json_whitespace: Whitespace = "spaced"
    """Ours: see protocol.Constraint."""
    ebnf: f.ConstraintText | None = None
    structural_tag: f.ConstraintText | None = None
    custom_params: f.Unsupported = None

    @model_validator(mode="after")
    def _consistent(self) -> Sampling:
        if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            raise f.bad(f"{self.min_new_tokens} exceeds max_new_tokens {self.max_new_tokens}", field="min_new_tokens")
        self.constraint()
        return self

    def constraint(self) -> Constraint | None:
        given = f.one_constraint(
            [
                ("regex", "regex", self.regex),
                ("json_schema", "json_schema", self.json_schema),
                ("ebnf", "ebnf", self.ebnf),
                ("structural_tag", "structural_tag", self.structural_tag),
            ]
        )
        if self.json_whitespace != "spaced" and self.json_schema is None:
            raise f.bad("needs json_schema", field="json_whitespace")
        return replace(given[1], whitespace=self.json_whitespace) if given else None

    def params(self, context_length: int) -> SamplingParams:
        shared = SamplingParams.__dataclass_fields__.keys() & Sampling.model_fields.keys()
        plain = {name: getattr(self, name) for name in shared}
        return SamplingParams(**{**plain, "max_new_tokens": _budget(self.max_new_tokens, context_length)})


def _refused(why: str) -> InvalidRequestError:
    return InvalidRequestError(why, param="field_confidence")


class Generate(f.Body):
    """The body of ``/generate``. Options may be lists, one entry a prompt, as in SGLang."""

    text: str | Annotated[list[str], Field(min_length=1, max_length=f.MAX_PROMPTS)] | None = None
    input_ids: f.TokenPrompts | None = None
    sampling_params: Sampling | Annotated[list[Sampling], Field(max_length=f.MAX_PROMPTS)] | None = None
    rid: f.RequestId | Annotated[list[f.RequestId], Field(max_length=f.MAX_PROMPTS)] | None = None
    return_logprob: bool | Annotated[list[bool], Field(max_length=f.MAX_PROMPTS)] | None = None
    logprob_start_len: f.Start | Annotated[list[f.Start], Field(max_length=f.MAX_PROMPTS)] | None = None
    top_logprobs_num: f.TopLogprobs | Annotated[list[f.TopLogprobs], Field(max_length=f.MAX_PROMPTS)] | None = None
    return_text_in_logprobs: bool | None = False
    field_confidence: bool = False
    """Ours: ``meta_info.field_confidence`` tells how sure the model was of each field of a JSON answer or choice."""
    stream: bool | None = False
    lora_path: str | None = None
    priority: f.Priority | None = None
    program: f.Label | None = None
    image_data: f.Unsupported = None
    video_data: f.Unsupported = None
    audio_data: f.Unsupported = None
    input_embeds: f.Unsupported = None
    session_params: f.Unsupported = None
    token_ids_logprob: f.TokenIds | None = None
    custom_logit_processor: f.Unsupported = None
    return_hidden_states: Annotated[bool | None, f.only(False)] = False

    @model_validator(mode="after")
    def _logprobs_asked_for(self) -> Generate:
        asked = self.return_logprob if isinstance(self.return_logprob, list) else [self.return_logprob]
        for name in () if any(asked) else _NO_LOGPROBS:
            value = getattr(self, name)
            if any(v not in _NO_LOGPROBS[name] for v in (value if isinstance(value, list) else [value])):
                raise f.bad("needs return_logprob", field=name)
        return self

    def names(self) -> Names:
        sampling = {name: f"sampling_params.{name}" for name in Sampling.model_fields}
        own = {"prompt": "text" if self.input_ids is None else "input_ids", "max_tokens": sampling["max_new_tokens"]}
        return {**sampling, **own, "top_logprobs": "top_logprobs_num", "adapter": "lora_path"}


_NO_LOGPROBS: Mapping[str, tuple[Any, ...]] = {
    "logprob_start_len": (None, -1),
    "top_logprobs_num": (None, 0),
    "token_ids_logprob": (None,),
    "return_text_in_logprobs": (None, False),
}
"""What may be said where no logprobs are asked for."""


class _Call:
    """A checked body: its requests, and how their answers are shown."""

    def __init__(self, body: Generate, context: Context, context_length: int) -> None:
        self.body = body
        self.single = isinstance(body.text, str) or (body.input_ids is not None and body.input_ids.single)
        prompts = _prompts(body)
        self.samplings = _each(
            Sampling() if body.sampling_params is None else body.sampling_params, len(prompts), "sampling_params"
        )
        check_bounds(context, len(prompts), sum(s.n for s in self.samplings))
        self.rids = _rids(body, len(prompts))
        self.requests = [
            self._request(context, i, prompt, context_length).validate() for i, prompt in enumerate(prompts)
        ]
        self._lists: defaultdict[int, NativeLogprobs] = defaultdict(
            lambda: NativeLogprobs(bool(body.return_text_in_logprobs))
        )
        """By identity of the results and samples, which live as long as the call."""

    @property
    def listed(self) -> bool:
        return not self.single or self.samplings[0].n > 1

    def _request(self, context: Context, i: int, prompt: Prompt, context_length: int) -> GenerateRequest:
        sampling = self.samplings[i]
        return GenerateRequest(
            id=new_id("gen"),
            prompt=prompt,
            sampling=sampling.params(context_length),
            constraint=sampling.constraint(),
            logprobs=self._logprobs(i, sampling),
            adapter=self.body.lora_path,
            priority=self.body.priority or 0,
            deadline=context.config.request_timeout,
            namespace=context.namespace(),
            program=ProgramInfo(self.body.program) if self.body.program else None,
        )

    def _logprobs(self, i: int, sampling: Sampling) -> LogprobParams | None:
        body, count = self.body, len(self.rids)
        if body.field_confidence:
            return self._confidence_logprobs(sampling)
        if not _each(False if body.return_logprob is None else body.return_logprob, count, "return_logprob")[i]:
            return None
        start: int = _each(
            -1 if body.logprob_start_len is None else body.logprob_start_len, count, "logprob_start_len"
        )[i]
        if start < 0 and sampling.max_new_tokens == 0:
            start = 0  # the prompt's are all there is to return
        top: int = _each(0 if body.top_logprobs_num is None else body.top_logprobs_num, count, "top_logprobs_num")[i]
        given = body.token_ids_logprob or ()
        return LogprobParams(output=True, prompt_start=start if start >= 0 else None, top=top, ids=given)

    def _confidence_logprobs(self, sampling: Sampling) -> LogprobParams:
        constraint = sampling.constraint()
        if self.body.return_logprob:
            raise _refused("field_confidence and return_logprob cannot be used together")
        if constraint is None or constraint.kind not in confidence.KINDS:
            raise _refused("field_confidence needs a json_schema in sampling_params")
        return LogprobParams(top=MAX_TOP_LOGPROBS, constrained=True)

    def shown(self, i: int, result: Result, sample: Sample) -> dict[str, Any]:
        return {"text": sample.text, "output_ids": list(sample.ids), "meta_info": self._meta(i, result, sample)}

    def _meta(self, i: int, result: Result, sample: Sample) -> dict[str, Any]:
        meta = {"id": self.rids[i], "finish_reason": _finish_reason(sample), **_counts(result, sample)}
        asked, constraint = self.requests[i].logprobs, self.requests[i].constraint
        if self.body.field_confidence:
            assert constraint is not None, "checked with the request"
            if sample.finish is not None:
                found = confidence.field_confidence(constraint, sample.text, sample.logprobs)
                meta["field_confidence"] = [one.as_json() for one in found]
        elif asked is not None:
            for side, owner, entries in (
                ("input", result, result.prompt_logprobs),
                ("output", sample, sample.logprobs),
            ):
                lists = self._lists[id(owner)].grown(entries)
                meta[f"{side}_token_logprobs"] = lists.tokens
                if asked.top:
                    meta[f"{side}_top_logprobs"] = lists.top
                if asked.ids:
                    meta[f"{side}_token_ids_logprobs"] = lists.given
        return meta


@router.post("/generate", responses=STREAMED)
async def generate(body: Generate, context: Ctx) -> Response:
    """Generate text, or score prompts with ``max_new_tokens`` 0."""
    model = await context.model()
    with naming(body.names()):
        call = _Call(body, context, model.context_length)
    if body.stream:
        return EventStream(_events(context, call), context.config.write_timeout)
    return Answer(_answer(context, call))


async def _answer(context: Context, call: _Call) -> Any:
    with naming(call.body.names()):
        async with context.in_flight(call.rids):
            results = await collect(context.backend, call.requests)
    shown = [call.shown(i, result, sample) for i, result in enumerate(results) for sample in result.samples]
    return shown if call.listed else shown[0]


async def _events(context: Context, call: _Call) -> AsyncGenerator[bytes]:
    results = results_for(call.requests)
    with naming(call.body.names()):
        async with context.in_flight(call.rids), aclosing(follow(context.backend, call.requests, results)) as steps:
            async for i, chunk in steps:
                shown = call.shown(i, results[i], results[i].samples[chunk.index])
                offset = sum(s.n for s in call.samplings[:i])
                yield event({**shown, "index": offset + chunk.index} if call.listed else shown)


def _prompts(body: Generate) -> tuple[Prompt, ...]:
    if (body.text is None) == (body.input_ids is None):
        raise InvalidRequestError("give either text or input_ids", param="text")
    if body.input_ids is not None:
        return body.input_ids.prompts
    texts = [body.text] if isinstance(body.text, str) else body.text or []
    return tuple(f.raw_text(text) for text in texts)


def _each(value: T | list[T], count: int, name: str) -> list[T]:
    """One value a prompt, from one for all or a list."""
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise InvalidRequestError(f"{name} has {len(value)} entries for {count} prompts", param=name)
    return value


def _rids(body: Generate, count: int) -> list[str]:
    if body.rid is None:
        return [new_id("gen") for _ in range(count)]
    if isinstance(body.rid, str):
        return [body.rid] if count == 1 else [f"{body.rid}_{i}" for i in range(count)]
    return _each(body.rid, count, "rid")


def _budget(asked: int | None, context_length: int) -> int:
    return context_length if asked is None else asked


def _finish_reason(sample: Sample) -> dict[str, Any] | None:
    if sample.finish is None:
        return None
    if sample.finish.reason == "length":
        return {"type": "length", "length": sample.completion_tokens}
    return {"type": sample.finish.reason, "matched": sample.finish.matched}


def _counts(result: Result, sample: Sample) -> dict[str, Any]:
    """Token counts; those of the prompt as soon as the backend has told them."""
    usage = result.usage
    known = {} if sample.usage is None else {"prompt_tokens": usage.prompt_tokens, "cached_tokens": usage.cached_tokens}
    return {**known, "completion_tokens": sample.completion_tokens}
