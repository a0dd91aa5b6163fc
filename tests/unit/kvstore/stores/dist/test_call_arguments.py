"""Arguments of calls: usual ones are recognised at a glance, with the checks' results."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvstore as mx
from kvstore.arrays import dtypes
from kvstore.arrays.context import Context
from kvstore.arrays.keys import KeySpec
from kvstore.arrays.pending import begin
from kvstore.errors import UnknownKeyError
from kvstore.stores.arguments import KeyTable
from kvstore.stores.dist import arguments as calls
from kvstore.stores.dist.arguments import (
    Checked,
    checked_values,
    sum_on,
    sums_on_host,
)
from kvstore.stores.dist.plan import Bucket, Buckets, flat_bytes, flat_bytes_of
from pslite import Future
from pslite.errors import PSError

SPECS = {
    "matrix": KeySpec((2, 3), np.dtype(np.float32)),
    "vector": KeySpec((3,), np.dtype(np.float64)),
    "scalar": KeySpec((), np.dtype(np.int64)),
    "empty": KeySpec((0, 2), np.dtype(np.float32)),
}
NUMBERS = {1: KeySpec((2,), np.dtype(np.complex64)), 0: KeySpec((2,), np.dtype(bool))}


def table(specs: Any = SPECS) -> Buckets:
    made = KeyTable()
    made.add(specs)
    return Buckets(made)


values_to_push = checked_values
values_to_fill = partial(checked_values, are_written=True)


def plain(spec: KeySpec) -> np.ndarray[Any, Any]:
    return np.full(spec.shape, 1).astype(spec.dtype)


# -- what is usual ------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["vector", ["vector", "matrix"], ("empty", "scalar"), list(SPECS)])
def test_plain_arrays_of_known_keys_are_used_as_they_are(key: Any) -> None:
    keys = [key] if isinstance(key, str) else key
    arrays = [plain(SPECS[each]) for each in keys]
    value = arrays[0] if isinstance(key, str) else type(key)(arrays)
    for values in (values_to_push(table(), key, value), values_to_fill(table(), key, value)):
        assert (values.keys.keys, values.lazy) == (tuple(keys), None)
        assert values.plain is not None
        assert all(one is other for one, other in zip(values.plain, arrays, strict=True))
        sent, are_ours = values.memory_to_send(sums_on_host)
        assert not are_ours
        for memory in (sent, values.landing().memories):
            for flat, array in zip(memory, arrays, strict=True):
                assert (flat.dtype, flat.shape) == (np.uint8, (array.nbytes,))
                assert not array.size or np.shares_memory(flat, array)
        assert values.landing().is_final


def test_several_values_for_a_key_are_added_up_and_a_single_one_is_its_own_memory() -> None:
    """Whether the values of a key are one or many, and lazy or not, is the key's own affair."""
    rng = np.random.default_rng(0)
    several = [rng.normal(size=(2, 3)).astype(np.float32) * 10.0**power for power in (4, -3, 0)]
    single = rng.normal(size=3)
    lazy = [mx.nd.array(array, dtype="float32") for array in several]
    total = (several[0] + several[1]) + several[2]
    for pushed in (several, lazy, [several[0], lazy[1], several[2]]):
        values = values_to_push(table(), ["matrix", "vector"], [pushed, [single]])
        (first, second), are_ours = values.memory_to_send(sums_on_host)
        assert first.tobytes() == total.tobytes()
        assert np.shares_memory(second, single)
        assert not are_ours


def test_a_sum_on_the_host_has_the_dtype_of_its_key_and_memory_of_its_own() -> None:
    ones = [np.full(3, 1, np.float16) for _ in range(3)]
    ones[0][:] = 2048  # in float16, which has no 2049, the sum would stay 2048
    memory = sum_on(Context("cpu", 0), ones, KeySpec((3,), np.dtype(np.float16)))
    assert memory.view(np.float16).tolist() == [2050] * 3
    assert not any(np.shares_memory(memory, array) for array in ones)


