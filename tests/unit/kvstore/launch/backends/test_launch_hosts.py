"""The hosts file, and who runs on which host."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from kvstore.launch.backends.hosts import Host, read_hosts, spread
from kvstore.launch.options import LaunchError


def test_a_file_that_cannot_be_read_is_refused_in_one_sentence(tmp_path: Path) -> None:
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    expected = {
        tmp_path / "none": f"cannot read the hosts file '{tmp_path}/none': No such file",
        tmp_path: f"cannot read the hosts file '{tmp_path}': Is a directory",
        binary: f"cannot read the hosts file '{binary}': it is not text",
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


def test_a_standby_is_on_the_host_after_that_of_its_server() -> None:
    hosts = [Host("a"), Host("b")]
    assert spread(hosts, 3, 1, standbys=1)[3:] == [
        ("standby", 0, 1),
        ("standby", 1, 0),
        ("standby", 2, 1),
        ("worker", 0, 0),
    ]
    assert spread(hosts[:1], 1, 1, standbys=1)[1] == ("standby", 0, 0)


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
        "3 workers need 3 slots, but hosts has 2 slots on 2 hosts; add hosts, or slots=N after "
        "a host"
    )
    with pytest.raises(
        LaunchError, match=r"2 workers need 2 slots, but my\.txt has 1 slot on 1 host"
    ):
        spread([Host("a")], 1, 2, "my.txt")


def test_a_label_says_how_to_log_in() -> None:
    assert Host("a").label == "a"
    assert Host("a", user="ann").label == "ann@a"
    assert Host("::1", port=2222, user="ann").label == "ann@[::1]:2222"
