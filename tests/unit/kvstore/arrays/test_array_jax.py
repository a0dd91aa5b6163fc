"""JAX arrays on the CPU: pushed without a copy, never filled, refused while they are traced."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")

from kvstore import cpu  # noqa: E402
from kvstore.arrays import adapter_for  # noqa: E402
from kvstore.arrays.dtypes import bfloat16, check_dtype  # noqa: E402
from kvstore.errors import ArgumentTypeError  # noqa: E402

jnp = jax.numpy
NAMES = [
    *("bool", "uint8", "uint16", "uint32", "int8", "int16", "int32"),
    *("float16", "float32", "complex64"),
]


def test_a_jax_array_is_read_in_its_own_memory() -> None:
    array = jnp.arange(600.0).reshape(20, 30)
    adapter = adapter_for(array)
    assert adapter.shape(array) == (20, 30)
    assert adapter.context(array) == cpu()
    host = adapter.to_host(array)
    assert host.ctypes.data == array.unsafe_buffer_pointer()
    np.testing.assert_array_equal(host, np.arange(600, dtype="f4").reshape(20, 30), strict=True)
    assert not np.shares_memory(adapter.copy(array), host)


@pytest.mark.parametrize("name", NAMES)
def test_every_dtype_of_jax_is_numpys(name: str) -> None:
    array = jnp.arange(6).astype(name)
    adapter = adapter_for(array)
    assert adapter.dtype(array) == np.dtype(name)
    expected = np.arange(6).astype(name)
    np.testing.assert_array_equal(adapter.to_host(array), expected, strict=True)


def test_bfloat16_scalars_and_empty_arrays_are_read() -> None:
    for values in (np.array(2.5), np.zeros((0, 3)), np.array([1.5, -2.0])):
        array = jnp.asarray(values, jnp.bfloat16)
        host = adapter_for(array).to_host(array)
        assert host.dtype == adapter_for(array).dtype(array) == bfloat16()
        np.testing.assert_array_equal(host.astype("f8"), values, strict=True)


def test_an_array_that_is_still_being_computed_is_waited_for() -> None:
    array = jnp.ones((200, 200))
    for _ in range(20):
        array = array @ jnp.eye(200)
    np.testing.assert_array_equal(adapter_for(array).to_host(array), np.ones((200, 200)))


def test_a_jax_array_cannot_be_filled_and_says_what_to_do() -> None:
    array = jnp.zeros(3)
    adapter = adapter_for(array)
    assert adapter.memory(array) is None
    assert adapter.why_read_only(array) == (
        "a JAX array is immutable; pull without out, or pass a NumPy array as out"
    )


@pytest.mark.parametrize("transform", [jax.jit, jax.grad, jax.vmap])
def test_a_traced_value_is_refused_with_advice(transform: Any) -> None:
    def function(value: Any) -> Any:
        with pytest.raises(ArgumentTypeError, match="call the store outside"):
            adapter_for(value).dtype(value)
        return value.sum()

    transform(function)(jnp.ones((2, 3)) if transform is jax.vmap else jnp.ones(3))


def deleted() -> Any:
    array = jnp.ones(3)
    array.delete()
    return array


@pytest.mark.parametrize(
    ("make", "advice"),
    [
        (lambda: jax.random.key(0), "key_data"),
        (deleted, "deleted or donated"),
        (lambda: jax.ShapeDtypeStruct((3,), np.float32), r"pass a jax\.Array"),
        (lambda: jnp.ones(3, jnp.float8_e5m2), "bfloat16 is the only"),
        (lambda: jnp.ones(3, jnp.int4), "bfloat16 is the only"),
    ],
)
def test_what_has_no_numbers_to_give_is_refused(make: Any, advice: str) -> None:
    value = make()
    with pytest.raises(ArgumentTypeError, match=advice):
        check_dtype(adapter_for(value).dtype(value))
