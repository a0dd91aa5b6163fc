"""``Trainer`` in one process, and the cutting of batches: what scripts for Gluon rely on."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvstore as mx
from kvstore.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    CheckpointError,
    OptimizerMismatch,
    OptimizerParameterError,
    UnknownOptimizerError,
)
from kvstore.mxnet.gluon import Parameter, Trainer
from kvstore.mxnet.gluon.consistency import (
    check_plans,
    check_starts,
    described,
    differences,
    fingerprint,
)
from kvstore.mxnet.gluon.parameter import collect
from pslite.errors import UsageError

Array = Any

split_data = mx.gluon.utils.split_data
split_and_load = mx.gluon.utils.split_and_load

SHAPES = {"weight": (4, 3), "bias": (4,), "scale": (1,)}
SGD = {"learning_rate": 0.1, "momentum": 0.9, "wd": 0.01}


def values(seed: int) -> dict[str, Array]:
    random = np.random.default_rng(seed)
    return {name: random.normal(size=shape).astype("f4") for name, shape in SHAPES.items()}


def parameters(num_devices: int = 1, make: Callable[[Array], Array] = np.array) -> dict[str, Any]:
    """New parameters with the same values on each device."""
    return {
        name: Parameter([make(value) for _ in range(num_devices)], name=name)
        for name, value in values(0).items()
    }


def run(
    trainer: Trainer,
    params: dict[str, Any],
    steps: range,
    batch_size: float = 8,
    make: Callable[[Array], Array] = np.array,
) -> None:
    for step in steps:
        for name, parameter in params.items():
            devices = range(len(parameter.list_data()))
            parameter.grad = [make(values(100 * step + i + 1)[name]) for i in devices]
        trainer.step(batch_size)


def host(params: dict[str, Any]) -> dict[str, bytes]:
    """The bits of the first device's copies."""
    return {name: np.asarray(each.list_data()[0]).tobytes() for name, each in params.items()}


def by_hand(steps: range, num_devices: int = 1, batch_size: float = 8) -> dict[str, Array]:
    """The same training, written out in plain NumPy."""
    weights = {name: value.astype("f8") for name, value in values(0).items()}
    momenta = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    for step in steps:
        for name, weight in weights.items():
            grads = [values(100 * step + i + 1)[name].astype("f8") for i in range(num_devices)]
            grad = sum(grads) / batch_size + SGD["wd"] * weight
            momenta[name] = SGD["momentum"] * momenta[name] - SGD["learning_rate"] * grad
            weights[name] = weight + momenta[name]
    return weights


