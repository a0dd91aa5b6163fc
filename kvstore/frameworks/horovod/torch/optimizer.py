"""``DistributedOptimizer``: combines the gradients of all ranks before each step.

Gradients are sent in buckets, with one call for each bucket. The backward pass makes this call as
soon as all gradients of the bucket are complete. ``synchronize`` sends the remaining buckets, with
zeros for parameters without a gradient. When the optimizer is made, rank 0 tells the others the
order of its buckets and parameters; a rank with other parameters gets an error then. Hooks run on
autograd's threads, the rest on the caller's. Read next: ``operations.py``.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvstore.errors import ArgumentTypeError, ArgumentValueError
from kvstore.frameworks.horovod import calls, session
from kvstore.frameworks.horovod.calls import CollectiveHandle, ReduceOperation
from kvstore.frameworks.horovod.compression import Compression
from kvstore.frameworks.horovod.objects import broadcast_object
from kvstore.frameworks.horovod.session import ProcessSet, global_process_set
from kvstore.frameworks.horovod.torch import operations
from kvstore.frameworks.torch.backward_passes import call_with_gradients
from pslite.errors import UsageError

_BUCKET_BYTES = 8 << 20
_numbers = itertools.count()
"""Numbers this process's optimizers: calls of two of them may be in flight together."""


@dataclass(eq=False)
class GradientBucket:
    """Parameters of one dtype and device with gradients in one call, and that call."""

    name: str
    parameters: list[Tensor]
    #: The parameters that have had all their backward passes.
    ready: set[Tensor] = field(default_factory=set)
    dense: list[Tensor] = field(default_factory=list)
    handle: CollectiveHandle[Tensor] | None = None
    context: Any = None
    sparse: dict[Tensor, CollectiveHandle[Tensor]] = field(default_factory=dict)
    is_sent: bool = False


@dataclass(frozen=True)
class ExchangeOptions:
    """How gradients are combined."""

    compression: Any
    op: ReduceOperation
    factors: tuple[float, float]
    sparse_as_dense: bool
    process_set: ProcessSet


class GradientExchange:
    """Sends the gradients of an optimizer's parameters, and replaces them by the results."""

    def __init__(self, buckets: Sequence[GradientBucket], options: ExchangeOptions) -> None:
        self.buckets = list(buckets)
        self._options = options
        self._bucket_of = {each: bucket for bucket in buckets for each in bucket.parameters}
        self._passes = 1
        self._passes_left: dict[Tensor, int] = {}
        call_with_gradients(self._bucket_of, self._accumulated)

    def set_passes(self, passes: int) -> None:
        """Set after how many backward passes a gradient is sent."""
        self._passes = passes
        self._passes_left = dict.fromkeys(self._bucket_of, passes)

    @property
    def is_under_way(self) -> bool:
        """Whether gradients were sent and their results are not there yet."""
        return any(bucket.is_sent for bucket in self.buckets)

    def _accumulated(self, parameter: Tensor) -> None:
        """Note a backward pass of a parameter; autograd calls this."""
        bucket = self._bucket_of[parameter]
        if self._passes_left[parameter] <= 0 or bucket.is_sent:
            raise UsageError(
                "a gradient was computed more than backward_passes_per_step times before "
                f"optimizer.step(): {self._passes} were expected; pass a larger number to "
                "DistributedOptimizer to accumulate gradients here"
            )
        self._passes_left[parameter] -= 1
        if self._passes_left[parameter] == 0:
            bucket.ready.add(parameter)
            if len(bucket.ready) == len(bucket.parameters):
                self._send(bucket)

    def _send(self, bucket: GradientBucket) -> None:
        options = self._options
        bucket.is_sent = True
        gradients = []
        for parameter in bucket.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradient = parameter.grad
            if gradient.is_sparse and not options.sparse_as_dense:
                name = f"{bucket.name}.{len(bucket.sparse)}"
                bucket.sparse[parameter] = operations.sparse_allreduce_async(
                    gradient, name, options.op, options.process_set
                )
                continue
            bucket.dense.append(parameter)
            gradients.append(gradient.to_dense() if gradient.is_sparse else gradient)
        if gradients:
            flat = torch.cat([gradient.detach().reshape(-1) for gradient in gradients])
            small, bucket.context = options.compression.compress(flat)
            bucket.handle = operations.allreduce_async_(
                small, None, bucket.name, options.op, *options.factors, options.process_set
            )

    def synchronize(self) -> None:
        """Send the remaining buckets, wait for all of them, and set the gradients."""
        for bucket in self.buckets:
            if not bucket.is_sent:
                self._send(bucket)
        try:
            for bucket in self.buckets:
                self._take(bucket)
        finally:
            self.forget()

    def _take(self, bucket: GradientBucket) -> None:
        for parameter, handle in bucket.sparse.items():
            parameter.grad = handle.result()
        if bucket.handle is None:
            return
        flat = self._options.compression.decompress(bucket.handle.result(), bucket.context)
        pieces = flat.split([parameter.numel() for parameter in bucket.dense])
        for parameter, piece in zip(bucket.dense, pieces, strict=True):
            found = piece.view(parameter.shape)
            if parameter.grad is None or parameter.grad.is_sparse:
                parameter.grad = found.to_sparse()
            else:
                parameter.grad.copy_(found)

    def forget(self) -> None:
        """Begin a new step, without waiting for calls in flight."""
        for bucket in self.buckets:
            bucket.ready, bucket.dense, bucket.sparse = set(), [], {}
            bucket.handle, bucket.is_sent = None, False
        self.set_passes(self._passes)


