"""Fixtures of several files."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from misuse import KINDS, Shared

from pslite.collective.server_route import ServerRoute


@pytest.fixture(scope="module", params=KINDS)
def file_cluster(request: pytest.FixtureRequest) -> Iterator[Shared]:
    """One cluster of each kind for a whole file."""
    cluster = Shared(request.param)
    yield cluster
    cluster.close()


@pytest.fixture
def by_servers(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the collective calls that the servers carry out alone, from now on."""
    found: list[str] = []
    usual = ServerRoute.make

    def make(route: ServerRoute, key: Any, *arguments: Any) -> Any:
        found.append(key.name)
        return usual(route, key, *arguments)

    monkeypatch.setattr(ServerRoute, "make", make)
    return found