# -- a step -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kvstore", "update_on_kvstore", "num_devices"),
    [
        (None, None, 1),
        (None, False, 1),
        *itertools.product(["local", "device"], [None, True, False], [1, 3]),
    ],
)
def test_a_step_is_one_update_by_the_sum_over_devices_divided_by_the_batch_size(
    kvstore: str | None, update_on_kvstore: bool | None, num_devices: int
) -> None:
    params = parameters(num_devices)
    trainer = Trainer(params, "sgd", SGD, kvstore, update_on_kvstore=update_on_kvstore)
    run(trainer, params, range(4))
    for name, expected in by_hand(range(4), num_devices).items():
        for copy in params[name].list_data():
            np.testing.assert_allclose(copy, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("num_devices", [1, 2])
def test_wherever_the_update_happens_the_bits_are_the_same(num_devices: int) -> None:
    found = []
    for kvstore, on_store in [("local", True), ("local", False), ("device", None)]:
        params = parameters(num_devices)
        run(Trainer(params, "adam", None, kvstore, None, on_store), params, range(3))
        found.append(host(params))
    params = parameters(num_devices)
    run(Trainer(params, "adam", None, "teststore"), params, range(3))
    assert [*found[1:], host(params)] == [found[0]] * 3


def test_all_copies_of_a_parameter_begin_with_the_first_ones_values() -> None:
    params = {"w": Parameter([np.zeros(2), np.ones(2)], [np.zeros(2)] * 2, grad_req="null")}
    Trainer(params, "sgd", kvstore="local").step(1)
    assert params["w"].list_data()[1].tolist() == [0, 0]


def test_a_changed_batch_size_keeps_the_states() -> None:
    for on_store in True, False:
        params = parameters()
        trainer = Trainer(params, "sgd", SGD, "local", update_on_kvstore=on_store)
        run(trainer, params, range(2), batch_size=8)
        run(trainer, params, range(2, 4), batch_size=2)
        weights = {name: value.astype("f8") for name, value in values(0).items()}
        for name, weight in weights.items():
            momentum = np.zeros(SHAPES[name])
            for step, batch_size in enumerate([8, 8, 2, 2]):
                grad = values(100 * step + 1)[name] / batch_size + SGD["wd"] * weight
                momentum = SGD["momentum"] * momentum - SGD["learning_rate"] * grad
                weight = weight + momentum
            np.testing.assert_allclose(params[name].data[0], weight, rtol=1e-5, atol=1e-6)


def test_the_optimizers_own_rescale_grad_is_a_factor() -> None:
    twice, same = parameters(), parameters()
    run(Trainer(twice, "sgd", {"rescale_grad": 2.0}), twice, range(2), batch_size=8)
    run(Trainer(same, "sgd"), same, range(2), batch_size=4)
    assert host(twice) == host(same)


def test_gradients_may_be_clipped_between_the_sum_and_the_update() -> None:
    params = parameters(2)
    trainer = Trainer(params, "sgd", {"learning_rate": 1.0}, "local", None, False)
    for name, parameter in params.items():
        parameter.grad = [np.full(SHAPES[name], 3, "f4"), np.full(SHAPES[name], 4, "f4")]
    trainer.allreduce_grads()
    for parameter in params.values():
        for grad in parameter.list_grad():
            assert (grad == 7).all()
            grad[...] = 2
    trainer.update(1)
    for name, value in values(0).items():
        assert [copy.tobytes() for copy in params[name].list_data()] == [(value - 2).tobytes()] * 2


@pytest.mark.parametrize("call", ["allreduce_grads", "update"])
def test_sums_and_updates_cannot_be_had_apart_where_the_store_updates(call: str) -> None:
    params = parameters(2)
    trainer = Trainer(params, "sgd", kvstore="local")
    with pytest.raises(UsageError, match=f"{call} cannot be used when the store updates"):
        getattr(trainer, call)(*([1] if call == "update" else []))


def test_without_a_store_allreduce_grads_has_nothing_to_do() -> None:
    params = parameters()
    trainer = Trainer(params, "sgd")
    params["weight"].grad = [np.ones(SHAPES["weight"], "f4")]
    trainer.allreduce_grads()
    trainer.update(1, ignore_stale_grad=True)
    assert params["weight"].grad[0].all()


@pytest.mark.parametrize("batch_size", [0, -1, float("inf"), float("nan"), True, "8"])
def test_a_batch_size_is_a_positive_number(batch_size: Any) -> None:
    trainer = Trainer(parameters(), "sgd")
    with pytest.raises((ArgumentTypeError, ArgumentValueError), match="batch_size must be"):
        trainer.step(batch_size)


class CountingStore(mx.KVStoreBase):
    """A plug-in that knows single keys only, and can run an optimizer."""

    def __init__(self) -> None:
        self.inside = mx.kv.create("local")
        self.calls: list[str] = []

    @property
    def type(self) -> str:
        return "countingstore"

    @property
    def rank(self) -> int:
        return 0

    @property
    def num_workers(self) -> int:
        return 1

    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None:
        assert isinstance(key, str)
        self.calls.append("broadcast")
        self.inside.broadcast(key, value, out)

    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        assert isinstance(key, str)
        self.calls.append("pushpull")
        self.inside.pushpull(key, value, out)

    def is_capable(self, capability: str) -> bool:
        return True

    def set_optimizer(self, optimizer: Any) -> None:
        self.calls.append("set_optimizer")
        self.inside.set_optimizer(optimizer)

    def save_optimizer_states(self, fname: Any, dump_optimizer: bool = False) -> None:
        self.inside.save_optimizer_states(fname, dump_optimizer)

    def load_optimizer_states(self, fname: Any) -> None:
        self.inside.load_optimizer_states(fname)


def test_a_plug_in_that_runs_an_optimizer_gets_single_keys_and_new_numbers(
    tmp_path: Path,
) -> None:
    store = CountingStore()
    params, others = parameters(2), parameters(2)
    trainer = Trainer(params, "sgd", SGD, store)
    expected = Trainer(others, "sgd", SGD, "local")
    for batch_size in 8, 8, 4:
        run(trainer, params, range(1), batch_size)
        run(expected, others, range(1), batch_size)
    assert host(params) == host(others)
    num_keys = len(SHAPES)
    assert store.calls.count("pushpull") == 3 * num_keys
    assert store.calls.count("set_optimizer") == 2
    trainer.save_states(tmp_path / "states")
    trainer.load_states(tmp_path / "states")
    run(trainer, params, range(1))


def test_a_step_is_one_call_to_a_store_of_this_package() -> None:
    store = mx.kv.create("local")
    params = parameters()
    trainer = Trainer(params, "sgd", SGD, store)
    run(trainer, params, range(1))
    before = store.stats()["store"]
    run(trainer, params, range(1, 2))
    after = store.stats()["store"]
    assert (after["pushes"] - before["pushes"], after["pulls"] - before["pulls"]) == (1, 1)


# -- learning rates ---------------------------------------------------------------------------


@pytest.mark.parametrize("on_store", [True, False])
def test_a_new_learning_rate_counts_from_the_next_step_on_and_keeps_the_states(
    on_store: bool,
) -> None:
    params, expected = parameters(), parameters()
    trainer = Trainer(params, "sgd", SGD, "local", update_on_kvstore=on_store)
    run(trainer, params, range(2))
    trainer.set_learning_rate(0.01)
    assert trainer.learning_rate == trainer.optimizer.params()["learning_rate"] == 0.01
    run(trainer, params, range(2, 4))
    store = mx.kv.create("local")
    store.set_optimizer(mx.optimizer.create("sgd", **SGD, rescale_grad=1 / 8))
    store.init(list(SHAPES), [each.data[0] for each in expected.values()])
    for step in range(4):
        if step == 2:
            store.set_optimizer_params(lr=0.01)
        store.push(list(SHAPES), list(values(100 * step + 1).values()))
    for name, parameter in params.items():
        assert store.pull(name).tobytes() == parameter.data[0].tobytes()


def test_a_store_has_the_new_learning_rate_at_once() -> None:
    store = mx.kv.create("local")
    params = parameters()
    trainer = Trainer(params, "sgd", SGD, store)
    trainer.set_learning_rate(0.3)  # before there is anything in the store
    run(trainer, params, range(1))
    assert store.optimizer_params()["learning_rate"] == 0.3
    trainer.set_learning_rate(0.2)
    assert store.optimizer_params()["learning_rate"] == 0.2


def test_with_a_schedule_the_rate_cannot_be_set_and_follows_the_steps() -> None:
    schedule = mx.lr_scheduler.FactorScheduler(step=2, factor=0.5)
    params = parameters()
    trainer = Trainer(params, "sgd", {"learning_rate": 1.0, "lr_scheduler": schedule})
    assert trainer.learning_rate == 1.0
    with pytest.raises(UsageError, match="has an lr_scheduler"):
        trainer.set_learning_rate(0.1)
    run(trainer, params, range(3))
    assert trainer.learning_rate == 0.5


def test_a_learning_rate_that_is_none_changes_nothing() -> None:
    trainer = Trainer(parameters(), "sgd", SGD)
    with pytest.raises(OptimizerParameterError, match="learning_rate of SGD"):
        trainer.set_learning_rate("fast")  # type: ignore[arg-type]
    assert trainer.learning_rate == SGD["learning_rate"]


def test_multipliers_of_parameters_reach_the_optimizer() -> None:
    params = {
        "still": Parameter(np.ones(2, "f4"), np.ones(2, "f4"), lr_mult=0.0),
        "half": Parameter(np.ones(2, "f4"), np.ones(2, "f4"), lr_mult=0.5, wd_mult=0.0),
    }
    sgd = mx.optimizer.SGD(learning_rate=0.5, wd=0.5, lr_mult={"half": 9.0})
    trainer = Trainer(params, sgd)
    trainer.step(1)
    assert params["still"].data.tolist() == [1, 1]
    assert params["half"].data.tolist() == [0.75, 0.75]


# -- gradients that are missing ---------------------------------------------------------------


@pytest.mark.parametrize("kvstore", [None, "local"])
def test_a_missing_gradient_is_an_error_that_names_the_parameter_and_changes_nothing(
    kvstore: str | None,
) -> None:
    params = parameters()
    trainer = Trainer(params, "sgd", SGD, kvstore, update_on_kvstore=kvstore == "local")
    run(trainer, params, range(1))
    before = host(params)
    params["bias"].grad = None
    with pytest.raises(UsageError, match=r"'bias' has no gradient.*ignore_stale_grad"):
        trainer.step(8)
    assert host(params) == before


@pytest.mark.parametrize("on_store", [True, False])
def test_ignored_parameters_without_gradient_keep_weight_and_count(on_store: bool) -> None:
    params, others = parameters(2), parameters(2)
    trainer = Trainer(params, "adam", None, "local", update_on_kvstore=on_store)
    run(trainer, params, range(1))
    before = host(params)
    for parameter in params.values():
        parameter.grad = None
    trainer.step(8, ignore_stale_grad=True)
    assert host(params) == before
    run(trainer, params, range(1, 2))
    run(Trainer(others, "adam", None, "local"), others, range(2))
    assert host(params) == host(others)


@pytest.mark.parametrize("on_store", [True, False])
def test_a_device_without_gradient_adds_nothing_when_that_is_ignored(on_store: bool) -> None:
    params = {"w": Parameter([np.zeros(2, "f4") for _ in range(2)])}
    trainer = Trainer(params, "sgd", {"learning_rate": 1.0}, "local", None, on_store)
    params["w"].grad = [None, np.ones(2, "f4")]
    with pytest.raises(UsageError, match="'w' has no gradient on device 0"):
        trainer.step(1)
    trainer.step(1, ignore_stale_grad=True)
    assert [copy.tolist() for copy in params["w"].list_data()] == [[-1, -1]] * 2


def test_a_frozen_parameter_stays_and_needs_no_gradient() -> None:
    params = {
        "w": Parameter(np.ones(2), np.ones(2)),
        "frozen": Parameter(np.ones(2), grad_req="null"),
    }
    Trainer(params, "sgd", {"learning_rate": 1.0}).step(1)
    assert params["w"].data.tolist() == [0, 0]
    assert params["frozen"].data.tolist() == [1, 1]


# -- files ------------------------------------------------------------------------------------

HOMES: dict[str, tuple[Any, ...]] = {
    "no store": (None,),
    "on the store": ("local", None, True),
    "store that adds": ("local", None, False),
}


@pytest.mark.parametrize("saver", HOMES)
@pytest.mark.parametrize("loader", HOMES)
def test_training_that_is_resumed_gives_the_bits_of_one_that_went_on(
    tmp_path: Path, saver: str, loader: str
) -> None:
    schedule = mx.lr_scheduler.FactorScheduler(step=2, factor=0.5)
    params = parameters()
    trainer = Trainer(params, "adam", {"lr_scheduler": schedule, "wd": 0.1}, *HOMES[saver])
    run(trainer, params, range(3))
    trainer.save_states(tmp_path / "states")
    saved = {name: Parameter([each.data[0].copy()]) for name, each in params.items()}
    run(trainer, params, range(3, 6))

    resumed = Trainer(saved, "adam", {"learning_rate": 77.0}, *HOMES[loader])
    resumed.load_states(tmp_path / "states")
    assert resumed.learning_rate == 0.0005  # the file's optimizer, at its third update
    run(resumed, saved, range(3, 6))
    assert host(saved) == host(params)
    assert resumed.optimizer == trainer.optimizer
    assert resumed.learning_rate == trainer.learning_rate


@pytest.mark.parametrize("home", HOMES)
def test_states_of_other_parameters_are_refused_and_training_goes_on(
    tmp_path: Path, home: str
) -> None:
    other = Trainer({"w": Parameter(np.zeros(2), np.zeros(2))}, "sgd", SGD)
    other.step(1)
    other.save_states(tmp_path / "states")
    params = parameters()
    trainer = Trainer(params, "adam", None, *HOMES[home])
    with pytest.raises(CheckpointError):
        trainer.load_states(tmp_path / "states")
    assert trainer.optimizer.name == "adam"
    run(trainer, params, range(1))


def test_states_can_be_saved_before_the_first_step(tmp_path: Path) -> None:
    params = parameters()
    Trainer(params, "sgd", SGD).save_states(tmp_path / "states")
    trainer = Trainer(params, "sgd", SGD)
    trainer.load_states(tmp_path / "states")
    run(trainer, params, range(1))
    for name, expected in by_hand(range(1)).items():
        np.testing.assert_allclose(params[name].data[0], expected, rtol=1e-5, atol=1e-6)


# -- which store ------------------------------------------------------------------------------


def test_one_cpu_needs_no_store_of_one_process_and_two_devices_do() -> None:
    assert Trainer(parameters(1), "sgd").kvstore is None
    assert Trainer(parameters(1), "sgd", kvstore="local").num_workers == 1
    store = Trainer(parameters(2), "sgd").kvstore
    assert store is not None
    assert store.type == "device"
    assert Trainer(parameters(1), "sgd", kvstore="teststore").kvstore is not None
    assert Trainer(parameters(1), "sgd", update_on_kvstore=True).update_on_kvstore
    assert not Trainer(parameters(1), "sgd").update_on_kvstore
    assert not Trainer(parameters(2), "sgd", kvstore="teststore").update_on_kvstore


def test_a_local_store_with_a_huge_array_only_adds_unless_it_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvstore.mxnet.gluon.trainer_store.LARGE_ELEMENTS", 11)
    assert not Trainer(parameters(2), "sgd", kvstore="local").update_on_kvstore
    assert Trainer(parameters(2), "sgd", kvstore="device").update_on_kvstore
    assert Trainer(parameters(2), "sgd", None, "local", None, True).update_on_kvstore


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"kvstore": None, "update_on_kvstore": True}, "needs a store, but kvstore is None"),
        ({"kvstore": None, "compression_params": {}}, "compression_params needs a store"),
        ({"kvstore": None, "params": 2}, "on 2 devices.*kvstore is None"),
        ({"kvstore": "teststore", "update_on_kvstore": True}, "cannot run an optimizer"),
        ({"kvstore": "teststore", "compression_params": {}}, "cannot compress"),
        (
            {"optimizer": mx.optimizer.SGD(), "optimizer_params": SGD},
            "can be used only with the name of an optimizer",
        ),
    ],
    ids=str,
)
def test_impossible_combinations_are_value_errors(options: dict[str, Any], text: str) -> None:
    options = {"optimizer": "sgd", **options, "params": parameters(options.get("params", 1))}
    with pytest.raises(ValueError, match=text) as caught:
        _ = Trainer(**options).kvstore
    assert isinstance(caught.value, UsageError)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"kvstore": 7}, ArgumentTypeError),
        ({"update_on_kvstore": 1}, ArgumentTypeError),
        ({"compression_params": 1}, ArgumentTypeError),
        ({"optimizer_params": [1]}, ArgumentTypeError),
        ({"optimizer": "none such"}, UnknownOptimizerError),
        ({"optimizer_params": {"speed": 1}}, OptimizerParameterError),
    ],
    ids=str,
)
def test_wrong_arguments_are_refused_at_once(options: dict[str, Any], error: type) -> None:
    with pytest.raises(error):
        Trainer(parameters(), **{"optimizer": "sgd", **options})


