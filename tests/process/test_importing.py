"""Importing has no effect: no thread, socket, context, process, descriptor or environment read.

In a fresh interpreter that has its libraries already. How long it takes is measured by
``benchmarks/import_time.py``.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from job import ROOT, clean_environment, needs_proc

pytestmark = [pytest.mark.process, needs_proc]

WATCHED_IMPORT = """
import importlib, json, os, pkgutil, sys, threading
import msgpack, numpy, zmq
# The standard library reads the environment in places; what it reads is not the project's.
import argparse, asyncio, concurrent.futures, ctypes, difflib, fcntl, ipaddress, multiprocessing
import secrets, selectors, shutil, subprocess, sysconfig, tempfile, uuid

class Watched(type(os.environ)):
    def __getitem__(self, name):
        found["environment"].append(name)
        return super().__getitem__(name)
    def __iter__(self):
        found["environment"].append("all names")
        return super().__iter__()
    def __setitem__(self, name, text):
        found["environment"].append(f"{name} set")
        super().__setitem__(name, text)

found = {"environment": [], "events": [], "contexts": 0, "modules": []}
os.environ.__class__ = Watched

def note(event, arguments):
    if event.startswith(("socket.", "subprocess.", "os.fork", "os.exec", "os.posix_spawn")):
        found["events"].append(event)
sys.addaudithook(note)

made = zmq.Context.__init__
def noting(self, *arguments, **options):
    found["contexts"] += 1
    made(self, *arguments, **options)
zmq.Context.__init__ = noting

def descriptors():
    return sorted(os.listdir("/proc/self/fd"))

def modules_in(package):
    # PyTorch, JAX and Lightning, which these import, have effects of their own.
    frameworks = "kvstore.frameworks."
    foreign = [frameworks + name for name in ("torch", "jax", "lightning", "horovod.torch")]
    for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        if module.name not in foreign:
            yield module.name
            if module.ispkg:
                yield from modules_in(importlib.import_module(module.name))

before = descriptors()
what = sys.argv[1:]
if not what:
    for package in "pslite", "kvstore":
        loaded = importlib.import_module(package)
        what.append(package)
        what += modules_in(loaded)
for name in what:
    if not name.endswith("__main__"):
        importlib.import_module(name)
        found["modules"].append(name)
found["descriptors"] = [before, descriptors()]
found["threads"] = [thread.name for thread in threading.enumerate()]
heavy = {"cupy", "torch", "kvstore.stores.dist.store", "kvstore.server"}
found["heavy"] = sorted(heavy & set(sys.modules))
print(json.dumps(found))
"""


GUILTY = """
import os, socket, subprocess, sys, threading, zmq
os.getenv("PS_VERBOSE"), "DMLC_ROLE" in os.environ
os.environ["PS_NEW"] = "1"
kept = [socket.socket(), zmq.Context(), open(os.devnull)]
subprocess.run([sys.executable, "-c", ""], env={}, check=True)
threading.Thread(target=threading.Event().wait, args=(60,), daemon=True).start()
"""


def watch(*modules: str, path: str = "") -> dict[str, Any]:
    environment = clean_environment()
    environment["PYTHONPATH"] += f":{path}"
    run = subprocess.run(
        [sys.executable, "-c", WATCHED_IMPORT, *modules],
        env={**environment, "DMLC_ROLE": "server", "PS_VERBOSE": "2"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=55,  # it takes two seconds, unless the machine is busy
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""
    found: dict[str, Any] = json.loads(run.stdout)
    return found


def test_importing_every_module_of_the_project_has_no_effect() -> None:
    """In a process whose DMLC_ROLE says that it is a server, too."""
    found = watch()
    assert {"kvstore.stores.dist.store", "kvstore.stores.dist.node", "pslite.van.zmq.van"} <= set(
        found["modules"]
    )
    assert found["environment"] == []
    assert found["events"] == []
    assert found["contexts"] == 0
    assert found["threads"] == ["MainThread"]
    before, after = found["descriptors"]
    assert before == after


def test_importing_the_package_loads_neither_stores_for_clusters_nor_gpu_libraries() -> None:
    assert watch("kvstore")["heavy"] == []


def test_the_watch_sees_each_kind_of_effect(tmp_path: Path) -> None:
    """Else the first test could not fail."""
    (tmp_path / "guilty.py").write_text(GUILTY)
    found = watch("guilty", path=str(tmp_path))
    assert found["environment"] == ["PS_VERBOSE", "DMLC_ROLE", "PS_NEW set"]
    assert {"socket.__new__", "subprocess.Popen"} <= set(found["events"])
    assert found["contexts"] == 1
    assert len(found["threads"]) == 2
    before, after = found["descriptors"]
    assert set(before) < set(after)
