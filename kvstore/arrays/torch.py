"""The adapter for PyTorch tensors, and the only import of PyTorch in the project.

NumPy views a tensor on the CPU without a copy (``array_in``), and CuPy views one on a CUDA device
(DLPack). DLPack does not support bfloat16 with CuPy: from a GPU such a tensor is copied to the
host. Any thread may call. Tests of CUDA tensors are in ``tests/gpu``.

**Autograd.** Reads and writes are not recorded, as under ``torch.no_grad()``, so a parameter that
requires gradients can be filled. Each write increments the tensor's version, as PyTorch's own
in-place operations do. So a backward pass that needs the old values raises its usual error instead
of using the new ones.

**Order of work on a GPU.** Reading waits, on the device, for the work queued on PyTorch's current
stream (DLPack's ``stream`` argument; copies run on that stream). When a call that writes returns,
every stream sees the new values.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from kvstore.arrays import Array, NativeArray, adapter_for, adapter_on
from kvstore.arrays.buffer import ViewAdapter
from kvstore.arrays.context import Context, gpu
from kvstore.arrays.cupy import load as load_cupy
from kvstore.arrays.dtypes import bfloat16
from kvstore.errors import ArgumentTypeError

_NAMES = (
    "bool uint8 uint16 uint32 uint64 int8 int16 int32 int64 "
    "float16 float32 float64 complex64 complex128"
)
_DTYPES = {f"torch.{name}": np.dtype(name) for name in _NAMES.split()}
_BFLOAT16 = "torch.bfloat16"
_HOST = Context("cpu", 0)


class TorchAdapter(ViewAdapter):
    """The adapter of PyTorch tensors; see :class:`kvstore.arrays.Adapter`."""

    def shape(self, array: Array) -> tuple[int, ...]:
        return tuple(_plain(array).shape)

    def dtype(self, array: Array) -> np.dtype[Any]:
        plain = _plain(array)
        _check(plain)
        return _dtype_of(plain)

    def view(self, array: Array) -> NativeArray:
        import torch

        plain = _plain(array)
        if not _is_on_gpu(plain):
            return _as_numpy(plain.cpu())
        # PyTorch orders the reader after the current stream of the current device.
        with torch.cuda.device(plain.device):
            return load_cupy().from_dlpack(plain.resolve_conj().resolve_neg())

    def memory(self, array: Array) -> np.ndarray[Any, Any] | None:
        plain = _plain(array)
        return super().memory(plain) if _is_on_host(plain) else None

    def device_memory(self, array: Array) -> NativeArray | None:
        plain = _plain(array)
        if not _is_on_gpu(plain) or plain.is_conj() or plain.is_neg():
            return None
        return super().device_memory(plain)

    def written(self, array: Array) -> None:
        import torch

        plain = _plain(array)
        if not plain.is_inference():  # such tensors have no version
            torch.autograd.graph.increment_version(plain)

    def context(self, array: Array) -> Context:
        plain = _plain(array)
        return gpu(plain.device.index) if _is_on_gpu(plain) else _HOST

    def why_read_only(self, array: Array) -> str | None:
        plain = _plain(array)
        sizes = zip(plain.shape, plain.stride(), strict=True)
        if plain.numel() > 0 and any(size > 1 and stride == 0 for size, stride in sizes):
            return "several of its elements share memory (expand); pass tensor.clone()"
        return None

    def to_host(self, array: Array) -> np.ndarray[Any, Any]:
        host = _as_numpy(_plain(array).cpu())
        return adapter_on(_HOST).to_host(host)

    def from_host(self, host: np.ndarray[Any, Any], out: Array) -> None:
        import torch

        plain = _plain(out)
        if _is_on_host(plain):
            super().from_host(host, out)
            return
        # NumPy casts, so that the bits do not depend on where the tensor lives.
        staging = torch.empty(plain.shape, dtype=plain.dtype)
        adapter_on(_HOST).from_host(host, _as_numpy(staging))
        with torch.inference_mode(plain.is_inference()):
            plain.copy_(staging)

    def assign(self, value: Array, out: Array) -> None:
        plain = _plain(out)
        is_shared = _is_on_gpu(plain) and not (plain.is_conj() or plain.is_neg())
        if is_shared and adapter_for(value).context(value).device_type == "gpu":
            super().assign(value, out)
        else:
            self.from_host(adapter_for(value).to_host(value), out)


def tensor_of(host: np.ndarray[Any, Any]) -> Array:
    """Return a new tensor on the CPU with a copy of the values."""
    import torch

    if host.dtype == bfloat16():  # which from_numpy does not take
        tensor = torch.empty(host.shape, dtype=torch.bfloat16)
        adapter_on(_HOST).from_host(host, _as_numpy(tensor))
        return tensor
    return torch.from_numpy(np.array(host))


def is_tensor(value: object) -> bool:
    """Return whether ``value`` is a tensor; PyTorch is not imported for that."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def numpy_dtype(tensor: Any) -> np.dtype[Any] | None:
    """Return NumPy's dtype of a tensor's elements; None if NumPy has none."""
    name = str(tensor.dtype)
    return bfloat16() if name == _BFLOAT16 else _DTYPES.get(name)


