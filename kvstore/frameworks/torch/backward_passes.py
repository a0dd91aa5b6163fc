"""``BackwardPasses``: tells an optimizer when a gradient is there, and when a backward pass ends.

PyTorch calls a hook for each parameter whose gradient a pass has computed, and a callback at the
end of the pass, on the thread that called ``backward``; what they raise comes out of ``backward``.
Passes may only add to the gradients: those in ``no_sync``, and all but the last of each
``passes_per_exchange``. Read next: ``distributed_optimizer.py`` and ``server_optimizer.py``.
"""

from __future__ import annotations

import contextlib
import operator
import weakref
from collections.abc import Callable, Iterator, Sequence

import torch

from kvstore.errors import ArgumentValueError
from pslite.errors import UsageError

_NO_PASS = -1
"""What PyTorch calls the pass of a thread that is in none."""


class BackwardPasses:
    """The backward passes of some parameters. Belongs to the thread that calls ``backward``.

    Args:
        begun: called at the begin of a pass whose gradients count, before the first ``ready``.
        ready: called with the place of a parameter whose gradient is complete in such a pass.
        ended: called at its end.
        passes_per_exchange: how many passes add up to one gradient.
    """

    def __init__(
        self,
        begun: Callable[[], None],
        ready: Callable[[int], None],
        ended: Callable[[], None],
        passes_per_exchange: int = 1,
    ) -> None:
        self._begun, self._ready, self._ended = begun, ready, ended
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
        self._num_parameters = 0

    def watch(self, parameters: Sequence[torch.Tensor]) -> None:
        """Watch further parameters; their places go on from those that are watched already."""
        mine = weakref.ref(self)  # Python does not see cycles through the hooks of a tensor

        def note(place: int) -> None:
            passes = mine()
            if passes is not None:
                passes._has_gradient(place)

        for parameter in parameters:
            place = self._num_parameters
            self._num_parameters += 1
            is_trained = parameter.requires_grad
            parameter.requires_grad_(True)  # a hook cannot be set on a frozen one
            parameter.register_post_accumulate_grad_hook(lambda _, place=place: note(place))
            parameter.requires_grad_(is_trained)

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

    def _has_gradient(self, place: int) -> None:
        current = torch._C._current_graph_task_id()
        if current != self._pass:
            self._begin(current)
        if not self._exchanges:
            return
        if place in self._seen:
            raise UsageError(
                f"parameter {place} of the optimizer got a second gradient in one backward pass; "
                "activation checkpoints need use_reentrant=False"
            )
        self._seen.add(place)
        self._ready(place)

    def _begin(self, number: int) -> None:
        if self._pass != _NO_PASS and self._exchanges:
            raise UsageError(
                "a backward pass begins while an earlier one has not ended: it raised an error "
                "after some of its gradients were sent, so the ranks are no longer at the same "
                "step; restart the job, or, for activation checkpoints, pass use_reentrant=False"
            )
        self._pass = number
        torch.autograd.Variable._execution_engine.queue_callback(self._end)
        self._exchanges = False
        self._seen.clear()
        if not self._only_adds and self._count + 1 >= self._per_exchange:
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
