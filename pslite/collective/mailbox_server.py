"""The server's side of ``send`` and ``recv``: keeps letters until requested.

Runs on the I/O thread. A letter in its sender's memory is copied before the sender is told that it
is kept. Read next: ``mailbox.py``, the worker's side.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pslite.collective.kept_frames import kept
from pslite.collective.wire import (
    MAILBOX_APP,
    RECEIVE,
    SEND,
    LetterHead,
    pack_letter,
    unpack_letter,
)
from pslite.errors import ProtocolError
from pslite.ids import Role, rank_of, role_of
from pslite.node.customer import Incoming
from pslite.node.postoffice import Postoffice
from pslite.protocol.mailbox import Deliver, Keep, Mailboxes, MailEffect


class _Mail:
    """A letter that has arrived."""

    def __init__(self, incoming: Incoming, head: LetterHead) -> None:
        self.incoming = incoming
        self.head = head
        self.frames = incoming.frames
        self.is_lent = incoming.is_lent


class MailboxServer:
    """Keeps the letters of some workers, until the job ends. On a server's I/O thread."""

    def __init__(self, node: Postoffice) -> None:
        self._node = node
        self._boxes: Mailboxes[_Mail, Incoming] = Mailboxes()
        node.customers.add(MAILBOX_APP, self._arrived, waits_for_others=True)

    def depart(self, rank: int, error: BaseException) -> None:
        """Return letters and requests that need a gone worker."""
        self._carry_out(self._boxes.depart(rank, error))

    def _arrived(self, incoming: Incoming) -> None:
        head = unpack_letter(incoming.body, self._node.config.num_workers)
        address, sender = head.address, rank_of(incoming.sender)
        own = address.source if incoming.head == SEND else address.to
        if role_of(incoming.sender) is not Role.WORKER or own != sender:
            raise ProtocolError(f"node {incoming.sender} sends or receives for worker {own}")
        if incoming.head == SEND:
            mail = _Mail(incoming, head)
            self._carry_out(self._boxes.send(address, incoming.nbytes, mail))
        elif incoming.head == RECEIVE:
            self._carry_out(self._boxes.receive(address, incoming))
        else:
            raise ProtocolError(f"unknown request {incoming.head} of mailboxes")

    def _carry_out(self, effects: Iterable[MailEffect[_Mail, Incoming]]) -> None:
        for effect in list(effects):
            if isinstance(effect, Keep):
                letter = effect.letter
                letter.frames, letter.is_lent = self._kept(letter), False
                letter.incoming.respond()
            elif isinstance(effect, Deliver):
                self._deliver(effect)
            else:
                incoming: Any = effect.what
                (incoming.incoming if isinstance(incoming, _Mail) else incoming).fail(effect.error)

    def _deliver(self, effect: Deliver[_Mail, Incoming]) -> None:
        mail = effect.letter
        body = pack_letter(mail.head, self._node.config.num_workers)
        effect.request.respond(body, self._kept(mail))
        mail.incoming.respond()  # unless that was done when it was kept

    def _kept(self, mail: _Mail) -> list[Any]:
        return kept(self._node, mail.frames, is_lent=mail.is_lent)
