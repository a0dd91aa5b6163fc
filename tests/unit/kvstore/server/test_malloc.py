"""What malloc keeps and gives back (in a process of its own, whose malloc it changes), and when."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from kvstore.server import malloc
from kvstore.server.malloc import LateReturn

PROGRAM = """
import ctypes, threading
from kvstore.server.malloc import keep_freed_memory, return_freed_memory

def resident_mb():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) / 1024 for line in file if line.startswith("RssAnon"))

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]

def receive():
    messages = [libc.malloc(2 << 20) for _ in range(20)]
    for message in messages:
        ctypes.memset(message, 1, 2 << 20)
    for message in messages:
        libc.free(message)

keep_freed_memory()
before = resident_mb()
thread = threading.Thread(target=receive)
thread.start()
thread.join()
kept = resident_mb()
return_freed_memory()
print(round(kept - before), round(resident_mb() - before))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="what malloc does is glibc's")
def test_freed_memory_is_kept_until_it_is_given_back() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    kept, left = map(int, done.stdout.split())
    assert 36 <= kept <= 48
    assert left <= 4


def test_memory_is_given_back_once_and_only_a_while_after_it_was_asked_for_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, looks, returned = 0.0, [], []
    monkeypatch.setattr(malloc, "return_freed_memory", lambda: returned.append(now))
    late = LateReturn(lambda: now, looks.append)

    def step(at: float) -> None:
        nonlocal now
        now = at
        looks[:] = [look for look in looks if not look()]

    late.ask()
    step(0.9)
    late.ask()
    assert len(looks) == 1
    step(1.8)
    assert returned == []
    step(1.9)
    step(2.0)
    assert (returned, looks) == ([1.9], [])
    late.ask()
    step(3.0)
    assert returned == [1.9, 3.0]
