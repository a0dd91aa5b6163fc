"""``mx.nd``: arrays as scripts for MXNet use them. What makes them lazy: ``test_lazy.py``."""

from __future__ import annotations

import inspect
import pickle
import subprocess
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from nd_helpers import check, counted

import kvstore as mx
from kvstore import Context, cpu
from kvstore.arrays import adapter_for
from kvstore.errors import ArgumentTypeError, MissingDependencyError, ValueMismatchError
from kvstore.mxnet import nd
from kvstore.mxnet.nd import NDArray

# -- making arrays ------------------------------------------------------------------------


def test_what_a_script_for_the_original_does_with_arrays_works() -> None:
    a = nd.ones((2, 3), cpu()) * 4
    check(a, [[4, 4, 4], [4, 4, 4]])
    a[:] = 8
    a += 1
    check(a, [[9, 9, 9], [9, 9, 9]])
    assert repr(a) == "\n[[9. 9. 9.]\n [9. 9. 9.]]\n<NDArray 2x3 @cpu(0)>"
    b = nd.zeros(a.shape)
    assert a.copyto(b) is b
    check(b, np.full((2, 3), 9))
    nd.waitall()


def test_every_way_to_make_an_array_gives_float32_unless_told() -> None:
    check(nd.zeros((2, 1)), [[0], [0]])
    check(nd.ones(3), [1, 1, 1])
    check(nd.full((2,), 2.5), [2.5, 2.5])
    check(nd.arange(3), [0, 1, 2])
    check(nd.arange(2, 8, 3, repeat=2), [2, 2, 5, 5])
    check(nd.array(np.array([1, 2], np.int64)), [1, 2])
    check(nd.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]])
    assert nd.empty((4, 2)).shape == (4, 2)
    assert nd.empty(4).dtype == np.float32
    check(nd.zeros(2, cpu(), "int32"), [0, 0], "int32")
    check(nd.array([1.5], dtype="float16"), [1.5], "float16")
    check(nd.array(nd.ones(2, dtype="uint8")), [1, 1], "uint8")


def test_like_arrays_take_shape_dtype_and_device() -> None:
    a = nd.full((1, 2), 3, cpu(1), "int8")
    check(nd.zeros_like(a), [[0, 0]], "int8")
    check(nd.ones_like(a), [[1, 1]], "int8")
    assert nd.zeros_like(a).context == nd.ones_like(a).context == cpu(1)


def test_an_array_of_another_library_is_copied() -> None:
    source = np.arange(3, dtype=np.float32)
    made = nd.array(source)
    source[:] = 7
    check(made, [0, 1, 2])


def test_wrapping_shares_the_memory_and_copying_does_not() -> None:
    memory = np.zeros(2)
    wrapped = NDArray(memory)
    wrapped[:] = 5
    assert memory.tolist() == [5, 5]
    host = wrapped.asnumpy()
    host[:] = 1
    check(wrapped, [5, 5], "float64")


def test_a_single_element_has_one_dimension_as_in_the_original() -> None:
    for one in (nd.array(3), NDArray(np.array(3, "f4")), nd.arange(4)[3], nd.full((3,), 1).sum()):
        check(one, [3])


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: nd.zeros((2,), "float32"), "ctx must be a Context"),
        (lambda: nd.zeros((2,), None, "no such"), "is not a dtype"),
        (lambda: nd.zeros((2,), None, "O"), "a store cannot hold"),
        (lambda: nd.zeros("23"), "a shape must be"),
        (lambda: nd.array("text"), "must be an array"),
        (lambda: nd.array([object()]), "a store cannot hold"),
        (lambda: NDArray([1.0]), "must be an array"),
        (lambda: NDArray(nd.ones(2)), "to copy it"),
        (lambda: NDArray(np.ma.array([1.0], mask=[True])), "mask"),
        (lambda: nd.sum(np.ones(2)), "expected an NDArray, got numpy.ndarray"),
        (lambda: nd.maximum(1, 2), "expected an NDArray"),
        (lambda: nd.add_n(), "at least one"),
        (lambda: nd.stack(), "at least one"),
    ],
)
def test_what_is_no_array_dtype_shape_or_device_is_refused_in_words(
    call: Callable[[], object], text: str
) -> None:
    with pytest.raises(ArgumentTypeError, match=text):
        call()


def test_bfloat16_goes_by_its_name() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    a = nd.full((2,), 1.5, None, "bfloat16") * 2
    assert a.dtype == ml_dtypes.bfloat16
    assert a.astype("float32").asnumpy().tolist() == [3, 3]


