"""``Links``: sends and receives messages exactly once (I/O thread).

A ``Links`` owns one ``Channel`` per peer (``protocol/channel.py``) and turns messages into
frames and back (``wire/codec.py``). It checks the version, the job and the receiver's incarnation
of every transmission, and drops and counts those that are wrong. Bytes from unknown senders never
cause an exception or use up memory. ``message_filter.py`` decides which messages a sender may send.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pslite.errors import ConfigError, ProtocolError, UsageError
from pslite.memory.sharing import Sharing
from pslite.protocol.channel import Channel, Outgoing
from pslite.protocol.send_window import SendWindow
from pslite.van.base import Received, Van
from pslite.wire.base import Message
from pslite.wire.codec import MAX_FRAMES, Envelope, decode, encode
from pslite.wire.messages import Accepted, Beat, Refused, Register, StatusQuestion

#: Payloads smaller than this do not count as in flight: their frames are sent by copy.
_SMALL_BYTES = 4096
#: An acceptance waits at most this long for a message that can carry it, and only while it covers
#: fewer bytes than this. Sending it alone would wake two threads at each end.
TELL_AFTER_S = 0.005
TELL_BYTES = 8 << 20
#: Messages of which only the envelope counts.
_SIGNS = (Accepted, Beat)
#: The most channels to keep to unknown nodes (``know``).
MAX_STRANGERS = 4096
#: The reasons under which dropped messages are counted; peers cannot add others.
MALFORMED = "not a valid message of this protocol"
FROM_LOST = "from a node that was declared lost"
OTHER_JOB = "another job"
OTHER_RECEIVER = "addressed to an earlier process of this name"
OTHER_SENDER = "sent by another process with a known name"
REPEATED = "received before"
_MAX_REMARK = 200

Objection = Callable[[str, Message, Sequence[Any]], "str | None"]
"""A function of (peer, message, frames) that returns why to drop it now, or None."""


class Delivery(NamedTuple):
    """A received message that is not a repetition."""

    peer: str
    incarnation: int
    epoch: int
    message: Message
    frames: Sequence[Any]
    is_lent: bool = False
    """Whether the frames are the sender's own, in this process."""


@dataclass(slots=True, eq=False, repr=False)
class _PeerTraffic:
    channel: Channel
    window: SendWindow
    own: int
    """The incarnation under which this node sends to the peer."""
    incarnation: int = 0
    #: The bytes that passed through the van: with headers and repeats, without shared memory.
    sent_bytes: int = 0
    received_bytes: int = 0
    #: The number of messages that got through in either direction, without repeats.
    progress: int = 0
    #: Payload bytes that this node has accepted but not yet acknowledged to the peer.
    untold_bytes: int = 0


