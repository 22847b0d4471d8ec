"""What /v1/completions and /v1/chat/completions share: their fields, and how these become a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from sglite import confidence
from sglite.errors import InvalidRequestError, RequestError
from sglite.protocol import (
    Constraint,
    ConstraintKind,
    Finish,
    GenerateRequest,
    LogprobParams,
    ProgramInfo,
    Prompt,
    SamplingParams,
    TokenLogprob,
    Whitespace,
)
from sglite.runtime.server import fields as f
from sglite.runtime.server.context import Context
from sglite.runtime.server.naming import Names


class StreamOptions(f.Body):
    include_usage: bool | None = False
    continuous_usage_stats: Annotated[bool | None, f.only(False)] = False
    include_obfuscation: Annotated[bool | None, f.only(False)] = False


class JsonSchema(f.Body):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_\-]{1,64}$")]
    description: str | None = None
    schema_: f.SchemaSource | None = Field(default=None, alias="schema")
    strict: bool | None = None
    """Taken either way: the answer is always held to the schema."""


class ResponseFormat(f.Body):
    """``regex``, ``grammar`` and ``structural_tag`` are extensions."""

    type: Literal["text", "json_object", "json_schema", "regex", "grammar", "structural_tag"]
    json_schema: JsonSchema | None = None
    regex: f.ConstraintText | None = None
    grammar: f.ConstraintText | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None
    format: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _complete(self) -> ResponseFormat:
        for name, kind in _FORMAT_FIELDS.items():
            if (getattr(self, name) is not None) and self.type != kind:
                raise f.bad(f"does not belong to type {self.type!r}", field=name)
        if self.type in ("json_schema", "regex", "grammar") and getattr(self, self.type) is None:
            raise f.bad(f"type {self.type!r} needs the field {self.type}", field=self.type)
        return self

    def constraint(self) -> Constraint | None:
        if self.type == "text":
            return None
        if self.type == "json_schema" and self.json_schema is not None:
            return Constraint("json_schema", self.json_schema.schema_ or "{}")
        if self.type == "structural_tag":
            return Constraint("structural_tag", self.model_dump_json(exclude_none=True))
        kind: ConstraintKind = "ebnf" if self.type == "grammar" else self.type
        return Constraint(kind, self.regex or self.grammar or "")


_FORMAT_FIELDS = {
    "json_schema": "json_schema",
    "regex": "regex",
    "grammar": "grammar",
    "structures": "structural_tag",
    "triggers": "structural_tag",
    "format": "structural_tag",
}


class StructuredOutputs(f.Body):
    """vLLM's ``structured_outputs``: exactly one of the kinds."""

    json_: f.SchemaSource | None = Field(default=None, alias="json")
    regex: f.ConstraintText | None = None
    choice: f.Choices | None = None
    grammar: f.ConstraintText | None = None
    json_object: Annotated[bool | None, f.only(True)] = None
    structural_tag: f.ConstraintText | None = None


