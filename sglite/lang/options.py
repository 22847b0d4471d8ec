"""Sampling and logprob options: an author's few words over a program's defaults, merged once per node."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import Any

from sglite.errors import InvalidRequestError, ProgramError
from sglite.protocol import LogprobParams, SamplingParams


@dataclass(frozen=True, slots=True)
class LogprobOptions:
    """SGLang's four words for logprobs. Asking for a detail asks for logprobs."""

    return_logprob: bool | None = None
    logprob_start_len: int | None = None
    top_logprobs_num: int | None = None
    return_text_in_logprobs: bool | None = None

    def params(self) -> LogprobParams | None:
        start = None if self.logprob_start_len in (None, -1) else self.logprob_start_len
        wanted = start is not None or bool(self.top_logprobs_num)
        if self.return_logprob is False and wanted:
            name = "logprob_start_len" if start is not None else "top_logprobs_num"
            raise InvalidRequestError(f"{name} needs return_logprob=True", param=name)
        if not (self.return_logprob or wanted):
            return None
        return LogprobParams(prompt_start=start, top=self.top_logprobs_num or 0).validate()


@dataclass(frozen=True, slots=True, eq=False)
class Options:
    """Everything a generation needs besides its prompt and constraint. Compared by identity: they are remembered."""

    sampling: SamplingParams = field(default_factory=SamplingParams)
    logprobs: LogprobOptions = field(default_factory=LogprobOptions)

    def over(self, given: Mapping[str, Any]) -> Options:
        """These options with ``given`` put over them. Raises InvalidRequestError naming the field."""
        sampling = {k: v for k, v in given.items() if k in SAMPLING}
        logprobs = {k: v for k, v in given.items() if k in LOGPROBS}
        return Options(replace(self.sampling, **sampling).validate(), replace(self.logprobs, **logprobs))


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """Options made ready for a request. ``changed`` names the sampling fields that differ from their defaults."""

    sampling: SamplingParams
    logprobs: LogprobParams | None
    with_text: bool
    changed: frozenset[str]


@lru_cache(1024)
def plan(base: Options, given: tuple[tuple[str, Any], ...]) -> Plan:
    """``base`` with the items of ``given`` over it. Raises InvalidRequestError naming the field."""
    options = base.over(dict(given)) if given else base
    sampling = options.sampling
    with_text = bool(options.logprobs.return_text_in_logprobs)
    return Plan(sampling, options.logprobs.params(), with_text, changed(sampling))


def changed(sampling: SamplingParams) -> frozenset[str]:
    """Names of the fields that differ from their defaults."""
    return frozenset(name for name, value in _DEFAULT.items() if getattr(sampling, name) != value)


_DEFAULT = {f.name: getattr(SamplingParams(), f.name) for f in fields(SamplingParams)}


SAMPLING = frozenset(f.name for f in fields(SamplingParams)) - {"skip_special_tokens", "logit_bias", "best_of"}
LOGPROBS = frozenset(f.name for f in fields(LogprobOptions))
NAMES = SAMPLING | LOGPROBS
"""The keywords that ``f.run`` takes for itself; all others are the program's arguments."""


def given_options(values: Mapping[str, Any]) -> dict[str, Any]:
    """What the author really set, in the protocol's types. Raises ProgramError for switches that are no booleans."""
    given = {}
    for name, value in values.items():
        if value is None:
            continue
        if name in _SWITCHES and not isinstance(value, bool):
            raise ProgramError(f"{name} must be True or False, not {value!r}")
        given[name] = _listed(name, value) if name in _LISTS else value
    return given


def _listed(name: str, value: Any) -> tuple[Any, ...]:
    """What a list holds is checked with all else that is sent."""
    if isinstance(value, str) and name != "stop_token_ids":
        return (value,)
    if not isinstance(value, Iterable) or isinstance(value, str | bytes):
        what = "token ids" if name == "stop_token_ids" else "texts"
        raise ProgramError(f"{name} must be a list of {what}, not {value!r}")
    return tuple(value)


_LISTS = frozenset({"stop", "stop_regex", "stop_token_ids"})
_SWITCHES = frozenset({"return_logprob", "return_text_in_logprobs", "ignore_eos", "field_confidence"})
