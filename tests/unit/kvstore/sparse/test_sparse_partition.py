"""Rows of the parts of a dense key: cut anywhere, they give what the whole key would."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore import optimizer
from kvstore.arrays.cpu.sums import Workspace
from kvstore.arrays.keys import KeySpec
from kvstore.optimizer.base import Optimizer
from kvstore.sparse.partition import Cut, PartRows, read_part, update_part
from kvstore.sparse.sums import Contribution
from kvstore.sparse.table import RowTable

NUM_ROWS = 6
WIDTHS = st.integers(1, 4)
IDS = st.lists(st.integers(0, NUM_ROWS - 1), unique=True).map(sorted)

OPTIMIZERS: dict[str, Optimizer | None] = {
    "none": None,
    "lazy": optimizer.create("sgd", learning_rate=0.1, momentum=0.9, wd=0.1),
    "all rows": optimizer.create("adam", learning_rate=0.1, lazy_update=False),
}


def cuts(num_elements: int, width: int, step: int) -> list[tuple[int, int, Cut]]:
    """Parts of ``step`` elements: from, to, and as rows."""
    stops = [*range(step, num_elements, step), num_elements]
    pairs = zip([0, *stops[:-1]], stops, strict=True)
    return [(a, b, Cut(b - a, width, a % width)) for a, b in pairs]


def rows_in(cut: Cut, start: int, ids: list[int], values: np.ndarray[Any, Any]) -> PartRows:
    """Of rows of the key those numbers that lie in a part."""
    width = cut.width
    flat = []
    mine = []
    for row, numbers in zip(ids, values, strict=True):
        low = max(start, row * width)
        high = min(start + cut.num_elements, (row + 1) * width)
        if low < high:
            mine.append(row - start // width)
            flat += numbers[low - row * width : high - row * width].tolist()
    return PartRows(np.array(mine, np.int64), np.array(flat, np.float32))


@pytest.mark.parametrize("name", OPTIMIZERS)
@given(WIDTHS, st.integers(1, 30), st.lists(st.none() | IDS, min_size=1, max_size=3))
def test_parts_are_updated_as_the_whole_key_is(
    name: str, width: int, step: int, pushed: list[list[int] | None]
) -> None:
    """None: a contribution of all elements."""
    chosen = OPTIMIZERS[name]
    random = np.random.default_rng(width)
    whole = random.normal(size=(NUM_ROWS, width)).astype("f4")
    table = RowTable(KeySpec(whole.shape, whole.dtype), is_whole=True)
    table.replace([Contribution(np.arange(NUM_ROWS), whole)], Workspace())
    weight = whole.reshape(-1).copy()
    table.set_optimizer(chosen)
    states = [] if chosen is None else list(chosen.create_state(weight))
    parts = cuts(weight.size, width, step)
    for count in (1, 2):
        values = [random.normal(size=(NUM_ROWS, width)).astype("f4") for _ in pushed]
        ids = [list(range(NUM_ROWS)) if each is None else each for each in pushed]
        pairs = list(zip(ids, values, strict=True))
        given_rows = [Contribution(np.array(i, np.int64), v[i]) for i, v in pairs]
        if chosen is None:
            table.replace(given_rows, Workspace())
        else:
            table.update(given_rows, chosen, Workspace())
        for start, stop, cut in parts:
            contributions: list[Any] = [
                v.reshape(-1)[start:stop] if each is None else rows_in(cut, start, i, v[i])
                for each, (i, v) in zip(pushed, pairs, strict=True)
            ]
            mine = [state[start:stop] for state in states]
            update_part(cut, weight[start:stop], mine, contributions, chosen, count, Workspace())
    assert weight.tobytes() == table.dense().tobytes()


@given(WIDTHS, st.integers(1, 30), IDS)
def test_rows_are_read_from_all_parts(width: int, step: int, ids: list[int]) -> None:
    whole = np.arange(NUM_ROWS * width, dtype=np.float32)
    expected = whole.reshape(NUM_ROWS, width)[ids]
    for start, stop, cut in cuts(whole.size, width, step):
        wanted = rows_in(cut, start, ids, expected)
        assert cut.elements(wanted.ids) == len(wanted.values)
        out = np.full(len(wanted.values), -1, np.float32)
        read_part(cut, whole[start:stop], wanted.ids, out)
        np.testing.assert_array_equal(out, wanted.values)


@given(st.integers(1, 40), WIDTHS, st.data())
def test_segments_cover_a_part_once(num_elements: int, width: int, data: st.DataObject) -> None:
    cut = Cut(num_elements, width, data.draw(st.integers(0, width - 1)))
    row = start = 0
    for segment in cut.segments():
        assert (segment.first, segment.start) == (row, start)
        row, start = segment.stop, start + (segment.stop - segment.first) * segment.width
    assert (row, start) == (cut.num_rows, num_elements)
