"""Rows are dealt out to parts, each row to one, and as many to each as can be."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvstore.sparse.partition import Stripes

COUNTS = st.integers(1, 6)


@given(st.integers(0, 50), COUNTS, st.data())
def test_every_row_has_one_place(num_rows: int, num_parts: int, data: st.DataObject) -> None:
    stripes = Stripes(num_rows, num_parts)
    some = data.draw(st.lists(st.integers(0, max(num_rows - 1, 0)), unique=True).map(sorted))
    ids = np.array(some if num_rows else [], np.int64)
    found = np.full(len(ids), -1, np.int64)
    for part, share in enumerate(stripes.split(ids)):
        assert (np.diff(share.ids) > 0).all()
        assert not len(share.ids) or share.ids[-1] < stripes.rows_of(part)
        found[share.at] = stripes.ids_of(part, share.ids)
    np.testing.assert_array_equal(found, ids)


@given(st.integers(0, 2**63), COUNTS)
def test_parts_differ_by_a_row_at_most(num_rows: int, num_parts: int) -> None:
    sizes = [Stripes(num_rows, num_parts).rows_of(part) for part in range(num_parts)]
    assert sum(sizes) == num_rows
    assert max(sizes) - min(sizes) <= 1


def test_neighbouring_rows_lie_in_different_parts() -> None:
    shares = Stripes(1000, 4).split(np.arange(100, 108))
    assert [share.ids.tolist() for share in shares] == [[25, 26]] * 4


def test_the_last_ids_there_are_stay_exact() -> None:
    last = np.array([2**63 - 2, 2**63 - 1], np.int64)
    stripes = Stripes(2**63, 3)
    found = [stripes.ids_of(part, share.ids) for part, share in enumerate(stripes.split(last))]
    assert sorted(np.concatenate(found).tolist()) == last.tolist()