# -- functions ----------------------------------------------------------------------------


def test_the_functions_of_the_module_do_what_the_methods_do() -> None:
    a = nd.array([[1, -4]])
    check(nd.sum(a), [-3])
    check(nd.mean(a, axis=0), [1, -4])
    check(nd.max(a), [1])
    check(nd.min(a, axis=1, keepdims=True), [[-4]])
    check(nd.norm(a, ord=1), [5])
    check(nd.clip(a, -1, 0.5), [[0.5, -1]])
    check(nd.abs(a), [[1, 4]])
    check(nd.sqrt(nd.square(a)), [[1, 4]])
    check(nd.sign(a), [[1, -1]])
    check(nd.log(nd.exp(nd.zeros(1))), [0])
    check(nd.maximum(a, 0), [[1, 0]])
    check(nd.minimum(0, a), [[0, -4]])


def test_functions_travel_by_their_names() -> None:
    for function in (nd.abs, nd.broadcast_add, nd.sum):
        assert pickle.loads(pickle.dumps(function)) is function
        assert inspect.getdoc(function)


def test_arrays_are_added_and_joined() -> None:
    a, b = nd.array([[1, 2]]), nd.array([[3, 4]])
    check(nd.add_n(a, b, b), [[7, 10]])
    check(nd.concat(a, b), [[1, 2, 3, 4]])
    check(nd.concatenate([a, b]), [[1, 2], [3, 4]])
    check(nd.stack(a, b), [[[1, 2]], [[3, 4]]])
    alone = nd.add_n(a)
    alone[:] = 0
    check(a, [[1, 2]])


# -- random -------------------------------------------------------------------------------


def test_every_int_is_a_seed_and_nothing_else() -> None:
    drawn = []
    for number in (-5, -5, 2**64, 5, np.int32(5)):
        mx.random.seed(number)  # type: ignore[arg-type]
        drawn.append(mx.rnd.uniform(shape=4).asnumpy().tolist())
    assert drawn[0] == drawn[1]
    assert drawn[3] == drawn[4]
    assert len({tuple(each) for each in drawn}) == 3
    for wrong in ("a", 1.0, None):
        with pytest.raises(ArgumentTypeError, match="seed_state must be an int, got"):
            mx.random.seed(wrong)  # type: ignore[arg-type]


def test_numbers_are_drawn_into_an_array_that_is_there() -> None:
    for draw in (nd.random.normal, nd.random.uniform, nd.random_normal, nd.random_uniform):
        made = nd.zeros((2, 3), dtype="float64")
        nd.random.seed(3)
        assert draw(0, 1, out=made) is made
        nd.random.seed(3)
        expected = draw(0, 1, (2, 3), dtype="float64")
        np.testing.assert_array_equal(made.asnumpy(), expected.asnumpy())
        for wrong in ({"shape": (3, 2)}, {"dtype": "float32"}):
            with pytest.raises(ValueMismatchError, match=r"got \(2, 3\) and float64"):
                draw(0, 1, out=made, **wrong)  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError, match="expected an NDArray, got list"):
        nd.random.normal(out=[0.0])  # type: ignore[arg-type]


def test_random_arrays_repeat_with_their_seed() -> None:
    def draw() -> list[NDArray]:
        return [
            nd.random_uniform(-1, 1, (100,)),
            nd.random.normal(5, 0.1, shape=(10, 10), dtype="float64"),
            nd.random_normal(),
        ]

    nd.random.seed(7)
    first = draw()
    nd.random.seed(7)
    for one, again in zip(first, draw(), strict=True):
        check(again, one.asnumpy(), str(one.dtype))
    nd.random.seed(8)
    assert (draw()[0] != first[0]).sum() > 90
    assert first[0].min() >= -1
    assert first[0].max() <= 1
    assert abs(first[1].mean().asscalar() - 5) < 0.1


# -- as values of a store -----------------------------------------------------------------


def test_the_stores_adapter_sees_the_wrapped_array() -> None:
    a = counted(2, 3)
    adapter = adapter_for(a)
    assert (adapter.shape(a), adapter.dtype(a), adapter.context(a)) == ((2, 3), "f4", cpu())
    assert np.shares_memory(adapter.to_host(a), a._array)
    assert adapter.view(a) is a._array
    memory = adapter.memory(a)
    assert memory is not None
    memory.view("f4")[0] = 9
    adapter.from_host(np.ones((2, 3)), a[:, :])
    check(a, np.ones((2, 3)))
    adapter.assign(nd.zeros((2, 3)), a)
    check(a, np.zeros((2, 3)))
    assert adapter.why_read_only(a) is None
    frozen = np.zeros(2)
    frozen.flags.writeable = False
    assert "cannot write" in str(adapter.why_read_only(NDArray(frozen)))
    total = adapter.sum_in_order([nd.ones(2), np.ones(2, "f4")], cpu(), np.dtype("f4"))
    assert total.tolist() == [2, 2]
    assert not np.shares_memory(adapter.copy(a), a._array)


