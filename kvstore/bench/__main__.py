"""``kvstore bench``: measure the cost of an exchange on your machines.

If you run it alone, it uses the launcher to start jobs on this machine (with and without shared
memory, and with one more server) and prints the results. As the workers' command of a job, it
measures that job's cluster; if the cluster uses TCP, it also tries more connections to each server.
Each time is that of the slowest worker. There is a barrier between exchanges, and SGD with momentum
runs on the servers. Everything runs on the main thread. Read next: ``estimate.py``, which computes
costs and advice from the times.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from kvstore import optimizer
from kvstore.arrays.cpu import kernels
from kvstore.bench.estimate import (
    LARGE_BYTES,
    LIST_KEYS,
    MIDDLE_BYTES,
    MODELS,
    SMALL_BYTES,
    Alternative,
    Costs,
    Model,
    busy_share,
    costs_from,
    costs_text,
    estimate_text,
    load_text,
    model_from_shapes,
)
from kvstore.errors import ArgumentValueError
from kvstore.kvstore import create
from kvstore.launch.cli import main as launch
from kvstore.mxnet import nd
from pslite import Config, Role

if TYPE_CHECKING:
    from kvstore.stores.dist.store import DistKVStore

MIN_ROUNDS, MAX_ROUNDS = 3, 100
CASES = 10
SPREAD_CASES = ("middle", "large")
MORE_CONNECTIONS = 4
"""The number of connections to a server to try too, if there is only one and it uses TCP."""
_PROCESSORS = Path("/proc/stat")
_LOOK_S = 0.5
JOBS = 3
START_S = 1.5
"""The approximate time to start and end a job."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and return the exit code.

    ``arguments`` are the command line without the program's name (default: this process's).
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        model = _model(options)
    except ArgumentValueError as error:
        parser.error(str(error))
    config, _ = Config.from_env()
    is_alone = config.num_workers == 0
    if (is_alone or config.task_id == 0) and (sentence := kernels.why_missing()):
        print(f"note: {sentence}", file=sys.stderr)
    if is_alone and config.role == Role.WORKER.value:
        return _run_jobs(options, model, uses_shared_memory=config.shm)
    is_reported = options.report is not None  # to the process that compares whole jobs
    found = measure(options.kv_store, options.seconds, tries_connections=not is_reported)
    if found is None:
        return 0
    if is_reported:
        Path(options.report).write_text(json.dumps(found), encoding="utf-8")
    else:
        _show(found, _alternatives(found), model)
    return 0


def _costs(found: Mapping[str, Any]) -> Costs:
    return costs_from(found["setup"], found["times_ms"])


def _alternatives(found: Mapping[str, Any]) -> list[Alternative]:
    """Return the settings that were also measured within the same job."""
    if "spread" not in found:
        return []
    advice = f"set PS_CONNECTIONS={found['connections']}"
    setup = f"{found['setup']}, {found['connections']} connections to a server"
    return [Alternative(advice, costs_from(setup, {**found["times_ms"], **found["spread"]}))]


def measure(
    store_type: str, seconds: float, *, tries_connections: bool = False
) -> dict[str, Any] | None:
    """Measure the cluster that this worker is in; all workers must call it.

    Returns None on all ranks except rank 0. There, ``setup`` has a description and ``times_ms`` the
    milliseconds of each case (see ``estimate.costs_from``). With ``tries_connections``, if servers
    use TCP, ``spread`` has the cases that were timed again with ``connections`` to each server.
    """
    store, agreement = cast("DistKVStore", create(store_type)), create("dist_sync")
    agreement.init("ms", np.zeros(store.num_workers))
    if store.rank == 0:
        store.set_optimizer(optimizer.create("sgd", learning_rate=1e-3, momentum=0.9))
    cases = _cases(store)
    agreement.barrier()  # all nodes of this job are idle until the first case
    before = _load() if store.rank == 0 else {}

    def times(names: Iterable[str]) -> dict[str, float]:
        budget_ms = 1e3 * seconds / CASES
        return {name: _time(cases[name], store, agreement, budget_ms) for name in names}

    node, times_ms = store.node, times(cases)
    servers = [info for info in node.membership.neighbours() if info.role == Role.SERVER.value]
    shared = sum(node.nearby.shares_with(info.node_id) for info in servers)
    way = "shared memory" if shared == len(servers) else "TCP" if shared == 0 else "both ways"
    setup = f"{_count(store.num_workers, 'worker')}, {_count(len(servers), 'server')}, {way}"
    found: dict[str, Any] = {"setup": setup, "times_ms": times_ms, **before}
    if (
        tries_connections
        and node.config.connections == 1  # as on all workers
        and _all(agreement, shared < len(servers)).any()
    ):
        node.spread(MORE_CONNECTIONS)
        found |= {"connections": MORE_CONNECTIONS, "spread": times(SPREAD_CASES)}
    rank = store.rank
    store.barrier()
    agreement.close()
    store.close()
    return found if rank == 0 else None


