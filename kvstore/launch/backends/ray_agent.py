"""An agent that a Ray task has started: as ``agents/join.py``, with the ticket on standard input.

Nodes that an autoscaler adds share no directory with the launcher, so that the ticket travels as
an argument of the task. The agent lives no longer than the Ray worker that started it. Runs on
its process's main thread. The other end is ``ray_driver.py``.
"""

from __future__ import annotations

import json
import sys

from kvstore.launch.agents.join import NotEnlisted, enlist, fail
from kvstore.launch.agents.ticket import AgentTicket
from kvstore.launch.job.child import die_with_parent


def main() -> None:
    """Read one line of JSON with the parent's process id, the rank and the ticket; serve; end."""
    try:
        parent, rank, text = json.loads(sys.stdin.buffer.readline())
        ticket = AgentTicket.from_text(text)
    except ValueError as error:
        fail(f"the ticket cannot be read: {error}")
    die_with_parent(parent)
    try:
        enlist(ticket, rank)
    except NotEnlisted as error:
        fail(
            f"{error}; launch the job on a machine that the nodes can reach, such as the head "
            "node: ray job submit -- kvstore-launch --launcher ray ..."
        )
