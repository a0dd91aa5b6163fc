"""Memory that another process maps by a ticket, and what is refused."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pslite.memory.segment import (
    HEADER_BYTES,
    NONCE_BYTES,
    PAGE_BYTES,
    Segment,
    Ticket,
    keep_values,
    map_copy_on_write,
    map_segment,
    private_segment,
    shared_segment,
)

needs_memfd = pytest.mark.skipif(
    not hasattr(os, "memfd_create") or not Path("/proc/self/fd").exists(), reason="no memfd here"
)
pytestmark = needs_memfd

ROOT = Path(__file__).resolve().parents[4]
SIZE = 3 * PAGE_BYTES

OWNER = """
import sys
from pslite.memory.segment import shared_segment
segment = shared_segment(12288)
segment.memory[4096:4101] = b"first"
print(segment.ticket.fd, segment.ticket.nbytes, segment.ticket.nonce.hex(), flush=True)
for line in sys.stdin:
    segment.memory[4096:4101] = line.strip().encode()
    print("done", flush=True)
"""


class Owner:
    """Another process with a segment."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", OWNER],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        fd, nbytes, nonce = self._line().split()
        self.pid = self.process.pid
        self.ticket = Ticket(int(fd), int(nbytes), bytes.fromhex(nonce))

    def write(self, text: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()
        assert self._line() == "done"

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture(scope="module")
def owner() -> Iterator[Owner]:
    found = Owner()
    yield found
    found.end()


def mine() -> tuple[Segment, Ticket]:
    segment = shared_segment(SIZE)
    assert segment.ticket is not None
    return segment, segment.ticket


def test_another_process_sees_what_the_owner_writes_and_when_he_writes_it(owner: Owner) -> None:
    window = map_segment(owner.pid, owner.ticket)
    owner.write("again")
    assert bytes(window[4096:4101]) == b"again"
    owner.write("third")
    assert bytes(window[4096:4101]) == b"third"
    assert len(window) == owner.ticket.nbytes == SIZE


def test_a_reader_cannot_write(owner: Owner) -> None:
    window = map_segment(owner.pid, owner.ticket)
    assert window.readonly
    array = np.frombuffer(window, np.uint8)
    assert not array.flags.writeable
    with pytest.raises(TypeError):
        window[4096:4101] = b"wrong"
    with pytest.raises(ValueError, match="WRITEABLE"):
        array.setflags(write=True)


def test_a_second_mapping_follows_the_owner_until_its_values_are_kept(owner: Owner) -> None:
    owner.write("first")
    memory = map_copy_on_write(owner.pid, owner.ticket, 4090, 20)
    assert bytes(memory[6:11]) == b"first"
    owner.write("again")
    assert bytes(memory[6:11]) == b"again"
    keep_values(memory)
    owner.write("third")
    assert bytes(memory[6:11]) == b"again"
    assert bytes(map_segment(owner.pid, owner.ticket)[4096:4101]) == b"third"


def test_what_is_written_to_a_second_mapping_stays_there(owner: Owner) -> None:
    memory = map_copy_on_write(owner.pid, owner.ticket, 4096, 5)
    memory[:] = np.frombuffer(b"wrong", np.uint8)
    assert bytes(map_segment(owner.pid, owner.ticket)[4096:4101]) != b"wrong"


def test_a_second_mapping_keeps_no_descriptor_and_goes_with_its_last_reference() -> None:
    segment, ticket = mine()
    held = len(os.listdir("/proc/self/fd"))
    mapped = Path("/proc/self/maps").read_text().count("/memfd:pslite")
    memories = [map_copy_on_write(os.getpid(), ticket, 0, SIZE) for _ in range(5)]
    assert len(os.listdir("/proc/self/fd")) == held
    part = memories.pop()[3:5]
    del memories
    assert Path("/proc/self/maps").read_text().count("/memfd:pslite") == mapped + 1
    del part
    assert Path("/proc/self/maps").read_text().count("/memfd:pslite") == mapped
    del segment


def test_a_mapping_that_the_system_refuses_is_an_error() -> None:
    segment, ticket = mine()
    with pytest.raises(OSError, match=r"Cannot allocate memory|Invalid argument"):
        map_copy_on_write(os.getpid(), ticket, 0, 1 << 60)
    del segment


def test_what_a_reader_still_refers_to_outlives_the_owner() -> None:
    """Killed in the middle; nobody is told, and no signal comes of reading on."""
    owner = Owner()
    try:
        piece = map_segment(owner.pid, owner.ticket)[4096:4101]
        owner.process.send_signal(signal.SIGKILL)
        owner.process.wait()
        assert bytes(piece) == b"first"
        with pytest.raises(OSError, match=f"/proc/{owner.pid}"):
            map_segment(owner.pid, owner.ticket)
    finally:
        owner.end()


def test_a_process_maps_its_own_segments_too() -> None:
    segment, ticket = mine()
    window = map_segment(os.getpid(), ticket)
    segment.memory[HEADER_BYTES : HEADER_BYTES + 4] = b"here"
    assert bytes(window[HEADER_BYTES : HEADER_BYTES + 4]) == b"here"
    assert bytes(window[:NONCE_BYTES]) == ticket.nonce


def test_two_segments_have_nonces_of_their_own() -> None:
    (one, first), (two, second) = mine(), mine()
    assert first.nonce != second.nonce
    assert len(first.nonce) == NONCE_BYTES
    assert one.address != two.address


# -- what is refused ----------------------------------------------------------------------


def bad_tickets() -> dict[str, tuple[Callable[[Ticket], Ticket], str]]:
    return {
        "another nonce": (lambda t: t._replace(nonce=b"\1" * NONCE_BYTES), "its nonce differs"),
        "a short nonce": (lambda t: t._replace(nonce=t.nonce[:-1]), "its nonce differs"),
        "no nonce": (lambda t: t._replace(nonce=b""), "its nonce differs"),
        "larger": (lambda t: t._replace(nbytes=t.nbytes + PAGE_BYTES), "must have"),
        "smaller": (lambda t: t._replace(nbytes=t.nbytes - PAGE_BYTES), "must have"),
        "no size": (lambda t: t._replace(nbytes=0), "must have"),
        "a huge size": (lambda t: t._replace(nbytes=1 << 62), "must have"),
        "standard input": (lambda t: t._replace(fd=0), "is not a shared memory segment"),
        "not open": (lambda t: t._replace(fd=999), "No such file"),
    }


@pytest.mark.parametrize("name", bad_tickets())
def test_a_ticket_that_does_not_fit_is_refused_with_a_sentence(owner: Owner, name: str) -> None:
    change, sentence = bad_tickets()[name]
    with pytest.raises(OSError, match=sentence):
        map_segment(owner.pid, change(owner.ticket))


@pytest.mark.parametrize("pid", [0, 2**31 - 1, 2**62])
def test_a_process_that_is_not_there_is_refused(owner: Owner, pid: int) -> None:
    with pytest.raises(OSError, match="No such file"):
        map_segment(pid, owner.ticket)


def test_a_pid_that_means_another_process_here_leads_to_no_memory(owner: Owner) -> None:
    """As where two containers have process ids of their own."""
    _segment, ticket = mine()
    with pytest.raises(OSError, match="its nonce differs"):
        map_segment(os.getpid(), owner.ticket._replace(fd=ticket.fd))


def a_file(path: Path, content: bytes) -> int:
    path.write_bytes(content)
    return os.open(path, os.O_RDWR)


def test_a_file_is_no_segment_whatever_is_in_it(tmp_path: Path) -> None:
    """It could shrink under its reader."""
    segment, ticket = mine()
    for name in ("file", "memfd:pslite", "memfd:pslite (deleted)"):
        fd = a_file(tmp_path / name, bytes(segment.memory))
        try:
            with pytest.raises(OSError, match="is not a shared memory segment"):
                map_segment(os.getpid(), ticket._replace(fd=fd))
        finally:
            os.close(fd)


@pytest.mark.parametrize(
    ("name", "may_seal", "sentence"),
    [
        ("pslite", True, "sealed size"),
        ("pslite", False, "sealed size"),
        ("other", True, "is not a shared memory segment"),
    ],
)
def test_a_memfd_that_may_shrink_or_has_another_name_is_refused(
    name: str, may_seal: bool, sentence: str
) -> None:
    segment, ticket = mine()
    fd = os.memfd_create(name, os.MFD_ALLOW_SEALING if may_seal else 0)
    os.write(fd, bytes(segment.memory))
    try:
        with pytest.raises(OSError, match=sentence):
            map_segment(os.getpid(), ticket._replace(fd=fd))
    finally:
        os.close(fd)


def test_not_even_its_owner_can_shrink_or_grow_a_segment() -> None:
    segment, ticket = mine()
    for nbytes in (0, PAGE_BYTES, 2 * SIZE):
        with pytest.raises(PermissionError):
            os.ftruncate(ticket.fd, nbytes)
    assert os.fstat(ticket.fd).st_size == segment.nbytes == SIZE


def test_whoever_opens_a_segment_of_the_same_user_may_only_read() -> None:
    """Root may do anything; the mode says it for everybody else."""
    _segment, ticket = mine()
    assert os.fstat(ticket.fd).st_mode & 0o777 == 0o400


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user, which root can")
def test_another_user_is_refused() -> None:
    _segment, ticket = mine()
    program = (
        "import os, sys\n"
        "from pslite.memory.segment import Ticket, map_segment\n"
        "os.setgid(65534), os.setuid(65534)\n"
        "try:\n"
        "    map_segment(int(sys.argv[1]), Ticket(int(sys.argv[2]), int(sys.argv[3]), b''))\n"
        "except OSError as error:\n"
        "    print(type(error).__name__, flush=True)\n"
        "os._exit(0)\n"  # without what measures coverage: it cannot write as that user
    )
    arguments = [str(os.getpid()), str(ticket.fd), str(ticket.nbytes)]
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("PermissionError\n", "")


def test_when_it_cannot_be_made_nothing_stays_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(28, "No space left on device")

    before = os.listdir("/proc/self/fd")
    monkeypatch.setattr(os, "posix_fallocate", no_room)
    with pytest.raises(OSError, match="No space left"):
        shared_segment(SIZE)
    assert os.listdir("/proc/self/fd") == before


def test_refusals_leave_nothing_open(owner: Owner) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for change, _ in bad_tickets().values():
        with pytest.raises(OSError, match=r"."):
            map_segment(owner.pid, change(owner.ticket))
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("make", [private_segment, shared_segment])
def test_a_segment_has_whole_pages(make: Callable[[int], Any]) -> None:
    for nbytes, expected in ((1, PAGE_BYTES), (PAGE_BYTES, PAGE_BYTES), (5000, 2 * PAGE_BYTES)):
        segment = make(nbytes)
        assert segment.nbytes == expected
        assert segment.address % PAGE_BYTES == 0
    assert private_segment(5000).ticket is None