def test_compression_is_refused_as_the_store_refuses_it() -> None:
    trainer = Trainer(parameters(), "sgd", compression_params={"type": "3bit"})
    with pytest.raises(ArgumentValueError, match="unknown codec '3bit'"):
        trainer.step(1)


def test_a_store_with_an_optimizer_cannot_only_add() -> None:
    store = mx.kv.create("local")
    store.set_optimizer(mx.optimizer.SGD())
    params = parameters()
    with pytest.raises(UsageError, match="needs a store without an optimizer"):
        run(Trainer(params, "sgd", None, store, None, False), params, range(1))


def test_two_trainers_of_the_same_names_need_two_stores() -> None:
    store = mx.kv.create("local")
    params = parameters()
    run(Trainer(params, "sgd", None, store), params, range(1))
    with pytest.raises(UsageError, match="one store for each Trainer"):
        run(Trainer(params, "sgd", None, store), params, range(1))


# -- parameters -------------------------------------------------------------------------------


def test_a_mapping_is_taken_in_the_order_of_its_names_and_a_list_in_its_own() -> None:
    a, b = Parameter(np.zeros(1)), Parameter(np.zeros(1))
    assert list(collect({"b": b, "a": a})) == ["a", "b"]
    assert list(collect([("b", b), ("a", a)])) == ["b", "a"]
    assert collect([b, a]) == {0: b, 1: a}
    named = [Parameter(np.zeros(1), name=name) for name in ("y", "x")]
    assert list(collect(iter(named))) == ["y", "x"]
    assert list(collect([*named, a])) == [0, 1, 2]


