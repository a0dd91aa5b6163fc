"""The server's side of collective calls: computes rounds and answers ranks.

Requests arrive on the I/O thread and wait there for those of the other ranks (``CallMatcher``).
Small rounds are computed there, others on the pool. The ranks' values are read in place, which may
be in the workers' memory, and are not kept after the answer. Read next: ``communicator.py``, the
worker's side.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from pslite.apps.asking import log_failure, new_array
from pslite.collective.arrays import IN_PLACE_BYTES
from pslite.collective.kept_frames import kept
from pslite.collective.mailbox_server import MailboxServer
from pslite.collective.sums import DTYPES, AddUp, Array, reduce_in_order
from pslite.collective.wire import (
    CALL,
    COLLECTIVE_APP,
    GIVE_UP,
    JOIN,
    WAIT,
    ArrayLayout,
    pack_layouts,
    pack_number,
    pack_ranks,
    unpack_call,
    unpack_give_up,
    unpack_join,
    unpack_wait,
)
from pslite.errors import ProtocolError, UsageError, rebuild
from pslite.future import Future
from pslite.ids import Role, rank_of, role_of
from pslite.node.customer import Incoming
from pslite.node.postoffice import Postoffice
from pslite.protocol.collective import (
    AllJoined,
    AllReady,
    CallEffect,
    CallMatcher,
    CollectiveCall,
    Compute,
)

#: Rounds of at most this many bytes stay on the I/O thread: handing them over takes longer.
_QUICK_BYTES = 1 << 18

Frames = Sequence[Any]


class _Message(NamedTuple):
    """One rank's part of a round."""

    incoming: Incoming
    layout: ArrayLayout | None


_Round = Compute[_Message]


