"""Which messages calls that were joined become, and which calls a message ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvstore.arrays.keys import Key, KeySpec
from kvstore.protocol.requests import KeyEntry
from kvstore.stores.dist.batching import Load, Shape, loads_of, shape_of, transfers_of
from kvstore.stores.dist.in_flight import Operation
from kvstore.stores.dist.plan import Bucket, Group
from kvstore.stores.dist.plan import plan as plan_of
from pslite.plane import Transfer

CHUNK_BYTES = 64
FLOAT = np.dtype(np.float32)
ENTRIES: dict[Key, KeyEntry] = {
    "a": KeyEntry("a", KeySpec((8,), FLOAT), 1, CHUNK_BYTES, (0,)),
    "b": KeyEntry("b", KeySpec((4,), FLOAT), 2, CHUNK_BYTES, (0,)),
    "elsewhere": KeyEntry("elsewhere", KeySpec((8,), FLOAT), 3, CHUNK_BYTES, (1,)),
}


def plan(keys: Sequence[Key]) -> list[Group]:
    return plan_of([ENTRIES[key] for key in keys], 1 << 20)


def shape(*keys: str, push: bool = False, pull: bool = False, priority: int = 0) -> Shape:
    return keys, push, pull, priority


def loads(*shapes: Shape) -> list[Load]:
    return loads_of(shapes, ENTRIES, plan)


def messages(calls: Sequence[Operation], staging: np.ndarray[Any, Any]) -> list[Transfer]:
    node: Any = None  # nothing is asked of it where values have been staged
    return transfers_of(node, loads(*map(shape_of, calls)), calls, staging)


def pushed(*keys: str) -> Operation:
    specs = [ENTRIES[key].spec for key in keys]
    return Operation(Bucket(keys, specs), [np.zeros(spec.nbytes, np.uint8) for spec in specs])


def test_values_that_were_staged_one_behind_another_travel_as_they_lie() -> None:
    (load,) = loads(shape("a", push=True), shape("b", push=True))
    assert load.group.parts == (1, 2)
    assert load.lying == (0, 48)


def test_values_with_another_servers_in_between_do_not_lie_in_a_row() -> None:
    own, other = loads(*(shape(key, push=True) for key in ("a", "elsewhere", "b")))
    assert (own.group.parts, own.lying) == ((1, 2), None)
    assert (other.group.parts, other.lying) == ((3,), (32, 64))


def test_a_message_has_the_highest_priority_of_its_calls() -> None:
    (load,) = loads(shape("a", push=True, priority=-2), shape("b", push=True, priority=5))
    assert load.priority == 5


def test_a_message_names_a_call_once_however_many_of_its_keys_it_carries() -> None:
    (load,) = loads(shape("a", "b", push=True), shape("a", "b", pull=True))
    assert (load.calls, load.each) == (((0, 1), (0, 1)), (0, 1))


def test_a_call_ends_with_the_last_of_its_messages() -> None:
    call = pushed("a", "elsewhere")
    first, second = messages([call], np.zeros(64, np.uint8))
    first.done(None)
    assert not call.done()
    second.done(None)
    assert call.error() is None


def test_a_part_that_came_to_nothing_is_an_error_of_its_own_calls_alone() -> None:
    calls = [pushed("a"), pushed("b")]
    (message,) = messages(calls, np.zeros(48, np.uint8))
    gone = ValueError("gone")
    message.failed = {1: gone}
    message.done(gone)
    assert [call.error() for call in calls] == [None, gone]