def test_tied_weights_are_one_parameter() -> None:
    tied = Parameter(np.zeros(1), np.ones(1))
    assert list(collect([("encoder", tied), ("decoder", tied)])) == ["encoder"]


@pytest.mark.parametrize(
    "params",
    [
        Parameter(np.zeros(1)),
        "weight",
        7,
        np.zeros(3),
        [np.zeros(3)],
        {"w": np.zeros(3)},
        {1: Parameter(np.zeros(1))},
        [("w", None)],
        [[]],
    ],
    ids=range(9),
)
def test_what_is_no_parameter_is_refused(params: Any) -> None:
    with pytest.raises(ArgumentTypeError):
        Trainer(params, "sgd")


@pytest.mark.parametrize(
    ("params", "text"),
    [
        (list, "params is empty"),
        (
            lambda: [("w", Parameter(np.zeros(1))), ("w", Parameter(np.zeros(1)))],
            "used more than once: w",
        ),
        (
            lambda: [Parameter(np.zeros(1)), Parameter([np.zeros(1)] * 2)],
            "the same number of devices",
        ),
        (lambda: [Parameter([])], "empty list of arrays"),
        (lambda: [Parameter([np.zeros(1), np.zeros(2)])], "must have one shape and dtype"),
        (
            lambda: [Parameter(np.zeros(1), [np.zeros(1)] * 2)],
            "needs one gradient for each of its 1 devices, got 2",
        ),
        (lambda: [Parameter(np.zeros(1), grad_req="never")], "grad_req must be one of"),
    ],
)
def test_parameters_that_do_not_fit_together_are_refused(params: Any, text: str) -> None:
    with pytest.raises(ArgumentValueError, match=text):
        Trainer(params(), "sgd")


