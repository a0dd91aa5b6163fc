"""Record what MXNet 1.9.1's optimizers and schedules compute, for tests that do without it.

Run ``PYTHON tests/reference/record_optimizers.py`` with a Python that has MXNet 1.9.1; it writes
``optimizers.npz`` beside this file, the same bytes each time. Every case names an optimizer, its
parameters and what it is fed; the arrays are the weight after some of 20 updates.
``tests/unit/kvstore/optimizer/test_optimizer_mxnet.py`` reads the cases from the file and compares.
"""

from __future__ import annotations

import io
import itertools
import json
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

OUT = Path(__file__).with_name("optimizers.npz")
SHAPE = (6, 4)
NUM_UPDATES = 20
KEPT = (1, 2, 7, 20)
"""The updates after which the weight is kept."""

KEY = 3
TOUCHED = ((0, 2), (1, 2, 5), (0, 5), (2,))
"""Rows of row-sparse gradients, in turn; rows 3 and 4 never have one."""

OPTIMIZERS: dict[str, list[dict[str, Any]]] = {
    "sgd": [{}, {"momentum": 0.9}],
    "ccsgd": [{"momentum": 0.9}],
    "nag": [{}, {"momentum": 0.9}],
    "signum": [{}, {"momentum": 0.0}, {"wd_lh": 0.1}],
    "ftml": [{}, {"beta1": 0.3, "beta2": 0.9, "epsilon": 1e-4}],
    "lars": [{}, {"momentum": 0.9, "eta": 0.1, "eps": 0.01}],
    "lbsgd": [
        {"momentum": 0.9},
        {"batch_scale": 3, "warmup_epochs": 2, "updates_per_epoch": 5},
        {"batch_scale": 2, "warmup_strategy": "power2", "updates_per_epoch": 3, "begin_epoch": 1},
        {"batch_scale": 4, "warmup_strategy": "sqrt", "momentum": 0.5},
        {"batch_scale": 2, "warmup_strategy": "lars", "momentum": 0.5},
        {"batch_scale": 2, "warmup_strategy": "other", "warmup_epochs": 0},
    ],
    "lamb": [{}, {"lower_bound": 0.5, "upper_bound": 2.0}, {"bias_correction": False}],
    "dcasgd": [{}, {"lamda": 0.5}],
    "adam": [{}, {"beta1": 0.5, "beta2": 0.9, "epsilon": 1e-3}],
    "adagrad": [{}, {"eps": 0.1}],
    "rmsprop": [{}, {"centered": True}, {"gamma1": 0.5, "clip_weights": 0.4}],
    "adadelta": [{}, {"rho": 0.5, "epsilon": 1e-2}],
    "ftrl": [{}, {"lamda1": 0.3, "beta": 0.5}],
    "adamax": [{}, {"beta1": 0.5, "beta2": 0.9}],
    "nadam": [{}, {"beta1": 0.5, "beta2": 0.9, "schedule_decay": 0.5}],
    "test": [{}],
    "groupadagrad": [{}, {"eps": 0.1}],
}
LAZY = {"sgd", "adam", "lars"}
"""Those that take ``lazy_update``."""

NO_SPARSE_DECAY = {"adagrad", "groupadagrad"}
"""MXNet refuses a decay for row-sparse gradients."""
NO_DECAY = {"groupadagrad"}
"""MXNet refuses any decay."""

#: With what noise they add made zero: it comes from a generator of MXNet's own.
QUIET = {"sgld": [{}]}

COMMON: dict[str, dict[str, Any]] = {
    "plain": {},
    "decay": {"wd": 0.1},
    "clip": {"wd": 0.1, "clip_gradient": 0.5, "rescale_grad": 0.7},
    "rate": {"learning_rate": 0.05},
}

#: Class, positional and other arguments of schedules.
SCHEDULES: list[tuple[str, list[Any], dict[str, Any]]] = [
    ("FactorScheduler", [3], {}),
    ("FactorScheduler", [3, 0.5], {"base_lr": 0.4}),
    ("FactorScheduler", [2, 0.1, 1e-3, 0.4], {}),
    ("FactorScheduler", [4, 0.5, 1e-8, 0.4, 5, 0.1, "linear"], {}),
    ("FactorScheduler", [4, 0.5], {"base_lr": 0.4, "warmup_steps": 5, "warmup_mode": "constant"}),
    ("MultiFactorScheduler", [[3, 4, 10]], {"factor": 0.5, "base_lr": 0.4}),
    ("MultiFactorScheduler", [[8, 12], 0.1, 0.4, 6, 0.05], {}),
    ("PolyScheduler", [15], {}),
    ("PolyScheduler", [15, 0.4, 3], {}),
    ("PolyScheduler", [15, 0.4, 2, 0.1, 5, 0.05, "linear"], {}),
    ("CosineScheduler", [15], {}),
    ("CosineScheduler", [15, 0.4], {}),
    ("CosineScheduler", [15, 0.4, 0.1, 5, 0.05, "constant"], {}),
]
#: What optimizers are given besides a schedule of base_lr 0.4.
RATES: list[dict[str, Any]] = [{}, {"learning_rate": 0.05}, {"learning_rate": 0.01}]


def inputs() -> tuple[np.ndarray, np.ndarray]:
    """The first weight, and a gradient for each update."""
    random = np.random.RandomState(5)
    weight = random.uniform(-1, 1, SHAPE)
    grads = random.normal(0, 1, (NUM_UPDATES, *SHAPE))
    return weight.astype(np.float32), grads.astype(np.float32)


