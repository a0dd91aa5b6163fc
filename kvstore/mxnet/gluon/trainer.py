"""``Trainer``: update weights over any store, as in MXNet's Gluon.

A trainer does not know the network and computes no gradients; the script's backward pass writes
them to the parameters. The first use of the trainer decides where updates happen: on the store, or
here with an ``Updater`` for each device (``trainer_store.py``). One thread may use a trainer; it
starts no threads, and blocks when the store's calls do. Read next: ``parameter.py``, then
``trainer_store.py``. Source of the calls: ``python/mxnet/gluon/trainer.py`` of MXNet 1.9.1.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from kvstore.arrays import Array, adapter_for
from kvstore.arrays.keys import Key
from kvstore.checkpoint.optimizer_states import (
    Content,
    FilePath,
    SavedPiece,
    SavedStates,
    write_states,
)
from kvstore.errors import ArgumentTypeError, ArgumentValueError
from kvstore.mxnet.gluon.consistency import (
    Factors,
    Plan,
    check_batch_size,
    fingerprint,
    optimizer_for,
)
from kvstore.mxnet.gluon.parameter import Parameter, TensorParameter, collect
from kvstore.mxnet.gluon.trainer_store import StoreLink, check_arguments, open_link
from kvstore.optimizer import Optimizer, Updater
from kvstore.optimizer.serialize import from_plain, to_plain
from kvstore.optimizer.states import create_state
from kvstore.sparse.convert import is_row_sparse
from kvstore.stores.base import KVStore, KVStoreBase
from kvstore.stores.dist.progress import note_step
from kvstore.stores.steps import Steps, WorkerState
from pslite.errors import UsageError

_logger = logging.getLogger(__name__)

REDUCTIONS = ("sum", "mean")

UNSAID = (
    "step(%g) divides the gradients by %g, which is right for losses that are sums over samples. "
    'Those of PyTorch are means unless reduction="sum" was given to them: then make the Trainer '
    'with reduction="mean". reduction="sum" turns this warning off'
)


class Trainer:
    """An optimizer for a set of parameters, applied through a store.

    ``params``: a mapping of names to parameters, or an iterable of parameters or of pairs
    (name, parameter). A parameter is a leaf tensor of PyTorch, a list of them (one for each
    device), or a ``Parameter``. The names are the store's keys; without names, 0, 1, and so on. A
    mapping is used in the order of its names, an iterable in its own order.

    ``optimizer``: an ``Optimizer``, or its name with its numbers in ``optimizer_params``.

    ``kvstore``: the name of a store's type, a store, or None for one device without a store.
    A store given by name is created when it is first needed. With parameters on one CPU, a type
    for one process means None. All workers of a distributed store make the same calls.

    ``update_on_kvstore``: whether the store runs the optimizer; None leaves it to the store.

    ``reduction``: whether gradients on a device are the ``"sum"`` or the ``"mean"`` over its
    samples; PyTorch's losses are means by default. None is ``"sum"``, as in MXNet, and logs once
    what that means for tensors of PyTorch.

    The trainer reads and writes parameters and gradients only during calls. It writes new weights
    in place; autograd does not record this. The first call that needs the store sets all
    parameters, including frozen ones, to worker 0's values (``broadcast_parameters``).

    Raises ``ArgumentTypeError``, ``ArgumentValueError`` (a ``ValueError``; also for
    combinations that are impossible) and what ``optimizer.create`` raises.
    """

    def __init__(
        self,
        params: Mapping[str, Any] | Iterable[Any],
        optimizer: str | Optimizer,
        optimizer_params: Mapping[str, Any] | None = None,
        kvstore: str | KVStoreBase | None = "device",
        compression_params: Mapping[str, Any] | None = None,
        update_on_kvstore: bool | None = None,
        *,
        reduction: str | None = None,
    ) -> None:
        self._params = collect(params)
        check_arguments(kvstore, self._params, update_on_kvstore, compression_params)
        if reduction not in (None, *REDUCTIONS):
            raise ArgumentValueError(
                f"reduction must be one of {', '.join(REDUCTIONS)}, got {reduction!r}"
            )
        self._reduction = reduction
        self._optimizer = optimizer_for(optimizer, optimizer_params)
        self._factors = Factors(self._params, self._optimizer)
        self._optimizer = self._optimizer.replace(**self._factors.changes(self._optimizer))
        self._scale = _rescale_of(self._optimizer)
        self._num_devices = len(next(iter(self._params.values())).list_data())
        self._updaters = [Updater(self._optimizer) for _ in range(self._num_devices)]
        self._wanted_store = (kvstore, update_on_kvstore, compression_params)
        self._link: StoreLink | None = None
        self._is_open = False
        self._is_started = False
        self._num_updates = 0

    # -- what it is --------------------------------------------------------------------

    def __repr__(self) -> str:
        kvstore = self._wanted_store[0]
        link = self._link
        shown = kvstore if isinstance(kvstore, str | None) else kvstore.type
        where = ""
        if self._is_open:
            where = f", updates {'on the store' if link is not None and link.updates else 'here'}"
        return (
            f"<Trainer of {len(self._params)} parameters by {self._optimizer!r}, "
            f"kvstore={shown!r}{where}, {self._num_updates} steps>"
        )

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer with its present numbers, as an immutable value."""
        return self._optimizer

    @property
    def kvstore(self) -> KVStoreBase | None:
        """The store, created if necessary; None without a store."""
        link = self._open()
        return None if link is None else link.store

    @property
    def num_workers(self) -> int:
        """How many workers share the store; 1 without a store. Creates it."""
        store = self.kvstore
        return 1 if store is None else store.num_workers

    @property
    def update_on_kvstore(self) -> bool:
        """Whether the store runs the optimizer. Creates the store."""
        link = self._open()
        return link is not None and link.updates

    @property
    def learning_rate(self) -> float:
        """The learning rate; with a schedule, that of this trainer's last update.

        Raises ``OptimizerParameterError`` for an optimizer without a learning rate.
        """
        return self._optimizer.rate(max(self._num_updates, 1))

    def set_learning_rate(self, lr: float) -> None:
        """Change the learning rate from the next step on; states and counts stay.

        Unlike in MXNet, the store's optimizer changes too. All workers call this before the same
        step. If their rates differ in a step of a synchronous store, that step raises
        ``OptimizerMismatch`` on all of them. Raises ``UsageError`` if there is a schedule, and
        ``OptimizerParameterError``.
        """
        if self._optimizer.lr_scheduler is not None:
            raise UsageError(
                "cannot set the learning rate, because the optimizer has an lr_scheduler; "
                "create the Trainer without one"
            )
        self._change(learning_rate=lr)
        if self._link is not None and self._is_started:
            self._link.flush()

    # -- a step ------------------------------------------------------------------------

    def broadcast_parameters(self) -> None:
        """Set all parameters on every worker and device to worker 0's values, once.

        The first call that needs the store does this too. But if that is the first ``step``, its
        gradients were computed with other values, unless all workers began with the same.
        """
        self._start()

    def step(self, batch_size: float, ignore_stale_grad: bool = False) -> None:
        """Add gradients over devices and workers, scale them, and update once.

        With ``reduction="sum"``, gradients are divided by ``batch_size`` only, not by the number of
        workers, as in MXNet. For the mean over all workers' samples, pass
        ``batch_size=batch * trainer.num_workers``. With ``reduction="mean"``, the sum is divided
        by the number of gradients added, over all devices of all workers; then ``batch_size`` is
        only the number of samples of one mean. ``batch_size`` may change from step to step. If it
        differs between workers of a synchronous store, all of them raise ``OptimizerMismatch``.

        Weights that were set since the last step (``Parameter.set_data``, ``load_state_dict``)
        are used, and their optimizer states stay; if servers keep the weights, ``UsageError``
        says what to do.

        A parameter without a gradient raises ``UsageError``. With ``ignore_stale_grad`` it is
        skipped, or gets a gradient of zeros if workers wait for each other.
        """
        self._renew(batch_size)
        link = self._start()
        if link is None:
            self._update_here(self._gradients(ignore_stale_grad, fill=False))
            return
        gradients = self._gradients(ignore_stale_grad, fill=link.needs_all_keys)
        link.exchange(gradients, self._params, self._plan(gradients, batch_size))
        if link.updates:
            if link.is_asynchronous:
                link.pull([key for key in self._trained() if key not in gradients], self._params)
            self._num_updates += 1
        else:
            self._update_here(gradients)
        self._note_step(link, batch_size)

    def allreduce_grads(self) -> None:
        """Add gradients over devices and workers, in place, without an update.

        Call this to change the sums before ``update``, for example to clip them by their norm.
        Raises ``UsageError`` if the store updates, or if a parameter has no gradient.
        """
        self._check_updates_here("allreduce_grads")
        link = self._start()
        if link is not None:
            gradients = self._gradients(ignore_stale_grad=False, fill=False)
            link.exchange(gradients, self._params, self._plan(gradients, 0))

    def update(self, batch_size: float, ignore_stale_grad: bool = False) -> None:
        """Divide the gradients by ``batch_size`` and update, after ``allreduce_grads``.

        Every worker and device updates its own copy. Raises ``UsageError`` if the store updates,
        and the errors of ``step``.
        """
        self._check_updates_here("update")
        self._renew(batch_size)
        link = self._start()
        gradients = self._gradients(ignore_stale_grad, fill=False)
        if link is not None:
            link.meet(self._plan(gradients, batch_size))
        self._update_here(gradients)
        if link is not None:
            self._note_step(link, batch_size)

    # -- files -------------------------------------------------------------------------

    def steps(
        self, stop: int, state: Any = None, checkpoint: FilePath | None = None, every: int = 0
    ) -> Steps:
        """Return an iterator over the steps of a training; see ``KVStore.steps``.

        With ``checkpoint``, parameters, optimizer, its states and counts are saved too, and the
        parameters are set when an earlier run's progress is loaded. All workers call it before
        their first step. Raises ``UsageError`` without a store of this package, and the errors of
        ``KVStore.steps``.
        """
        link = self._start()
        if link is None or not isinstance(link.store, KVStore):
            raise UsageError(
                "steps needs a store of this package, and this Trainer has none; create it with a "
                "store, such as kvstore=mx.kv.create('local')"
            )
        steps = link.store.steps(stop, TrainerState(self, state), checkpoint, every)
        if steps.first:
            self._optimizer = link.resume(self._params) or self._optimizer
        return steps

    def _state_here(self) -> dict[str, Any]:
        """Return what a checkpoint of the store does not have, as plain objects."""
        found: dict[str, Any] = {"num_updates": self._num_updates}
        if not self.update_on_kvstore:
            found["optimizer"] = to_plain(self._optimizer)
            found["weights"] = [adapter_for(p.first).to_host(p.first) for p in self._listed()]
            found["states"] = [[piece.num_updates, piece.states] for piece in self._pieces()]
        return found

    def _load_state_here(self, saved: Mapping[str, Any]) -> None:
        """Continue with what ``_state_here`` has returned."""
        self._num_updates = saved["num_updates"]
        if self.update_on_kvstore:
            return
        self._optimizer = from_plain(saved["optimizer"])
        for parameter, weight in zip(self._listed(), saved["weights"], strict=True):
            parameter.set_data(weight)
        pairs = zip(self._params, saved["states"], strict=True)
        states = {key: (count, arrays) for key, (count, arrays) in pairs}
        for updater in self._updaters:
            updater.optimizer = self._optimizer
            updater.set_states(states)

    def save_states(self, fname: FilePath) -> None:
        """Write the optimizer, its states and update counts to a file; not the parameters.

        With several workers the lowest rank writes, and the others return at once. Raises
        ``CheckpointError``.
        """
        link = self._start()
        if link is not None and link.updates:
            link.store.save_optimizer_states(fname, dump_optimizer=True)
        elif link is None or link.store.rank == 0:
            contents = {key: Content(each.spec, 1) for key, each in self._params.items()}
            write_states(fname, contents, self._optimizer, self._pieces(), dump_optimizer=True)

    def load_states(self, fname: FilePath) -> None:
        """Load the optimizer and its states from a file that ``save_states`` wrote.

        All workers call it. If the store updates, one worker reads the file, otherwise each does.
        The file may come from a trainer with another store. Raises ``CheckpointError``.
        """
        link = self._start()
        if link is not None and link.updates:
            self._optimizer = link.load_states(fname, self._optimizer)
            is_reader = not link.is_asynchronous and link.store.rank == 0
            count = self._saved_count(fname) if is_reader else 0
            self._num_updates = int(link.from_first(count))
        else:
            self._load_here(fname)
            self._num_updates = self._saved_count(fname)

    # -- inside ------------------------------------------------------------------------

    def _open(self) -> StoreLink | None:
        if not self._is_open:
            kvstore, update_on_kvstore, compression = self._wanted_store
            self._link = open_link(kvstore, self._params, update_on_kvstore, compression)
            self._is_open = True
        return self._link

    def _start(self) -> StoreLink | None:
        """Return the link to the store after all keys are initialized; None: no store."""
        link = self._open()
        if not self._is_started and link is not None:
            link.start(self._params, self._optimizer, self._reduction == "mean")
        self._is_started = True
        return link

    def _note_step(self, link: StoreLink, batch_size: float) -> None:
        """Record the samples of this worker in a step, for the status of a job.

        ``batch_size`` is the number of samples of one mean, or of all gradients that are added.
        If gradients are already means, scripts pass 1; then nothing is recorded.
        """
        averages = self._reduction == "mean"
        share = self._num_devices if averages else 1 / link.num_summed
        note_step(link.store, batch_size * share if batch_size > 1 else 0)

    def _change(self, **numbers: Any) -> None:
        """Change numbers of the optimizer from now on, on the store too."""
        self._optimizer = self._optimizer.replace(**numbers)
        if self._link is not None and self._is_started:
            self._link.change(**numbers)

    def _renew(self, batch_size: float) -> None:
        """Apply changes since the last step: batch size, factors of parameters."""
        check_batch_size(batch_size)
        divisor = float(batch_size)
        if self._reduction == "mean":
            link = self._open()
            divisor = float(self._num_devices * (1 if link is None else link.num_summed))
        wanted = self._scale / divisor
        if _rescale_of(self._optimizer) != wanted:
            self._change(rescale_grad=wanted)
        if self._factors.have_changed():
            self._change(**self._factors.changes(self._optimizer))
        if self._reduction is None:
            self._note_reduction(batch_size)

    def _note_reduction(self, batch_size: float) -> None:
        """Explain once how a batch size affects PyTorch's gradients of mean losses."""
        self._reduction = "sum"
        is_torch = any(isinstance(each, TensorParameter) for each in self._params.values())
        if is_torch and batch_size not in (1, self._num_devices * self.num_workers):
            _logger.warning(UNSAID, batch_size, batch_size)

    def _listed(self) -> list[Parameter]:
        return list(self._params.values())

    def _trained(self) -> Iterator[Key]:
        return (key for key, parameter in self._params.items() if parameter.is_trained)

    def _plan(self, keys: Iterable[Key], batch_size: float) -> Plan:
        rate = self._optimizer.params().get("learning_rate") or 0.0
        return Plan(float(batch_size), rate, fingerprint(keys), self._factors.fingerprint)

    def _gradients(self, ignore_stale_grad: bool, *, fill: bool) -> dict[Key, list[Array]]:
        """Return the gradients of each parameter.

        With ``fill``, parameters without gradients get zeros.
        """
        found: dict[Key, list[Array]] = {}
        is_here = self._link is None or not self._link.updates
        for key in self._trained():
            parameter = self._params[key]
            gradients = parameter.list_grad()
            if is_here and any(map(is_row_sparse, gradients)):
                raise ArgumentTypeError(
                    f"the gradient of parameter {key!r} is sparse, which needs "
                    "update_on_kvstore=True and a store (such as kvstore='local'); create such "
                    "a Trainer, or use dense gradients"
                )
            missing = [index for index, each in enumerate(gradients) if each is None]
            if missing and not ignore_stale_grad:
                raise UsageError(_stale(key, missing, len(gradients)))
            if not missing:
                found[key] = gradients
            elif fill or len(missing) < len(gradients):
                zeros = [np.zeros(*parameter.spec) for _ in missing]
                found[key] = [zeros.pop() if each is None else each for each in gradients]
        return found

    def _update_here(self, gradients: Mapping[Key, Sequence[Array]]) -> None:
        keys = list(gradients)
        for device, updater in enumerate(self._updaters):
            updater.optimizer = self._optimizer
            weights = [self._params[key].list_data()[device] for key in keys]
            updater(keys, [gradients[key][device] for key in keys], weights)
        self._num_updates += 1

    def _check_updates_here(self, call: str) -> None:
        if self.update_on_kvstore:
            raise UsageError(
                f"{call} cannot be used when the store updates; call step, or create the Trainer "
                "with update_on_kvstore=False"
            )

    def _pieces(self) -> Iterator[SavedPiece]:
        """Yield the first device's optimizer states, which are equal on all devices."""
        states = self._updaters[0].states()
        for key, parameter in self._params.items():
            count, arrays = states.get(key, (0, None))
            if arrays is None:
                data = parameter.list_data()[0]
                weight = adapter_for(data).to_host(data).reshape(-1)
                arrays = create_state(self._optimizer, weight)
            yield SavedPiece(key, 0, None, list(arrays), count)

    def _load_here(self, fname: FilePath) -> None:
        contents = {key: Content(each.spec, 1) for key, each in self._params.items()}
        with SavedStates(fname) as saved:
            optimizer = saved.optimizer or self._optimizer
            saved.check(contents, optimizer)
            states = {}
            for key, content in contents.items():
                piece = saved.read(key, 0, content.spec.num_elements, optimizer)
                states[key] = piece.num_updates, piece.states
            self._optimizer = optimizer
            for updater in self._updaters:
                updater.optimizer = optimizer
                updater.set_states(states)

    def _saved_count(self, fname: FilePath) -> int:
        with SavedStates(fname) as saved:
            return max(saved.read(key, 0, 0, None).num_updates for key in self._params)


class TrainerState:
    """What ``Trainer.steps`` saves for each worker, besides the store."""

    def __init__(self, trainer: Trainer, state: Any) -> None:
        self._trainer = trainer
        self._state = None if state is None else WorkerState(state)

    def state_dict(self) -> dict[str, Any]:
        script = None if self._state is None else self._state.state_dict()
        return {"script": script, "trainer": self._trainer._state_here()}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self._trainer._load_state_here(saved["trainer"])
        if self._state is not None:
            self._state.load_state_dict(saved["script"] or {})


def _rescale_of(optimizer: Optimizer) -> float:
    return float(optimizer.params()["rescale_grad"])


def _stale(key: Key, missing: Sequence[int], num_devices: int) -> str:
    where = "" if num_devices == 1 else f" on device {', '.join(map(str, missing))}"
    return (
        f"the parameter {key!r} has no gradient{where}: the backward pass did not reach it. "
        "Freeze it, give it a gradient, or call step with ignore_stale_grad=True"
    )
