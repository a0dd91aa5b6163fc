"""How quick gradient compression is: ``python benchmarks/codecs.py``.

For each codec, GB of float32 a second, of what is encoded or comes out of decoding: encoding (with
error feedback where it is on by default), decoding into an array, and decoding onto a sum; beside a
copy of the same array. Once by NumPy and once by the compiled kernels where there are any, whose
bytes must be the same. ``--threads`` share each call's work. ``--part`` elements are encoded at a
time: by default 262,144, the 1 MiB that travels in one piece.

With ``--lost``, what is lost instead: the norm of (what arrived - what was pushed) over the norm of
what was pushed, for one push, and for the sums over ``--pushes`` with error feedback and without.
Gradients are a constant direction (standard deviation 0.1) plus noise (0.3), as in training.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from kvstore.arrays.cpu import kernels
from kvstore.arrays.cpu.threads import Cores
from kvstore.compression import Chain, Draw, make_chain

#: Gradients have a standard deviation of 0.3: with the threshold 0.5 most become 0, as they should.
CHAINS: tuple[dict[str, Any], ...] = (
    {"type": "2bit", "threshold": 0.5},
    {"type": "1bit", "threshold": 0.0},
    {"type": "fp16"},
    {"type": "bf16"},
    {"type": "int8"},
    {"type": "topk", "ratio": 0.01},
    {"type": "randomk", "ratio": 0.01},
    {"type": "topk+fp16", "ratio": 0.01},
)


class Work:
    """One chain and an array that it encodes in parts."""

    def __init__(self, chain: Chain, values: Any, part: int, cores: Cores) -> None:
        self.chain, self.values, self.cores = chain, values, cores
        self.spans = [slice(i, min(i + part, len(values))) for i in range(0, len(values), part)]
        self.residual = np.zeros_like(values) if chain.has_feedback else None
        self.outs = [
            np.empty(chain.encoded_bytes(len(values[span]), values.dtype), np.uint8)
            for span in self.spans
        ]
        self.total = np.zeros_like(values)

    def encode(self) -> None:
        for number, (span, out) in enumerate(zip(self.spans, self.outs, strict=True)):
            residual = None if self.residual is None else self.residual[span]
            self.chain.check(self.values[span], self.cores)
            self.chain.encode(
                self.values[span], out, residual=residual, draw=Draw(number), cores=self.cores
            )

    def decode(self) -> None:
        self._decode(add=False)

    def decode_add(self) -> None:
        self._decode(add=True)

    def _decode(self, *, add: bool) -> None:
        for out, span in zip(self.outs, self.spans, strict=True):
            self.chain.decode(out, self.total[span], add=add, cores=self.cores)

    def bits(self) -> list[bytes]:
        return [*(out.tobytes() for out in self.outs), self.total.tobytes()]


def rate(work: Callable[[], None], nbytes: int, repeats: int) -> float:
    """GB a second, the best of some repetitions."""
    work()
    took = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        took.append(time.perf_counter() - began)
    return nbytes / min(took) / 1e9


def measure(parameters: dict[str, Any], values: Any, options: argparse.Namespace) -> str:
    """One line of the table."""
    rates: list[float] = []
    found: list[list[bytes]] = []
    module = kernels.native()
    for chosen in (None,) if module is None else (None, module):
        chain = make_chain(parameters)
        with mock.patch.object(kernels, "native", return_value=chosen):
            work = Work(chain, values, options.part, Cores(options.threads))
            for step in (work.encode, work.decode, work.decode_add):
                rates.append(rate(step, values.nbytes, options.repeats))
        found.append(work.bits())
    if any(bits != found[0] for bits in found):
        raise SystemExit(f"{parameters['type']}: the compiled kernels give other bits than NumPy")
    ratio = values.nbytes / sum(map(len, found[0][:-1]))
    return f"{parameters['type']:10s} {ratio:6.1f} " + " ".join(f"{each:8.2f}" for each in rates)


def lost(parameters: dict[str, Any], options: argparse.Namespace) -> str:
    """One line of the table of ``--lost``."""
    feedback = sums_lost({**parameters, "feedback": True}, options)
    plain = sums_lost({**parameters, "feedback": False}, options)
    return f"{parameters['type']:10s} {feedback[0]:10.2g} {feedback[-1]:20.2g} {plain[-1]:10.2g}"


def sums_lost(parameters: dict[str, Any], options: argparse.Namespace) -> list[float]:
    """After the first push and after the last: how far the sums differ, of those pushed."""
    rng = np.random.default_rng(1)
    direction = np.float32(0.1) * rng.standard_normal(options.elements, np.float32)
    chain = make_chain(parameters)
    residual = np.zeros_like(direction) if chain.has_feedback else None
    pushed, arrived = np.zeros(options.elements), np.zeros_like(direction)
    found = []
    for count in range(options.pushes):
        noise = rng.standard_normal(options.elements, np.float32)
        gradient = direction + np.float32(0.3) * noise
        encoded = chain.encode(gradient, residual=residual, draw=Draw(0, count))
        chain.decode(encoded, arrived, add=True)
        pushed += gradient
        if count in (0, options.pushes - 1):
            found.append(float(np.linalg.norm(arrived - pushed) / np.linalg.norm(pushed)))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--elements", type=int, help="default: 25,000,000; with --lost 262,144")
    parser.add_argument("--part", type=int, default=262_144)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--lost", action="store_true", help="what is lost, not how long it takes")
    parser.add_argument("--pushes", type=int, default=100, help="with --lost")
    options = parser.parse_args()
    if options.elements is None:
        options.elements = 262_144 if options.lost else 25_000_000
    if options.lost:
        return print_lost(options)
    values = np.random.default_rng(1).standard_normal(options.elements, np.float32)
    values *= np.float32(0.3)
    copy = np.empty_like(values)
    memcpy = rate(lambda: np.copyto(copy, values), values.nbytes, options.repeats)
    print(f"{options.elements:,d} float32, parts of {options.part:,d}, threads: {options.threads}")
    print(f"a copy of the array: {memcpy:.2f} GB/s; in the table GB/s, too")
    sides = ["NumPy"] if kernels.native() is None else ["NumPy", f"C ({kernels.instructions()})"]
    print(" " * 18 + "".join(f"{side:<27s}" for side in sides))
    print(f"{'codec':10s} {'ratio':>6s} " + "   encode   decode      add" * len(sides))
    for parameters in CHAINS:
        print(measure(parameters, values, options), flush=True)
    return 0


def print_lost(options: argparse.Namespace) -> int:
    print(f"{options.elements:,d} float32; lost, of what was pushed")
    sums = f"{options.pushes} pushes"
    print(f"{'codec':10s} {'one push':>10s} {sums + ', feedback':>20s} {'without':>10s}")
    for parameters in CHAINS:
        print(lost(parameters, options), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
