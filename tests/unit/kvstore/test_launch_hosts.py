"""The file of hosts: what is read, what is refused, and who goes where."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.launch.hosts import Host, parse_hosts, read_hosts, spread
from kvstore.launch.options import LaunchError


def test_every_form_of_a_line() -> None:
    text = """
    # comment
    node1
    node2:2222 slots=2 user=ada   # behind it
    bob@10.0.0.7  addr=192.168.20.7

    [fd00::7]:22
    fd00::8
    """
    assert parse_hosts(text, "hosts") == [
        Host("node1"),
        Host("node2", 2222, "ada", 2),
        Host("10.0.0.7", None, "bob", 1, "192.168.20.7"),
        Host("fd00::7", 22),
        Host("fd00::8"),
    ]


def test_a_host_that_is_named_twice_has_the_slots_of_both() -> None:
    assert parse_hosts("a\nb\na slots=3\na:22\n", "hosts") == [
        Host("a", slots=4),
        Host("b"),
        Host("a", 22),
    ]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("-oProxyCommand=x", "is not a host"),
        ("a b", "'b' is too much"),
        ("a slots=0", "'slots=0' is none of"),
        ("a slots=x", "'slots=x' is none of"),
        ("a port=3", "'port=3' is none of"),
        ("a addr=-x", "'addr=-x' is none of"),
        ("a user=-x", "'-x' is not the name of a user"),
        ("-x@a", "'-x' is not the name of a user"),
        ("a:0", "'0' is not a port number"),
        ("a:70000", "'70000' is not a port number"),
        ("a:x", "'x' is not a port number"),
        ("[fd00::7", "is not a host"),
        ("a;b", "is not a host"),
        ("$(b)", "is not a host"),
    ],
)
def test_what_makes_no_sense_is_named_with_its_line(line: str, complaint: str) -> None:
    with pytest.raises(LaunchError, match=r"^hosts, line 2: ") as raised:
        parse_hosts(f"good\n{line}\n", "hosts")
    assert complaint in str(raised.value)
    assert raised.value.exit_code == 2


def test_a_file_that_is_missing_or_empty_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="cannot be read: No such file or directory"):
        read_hosts(str(tmp_path / "none"))
    with pytest.raises(LaunchError, match="cannot be read: Is a directory"):
        read_hosts(str(tmp_path))
    (tmp_path / "empty").write_text("# nobody\n")
    with pytest.raises(LaunchError, match="names no host"):
        read_hosts(str(tmp_path / "empty"))
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(LaunchError, match="is no text"):
        read_hosts(str(tmp_path / "binary"))


def test_workers_go_round_the_hosts_that_have_slots_and_servers_round_all() -> None:
    hosts = [Host("a", slots=1), Host("b", slots=3), Host("c", slots=2)]
    assert spread(hosts, 4, 6) == [
        *[("server", rank, host) for rank, host in enumerate([0, 1, 2, 0])],
        *[("worker", rank, host) for rank, host in enumerate([0, 1, 2, 1, 2, 1])],
    ]


def test_fewer_slots_than_workers_are_an_error() -> None:
    with pytest.raises(LaunchError, match=r"2 slots on 2 host\(s\), and 3 workers") as raised:
        spread([Host("a"), Host("b")], 1, 3)
    assert raised.value.exit_code == 2