class DistributedStep(torch.optim.Optimizer):  # type: ignore[misc]
    """The methods that :func:`DistributedOptimizer` adds to an optimizer's class."""

    _exchange: GradientExchange | None
    _parameter_names: dict[Tensor, str]
    _is_synchronized: bool
    _must_synchronize: bool

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Wait for the combined gradients, and update the parameters."""
        if self._must_synchronize:
            if self._is_synchronized:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() after "
                    "optimizer.synchronize(): gradients are combined twice; write `with "
                    "optimizer.skip_synchronize(): optimizer.step()`",
                    stacklevel=2,
                )
            self.synchronize()
        self._is_synchronized = False
        return super().step(closure)

    def synchronize(self) -> None:
        """Combine the gradients of all ranks, and wait until that is done.

        Call it before you change gradients, for example to clip them, and then call ``step`` in
        ``skip_synchronize``.
        """
        if self._exchange is not None:
            self._exchange.synchronize()
        self._is_synchronized = True

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """In this context, let ``step`` only update, since ``synchronize`` was called before."""
        self._must_synchronize = False
        try:
            yield
        finally:
            self._must_synchronize = True

    def zero_grad(self, *args: Any, **options: Any) -> None:
        """Clear the gradients. Raises ``UsageError`` between ``backward`` and ``step``."""
        if self._exchange is not None and self._exchange.is_under_way:
            raise UsageError(
                "optimizer.zero_grad() was called while gradients are combined: call "
                "optimizer.step() or optimizer.synchronize() before it"
            )
        super().zero_grad(*args, **options)

    def load_state_dict(self, state_dict: Any) -> None:
        """Load a state, and forget the gradients in flight."""
        if self._exchange is not None:
            self._exchange.forget()
        self._is_synchronized = False
        super().load_state_dict(state_dict)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set the number of backward passes that add up to the gradients of a step."""
        if self._exchange is not None:
            self._exchange.set_passes(_checked_passes(passes))


