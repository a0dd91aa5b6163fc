"""``broadcast_object`` and ``allgather_object``: plain objects, sent without pickle.

An object is None, a bool, a number, a string, bytes, an array, or a list, tuple, set or dict of
these (docs/decisions/0036-objects-without-pickle.md). If an object contains anything else, its rank
sends the text of an error instead, and all ranks raise an error that names the type. An object is
sent as an array of bytes: a byte that tells an object from an error, the length of the tree, the
tree, and the arrays.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from kvstore.errors import ArgumentTypeError, ArgumentValueError
from kvstore.frameworks.horovod import calls, session
from kvstore.frameworks.horovod.session import HorovodInternalError, ProcessSet, global_process_set
from kvstore.protocol.objects import pack_object, unpack_object

_HEADER = struct.Struct("<BQ")
_OBJECT, _REFUSED = 1, 2


def broadcast_object(
    obj: Any = None,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the object of a global rank on all ranks; other ranks' objects are ignored.

    Raises:
        ArgumentTypeError: on the root: the object contains something that cannot be sent.
        HorovodInternalError: the same on other ranks, or the ranks name different roots.
    """
    calls.index_of_root(root_rank, process_set)
    is_root = session.rank() == root_rank
    data, error = _packed(obj) if is_root else (np.empty(0, np.uint8), None)
    found = calls.all_gather(data, name, process_set, "broadcast_object").result()
    if error is not None:
        raise error
    members = session.current().sets[process_set.process_set_id or 0]
    senders = [rank for rank, each in zip(members, found, strict=True) if len(each)]
    if senders != [root_rank]:
        raise HorovodInternalError(
            f"broadcast_object needs one root: this rank names {root_rank}, and ranks {senders} "
            "have sent an object; pass the same root_rank on all ranks"
        )
    return obj if is_root else _unpacked(found[members.index(root_rank)], root_rank)


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Return the objects of all ranks, in the order of ranks.

    Raises:
        ArgumentTypeError: this rank's object contains something that cannot be sent.
        HorovodInternalError: another rank's object does.
    """
    data, error = _packed(obj)
    found = calls.all_gather(data, name, process_set, "allgather_object").result()
    if error is not None:
        raise error
    members = session.current().sets[process_set.process_set_id or 0]
    return [_unpacked(each, rank) for rank, each in zip(members, found, strict=True)]


def _packed(obj: Any) -> tuple[np.ndarray[Any, Any], Exception | None]:
    """Return the bytes of an object; if it cannot be sent, those of an error's text."""
    try:
        tree, arrays = pack_object(obj)
    except (ArgumentTypeError, ArgumentValueError) as error:
        text = str(error).encode("utf-8", "backslashreplace")
        return np.frombuffer(_HEADER.pack(_REFUSED, len(text)) + text, np.uint8), error
    head = np.frombuffer(_HEADER.pack(_OBJECT, len(tree)) + tree, np.uint8)
    return np.concatenate([head, *arrays]), None


def _unpacked(data: np.ndarray[Any, Any], rank: int) -> Any:
    kind, length = _HEADER.unpack(data[: _HEADER.size].tobytes())
    end = _HEADER.size + length
    text = data[_HEADER.size : end].tobytes()
    if kind == _REFUSED:
        raise HorovodInternalError(f"rank {rank} cannot send its object: {text.decode()}")
    return unpack_object(text, data[end:])
