"""``Parameter``: an array and its gradient on each device.

``Parameter`` is for libraries whose arrays have no gradient of their own. A leaf tensor of
PyTorch, which has one, is wrapped in a ``TensorParameter``. ``collect`` converts a caller's
parameters to a dict by key. No threads, no I/O; stores read and write the values. Read next:
``trainer.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from kvstore.arrays import Array, adapter_for
from kvstore.arrays.keys import Key, KeySpec
from kvstore.errors import ArgumentTypeError, ArgumentValueError, ValueMismatchError
from kvstore.stores.arguments import spec_of

Arrays = Array | Sequence[Array]
"""One array, or a list of one for each device."""

_GRAD_REQS = ("write", "add", "null")


class Parameter:
    """A trained array and its gradient, each an array or one for each device.

    ``data`` is any array that the stores can write to (NumPy, CuPy, PyTorch, ``mx.nd``); all
    copies have one shape and dtype. You may set ``grad`` at any time; None means that there is no
    gradient in the next step. Neither is copied. ``Trainer`` writes new values into ``data`` and,
    if it sums gradients in place, the sums into ``grad``.

    ``lr_mult`` and ``wd_mult`` are factors for the optimizer's learning rate and decay; new values
    apply from the next step. ``grad_req="null"`` keeps the parameter unchanged; ``"write"`` and
    ``"add"`` mean the same here, since the code that computes the gradients writes them. Source:
    ``Parameter`` of MXNet's Gluon, where ``data()`` and ``grad()`` are calls.

    Raises ``ArgumentTypeError`` for a value that is not an array or cannot be stored, and
    ``ArgumentValueError`` for unequal copies or an unknown ``grad_req``.
    """

    def __init__(
        self,
        data: Arrays,
        grad: Arrays | None = None,
        name: str | None = None,
        *,
        lr_mult: float = 1.0,
        wd_mult: float = 1.0,
        grad_req: str = "write",
    ) -> None:
        if name is not None and not isinstance(name, str):
            raise ArgumentTypeError(f"a parameter's name must be a string, got {name!r}")
        if grad_req not in _GRAD_REQS:
            raise ArgumentValueError(
                f"grad_req must be one of {', '.join(_GRAD_REQS)}, got {grad_req!r}"
            )
        self.name = name
        self.lr_mult = lr_mult
        self.wd_mult = wd_mult
        self.grad_req = grad_req
        self.num_sets = 0
        """How often ``set_data`` was called."""
        self._data = data
        self._copies = _listed(data)
        self._spec = self._checked_spec()
        self.grad = grad

    def _checked_spec(self) -> KeySpec:
        specs = [spec_of(copy) for copy in self._copies]
        if not specs:
            raise ArgumentValueError(
                f"{self} has an empty list of arrays; pass one array for each device"
            )
        if any(spec != specs[0] for spec in specs):
            raise ArgumentValueError(
                f"the arrays of {self} on different devices must have one shape and dtype, got "
                + ", ".join(f"{spec.shape} of {spec.dtype}" for spec in specs)
            )
        return specs[0]

    @property
    def data(self) -> Any:
        """The given array or list of arrays."""
        return self._data

    @property
    def grad(self) -> Any:
        """The gradient, as it was last set."""
        return self._grad

    @grad.setter
    def grad(self, grad: Arrays | None) -> None:
        if grad is not None and len(_listed(grad)) != len(self._copies):
            raise ArgumentValueError(
                f"{self} needs one gradient for each of its {len(self._copies)} devices, got "
                f"{len(_listed(grad))}"
            )
        self._grad = grad

    @property
    def spec(self) -> KeySpec:
        """The shape and dtype of the parameter."""
        return self._spec

    @property
    def is_trained(self) -> bool:
        """Whether the parameter is trained, so that it has gradients."""
        return self.grad_req != "null"

    def list_data(self) -> list[Array]:
        """Return the array on each device."""
        return list(self._copies)

    def list_grad(self) -> list[Array | None]:
        """Return the gradient on each device, or None."""
        return [None] * len(self._copies) if self._grad is None else list(_listed(self._grad))

    @property
    def first(self) -> Array:
        """The array on the first device."""
        return self._copies[0]

    def set_data(self, data: Array) -> None:
        """Write new values into the array on every device, in place.

        ``data`` is an array of the same shape, of any library; it is only read. If a ``Trainer``
        updates on a store of one process, the next step uses the new values and keeps states and
        counts; with servers, the next step raises ``UsageError``. Raises ``ValueMismatchError`` for
        another shape and ``ArgumentTypeError`` for other objects.
        """
        found = spec_of(data)
        if found.shape != self._spec.shape:
            raise ValueMismatchError(
                f"the new values of {self} must have shape {self._spec.shape}, got {found.shape}"
            )
        for copy in self._copies:
            adapter_for(copy).assign(data, copy)
        self.num_sets += 1

    def zero_grad(self) -> None:
        """Set all existing gradients to zero, in place."""
        zeros = np.zeros(self._spec.shape, self._spec.dtype)
        for grad in self.list_grad():
            if grad is not None:
                adapter_for(grad).from_host(zeros, grad)

    def __str__(self) -> str:
        return "a parameter" if self.name is None else f"the parameter {self.name!r}"


class TensorParameter(Parameter):
    """Leaf tensors of PyTorch, one for each device, with their gradients."""

    def list_grad(self) -> list[Array | None]:
        return [copy.grad for copy in self._copies]

    @property
    def is_trained(self) -> bool:
        return any(copy.requires_grad for copy in self._copies)


def collect(params: object) -> dict[Key, Parameter]:
    """Return the parameters of a ``Trainer`` under their keys.

    ``params`` is a mapping of names (used in the order of the names) or an iterable of
    parameters or of pairs (name, parameter), used in its order. Keys are the names if all
    parameters have one, else the numbers 0, 1, and so on. An array that is given twice (tied
    weights) is one parameter, under its first name.

    Raises ``ArgumentTypeError`` and ``ArgumentValueError``.
    """
    found: dict[int, tuple[str | None, Parameter]] = {}
    for name, value in _pairs(params):
        parameter = _parameter(name, value)
        row = (parameter.name if name is None else name, parameter)
        found.setdefault(id(parameter.list_data()[0]), row)
    if not found:
        raise ArgumentValueError("params is empty; pass at least one parameter")
    names = [name for name, _ in found.values() if name is not None]
    parameters = [parameter for _, parameter in found.values()]
    if all(isinstance(each, TensorParameter) and not each.is_trained for each in parameters):
        raise ArgumentValueError(
            f"none of the {len(parameters)} tensors requires a gradient, so none can be trained; "
            "pass model.named_parameters() (state_dict() returns detached tensors)"
        )
    wanted = len(parameters[0].list_data())
    for parameter in parameters:
        if len(parameter.list_data()) != wanted:
            raise ArgumentValueError(
                f"all parameters must be on the same number of devices: {parameters[0]} is on "
                f"{wanted}, {parameter} on {len(parameter.list_data())}"
            )
    if len(names) < len(parameters):
        return dict(enumerate(parameters))
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ArgumentValueError(
            f"parameters must have different names; used more than once: {', '.join(twice)}"
        )
    return dict(zip(names, parameters, strict=True))


def _pairs(params: object) -> Iterator[tuple[str | None, object]]:
    if isinstance(params, Mapping):
        for name in params:
            if not isinstance(name, str):
                raise ArgumentTypeError(f"the name of a parameter must be a string, got {name!r}")
        yield from sorted(params.items())
        return
    if (
        isinstance(params, str | Parameter)
        or hasattr(params, "requires_grad")
        or hasattr(params, "named_parameters")
        or not isinstance(params, Iterable)
    ):
        raise ArgumentTypeError(
            "params must be a mapping or a list of parameters, such as "
            f"model.named_parameters(), got {type(params).__name__}"
        )
    for item in params:
        if isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str):
            yield item
        else:
            yield None, item


def _parameter(name: str | None, value: object) -> Parameter:
    if isinstance(value, Parameter):
        return value
    copies = _listed(value)
    if not copies or not all(hasattr(copy, "requires_grad") for copy in copies):
        whose = "" if name is None else f" (of {name!r})"
        raise ArgumentTypeError(
            "a parameter must be a PyTorch tensor, a list of tensors (one for each device) or "
            f"Parameter(data, grad), got {_described(value)}{whose}"
        )
    for copy in copies:
        if not copy.is_leaf:
            raise ArgumentTypeError(
                f"the tensor {name or ''} is not a leaf (it was computed from others), so "
                "PyTorch keeps no gradient for it; pass the parameters themselves, or "
                "tensor.detach().requires_grad_()"
            )
    return TensorParameter(value, name=name)


def _listed(arrays: Any) -> Sequence[Array]:
    return arrays if isinstance(arrays, list | tuple) else [arrays]


def _described(value: object) -> str:
    if isinstance(value, list | tuple):
        return f"a {type(value).__name__} of {', '.join(type(each).__name__ for each in value)}"
    return type(value).__name__
