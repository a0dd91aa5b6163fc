"""The launcher ``mpi`` with real mpiruns, Open MPI's and MPICH's, over ssh to two hosts."""

from __future__ import annotations

import importlib.util
import os
import runpy
import signal
import subprocess
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from common import JOB_S, ROOT, ROUND, SENTENCE_S, STAY, EveryLauncher, Launcher, python, two_lines
from services.mpi import Mpi
from services.sshd import SshHosts


@pytest.fixture
def launcher(mpi: Mpi, ssh_hosts: SshHosts, tmp_path: Path) -> Launcher:
    hostfile = ssh_hosts.write_hostfile(tmp_path / "hosts")
    return Launcher(
        own=["--launcher", "mpi", "-H", str(hostfile)],
        hosts=ssh_hosts.names,
        processes=ssh_hosts.processes,
        environment=mpi.environment_for(ssh_hosts),
    )


class TestMpi(EveryLauncher):
    pass


def with_hosts(launcher: Launcher, path: Path, *lines: str) -> Launcher:
    path.write_text("".join(f"{line}\n" for line in lines))
    return replace(launcher, own=["--launcher", "mpi", "-H", str(path)])


def test_each_host_gets_a_worker(launcher: Launcher) -> None:
    done = launcher.run("-n", "2", "-s", "1", *python(ROUND))
    assert done.returncode == 0, done.stderr
    for rank, host in enumerate(launcher.hosts):
        assert f"[worker {rank}@{host}] sum 3.0 on {host}" in done.stdout


def test_slots_put_both_workers_on_one_host(
    launcher: Launcher, ssh_hosts: SshHosts, mpi: Mpi, tmp_path: Path
) -> None:
    slots = " slots=2" if mpi.kind == "openmpi" else ":2"  # as each writes it
    one = with_hosts(launcher, tmp_path / "one", f"{ssh_hosts.addresses[0]}{slots}")
    done = one.run("-n", "2", "-s", "1", *python(ROUND))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"sum 3.0 on {ssh_hosts.names[0]}") == 2


def test_without_a_hosts_file_all_run_on_this_machine(mpi: Mpi) -> None:
    here = Launcher(["--launcher", "mpi"], (), list, mpi.environment)
    done = here.run("-n", "2", "-s", "2", *python(ROUND))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("sum 3.0") == 2


@pytest.mark.parametrize(
    ("host", "sentence"),
    [
        ("asks_password", "asks for a password"),
        ("unknown_key", "is not known to this machine"),
        ("unknown_name", "does not resolve"),
    ],
)
def test_a_host_that_cannot_be_reached_is_a_sentence(
    launcher: Launcher, ssh_hosts: SshHosts, tmp_path: Path, host: str, sentence: str
) -> None:
    name = getattr(ssh_hosts, host)
    wrong = with_hosts(launcher, tmp_path / "wrong", ssh_hosts.addresses[0], name)
    began = time.monotonic()
    done = wrong.run("-n", "2", "-s", "1", "true")
    assert time.monotonic() - began < SENTENCE_S
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert line.startswith("[launcher] ")
    assert sentence in line
    assert launcher.nothing_runs()


@pytest.mark.parametrize(
    ("lines", "words", "sentence"),
    [
        (None, [], "cannot read the hosts file"),
        (["one"], [], "2 workers need 2 slots, but"),
        (["ann@one", "two"], [], "user= works only with --launcher ssh"),
    ],
)
def test_hosts_that_are_no_good_are_a_sentence(
    launcher: Launcher, tmp_path: Path, lines: list[str] | None, words: list[str], sentence: str
) -> None:
    path = tmp_path / "some"
    wrong = replace(launcher, own=["--launcher", "mpi", "-H", str(path)])
    if lines is not None:
        wrong = with_hosts(launcher, path, *lines)
    done = wrong.run("-n", "2", "-s", "1", *words, "true")
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert sentence in line


def test_without_mpirun_it_says_what_to_install(mpi: Mpi, tmp_path: Path) -> None:
    nowhere = Launcher(["--launcher", "mpi"], (), list, {"PATH": str(tmp_path)})
    done = nowhere.run("-n", "2", "true")
    assert done.returncode == 1
    assert "there is no program 'mpirun' here: install Open MPI or MPICH" in done.stderr


def test_processes_that_mpirun_loses_are_named(launcher: Launcher, ssh_hosts: SshHosts) -> None:
    with launcher.start("-n", "2", "-s", "1", *python(STAY)) as job:
        try:
            two_lines(job)
            here = ssh_hosts.network.hosts[1].processes()
            [agent, *_] = [pid for pid, words in here.items() if "agent.py" in words]
            began = time.monotonic()
            os.kill(agent, signal.SIGKILL)
            assert job.stderr is not None
            said = job.stderr.read()
            code = job.wait(SENTENCE_S)
        finally:
            job.kill()
    assert code != 0
    assert f"{ssh_hosts.names[1]} was lost" in said
    assert time.monotonic() - began < SENTENCE_S
    assert launcher.nothing_runs()


