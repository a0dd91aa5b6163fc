"""Importing has no effect: no thread, socket, context, process, descriptor or environment read.

In a fresh interpreter that has its libraries already. How long it takes is measured by
``benchmarks/import_time.py``.
"""

from __future__ import annotations

import subprocess
import sys

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

before = descriptors()
what = sys.argv[1:]
if not what:
    for package in "pslite", "kvstore":
        loaded = importlib.import_module(package)
        what.append(package)
        what += [m.name for m in pkgutil.walk_packages(loaded.__path__, f"{package}.")]
for name in what:
    if not name.endswith("__main__"):
        importlib.import_module(name)
        found["modules"].append(name)
found["descriptors"] = [before, descriptors()]
found["threads"] = [thread.name for thread in threading.enumerate()]
found["heavy"] = sorted({"cupy", "torch", "kvstore.dist", "kvstore.server"} & set(sys.modules))
print(json.dumps(found))
"""


def watch(*modules: str) -> dict[str, object]:
    import json

    run = subprocess.run(
        [sys.executable, "-c", WATCHED_IMPORT, *modules],
        env={**clean_environment(), "DMLC_ROLE": "server", "PS_VERBOSE": "2"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""
    found = json.loads(run.stdout)
    assert isinstance(found, dict)
    return found
