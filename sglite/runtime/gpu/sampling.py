"""From a step's SampleRows to the tensors that ``kernels.sampling`` takes, in one upload; and its answer as Choices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sglite.kernels.sampling import NOT_FINITE, OK, Chosen, Edits, SampleRows, unpacked
from sglite.runtime.gpu.device import Array, ints
from sglite.runtime.sampler import MIN_LOGPROB, BadLogitsError, Choice, SampleRow, row_key

Floats = npt.NDArray[np.float32]
Pairs = tuple[tuple[int, float], ...]
"""Tokens and their logprobs."""


class Choose(Protocol):
    """``kernels.sampling.choose`` or its fast form."""

    def __call__(
        self,
        logits: Tensor,
        rows: SampleRows,
        mask: Tensor | None,
        edits: Edits | None,
        *,
        filtered: bool = ...,
        logprobs: bool = ...,
        own: Tensor | None = ...,
    ) -> Chosen: ...


@dataclass(frozen=True, slots=True)
class Asked:
    """What a step's rows ask of the sampler, still on the host. ``flat`` holds all of it, as ``staged`` reads it."""

    flat: npt.NDArray[np.int32]
    rows: int
    edits: int
    words: int
    """Of a row's mask; 0: there is none."""
    told: int
    """Rows whose logprobs are told under the mask."""
    further: int
    """Rows that want logprobs of more tokens than the chosen one: ``top`` and ``given`` tokens of each at most."""
    top: int
    given: int
    filtered: bool
    logprobs: bool

    def staged(self, flat: Tensor) -> Staged:
        n, e = self.rows, self.edits
        sizes = [2 * n, *[n] * 5, 2 * e, 2 * e, n * self.words, self.told, self.further, self.further * self.given]
        key, slots, temperature, top_k, top_p, min_p, where, how, mask, told, rows, given = torch.split(flat, sizes)
        further = Further(rows.long(), given.view(self.further, self.given).long(), self.top)
        return Staged(
            SampleRows(key.view(torch.int64), as_floats(temperature), top_k, as_floats(top_p), as_floats(min_p)),
            slots.long(),
            Edits(where.view(2, e), as_floats(how).view(2, e)) if e else None,
            mask.view(n, self.words) if self.words else None,
            told.long() if self.told else None,
            further if self.further else None,
        )


@dataclass(frozen=True, slots=True)
class Further:
    """Of these ``rows`` [n] the ``top`` likeliest tokens and the ``given`` [n, g] (short rows filled up), int64."""

    rows: Tensor
    given: Tensor
    top: int


@dataclass(frozen=True, slots=True)
class Staged:
    """The same on the device: views of one array, and nothing there has to come from the host again."""

    rows: SampleRows
    slots: Tensor
    """int64 [R]"""
    edits: Edits | None
    mask: Tensor | None
    told: Tensor | None
    """int64 [n]: see ``Asked.told``"""
    further: Further | None


def as_floats(words: Tensor) -> Tensor:
    return words.view(torch.float32)


def asked(
    rows: Sequence[SampleRow], vocabulary: int, slots: Sequence[int], mask: npt.NDArray[np.int32] | None
) -> Asked:
    params = [row.params for row in rows]
    keys = np.array([row_key(row.seed, row.sample, row.position) for row in rows], dtype=np.uint64)
    temperature, top_p, min_p = (
        np.array([getattr(p, name) for p in params], dtype=np.float32) for name in ("temperature", "top_p", "min_p")
    )
    top_k = np.array([vocabulary if p.top_k == -1 else min(p.top_k, vocabulary) for p in params], dtype=np.int32)
    where, how = _edits(rows)
    masks = np.empty(0, dtype=np.int32) if mask is None else mask
    drawn = (temperature > 0) & (top_k > 1)
    told = [i for i, row in enumerate(rows) if mask is not None and row.constrained and row.top_logprobs is not None]
    further, given = _further(rows)
    parts = (keys, _int32(slots), temperature, top_k, top_p, min_p, where, how, masks)
    return Asked(
        flat=ints(*parts, _int32(told), _int32(further), given),
        rows=len(rows),
        edits=where.shape[1],
        words=0 if mask is None else mask.shape[1],
        told=len(told),
        further=len(further),
        top=max([1, *(row.top_logprobs or 0 for row in rows)]),
        given=given.shape[1],
        filtered=bool((drawn & ((top_k < vocabulary) | (top_p < 1) | (min_p > 0))).any()),
        logprobs=any(row.top_logprobs is not None for row in rows),
    )


