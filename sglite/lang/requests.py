"""From a node and a place in a program to a request, after asking whether the backend can do it."""

from __future__ import annotations

from dataclasses import dataclass, fields

from sglite.errors import UnsupportedError
from sglite.lang.nodes import Gen
from sglite.lang.options import Options
from sglite.protocol import (
    LogprobParams,
    ModelInfo,
    Prompt,
    SamplingParams,
    Text,
    Tokens,
)


@dataclass(frozen=True, slots=True)
class Plan:
    """A gen's options over the defaults ``base``, checked against the backend behind ``info``."""

    base: Options
    info: ModelInfo
    sampling: SamplingParams
    logprobs: LogprobParams | None
    with_text: bool


def plan(node: Gen, base: Options, info: ModelInfo) -> Plan:
    """Remembered on the node. Raises InvalidRequestError and UnsupportedError naming the argument."""
    known = node.plan
    if known is not None and known.base is base and known.info is info:
        return known
    options = base.over(node.given)
    logprobs = options.logprobs.params()
    check(node, options.sampling, logprobs, info)
    node.plan = Plan(base, info, options.sampling, logprobs, bool(options.logprobs.return_text_in_logprobs))
    return node.plan


def check(node: Gen, sampling: SamplingParams, logprobs: LogprobParams | None, info: ModelInfo) -> None:
    """Raises UnsupportedError where the backend lacks what ``node`` needs."""
    can = info.capabilities
    if node.constraint is not None and node.constraint.kind not in can.constraints:
        raise lacks(node, node.argument, info, f"constraints of kind {node.constraint.kind!r}", can.constraints)
    if logprobs is not None and not can.logprobs:
        raise lacks(node, "return_logprob", info, "logprobs")
    if logprobs is not None and logprobs.prompt_start is not None and not can.prompt_logprobs:
        raise lacks(node, "logprob_start_len", info, "logprobs of the prompt")
    if sampling.n > 1 and not can.n:
        raise lacks(node, "n", info, "several samples per request")
    if can.sampling:
        for name in changed(sampling) - can.sampling - {"n", "max_new_tokens"}:
            raise lacks(node, name, info, f"the sampling option {name}", can.sampling)


def changed(sampling: SamplingParams) -> set[str]:
    """Names of the fields that differ from their defaults."""
    return {f.name for f in fields(SamplingParams) if getattr(sampling, f.name) != getattr(_DEFAULT, f.name)}


_DEFAULT = SamplingParams()


def lacks(node: Gen, argument: str, info: ModelInfo, what: str, has: frozenset[str] = frozenset()) -> UnsupportedError:
    name = "" if node.name is None else repr(node.name)
    offers = f" (it has: {', '.join(sorted(has))})" if has else ""
    return UnsupportedError(
        f"gen({name}, {argument}=...): the backend of model {info.name!r} has no {what}{offers}", param=argument
    )


def sendable(prompt: Prompt, info: ModelInfo) -> Prompt:
    """The prompt as this backend takes it: never without a segment, and in text where it takes no token ids."""
    if not prompt:
        return (Text(""),)
    if info.capabilities.token_prompts:
        return prompt
    return tuple(Text(s.text) if isinstance(s, Tokens) else s for s in prompt)
