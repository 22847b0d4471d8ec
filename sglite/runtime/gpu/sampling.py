"""From a step's SampleRows to the tensors that ``kernels.sampling`` takes, in one upload; and its answer as Choices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sglite.kernels.sampling import NOT_FINITE, OK, Edits, SampleRows, unpacked
from sglite.runtime.gpu.device import Array, ints
from sglite.runtime.sampler import MIN_LOGPROB, BadLogitsError, Choice, SampleRow, row_key

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Asked:
    """What a step's rows ask of the sampler, still on the host. ``flat`` holds all of it, as ``tensors`` reads it."""

    flat: npt.NDArray[np.int32]
    rows: int
    edits: int
    words: int
    """Of a row's mask; 0: there is none."""
    filtered: bool
    logprobs: bool

    def tensors(self, flat: Tensor) -> tuple[SampleRows, Edits | None, Tensor | None]:
        n, e = self.rows, self.edits
        key, temperature, top_k, top_p, min_p, where, how, mask = torch.split(
            flat, [2 * n, n, n, n, n, 2 * e, 2 * e, n * self.words]
        )
        rows = SampleRows(key.view(torch.int64), as_floats(temperature), top_k, as_floats(top_p), as_floats(min_p))
        edits = Edits(where.view(2, e), as_floats(how).view(2, e)) if e else None
        return rows, edits, mask.view(n, self.words) if self.words else None


def as_floats(words: Tensor) -> Tensor:
    return words.view(torch.float32)


def asked(rows: Sequence[SampleRow], vocabulary: int, mask: npt.NDArray[np.int32] | None) -> Asked:
    params = [row.params for row in rows]
    keys = np.array([row_key(row.seed, row.sample, row.position) for row in rows], dtype=np.uint64)
    temperature, top_p, min_p = (
        np.array([getattr(p, name) for p in params], dtype=np.float32) for name in ("temperature", "top_p", "min_p")
    )
    top_k = np.array([vocabulary if p.top_k == -1 else min(p.top_k, vocabulary) for p in params], dtype=np.int32)
    where, how = _edits(rows)
    masks = np.empty(0, dtype=np.int32) if mask is None else mask
    drawn = (temperature > 0) & (top_k > 1)
    return Asked(
        flat=ints(keys, temperature, top_k, top_p, min_p, where, how, masks),
        rows=len(rows),
        edits=where.shape[1],
        words=0 if mask is None else mask.shape[1],
        filtered=bool((drawn & ((top_k < vocabulary) | (top_p < 1) | (min_p > 0))).any()),
        logprobs=any(row.top_logprobs is not None for row in rows),
    )


def _edits(rows: Sequence[SampleRow]) -> tuple[npt.NDArray[np.int32], Floats]:
    """Arrays of ``Edits``: where int32 [2, E], how fp32 [2, E]."""
    wheres, hows = [np.empty((2, 0), dtype=np.int32)], [np.empty((2, 0), dtype=np.float32)]
    for i, row in enumerate(rows):
        if not _edited(row):
            continue
        tokens, how = _row_edits(row)
        wheres.append(np.stack([np.full(len(tokens), i), tokens]).astype(np.int32))
        hows.append(how)
    return np.concatenate(wheres, axis=1), np.concatenate(hows, axis=1)


def _edited(row: SampleRow) -> bool:
    """Most rows are not, and there may be hundreds a step."""
    params = row.params
    penalised = (params.frequency_penalty or params.presence_penalty) and row.output_counts
    repeated = params.repetition_penalty != 1.0 and row.context_ids
    return bool(row.banned or params.logit_bias or penalised or repeated)


def _row_edits(row: SampleRow) -> tuple[npt.NDArray[np.int64], Floats]:
    """The tokens whose logits change, each once, and how: fp32 [2, n]."""
    params = row.params
    counts = row.output_counts if params.frequency_penalty or params.presence_penalty else {}
    context = row.context_ids if params.repetition_penalty != 1.0 else ()
    seen, said, biased, banned = (
        np.array([*ids], dtype=np.int64)
        for ids in (context, counts, [token for token, _ in params.logit_bias], row.banned)
    )
    tokens = np.unique(np.concatenate([seen, said, biased, banned]))
    how = np.stack([np.ones(len(tokens)), np.zeros(len(tokens))])
    how[0, np.searchsorted(tokens, seen)] = params.repetition_penalty
    times = np.array([*counts.values()], dtype=np.float64)
    how[1, np.searchsorted(tokens, said)] -= params.frequency_penalty * times + params.presence_penalty
    np.add.at(how[1], np.searchsorted(tokens, biased), [bias for _, bias in params.logit_bias])
    how[1, np.searchsorted(tokens, banned)] = -np.inf
    return tokens, how.astype(np.float32)


class Sampled:
    """A step's chosen tokens on their way to the host."""

    def __init__(self, rows: Sequence[SampleRow], answer: Callable[[], Array], top: Callable[[], Array] | None) -> None:
        self._rows = rows
        self._answer = answer
        self._top = top

    def result(self) -> list[Choice | BadLogitsError]:
        """Waits for the device. One entry per row, as ``sampler.sample`` gives them."""
        tokens, statuses, logprobs = self._answer()
        values = np.nan_to_num(logprobs.view(np.float32), nan=MIN_LOGPROB, neginf=MIN_LOGPROB)
        tops = iter([] if self._top is None else _pairs(self._top()))
        choices: list[Choice | BadLogitsError] = []
        for row, token, status, value in zip(
            self._rows, tokens.tolist(), statuses.tolist(), values.tolist(), strict=True
        ):
            top = next(tops)[: row.top_logprobs] if row.top_logprobs else ()
            choices.append(_choice(row, token, status, max(value, MIN_LOGPROB), top))
        return choices


def _choice(
    row: SampleRow, token: int, status: int, logprob: float, top: tuple[tuple[int, float], ...]
) -> Choice | BadLogitsError:
    if status != OK:
        finite = "the model's logits are not finite"
        return BadLogitsError(finite if status == NOT_FINITE else "no token is allowed here")
    return Choice(token) if row.top_logprobs is None else Choice(token, logprob, top)


def told_under(logits: Tensor, rows: Sequence[SampleRow], mask: Tensor | None) -> Tensor | None:
    """The logits under which logprobs are told, where some rows want them under the mask; else None."""
    wanting = [i for i, row in enumerate(rows) if row.constrained and row.top_logprobs is not None]
    if mask is None or not wanting:
        return None
    own = logits.clone()
    own[wanting] = own[wanting].masked_fill(~unpacked(mask[wanting], logits.shape[1]), -torch.inf)
    return own


def likeliest(logits: Tensor, rows: Sequence[SampleRow]) -> Tensor | None:
    """The likeliest tokens of the rows that want some, under these logits: int32 [n, 2, k], values as bits.

    Taken before anything changes them. None where no row asks.
    """
    wanting = [i for i, row in enumerate(rows) if row.top_logprobs]
    if not wanting:
        return None
    most = max(row.top_logprobs or 0 for row in rows)
    values, ids = torch.log_softmax(logits[wanting], dim=-1).topk(most, dim=-1)
    return torch.stack([ids.to(torch.int32), values.view(torch.int32)], dim=1)


def _pairs(top: Array) -> list[tuple[tuple[int, float], ...]]:
    values = np.maximum(top[:, 1].view(np.float32), MIN_LOGPROB)
    return [tuple(zip(ids, row, strict=True)) for ids, row in zip(top[:, 0].tolist(), values.tolist(), strict=True)]