class CollectiveServer:
    """Serves the collective calls of a job's workers, on a server's I/O thread.

    Args:
        node: a node with the role of a server, running or being prepared.
        add_up: adds up the ranks' values if it can, on any thread of the pool.
    """

    def __init__(self, node: Postoffice, add_up: AddUp = lambda *_: False) -> None:
        if node.role is not Role.SERVER:
            raise UsageError(
                f"a CollectiveServer needs the node of a server, got that of a {node.role.value}"
            )
        self._node = node
        self._add_up = add_up
        self._matcher: CallMatcher[_Message] = CallMatcher()
        self._known_gone: set[int] = set()
        #: The arrays of ranks in this process that hold answers to other ranks. A dict by ``id``:
        #: references to arrays cannot be hashed.
        self._lent: dict[int, weakref.ref[Array]] = {}
        #: Completes once this app accepts requests; fails if its number is in use.
        self.registered: Future[None] = node.io_queue.perform(self._register)
        log_failure(node, self.registered)

    def _register(self) -> None:
        self._node.customers.add(COLLECTIVE_APP, self._arrived, waits_for_others=True)
        self._mailboxes = MailboxServer(self._node)
        self._node.watch.on_departure.append(self._departed)
        self._departed()

    def _arrived(self, incoming: Incoming) -> None:
        if role_of(incoming.sender) is not Role.WORKER:
            raise UsageError("only workers make collective calls")
        num_workers = self._node.config.num_workers
        if incoming.head == CALL:
            key, call, chunk, layout, step = unpack_call(incoming.body, num_workers)
            message = _Message(incoming, layout)
            rank = rank_of(incoming.sender)
            self._carry_out(self._matcher.arrive(key, rank, call, chunk, message, step))
        elif incoming.head == GIVE_UP:
            key, kind, text = unpack_give_up(incoming.body, num_workers)
            if rank_of(incoming.sender) in key.group.ranks:
                self._carry_out(self._matcher.give_up(key, rebuild(kind, text)))
            incoming.respond()
        elif incoming.head == JOIN:
            group, absence = unpack_join(incoming.body, num_workers)
            rank = rank_of(incoming.sender)
            self._carry_out(self._matcher.join(group, rank, absence, _Message(incoming, None)))
        elif incoming.head == WAIT:
            key, counts_waits = unpack_wait(incoming.body, num_workers)
            rank = rank_of(incoming.sender)
            missing = self._matcher.missing(key, rank, counts_waits=counts_waits)
            incoming.respond(pack_ranks(missing))
        else:
            raise ProtocolError(f"unknown request {incoming.head} of collective calls")

    def _departed(self) -> None:
        """End the calls that wait for gone workers."""
        gone = self._node.membership.gone
        for node in [node for node in gone if node not in self._known_gone]:
            self._known_gone.add(node)
            if role_of(node) is Role.WORKER:
                self._carry_out(self._matcher.depart(rank_of(node), gone[node].error))
                self._mailboxes.depart(rank_of(node), gone[node].error)

    def _carry_out(self, effects: Sequence[CallEffect[_Message]]) -> None:
        for effect in effects:
            if isinstance(effect, Compute):
                self._compute(effect)
            elif isinstance(effect, AllJoined):
                for message in effect.messages:
                    message.incoming.respond(pack_number(effect.last))
            elif isinstance(effect, AllReady):
                for message in effect.messages:
                    message.incoming.respond(pack_number(effect.number))
            else:
                for message in effect.messages:
                    message.incoming.fail(effect.error)

    def _compute(self, round_: _Round) -> None:
        nbytes = sum(message.incoming.nbytes for message in round_.messages)
        lane = round_.messages[0].incoming.request.request_id
        if nbytes <= _QUICK_BYTES and self._node.pool.is_idle(lane):
            self._answer(round_)
        else:
            self._node.pool.submit(lane, lambda: self._answer(round_))

    def _answer(self, round_: _Round) -> None:
        """Compute a round and answer it, on any thread."""
        try:
            frames = [message.incoming.frames for message in round_.messages]
            _check_counts(round_.call, frames)
            answers = _SHARES[round_.call.kind](self, round_, frames)
            layouts = [message.layout for message in round_.messages if message.layout is not None]
            body = pack_layouts(layouts) if layouts else b""
        except BaseException as error:  # otherwise the ranks would wait for ever
            for message in round_.messages:
                message.incoming.fail(error)
            return
        # Only now, because an answer frees the memory that holds the request's values.
        for message, asked, answer in zip(round_.messages, frames, answers, strict=True):
            if answer is asked:  # its memory holds the others' answers
                others = next(each for each in answers if each is not asked)
                self._respond_when_free(message.incoming, body, asked, others[0].obj)
            else:
                message.incoming.respond(body, answer)

    def _respond_when_free(
        self, incoming: Incoming, body: bytes, frames: Frames, memory: Array
    ) -> None:
        """Answer a rank that has lent ``memory`` once nothing refers to it any more.

        Channel and van drop an answer when it is accepted, or when its receiver is lost.
        """

        def respond(reference: weakref.ref[Array]) -> None:
            del self._lent[id(reference)]
            incoming.respond(body, frames)

        reference = weakref.ref(memory, respond)
        self._lent[id(reference)] = reference

    # -- what each rank gets -------------------------------------------------------------

    def _all_reduce(self, round_: _Round, frames: Sequence[Frames]) -> list[Frames]:
        owner = self._owner(round_, frames)
        answer = [self._reduced(round_, frames, 0, owner)]
        return [asked if rank == owner else answer for rank, asked in enumerate(frames)]

    def _reduce(self, round_: _Round, frames: Sequence[Frames]) -> list[Frames]:
        return _for_root(round_.call, [self._reduced(round_, frames, 0)], len(frames))

    def _reduce_scatter(self, round_: _Round, frames: Sequence[Frames]) -> list[Frames]:
        return [[self._reduced(round_, frames, rank)] for rank in range(len(frames))]

    def _broadcast(self, round_: _Round, frames: Sequence[Frames]) -> list[Frames]:
        sent = self._kept(round_, round_.call.root, frames)
        return [[] if rank == round_.call.root else sent for rank in range(len(frames))]

    def _barrier(self, round_: _Round, frames: Sequence[Frames]) -> list[Frames]:
        return [[]] * len(frames)

    def _all_gather(self, round_: _Round, frames: Sequence[Frames]) -> list[Frames]:
        size = len(frames)
        found = [frame for rank in range(size) for frame in self._kept(round_, rank, frames)]
        return [found] * size

    def _gather(self, round_: _Round, frames: Sequence[Frames]) -> list[Frames]:
        return _for_root(round_.call, self._all_gather(round_, frames)[0], len(frames))

    def _scatter(self, round_: _Round, frames: Sequence[Frames]) -> list[Frames]:
        return [[frame] for frame in self._kept(round_, round_.call.root, frames)]

    def _all_to_all(self, round_: _Round, frames: Sequence[Frames]) -> list[Frames]:
        sent = [self._kept(round_, rank, frames) for rank in range(len(frames))]
        return [[each[rank] for each in sent] for rank in range(len(frames))]

    def _kept(self, round_: _Round, rank: int, frames: Sequence[Frames]) -> Frames:
        """Return one rank's arrays in memory that lasts after the answer."""
        is_lent = round_.messages[rank].incoming.is_lent
        return kept(self._node, frames[rank], is_lent=is_lent)

    def _owner(self, round_: _Round, frames: Sequence[Frames]) -> int | None:
        """Return the index of the rank whose array takes an all_reduce's sum, if any.

        A rank in this process allows that by a frame that is not read-only (``server_route.py``).
        The arrays of a third rank and later ones are read after a block of the sum is written.
        """
        incoming = [message.incoming for message in round_.messages]
        receivers = [each.sender for each in incoming if not each.is_lent]
        if not receivers or any(map(self._node.nearby.may_share_with, receivers)):
            return None  # peers here read the answer in this node's own memory
        for rank, each in enumerate(incoming[:2]):
            frame = frames[rank][0]
            if each.is_lent and not frame.readonly and frame.nbytes >= IN_PLACE_BYTES:
                return rank
        return None

    def _reduced(
        self, round_: _Round, frames: Sequence[Frames], index: int, owner: int | None = None
    ) -> memoryview:
        """Return the ``index``-th arrays of all ranks combined, where peers can read them."""
        call = round_.call
        dtype = DTYPES[call.dtype]
        sizes = sorted({len(each[index]) for each in frames})
        if len(sizes) > 1 or sizes[0] % dtype.itemsize:
            raise ProtocolError(
                f"{call.text}: all ranks must send the same number of whole {call.dtype} elements, "
                f"got {sizes} bytes"
            )
        arrays = [np.frombuffer(each[index], dtype) for each in frames]
        if owner is None:
            out: Array = new_array(self._node, sizes[0] // dtype.itemsize, dtype)
        else:
            out = arrays[owner]
        is_sum = call.op == "sum" and len(arrays) > 1
        if not (is_sum and self._add_up(call.dtype, arrays, out)):
            size = len(round_.key.group.ranks)
            reduce_in_order(call.op, call.dtype, call.factor, arrays, out, size)
        return out.view(np.uint8).data


def _check_counts(call: CollectiveCall, frames: Sequence[Frames]) -> None:
    """Raise an error if a rank has sent too many or too few arrays to a round."""
    size = len(frames)
    for rank, each in enumerate(frames):
        is_root = rank == call.root
        special = {
            "barrier": 0,
            "broadcast": 1 if is_root else 0,
            "scatter": size if is_root else 0,
            "reduce_scatter": size,
            "all_to_all": size,
        }
        expected = special.get(call.kind, 1)
        if len(each) != expected:
            raise ProtocolError(
                f"rank {rank} sent {len(each)} arrays to {call.text}, expected {expected}"
            )


def _for_root(call: CollectiveCall, frames: Frames, size: int) -> list[Frames]:
    return [frames if rank == call.root else [] for rank in range(size)]


_Share = Callable[[CollectiveServer, _Round, Sequence[Frames]], list[Frames]]
_SHARES: dict[str, _Share] = {
    "all_reduce": CollectiveServer._all_reduce,
    "reduce": CollectiveServer._reduce,
    "reduce_scatter": CollectiveServer._reduce_scatter,
    "broadcast": CollectiveServer._broadcast,
    "barrier": CollectiveServer._barrier,
    "all_gather": CollectiveServer._all_gather,
    "gather": CollectiveServer._gather,
    "scatter": CollectiveServer._scatter,
    "all_to_all": CollectiveServer._all_to_all,
}