def test_a_parameter_shows_what_it_was_given_and_zeroes_its_gradients_in_place() -> None:
    data, grad = np.zeros(2), np.ones(2)
    single = Parameter(data, grad, "w")
    assert single.data is data
    assert single.grad is grad
    assert single.list_data()[0] is data
    single.zero_grad()
    assert grad.tolist() == [0, 0]
    several = Parameter([data, data.copy()], name="several")
    assert several.list_grad() == [None, None]
    several.zero_grad()
    with pytest.raises(ArgumentTypeError, match="a parameter's name"):
        Parameter(data, name=7)  # type: ignore[arg-type]


def test_an_optimizer_without_rescale_grad_is_refused() -> None:
    @dataclasses.dataclass(frozen=True)
    class Plain(mx.optimizer.Optimizer):
        learning_rate: float = 0.1

    with pytest.raises(ArgumentValueError, match="the field rescale_grad"):
        Trainer(parameters(), Plain())


# -- array libraries --------------------------------------------------------------------------


@pytest.mark.parametrize(("kvstore", "num_devices"), [(None, 1), ("local", 1), ("local", 2)])
def test_arrays_of_all_libraries_give_the_same_bits(kvstore: str | None, num_devices: int) -> None:
    torch = pytest.importorskip("torch")
    found = []
    for make in np.array, mx.nd.array, torch.tensor:
        params = parameters(num_devices, make)
        trainer = Trainer(params, "adam", {"wd": 0.1}, kvstore)
        run(trainer, params, range(3), make=make)
        found.append({k: np.asarray(p.list_data()[-1]).tobytes() for k, p in params.items()})
    tensors = [
        [torch.nn.Parameter(torch.tensor(value)) for _ in range(num_devices)]
        for value in values(0).values()
    ]
    trainer = Trainer(zip(SHAPES, tensors, strict=True), "adam", {"wd": 0.1}, kvstore)
    for step in range(3):
        for name, copies in zip(SHAPES, tensors, strict=True):
            for index, copy in enumerate(copies):
                copy.grad = torch.tensor(values(100 * step + index + 1)[name])
        trainer.step(8)
    rows = zip(SHAPES, tensors, strict=True)
    found.append({name: copies[-1].detach().numpy().tobytes() for name, copies in rows})
    assert found[1:] == [found[0]] * 3