class ConstrainedBody(f.Body):
    """The many ways to say what the answer must look like; at most one of them at once."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: f.SchemaSource | None = None
    guided_regex: f.ConstraintText | None = None
    guided_choice: f.Choices | None = None
    guided_grammar: f.ConstraintText | None = None
    json_whitespace: Whitespace | None = None
    """Ours: see protocol.Constraint."""

    @model_validator(mode="after")
    def _at_most_one(self) -> ConstrainedBody:
        self.constraint()
        return self

    def constraint(self) -> Constraint | None:
        given = self._given()
        one = given[1] if given else None
        if self.json_whitespace is None:
            return one
        if one is None or one.kind not in ("json_schema", "json_object"):
            raise f.bad("needs a JSON schema or object to be asked for", field="json_whitespace")
        return replace(one, whitespace=self.json_whitespace)

    def names(self) -> Names:
        """A constraint goes by its kind in the engine, by its field here."""
        given = self._given()
        return {given[1].kind: given[0]} if given else {}

    def _given(self) -> tuple[str, Constraint] | None:
        outputs = self.structured_outputs or StructuredOutputs()
        chosen = self.response_format.constraint() if self.response_format else None
        given = f.one_constraint(
            [
                ("response_format", chosen.kind if chosen else "regex", chosen.source if chosen else None),
                ("guided_json", "json_schema", self.guided_json),
                ("guided_regex", "regex", self.guided_regex),
                ("guided_choice", "choices", self.guided_choice),
                ("guided_grammar", "ebnf", self.guided_grammar),
                ("structured_outputs.json", "json_schema", outputs.json_),
                ("structured_outputs.regex", "regex", outputs.regex),
                ("structured_outputs.choice", "choices", outputs.choice),
                ("structured_outputs.grammar", "ebnf", outputs.grammar),
                ("structured_outputs.json_object", "json_object", "" if outputs.json_object else None),
                ("structured_outputs.structural_tag", "structural_tag", outputs.structural_tag),
            ]
        )
        if given is None and self.structured_outputs is not None:
            raise f.bad("must name a constraint", field="structured_outputs")
        return given


class OpenAIBody(ConstrainedBody):
    """OpenAI's fields first, then the extra ones that vLLM's and SGLang's users send."""

    model: str | None = None
    n: f.Samples | None = 1
    temperature: f.Temperature | None = 1.0
    top_p: f.TopP | None = 1.0
    frequency_penalty: f.Penalty | None = 0.0
    presence_penalty: f.Penalty | None = 0.0
    seed: f.Seed | None = None
    stop: f.Strings = ()
    logit_bias: f.LogitBias = ()
    max_tokens: f.Count | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    user: f.Label | None = None

    top_k: f.TopK | None = -1
    min_p: f.MinP | None = 0.0
    repetition_penalty: f.RepetitionPenalty | None = 1.0
    min_tokens: f.Count | None = 0
    stop_token_ids: f.StopIds = ()
    ignore_eos: bool | None = False
    skip_special_tokens: bool | None = True
    spaces_between_special_tokens: Annotated[bool | None, f.only(True)] = True
    priority: f.Priority | None = 0
    cache_salt: f.Label | None = None
    program: f.Label | None = None
    """Requests with the same word are calls of one program: see ``protocol.ProgramInfo``."""
    field_confidence: bool | None = False
    """Ours: ``field_confidence`` of a choice tells how sure the model was of each field of its JSON."""

    @model_validator(mode="after")
    def _consistent(self) -> OpenAIBody:
        if self.stream_options is not None and not self.stream:
            raise f.bad("is only for stream: true", field="stream_options")
        if self.field_confidence:
            self._check_confidence()
        limit = self.token_limit()
        if limit is not None and (self.min_tokens or 0) > limit:
            raise f.bad(f"{self.min_tokens} exceeds max_tokens {limit}", field="min_tokens")
        return self

    def _check_confidence(self) -> None:
        constraint = self.constraint()
        if constraint is None or constraint.kind not in confidence.KINDS:
            raise f.bad(f"needs one of {', '.join(confidence.KINDS)} to be asked for", field="field_confidence")
        if self.stream:
            raise f.bad("not supported in a stream: it is known at the end", "unsupported", "field_confidence")

    def token_limit(self) -> int | None:
        return self.max_tokens

    def names(self) -> Names:
        return {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", **super().names()}

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def sampling(self, default_tokens: int) -> SamplingParams:
        """null means the default, as in OpenAI's API."""
        limit = self.token_limit()
        given = {name: getattr(self, name) for name in _SAME_NAME if getattr(self, name) is not None}
        return SamplingParams(
            **given,
            max_new_tokens=default_tokens if limit is None else limit,
            min_new_tokens=self.min_tokens or 0,
        )


def sure_of(body: OpenAIBody, text: str, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    """The field ``field_confidence`` of a choice, where it was asked for."""
    constraint = body.constraint()
    if not body.field_confidence or constraint is None:
        return {}
    return {"field_confidence": [one.as_json() for one in confidence.field_confidence(constraint, text, tokens)]}


_SAME_NAME = sorted(SamplingParams.__dataclass_fields__.keys() & OpenAIBody.model_fields.keys())


def make_request(
    body: OpenAIBody,
    context: Context,
    *,
    id: str,
    prompt: Prompt,
    sampling: SamplingParams,
    logprobs: LogprobParams | None,
    priority: int = 0,
) -> GenerateRequest:
    request = GenerateRequest(
        id=id,
        prompt=prompt,
        sampling=sampling,
        constraint=body.constraint(),
        logprobs=confidence.confidence_logprobs(body.constraint()) if body.field_confidence else logprobs,
        priority=context.priority + priority + (body.priority or 0),
        deadline=context.config.request_timeout,
        namespace=context.namespace(body.cache_salt),
        program=ProgramInfo(body.program) if body.program else None,
    )
    return request.validate()


def check_bounds(context: Context, prompts: int, answers: int) -> None:
    """``answers``: of all prompts together."""
    if prompts > context.config.max_batch:
        raise InvalidRequestError(f"at most {context.config.max_batch} prompts in one request", param="prompt")
    if answers > context.config.max_samples:
        raise InvalidRequestError(f"at most {context.config.max_samples} answers in one request", param="n")


def finish_reason(finish: Finish | None) -> str | None:
    if finish is None:
        return None
    if finish.reason not in ("stop", "length"):
        raise RequestError(finish.message or f"the request ended by {finish.reason}")
    return finish.reason