def test_ndarrays_are_recognised_by_what_they_wrap_and_waited_for() -> None:
    array = mx.nd.ones((3,), dtype="float64")
    values = values_to_fill(table(), ["vector"], [array])
    assert values.plain is not None
    assert (values.lazy, values.plain[0] is array._array) == ([array], True)
    arrives: Future[None] = Future()
    waited: list[str] = []

    def wait(future: Future[Any]) -> None:
        waited.append("waited")
        future.set_result(None)

    begin(arrives, [array._uses], (), wait)
    values.memory_to_send(sums_on_host)
    assert waited == ["waited"]
    begin(Future(), (), [array._uses], wait)
    values.landing()
    assert waited == ["waited"] * 2


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("vector", [np.zeros(3)]),
        ("vector", np.zeros(3, np.float32)),
        ("vector", np.zeros(6)[::2]),
        ("vector", np.zeros(3, ">f8")),
        ("vector", np.zeros(3).view(np.recarray)),
        (["vector", "vector"], [np.zeros(3)] * 2),
        ("matrix", np.zeros((3, 2), np.float32).T),
        (["matrix", "vector"], [mx.nd.zeros((2, 3)), np.zeros(3)]),
        (np.str_("vector"), np.zeros(3)),
        ([], []),
    ],
)
def test_everything_else_is_looked_at_key_by_key(key: Any, value: Any) -> None:
    values = values_to_fill(table(), key, value)
    assert values.plain is None


def test_a_list_of_keys_is_worked_out_once_until_a_key_changes() -> None:
    known = table()
    first = known.usual(["vector", "matrix"])
    other = known.of(("matrix",))
    assert first is not None
    assert known.usual(("vector", "matrix")) is known.of(("vector", "matrix")) is first
    assert first.nbytes == 24 + 24
    known.table.add({"new": SPECS["vector"]})
    assert known.usual(["vector", "matrix"]) is first
    known.table.remove(["vector"])
    known.remove(["vector"])
    assert "'vector' was deleted" in str(first.gone)
    assert other.gone is None
    assert known.usual(["vector", "matrix"]) is None
    known.table.add({"vector": KeySpec((5,), np.dtype(np.float32))})
    again = known.usual(["vector", "matrix"])
    assert again is not None
    assert again.nbytes == 20 + 24
    with pytest.raises(UnknownKeyError):
        known.of(("vector", "nothing"))


def test_keys_that_only_look_like_the_stores_are_not_usual() -> None:
    known = table(NUMBERS)
    assert known.usual([1, 0]) is not None
    assert known.usual(1) is not None
    for key in ([True, 0], [1.0, 0], True, 1.0, np.int64(1), "1", [1, "1"], [1, 1], None, [[1]]):
        assert known.usual(key) is None


def test_what_is_kept_for_lists_of_keys_is_bounded() -> None:
    long = tuple(range(60_000))
    known = table(dict.fromkeys((*long, -1), NUMBERS[0]))
    first = known.of(long)
    assert known.of(long) is first
    second = known.of((*long, -1))
    assert known.of((*long, -1)) is second
    assert known.of(long) is not first


def test_what_is_worked_out_while_the_encoding_changes_is_not_kept() -> None:
    known = table()

    class Coding:
        def concerns(self, keys: Any) -> bool:
            known.begin_coding(None)  # as another thread may at this moment
            return True

    known.begin_coding(Coding())
    old = known.of(("vector",))
    assert old.is_coded
    new = known.of(("vector",))
    assert (new.is_coded, new.coding) == (False, None)


@pytest.mark.parametrize("dtype", ["?", "u1", "f2", "f4", "g", "F", "q", "l", "bfloat16"])
@pytest.mark.parametrize("shape", [(), (0, 3), (3,), (2, 3)])
def test_every_dtype_is_recognised_and_seen_as_bytes(dtype: str, shape: tuple[int, ...]) -> None:
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes")
    kind = dtypes.bfloat16() if dtype == "bfloat16" else np.dtype(dtype)
    array = np.full(shape, 1).astype(kind)
    assert Bucket(("w",), [KeySpec(shape, kind.newbyteorder("="))]).fit([array], are_written=True)
    (flat,) = flat_bytes_of([array])
    assert flat.tolist() == flat_bytes(array).tolist()
    array.setflags(write=False)
    assert flat_bytes_of([array])[0].tolist() == flat.tolist()
    keys = Bucket(("w",), [KeySpec(shape, kind)])
    assert keys.fit([array], are_written=False)
    assert not keys.fit([array], are_written=True)


