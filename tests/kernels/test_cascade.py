"""Finding the prefixes that rows share, and the layout that attention reads."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglite.kernels.cascade import SharedPrefix, find_shared, most_units, pack_shared, packed_size, shared_views


def table(*rows: list[int]) -> np.ndarray:
    width = max(map(len, rows))
    return np.array([row + [0] * (width - len(row)) for row in rows], dtype=np.int32)


def test_rows_with_the_same_first_pages_are_found():
    pages = table([7, 8, 9, 1], [7, 8, 9, 2], [3, 4], [7, 8, 5])
    lengths = np.array([13, 16, 8, 12])
    assert find_shared(pages, lengths, 4, least=8) == [SharedPrefix((0, 1, 3), 8)]
    assert find_shared(pages, lengths, 4, least=12) == [SharedPrefix((0, 1), 12)]
    assert find_shared(pages, lengths, 4, least=16) == []


def test_the_page_of_the_new_token_is_never_shared():
    """Both rows are 8 long, their last page would be the same one: the token of this step is still to be written."""
    assert find_shared(table([7, 8], [7, 8]), np.array([8, 8]), 4) == []  # fewer pages than the least prefix has
    assert find_shared(table([7, 8], [7, 8]), np.array([8, 8]), 4, least=8) == []
    assert find_shared(table([7, 8], [7, 8]), np.array([8, 8]), 4, least=4) == [SharedPrefix((0, 1), 4)]


def test_padding_of_a_short_row_is_not_a_page():
    assert find_shared(table([1, 0, 0], [2]), np.array([12, 2]), 4, least=8) == []


@given(st.data(), st.sampled_from([1, 2, 3, 16, 32]))
def test_every_grouping_fits_and_says_what_it_means(data, tokens):
    rows = data.draw(st.integers(1, 40))
    labels = np.array(data.draw(st.lists(st.integers(0, 6), min_size=rows, max_size=rows)))
    members = [np.flatnonzero(labels == label) for label in range(1, 7)]
    groups = [SharedPrefix(tuple(m.tolist()), 16 * (i + 1)) for i, m in enumerate(members) if len(m) > 1]
    packed = torch.from_numpy(pack_shared(groups, rows, tokens))
    assert packed.shape == (packed_size(rows, tokens),)
    views = shared_views(packed, rows, tokens)
    assert len(views.start) == most_units(rows, tokens)
    for group in groups:
        for row in group.rows:
            unit = int(views.unit[row])
            assert views.lengths[row] == views.high[unit] == group.length
            assert views.order[views.start[unit] + views.place[row]] == row
            assert int(views.row[unit]) in group.rows
            assert 0 <= views.place[row] < views.stop[unit] - views.start[unit] <= tokens
    alone = sorted(set(range(rows)) - {row for group in groups for row in group.rows})
    assert (views.unit[alone] == -1).all()
    assert (views.lengths[alone] == 0).all()


def test_overlapping_groups_are_our_mistake():
    with pytest.raises(AssertionError):
        pack_shared([SharedPrefix((0, 1), 16), SharedPrefix((1, 2), 16)], 3, 16)
