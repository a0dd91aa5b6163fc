"""Random calls on row-sparse and dense keys of a cluster against a plain dictionary of rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from rows_model import CALLS, NUM_ROWS, Both
from workers import Workers


@pytest.fixture(params=[(1, 1), (2, 2), (2, 5)], ids=lambda pair: f"{pair}")
def workers(request: pytest.FixtureRequest) -> Iterator[Workers]:
    num_workers, num_servers = request.param
    # A dense key has several parts, whose borders lie within rows.
    with Workers("dist_sync", num_workers, num_servers, chunk_bytes=40) as workers:
        yield workers


@given(CALLS)
@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_a_cluster_holds_what_the_dictionary_does(workers: Workers, calls: list[Any]) -> None:
    stores = workers.create()
    both = Both(lambda script: workers.run(script, stores))
    for call in calls:
        both.call(*call)
    for key in both.models:
        both.pull(key, False)
        both.rows(key, [list(range(NUM_ROWS))])
    workers.run(lambda kv: kv.close(), stores)