# -- both ways agree ----------------------------------------------------------------------

MAKERS: dict[str, Callable[[KeySpec], Any]] = {
    "plain": plain,
    "read only": lambda spec: _read_only(plain(spec)),
    "unaligned": lambda spec: _unaligned(spec),
    "swapped": lambda spec: plain(spec).astype(spec.dtype.newbyteorder("S")),
    "other dtype": lambda spec: np.ones(spec.shape, np.float16),
    "other shape": lambda spec: np.ones((*spec.shape, 2), spec.dtype),
    "Fortran": lambda spec: np.array(plain(spec), order="F"),
    "strided": lambda spec: np.ones((*spec.shape, 2), spec.dtype)[..., 0],
    "matrix": lambda spec: plain(spec).view(np.recarray),
    "lazy": lambda spec: mx.nd.array(plain(spec), dtype=spec.dtype),
    "lazy strided": lambda spec: mx.nd.NDArray(np.ones((*spec.shape, 2), spec.dtype)[..., 0]),
    "two": lambda spec: [plain(spec), plain(spec)],
    "one of one": lambda spec: (plain(spec),),
    "none of one": lambda spec: [],
    "number": lambda spec: 1.0,
    "nothing": lambda spec: None,
}


def _read_only(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    array.setflags(write=False)
    return array


def _unaligned(spec: KeySpec) -> np.ndarray[Any, Any]:
    memory = bytearray(spec.nbytes + 1)
    return np.frombuffer(memory, spec.dtype, spec.num_elements, 1).reshape(spec.shape)


KEYS = st.one_of(
    st.sampled_from([*SPECS, "nothing", 1, None]),
    st.lists(st.sampled_from([*SPECS, *SPECS, "nothing", 1]), max_size=4),
    st.permutations(list(SPECS)),
)


Arguments = Callable[[], tuple[Any, Any]]


@st.composite
def arguments(draw: st.DrawFn) -> Arguments:
    """Keys and values of a call, made anew each time; mostly plain, often wrong."""
    key = draw(KEYS)
    kinds = st.sampled_from(draw(st.sampled_from([["plain"], ["plain", "lazy"], list(MAKERS)])))
    keys = key if isinstance(key, list) else [key]
    makers = [(MAKERS[draw(kinds)], SPECS.get(each, SPECS["vector"])) for each in keys]
    missing = draw(st.integers(0, 9)) == 0
    kind = draw(st.sampled_from([list, list, tuple]))

    def make() -> tuple[Any, Any]:
        values = [maker(spec) for maker, spec in makers]
        if not isinstance(key, list):
            return key, values[0]
        return key, kind(values[missing:])

    return make


def the_long_way(check: Callable[[Any, Any], Any], known: Buckets) -> Any:
    return lambda key, value: calls._grouped(known, check(key, value))


def outcome(read: Callable[[Any, Any], Checked], use: Callable[[Checked], Any], *what: Any) -> Any:
    try:
        return use(read(*what))
    except PSError as error:
        return type(error), str(error)


@given(arguments())
def test_what_is_sent_is_the_same_both_ways(make: Arguments) -> None:
    known = table()

    def sent(values: Checked) -> Any:
        memory, _ = values.memory_to_send(sums_on_host)
        return values.keys.keys, [bytes(flat) for flat in memory], values.lazy is not None

    found = outcome(lambda key, value: values_to_push(known, key, value), sent, *make())
    assert found == outcome(the_long_way(known.table.check_push, known), sent, *make())


@given(arguments())
def test_what_is_filled_is_the_same_both_ways(make: Arguments) -> None:
    known = table()

    def filled(values: Checked) -> Any:
        landing = values.landing()
        for number, memory in enumerate(landing.memories):
            memory[...] = number + 1
        landing.finish()
        return values.keys.keys, values.lazy is not None

    (key, outs), (_, others) = make(), make()
    found = outcome(lambda key, value: values_to_fill(known, key, value), filled, key, outs)
    assert found == outcome(the_long_way(known.table.check_out, known), filled, key, others)
    assert repr(outs) == repr(others)