def dense_cases() -> Iterator[dict[str, Any]]:
    """Every optimizer with each of its settings and what all have in common."""
    for name, settings in [*OPTIMIZERS.items(), *QUIET.items()]:
        decay = {"wd": 0.0} if name in NO_DECAY else {}
        for params, (which, common) in itertools.product(settings, COMMON.items()):
            if not (decay and which == "decay"):
                yield {"name": name, "params": {**params, **common, **decay}}
        schedule = ["FactorScheduler", [4, 0.5], {"base_lr": 0.1}]
        yield {"name": name, "params": settings[-1], "schedule": schedule}
        decayed = {**settings[-1], "wd": 0.1, **decay}
        yield {"name": name, "params": decayed, "mults": [0.5, 3.0]}
        yield {"name": name, "params": decayed, "dtype": "float16"}


def sparse_cases() -> Iterator[dict[str, Any]]:
    """Row-sparse gradients, for weights of both kinds, lazily and not."""
    for name, settings in OPTIMIZERS.items():
        lazy = [{"lazy_update": True}, {"lazy_update": False}] if name in LAZY else [{}]
        for stype, more in itertools.product(("default", "row_sparse"), lazy):
            decay = 0.0 if name in NO_SPARSE_DECAY else 0.1
            params = {**settings[-1], "wd": decay, **more}
            yield {"name": name, "params": params, "stype": stype, "grad_stype": "row_sparse"}


def update_all(case: dict[str, Any]) -> np.ndarray:
    """The weight after each of the updates that are kept."""
    first, grads = inputs()
    dtype = case.get("dtype", "float32")
    weight = mx.nd.array(first, dtype=dtype).tostype(case.get("stype", "default"))
    updater = mx.optimizer.get_updater(made(case))
    found = []
    for count in range(1, NUM_UPDATES + 1):
        grad = mx.nd.array(grads[count - 1], dtype=dtype)
        if "grad_stype" in case:
            rows = list(TOUCHED[count % len(TOUCHED)])
            grad = mx.nd.sparse.row_sparse_array((grad.asnumpy()[rows], rows), shape=SHAPE)
        updater(KEY, grad, weight)
        if count in KEPT:
            found.append(weight.asnumpy())
    return np.stack(found)


def made(case: dict[str, Any]) -> Any:
    """MXNet's optimizer of a case."""
    params = dict(case["params"])
    if "schedule" in case:
        params["lr_scheduler"] = scheduled(*case["schedule"])
    if "dtype" in case:
        params["multi_precision"] = True
    chosen = mx.optimizer.create(case["name"], **params)
    if "mults" in case:
        chosen.set_lr_mult({KEY: case["mults"][0]})
        chosen.set_wd_mult({KEY: case["mults"][1]})
    return chosen


def scheduled(name: str, args: list[Any], params: dict[str, Any]) -> Any:
    """MXNet's schedule."""
    return getattr(mx.lr_scheduler, name)(*args, **params)


def rates() -> Iterator[tuple[dict[str, Any], list[float]]]:
    """The rates of schedules alone, and of optimizers that are given a rate and a schedule."""
    for name, args, params in SCHEDULES:
        schedule = scheduled(name, args, params)
        found = [schedule(count) for count in range(1, NUM_UPDATES + 1)]
        yield {"schedule": [name, args, params]}, found
    kinds = [["FactorScheduler", [4, 0.5]], ["MultiFactorScheduler", [[3, 9], 0.5]]]
    kinds += [["PolyScheduler", [15]], ["CosineScheduler", [15]]]
    for name, params, kind in itertools.product([*OPTIMIZERS, *QUIET], RATES, kinds):
        schedule = [*kind, {"base_lr": 0.4}]
        chosen = made({"name": name, "params": params, "schedule": schedule})
        found = []
        for _ in range(NUM_UPDATES):
            chosen._update_count(KEY)
            found.append(chosen._get_lr(KEY))
        yield {"name": name, "params": params, "schedule": schedule}, found


def record() -> dict[str, np.ndarray]:
    """All arrays of the file, and the cases as JSON."""
    weight, grads = inputs()
    arrays = {"weight": weight, "grads": grads, "kept": np.array(KEPT)}
    cases = []
    for case in [*dense_cases(), *sparse_cases()]:
        try:
            found = update_all(case)
        except Exception as error:
            cases.append({**case, "error": str(error).splitlines()[0][:120]})
            continue
        arrays[f"case{len(cases)}"] = found
        cases.append(case)
    listed = list(rates())
    arrays["rates"] = np.array([found for _, found in listed])
    content = {
        "key": KEY,
        "touched": TOUCHED,
        "cases": cases,
        "rates": [case for case, _ in listed],
    }
    arrays["json"] = np.frombuffer(json.dumps(content).encode(), np.uint8)
    return arrays


def write(arrays: dict[str, np.ndarray]) -> None:
    """As ``numpy.savez_compressed``, but without the time of day in the file."""
    with zipfile.ZipFile(OUT, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, array in arrays.items():
            memory = io.BytesIO()
            np.save(memory, array)
            entry = zipfile.ZipInfo(f"{name}.npy", (1980, 1, 1, 0, 0, 0))
            archive.writestr(entry, memory.getvalue(), zipfile.ZIP_DEFLATED)


if __name__ == "__main__":
    import mxnet as mx

    warnings.simplefilter("ignore")
    mx.optimizer.optimizer.normal = lambda mean, scale, shape, dtype, ctx: mx.nd.zeros(shape)
    write(record())
    print(f"{OUT}: {OUT.stat().st_size} bytes")
