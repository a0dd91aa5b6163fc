"""Who takes part: how each contender is started, with which settings, and what it needs.

Starts nothing itself. A contender has *variants*, settings that its makers or users recommend;
``peers.py`` tries each of them shortly before a row is measured and takes the fastest, so that
nobody is measured with a setting that happens to suit us.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.compare.jobs import (
    Process,
    Report,
    by_roles,
    launched,
    output_of,
    read_reports,
)
from benchmarks.compare.loop import Task

Settings = Mapping[str, str]


@dataclass(frozen=True)
class Variant:
    """One way to run a contender. The name is printed; an empty one says nothing."""

    name: str = ""
    settings: Settings = field(default_factory=dict)
    environment: Settings = field(default_factory=dict)
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True)
class Programs:
    """What is needed besides this interpreter; None with the reason where it is missing."""

    mxnet_python: str | None = None
    mxnet_missing: str = ""
    pslite_binary: str | None = None


Make = Callable[[Programs, Variant, Task], list[Process]]


@dataclass(frozen=True)
class Contender:
    """One who takes part.

    ``exact`` says that the order of its sums is defined, so that weights must equal NumPy's to
    the last bit; else they may differ by ``TOLERANCE``.
    """

    title: str
    make: Make
    variants: tuple[Variant, ...] = (Variant(),)
    exact: bool = False
    missing: Callable[[Programs], str | None] = lambda programs: None
    read: Callable[[Path, Task], list[Report]] = read_reports

    def processes(self, programs: Programs, variant: Variant, task: Task) -> list[Process]:
        """What to start for a task."""
        task = replace(task, settings={**task.settings, **variant.settings})
        return self.make(programs, variant, task)


TOLERANCE = 1e-5
"""Of the greatest weight: what another order of sums and fused arithmetic may change."""

# -- ours --------------------------------------------------------------------------------


def _stores(programs: Programs, variant: Variant, task: Task) -> list[Process]:
    module = "benchmarks.compare.run_stores"
    if task.store.startswith("dist"):
        return launched(module, task, variant.environment)
    return [Process((sys.executable, "-m", module, task.to_json()), variant.environment)]


def _kv(programs: Programs, variant: Variant, task: Task) -> list[Process]:
    command = (sys.executable, "-m", "benchmarks.compare.run_kv", task.to_json())
    return by_roles(command, task, variant.environment)


def _kv_first(programs: Programs, variant: Variant, task: Task) -> list[Process]:
    """One call in fresh processes, which is what ps-lite's benchmark measures of itself."""
    return _kv(programs, variant, replace(task, warmup=0, rounds=1))


def _rows(programs: Programs, variant: Variant, task: Task) -> list[Process]:
    return launched("benchmarks.compare.run_rows", task, variant.environment)


def _no_kernels(programs: Programs) -> str | None:
    if importlib.util.find_spec("kvstore.arrays.cpu._kernels") is None:
        return "the compiled kernels are not built; build them: python setup.py build_ext --inplace"
    return None


PLAIN = Variant(settings={"arrays": "plain"})
EMPTY = Variant(settings={"arrays": "empty"})
VIEWS = Variant(settings={"arrays": "views"})
TCP = Variant(environment={"PS_SHM": "0"})
NUMPY_ALONE = Variant(environment={"KVSTORE_NATIVE": "0"})
COMPILED = Variant(environment={"KVSTORE_NATIVE": "1"})

# -- MXNet -------------------------------------------------------------------------------

