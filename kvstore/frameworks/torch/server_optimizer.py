"""``ServerOptimizer``: the servers make the step and keep the optimizer states.

During ``backward``, gradients are sent to the servers, and new weights are written to the
parameters' own memory. ``step`` waits for the rest. Servers add gradients in rank order, so all
workers of a synchronous store have the same bits; workers of ``dist_async`` do not wait for each
other.

A weight may be replaced as soon as its gradient is complete, since everything that used it has been
computed. Its version number increases, so code that still needs the old values gets PyTorch's own
error. Runs on the thread of ``backward`` and ``step``. Read next: ``server_rules.py``,
``backward_passes.py``.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

from kvstore.errors import ArgumentTypeError, ArgumentValueError, DuplicateKeyError, OptimizerNotSet
from kvstore.frameworks.torch.backward_passes import BackwardPasses
from kvstore.frameworks.torch.pushed_gradients import PushedGradients
from kvstore.frameworks.torch.server_rules import rule_for
from kvstore.frameworks.torch.store import init, store_of
from kvstore.mxnet.gluon.consistency import Agreement
from kvstore.mxnet.gluon.parameter import collect
from kvstore.mxnet.gluon.trainer_store import HeldWeights
from kvstore.optimizer import Optimizer
from kvstore.stores.dist.progress import note_step
from kvstore.stores.dist.store import DistKVStore
from pslite.errors import UsageError

BUCKET_BYTES = 4 << 20
"""The size of the gradients that are sent in one call."""

_STATES = "servers"
"""The entry of ``state_dict`` with the servers' states, as the bytes of a file."""


