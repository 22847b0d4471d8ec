"""The sampler: what each parameter does to a distribution, and that randomness depends on the row alone."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch

from sglite.kernels.draws import unpack_mask
from sglite.protocol import SamplingParams
from sglite.runtime.sampler import BadLogitsError, Choice, SampleRow, logprobs_of, sample, uniform

VOCAB = 70


def row(seed: int = 0, position: int = 0, index: int = 0, **params: object) -> SampleRow:
    extra = {k: params.pop(k) for k in ("output_counts", "context_ids", "banned", "top_logprobs") if k in params}
    return SampleRow(SamplingParams(**params), seed, index, position, **extra)  # type: ignore[arg-type]


def chosen(logits: torch.Tensor, *rows: SampleRow, mask: np.ndarray | None = None) -> list[int]:
    choices = sample(logits.clone(), rows, mask)
    assert all(isinstance(c, Choice) for c in choices)
    return [c.id for c in choices]


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.randn((8, VOCAB), generator=torch.Generator().manual_seed(1)) * 3


def test_greedy_is_argmax(logits: torch.Tensor) -> None:
    assert chosen(logits, *[row(temperature=0)] * 8) == logits.argmax(-1).tolist()


def test_draws_follow_the_distribution() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.25, 0.125, 0.125]]))
    n = 4000
    counts = Counter(chosen(logits.repeat(n, 1), *[row(position=p) for p in range(n)]))
    for token, p in enumerate([0.5, 0.25, 0.125, 0.125]):
        assert abs(counts[token] / n - p) < 4 * math.sqrt(p * (1 - p) / n)


@pytest.mark.parametrize(
    ("params", "allowed"),
    [
        ({"top_k": 1}, {0}),
        ({"top_k": 2}, {0, 1}),
        ({"top_p": 0.5}, {0}),
        ({"top_p": 0.51}, {0, 1}),
        ({"min_p": 0.5}, {0, 1}),
        ({"min_p": 0.51}, {0}),
        ({"top_k": 3, "top_p": 0.8}, {0, 1}),
        ({"logit_bias": ((3, 100.0),)}, {3}),
        ({"logit_bias": ((0, -100.0),)}, {1, 2, 3}),
        ({"banned": (0, 1)}, {2, 3}),
    ],
)
def test_filters_keep_exactly(params: dict[str, object], allowed: set[int]) -> None:
    logits = torch.log(torch.tensor([[0.5, 0.25, 0.125, 0.125]]))
    assert set(chosen(logits.repeat(300, 1), *[row(position=p, **params) for p in range(300)])) == allowed


def test_top_p_beyond_the_shortlist_equals_a_full_sort() -> None:
    logits = torch.randn((1, 5000), generator=torch.Generator().manual_seed(2)) * 0.01
    order = torch.softmax(logits[0], 0).sort(descending=True)
    kept = set(order.indices[: int(((order.values.cumsum(0) - order.values) < 0.5).sum())].tolist())
    drawn = {chosen(logits, row(position=p, top_p=0.5))[0] for p in range(200)}
    assert drawn <= kept and len(drawn) > 100


def test_top_p_is_a_part_of_all_that_top_k_leaves() -> None:
    """Also of what min-p drops: three heavy tokens hold 60% of the mass, 2,997 light ones the rest."""
    weights = torch.full((1, 5000), 0.4 / 2997)
    weights[0, :3] = torch.tensor([0.3, 0.2, 0.1])
    rows = [row(position=p, top_k=3000, top_p=0.55, min_p=0.2) for p in range(200)]
    assert set(chosen(weights.log().repeat(200, 1), *rows)) == {0, 1, 2}


def test_the_same_row_draws_the_same_alone_and_in_any_batch(logits: torch.Tensor) -> None:
    rows = [
        row(seed=i, position=i * 3, temperature=1.5, top_p=0.9 if i % 2 else 1.0, top_k=-1 if i % 3 else 5)
        for i in range(8)
    ]
    together = chosen(logits, *rows)
    assert together == [chosen(logits[i : i + 1], rows[i])[0] for i in range(8)]
    assert together == chosen(logits.flip(0), *reversed(rows))[::-1]


def test_uniform_is_uniform_and_depends_on_each_part() -> None:
    values = [uniform(s, i, p) for s in (0, 1, -7, 2**62) for i in range(4) for p in range(250)]
    assert len(set(values)) == len(values) and all(0 <= v < 1 for v in values)
    assert abs(sum(values) / len(values) - 0.5) < 0.02


def test_penalties() -> None:
    logits = torch.tensor([[2.0, 1.5, -1.0]])
    counts = {0: 2, 2: 1}
    assert chosen(logits, row(temperature=0, frequency_penalty=0.5, output_counts=counts)) == [1]
    assert chosen(logits, row(temperature=0, presence_penalty=0.4, output_counts=counts)) == [0]
    assert chosen(logits, row(temperature=0, presence_penalty=0.6, output_counts=counts)) == [1]
    changed = logits.clone()
    sample(changed, [row(temperature=0, repetition_penalty=2.0, context_ids=[0, 2, 2])])
    assert changed.tolist() == [[1.0, 1.5, -2.0]]


def test_the_mask_admits_only_its_bits(logits: torch.Tensor) -> None:
    allowed = [3, 31, 32, 69]
    mask = np.zeros((1, 3), dtype=np.int32)
    for token in allowed:
        mask.view(np.uint32)[0, token // 32] |= np.uint32(1 << (token % 32))
    assert unpack_mask(mask, VOCAB, logits.device)[0].nonzero().flatten().tolist() == allowed
    rows = [row(position=p, temperature=5.0) for p in range(200)]
    drawn = chosen(logits[:1].repeat(200, 1), *rows, mask=mask.repeat(200, 0))
    assert set(drawn) <= set(allowed) and len(set(drawn)) > 1


def test_logprobs_are_the_models_own(logits: torch.Tensor) -> None:
    rows = [row(position=i, temperature=3.0, logit_bias=((5, 50.0),), top_logprobs=2) for i in range(8)]
    choices = sample(logits.clone(), rows)
    exact = torch.log_softmax(logits, -1)
    for i, choice in enumerate(choices):
        assert isinstance(choice, Choice)
        assert choice.id == 5 and choice.logprob == pytest.approx(float(exact[i, 5]))
        assert [t for t, _ in choice.top] == exact[i].topk(2).indices.tolist()


def test_logprobs_of_given_ids(logits: torch.Tensor) -> None:
    exact = torch.log_softmax(logits, -1)
    found = logprobs_of(logits, [[1, 2], [], [3], [], [], [], [], [69]], top=1)
    assert [[c.id for c in r] for r in found] == [[1, 2], [], [3], [], [], [], [], [69]]
    assert found[7][0].logprob == pytest.approx(float(exact[7, 69]))
    assert found[2][0].top[0][0] == int(exact[2].argmax())


def test_a_bad_row_is_told_apart_and_the_others_are_served(logits: torch.Tensor) -> None:
    logits[1, 4] = math.nan
    mask = np.full((8, 3), -1, dtype=np.int32)
    mask[2] = 0
    choices = sample(logits, [row(temperature=0)] * 8, mask)
    assert [i for i, c in enumerate(choices) if isinstance(c, BadLogitsError)] == [1, 2]
    with pytest.raises(BadLogitsError):
        logprobs_of(logits[1:2], [[4]], 0)
