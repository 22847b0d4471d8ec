"""``select``: score every choice after the prompt with what the backend offers, then let a method decide.

A choice is scored with and without a leading space, whichever way it is written, and all choices are compared in the
spelling that the model finds likelier here (behind a space: without one); so a space in front changes nothing. One
request does it where the backend scores candidates in one pass; else one scoring request per spelling; else a
``choices`` constraint decides greedily.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from sglite.errors import RequestError, UnsupportedError
from sglite.lang.choices import Row, Scored, log_sum, mean_logprob, values, with_ends
from sglite.lang.meta import entries
from sglite.lang.nodes import Select
from sglite.lang.paths import sum_over_spellings
from sglite.lang.requests import sendable
from sglite.protocol import (
    Chunk,
    Constraint,
    GenerateRequest,
    LogprobParams,
    ModelInfo,
    Prompt,
    SamplingParams,
    Text,
    prompt_text,
)

if TYPE_CHECKING:
    from sglite.lang.interpreter import Sender

_SCORE = SamplingParams(max_new_tokens=0, temperature=0.0)


@dataclass(frozen=True, slots=True)
class Decision:
    """``meta`` is for ``get_meta_info``."""

    choice: str
    meta: dict[str, Any]


async def decide(node: Select, prompt: Prompt, info: ModelInfo, send: Sender) -> Decision:
    """Raises UnsupportedError when the backend has none of the means that the method needs."""
    can = info.capabilities
    if not can.candidates and not can.prompt_logprobs:
        return await _generate(node, prompt, info, send)
    spellings = _spellings(node.choices, prompt)
    texts = tuple(dict.fromkeys((*node.choices, *(text for spelling in spellings for text in spelling))))
    known = dict(zip(texts, await _score(prompt, texts, info, send), strict=True))
    scored = _likelier_spelling(spellings, known)
    if node.method.needs_unconditional:
        scored = await _add_unconditional(scored, info, send)
    if node.method.needs_sums and can.candidates and can.token_prompts:
        scored = await _add_sums(scored, prompt, send)
    verdict = node.method.judge(scored)
    choice = node.choices[verdict.pick(node.temperature)]
    own = [known[text] for text in node.choices]
    meta = {
        "choices_method": node.method.name,
        "scores": dict(zip(node.choices, verdict.scores, strict=True)),
        "normalized_prompt_logprobs": [mean_logprob(row) for row in own],
        "input_token_logprobs": [entries(row) for row in own],
        "output_token_logprobs": [[] for _ in own],
        **verdict.details,
    }
    return Decision(choice, meta)


def _spellings(choices: tuple[str, ...], prompt: Prompt) -> list[tuple[str, ...]]:
    """All choices without a leading space, and all with one; as written when that would make two of them equal.

    Behind a space nobody writes another one: there the first spelling is the only one, and costs half as much.
    """
    bare = tuple(choice.lstrip(" ") for choice in choices)
    if len(set(bare)) < len(bare) or not all(bare):
        return [choices]
    if prompt_text(prompt[-1:]).endswith(" "):
        return [bare]
    return [bare, tuple(" " + text for text in bare)]


def _likelier_spelling(spellings: Sequence[tuple[str, ...]], known: Mapping[str, Row]) -> Scored:
    def likelihood(texts: tuple[str, ...]) -> float:
        return log_sum([math.fsum(row) for row in with_ends([known[text] for text in texts])])

    texts, *others = sorted(spellings, key=likelihood, reverse=True)
    other_texts = others[0] if others else ()
    return Scored(texts, _rows(texts, known), other_texts, _rows(other_texts, known))


def _rows(texts: tuple[str, ...], known: Mapping[str, Row]) -> tuple[Row, ...]:
    return tuple(known[text] for text in texts)


async def _add_unconditional(scored: Scored, info: ModelInfo, send: Sender) -> Scored:
    """Scores the same texts after nothing but the token that begins (or ends) a text."""
    start = info.bos_token or info.eos_token
    prompt: Prompt = (Text(start, special=True),) if start else (Text("\n"),)
    rows = await _score(prompt, scored.texts, info, send)
    aligned = tuple(_aligned(row, alone) for row, alone in zip(scored.rows, rows, strict=True))
    return replace(scored, unconditional=aligned)


def _aligned(row: Row, alone: Row) -> Row:
    """As many tokens as ``row``: where the texts are split differently, the mean of ``alone`` stands for each."""
    if len(row) == len(alone):
        return alone
    mean = sum(values(alone)) / len(row)
    return tuple(replace(token, logprob=mean) for token in row)


async def _add_sums(scored: Scored, prompt: Prompt, send: Sender) -> Scored:
    texts, rows = (*scored.texts, *scored.other_texts), (*scored.rows, *scored.others)
    usual = {text: math.fsum(values(row)) for text, row in zip(texts, rows, strict=True)}

    async def score(so_far: Prompt, texts: tuple[str, ...]) -> dict[str, Row]:
        return dict(zip(texts, await _score_candidates(so_far, texts, send), strict=True))

    sums = await sum_over_spellings(prompt, usual, score)
    return replace(
        scored,
        sums=tuple(sums[text] for text in scored.texts),
        other_sums=tuple(sums[text] for text in scored.other_texts),
    )


async def _score(prompt: Prompt, texts: tuple[str, ...], info: ModelInfo, send: Sender) -> list[Row]:
    if info.capabilities.candidates:
        return await _score_candidates(prompt, texts, send)
    return await _score_one_by_one(prompt, texts, send)


async def _score_candidates(prompt: Prompt, texts: tuple[str, ...], send: Sender) -> list[Row]:
    last = await _last(send, prompt, candidates=texts)
    rows = {score.text: score.tokens for score in last.scores}
    missing = [text for text in texts if not rows.get(text)]
    if missing:
        raise RequestError(f"the backend returned no score for the choices {missing}")
    return [rows[text] for text in texts]


async def _score_one_by_one(prompt: Prompt, texts: tuple[str, ...], send: Sender) -> list[Row]:
    bare = await _last(send, prompt, sampling=_SCORE)
    length = bare.usage.prompt_tokens if bare.usage else 0
    logprobs = LogprobParams(output=False, prompt_start=max(length - 2, 0))

    async def one(text: str) -> Row:
        last = await _last(send, (*prompt, Text(text)), sampling=_SCORE, logprobs=logprobs)
        return _tail(last, text)

    return list(await asyncio.gather(*map(one, texts)))


def _tail(last: Chunk, text: str) -> Row:
    """The tokens at the end of the prompt that spell ``text``."""
    tokens = last.prompt_logprobs
    covered = 0
    for start in range(len(tokens) - 1, -1, -1):
        covered += len(tokens[start].text)
        if covered >= len(text):
            return tokens[start:]
    raise RequestError(f"the backend returned no logprobs for the choice {text!r}")


async def _generate(node: Select, prompt: Prompt, info: ModelInfo, send: Sender) -> Decision:
    """A greedy answer under a ``choices`` constraint."""
    if not node.method.plain or node.temperature > 0 or "choices" not in info.capabilities.constraints:
        name = "" if node.name is None else repr(node.name)
        raise UnsupportedError(
            f"select({name}, choices_method={node.method.name}): the backend of model {info.name!r} can neither score "
            "candidates nor return logprobs of a prompt"
            + ("" if node.method.plain else "; token_length_normalized would need only the constraint 'choices'"),
            param="choices_method",
        )
    constraint = Constraint("choices", json.dumps(list(node.choices), ensure_ascii=False))
    sampling = SamplingParams(max_new_tokens=max(16, *(len(c.encode()) for c in node.choices)), temperature=0.0)
    chunks = await send(prompt, sampling=sampling, constraint=constraint)
    text = "".join(chunk.text for chunk in chunks)
    if text not in node.choices:
        raise RequestError(f"the backend answered {text!r}, which is none of the choices {list(node.choices)}")
    return Decision(text, {"choices_method": "constraint"})


async def _last(send: Sender, prompt: Prompt, **request: Any) -> Chunk:
    chunks = await send(prompt, **request)
    return chunks[-1]


def scoring_request(request_id: str, prompt: Prompt, info: ModelInfo, **rest: Any) -> GenerateRequest:
    rest.setdefault("sampling", _SCORE)
    return GenerateRequest(id=request_id, prompt=sendable(prompt, info), **rest)
