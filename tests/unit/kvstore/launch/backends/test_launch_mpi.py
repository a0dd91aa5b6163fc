"""Which mpirun it is, what it is called with, and who gets which rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.launch.backends.hosts import Host, parse_hosts
from kvstore.launch.backends.mpi import (
    MPICH,
    OPEN_MPI,
    MpiFamily,
    explain,
    hosts_file,
    kind_of,
    login_refusal,
    mpirun_argv,
    placement,
    read_mpi_hosts,
)
from kvstore.launch.options import LaunchError, parse_arguments

HOSTS = parse_hosts("one\ntwo slots=2\n", "hosts")


@pytest.mark.parametrize(
    ("version", "kind"),
    [
        ("mpirun (Open MPI) 4.1.4\n\nReport bugs to http://www.open-mpi.org/", OPEN_MPI),
        ("mpirun.openmpi (OpenRTE) 4.1.4", OPEN_MPI),
        ("mpirun (PRRTE) 3.0.2", OPEN_MPI),
        ("HYDRA build details:\n    Version:    4.0.2", MPICH),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.9", MPICH),
    ],
)
def test_the_kind_is_what_the_version_says(version: str, kind: MpiFamily) -> None:
    assert kind_of(version) is kind


@pytest.mark.parametrize("version", ["", "mpirun 1.0 by somebody\n"])
def test_another_mpirun_is_an_error(version: str) -> None:
    with pytest.raises(LaunchError, match="from neither Open MPI nor MPICH"):
        kind_of(version)


def test_ranks_go_host_by_host_the_servers_of_a_host_first() -> None:
    options = parse_arguments(["-n", "3", "-s", "2", "--launcher", "mpi", "-H", "hosts", "x"])
    members, counts = placement(options, HOSTS)
    assert members == [
        *(("server", 0), ("worker", 0)),
        *(("server", 1), ("worker", 1), ("worker", 2)),
    ]
    assert counts == [("one", 2), ("two", 3)]


def test_without_hosts_the_ranks_are_the_servers_and_then_the_workers() -> None:
    options = parse_arguments(["-n", "2", "-s", "1", "--launcher", "mpi", "x"])
    assert placement(options, []) == ([("server", 0), ("worker", 0), ("worker", 1)], [])


def test_a_host_that_nobody_is_placed_on_is_left_out() -> None:
    options = parse_arguments(["-n", "1", "-s", "1", "--launcher", "mpi", "-H", "hosts", "x"])
    assert placement(options, HOSTS)[1] == [("one", 2)]


@pytest.mark.parametrize(
    ("kind", "text"),
    [(OPEN_MPI, "one slots=2\n[::1] slots=1\n"), (MPICH, "one:2\n[::1]:1\n")],
)
def test_each_kind_has_its_own_way_to_write_hosts(kind: MpiFamily, text: str) -> None:
    assert hosts_file([("one", 2), ("::1", 1)], kind) == text


def test_the_hosts_file_may_be_written_as_for_mpirun(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("one slots=3\ntwo:4\n")
    assert [(host.name, host.slots) for host in read_mpi_hosts(str(path))] == [
        ("one", 3),
        ("two", 4),
    ]


@pytest.mark.parametrize("line", ["ann@one", "one user=ann", "one addr=10.0.0.1"])
def test_what_mpirun_does_not_know_of_hosts_is_refused(line: str, tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text(f"{line}\n")
    with pytest.raises(LaunchError, match="is for --launcher ssh"):
        read_mpi_hosts(str(path))


@pytest.mark.parametrize(
    ("kind", "first"),
    [
        (OPEN_MPI, ["mpirun", "--bind-to", "none", "--hostfile", "/job/hosts"]),
        (MPICH, ["mpirun", "-f", "/job/hosts"]),
    ],
)
def test_the_command_names_hosts_arguments_and_the_agent(kind: MpiFamily, first: list[str]) -> None:
    words = ["-n", "1", "--launcher", "mpi", "-H", "hosts", "--python", "/py"]
    options = parse_arguments([*words, "--launcher-args=-x 'A B'", "train"])
    assert mpirun_argv(options, kind, 2, Path("/job")) == [
        *first,
        *("-x", "A B", "-n", "2", "/py", "/job/agent.py"),
    ]


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("ssh: Could not resolve hostname one: Name or service not known", "one does not resolve"),
        ("root@two: Permission denied (publickey,password).", "two asks for a password"),
        ("Host key verification failed.", "a host of the job is not known to this machine"),
        ("ssh: connect to host one port 22: Connection refused", "one refuses the connection"),
    ],
)
def test_a_login_that_fails_is_a_sentence_at_once(line: str, sentence: str) -> None:
    found = login_refusal(line, HOSTS)
    assert found is not None and found.startswith(sentence)


@pytest.mark.parametrize("line", ["hello", "A process or daemon was unable to connect", "one"])
def test_other_lines_of_mpirun_end_nothing(line: str) -> None:
    assert login_refusal(line, HOSTS) is None


def test_a_name_within_a_word_is_no_host() -> None:
    found = login_refusal("ssh: Could not resolve hostname b: no such name", [Host("a"), Host("b")])
    assert found is None or found.startswith("b ")


def test_an_early_end_shows_what_was_said() -> None:
    assert explain([], 3) == "mpirun ended (exit code 3) before all processes had started"
    found = explain(["There are not enough slots", "   Either request fewer"], -9)
    assert "(killed by signal 9)" in found
    assert found.endswith("it said:\n  There are not enough slots\n  Either request fewer")