def test_a_tensors_gradient_is_its_own_and_the_weight_stays_a_leaf() -> None:
    torch = pytest.importorskip("torch")
    net = torch.nn.Linear(3, 2)
    frozen = torch.nn.Linear(2, 2).requires_grad_(False)
    named = [*net.named_parameters(), *frozen.named_parameters(prefix="frozen")]
    before = [tensor.detach().clone() for _, tensor in named]
    trainer = Trainer(named, "sgd", {"learning_rate": 1.0})
    with pytest.raises(UsageError, match="'weight' has no gradient"):
        trainer.step(1)
    frozen(net(torch.ones(1, 3))).sum().backward()
    grads = [net.weight.grad.clone(), net.bias.grad.clone()]
    trainer.step(1)
    for (_, tensor), old, grad in zip(named, before, [*grads, 0, 0], strict=True):
        assert torch.equal(tensor.detach(), old - grad)
        assert tensor.is_leaf
    assert list(collect(net.parameters())) == [0, 1]


@pytest.mark.parametrize("what", ["module", "list of modules", "tensor", "computed", "lazy"])
def test_what_of_pytorch_is_no_parameter_is_refused(what: str) -> None:
    torch = pytest.importorskip("torch")
    net = torch.nn.Linear(3, 2)
    params = {
        "module": net,
        "list of modules": [net],
        "tensor": net.weight,
        "computed": [net.weight * 2],
        "lazy": torch.nn.LazyLinear(2).parameters(),
    }[what]
    with pytest.raises(ArgumentTypeError):
        Trainer(params, "sgd")