def _int32(values: Sequence[int]) -> npt.NDArray[np.int32]:
    return np.array(values, dtype=np.int32)


def _further(rows: Sequence[SampleRow]) -> tuple[list[int], npt.NDArray[np.int32]]:
    """The rows that want logprobs of more tokens than the chosen one, and those they name: int32 [n, most]."""
    wanting = [i for i, row in enumerate(rows) if row.top_logprobs is not None and (row.top_logprobs or row.given)]
    given = np.zeros((len(wanting), max([0, *(len(rows[i].given) for i in wanting)])), dtype=np.int32)
    for place, i in enumerate(wanting):
        given[place, : len(rows[i].given)] = rows[i].given
    return wanting, given


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

    def __init__(
        self, rows: Sequence[SampleRow], asks: Asked, answer: Callable[[], Array], further: Callable[[], Array] | None
    ) -> None:
        self._rows = rows
        self._top = asks.top
        self._answer = answer
        self._further = further

    def result(self) -> list[Choice | BadLogitsError]:
        """Waits for the device. One entry per row, as ``sampler.sample`` gives them."""
        tokens, statuses, logprobs = self._answer()
        values = np.nan_to_num(logprobs.view(np.float32), nan=MIN_LOGPROB, neginf=MIN_LOGPROB)
        further = iter([] if self._further is None else _pairs(self._further()))
        answers = zip(self._rows, tokens.tolist(), statuses.tolist(), values.tolist(), strict=True)
        choices: list[Choice | BadLogitsError] = []
        for row, token, status, value in answers:
            pairs = next(further) if row.top_logprobs is not None and (row.top_logprobs or row.given) else ()
            choices.append(self._choice(row, token, status, max(value, MIN_LOGPROB), pairs))
        return choices

    def _choice(self, row: SampleRow, token: int, status: int, logprob: float, pairs: Pairs) -> Choice | BadLogitsError:
        if status != OK:
            finite = "the model's logits are not finite"
            return BadLogitsError(finite if status == NOT_FINITE else "no token is allowed here")
        if row.top_logprobs is None:
            return Choice(token)
        given = pairs[self._top : self._top + len(row.given)]
        return Choice(token, logprob, pairs[: row.top_logprobs], given)


def choose_staged(logits: Tensor, asks: Asked, staged: Staged, choose: Choose) -> tuple[Chosen, Tensor | None]:
    """A token for each row of ``logits`` (changed in place), and ``further_logprobs`` where some row wants them."""
    own = _told_under(logits, staged)
    further = None if staged.further is None else further_logprobs(logits if own is None else own, staged.further)
    parts = logits, staged.rows, staged.mask, staged.edits
    return choose(*parts, filtered=asks.filtered, logprobs=asks.logprobs, own=own), further


def _told_under(logits: Tensor, staged: Staged) -> Tensor | None:
    """The logits under which logprobs are told, where some rows want them under the mask; else None."""
    if staged.told is None or staged.mask is None:
        return None
    own = logits.clone()
    own[staged.told] = own[staged.told].masked_fill(~unpacked(staged.mask[staged.told], logits.shape[1]), -torch.inf)
    return own


def further_logprobs(logits: Tensor, further: Further) -> Tensor:
    """The likeliest and the given tokens under these logits: int32 [n, 2, top + g], values as bits.

    Taken before anything changes them.
    """
    scores = torch.log_softmax(logits[further.rows], dim=-1)
    values, ids = scores.topk(further.top, dim=-1)
    values = torch.cat([values, scores.gather(1, further.given)], dim=1)
    ids = torch.cat([ids, further.given], dim=1)
    return torch.stack([ids.to(torch.int32), values.view(torch.int32)], dim=1)


def _pairs(further: Array) -> list[Pairs]:
    values = np.maximum(further[:, 1].view(np.float32), MIN_LOGPROB)
    return [tuple(zip(ids, row, strict=True)) for ids, row in zip(further[:, 0].tolist(), values.tolist(), strict=True)]
