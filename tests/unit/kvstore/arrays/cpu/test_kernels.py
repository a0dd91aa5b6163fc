"""Compiled kernels give NumPy's bits, and leave alone what they do not cover."""

from __future__ import annotations

import dataclasses
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_sets import NATIVE, bits, computing_with

from kvstore import optimizer
from kvstore.arrays.cpu import kernels
from kvstore.arrays.cpu.sums import Workspace, apply_round, sum_in_order
from kvstore.arrays.dtypes import accumulation_dtype, bfloat16
from kvstore.optimizer import SGD, Optimizer
from kvstore.optimizer.states import create_state

Array = np.ndarray[Any, Any]
ORIGINAL = kernels.native

DTYPES = ["f4", "f8", "f2", "bfloat16"]
SPECIAL = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-40, 6e-8, 65504.0, 65520.0, 3.4e38, -3e38]
LENGTHS = st.sampled_from([0, 1, 2, 7, 8, 9, 1023, 1024, 1025, 2049, 32768, 32769, 33800])

numbers = st.floats(-10, 10, width=32)
factors = st.sampled_from([1.0, 0.25, 1 / 3, -1.0, 0.0, 1e-46, 1e30])
limits = st.sampled_from([None, 0.0, -1.0, 0.5, 1e-12, 1e39])
optimizers = st.one_of(
    st.builds(
        optimizer.SGD,
        learning_rate=numbers,
        momentum=st.sampled_from([0.0, 0.9, 1 / 3]),
        wd=st.sampled_from([0.0, 1e-4, 1e-50]),
        rescale_grad=factors,
        clip_gradient=limits,
    ),
    st.builds(
        optimizer.TorchSGD,
        learning_rate=numbers,
        momentum=st.sampled_from([0.0, 0.9, 1 / 3]),
        wd=st.sampled_from([0.0, 1e-4]),
        rescale_grad=factors,
        clip_gradient=limits,
    ),
    st.builds(
        optimizer.Adam,
        learning_rate=numbers,
        wd=st.sampled_from([0.0, 1e-4]),
        rescale_grad=factors,
        clip_gradient=limits,
        epsilon_corrected=st.booleans(),
    ),
    st.builds(
        optimizer.AdamW,
        learning_rate=numbers,
        wd=st.sampled_from([0.0, 1e-2]),
        clip_gradient=limits,
        correct_bias=st.booleans(),
        decay_corrected=st.booleans(),
    ),
)


@pytest.fixture(autouse=True, params=NATIVE)
def native(request: pytest.FixtureRequest) -> Iterator[str]:
    with computing_with(request.param):
        yield request.param


def kind(name: str) -> np.dtype[Any]:
    if name == "bfloat16":
        pytest.importorskip("ml_dtypes")
        return bfloat16()
    return np.dtype(name)


def drawn(seed: int, dtype: np.dtype[Any], length: int) -> Array:
    """Values over many orders of magnitude, every tenth of them special."""
    random = np.random.default_rng(seed)
    values = random.normal(size=length) * 10.0 ** random.uniform(-8, 4, length)
    special = random.random(length) < 0.1
    values[special] = random.choice(SPECIAL, special.sum())
    with np.errstate(all="ignore"):
        return values.astype(dtype)


def moved(array: Array, offset: int, *, is_written: bool = False) -> Array:
    """The same values at another address, ``offset`` bytes from an aligned one."""
    memory = bytearray(offset) + bytearray(array.tobytes()) + bytearray(1)
    buffer = memory if is_written else bytes(memory)
    found = np.frombuffer(buffer, np.uint8)[offset : offset + array.nbytes].view(array.dtype)
    assert found.flags.writeable == is_written
    return found


@pytest.mark.parametrize("name", DTYPES)
@settings(max_examples=30)  # for each set of kernels
@given(length=LENGTHS, count=st.integers(1, 6), offset=st.integers(0, 3), seed=st.integers(0, 99))
def test_sums_have_the_bits_of_numpys(
    name: str, length: int, count: int, offset: int, seed: int
) -> None:
    dtype = kind(name)
    values = [drawn(seed + i, dtype, length) for i in range(count)]
    frames = [moved(value, offset) for value in values]
    for result in {dtype, accumulation_dtype(dtype)}:
        out, expected = np.zeros(length, result), np.zeros(length, result)
        assert kernels.apply(out, (frames,), None, (), 0)
        with computing_with("numpy"):
            sum_in_order(values, expected)
        assert bits(out) == bits(expected)