def _cases(store: Any) -> dict[str, Callable[[], object]]:
    """Return the exchanges to time, by their names in ``estimate.costs_from``."""
    small = [f"small{index:03d}" for index in range(LIST_KEYS)]
    sizes = {**dict.fromkeys(small, SMALL_BYTES), "middle": MIDDLE_BYTES, "large": LARGE_BYTES}
    values = {key: np.ones(nbytes // 4, np.float32) for key, nbytes in sizes.items()}
    store.init(list(values), list(values.values()))
    lazy = [nd.zeros(1) for _ in small]

    def of(keys: list[str], make: Callable[[str], Any]) -> Callable[[], object]:
        gradients, weights = ([make(key) for key in keys] for _ in range(2))
        for gradient in gradients:
            gradient[...] = 1
        return lambda: store.pushpull(keys, gradients, out=weights)

    def plain(key: str) -> Any:
        return np.ones_like(values[key])

    def empty(key: str) -> Any:
        return store.empty(values[key].shape)

    def loop() -> None:
        for index, key in enumerate(small):
            store.push(key, values[key], priority=-index)
            store.pull(key, out=lazy[index], priority=-index)
        nd.waitall()

    return {
        "barrier": store.barrier,
        "small": of(small[:1], plain),
        "list": of(small, plain),
        "loop": loop,
        "middle": of(["middle"], plain),
        "large": of(["large"], plain),
        "empty_middle": of(["middle"], empty),
        "empty_large": of(["large"], empty),
    }


def _time(exchange: Callable[[], object], store: Any, agreement: Any, budget_ms: float) -> float:
    """Return the slowest worker's median time of rounds within the budget.

    Two rounds warm up.
    """
    _once_ms(exchange, store)
    first_ms = _slowest(agreement, _once_ms(exchange, store))
    rounds = max(MIN_ROUNDS, min(MAX_ROUNDS, int(budget_ms / max(first_ms, 1e-3))))
    times = [_once_ms(exchange, store) for _ in range(rounds)]
    return _slowest(agreement, statistics.median(times))


def _once_ms(exchange: Callable[[], object], store: Any) -> float:
    store.barrier()
    begin = time.perf_counter()
    exchange()
    return 1e3 * (time.perf_counter() - begin)


def _slowest(agreement: Any, milliseconds: float) -> float:
    """Return the greatest of all workers' numbers, the same on each of them."""
    return float(_all(agreement, milliseconds).max())


def _all(agreement: Any, number: float) -> np.ndarray[Any, Any]:
    """Return the numbers of all workers, by rank."""
    mine = np.zeros(agreement.num_workers)
    mine[agreement.rank] = number
    agreement.pushpull("ms", mine)
    return mine


# -- alone on this machine ---------------------------------------------------------------


def _run_jobs(options: argparse.Namespace, model: Model | None, *, uses_shared_memory: bool) -> int:
    """Start jobs with different settings, one after the other, and compare them."""
    workers, servers = options.num_workers, options.num_servers
    other = "0" if uses_shared_memory else "1"
    jobs: list[tuple[str, int, Mapping[str, str]]] = [
        ("", servers, {}),
        (f"set PS_SHM={other}", servers, {"PS_SHM": other}),
        (f"use {_count(servers + 1, 'server')} (-s {servers + 1})", servers + 1, {}),
    ]
    seconds = max(0.1, options.seconds / JOBS - START_S)
    found: list[tuple[str, dict[str, Any]]] = []
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-") as directory:
        for index, (advice, count, variables) in enumerate(jobs):
            report = Path(directory, f"{index}.json")
            command = ["-n", str(workers), "-s", str(count), "--launcher", "local"]
            for name, value in variables.items():
                command += ["--env", f"{name}={value}"]
            command += ["--", sys.executable, "-m", "kvstore.bench", "--report", str(report)]
            command += ["--kv-store", options.kv_store, "--seconds", str(seconds)]
            code = launch(command)
            if code != 0:
                return code
            text = json.loads(report.read_text(encoding="utf-8"))
            found.append((advice, text))
    alternatives = [Alternative(advice, _costs(text)) for advice, text in found[1:]]
    _show(found[0][1], alternatives, model)
    return 0


def _load() -> dict[str, float]:
    """Return this machine's other load, measured for a moment."""
    try:
        before = _PROCESSORS.read_text(encoding="ascii")
        time.sleep(_LOOK_S)
        busy = busy_share(before, _PROCESSORS.read_text(encoding="ascii"))
    except OSError:
        busy = 0.0
    return {"load": os.getloadavg()[0], "busy": busy}


def _show(
    found: Mapping[str, Any], alternatives: Sequence[Alternative], model: Model | None
) -> None:
    costs = _costs(found)
    print(load_text(found["load"], found["busy"], os.cpu_count() or 1))
    for each in (costs, *(other.costs for other in alternatives)):
        print(costs_text(each))
    for one in [model] if model is not None else [MODELS["resnet50"], MODELS["resnet110"]]:
        print(f"\n{estimate_text(one, costs, alternatives)}")
    sys.stdout.flush()


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


# -- the command line --------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvstore bench",
        description="Measure what push and pull cost: alone, in jobs on this machine; as the "
        "command of kvstore-launch, in that job. Then estimate a training step of a model.",
    )
    add = parser.add_argument
    add(
        "-n",
        "--num-workers",
        type=int,
        default=2,
        metavar="N",
        help="number of workers, if it starts its own job (2)",
    )
    add(
        "-s",
        "--num-servers",
        type=int,
        default=1,
        metavar="N",
        help="number of servers, if it starts its own job (1)",
    )
    add("--kv-store", choices=("dist_sync", "dist_async"), default="dist_sync")
    add("--model", choices=sorted(MODELS), help="estimate a step of this model")
    add(
        "--shapes",
        metavar="FILE",
        help="estimate for these tensors: one shape per line, such as 64, 3, 7, 7",
    )
    add("--parameters", type=int, metavar="N", help="estimate for N numbers ...")
    add("--tensors", type=int, metavar="N", help="... in N tensors")
    add("--seconds", type=_seconds, default=20.0, help="about how long to measure (20)")
    add("--report", help=argparse.SUPPRESS)
    return parser


def _model(options: argparse.Namespace) -> Model | None:
    """Return the model of the options, or None. Raises ArgumentValueError."""
    counts = (options.parameters, options.tensors)
    asked = [options.model is not None, options.shapes is not None, counts != (None, None)]
    if sum(asked) > 1:
        raise ArgumentValueError("give only one of: --model, --shapes, --parameters with --tensors")
    if options.model is not None:
        return MODELS[options.model]
    if options.shapes is not None:
        return model_from_shapes(_text_of(options.shapes), options.shapes)
    if counts == (None, None):
        return None
    if None in counts or min(counts) < 1:
        raise ArgumentValueError(
            "--parameters and --tensors must be given together, each at least 1"
        )
    return Model("your model", *counts)


def _text_of(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ArgumentValueError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ArgumentValueError(f"{path} is not a text file; write one shape per line") from None


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number of seconds greater than 0, got {text}")
    return seconds


if __name__ == "__main__":
    sys.exit(main())