# -- scripts for PyTorch's mpi, which mpirun starts and no launcher of ours ----------------------

PTDIST = """
import torch, torch.distributed as dist
dist.init_process_group(backend="mpi")
rank, size = dist.get_rank(), dist.get_world_size()
tensor, ranks = torch.zeros(1), torch.tensor([float(rank)])
if rank == 0:
    dist.send(tensor=tensor + 1, dst=1)
elif rank == 1:
    dist.recv(tensor=tensor, src=0)
dist.all_reduce(ranks)
print(f"rank {rank} of {size} has {tensor[0]} and {ranks[0]}\\n", end="", flush=True)
"""
needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs PyTorch")


def start(mpi: Mpi, environ: dict[str, str], *words: str) -> subprocess.Popen[str]:
    """``mpirun WORDS``, in which PyTorch takes kvstore for mpi."""
    return subprocess.Popen(
        [mpi.mpirun, *words],
        env={**os.environ, **mpi.environment, **environ, "KVSTORE_TORCH_REPLACES": "mpi"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@needs_torch
def test_jobs_of_pytorchs_mpi_at_a_time_find_their_own_ranks(mpi: Mpi, tmp_path: Path) -> None:
    sizes = (2, 3)
    with ExitStack() as stack:
        jobs = []
        for size in sizes:
            # Two mpirun of Open MPI may fail as both make the directory of their sessions.
            own = tmp_path / f"sessions-{size}"
            own.mkdir()
            environ = {"TMPDIR": str(tmp_path), "OMPI_MCA_orte_tmpdir_base": str(own)}
            job = start(mpi, environ, "-n", str(size), *python(PTDIST))
            jobs.append(stack.enter_context(job))
            stack.callback(job.kill)
        for size, job in zip(sizes, jobs, strict=True):
            said, errors = job.communicate(timeout=JOB_S)
            assert job.returncode == 0, errors
            found = [f"rank {rank} of {size} has {float(rank == 1)} and " for rank in range(size)]
            total = float(sum(range(size)))
            assert sorted(said.splitlines()) == [f"{line}{total}" for line in found]
    assert not list(tmp_path.glob("kvmpi-*/*"))


@needs_torch
@pytest.mark.parametrize(("script", "told"), [("SEND", "SENT"), ("SUM", "ADDED")])
def test_scripts_of_guides_run_as_they_stand(
    mpi: Mpi, tmp_path: Path, script: str, told: str
) -> None:
    guides = runpy.run_path(str(ROOT / "tests" / "process" / "torch_scripts.py"))
    with start(mpi, {"TMPDIR": str(tmp_path)}, "-n", "3", *python(guides[script])) as job:
        said, errors = job.communicate(timeout=JOB_S)
    assert job.returncode == 0, errors
    assert sorted(said.splitlines()) == guides[told]


@needs_torch
def test_ranks_on_two_hosts_meet_where_master_addr_says_and_not_without(
    mpi: Mpi, ssh_hosts: SshHosts, tmp_path: Path
) -> None:
    environ = mpi.environment_for(ssh_hosts)
    hosts = "--host" if mpi.kind == "openmpi" else "-hosts"
    each = "--npernode" if mpi.kind == "openmpi" else "-ppn"
    words = [hosts, ",".join(ssh_hosts.addresses), "-n", "2", each, "1"]
    carried = ["KVSTORE_TORCH_REPLACES", "MASTER_ADDR", "MASTER_PORT"]
    if mpi.kind == "openmpi":
        words += [word for name in carried for word in ("-x", name)]
    address = {"MASTER_ADDR": ssh_hosts.addresses[0], "MASTER_PORT": "29511"}
    with start(mpi, {**environ, **address}, *words, *python(PTDIST)) as job:
        said, errors = job.communicate(timeout=JOB_S)
    assert job.returncode == 0, errors
    assert sorted(said.splitlines()) == [
        "rank 0 of 2 has 0.0 and 1.0",
        "rank 1 of 2 has 1.0 and 1.0",
    ]
    without = {"MASTER_ADDR": "", "MASTER_PORT": ""}
    with start(mpi, {**environ, **without}, *words, *python(PTDIST)) as job:
        _, errors = job.communicate(timeout=JOB_S)
    assert job.returncode != 0
    assert "the 2 ranks of this MPI job are on several hosts" in errors