class Links:
    """The channels of one node to all its peers."""

    def __init__(
        self,
        van: Van,
        sharing: Sharing,
        *,
        job: str,
        incarnation: int,
        resend_timeout_s: float,
        credit_bytes: int = 1 << 62,
        trace: Callable[[str, str, Message, Sequence[Any]], None] | None = None,
        objection: Objection | None = None,
    ) -> None:
        self._van = van
        self._job = job
        self.incarnation = incarnation
        self._new_peer: Callable[[int], _PeerTraffic] = lambda own: _PeerTraffic(
            Channel(resend_timeout_s), SendWindow(credit_bytes), own
        )
        #: Early enough that a sender does not wait for credits.
        self._tell_bytes = min(TELL_BYTES, credit_bytes // 8)
        self._trace = trace
        self._objection = objection
        self._sharing = sharing
        self._peers: dict[str, _PeerTraffic] = {}
        #: The unknown peers to which this node sent no message of its own, oldest first.
        self._strangers: dict[str, None] = {}
        self._known: set[str] = set()
        #: Peer -> when to tell it what was accepted; 0.0 until that is decided. A dict keeps the
        #: order of arrival; the order of a set would differ in every process.
        self._tell_at: dict[str, float] = {}
        #: Lost peers, with the answer to what they still send, if there is one.
        self._closed: dict[str, Refused | None] = {}
        self._released: set[str] = set()
        #: Called with the name of a peer under which another process now sends.
        self.on_replaced: Callable[[str], None] | None = None
        #: The number of dropped messages, by reason.
        self.dropped: Counter[str] = Counter()
        #: The error of the last malformed message.
        self.last_malformed = ""

    # -- sending -----------------------------------------------------------------------

    def send(
        self, peer: str, message: Message, frames: Sequence[Any], epoch: int, now: float
    ) -> None:
        """Send a message; keep its frames by reference until the peer has accepted them.

        If the peer is gone, this has no effect. If the message cannot be encoded or sent (a number
        over 64 bits, a frame over the van's limit), this raises an error and has no other effect.
        """
        if peer in self._closed or (peer in self._released and message.RELIABLE):
            return
        entry = self._peers.get(peer) or self._entry(peer)
        if message.RELIABLE:
            self._strangers.pop(peer, None)
            if len(frames) >= MAX_FRAMES:
                raise UsageError(
                    f"a message must have fewer than {MAX_FRAMES} frames, got {len(frames)}"
                )
            nbytes = sum([memoryview(frame).nbytes for frame in frames])
            nbytes = nbytes if nbytes >= _SMALL_BYTES else 0
            outgoing = entry.channel.number(message, frames, nbytes, epoch, now)
            try:
                self._transmit(peer, entry, outgoing)
            except Exception:
                entry.channel.withdraw(outgoing)
                raise
        else:
            self._transmit(peer, entry, Outgoing(0, epoch, message, frames, 0, now))

    def send_unnumbered(self, peer: str, message: Message) -> None:
        """Send a message without a channel, to a peer that is not known."""
        self._send_unnumbered(peer, message, self._job)

    def _send_unnumbered(self, peer: str, message: Message, job: str) -> None:
        envelope = Envelope(job, 0, self.incarnation, 0, 0, 0, (), (), message)
        self._van.send(peer, [encode(envelope)])

    def _transmit(self, peer: str, entry: _PeerTraffic, outgoing: Outgoing) -> None:
        low, also = entry.channel.acceptance
        frames, shared = (
            self._sharing.describe(peer, outgoing.frames) if outgoing.frames else ((), ())
        )
        envelope = Envelope(
            self._job,
            outgoing.epoch,
            entry.own,
            entry.incarnation,
            outgoing.sequence,
            low,
            also,
            shared,
            outgoing.message,
        )
        header = encode(envelope)
        self._van.send(peer, [header, *frames])
        entry.sent_bytes += len(header) + sum([memoryview(frame).nbytes for frame in frames])
        outgoing.position = entry.sent_bytes
        if self._tell_at.pop(peer, None) is not None:
            entry.untold_bytes = 0
        if self._trace is not None:
            self._trace("=>", peer, outgoing.message, outgoing.frames)

    def progress(self, peer: str) -> int:
        """Return how many messages got through to a peer or from it."""
        entry = self._peers.get(peer)
        return 0 if entry is None else entry.progress

    def unaccepted_bytes(self, peer: str) -> int:
        """Return the payload bytes in flight to a peer."""
        entry = self._peers.get(peer)
        return 0 if entry is None else entry.channel.unaccepted_bytes

    def has_room(self, peer: str, now: float) -> bool:
        """Return whether another large message to a peer may be sent now.

        If not, ask again every ``LOOK_S``. A peer that reads memory of this node needs no
        connection for the values.
        """
        entry = self._peers.get(peer)
        if entry is None:
            return True
        if entry.channel.unaccepted_bytes >= entry.window.most_bytes:
            return False
        if self._sharing.reaches(peer):
            return True
        queued, unaccepted = self._van.in_transit(peer).queued, entry.channel.unaccepted_bytes
        if queued is None:
            return unaccepted < entry.window.nbytes
        # What is accepted does not wait, whatever the counters say.
        return entry.window.has_room(min(queued, unaccepted), entry.sent_bytes, now)

    def byte_counts(self) -> dict[str, tuple[int, int]]:
        """Return the bytes (sent to, received from) each peer. From any thread.

        Headers and repeats count; bytes in shared memory do not. Lost peers are not included.
        """
        entries = list(self._peers.items())
        return {peer: (entry.sent_bytes, entry.received_bytes) for peer, entry in entries}

    def everything_accepted(self, peers: Sequence[str] | None = None) -> bool:
        """Return whether these peers (None: all) have accepted all messages."""
        entries = self._peers.values() if peers is None else self._entries(peers)
        return all(entry.channel.everything_accepted for entry in entries)

    def unaccepted(self) -> dict[str, tuple[int, int]]:
        """Return (messages, bytes of large ones) that each peer has not accepted yet."""
        return {
            peer: (entry.channel.num_unaccepted, entry.channel.unaccepted_bytes)
            for peer, entry in self._peers.items()
            if not entry.channel.everything_accepted
        }

    def _entries(self, peers: Sequence[str]) -> Iterator[_PeerTraffic]:
        return (self._peers[peer] for peer in peers if peer in self._peers)

    # -- receiving ---------------------------------------------------------------------

    def receive(self, event: Received, now: float) -> Delivery | None:
        """Return the message in a transmission if it is new and for this node; else None."""
        if event.peer in self._closed:
            self._drop_from_lost(event.peer)
            return None
        try:
            envelope = decode(event.frames)
        except ProtocolError as error:
            self._note_malformed(error)
            return None
        message = envelope.message
        if envelope.job != self._job and not _is_for_any_job(envelope):
            self._refuse_job(event.peer, envelope.job)
            return None
        entry = self._peers.get(event.peer)
        own = self.incarnation if entry is None else entry.own
        # On a channel that was begun anew, a number counts only if the peer knows the channel.
        is_stray = own != self.incarnation and envelope.sequence and not envelope.receiver
        if envelope.receiver not in (0, own) or is_stray:
            self._drop_misaddressed(event.peer, is_known=entry is not None)
            return None
        if type(message) is Refused and envelope.sequence == 0:
            # This may come from another job, which does not tell its id: do not make a channel.
            return Delivery(event.peer, envelope.sender, 0, message, ())
        if self._objection is not None:
            # Check before acceptance: a message that is only too early is sent again.
            reason = self._objection(event.peer, message, event.frames)
            if reason is not None:
                self.dropped[reason] += 1
                return None
        if entry is None:
            if type(message) is StatusQuestion:
                # From an observer, which gets an answer without a channel.
                return Delivery(event.peer, envelope.sender, 0, message, ())
            entry = self._new_stranger(event.peer)
        if 0 < entry.incarnation < envelope.sender and type(message) is Register:
            entry = self._begin_anew(event.peer, entry.own)  # the node has begun anew, too
        return self._take_in(event, envelope, entry, now)

    def _take_in(
        self, event: Received, envelope: Envelope, entry: _PeerTraffic, now: float
    ) -> Delivery | None:
        """Return a message if it is new on the channel of its sender."""
        if entry.incarnation == 0:
            entry.incarnation = envelope.sender
        elif entry.incarnation != envelope.sender:
            self.dropped[OTHER_SENDER] += 1
            if self.on_replaced is not None:
                self.on_replaced(event.peer)
            return None
        entry.received_bytes += sum(map(len, event.frames))
        frames: Sequence[Any] = event.frames[1:]
        if envelope.shared:
            try:
                frames = self._sharing.resolve(event.peer, envelope.shared, frames)
            except ProtocolError as error:
                self._note_malformed(error)
                return None
        if self._trace is not None:
            self._trace("<=", event.peer, envelope.message, frames)
        channel = entry.channel
        entry.progress += channel.accepted(envelope.accepted, envelope.accepted_also)
        if envelope.sequence:
            fresh = channel.admit(envelope.sequence)
            self._tell_at.setdefault(event.peer, 0.0)
            entry.untold_bytes += sum(map(len, frames))
            if not fresh:
                self.dropped[REPEATED] += 1
                return None
            entry.progress += 1
        if type(envelope.message) in _SIGNS:
            return None
        return Delivery(event.peer, envelope.sender, envelope.epoch, envelope.message, frames)

    def _drop_from_lost(self, peer: str) -> None:
        self.dropped[FROM_LOST] += 1
        refusal = self._closed[peer]
        if refusal is not None:
            self.send_unnumbered(peer, refusal)

    def _drop_misaddressed(self, peer: str, *, is_known: bool) -> None:
        if not is_known:  # the sender knows an earlier process of this name: let it know
            self.send_unnumbered(peer, Beat())
        self.dropped[OTHER_RECEIVER] += 1

    def _note_malformed(self, error: ProtocolError) -> None:
        self.last_malformed = str(error)[:_MAX_REMARK]
        self.dropped[MALFORMED] += 1

    def _refuse_job(self, peer: str, theirs: str) -> None:
        """Refuse a message of another job, without revealing this job's id."""
        self.dropped[OTHER_JOB] += 1
        refusal = Refused(
            ConfigError.__name__,
            f"this node does not belong to the job {theirs[:_MAX_REMARK]!r} of the message: two "
            "jobs use the same address; give each job its own port",
        )
        self._send_unnumbered(peer, refusal, "")

    def know(self, peer: str) -> None:
        """Keep the channel of this peer from now on: it is a node of the job."""
        self._known.add(peer)
        self._strangers.pop(peer, None)

    def _entry(self, peer: str) -> _PeerTraffic:
        entry = self._peers.get(peer)
        if entry is None:
            entry = self._begin_anew(peer, self.incarnation)
        return entry

    def _begin_anew(self, peer: str, own: int) -> _PeerTraffic:
        entry = self._peers[peer] = self._new_peer(own)
        return entry

    def reopen(self, peer: str) -> None:
        """Begin anew with a peer: another process may have its name.

        What the peer has not accepted is dropped. It drops what it gets of the earlier channel when
        it has got a ``Register`` of the new one.
        """
        entry = self._peers.get(peer)
        self._begin_anew(peer, (self.incarnation if entry is None else entry.own) + 1)
        self._tell_at.pop(peer, None)

    def _new_stranger(self, peer: str) -> _PeerTraffic:
        """Make a channel for a peer; drop the oldest unknown one if there are too many."""
        if peer not in self._known:
            if len(self._strangers) >= MAX_STRANGERS:
                oldest = next(iter(self._strangers))
                del self._strangers[oldest]
                self._peers.pop(oldest, None)
                self._tell_at.pop(oldest, None)
            self._strangers[peer] = None
        return self._entry(peer)

    # -- time --------------------------------------------------------------------------

    def flush(self, epoch: int, now: float, *, at_once: bool = False) -> float:
        """Send what is due: acceptances in messages of their own, and messages once more.

        The latter should have been accepted by now. With ``at_once`` send all acceptances, and
        nothing else. Returns when to call this again.

        Every message carries acceptances, and often an answer follows soon. So an acceptance waits
        for that answer, but only for a short time and a few bytes, because it frees the sender's
        credits.
        """
        soonest = math.inf
        for peer, due_at in list(self._tell_at.items()):
            if at_once or now >= due_at > 0.0 or self._peers[peer].untold_bytes >= self._tell_bytes:
                self.send(peer, Accepted(), (), epoch, now)
                continue
            if due_at == 0.0:
                due_at = self._tell_at[peer] = now + TELL_AFTER_S
            soonest = min(soonest, due_at)
        for peer, entry in self._peers.items():
            if entry.channel.next_due < soonest:
                if now >= entry.channel.next_due and not at_once:
                    self._repeat(peer, entry, now, at_once=False)
                soonest = min(soonest, entry.channel.next_due)
        return soonest

    def tell_at_once(self, peer: str) -> None:
        """Let the next flush send an acceptance that is due: the peer wants its memory."""
        if peer in self._tell_at:
            self._peers[peer].untold_bytes = self._tell_bytes

    def reconnected(self, peer: str, now: float) -> None:
        """Send messages in flight again: the connection is back, and they may be lost."""
        entry = self._peers.get(peer)
        if entry is not None:
            self._repeat(peer, entry, now, at_once=True)

    def send_again(self, peer: str, now: float) -> None:
        """Send all messages in flight again: the peer has begun a new channel."""
        entry = self._peers.get(peer)
        if entry is not None:
            for outgoing in entry.channel.repeats(now, at_once=True):
                self._transmit(peer, entry, outgoing)

    def _repeat(self, peer: str, entry: _PeerTraffic, now: float, *, at_once: bool) -> None:
        passed = entry.sent_bytes - self._van.in_transit(peer).nbytes
        for outgoing in entry.channel.repeats(now, at_once=at_once, passed=passed):
            self._transmit(peer, entry, outgoing)

    def release(self, peer: str) -> None:
        """Drop messages in flight to a peer that said goodbye; still receive from it."""
        self._released.add(peer)
        entry = self._peers.get(peer)
        if entry is not None:
            entry.channel.drop_outgoing()

    def shut(self, peer: str) -> None:
        """Drop messages in flight to a lost peer, and all later messages from it."""
        self._closed.setdefault(peer)
        self._peers.pop(peer, None)
        self._strangers.pop(peer, None)
        self._tell_at.pop(peer, None)
        self._sharing.forget(peer)

    def turn_out(self, peer: str, refusal: Refused) -> None:
        """Do what ``shut`` does, and answer further messages with ``refusal``."""
        self.shut(peer)
        self._closed[peer] = refusal


def _is_for_any_job(envelope: Envelope) -> bool:
    """Return whether this is a refusal, or an observer's question without a job id."""
    kind = type(envelope.message)
    return kind is Refused or (kind is StatusQuestion and not envelope.job)
