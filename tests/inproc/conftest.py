"""Fixtures of several files."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from misuse import KINDS, Shared


@pytest.fixture(scope="module", params=KINDS)
def file_cluster(request: pytest.FixtureRequest) -> Iterator[Shared]:
    """One cluster of each kind for a whole file."""
    cluster = Shared(request.param)
    yield cluster
    cluster.close()
