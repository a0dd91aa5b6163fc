"""The services of the launchers' tests, each started once and only when a test asks for it.

What they are and what a test can ask of them: ``services/__init__.py``. A service that does not
start is an error of every test that wants it, never a skip.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from services.gridengine import GridEngine
from services.gridengine import gridengine as _gridengine
from services.mpi import KINDS, Mpi
from services.mpi import mpi as _mpi
from services.ray import Ray
from services.ray import growing_ray_cluster as _growing_ray_cluster
from services.ray import ray_cluster as _ray_cluster
from services.slurm import Slurm
from services.slurm import slurm as _slurm
from services.sshd import SshHosts
from services.sshd import ssh_hosts as _ssh_hosts
from services.sweeper import swept

# Starting a service belongs to the first test that wants it, and Ray's has READY_S two times.
TEST_S = 240.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TEST_S))


@pytest.fixture(scope="session")
def service_directory() -> Iterator[Path]:
    """For what services write; its path is short, as the names of sockets must be."""
    directory = Path(tempfile.mkdtemp(prefix="kvstore-services-", dir="/tmp"))
    with swept(directory):
        yield directory
        shutil.rmtree(directory)


def _directory(parent: Path, name: str) -> Path:
    directory = parent / name
    directory.mkdir()
    return directory


@pytest.fixture(scope="session")
def ssh_hosts(service_directory: Path) -> Iterator[SshHosts]:
    with _ssh_hosts(_directory(service_directory, "ssh")) as hosts:
        yield hosts


@pytest.fixture(scope="session")
def slurm(service_directory: Path) -> Iterator[Slurm]:
    with _slurm(_directory(service_directory, "slurm")) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def mpi_kinds(service_directory: Path) -> dict[str, Mpi]:
    parent = _directory(service_directory, "mpi")
    return {kind: _mpi(kind, _directory(parent, kind)) for kind in KINDS}


@pytest.fixture(params=KINDS)
def mpi(request: pytest.FixtureRequest, mpi_kinds: dict[str, Mpi]) -> Mpi:
    """A test that asks for it runs twice, once with each kind."""
    return mpi_kinds[request.param]


@pytest.fixture(scope="session")
def gridengine(service_directory: Path) -> Iterator[GridEngine]:
    with _gridengine(_directory(service_directory, "sge")) as cell:
        yield cell


@pytest.fixture(scope="session")
def ray_cluster(service_directory: Path) -> Iterator[Ray]:
    with _ray_cluster(_directory(service_directory, "ray")) as cluster:
        yield cluster


@pytest.fixture
def growing_ray_cluster(service_directory: Path) -> Iterator[Ray]:
    with _growing_ray_cluster(_directory(service_directory, "g")) as cluster:
        yield cluster
