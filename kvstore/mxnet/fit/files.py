"""Save and load model parameters: ``PREFIX-0003.params`` after the third epoch.

The files contain named arrays (``checkpoint/safetensors.py``): ``arg:NAME`` for parameters and
``aux:NAME`` for values that are not trained, as in the files of the original. The network itself is
Python code and is not saved. If there was a store, ``PREFIX-0003.states`` beside the parameters has
the optimizer's states. Any thread may call. Read next: ``mxnet/model.py``, whose methods ``save``
and ``load`` use this.

Source of names: ``save_checkpoint`` and ``load_checkpoint`` in python/mxnet/model.py.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.checkpoint.atomic import checked_path
from kvstore.checkpoint.safetensors import TensorReader, TensorSpec, TensorWriter
from kvstore.errors import ArgumentTypeError, CheckpointError

HostArray = NDArray[Any]
Prefix = str | os.PathLike[str]

_KIND = "kvstore.model"
_STATES = "kvstore.states"
_DIGEST = "kvstore.states.digest"
"""The digest of the states saved with the parameters. Files of earlier versions lack it."""


class SavedModel(NamedTuple):
    """The contents of a file of parameters."""

    arg_params: dict[str, HostArray]
    aux_params: dict[str, HostArray]
    has_states: bool
    """Whether the optimizer's states were saved with it, next to it."""
    digest: str | None
    """A digest of those states; None if the file has no digest."""


def params_path(prefix: Prefix, epoch: int) -> Path:
    """Return the path of the parameters after ``epoch`` epochs."""
    return Path(f"{_stem(prefix, epoch)}.params")


def states_path(prefix: Prefix, epoch: int) -> Path:
    """Return the path of the optimizer's states after ``epoch`` epochs."""
    return Path(f"{_stem(prefix, epoch)}.states")


def _stem(prefix: Prefix, epoch: int) -> str:
    checked_path(prefix)
    try:
        return f"{os.fspath(prefix)}-{epoch:04d}"  # as it stands: "models/" is a directory
    except (TypeError, ValueError):
        raise ArgumentTypeError(f"epoch must be an int, got {epoch!r}") from None


def save_checkpoint(
    prefix: Prefix,
    epoch: int,
    symbol: Any,
    arg_params: Mapping[str, HostArray],
    aux_params: Mapping[str, HostArray] | None = None,
    *,
    has_states: bool = False,
) -> None:
    """Write the parameters to ``PREFIX-0003.params``, for ``epoch`` 3.

    The arrays are on the host, have any dtype that a store can hold, and are only read. ``symbol``
    is accepted for compatibility with MXNet: the network is code and is not saved. With
    ``has_states``, the file of states already exists and belongs to these parameters. Raises
    ``CheckpointError``.
    """
    arrays = {f"arg:{name}": np.asarray(value) for name, value in arg_params.items()}
    arrays.update({f"aux:{name}": np.asarray(value) for name, value in (aux_params or {}).items()})
    specs = {name: TensorSpec(value.shape, value.dtype) for name, value in arrays.items()}
    metadata = {_KIND: "1", "epoch": str(epoch), _STATES: "1" if has_states else "0"}
    digest = _digest_of(states_path(prefix, epoch)) if has_states else None
    metadata |= {} if digest is None else {_DIGEST: digest}
    with TensorWriter(params_path(prefix, epoch), specs, metadata) as writer:
        for name, value in arrays.items():
            writer.write(name, 0, value)


def load_model(prefix: Prefix, epoch: int) -> SavedModel:
    """Load the output of ``save_checkpoint``. Raises ``CheckpointError``."""
    path = params_path(prefix, epoch)
    found: dict[str, dict[str, HostArray]] = {"arg": {}, "aux": {}}
    with TensorReader(path) as reader:
        if _KIND not in reader.metadata:
            raise CheckpointError(
                f"{path} is not a saved model; load a file that mx.model.save_checkpoint wrote"
            )
        for name in reader.names:
            kind, _, own = name.partition(":")
            if kind not in found:
                raise CheckpointError(
                    f"{path} is damaged: {name!r} is not a parameter of a model; load an earlier "
                    "checkpoint"
                )
            found[kind][own] = reader.tensor(name)
        has_states = reader.metadata.get(_STATES) == "1"
        digest = reader.metadata.get(_DIGEST)
    return SavedModel(found["arg"], found["aux"], has_states, digest)


def check_states(prefix: Prefix, epoch: int, saved: SavedModel) -> None:
    """Check that the file of states was saved together with these parameters.

    Raises ``CheckpointError``.
    """
    states = states_path(prefix, epoch)
    found = None if saved.digest is None else _digest_of(states)
    if found not in (None, saved.digest):
        raise CheckpointError(
            f"{states} and {params_path(prefix, epoch)} are from different saves: expected "
            f"digest {saved.digest}, got {found}; use two files of one save, or another epoch"
        )


def _digest_of(path: Path) -> str | None:
    """Return a digest of a file's contents; None if the file is missing."""
    if not path.exists():
        return None
    with TensorReader(path) as reader:
        return reader.digest


def load_checkpoint(
    prefix: Prefix, epoch: int
) -> tuple[None, dict[str, HostArray], dict[str, HostArray]]:
    """Return ``(None, arg_params, aux_params)``.

    MXNet returns its symbol instead of None. Raises ``CheckpointError``.
    """
    saved = load_model(prefix, epoch)
    return None, saved.arg_params, saved.aux_params