@pytest.mark.parametrize("name", DTYPES)
@settings(max_examples=30)  # for each set of kernels
@given(
    chosen=optimizers,
    length=LENGTHS,
    count=st.integers(1, 5),
    offset=st.integers(0, 3),
    seed=st.integers(0, 99),
)
def test_updates_have_the_bits_of_numpys(
    name: str, chosen: Optimizer, length: int, count: int, offset: int, seed: int
) -> None:
    dtype = kind(name)
    weight = drawn(seed, dtype, length)
    mine, others = moved(weight, offset, is_written=True), weight.copy()
    state, other_state = create_state(chosen, weight), create_state(chosen, weight)
    for number in (1, 2, 3):
        values = [drawn(seed + 10 * number + i, dtype, length) for i in range(count)]
        frames = [moved(value, offset) for value in values]
        outs = [np.zeros(length, dtype), moved(np.zeros(length, dtype), 1, is_written=True)]
        assert kernels.apply(mine, (frames,), chosen, state, number, (outs,))
        with computing_with("numpy"):
            apply_round(others, values, chosen, other_state, number, Workspace())
        assert bits(mine) == bits(others)
        assert [bits(out) for out in outs] == [bits(others)] * 2
        assert [bits(array) for array in state] == [bits(array) for array in other_state]


def test_every_float16_is_widened_and_narrowed_as_by_numpy() -> None:
    halves = np.arange(65536, dtype=np.uint16).view(np.float16)
    wide = np.zeros(65536, np.float32)
    assert kernels.add_up([halves], wide)
    expected = halves.astype(np.float32)
    assert bits(wide) == bits(expected)
    # Every border between two of them, and the floats beside it.
    with np.errstate(all="ignore"):
        middles = (expected + np.nextafter(halves, np.float16(np.inf)).astype(np.float32)) / 2
        near = [middles, np.nextafter(middles, np.float32(9e9)), np.nextafter(middles, -middles)]
        near += [np.float32(SPECIAL), expected]
    for values in near:
        narrow = np.zeros(len(values), np.float16)
        assert kernels.add_up([values], narrow)
        with np.errstate(all="ignore"):
            assert bits(narrow) == bits(values.astype(np.float16))


def test_bfloat16_is_narrowed_as_by_ml_dtypes_and_every_nan_too() -> None:
    dtype = kind("bfloat16")
    upper = np.arange(65536, dtype=np.uint32) << 16
    for lower in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        values = (upper | np.uint32(lower)).view(np.float32)
        narrow = np.zeros(65536, dtype)
        assert kernels.add_up([values], narrow)
        with np.errstate(all="ignore"):
            assert narrow.tobytes() == values.astype(dtype).tobytes()


def test_neighbouring_keys_are_updated_and_written_in_one_call() -> None:
    chosen = SGD(learning_rate=0.1, momentum=0.9)
    shapes = [(3,), (2, 5), (), (40, 40), (0,), (7,)]
    values = [[drawn(10 * i + j, kind("f4"), 1600)[: int(np.prod(shape))].reshape(shape)
               for j in range(3)] for i, shape in enumerate(shapes)]  # fmt: skip
    outs = [[np.zeros(shape, np.float32) for _ in range(i % 3)] for i, shape in enumerate(shapes)]
    total = sum(row[0].size for row in values)
    weight, state = np.ones(total, np.float32), (np.ones(total, np.float32),)
    expected, other = weight.copy(), (np.ones(total, np.float32),)
    assert kernels.apply(weight, values, chosen, state, 1, outs)
    rows = [np.concatenate([row[j].reshape(-1) for row in values]) for j in range(3)]
    with computing_with("numpy"):
        apply_round(expected, rows, chosen, other, 1, Workspace())
    assert bits(weight) == bits(expected)
    start = 0
    for row, shape in zip(outs, shapes, strict=True):
        stop = start + int(np.prod(shape))
        assert [bits(out) for out in row] == [bits(expected[start:stop])] * len(row)
        start = stop