class ServerOptimizer(torch.optim.Optimizer):  # type: ignore[misc]
    """A PyTorch optimizer whose updates are made on the servers of a store.

    All ranks create one, with the same parameters, and begin with rank 0's values. Gradients are
    sent during ``backward``, and ``grad`` is None afterwards. To change gradients before ``step``
    (clipping by the norm, ``GradScaler``), use ``DistributedOptimizer``, or ``overlap=False`` for
    each rank's own gradients. A parameter that no rank's pass reaches is not updated; if only some
    ranks reach it, the others send zeros. New numbers in ``param_groups``, such as those of
    learning rate schedulers, take effect at the next ``backward``; rank 0's numbers are used.

    Args:
        params: a module, or pairs of a name and a parameter, or groups ``{"params": pairs, "lr":
            ...}``. The names are the store's keys.
        kv: a distributed store without keys of these names and without an optimizer; None makes one
            (``kvstore.torch.init``).
        optimizer: ``"sgd"``, ``"adam"``, ``"adamw"``, ``"adamax"``, ``"nadam"``, ``"adagrad"``,
            ``"adadelta"`` or ``"rmsprop"`` with PyTorch's numbers and formula; another name or an
            optimizer of ``kvstore.optimizer``.
        lr: the learning rate; None: the optimizer's own default.
        average: divide sums of gradients by the number of workers (not in ``dist_async``).
        sparse: names of embeddings with sparse gradients; those of a module are found without it.
        overlap: whether gradients are sent during ``backward``; if not, ``step`` sends them.
        bucket_bytes: how many bytes of gradients are sent in one call.
        backward_passes_per_step: how many passes add up to the gradients of a step.
        numbers: further numbers of the optimizer, such as ``betas`` or ``weight_decay``.

    Raises:
        UsageError: the store is in use, or the ranks have different parameters or optimizers.
        ArgumentTypeError, ArgumentValueError: an argument is invalid.
    """

    #: With this, GradScaler always calls ``step``, which raises an error for it.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Any,
        kv: DistKVStore | None = None,
        optimizer: str | Optimizer = "adam",
        *,
        lr: float | None = None,
        average: bool = True,
        sparse: Iterable[str] = (),
        overlap: bool = True,
        bucket_bytes: int = BUCKET_BYTES,
        backward_passes_per_step: int = 1,
        **numbers: Any,
    ) -> None:
        self._rule = rule_for(optimizer, numbers if lr is None else {"lr": lr, **numbers})
        self._is_complete = False
        groups, names = _groups_of(params)
        super().__init__(groups, dict(self._rule.defaults))
        self._is_complete = True
        self.kv = init() if kv is None else store_of(kv)
        self.kv._refuses_steps = (
            "kv.steps does not set the weights of a model whose ServerOptimizer has this store; "
            "save its state_dict() and load it with load_state_dict()"
        )
        self._weights = [each for group in self.param_groups for each in group["params"]]
        self._keys = [names[id(each)] for each in self._weights]
        embeddings = _sparse_places(params, self._weights, self._keys, sparse)
        self._pushed = PushedGradients(self.kv, self._weights, self._keys, embeddings, bucket_bytes)
        self._overlaps = overlap
        self._held = HeldWeights(collect(zip(self._keys, self._weights, strict=True)))
        is_synchronous = "async" not in self.kv.type
        self._share = 1.0 / (self.kv.num_workers if average and is_synchronous else 1)
        self._numbers = self._present()
        self._sent = self._made()
        self._is_under_way = False
        self._start(average)
        self._passes = BackwardPasses(
            self._begin, self._pushed.ready, self._push_rest, backward_passes_per_step
        )
        if overlap:
            self._passes.watch(self._weights)

    # -- what PyTorch calls --------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Wait until the new weights are in the parameters; return ``closure()``.

        All workers of a synchronous store must call it the same number of times.

        Raises:
            UsageError: numbers of ``param_groups`` have changed since ``backward``, or a
                ``GradScaler`` has scaled the gradients.
            NodeLostError: a worker or server is lost; the text names it.
        """
        if hasattr(self, "grad_scale"):
            raise UsageError(
                "GradScaler cannot unscale gradients that servers have already used: train in "
                "bfloat16 without it, or use DistributedOptimizer"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self._is_under_way:
            self._begin()
            self._push_rest()
        elif self._present() != self._numbers:
            raise UsageError(
                "numbers of param_groups were changed between backward() and step(), when "
                f"gradients had left with {self._sent!r}: change them before backward()"
            )
        self._passes.check_ended()
        self._finish()
        note_step(self.kv, 0)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients that this worker still has."""
        if self._is_under_way:
            self._pushed.wait()  # gradients may still be in flight
        super().zero_grad(set_to_none)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """In this context, let ``backward`` add to the gradients without pushing."""
        return self._passes.no_sync()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise ``UsageError``: the servers get all parameters in the constructor."""
        if self._is_complete:
            raise UsageError(
                "a ServerOptimizer takes all its parameters when it is made; make it with frozen "
                "ones (requires_grad=False) among them, or make another one over a store of its own"
            )
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the groups' numbers and, on rank 0, the servers' states as bytes.

        Only rank 0 reads the states, so the others need not call it.
        """
        found: dict[str, Any] = super().state_dict()
        if self.kv.rank == 0:
            with tempfile.TemporaryDirectory(prefix="kvstore-") as folder:
                path = Path(folder, "states")
                self.kv.save_optimizer_states(path)
                found[_STATES] = torch.from_numpy(np.fromfile(path, np.uint8))
        return found

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the result of ``state_dict``; all workers call it, and rank 0's is used.

        Weights are not in it: load the model before creating the optimizer.
        """
        found = dict(state_dict)
        states = found.pop(_STATES, None)
        super().load_state_dict(found)
        with tempfile.TemporaryDirectory(prefix="kvstore-") as folder:
            path = Path(folder, "states")
            if self.kv.rank == 0 and states is not None:
                states.numpy().tofile(path)
            said = self.kv.broadcast_object(str(path) if path.exists() else None)
            if said is None:
                raise UsageError(
                    "the state_dict of worker 0 has no states of the servers: load there what "
                    "state_dict() returned on worker 0, which alone reads them"
                )
            self.kv.load_optimizer_states(said)
        self._numbers = []  # the file has other numbers; send those of the groups again

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse copies and pickles: a store has one optimizer."""
        raise UsageError(
            "a ServerOptimizer can be neither copied nor pickled, since its states are on the "
            "servers: save its state_dict(), and load that into another one"
        )

    # -- inside --------------------------------------------------------------------------------

    def _start(self, average: bool) -> None:
        try:
            found = self.kv.current_optimizer()
        except OptimizerNotSet:
            pass
        else:
            raise UsageError(
                f"the store has an optimizer already, {found.name}: make a store for each "
                "ServerOptimizer, kvstore.torch.init()"
            )
        parameters = collect(zip(self._keys, self._weights, strict=True))
        agreement = Agreement(self.kv)
        agreement.start(parameters, self._sent, True, average)
        if self.kv.rank == 0:
            self.kv.set_optimizer(self._sent)
        try:
            self._pushed.start()
        except DuplicateKeyError as error:
            raise UsageError(
                "the store has keys with the names of the parameters already: make a store for "
                "each ServerOptimizer, kvstore.torch.init()"
            ) from error
        self.kv.barrier()
        self._held.note()

    def _present(self) -> list[list[Any]]:
        """Return the current numbers of the groups."""
        return [
            [_plain(group[name]) for name in self._rule.defaults] for group in self.param_groups
        ]

    def _made(self) -> Optimizer:
        """Return the optimizer with the current numbers of the groups."""
        keys = iter(self._keys)
        rows = [(group, [next(keys) for _ in group["params"]]) for group in self.param_groups]
        return self._rule.make(rows, self._share)

    def _begin(self) -> None:
        if self._is_under_way:
            raise UsageError(
                "the gradients of the last backward pass have been pushed already: call step() "
                "after each pass, or pass backward_passes_per_step or use no_sync() to gather "
                "gradients of several passes"
            )
        changed = self._held.changed() or self.kv.views.written()
        if changed:
            raise UsageError(
                f"the weights of {', '.join(map(repr, changed[:5]))} were changed after the last "
                "step, and the servers have others: load weights before the ServerOptimizer is made"
            )
        if self._present() != self._numbers:
            self._sent = self._made()
            # A server updates only after rank 0's push, which comes after this call.
            if self.kv.rank == 0:
                self.kv.set_optimizer(self._sent)
            self._numbers = self._present()
        self._pushed.begin()
        self._is_under_way = True

    def _push_rest(self) -> None:
        self._pushed.push_rest()
        if self._overlaps:
            for weight in self._weights:
                weight.grad = None

    def _finish(self) -> None:
        self._pushed.wait()
        self._is_under_way = False
        self._passes.stepped()
        self._held.note()