# -- on a GPU: NumPy in the place of CuPy -------------------------------------------------


class Device:
    """Stands in for ``cupy.cuda.Device``; notes the one in use."""

    current = 0

    def __init__(self, number: int) -> None:
        self.id = number

    def __enter__(self) -> None:
        self.before, Device.current = Device.current, self.id

    def __exit__(self, *_: object) -> None:
        Device.current = self.before


class CupyArray(np.ndarray[Any, Any]):
    """Stands in for ``cupy.ndarray``: it knows its device."""

    def __array_finalize__(self, source: Any) -> None:
        self.home = getattr(source, "home", None) or Device(Device.current)

    @property
    def device(self) -> Any:
        return self.home


CupyArray.__name__, CupyArray.__module__ = "ndarray", "cupy"


@pytest.fixture
def fake_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    def on_device(array: Any) -> CupyArray:
        made = np.array(array).view(CupyArray)
        made.home = Device(Device.current)
        return made

    module = types.ModuleType("cupy")
    stream = types.SimpleNamespace(synchronize=lambda: None)
    cuda = types.SimpleNamespace(Device=Device, get_current_stream=lambda: stream)
    members = {
        "ndarray": CupyArray,
        "cuda": cuda,
        "asarray": on_device,
        "ascontiguousarray": np.ascontiguousarray,
        "asnumpy": lambda array, order: np.array(array, order=order, subok=False),
        "zeros": lambda shape, dtype: on_device(np.zeros(shape, dtype)),
        "empty": lambda shape, dtype: on_device(np.zeros(shape, dtype)),
    }
    for name, member in members.items():
        monkeypatch.setattr(module, name, member, raising=False)
    monkeypatch.setitem(sys.modules, "cupy", module)


@pytest.mark.usefixtures("fake_cupy")
def test_arithmetic_on_a_gpu_stays_there() -> None:
    gpu = Context("gpu", 1)
    a = nd.full((2, 2), 3, gpu)
    a += np.array([1.0, 2.0])
    b = (a * 2)[0]
    for array in (a, b, a.copy(), a.astype("float16"), a.as_in_context(gpu)):
        assert array.context == gpu
        assert type(array._array) is CupyArray
        assert array._array.device.id == 1
    assert Device.current == 0
    check(b, [8, 10])
    check(b.as_in_context(cpu()), [8, 10])
    assert nd.arange(2).as_in_context(gpu).context == gpu
    a[:] = nd.array([7, 8])
    check(a, [[7, 8], [7, 8]])
    with pytest.raises(ValueError, match="without a copy"):
        a.__array__(copy=False)


@pytest.mark.usefixtures("fake_cupy")
def test_arrays_on_two_devices_do_not_mix() -> None:
    one, two, host = (nd.zeros(2, c) for c in (Context("gpu", 0), Context("gpu", 1), cpu()))
    words = r"cannot mix arrays on gpu\(0\) and {}.*a\.as_in_context\(mx\.gpu\(0\)\)"
    with pytest.raises(ArgumentTypeError, match=words.format(r"gpu\(1\)")):
        _ = one + two
    with pytest.raises(ArgumentTypeError, match=words.format(r"cpu\(0\)")):
        one += host
    with pytest.raises(ArgumentTypeError, match="cannot mix"):
        np.add(host, 1, out=two)
    with pytest.raises(ArgumentTypeError, match="cannot mix"):
        np.add(one, 1, out=np.zeros(2, np.float32))
    with pytest.raises(ArgumentTypeError, match="cannot mix"):
        nd.dot(one, two)
    with pytest.raises(ArgumentTypeError, match="to copy it"):
        NDArray(np.zeros(2), Context("gpu", 0))


def test_a_gpu_array_without_cupy_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(MissingDependencyError, match="pip install cupy"):
        nd.zeros(2, Context("gpu", 0))


def test_importing_the_arrays_imports_no_other_library() -> None:
    program = (
        "import sys; from kvstore import nd; nd.ones(3) + 1; "
        "print([name for name in ('cupy', 'torch', 'jax', 'zmq', 'ml_dtypes') "
        "if name in sys.modules])"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert ran.stdout.strip() == "[]"