MXNET_VARIANTS = (
    Variant("push, pull", {"call": "push, pull"}),
    Variant("pushpull", {"call": "pushpull"}),
    # The engine has one thread for network operations by default (apache/mxnet#10631).
    Variant("pushpull, 4 engine threads", {"call": "pushpull"}, {"MXNET_CPU_WORKER_NTHREADS": "4"}),
    # What its documentation advises for small models.
    Variant("push, pull, 1 OpenMP thread", {"call": "push, pull"}, {"OMP_NUM_THREADS": "1"}),
)
# Sockets of this host instead of TCP, as ps-lite offers for jobs on one machine.
MXNET_LOCAL_VARIANTS = (
    Variant("push, pull; DMLC_LOCAL=1", {"call": "push, pull"}, {"DMLC_LOCAL": "1"}),
    Variant("pushpull; DMLC_LOCAL=1", {"call": "pushpull"}, {"DMLC_LOCAL": "1"}),
)
MXNET_LOOP_VARIANTS = (
    Variant("defaults"),
    Variant("4 engine threads", environment={"MXNET_CPU_WORKER_NTHREADS": "4"}),
    Variant("DMLC_LOCAL=1", environment={"DMLC_LOCAL": "1"}),
)
MXNET_STORE_VARIANTS = (
    Variant("push, pull", {"call": "push, pull"}),
    Variant(
        "2 reduction threads", {"call": "push, pull"}, {"MXNET_KVSTORE_REDUCTION_NTHREADS": "2"}
    ),
)
MXNET_ROWS_VARIANTS = (
    *MXNET_LOOP_VARIANTS,
    Variant("1 OpenMP thread", environment={"OMP_NUM_THREADS": "1"}),
    Variant(
        "1 OpenMP thread; DMLC_LOCAL=1", environment={"OMP_NUM_THREADS": "1", "DMLC_LOCAL": "1"}
    ),
)


def _mxnet(programs: Programs, variant: Variant, task: Task) -> list[Process]:
    name = "run_mxnet_rows" if "rows" in task.settings else "run_mxnet"
    command = (str(programs.mxnet_python), "-m", f"benchmarks.compare.{name}", task.to_json())
    if task.store.startswith("dist"):
        return by_roles(command, task, variant.environment)
    return [Process(command, variant.environment)]


def _no_mxnet(programs: Programs) -> str | None:
    return None if programs.mxnet_python else programs.mxnet_missing


# -- all-reduce --------------------------------------------------------------------------

PIECES = (
    Variant("one flat buffer", {"pieces": "flat"}),
    Variant("buckets of 25 MiB", {"pieces": "25"}),  # the default of DistributedDataParallel
    Variant("buckets of 4 MiB", {"pieces": "4"}),
    Variant("tensor by tensor", {"pieces": "singly"}),
)
SHARED_MEMORY = ("--mca", "btl", "vader,self")
TCP_ONLY = ("--mca", "btl", "tcp,self", "--mca", "btl_tcp_if_include", "lo")
RING = ("--mca", "coll_tuned_use_dynamic_rules", "1", "--mca", "coll_tuned_allreduce_algorithm")


def _mpi_variants(transport: tuple[str, ...]) -> tuple[Variant, ...]:
    """Every way to cut the model with the library's own choice of an algorithm, and the two
    algorithms for large messages (4 and 6: ring, Rabenseifner) with one way."""
    buckets = Variant("buckets of 1 MiB", {"pieces": "1"})
    own = [replace(variant, arguments=transport) for variant in (*PIECES, buckets)]
    for number, algorithm in (("4", "ring"), ("6", "Rabenseifner's")):
        name = f"buckets of 4 MiB, {algorithm} algorithm"
        own.append(Variant(name, {"pieces": "4"}, arguments=(*transport, *RING, number)))
    return tuple(own)


def _gloo(programs: Programs, variant: Variant, task: Task) -> list[Process]:
    task = replace(task, settings={**task.settings, "library": "gloo"})
    command = (sys.executable, "-m", "benchmarks.compare.run_allreduce", task.to_json())
    common = {"GLOO_SOCKET_IFNAME": "lo", **variant.environment}
    return [Process(command, {**common, "RANK": str(rank)}) for rank in range(task.workers)]


def _openmpi(programs: Programs, variant: Variant, task: Task) -> list[Process]:
    task = replace(task, settings={**task.settings, "library": "openmpi"})
    command = ["mpirun", "--oversubscribe", "--bind-to", "none", "-n", str(task.workers)]
    if os.geteuid() == 0:  # which it refuses otherwise, and containers run as root
        command.append("--allow-run-as-root")
    command += ["--mca", "pml", "ob1", *variant.arguments]
    command += [sys.executable, "-m", "benchmarks.compare.run_allreduce", task.to_json()]
    return [Process(tuple(command), variant.environment)]


def _no_gloo(programs: Programs) -> str | None:
    if importlib.util.find_spec("torch") is None:
        return (
            "PyTorch is not installed; get its build without CUDA: pip install torch --index-url "
            "https://download.pytorch.org/whl/cpu"
        )
    return None


def _no_openmpi(programs: Programs) -> str | None:
    if shutil.which("mpirun") is None:
        return "OpenMPI is not installed; on Debian and Ubuntu: apt install openmpi-bin"
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed; get it with: pip install mpi4py"
    return None


