"""``CollectiveAsker``: requests to the servers about collective calls.

Any thread may ask. Read next: ``server_route.py``.
"""

from __future__ import annotations

from pslite.apps.asking import Asker
from pslite.collective.wire import COLLECTIVE_APP, server_of
from pslite.ids import Role, node_id
from pslite.node.postoffice import Postoffice
from pslite.protocol.collective import READY, CallKey, LeadersStep


class CollectiveAsker(Asker):
    """Knows which server has which chunk of a group's calls.

    Args:
        meets: whether all calls begin at one server, which can number them. All ranks must change
            it between the same two calls.
    """

    def __init__(self, node: Postoffice, *, meets: bool) -> None:
        super().__init__(node, COLLECTIVE_APP, ordered=False)
        self.meets = meets

    def server_of(self, key: CallKey, chunk: int, step: LeadersStep | None = None) -> int:
        """Return the node to which all ranks send this chunk."""
        config = self.node.config
        is_first = chunk == 0 and (step is None or step.call == READY)
        if is_first and self.meets:
            key = CallKey(key.group, "", 0)
        rank = server_of(key, chunk, config.num_workers, config.num_servers)
        return int(node_id(Role.SERVER, rank))
