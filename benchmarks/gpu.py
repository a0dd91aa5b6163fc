"""How near the stores come to the bandwidth of a GPU's memory and of its way to the host.

``python benchmarks/gpu.py`` needs CuPy and a GPU, and one is enough. Printed is, for the
gradients of a model in several copies with SGD with momentum in a ``device`` store: the time of
its launches alone, by the GPU's own clock, and of whole calls; beside a plain copy, whose bytes
count as read and written. Then the sums that a worker of ``dist_device_sync`` sends, from the
first launch until all of them are in the host's memory, beside a plain copy to page-locked
memory. The store's weights are compared with NumPy's, bit for bit: a fast wrong answer ends
with an error. ``--out`` writes the figures as JSON.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402

import kvstore as mx  # noqa: E402
from benchmarks.local import MOMENTUM, RATE, check  # noqa: E402
from benchmarks.models import MODELS, Shape  # noqa: E402
from kvstore.arrays.cupy import addresses_of, load  # noqa: E402
from kvstore.arrays.gpu.kernels import Kernel, KernelParameters, rows_of  # noqa: E402
from kvstore.arrays.gpu.pipeline import cut  # noqa: E402
from kvstore.arrays.gpu.sums import launch  # noqa: E402
from kvstore.arrays.keys import KeySpec  # noqa: E402
from kvstore.errors import MissingDependencyError  # noqa: E402
from kvstore.stores.dist.gpu_sums import sums_of  # noqa: E402

WARM_UP = 5
COPY_BYTES = 1 << 30
AIM_ADDING, AIM_LEAVING = 0.7, 0.8
"""What the launches should reach of a copy's bandwidth, and sums for the host of a pinned one's."""

Figures = dict[str, float]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="resnet50", choices=sorted(MODELS))
    parser.add_argument("--copies", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--out", type=pathlib.Path, help="a file for the figures, as JSON")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    try:
        cupy = load()
        cupy.cuda.runtime.getDeviceCount()
    except MissingDependencyError as error:
        raise SystemExit(f"nothing is measured: {error}") from error
    except Exception as error:  # CuPy's, which cannot be named without it
        raise SystemExit(f"nothing is measured, CuPy finds no usable GPU: {error}") from error
    shapes = MODELS[options.model]()
    figures: Figures = {}
    print(f"{options.model}: {len(shapes)} tensors, {options.copies} copies, {device_name(cupy)}")
    adding(cupy, shapes, options, figures)
    leaving(cupy, shapes, options, figures)
    if options.out is not None:
        options.out.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


def device_name(cupy: Any) -> str:
    name: bytes = cupy.cuda.runtime.getDeviceProperties(0)["name"]
    return f"{name.decode()}, CuPy {cupy.__version__}, NumPy {np.__version__}"


# -- sums and updates on the GPU -----------------------------------------------------------


def adding(cupy: Any, shapes: list[Shape], options: argparse.Namespace, figures: Figures) -> None:
    rng = np.random.default_rng(7)
    weights = [rng.standard_normal(shape, np.float32) for shape in shapes]
    host = [
        [rng.standard_normal(shape, np.float32) for _ in range(options.copies)] for shape in shapes
    ]
    gradients = [[cupy.asarray(array) for array in row] for row in host]
    outs = [[cupy.zeros(shape, np.float32) for _ in range(options.copies)] for shape in shapes]
    keys = [f"{index:03d}" for index in range(len(shapes))]
    store = mx.kvstore.create("device")
    store.set_optimizer(mx.optimizer.create("sgd", learning_rate=RATE, momentum=MOMENTUM))
    store.init(keys, weights)

    nbytes = sum(weight.nbytes for weight in weights)
    moved = nbytes * (options.copies + 4)  # weight and velocity are read and written
    copied = 2 * COPY_BYTES / copy_s(cupy)
    figures["copy_gb_per_s"] = copied / 1e9
    print(f"a copy on the GPU: {copied / 1e9:.0f} GB/s, read and written")
    launched = launches_s(cupy, shapes, options.copies)
    report("launches alone", launched, moved, copied, figures, AIM_ADDING)
    pushed = call_s(lambda: store.push(keys, gradients), options.rounds)
    report("push, the whole call", pushed, moved, copied, figures)
    both = call_s(lambda: store.pushpull(keys, gradients, out=outs), options.rounds)
    report("pushpull, the whole call", both, moved + 2 * nbytes * options.copies, copied, figures)
    store.close()
    filled = [[out.get() for out in row] for row in outs]
    check(weights, host, filled, 2 * (options.rounds + WARM_UP))


def copy_s(cupy: Any) -> float:
    """Seconds of a plain copy of ``COPY_BYTES`` on the GPU."""
    source, target = cupy.ones(COPY_BYTES, np.uint8), cupy.empty(COPY_BYTES, np.uint8)
    runtime, stream = cupy.cuda.runtime, cupy.cuda.get_current_stream().ptr

    def copy() -> None:
        kind = runtime.memcpyDeviceToDevice
        runtime.memcpyAsync(target.data.ptr, source.data.ptr, COPY_BYTES, kind, stream)

    return queued_s(cupy, copy)


def launches_s(cupy: Any, shapes: list[Shape], num_copies: int) -> float:
    """Seconds of the launches that a ``push`` of these shapes makes, and of nothing else."""
    kernel = Kernel("float32", num_copies, "momentum")
    copies = [[cupy.ones(shape, np.float32) for _ in range(num_copies)] for shape in shapes]
    own = [[cupy.ones(shape, np.float32) for _ in range(2)] for shape in shapes]
    sizes = [row[0].size for row in copies]
    blocks = cut(sizes, sys.maxsize, kernel.num_rows)
    rows = [rows_of(kernel, block, addresses_of(copies), addresses_of(own)) for block in blocks]
    numbers = KernelParameters(rate=RATE, momentum=MOMENTUM)

    def run() -> None:
        for pointers, lengths in rows:
            launch(kernel, pointers, lengths, numbers)

    return queued_s(cupy, run)


def queued_s(cupy: Any, work: Callable[[], None], times: int = 20) -> float:
    """Seconds of some work by the GPU's clock, queued many times so that it never runs dry."""
    seconds: list[float] = []
    for _ in range(WARM_UP + 5):
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        # Something to do until all is queued, which takes the host a few microseconds each.
        busy = cupy.ones(1 << 30, np.uint8)
        for _ in range(10):
            busy += 1
        begin.record()
        for _ in range(times):
            work()
        end.record()
        end.synchronize()
        seconds.append(1e-3 * cupy.cuda.get_elapsed_time(begin, end) / times)
    return statistics.median(seconds[WARM_UP:])


