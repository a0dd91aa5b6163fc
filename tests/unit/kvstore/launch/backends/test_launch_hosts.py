"""The hosts file, and who runs on which host."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from kvstore.launch.backends.hosts import Host, parse_hosts, read_hosts, spread
from kvstore.launch.options import LaunchError


def refused(text: str) -> str:
    with pytest.raises(LaunchError) as caught:
        parse_hosts(text, "hosts")
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("line", "host"),
    [
        ("node1", Host("node1")),
        ("172.30.0.172", Host("172.30.0.172")),
        ("node1:2222", Host("node1", port=2222)),
        ("gpu_box-7.example.org.", Host("gpu_box-7.example.org.")),
        ("ann@node1:22 slots=4", Host("node1", port=22, user="ann", slots=4)),
        ("ann@corp.example@node1", Host("node1", user="ann@corp.example")),
        (
            "  node1\tuser=ann  addr=10.0.0.7 slots=2 # the old one\r",
            Host("node1", user="ann", slots=2, address="10.0.0.7"),
        ),
        ("node1#close", Host("node1")),
        ("[::1]", Host("::1")),
        ("[2001:db8::7]:2222", Host("2001:db8::7", port=2222)),
        ("ann@[fe80::1%eth0]", Host("fe80::1%eth0", user="ann")),
        ("node1 addr=[2001:db8::7]", Host("node1", address="2001:db8::7")),
        ("node1 addr=2001:db8::7", Host("node1", address="2001:db8::7")),
        ("node1 addr=node1-fast", Host("node1", address="node1-fast")),
    ],
)
def test_a_line_names_a_host_and_what_else_is_known_of_it(line: str, host: Host) -> None:
    assert parse_hosts(line, "hosts") == [host]


def test_comments_and_blank_lines_are_skipped_and_the_order_stays() -> None:
    text = "\ufeff# two machines\n\nnode2\n   \n\t# old\nnode1 slots=2"
    assert parse_hosts(text, "hosts") == [Host("node2"), Host("node1", slots=2)]


def test_a_host_that_comes_again_adds_its_slots() -> None:
    text = "a\nb slots=2\na slots=3 addr=10.0.0.1\nb\na:22\nann@a\n"
    assert parse_hosts(text, "hosts") == [
        Host("a", slots=4, address="10.0.0.1"),
        Host("b", slots=3),
        Host("a", port=22),
        Host("a", user="ann"),
    ]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("-oProxyCommand=id", "'-oProxyCommand=id' begins with '-'"),
        ("ann@-oProxyCommand=id", "begins with '-'"),
        ("-l@node1", "'-l' is not a user's name"),
        ("@node1", "'' is not a user's name"),
        ("node1 user=", "'' is not a user's name"),
        ("node1 user=-x", "'-x' is not a user's name"),
        ("$(id)", "'$(id)' is not a host's name"),
        ("node1;id", "'node1;id' is not a host's name"),
        ("n\u00f6de", "is not a host's name"),
        (":22", "'' is not a host's name"),
        ("node1:", "the port must be a number from 1 to 65535, not ''"),
        ("node1:0", "not '0'"),
        ("node1:65536", "not '65536'"),
        ("node1:ssh", "not 'ssh'"),
        ("::1", "put an IPv6 address into brackets"),
        ("[node1]:22", "is not an IPv6 address"),
        ("[::1]22", "is not an IPv6 address"),
        ("[::1", "is not an IPv6 address"),
        ("node1 slots=0", "slots must be a number from 1 to 1000000, not '0'"),
        ("node1 slots=", "not ''"),
        ("node1 slots=-1", "not '-1'"),
        ("node1 slots=\u0663", "slots must be a number"),
        ("node1 slots=1 slots=2", "slots is given twice"),
        ("ann@node1 user=bob", "user is given twice"),
        ("node1 4", "'4' is not understood"),
        ("node1 max-slots=4", "'max-slots=4' is not understood"),
        ("node1 addr=", "addr needs an address"),
        ("node1 addr=-x", "addr needs an address"),
        ("node1 addr=10.0.0.1\nnode1 addr=10.0.0.2", "addr=10.0.0.1 in an earlier line"),
    ],
)
def test_a_mistake_is_named_with_file_and_line(line: str, complaint: str) -> None:
    message = refused(f"# first\n{line}\n")
    assert message.startswith(f"hosts, line {2 + line.count(chr(10))}: ")
    assert complaint in message


@pytest.mark.parametrize("text", ["", "\n\n", "# nobody\n"])
def test_a_file_without_hosts_is_refused(text: str) -> None:
    assert refused(text).startswith("the hosts file 'hosts' names no host: write a line for each")


def test_a_file_that_cannot_be_read_is_refused_in_one_sentence(tmp_path: Path) -> None:
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    expected = {
        tmp_path / "none": f"there is no hosts file '{tmp_path}/none'",
        tmp_path: f"cannot read the hosts file '{tmp_path}': Is a directory",
        binary: f"the hosts file '{binary}' is not text",
    }
    for path, beginning in expected.items():
        with pytest.raises(LaunchError) as caught:
            read_hosts(str(path))
        assert str(caught.value).startswith(beginning)
        assert caught.value.exit_code == 2


def test_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("a\nb slots=2\n")
    assert read_hosts(str(path)) == [Host("a"), Host("b", slots=2)]


def test_servers_and_workers_go_round_the_hosts() -> None:
    assert spread([Host("a"), Host("b")], num_servers=3, num_workers=2) == [
        ("server", 0, 0),
        ("server", 1, 1),
        ("server", 2, 0),
        ("worker", 0, 0),
        ("worker", 1, 1),
    ]


def test_a_second_worker_comes_to_a_host_when_all_have_one() -> None:
    hosts = [Host("a", slots=3), Host("b"), Host("c", slots=2)]
    placed = [place[2] for place in spread(hosts, 0, 6)]
    assert placed == [0, 1, 2, 0, 2, 0]
    assert [place[2] for place in spread(hosts, 0, 4)] == [0, 1, 2, 0]


def test_no_host_gets_more_workers_than_slots() -> None:
    hosts = [Host(str(number), slots=1 + number % 4) for number in range(50)]
    slots = sum(host.slots for host in hosts)
    placed = Counter(index for _, _, index in spread(hosts, 0, slots))
    assert placed == {index: host.slots for index, host in enumerate(hosts)}


def test_too_few_slots_are_refused_with_both_numbers() -> None:
    with pytest.raises(LaunchError) as caught:
        spread([Host("a"), Host("b")], 1, 3)
    assert caught.value.exit_code == 2
    assert str(caught.value) == (
        "hosts has 2 slots on 2 hosts, and 3 workers were asked for: "
        "add hosts, or slots=N behind a host"
    )
    with pytest.raises(LaunchError, match=r"my\.txt has 1 slot on 1 host, and 2 workers"):
        spread([Host("a")], 1, 2, "my.txt")


def test_a_label_says_how_to_log_in() -> None:
    assert Host("a").label == "a"
    assert Host("a", user="ann").label == "ann@a"
    assert Host("::1", port=2222, user="ann").label == "ann@[::1]:2222"
