"""``BackwardPasses``: tells an optimizer when gradients and passes are complete.

PyTorch calls a hook for each parameter whose gradient a pass has computed, and a callback at the
end of the pass. Both run on the thread that called ``backward``, and ``backward`` raises their
errors. Some passes only add to the gradients: those in ``no_sync``, and all but the last of each
``passes_per_exchange``. Read next: ``distributed_optimizer.py`` and ``server_optimizer.py``.
"""

from __future__ import annotations

import contextlib
import operator
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from kvstore.errors import ArgumentValueError
from pslite.errors import UsageError

_NO_PASS = -1
"""PyTorch's number for a thread that is not in a pass."""


class GradientHook:
    """A hook that calls a method with a parameter while the method's object exists."""

    def __init__(self, method: Callable[[torch.Tensor], None]) -> None:
        # Python's garbage collector does not see cycles through a tensor's hooks.
        self._method = weakref.WeakMethod(method)

    def __call__(self, parameter: torch.Tensor) -> None:
        method = self._method()
        if method is not None:
            method(parameter)


def call_with_gradients(
    parameters: Iterable[torch.Tensor], method: Callable[[torch.Tensor], None]
) -> None:
    """Have ``method`` called for each gradient of a pass; it replaces earlier ones.

    An optimizer may be created for the parameters of another optimizer that still exists. Without
    this, both would take the same gradients.
    """
    for parameter in parameters:
        hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
        for number, hook in list(hooks.items()):
            if isinstance(hook, GradientHook):
                del hooks[number]
        is_trained = parameter.requires_grad
        parameter.requires_grad_(True)  # PyTorch refuses hooks on frozen parameters
        parameter.register_post_accumulate_grad_hook(GradientHook(method))
        parameter.requires_grad_(is_trained)


class BackwardPasses:
    """The backward passes of some parameters; belongs to the ``backward`` thread.

    Args:
        begun: called at the start of a pass that exchanges gradients, before the first ``ready``.
        ready: called in such a pass with the place of a parameter whose gradient is complete.
        ended: called at the end of such a pass.
        passes_per_exchange: how many passes add up to one gradient.
        added: called at the start of a pass that only adds to the gradients.
    """

    def __init__(
        self,
        begun: Callable[[], None],
        ready: Callable[[int], None],
        ended: Callable[[], None],
        passes_per_exchange: int = 1,
        added: Callable[[], None] = lambda: None,
    ) -> None:
        self._begun, self._ready, self._ended, self._added = begun, ready, ended, added
        self._per_exchange = operator.index(passes_per_exchange)
        if self._per_exchange < 1:
            raise ArgumentValueError(
                f"backward_passes_per_step must be at least 1, got {passes_per_exchange}"
            )
        self._pass = _NO_PASS
        self._count = 0
        self._only_adds = False
        self._exchanges = False
        self._seen: set[int] = set()
        self._place_of: dict[torch.Tensor, int] = {}
        self._lock = threading.RLock()  # guards everything: autograd has a thread for each device

    def watch(self, parameters: Sequence[torch.Tensor]) -> None:
        """Watch further parameters; their places follow those of earlier ones."""
        for parameter in parameters:
            self._place_of[parameter] = len(self._place_of)
        call_with_gradients(parameters, self._has_gradient)

    def check_ended(self) -> None:
        """Raise ``UsageError`` if a pass has raised an error after gradients were sent."""
        if self._pass != _NO_PASS and self._exchanges:
            raise UsageError(
                "an earlier backward pass has not ended: it raised an error after some of its "
                "gradients were sent, so the ranks are no longer at the same step; restart the "
                "job, or, for activation checkpoints, pass use_reentrant=False"
            )

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """In this context, let backward passes only add to the gradients."""
        before, self._only_adds = self._only_adds, True
        try:
            yield
        finally:
            self._only_adds = before

    def stepped(self) -> None:
        """Count passes from 0 again, since the optimizer has made its step."""
        self._count = 0

    def _has_gradient(self, parameter: torch.Tensor) -> None:
        place = self._place_of[parameter]
        with self._lock:
            current = torch._C._current_graph_task_id()
            if current != self._pass:
                self._begin(current)
            if not self._exchanges:
                return
            if place in self._seen:
                raise UsageError(
                    f"parameter {place} of the optimizer got a second gradient in one backward "
                    "pass; activation checkpoints need use_reentrant=False"
                )
            self._seen.add(place)
            self._ready(place)

    def _begin(self, number: int) -> None:
        self.check_ended()
        self._pass = number
        torch.autograd.Variable._execution_engine.queue_callback(self._end)
        self._exchanges = False
        self._seen.clear()
        if self._only_adds or self._count + 1 < self._per_exchange:
            self._added()
        else:
            self._begun()
            self._exchanges = True

    def _end(self) -> None:
        self._pass = _NO_PASS
        if not self._only_adds:
            self._count += 1
        if self._exchanges:
            self._exchanges = False
            self._count = 0
            self._ended()
