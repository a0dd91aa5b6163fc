"""The scheduler's socket and the terminal: the launcher's two pieces of plain I/O."""

from __future__ import annotations

import os
import socket

import pytest

from kvstore.launch.environment import listen, listening_processes
from kvstore.launch.job.terminal import Console
from kvstore.launch.options import LaunchError


def test_a_free_port_is_chosen_and_accepts_connections_at_once() -> None:
    with listen("127.0.0.1", 0) as listener:
        address = listener.getsockname()
        with socket.create_connection(address, timeout=5):
            pass


def test_a_busy_port_is_refused_with_its_number_and_its_holder() -> None:
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(LaunchError, match=f"port {port} on 127.0.0.1 is in use") as raised:
            listen("127.0.0.1", port)
        assert raised.value.exit_code == 1
        if os.path.isdir("/proc/net"):
            assert listening_processes(port) == [os.getpid()]
            assert f"by process {os.getpid()}" in str(raised.value)


def test_an_address_of_another_machine_is_refused_in_words() -> None:
    with pytest.raises(LaunchError, match=r"192\.0\.2\.1 is not an address of this machine"):
        listen("192.0.2.1", 0)


def test_a_slow_reader_does_not_block_and_gets_everything_in_the_end() -> None:
    read_fd, write_fd = os.pipe()
    try:
        console = Console(write_fd)
        data = bytes(range(256)) * 8192
        console.write(data)
        assert console.waiting
        assert console.full
        got = b""
        while len(got) < len(data):
            got += os.read(read_fd, 1 << 20)
            console.write_pending()
        assert got == data
        assert not console.waiting
    finally:
        os.close(read_fd)
        os.close(write_fd)


def test_a_reader_that_went_away_is_no_error() -> None:
    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    try:
        console = Console(write_fd)
        console.write(b"lost\n")
        console.write(b"lost\n")
        assert (console.broken, console.waiting) == (True, False)
    finally:
        os.close(write_fd)
