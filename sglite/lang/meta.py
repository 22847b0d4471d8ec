"""``get_meta_info``: SGLang's dictionary, made from what the chunks brought."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from sglite.confidence import field_confidence
from sglite.lang.calls import Call
from sglite.lang.generation import Sample
from sglite.protocol import Constraint, Finish, TokenLogprob

LogprobEntry = tuple[float | None, int, str | None]


def meta_of(
    call: Call, samples: list[Sample], *, with_text: bool, sure_of: Constraint | None = None
) -> Callable[[], Any]:
    """One dictionary, or a list of them when several samples were asked for; as of when it is called. ``sure_of``: the
    confidence in each field of what the constraint made is wanted, and nothing else of its logprobs."""

    def meta() -> Any:
        if sure_of is not None:
            each = [_sure_info(call, sample, sure_of) for sample in samples]
        else:
            each = [meta_info(call, sample, with_text=with_text) for sample in samples]
        return each[0] if len(each) == 1 else each

    return meta


def _sure_info(call: Call, sample: Sample, constraint: Constraint) -> dict[str, Any]:
    """``field_confidence`` is there once the sample is finished."""
    meta = meta_info(call, replace(sample, logprobs=[]), with_text=False)
    if sample.finish is not None:
        found = field_confidence(constraint, sample.text, sample.logprobs)
        meta["field_confidence"] = [one.as_json() for one in found]
    return meta


def meta_info(call: Call, sample: Sample, *, with_text: bool) -> dict[str, Any]:
    """Counts are those so far while the sample streams. Logprob entries are (logprob, token id, text or None)."""
    usage = sample.usage
    meta: dict[str, Any] = {
        "id": call.request_id,
        "finish_reason": _finish(sample.finish, len(sample.ids)),
        "prompt_tokens": usage.prompt_tokens if usage else 0,
        "completion_tokens": usage.completion_tokens if usage else len(sample.ids),
        "cached_tokens": usage.cached_tokens if usage else 0,
        "forced_tokens": usage.forced_tokens if usage else 0,
        "e2e_latency": call.wall,
        "ttft": call.ttft,
        "output_ids": list(sample.ids),
    }
    if sample.logprobs:
        meta["output_token_logprobs"] = entries(sample.logprobs, with_text)
        meta["output_top_logprobs"] = _tops(sample.logprobs, with_text)
    if sample.prompt_logprobs:
        meta["input_token_logprobs"] = entries(sample.prompt_logprobs, with_text)
        meta["input_top_logprobs"] = _tops(sample.prompt_logprobs, with_text)
    return meta


def entries(tokens: list[TokenLogprob] | tuple[TokenLogprob, ...], with_text: bool = True) -> list[LogprobEntry]:
    return [(t.logprob, t.id, t.text if with_text else None) for t in tokens]


def _tops(tokens: list[TokenLogprob] | tuple[TokenLogprob, ...], with_text: bool) -> list[list[LogprobEntry] | None]:
    return [[(lp, id_, text if with_text else None) for id_, lp, text in t.top] or None for t in tokens]


def _finish(finish: Finish | None, length: int) -> dict[str, Any] | None:
    if finish is None:
        return None
    if finish.reason == "length":
        return {"type": "length", "length": length}
    if finish.reason == "stop":
        return {"type": "stop", "matched": finish.matched}
    return {"type": finish.reason, "message": finish.message}