def test_a_contribution_may_be_its_keys_out() -> None:
    values = [drawn(i, kind("f4"), 70_000) for i in range(3)]
    weight, expected = np.zeros(70_000, np.float32), np.zeros(70_000, np.float32)
    with computing_with("numpy"):
        sum_in_order(values, expected)
    assert kernels.apply(weight, (values,), None, (), 0, (values[:2],))
    assert [bits(array) for array in (weight, *values[:2])] == [bits(expected)] * 3


def test_bits_of_a_single_contribution_are_copied() -> None:
    for name, signalling in (("f4", 0x7F800001), ("f8", 0x7FF0000000000001), ("f2", 0x7C01)):
        dtype = np.dtype(name)
        value = np.array([signalling], f"u{dtype.itemsize}").view(dtype)
        out = np.zeros(1, dtype)
        assert kernels.apply(out, ([value],), None, (), 0)
        assert out.tobytes() == value.tobytes()


class Slower(SGD):
    """Another formula under the same parameters."""


STRIDED = np.zeros(20, np.float32)[::2]
READ_ONLY = np.frombuffer(bytes(40), np.float32)


@pytest.mark.parametrize(
    ("weight", "value", "chosen"),
    [
        (np.zeros(10, "i4"), np.ones(10, "i4"), None),
        (np.zeros(10, "c8"), np.ones(10, "c8"), None),
        (np.zeros(10, "f8"), np.ones(10, "f4"), None),
        (np.zeros(10, ">f4"), np.ones(10, ">f4"), None),
        (STRIDED, np.ones(10, "f4"), None),
        (np.zeros(10, "f4"), STRIDED, None),
        (READ_ONLY, np.ones(10, "f4"), None),
        (np.zeros(10, "f4"), np.ones(10, "f4"), optimizer.create("nag")),
        (np.zeros(10, "f4"), np.ones(10, "f4"), Slower(learning_rate=1.0)),
        (np.zeros(10, "f4"), np.ones(10, "f4"), SGD(clip_gradient=1e-40)),
        (np.zeros(10, "f4"), np.ones(10, "f4"), SGD(momentum=0.9)),
    ],
    ids=str,
)
def test_what_is_not_covered_is_left_to_numpy(
    weight: Array, value: Array, chosen: Optimizer | None
) -> None:
    assert not kernels.apply(weight, ([value, value],), chosen, (), 1)
    assert not weight.any()


def test_states_and_outs_of_other_dtypes_are_left_to_numpy() -> None:
    weight, value = np.zeros(10, "f4"), np.ones(10, "f4")
    double = np.zeros(10, "f8")
    assert not kernels.apply(weight, ([value],), SGD(momentum=0.9), (double,), 1)
    assert not kernels.apply(weight, ([value],), None, (), 1, ([weight.copy(), double],))
    assert not weight.any()


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize("owner", [0, 1])
def test_a_sum_may_be_written_over_one_of_the_first_two(name: str, count: int, owner: int) -> None:
    values = [drawn(rank, kind(name), 40_000) for rank in range(count)]
    wanted = np.zeros_like(values[0])
    assert kernels.add_up(values, wanted)
    assert kernels.add_up(values, values[owner])
    assert bits(values[owner]) == bits(wanted)


def test_short_sums_are_left_to_numpy_unless_they_are_rounded() -> None:
    long, short = np.ones(40_000, "f4"), np.ones(10, "f4")
    assert kernels.add_up([long, long], np.zeros_like(long))
    assert not kernels.add_up([short, short], np.zeros_like(short))
    assert kernels.add_up([short.astype("f2")] * 2, short)


FIVE, FOUR = np.ones(5, "f4"), np.ones(4, "f4")


