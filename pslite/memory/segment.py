"""Shared-memory segments that other processes of this machine can map.

A segment is a memfd (memfd_create(2)). It has no name in a file system, so nothing remains after
the process ends, and the limit of /dev/shm does not apply. It is sealed against shrinking, so that
a reader never accesses memory that is gone (SIGBUS), and its pages are reserved when it is made. A
peer opens it as ``/proc/<pid>/fd/<fd>`` of the owner's process. The kernel allows this to processes
of the same user that see the same process ids. The nonce in the segment proves that it is the
offered one. The peer maps it read-only.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hmac
import mmap
import os
import secrets
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

PAGE_BYTES = 4096
HEADER_BYTES = PAGE_BYTES
"""The nonce is at the beginning; buffers begin at this offset."""
NONCE_BYTES = 32
_NAME = "pslite"
# From fcntl.h; Python has these names on Linux only.
_F_ADD_SEALS, _F_GET_SEALS = 1033, 1034
_F_SEAL_SEAL, _F_SEAL_SHRINK, _F_SEAL_GROW = 1, 2, 4


class Ticket(NamedTuple):
    """The data that a peer needs to map a segment; the process id is in the roster."""

    fd: int
    nbytes: int
    nonce: bytes


class Segment:
    """A piece of this process's memory; closed when nothing refers to it."""

    def __init__(self, memory: mmap.mmap, ticket: Ticket | None) -> None:
        self.memory = memory
        self.ticket = ticket
        """None for private memory."""
        view = np.frombuffer(memory, np.uint8)
        self.address: int = view.__array_interface__["data"][0]
        self.nbytes = len(view)

    def __del__(self) -> None:
        if self.ticket is not None:
            os.close(self.ticket.fd)


def private_segment(nbytes: int) -> Segment:
    """Make private memory of this process; a forked child gets a copy."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return Segment(mmap.mmap(-1, _whole_pages(nbytes), flags=flags), None)


def shared_segment(nbytes: int) -> Segment:
    """Make memory that peers can map, and reserve its pages.

    Raises:
        OSError: there is not enough memory, or this system does not have memfd.
    """
    if not hasattr(os, "memfd_create"):
        raise OSError("this system has no memfd_create")
    nbytes = _whole_pages(nbytes)
    fd = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.fchmod(fd, stat.S_IRUSR)
        os.posix_fallocate(fd, 0, nbytes)
        memory = mmap.mmap(fd, nbytes)
        fcntl.fcntl(fd, _F_ADD_SEALS, _F_SEAL_SHRINK | _F_SEAL_GROW | _F_SEAL_SEAL)
    except BaseException:
        os.close(fd)
        raise
    nonce = secrets.token_bytes(NONCE_BYTES)
    memory[:NONCE_BYTES] = nonce
    return Segment(memory, Ticket(fd, nbytes, nonce))


def map_segment(pid: int, ticket: Ticket) -> memoryview:
    """Map a peer's segment read-only; it is unmapped when nothing refers to it.

    Raises:
        OSError: it cannot be opened or does not match the ticket; the text is for a log.
    """
    with _opened(pid, ticket) as fd:
        memory = mmap.mmap(fd, ticket.nbytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    return memoryview(memory)


def map_copy_on_write(pid: int, ticket: Ticket, start: int, nbytes: int) -> Bytes:
    """Map a range of a peer's segment so that this process may write to it.

    The bytes are the peer's, also after the peer changes them. A page to which this process
    writes becomes its own, see ``keep_values``. Raises ``OSError`` as ``map_segment`` does.
    """
    first = start // mmap.PAGESIZE * mmap.PAGESIZE
    with _opened(pid, ticket) as fd:
        mapping = _Mapping(fd, first, start + nbytes - first)
    return np.asarray(mapping)[start - first :]


def keep_values(memory: Bytes) -> None:
    """Let memory from ``map_copy_on_write`` keep its present values.

    It no longer shows what the peer writes. Costs as much as a copy.
    """
    if len(memory):
        one_of_each_page = memory[::PAGE_BYTES]
        one_of_each_page[:] = one_of_each_page.copy()
        memory[-1:] = memory[-1:].copy()


def addresses(memories: Sequence[Bytes]) -> list[int]:
    """Return where each of these flat arrays begins."""
    buffers: Any = memories
    try:  # a quarter of the cost of what works for all arrays
        return list(map(ctypes.addressof, map(ctypes.c_char.from_buffer, buffers)))
    except (TypeError, ValueError):  # one of them is empty or read-only
        return [memory.__array_interface__["data"][0] for memory in memories]


def written(memories: Sequence[Bytes]) -> list[int]:
    """Return which of these, from ``map_copy_on_write``, this process has written to.

    Returns their positions. Such a page is no longer one of the file (proc(5), pagemap, bit 61).
    Where the system does not tell, the list is empty.
    """
    found = []
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as pages:
            starts = addresses(memories)
            for index, (start, memory) in enumerate(zip(starts, memories, strict=True)):
                first, last = start // mmap.PAGESIZE, (start + len(memory) - 1) // mmap.PAGESIZE
                entries = os.pread(pages.fileno(), 8 * (last + 1 - first), 8 * first)
                kinds = np.frombuffer(entries, np.uint64) >> np.uint64(61)
                if (kinds & np.uint64(5) == 4).any():  # present, and not a page of a file
                    found.append(index)
    except OSError:
        return []
    return found


class _Mapping:
    """Private memory that begins as a range of a file.

    Python's ``mmap`` would keep a descriptor open for each mapping, and a process may have
    thousands of these.
    """

    __slots__ = ("__array_interface__", "_address", "_nbytes")

    def __init__(self, fd: int, offset: int, nbytes: int) -> None:
        self._nbytes = 0
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        system = _system()
        self._address = system.mmap(None, nbytes, protection, mmap.MAP_PRIVATE, fd, offset)
        if self._address == ctypes.c_void_p(-1).value:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        self._nbytes = nbytes
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (nbytes,),
            "data": (self._address, False),
        }

    def __del__(self) -> None:
        if self._nbytes:
            _system().munmap(self._address, self._nbytes)


@functools.cache
def _system() -> ctypes.CDLL:
    """Return the C library with the types of the two functions that are called."""
    found = ctypes.CDLL(None, use_errno=True)
    size, number = ctypes.c_size_t, ctypes.c_int
    found.mmap.argtypes = [ctypes.c_void_p, size, number, number, number, ctypes.c_long]
    found.mmap.restype = ctypes.c_void_p
    found.munmap.argtypes = [ctypes.c_void_p, size]
    return found


@contextmanager
def _opened(pid: int, ticket: Ticket) -> Iterator[int]:
    """Open a peer's segment; check that it is the one of the ticket."""
    path = f"/proc/{pid}/fd/{ticket.fd}"
    if not os.readlink(path).startswith(f"/memfd:{_NAME}"):
        raise OSError(f"{path} is not a shared memory segment")
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        found = os.fstat(fd)
        is_whole = stat.S_ISREG(found.st_mode) and found.st_size == ticket.nbytes
        if not is_whole or not fcntl.fcntl(fd, _F_GET_SEALS) & _F_SEAL_SHRINK:
            raise OSError(f"{path} must have {ticket.nbytes} bytes and a sealed size")
        if not hmac.compare_digest(os.pread(fd, NONCE_BYTES, 0), ticket.nonce):
            raise OSError(f"{path} is another segment: its nonce differs")
        yield fd
    finally:
        os.close(fd)


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES
