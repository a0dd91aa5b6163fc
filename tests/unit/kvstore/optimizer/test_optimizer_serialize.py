"""Optimizers as plain data: there and back, and nothing but named errors for anything else."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore import optimizer as opt
from kvstore.errors import OptimizerParameterError, UnknownOptimizerError
from kvstore.optimizer import Optimizer
from kvstore.optimizer import schedule as schedules
from kvstore.optimizer.parameters import MODULES
from kvstore.optimizer.schedule import ScaledScheduler
from kvstore.optimizer.serialize import MAX_DEPTH, from_plain, to_plain
from pslite.errors import ProtocolError
from pslite.wire.codec import pack_value, unpack_value

EVERY = sorted(name.lower() for name in MODULES)
SCHEDULES: list[schedules.Schedule | None] = [
    None,
    schedules.FactorScheduler(step=5, factor=0.5, warmup_steps=2, warmup_mode="constant"),
    schedules.MultiFactorScheduler(step=(3, 9), factor=0.1),
    schedules.PolyScheduler(max_update=10, warmup_steps=1),
    schedules.CosineScheduler(max_update=10, final_lr=0.001),
]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda each: getattr(each, "name", "none"))
@pytest.mark.parametrize("name", EVERY)
def test_there_and_back_over_json_and_msgpack(name: str, schedule: schedules.Schedule) -> None:
    chosen = opt.create(
        name,
        learning_rate=0.25,
        lr_scheduler=schedule,
        lr_mult={"a": 2.0, 7: 0.5},
        wd_mult={"7": 3},
    )
    plain = to_plain(chosen)
    assert from_plain(json.loads(json.dumps(plain))) == chosen
    assert from_plain(unpack_value(pack_value(plain))) == chosen
    variant = chosen.for_key("a")
    assert from_plain(to_plain(variant)) == variant


def test_equal_optimizers_give_equal_data_with_all_parameters() -> None:
    plain = to_plain(opt.SGD(learning_rate=1, lr_mult={"b": 2, "a": 1, 3: 4}))
    assert plain == [
        "sgd",
        {
            "learning_rate": 1.0,
            "momentum": 0.0,
            "wd": 0.0,
            "rescale_grad": 1.0,
            "clip_gradient": None,
            "lr_scheduler": None,
            "lr_mult": [[3, 4.0], ["a", 1.0], ["b", 2.0]],
            "wd_mult": [],
            "lazy_update": True,
            "multi_precision": True,
        },
    ]
    same = to_plain(opt.SGD(learning_rate=1.0, lr_mult=[(3, 4), ("a", 1), ("b", 2)]))
    assert pack_value(same) == pack_value(plain)


def test_what_is_left_out_has_its_default() -> None:
    assert from_plain(["adam", {"beta1": 0.5}]) == opt.Adam(beta1=0.5)


def test_an_unknown_name_says_how_servers_come_to_know_it() -> None:
    with pytest.raises(
        UnknownOptimizerError,
        match=r"'mine' \(known: adadelta, .*\); .*--server-import MODULE \(or set KVSTORE_",
    ):
        from_plain(["mine", {}])
    with pytest.raises(OptimizerParameterError, match=r"'mine' \(known: cosine.*--server-import"):
        from_plain(["sgd", {"lr_scheduler": ["mine", {}]}])


def test_what_is_not_registered_cannot_travel() -> None:
    @dataclasses.dataclass(frozen=True)
    class Mine(Optimizer):
        learning_rate: float = 0.1

    @dataclasses.dataclass(frozen=True)
    class Slow(schedules.Schedule):
        pass

    with pytest.raises(UnknownOptimizerError, match="Mine is not registered"):
        to_plain(Mine())
    with pytest.raises(UnknownOptimizerError, match="Slow is not registered"):
        to_plain(opt.SGD(lr_scheduler=Slow()))


def test_schedules_within_each_other_have_a_depth() -> None:
    def nested(depth: int) -> list[Any]:
        data: list[Any] = ["factor", {"step": 1}]
        for _ in range(depth - 1):
            data = ["scaled", {"schedule": data, "factor": 0.5, "start_lr": 1.0}]
        return ["sgd", {"lr_scheduler": data}]

    assert from_plain(nested(MAX_DEPTH)).rate(1) == 0.5 ** (MAX_DEPTH - 1)
    for depth in (MAX_DEPTH + 1, sys.getrecursionlimit() * 2):
        with pytest.raises(ProtocolError, match=f"at most {MAX_DEPTH} deep"):
            from_plain(nested(depth))


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (None, ProtocolError),
        ([], ProtocolError),
        (["sgd"], ProtocolError),
        (["sgd", []], ProtocolError),
        (("sgd", {}), ProtocolError),
        ([b"sgd", {}], ProtocolError),
        (["sgd", {1: 2}], ProtocolError),
        (["sgd", {"wd": b"1"}], ProtocolError),
        (["sgd", {"wd": {}}], ProtocolError),
        (["sgd", {"wd": ["factor", {}, 1]}], ProtocolError),
        (["SGD", {}], UnknownOptimizerError),
        (["os.system", {}], UnknownOptimizerError),
        (["sgd", {"__class__": 1}], OptimizerParameterError),
        (["sgd", {"_variants": []}], OptimizerParameterError),
        (["sgd", {"self": 1}], OptimizerParameterError),
        (["sgd", {"wd": ["factor", {"step": 1}]}], OptimizerParameterError),
        (["sgd", {"wd": 10**400}], OptimizerParameterError),
        (["sgd", {"wd": 10**5000}], OptimizerParameterError),
        (["sgd", {"wd": float("inf")}], OptimizerParameterError),
        (["sgd", {"lr_mult": [[[], 1.0]]}], OptimizerParameterError),
        (["sgd", {"lr_mult": [["a", [1.0]]]}], OptimizerParameterError),
        (["sgd", {"lr_mult": [1, 2]}], OptimizerParameterError),
        (["sgd", {"lr_mult": None}], OptimizerParameterError),
        (["sgd", {"lr_scheduler": ["factor", {}]}], OptimizerParameterError),
        (["sgd", {"lr_scheduler": ["factor", {"step": [1]}]}], OptimizerParameterError),
        (["sgd", {"lr_scheduler": ["multifactor", {"step": [[1]]}]}], OptimizerParameterError),
    ],
    ids=lambda value: getattr(value, "__name__", "data"),
)
def test_malformed_data_raises_an_error_that_is_named(data: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        from_plain(data)


NUMBERS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
TREES = st.recursive(
    NUMBERS | st.binary(max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=12,
)
NAMES = st.sampled_from([*EVERY, "factor", "multifactor", "poly", "cosine", "scaled"])
FIELDS = st.sampled_from(
    [
        *("learning_rate", "wd", "lr_mult", "wd_mult", "lr_scheduler", "beta1", "epsilon"),
        *("momentum", "step", "factor", "max_update", "warmup_steps", "warmup_begin_lr"),
        *("schedule", "start_lr", "centered", "base_lr"),
    ]
)
NEARLY = st.recursive(
    NUMBERS | st.lists(st.tuples(NUMBERS, NUMBERS).map(list), max_size=3),
    lambda inner: st.tuples(NAMES, st.dictionaries(FIELDS, inner, max_size=4)).map(list),
    max_leaves=20,
)


def refuses_or_keeps(data: Any) -> None:
    with contextlib.suppress(ProtocolError, OptimizerParameterError, UnknownOptimizerError):
        made = from_plain(data)
        assert from_plain(to_plain(made)) == made
        assert all(isinstance(made.rate(count), float) for count in (1, 2, 100))


@settings(max_examples=150, deadline=None)
@given(TREES)
def test_any_tree_is_refused_or_kept(data: Any) -> None:
    refuses_or_keeps(data)


@settings(max_examples=150, deadline=None)
@given(st.tuples(NAMES, st.dictionaries(FIELDS, NEARLY, max_size=5)).map(list))
def test_what_is_nearly_an_optimizer_is_refused_or_kept(data: Any) -> None:
    refuses_or_keeps(data)


VALID = to_plain(
    opt.Adam(
        lr_scheduler=ScaledScheduler(schedules.MultiFactorScheduler(step=(1, 2)), 0.5, 0.1),
        lr_mult={"a": 1.0, 2: 3.0},
    )
)


def places(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = data.items() if isinstance(data, dict) else enumerate(data)
    found = [path]
    for key, item in inner if isinstance(data, dict | list) else ():
        found += places(item, (*path, key)) if isinstance(item, dict | list) else [(*path, key)]
    return found


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(places(VALID)[1:]), TREES | NUMBERS)
def test_one_wrong_place_in_valid_data_is_refused_or_kept(path: Any, value: Any) -> None:
    data = copy.deepcopy(VALID)
    holder = data
    for step in path[:-1]:
        holder = holder[step]
    holder[path[-1]] = value
    refuses_or_keeps(data)