# -- ps-lite -----------------------------------------------------------------------------

PSLITE_VARIANTS = (Variant("TCP"), Variant("DMLC_LOCAL=1", environment={"DMLC_LOCAL": "1"}))


def _pslite(programs: Programs, variant: Variant, task: Task) -> list[Process]:
    return by_roles((str(programs.pslite_binary),), task, variant.environment)


def _no_pslite(programs: Programs) -> str | None:
    if programs.pslite_binary is None:
        return (
            "its benchmark is a C++ program that has to be built from its source; see "
            "benchmarks/README.md, and give the file with --pslite-binary"
        )
    if not os.access(programs.pslite_binary, os.X_OK):
        return f"{programs.pslite_binary} is no program that can be run"
    return None


def pslite_ms(output: str, keys: int) -> tuple[float, float]:
    """(push, pull) in milliseconds for so many keys, from what ps-lite's benchmark prints.

    The number of its keys is fixed in its source; for another number the time is scaled.
    Raises ValueError when there is no such line.
    """
    times = []
    for what in ("Push", "Pull"):
        found = re.search(rf"num = (\d+), {what} average time cost: ([\d.e+]+)ms", output)
        if found is None:
            raise ValueError(f"ps-lite's benchmark has printed no time of a {what.lower()}")
        times.append(float(found[2]) * keys / int(found[1]))
    return times[0], times[1]


def _read_pslite(directory: Path, task: Task) -> list[Report]:
    """A report like those of ``loop.py``. It checks nothing of what it has moved."""
    push_ms, pull_ms = pslite_ms(output_of(directory), int(task.settings["keys"]))
    return [{"times_ms": [push_ms + pull_ms], "push_ms": [push_ms], "pull_ms": [pull_ms]}]


CONTENDERS: dict[str, Contender] = {
    "ours": Contender("ours", _stores, (PLAIN,), exact=True),
    "ours-empty": Contender("ours, kv.empty()", _stores, (EMPTY,), exact=True),
    "ours-views": Contender("ours, kv.view()", _stores, (VIEWS,), exact=True),
    "ours-tcp": Contender("ours, PS_SHM=0", _stores, (TCP,), exact=True),
    "ours-local": Contender("ours", _stores, (PLAIN,), exact=True),
    "ours-kv": Contender("ours", _kv, (Variant(settings={"handle": "empty"}),), exact=True),
    "ours-kv-first": Contender(
        "ours, first call", _kv_first, (Variant(settings={"handle": "empty"}),), exact=True
    ),
    "ours-kv-sum": Contender(
        "ours, values added up", _kv, (Variant(settings={"handle": "sum"}),), exact=True
    ),
    "ours-rows": Contender(
        "ours, compiled kernels", _rows, (COMPILED,), exact=True, missing=_no_kernels
    ),
    "ours-rows-numpy": Contender("ours, NumPy alone", _rows, (NUMPY_ALONE,), exact=True),
    "mxnet": Contender(
        "MXNet 1.9.1", _mxnet, MXNET_VARIANTS + MXNET_LOCAL_VARIANTS, missing=_no_mxnet
    ),
    "mxnet-tcp": Contender("MXNet 1.9.1", _mxnet, MXNET_VARIANTS, missing=_no_mxnet),
    "mxnet-loop": Contender("MXNet 1.9.1", _mxnet, MXNET_LOOP_VARIANTS, missing=_no_mxnet),
    "mxnet-local": Contender("MXNet 1.9.1", _mxnet, MXNET_STORE_VARIANTS, missing=_no_mxnet),
    "mxnet-rows": Contender("MXNet 1.9.1", _mxnet, MXNET_ROWS_VARIANTS, missing=_no_mxnet),
    "gloo": Contender("gloo", _gloo, PIECES, missing=_no_gloo),
    "openmpi": Contender("OpenMPI", _openmpi, _mpi_variants(SHARED_MEMORY), missing=_no_openmpi),
    "openmpi-tcp": Contender(
        "OpenMPI, TCP", _openmpi, _mpi_variants(TCP_ONLY), missing=_no_openmpi
    ),
    "ps-lite": Contender(
        "ps-lite (C++)", _pslite, PSLITE_VARIANTS, missing=_no_pslite, read=_read_pslite
    ),
}
