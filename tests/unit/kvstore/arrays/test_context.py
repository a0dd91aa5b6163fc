"""Contexts are plain values; the GPU ones need CuPy and say so."""

from __future__ import annotations

import pickle
import sys
import types
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import kvstore as mx
from kvstore import Context, cpu, gpu, num_gpus
from kvstore.errors import ArgumentTypeError, MissingDependencyError
from pslite.errors import PSError


def test_equal_contexts_are_one_dictionary_key() -> None:
    assert {cpu(0): "a", Context("cpu", 0): "b", Context("gpu", 1): "c"} == {
        cpu(): "b",
        Context(Context("gpu", 1)): "c",
    }
    assert cpu(0) != cpu(1) != Context("gpu", 1)
    assert cpu(0) != "cpu(0)"


def test_a_context_reads_as_it_is_written() -> None:
    assert [repr(cpu()), repr(Context("gpu", 3))] == ["cpu(0)", "gpu(3)"]
    assert pickle.loads(pickle.dumps(Context("gpu", 3))) == Context("gpu", 3)


def test_a_context_cannot_change() -> None:
    context = cpu(0)
    with pytest.raises(AttributeError, match="cannot"):
        context.device_id = 1  # type: ignore[misc]
    with pytest.raises(AttributeError, match="cannot"):
        del context.device_id  # type: ignore[misc]
    assert context == cpu(0)


@pytest.mark.parametrize("wrong", [("tpu", 0), ("cpu", -1), ("cpu", True), ("cpu", 1.0), (7, 0)])
def test_a_context_of_no_device_is_refused(wrong: tuple[object, object]) -> None:
    with pytest.raises(ArgumentTypeError):
        Context(*wrong)  # type: ignore[arg-type]


def test_the_host_works_with_numpy() -> None:
    assert cpu().module is np


def test_a_gpu_without_cupy_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(MissingDependencyError, match=r"pip install cupy-cuda12x.*cupy-cuda13x"):
        gpu(0)
    with pytest.raises(ImportError):
        _ = Context("gpu", 0).module
    assert issubclass(MissingDependencyError, PSError)


def test_without_cupy_there_are_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert num_gpus() == 0


@pytest.mark.parametrize(("count", "expected"), [(3, 3), (None, 0)])
def test_gpus_are_counted_by_cupy_and_none_is_there_without_a_driver(
    monkeypatch: pytest.MonkeyPatch, count: int | None, expected: int
) -> None:
    class CUDARuntimeError(RuntimeError):
        pass

    def count_devices() -> int:
        if count is None:
            raise CUDARuntimeError("cudaErrorNoDevice")
        return count

    runtime = types.SimpleNamespace(getDeviceCount=count_devices, CUDARuntimeError=CUDARuntimeError)
    stand_in: Any = types.ModuleType("cupy")
    stand_in.cuda = types.SimpleNamespace(runtime=runtime)
    monkeypatch.setitem(sys.modules, "cupy", stand_in)
    assert num_gpus() == expected


def test_a_with_block_names_the_device_of_arrays_that_name_none() -> None:
    assert mx.current_context() == mx.cpu()
    device = mx.cpu(1)
    with device as entered, mx.cpu(2):
        assert entered is device
        assert mx.context.current_context() == mx.cpu(2)
        with device, device:  # the same one again
            made = [
                *(mx.nd.zeros(2), mx.nd.array([1]), mx.nd.arange(2), mx.rnd.uniform()),
                *(mx.nd.zeros(2, stype="row_sparse"), mx.nd.full(2, 3)),
            ]
            with ThreadPoolExecutor(1) as pool:
                assert pool.submit(mx.current_context).result() == mx.cpu()
        assert {array.context for array in made} == {device}
        assert mx.nd.zeros(2, mx.cpu(3)).context == mx.cpu(3)
        assert mx.nd.zeros(2).context == mx.cpu(2)
    with pytest.raises(KeyError), device:
        raise KeyError
    assert mx.current_context() == mx.cpu()
