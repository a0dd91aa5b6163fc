"""Plug-ins: the smallest store, the registry of stores, and one of a user's own."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

import kvstore
from kvstore import KVStoreBase, optimizer
from kvstore.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    NotSupportedError,
    ValueMismatchError,
)
from kvstore.kvstore import TestStore as SmallestStore


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVStoreBase, "kv_registry", dict(KVStoreBase.kv_registry))


# -- the smallest store -------------------------------------------------------------------


def test_it_is_made_by_its_name_and_says_what_it_is() -> None:
    kv = kvstore.create("TestStore")
    assert type(kv) is SmallestStore
    assert (kv.type, kv.rank, kv.num_workers) == ("teststore", 0, 1)
    assert isinstance(kv, KVStoreBase)
    assert not isinstance(kv, kvstore.KVStore)


def test_a_broadcast_copies_the_value_and_may_be_repeated() -> None:
    kv = kvstore.create("teststore")
    outs = [np.zeros(3), np.zeros(3, np.float32)]
    for value in (1.0, 2.0):
        kv.broadcast("w", np.full(3, value), out=outs)
        for out in outs:
            np.testing.assert_array_equal(out, np.full(3, value))


def test_a_pushpull_adds_up_into_the_outs_or_in_place() -> None:
    kv = kvstore.create("teststore")
    values = [np.full(3, 1.0), np.full(3, 2.0), np.full(3, 4.0)]
    out = np.zeros(3)
    kv.pushpull(3, values, out=out)
    np.testing.assert_array_equal(out, np.full(3, 7.0))
    np.testing.assert_array_equal(values[0], np.full(3, 1.0))
    kv.pushpull(3, values)
    for value in values:
        np.testing.assert_array_equal(value, np.full(3, 7.0))


def test_lists_of_keys_are_lists_of_values() -> None:
    kv = kvstore.create("teststore")
    outs = [np.zeros(2), np.zeros(3)]
    kv.broadcast(["a", "b"], [np.ones(2), np.full(3, 2.0)], out=outs)
    kv.pushpull(["a", "b"], [[outs[0], outs[0]], [outs[1]] * 3], out=outs)
    assert [out.tolist() for out in outs] == [[2.0] * 2, [6.0] * 3]


def test_values_that_do_not_fit_are_refused() -> None:
    kv = kvstore.create("teststore")
    with pytest.raises(ValueMismatchError, match=r"\(3,\)"):
        kv.broadcast("w", np.ones(3), out=np.ones(4))
    with pytest.raises(ValueMismatchError):
        kv.pushpull("w", np.ones(3), out=np.ones(4))
    with pytest.raises(ArgumentTypeError):
        kv.pushpull("w", [1.0, 2.0])


def test_it_has_no_optimizer_and_nothing_to_save() -> None:
    kv = kvstore.create("teststore")
    assert not kv.is_capable("optimizer")
    assert not SmallestStore.is_capable("Optimizer")  # it needs no object
    with pytest.raises(ArgumentValueError, match="unknown capability"):
        kv.is_capable("flying")
    for call in (
        lambda: kv.set_optimizer(optimizer.create("sgd")),
        lambda: kv.save_optimizer_states("nowhere"),
        lambda: kv.load_optimizer_states("nowhere"),
    ):
        with pytest.raises(NotImplementedError):
            call()


# -- stores of one's own ------------------------------------------------------------------


def test_a_store_of_ones_own_is_made_by_its_name_in_lower_case() -> None:
    @KVStoreBase.register
    class Doubling(KVStoreBase):
        """Every pushpull gives twice the value."""

        def __init__(self, factor: float = 2.0) -> None:
            self.factor = factor

        @property
        def type(self) -> str:
            return "doubling"

        def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
            (out if out is not None else value)[:] = value * self.factor

    kv = kvstore.create("DOUBLING", factor=3.0)
    assert type(kv) is Doubling
    value = np.ones(3)
    kv.pushpull("w", value)
    np.testing.assert_array_equal(value, np.full(3, 3.0))
    assert kvstore.create("doubling").factor == 2.0


def test_what_a_plug_in_leaves_out_is_not_implemented() -> None:
    @KVStoreBase.register
    class Nothing(KVStoreBase):
        pass

    kv = kvstore.create("nothing")
    for call in (
        lambda: kv.type,
        lambda: kv.rank,
        lambda: kv.num_workers,
        lambda: kv.broadcast("w", 1, 2),
        lambda: kv.pushpull("w", 1),
        lambda: kv.is_capable("optimizer"),
        lambda: kv.set_optimizer(None),
    ):
        with pytest.raises(NotImplementedError):
            call()


def test_what_a_plug_in_lacks_of_other_stores_is_refused_with_what_to_do() -> None:
    kv = kvstore.create("teststore")
    with pytest.raises(NotSupportedError, match="does not support row-sparse values; pass dense"):
        kv.row_sparse_pull("w", row_ids=[0])
    with pytest.raises(
        NotSupportedError, match="teststore store does not support growing tables; create"
    ):
        kv.create_table("t", 4)
    with pytest.raises(
        NotSupportedError, match="teststore store cannot compress gradients; do not"
    ):
        kv.set_gradient_compression({"type": "2bit"})


def test_another_class_of_the_same_name_replaces_and_warns() -> None:
    def made() -> type:
        class Twice(KVStoreBase):
            pass

        return Twice

    first, second = made(), made()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert KVStoreBase.register(first) is first
        assert KVStoreBase.register(first) is first  # the same one again is nothing new
    with pytest.warns(UserWarning, match=r"Twice replaces .*Twice"):
        KVStoreBase.register(second)
    assert type(kvstore.create("twice")) is second


def test_a_plug_in_may_replace_a_store_of_this_package() -> None:
    """The registry is asked first, as in the original."""

    @KVStoreBase.register
    class Local(KVStoreBase):
        pass

    assert type(kvstore.create("local")) is Local


@pytest.mark.parametrize("wrong", [3, "Store", None, KVStoreBase.register])
def test_only_classes_can_be_registered(wrong: Any) -> None:
    before = dict(KVStoreBase.kv_registry)
    with pytest.raises(ArgumentTypeError, match="needs a class"):
        KVStoreBase.register(wrong)
    assert KVStoreBase.kv_registry == before


def test_an_unknown_name_is_an_error_that_lists_plug_ins_too() -> None:
    @KVStoreBase.register
    class MyOwnStore(KVStoreBase):
        pass

    with pytest.raises(kvstore.errors.UnknownTypeError, match="myownstore"):
        kvstore.create("my_own_store")