# -- what workers compare ---------------------------------------------------------------------


def test_workers_with_the_same_plans_agree_and_others_are_named() -> None:
    same = np.array([[32, 0.1, 7, 3, 0], [32, 0.1, 7, 3, 0]])
    check_plans(same)
    for column, error, text in [
        (0, OptimizerMismatch, "batch sizes.*worker 1 5"),
        (1, OptimizerMismatch, "learning rates.*worker 1 5"),
        (2, UsageError, "different parameters"),
        (3, OptimizerMismatch, "lr_mult and wd_mult"),
        (4, UsageError, "were set or loaded since.*worker 0 0, worker 1 5 of them"),
    ]:
        table = same.copy()
        table[1, column] = 5
        with pytest.raises(error, match=text):
            check_plans(table)


def test_workers_have_to_update_and_average_alike() -> None:
    check_starts(np.ones((2, 5)))
    for column, text in [
        (1, "update_on_kvstore differs.*worker 0 1, worker 1 0"),
        (3, "reduction"),
    ]:
        table = np.ones((2, 5))
        table[1, column] = 0
        with pytest.raises(UsageError, match=text):
            check_starts(table)


def test_what_workers_give_is_compared_name_by_name() -> None:
    one, other = (
        described(mx.optimizer.SGD(learning_rate=rate, rescale_grad=1 / size))
        for rate, size in ((0.1, 8), (0.2, 4))
    )
    text = differences([one, one, other])
    assert "learning_rate is 0.1 on worker 0, 0.1 on worker 1, 0.2 on worker 2" in text
    assert "batch size (1 / rescale_grad) is 8 on worker 0, 8 on worker 1, 4 on worker 2" in text
    assert "momentum" not in text
    assert differences([{"a": "1"}, {"b": "1"}]) == (
        "a is 1 on worker 0, missing on worker 1; b is missing on worker 0, 1 on worker 1"
    )
    assert differences([{"a": "1"}, {"a": "1"}]) == "they come in a different order"
    many = [{str(number): str(rank) for number in range(8)} for rank in (0, 1)]
    assert differences(many).endswith("4 is 0 on worker 0, 1 on worker 1; and 3 more differ")


