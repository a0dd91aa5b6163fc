"""``DistributedOptimizer``: a PyTorch optimizer with gradients of all ranks.

The optimizer remains the same object, but its class becomes a subclass, so learning rate
schedulers, ``GradScaler``, clipping and ``state_dict`` work as before. Gradients are sent in
buckets during ``backward``, which ends when the sums of all ranks have arrived. Each rank then
makes the same step, with its own copy of the optimizer's states. Read next:
``gradient_buckets.py``; and ``server_optimizer.py``, where servers make the step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

import torch

from kvstore.errors import ArgumentTypeError
from kvstore.frameworks.torch.backward_passes import BackwardPasses
from kvstore.frameworks.torch.gradient_buckets import Compression, GradientBuckets
from kvstore.frameworks.torch.parameters import check_alike
from kvstore.frameworks.torch.store import store_of
from kvstore.stores.dist.store import DistKVStore
from pslite.errors import UsageError

BUCKET_BYTES = 25 << 20
"""The size of a bucket, as in DistributedDataParallel."""


class StepExchange:
    """The exchange of gradients that belongs to a ``DistributedOptimizer``."""

    def __init__(
        self, buckets: GradientBuckets, *, average: bool, backward_passes_per_step: int
    ) -> None:
        self.buckets = buckets
        self.passes = BackwardPasses(
            self.begin, buckets.ready, self.finish, backward_passes_per_step, self.add
        )
        self._average = average
        self.is_done = False
        """Whether the gradients are those of all ranks."""
        self.skips = False

    def add(self) -> None:
        """Handle a pass that adds to the gradients: they must be combined again."""
        if self.is_done and not self._average:
            raise UsageError(
                "the gradients are sums over all ranks already, and a second backward pass would "
                "add them up again: call step() or zero_grad() of the optimizer first, or pass "
                "backward_passes_per_step or use no_sync() to gather gradients of several passes"
            )
        self.is_done = False

    def begin(self) -> None:
        self.passes.check_ended()
        self.add()
        self.buckets.begin()

    def finish(self) -> None:
        self.buckets.finish()
        self.is_done = True

    def before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if not (self.is_done or self.skips or closure is not None):  # a closure calls backward
            self.begin()
            self.finish()

    def after_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.is_done = False
        self.passes.stepped()


class AveragingOptimizer:
    """The methods that ``DistributedOptimizer`` adds to an optimizer's class."""

    exchange: StepExchange

    def synchronize(self) -> None:
        """Combine the gradients of all ranks, unless they are combined already.

        ``backward`` does this at its end. Call this only on ranks where it reached no parameter,
        and for steps with fewer passes than ``backward_passes_per_step``.
        """
        if not self.exchange.is_done:
            self.exchange.begin()
            self.exchange.finish()

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """In this context, let ``step`` use the gradients as they are."""
        self.exchange.skips = True
        try:
            yield
        finally:
            self.exchange.skips = False

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """In this context, let ``backward`` add to this rank's gradients without sending."""
        return self.exchange.passes.no_sync()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, like the optimizer's own ``zero_grad``."""
        super().zero_grad(set_to_none)  # type: ignore[misc]
        self.exchange.is_done = False

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, like the optimizer's own call; all ranks add the same ones."""
        super().add_param_group(param_group)  # type: ignore[misc]
        added = self.param_groups[-1]["params"]  # type: ignore[attr-defined]
        self.exchange.buckets.add(added)
        self.exchange.passes.watch(added)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse copies and pickles: a copy would use the gradients of only one rank."""
        raise UsageError(
            f"a {type(self).__name__} can be neither copied nor pickled, since a copy would step "
            "by the gradients of one rank: save its state_dict(), and load that into another one"
        )


def DistributedOptimizer(  # noqa: N802  (it stands for a class)
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    kv: DistKVStore | None = None,
    *,
    compression: Compression | None = None,
    average: bool = True,
    bucket_bytes: int = BUCKET_BYTES,
    backward_passes_per_step: int = 1,
) -> Any:
    """Make ``optimizer`` step with the gradients of all ranks, and return it.

    All ranks call it, with the same parameters. It does not change their values; for that, see
    ``broadcast_parameters``. ``backward`` of every rank then waits for all ranks. If a rank's pass
    does not reach a parameter, its gradient is zeros in the sum; if no rank reaches it, ``grad``
    stays None. Sums are in rank order. Afterwards, gradients are parts of buckets, which the next
    pass overwrites: clone a gradient to keep it.

    Args:
        optimizer: of any class of ``torch.optim``, or one derived from it.
        named_parameters: names for errors: ``model.named_parameters()``.
        kv: a distributed store; None finds the job's (``kvstore.torch.init``).
        compression: 'fp16', 'bf16' or what ``kv.set_gradient_compression`` takes. Gradients then go
            through the servers, even on one machine.
        average: divide sums by the number of ranks.
        bucket_bytes: how many bytes of gradients are sent in one call.
        backward_passes_per_step: how many passes add up to the gradients of a step.

    Raises:
        ArgumentTypeError: ``optimizer`` is not one, or has gradients that cannot be added.
        UsageError: the ranks have different parameters; the same error on all of them.
    """
    if not isinstance(optimizer, torch.optim.Optimizer) or isinstance(
        optimizer, AveragingOptimizer
    ):
        raise ArgumentTypeError(
            f"optimizer must be one of torch.optim that is not distributed yet, got "
            f"{type(optimizer).__name__}"
        )
    store = store_of(kv)
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    names = {id(each): name for name, each in named_parameters or ()}
    named = [(names.get(id(each), str(place)), each) for place, each in enumerate(parameters)]
    check_alike(store, named, "the parameters of DistributedOptimizer")
    buckets = GradientBuckets(
        store, average=average, bucket_bytes=bucket_bytes, compression=compression
    )
    exchange = StepExchange(
        buckets, average=average, backward_passes_per_step=backward_passes_per_step
    )
    buckets.add(parameters)
    exchange.passes.watch(parameters)
    kind = type(optimizer)
    optimizer.__class__ = type(f"Distributed{kind.__name__}", (AveragingOptimizer, kind), {})
    optimizer.exchange = exchange
    optimizer.register_step_pre_hook(exchange.before_step)
    optimizer.register_step_post_hook(exchange.after_step)
    return optimizer
