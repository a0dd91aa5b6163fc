"""Random sequences of calls on row-sparse and dense keys against a plain dictionary of rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from rows_model import CALLS, NUM_ROWS, Both

from kvstore import create
from kvstore.sparse import table


@contextmanager
def direct_bytes(size: int) -> Iterator[None]:
    before, table.DIRECT_BYTES = table.DIRECT_BYTES, size
    try:
        yield
    finally:
        table.DIRECT_BYTES = before


@given(CALLS, st.sampled_from(["local", "device"]), st.sampled_from([0, table.DIRECT_BYTES]))
@settings(max_examples=120)
def test_a_store_holds_what_the_dictionary_does(calls: list[Any], name: str, size: int) -> None:
    with direct_bytes(size), create(name) as store:
        both = Both(lambda script: script(store))
        for call in calls:
            both.call(*call)
        for key in both.models:
            both.pull(key, False)
            both.rows(key, [list(range(NUM_ROWS))])