@pytest.mark.parametrize(
    ("rows", "states", "outs", "text"),
    [
        ([[FIVE, FOUR]], [FIVE.copy()], [], "one length"),
        ([[FOUR]], [FIVE.copy()], [], "as long as the weight"),
        ([[FIVE], [FOUR]], [FIVE.copy()], [], "as long as the weight"),
        ([[FIVE]], [FOUR.copy()], [], "states"),
        ([[FIVE]], [FIVE.copy()], [[FOUR.copy()]], "outs"),
        ([[FIVE]], [FIVE.copy()], [[], []], "as many rows"),
        ([[]], [FIVE.copy()], [], "at least one contribution"),
        ([iter([FIVE])], [FIVE.copy()], [], "list or tuple"),
        (iter([[FIVE]]), [FIVE.copy()], [], "lists or tuples"),
    ],
    ids=range(9),
)
def test_lengths_that_do_not_fit_are_refused_and_nothing_is_written(
    rows: Any, states: Any, outs: Any, text: str
) -> None:
    module = kernels.native()
    assert module is not None
    weight = np.zeros(5, "f4")
    formula = kernels.Formula(kernels.MOMENTUM, rate=1.0)
    with pytest.raises(ValueError, match=text):
        module.run(formula, 0, 0, weight, states, rows, outs)
    assert not weight.any()


def test_arguments_that_make_no_sense_are_refused() -> None:
    module = kernels.native()
    assert module is not None
    for rule, weight_kind, given_kind in ((9, 0, 0), (0, 4, 0), (0, 0, -1), (0, 1, 0), (0, 2, 3)):
        formula = kernels.Formula(rule)
        with pytest.raises(ValueError, match="kind"):
            module.run(formula, weight_kind, given_kind, FIVE.copy(), (), ([FIVE],), ())
    with pytest.raises(TypeError):
        module.run(kernels.Formula(0), 0, 0, FIVE.copy(), (), ([3.0],), ())
    with pytest.raises(ValueError, match="sse9"):
        module.use("sse9")


def test_other_threads_run_meanwhile() -> None:
    """Nobody is made to give the interpreter's lock up: only the kernel does, of its own accord."""
    weight, value = np.zeros(1_000_000, "f4"), np.ones(1_000_000, "f4")
    started, seen = threading.Event(), threading.Event()

    def look() -> None:
        started.wait()
        seen.set()

    watcher = threading.Thread(target=look)
    watcher.start()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)
    try:
        started.set()
        for _ in range(2000):
            kernels.apply(weight, ([value, value],), SGD(), (), 1)
            if seen.is_set():
                break
        is_seen = seen.is_set()
    finally:
        sys.setswitchinterval(interval)
        watcher.join()
    assert is_seen


class TestTheModule:
    @pytest.fixture(autouse=True)
    def anew(self, native: str) -> Iterator[Any]:
        """As in a process that has computed nothing yet; gives the module that there is."""
        module = kernels.native()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernels, "native", ORIGINAL)
            ORIGINAL.cache_clear()
            yield module
        ORIGINAL.cache_clear()

    def test_is_used_where_it_is_built(self, anew: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("KVSTORE_NATIVE", raising=False)
        assert kernels.native() is anew
        assert kernels.instructions() == anew.INSTRUCTIONS[0]

    @pytest.mark.parametrize("value", ["0", "off"])
    def test_can_be_turned_off(self, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("KVSTORE_NATIVE", value)
        assert kernels.native() is None
        assert kernels.instructions() == "numpy"
        assert not kernels.add_up([np.ones(9, "f2")], np.zeros(9, "f2"))

    @pytest.mark.parametrize(
        "other", [None, SimpleNamespace(INTERFACE=kernels.INTERFACE + 1)], ids=["none", "another"]
    )
    def test_that_is_missing_or_of_another_version_is_not_used(
        self, other: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from kvstore.arrays import cpu

        monkeypatch.delenv("KVSTORE_NATIVE", raising=False)
        monkeypatch.setitem(sys.modules, "kvstore.arrays.cpu._kernels", other)
        if other is None:
            monkeypatch.delattr(cpu, "_kernels")
        else:
            monkeypatch.setattr(cpu, "_kernels", other)
        assert kernels.native() is None


def test_formulas_are_kept_for_the_very_classes() -> None:
    covered = {cls.__name__ for cls in kernels._formulas}
    assert covered == {"SGD", "TorchSGD", "Adam", "AdamW"}
    assert dataclasses.fields(Slower) == dataclasses.fields(SGD)