def _plain(number: Any) -> Any:
    """Return a group's number as an immutable value."""
    if isinstance(number, torch.Tensor):
        return number.item()
    return tuple(number) if isinstance(number, list) else number


def _groups_of(params: Any) -> tuple[list[dict[str, Any]], dict[int, str]]:
    """Return PyTorch's groups of parameters, and each parameter's name by its id."""
    if isinstance(params, torch.nn.Module):
        params = params.named_parameters()
    given = list(params)
    if not given:
        raise ArgumentValueError("params is empty; pass a module or its named_parameters()")
    if not all(isinstance(each, dict) for each in given):
        given = [{"params": given}]
    groups: list[dict[str, Any]] = []
    names: dict[int, str] = {}
    for group in given:
        mine = []
        for pair in group["params"]:
            if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)):
                raise ArgumentTypeError(
                    "params must be a module, pairs of a name and a parameter, or groups "
                    f'{{"params": pairs}}, got {type(pair).__name__} where a pair is expected; '
                    "names are the keys of the store"
                )
            name, weight = pair
            if id(weight) not in names:  # tied weights are one parameter
                names[id(weight)] = name
                mine.append(weight)
        groups.append({**group, "params": mine})
    return groups, names


def _sparse_places(
    params: Any, weights: Sequence[torch.Tensor], keys: Sequence[str], names: Iterable[str]
) -> set[int]:
    """Return the places of embeddings whose gradients are sparse."""
    wanted = set(names)
    unknown = wanted - set(keys)
    if unknown:
        raise ArgumentValueError(
            f"sparse names {', '.join(sorted(unknown))}, which are not among the parameters"
        )
    modules = params.modules() if isinstance(params, torch.nn.Module) else ()
    own = {
        id(module.weight)
        for module in modules
        if isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) and module.sparse
    }
    return {
        place
        for place, (weight, key) in enumerate(zip(weights, keys, strict=True))
        if id(weight) in own or key in wanted
    }