def DistributedOptimizer(  # noqa: N802  (Horovod's name)
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReduceOperation | None = None,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return an optimizer that combines the gradients of all ranks.

    Its class is a subclass of that of ``optimizer``. It shares parameters, options and state with
    ``optimizer``, which must not be used any more. All ranks make it, with the same names of
    parameters.

    Args:
        named_parameters: all of the optimizer's, as in ``model.named_parameters()``.
        backward_passes_per_step: how many backward passes add to a gradient before it is sent.
        gradient_predivide_factor: with ``Average``: divides before the sum, and multiplies after.
        num_groups: the older name of ``groups``.
        groups: the number of buckets, or lists of parameters to send together; by default, buckets
            of about 8 MB.
        sparse_as_dense: send sparse gradients as dense ones.

    Raises:
        ArgumentValueError: names are missing, repeated, or differ between the ranks.
    """
    found_op = calls.operation_of(op)
    if gradient_predivide_factor != 1.0 and found_op is not ReduceOperation.AVERAGE:
        raise ArgumentValueError(
            f"gradient_predivide_factor needs op=hvd.Average, got {found_op.name.capitalize()}"
        )
    _checked_passes(backward_passes_per_step)
    names = _names_of(optimizer, named_parameters)
    options = ExchangeOptions(
        compression,
        found_op,
        (1.0 / gradient_predivide_factor, gradient_predivide_factor),
        sparse_as_dense,
        process_set,
    )
    own: Any = type(optimizer)
    kind = _class_for(own)
    found = kind.__new__(kind)
    found.__dict__.update(optimizer.__dict__)
    found.__dict__.pop("step", None)  # a scheduler's, of the optimizer's own step
    found._parameter_names = names
    found._is_synchronized, found._must_synchronize = False, True
    found._exchange = None
    if process_set.included() and session.size() > 1:
        trained = {each: name for each, name in names.items() if each.requires_grad}
        buckets = _buckets(trained, num_groups if groups is None else groups, process_set)
        found._exchange = GradientExchange(buckets, options)
        found._exchange.set_passes(backward_passes_per_step)
    return found


@functools.cache
def _class_for(kind: Any) -> Any:
    return type(kind.__name__, (DistributedStep, kind), {"__module__": kind.__module__})


def _checked_passes(passes: int) -> int:
    if not isinstance(passes, int) or passes < 1:
        raise ArgumentValueError(f"backward_passes_per_step must be at least 1, got {passes!r:.60}")
    return passes


def _names_of(
    optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, Tensor]] | None
) -> dict[Tensor, str]:
    """Return a name for each parameter of the optimizer, in its order."""
    own = [
        (f"group {number}, parameter {index}", each)
        for number, group in enumerate(optimizer.param_groups)
        for index, each in enumerate(group["params"])
    ]
    if named is None:
        return {each: name for name, each in own}
    pairs = list(named)
    if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        raise ArgumentTypeError(
            "named_parameters must be pairs (name, parameter), as model.named_parameters() has them"
        )
    names = [name for name, _ in pairs]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ArgumentValueError(
            f"each name in named_parameters may be there once; repeated: {', '.join(repeated)}"
        )
    by_parameter = {each: name for name, each in pairs}
    missing = [place for place, each in own if each not in by_parameter]
    if missing:
        raise ArgumentValueError(
            f"named_parameters must name all parameters of the optimizer; missing: "
            f"{'; '.join(missing[:3])}{' ...' if len(missing) > 3 else ''}"
        )
    return {each: by_parameter[each] for _, each in own}


# -- buckets --------------------------------------------------------------------------------------


def _buckets(
    trained: dict[Tensor, str], groups: int | Sequence[Sequence[Tensor]], process_set: ProcessSet
) -> list[GradientBucket]:
    """Group the parameters, alike on all ranks: in the order of the first rank."""
    by_name = {name: each for each, name in trained.items()}
    parts = [[trained[each] for each in part] for part in _parts(trained, groups)]
    shapes = {name: list(each.shape) for name, each in by_name.items()}
    members = session.current().sets[process_set.process_set_id or 0]
    own = next(_numbers), parts, shapes
    number, first_parts, first_shapes = broadcast_object(own, members[0], None, process_set)
    if shapes != first_shapes:
        differing = sorted(
            name for name in {*shapes, *first_shapes} if shapes.get(name) != first_shapes.get(name)
        )
        name = differing[0]
        raise ArgumentValueError(
            f"the ranks have different parameters: {name!r} has the shape {shapes.get(name)} on "
            f"rank {session.rank()} and {first_shapes.get(name)} on rank {members[0]} (None: it is "
            "not there, or not trained); make the same model on all ranks"
        )
    return [
        GradientBucket(f"gradients.{number}.{part[0]}", [by_name[name] for name in part])
        for part in first_parts
    ]


def _parts(
    trained: dict[Tensor, str], groups: int | Sequence[Sequence[Tensor]]
) -> list[list[Tensor]]:
    """Return the parameters of each bucket; each has one dtype and device."""
    if isinstance(groups, int):
        if groups < 0:
            raise ArgumentValueError(f"groups must be 0 or more, or lists, got {groups}")
        rest, wanted = list(trained), groups
        found: list[list[Tensor]] = []
    else:
        found = [[each for each in part if each in trained] for part in _checked_groups(groups)]
        taken = {each for part in found for each in part}
        return _of_one_kind([*found, *([each] for each in trained if each not in taken)])
    if wanted:
        share, more = divmod(len(rest), wanted)
        ends = [share * number + min(number, more) for number in range(wanted + 1)]
        return _of_one_kind([rest[ends[n] : ends[n + 1]] for n in range(wanted)])
    size = _BUCKET_BYTES
    for each in reversed(rest):  # the backward pass reaches the last ones first
        nbytes = each.numel() * each.element_size()
        if size + nbytes > _BUCKET_BYTES or not found:
            found.append([])
            size = 0
        found[-1].append(each)
        size += nbytes
    return _of_one_kind(found)


def _checked_groups(groups: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    found = [list(part) for part in groups]
    everything = [each for part in found for each in part]
    if not all(isinstance(each, Tensor) for each in everything):
        raise ArgumentTypeError("groups must be a number, or lists of parameters")
    if len(set(everything)) < len(everything):
        raise ArgumentValueError("a parameter is in several groups; put it into one of them")
    return found


def _of_one_kind(parts: Iterable[Sequence[Tensor]]) -> list[list[Tensor]]:
    found: list[list[Tensor]] = []
    for part in parts:
        kinds: dict[Any, list[Tensor]] = {}
        for each in part:
            kinds.setdefault((each.dtype, each.device), []).append(each)
        found += kinds.values()
    return found
