"""Saves that are killed at each of their steps leave a checkpoint, and nothing for ever."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = r"""
import os, pathlib, sys
import numpy as np
import kvstore

directory, states = pathlib.Path(sys.argv[1], "saved"), pathlib.Path(sys.argv[1], "adam.states")
#: What changes files, and flock, which comes after a file was made.
STEPS = {"flock", "pwrite", "write", "truncate", "replace", "unlink", "mkdir"}
os.fsync = lambda number: None  # a process is killed here, not the machine


def save(value):
    kv = kvstore.create("local")
    kv.set_optimizer(kvstore.optimizer.create("sgd" if value % 2 else "adam"))
    kv.init(["a", "b"], [np.full(5, value, np.float32), np.full(3, value, np.float32)])
    kv.save_checkpoint(directory)
    kv.save_optimizer_states(states, dump_optimizer=True)


def killed_at(step, value):
    left = step

    def count(frame, event, argument):
        nonlocal left
        if event == "c_call" and argument.__name__ in STEPS:
            left -= 1
            if left < 0:
                os._exit(9)

    child = os.fork()
    if not child:
        sys.setprofile(count)
        save(value)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


def found():
    kv = kvstore.create("local")
    kv.load_checkpoint(directory)
    a, b = kv.pull(["a", "b"])
    name = kv.current_optimizer().name
    kv.load_optimizer_states(states)  # whichever it is, it is whole
    assert len({*a.tolist(), *b.tolist()}) == 1
    assert name == ("sgd" if a[0] % 2 else "adam"), (name, a)
    return int(a[0])


save(0)
step = value = num_old = num_new = 0
while killed_at(step, value + 1):
    seen = found()
    assert seen in (value, value + 1), (step, seen, value)
    num_old, num_new = num_old + (seen == value), num_new + (seen == value + 1)
    value += 2
    save(value)
    names = sorted(os.listdir(directory)) + sorted(os.listdir(sys.argv[1]))
    kinds = [name.partition("-")[0] for name in names]
    assert kinds == ["manifest.json", "states", "values", "adam.states", "saved"], (step, names)
    step += 1
print(num_old, num_new)
"""


def test_a_save_that_is_killed_at_any_step_leaves_one_whole_and_no_rest(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True, timeout=50
    )
    assert ended.returncode == 0, ended.stderr
    num_old, num_new = map(int, ended.stdout.split())
    assert num_old > 15 and num_new > 5
