"""``BackwardPasses``: tells an optimizer when a gradient is there, and when a backward pass ends.

PyTorch calls a hook for each parameter whose gradient a pass has computed, and a callback at the
end of the pass, on the thread that called ``backward``; what they raise comes out of ``backward``.
Passes may only add to the gradients: those in ``no_sync``, and all but the last of each
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
"""What PyTorch calls the pass of a thread that is in none."""


class GradientHook:
    """Calls a method with a parameter whose gradient is there, as long as its object lives."""

    def __init__(self, method: Callable[[torch.Tensor], None]) -> None:
        # Python does not see cycles through the hooks of a tensor.
        self._method = weakref.WeakMethod(method)

    def __call__(self, parameter: torch.Tensor) -> None:
        method = self._method()
        if method is not None:
            method(parameter)


def call_with_gradients(
    parameters: Iterable[torch.Tensor], method: Callable[[torch.Tensor], None]
) -> None:
    """Call a method for each gradient that a pass computes, in place of earlier methods.

    An optimizer may be made for parameters of another one that was not collected yet: two of them
    would take the same gradients.
    """
    for parameter in parameters:
        hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
        for number, hook in list(hooks.items()):
            if isinstance(hook, GradientHook):
                del hooks[number]
        is_trained = parameter.requires_grad
        parameter.requires_grad_(True)  # a hook cannot be set on a frozen one
        parameter.register_post_accumulate_grad_hook(GradientHook(method))
        parameter.requires_grad_(is_trained)


class BackwardPasses:
    """The backward passes of some parameters. Belongs to the thread that calls ``backward``.

    Args:
        begun: called at the begin of a pass whose gradients count, before the first ``ready``.
        ready: called with the place of a parameter whose gradient is complete in such a pass.
        ended: called at its end.
        passes_per_exchange: how many passes add up to one gradient.
        added: called at the begin of a pass that only adds to the gradients.
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
        self._lock = threading.RLock()  # guards all of it: autograd has a thread for each device

    def watch(self, parameters: Sequence[torch.Tensor]) -> None:
        """Watch further parameters; their places go on from those that are watched already."""
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
        """Let the passes within only add to the gradients."""
        before, self._only_adds = self._only_adds, True
        try:
            yield
        finally:
            self._only_adds = before

    def stepped(self) -> None:
        """Begin to count passes anew, since the optimizer has made its step."""
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