def array_in(tensor: Any, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Return a dense CPU tensor's own memory as a writable array with its strides.

    ``dtype`` has the size of the tensor's elements. Raises ``ArgumentTypeError`` if the tensor's
    memory does not hold the values unchanged.
    """
    if tensor.is_conj() or tensor.is_neg():
        raise ArgumentTypeError(
            "expected a tensor whose memory holds its values, got a view that conjugates or "
            "negates them; pass tensor.resolve_conj().resolve_neg()"
        )
    address = tensor.data_ptr()
    if address == 0 and tensor.numel() > 0:
        raise ArgumentTypeError(
            f"expected a tensor with memory, got a {type(tensor).__qualname__} of shape "
            f"{tuple(tensor.shape)} whose storage was freed, or that is made of other tensors; "
            "pass a plain tensor with the values"
        )
    if address == 0:
        return np.empty(tensor.shape, dtype)  # NumPy before 2.4 takes no memory without an address
    array = np.asarray(_TensorMemory(tensor, address, dtype))
    return array if array.dtype == dtype else array.view(dtype)


class _TensorMemory:
    """A tensor's memory in NumPy's array interface; keeps the tensor's storage alive.

    ``tensor.numpy()`` would make PyTorch refuse to resize the storage from then on, which
    ``resize_`` and FullyShardedDataParallel need. This class does not, so code that resizes a
    tensor must first wait for the calls that use it.
    """

    __slots__ = ("__array_interface__", "_storage")

    def __init__(self, tensor: Any, address: int, dtype: np.dtype[Any]) -> None:
        self._storage = tensor.untyped_storage()
        size = dtype.itemsize
        self.__array_interface__ = {
            "version": 3,
            "typestr": dtype.str,  # of bfloat16, any two bytes
            "shape": tensor.shape,
            "strides": tuple([size * step for step in tensor.stride()]),
            "data": (address, False),
        }


def _plain(tensor: Any) -> Any:
    """Return a plain tensor that shares memory, without autograd history or subclass."""
    import torch

    kind = type(tensor)
    if kind is torch.Tensor or kind is torch.nn.Parameter:
        return tensor.detach()
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise _refused(
            f"a {kind.__qualname__} stores its values in its own format; pass a plain "
            "torch.Tensor with the values"
        )
    if torch.nn.parameter.is_lazy(tensor):
        raise _refused("a lazy parameter has no values yet; run the module once first")
    # Reading an attribute of a subclass may run code of its own (__torch_function__).
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(torch.Tensor).detach()


def _check(plain: Any) -> None:
    """Check that the tensor is dense, of a supported dtype, and can be read.

    Raises ``ArgumentTypeError``.
    """
    import torch

    if plain.layout != torch.strided:
        raise _refused(f"its layout is {plain.layout}, which is not dense; pass tensor.to_dense()")
    if plain.is_nested:
        raise _refused("a nested tensor does not have one shape; pass its parts, tensor.unbind()")
    if plain.is_quantized:
        raise _refused("it is quantized; pass tensor.dequantize()")
    device = plain.device.type
    if device == "meta":
        raise _refused(
            "it is on the device meta, which has no values; create it on the CPU or a GPU"
        )
    if device not in ("cpu", "cuda"):
        raise _refused(
            f"it is on the device {device}, which stores do not support; pass tensor.cpu()"
        )
    _dtype_of(plain)
    try:
        plain.data_ptr()
    except RuntimeError as error:
        raise _refused(
            "its values cannot be read inside torch.vmap or torch.func.grad; call the store "
            "outside the transformed function"
        ) from error


def _dtype_of(plain: Any) -> np.dtype[Any]:
    found = numpy_dtype(plain)
    if found is None:
        raise _refused(
            f"its dtype {plain.dtype} is not supported; convert it, such as "
            "tensor.to(torch.float32)"
        )
    return found


def _refused(reason: str) -> ArgumentTypeError:
    return ArgumentTypeError(f"a store cannot read or write this tensor: {reason}")


def _is_on_gpu(plain: Any) -> bool:
    """Return whether CuPy can view the tensor: on a GPU and not bfloat16."""
    return plain.device.type == "cuda" and str(plain.dtype) != _BFLOAT16


def _is_on_host(plain: Any) -> bool:
    """Return whether NumPy can view the tensor's memory with unchanged elements."""
    return plain.device.type == "cpu" and not (plain.is_conj() or plain.is_neg())


def _as_numpy(plain: Any) -> np.ndarray[Any, Any]:
    """Return a CPU tensor as an array, copied only if NumPy cannot view it."""
    resolved = plain.resolve_conj().resolve_neg()
    return array_in(resolved, _dtype_of(resolved))