def test_fingerprints_tell_lists_apart() -> None:
    assert len({fingerprint(items) for items in ([], ["1"], [1], ["a", "b"], ["b", "a"])}) == 5


# -- cutting batches --------------------------------------------------------------------------


def libraries() -> Iterator[Any]:
    yield np.asarray
    yield mx.nd.array
    yield pytest.importorskip("torch").tensor


@pytest.mark.parametrize("library", [0, 1, 2], ids=["numpy", "nd", "torch"])
def test_slices_lie_in_order_and_the_first_take_what_is_left(library: int) -> None:
    data = list(libraries())[library](np.arange(20.0).reshape(10, 2))
    rows = [np.asarray(part)[:, 0].tolist() for part in split_data(data, 3, even_split=False)]
    assert rows == [[0, 2, 4, 6], [8, 10, 12], [14, 16, 18]]
    columns = [np.asarray(part).shape for part in split_data(data, 2, batch_axis=1)]
    assert columns == [(10, 1), (10, 1)]
    loaded = split_and_load(data, [mx.cpu(0), mx.cpu(1)])
    assert [np.asarray(part).shape for part in loaded] == [(5, 2), (5, 2)]
    assert all(type(part) is type(data) for part in loaded)
    assert len(split_and_load(data, (mx.cpu(),))) == 1


def test_loaded_ndarrays_are_on_their_contexts() -> None:
    loaded = mx.gluon.utils.split_and_load(mx.nd.ones((4, 1)), [mx.cpu(0), mx.cpu(1)])
    assert [part.context for part in loaded] == [mx.cpu(0), mx.cpu(1)]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((3,), "cannot be split evenly into 3"),
        ((11, 0, False), "leaves some of 11 slices empty"),
        ((0,), "num_slice must be at least 1"),
        ((2, 2), "must be from 0 to 1, got 2"),
        ((2, -1), "must be from 0 to 1, got -1"),
    ],
)
def test_batches_that_cannot_be_cut_are_value_errors(arguments: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        split_data(np.zeros((10, 2)), *arguments)


@pytest.mark.parametrize(
    "call",
    [
        lambda: split_data([1, 2], 2),
        lambda: split_data(np.zeros(2), 2.0),  # type: ignore[arg-type]
        lambda: split_data(np.zeros(2), 2, None),  # type: ignore[arg-type]
        lambda: split_and_load(np.zeros(2), mx.cpu()),  # type: ignore[arg-type]
        lambda: split_and_load(np.zeros(2), ["cpu", "cpu"]),  # type: ignore[list-item]
    ],
)
def test_what_is_no_array_number_or_context_is_refused(call: Callable[[], Any]) -> None:
    with pytest.raises(ArgumentTypeError):
        call()