def call_s(call: Callable[[], None], rounds: int) -> float:
    """Seconds of a call by the host's clock; it returns when its work is done."""
    seconds = []
    for _ in range(rounds + WARM_UP):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[WARM_UP:])


def report(
    what: str,
    seconds: float,
    nbytes: int,
    bandwidth: float,
    figures: Figures,
    aim: float | None = None,
) -> None:
    share = nbytes / seconds / bandwidth
    figures[f"{what}, ms"], figures[f"{what}, share"] = 1e3 * seconds, share
    holds = "" if aim is None else f"; asked {aim:.0%}: {'holds' if share >= aim else 'NOT MET'}"
    print(
        f"{what:40s} {1e3 * seconds:8.3f} ms  {nbytes / seconds / 1e9:7.1f} GB/s  "
        f"{share:6.1%} of the copy{holds}",
        flush=True,
    )


# -- sums for the host ---------------------------------------------------------------------


def leaving(cupy: Any, shapes: list[Shape], options: argparse.Namespace, figures: Figures) -> None:
    rows = [[cupy.ones(shape, np.float32) for _ in range(options.copies)] for shape in shapes]
    specs = [KeySpec(shape, np.dtype(np.float32)) for shape in shapes]
    nbytes = sum(spec.nbytes for spec in specs)
    pinned = np.frombuffer(cupy.cuda.alloc_pinned_memory(nbytes), np.uint8, nbytes)
    plain = np.ones(nbytes, np.uint8)
    source = cupy.ones(nbytes, np.uint8)
    runtime, stream = cupy.cuda.runtime, cupy.cuda.get_current_stream()

    def copy() -> None:
        kind = runtime.memcpyDeviceToHost
        runtime.memcpyAsync(pinned.ctypes.data, source.data.ptr, nbytes, kind, stream.ptr)
        stream.synchronize()

    bandwidth = nbytes / call_s(copy, options.rounds)
    figures["pinned_copy_gb_per_s"] = bandwidth / 1e9
    print(f"a copy to page-locked memory: {bandwidth / 1e9:.1f} GB/s")
    for what, memory, is_pinned, copies, aim in (
        (f"{options.copies} copies to locked memory", pinned, True, options.copies, AIM_LEAVING),
        ("1 copy to locked memory", pinned, True, 1, AIM_LEAVING),
        (f"{options.copies} copies to other memory", plain, False, options.copies, None),
    ):
        chosen = [row[:copies] for row in rows]

        def bring() -> None:
            sums_of(chosen, specs, lambda _: memory, lambda _: is_pinned)  # noqa: B023

        report(what, call_s(bring, options.rounds), nbytes, bandwidth, figures, aim)
        if not (memory.view(np.float32) == copies).all():
            raise SystemExit("the sums are wrong")


if __name__ == "__main__":
    sys.exit(main())
