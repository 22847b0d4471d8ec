"""Whether a backend can do what a node asks, asked before anything is sent."""

from __future__ import annotations

from sglite.errors import UnsupportedError
from sglite.lang.nodes import Gen
from sglite.lang.options import Plan
from sglite.lang.options import changed as changed
from sglite.protocol import ModelInfo, Prompt, Text, Tokens

_EVERYWHERE = frozenset({"n", "max_new_tokens"})


def check(node: Gen, made: Plan, info: ModelInfo) -> None:
    """Raises UnsupportedError naming the argument that the backend cannot honour."""
    can = info.capabilities
    if node.constraint is not None and node.constraint.kind not in can.constraints:
        raise _lacks(node.argument, info, f"constraints of kind {node.constraint.kind!r}", can.constraints)
    if node.constraint is not None and node.constraint.whitespace != "spaced" and not can.json_whitespace:
        raise _lacks("json_whitespace", info, "choice of the whitespace in JSON")
    if node.field_confidence and not can.field_confidence:
        raise _lacks("field_confidence", info, "logprobs under a constraint")
    if made.logprobs is not None and not can.logprobs:
        raise _lacks("return_logprob", info, "logprobs")
    if made.logprobs is not None and made.logprobs.prompt_start is not None and not can.prompt_logprobs:
        raise _lacks("logprob_start_len", info, "logprobs of the prompt")
    if made.sampling.n > 1 and not can.n:
        raise _lacks("n", info, "several samples per request")
    for name in made.changed - can.sampling - _EVERYWHERE:
        raise _lacks(name, info, f"sampling option {name}", can.sampling)


def _lacks(argument: str, info: ModelInfo, what: str, has: frozenset[str] = frozenset()) -> UnsupportedError:
    """Which call it was is said by whoever knows its place in the program."""
    offers = f" (it has: {', '.join(sorted(has))})" if has else ""
    return UnsupportedError(
        f"{argument}=... cannot be honoured: the backend of model {info.name!r} has no {what}{offers}", param=argument
    )


def sendable(prompt: Prompt, info: ModelInfo) -> Prompt:
    """The prompt as this backend takes it: never without a segment, and in text where it takes no token ids."""
    if not prompt:
        return (Text(""),)
    if info.capabilities.token_prompts:
        return prompt
    return tuple(Text(s.text) if isinstance(s, Tokens) else s for s in prompt)
