"""What a message is sent from: the arrays' own memory as it lies, or a copy of it.

Nothing is copied where the other side can read the memory itself, or where TCP takes it from one
place; small values that lie apart are gathered, since a frame for each costs more than the copy.
Any thread may ask; nothing is kept. Used by ``exchange.py``, and ``joined.py`` for calls that go
out together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from kvstore.operation import overlaps
from kvstore.plan import Bytes, Group, gather, views
from pslite import Postoffice

Frames = Sequence[memoryview] | Callable[[], Sequence[memoryview]]
"""Those of one message, or what makes them."""

#: Smaller frames travel as bytes anyway (``pslite/memory/sharing.py``).
_LEAST_SHARED_BYTES = 1024
#: Values that lie apart are sent as they lie when their frames are so large, else gathered.
_LEAST_FRAME_BYTES = 65_536


def frames_of(
    node: Postoffice,
    groups: Sequence[Group],
    sources: Sequence[Bytes],
    targets: Sequence[Bytes] | None,
    nbytes: int,
) -> list[Frames]:
    """What each group sends of a call's ``sources``, which stay as they are until its end.

    They are ``nbytes`` in all; of much, copies are made later: the server begins with the first
    messages meanwhile. ``targets`` may be filled while some groups are still to be sent.
    """
    found: list[Frames | None] = [as_they_lie(node, group, sources) for group in groups]
    if nbytes > node.config.chunk_bytes:
        for index, group in enumerate(groups):
            if found[index] is None and node.nearby.may_share_with(group.server):
                found[index] = partial(copied, node, group, sources)
    if targets is not None:  # values may land while others are still to be sent
        pairs = zip(groups, found, strict=True)
        late = {part.position for group, own in pairs if own for part in group.slices}
        if late and overlaps(sources, targets, late):
            found = [None] * len(groups)
    return [own or copied(node, group, sources) for group, own in zip(groups, found, strict=True)]


def as_they_lie(
    node: Postoffice, group: Group, memories: Sequence[Bytes]
) -> list[memoryview] | None:
    """A group as it lies in these arrays; None where a copy of it travels faster.

    A list, unlike frames that are our own: ``Operation.let_go`` may replace what is in it.
    Small parts that lie apart are gathered. To a server of this machine a copy in shared
    memory is quicker than what TCP does.
    """
    pushed = group.to_push
    if pushed.nbytes >= _LEAST_SHARED_BYTES and node.nearby.may_share_with(group.server):
        rows = node.shared_rows(views(pushed, memories))
        if rows is None or len(rows) * _LEAST_FRAME_BYTES > pushed.nbytes + _LEAST_FRAME_BYTES:
            return None
        return [row.data for row in rows]
    first, last = pushed.slices[0], pushed.slices[-1]
    if first.position != last.position or last.stop - first.start != pushed.nbytes:
        return None
    return [memories[first.position][first.start : last.stop].data]


def copied(node: Postoffice, group: Group, memories: Sequence[Bytes]) -> tuple[memoryview, ...]:
    """A copy of a group, in one frame: these arrays may change at once."""
    staging = node.buffer(group.to_push.nbytes)
    gather(group.to_push, memories, staging)
    return (staging.data,)
