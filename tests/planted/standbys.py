"""Bugs of standbys, which repeat what their servers do and take their places."""

from __future__ import annotations

from tests.planted.bug import Bug

LAUNCHER = "tests/unit/kvstore/launch/job/test_launch_next_standbys.py"
FILE = "tests/faults/test_standbys.py"
AT = f"{FILE}::test_a_server_or_its_standby_may_be_killed_before_any_step_of_the_simulation"
SYNC, ASYNC = f"{AT}[server-sync-0]", f"{AT}[server-async-0]"
CALLS = f"{FILE}::test_no_optimizer_dtype_or_call_makes_a_difference"
SEEDS = "tests/faults/test_returning.py::test_several_may_be_killed_whatever_the_network_does"
AGAIN = "tests/unit/pslite/node/test_seating_again.py"
RULES = "tests/unit/pslite/protocol/test_replication.py"

BUGS = [
    Bug(
        "the last array of a state is not copied to a new standby",
        "kvstore/server/dense.py",
        "arrays = [*enumerate(states), (-1, previous)]",
        "arrays = [*enumerate(states[:-1]), (-1, previous)]",
        f"{FILE}::test_a_server_that_was_filled_itself_fills_the_next_standby_with_all_it_has",
    ),
    Bug(
        "a server that loses its standby goes on alone at once",
        "pslite/node/member.py",
        "            office.send(SCHEDULER_ID, StandsBy((), True, self._standby_number))\n",
        "            office.send(SCHEDULER_ID, StandsBy((), True, self._standby_number))\n"
        "            primary.go_on_alone()\n",
        f"{FILE}::test_a_server_that_loses_its_standby_answers_nothing_before_the_scheduler_says_so",
    ),
    Bug(
        "a server that was filled itself copies no values before the last round",
        "kvstore/server/dense.py",
        "        arena.changes += 1\n        array.view(np.uint8)[:]",
        "        array.view(np.uint8)[:]",
        f"{FILE}::test_a_server_that_was_filled_itself_fills_the_next_standby_with_all_it_has",
    ),
    Bug(
        "a server answers before its standby has the record",
        "pslite/node/primary.py",
        "        waits = not self._filled_at or self._journal.is_crowded\n",
        "        waits = False\n",
        f"{FILE}::test_a_worker_gets_no_answer_before_the_standby_has_the_record",
    ),
    Bug(
        "a standby takes its seat before it has done what its records say",
        "pslite/node/standby.py",
        "        self._turns.when_idle(then)\n",
        "        then()\n",
        f"{FILE}::test_a_standby_that_is_behind_does_first_what_its_records_say",
    ),
    Bug(
        "a record after a missing one is done",
        "pslite/protocol/replication.py",
        "        while self.stored + 1 in self._early:\n            self.stored += 1\n",
        "        while self._early:\n            self.stored = min(self._early)\n",
        f"{FILE}::test_a_server_or_its_standby_may_be_lost_whatever_the_network_does",
    ),
    Bug(
        "a server applies only the first of the contributions",
        "kvstore/server/part_table.py",
        "            stretch.add_up(batch.payloads, total)\n",
        "            stretch.add_up(batch.payloads[:1], total)\n",
        SYNC,
    ),
    Bug(
        "the sum for a standby has another order of ranks",
        "kvstore/server/part_table.py",
        "contributions = [bytes_of(piece).view(dtype) for piece in pieces]\n",
        "contributions = [bytes_of(piece).view(dtype) for piece in pieces[::-1]]\n",
        f"{FILE}::test_the_sum_for_the_standby_has_the_order_of_ranks",
    ),
    Bug(
        "a sum of 16-bit contributions is rounded for the standby",
        "kvstore/server/part_table.py",
        "    return stretch.parts[0].rule.chain is None and accumulation_dtype(dtype) == dtype\n",
        "    return stretch.parts[0].rule.chain is None and bool(dtype)\n",
        CALLS,
    ),
    Bug(
        "a standby takes rows for plain values",
        "pslite/node/primary.py",
        "form, piece = (0, payload) if type(payload) is Piece else payload.source\n",
        "form, piece = 0, payload if type(payload) is Piece else payload.source[1]\n",
        f"{FILE}::test_a_server_with_rows_may_be_killed_at_some_instants",
    ),
    Bug(
        "a standby carries requests out beside rounds",
        "pslite/node/primary.py",
        "                is_alone,\n                incoming.sender,\n",
        "                False,\n                incoming.sender,\n",
        f"{FILE}::test_a_call_is_alone_on_the_standby_too",
    ),
    Bug(
        "a server carries requests out beside rounds",
        "pslite/node/primary.py",
        "            self._turns.add(begin, alone=True)\n",
        "            self._turns.add(begin)\n",
        f"{FILE}::test_a_call_is_alone_on_the_standby_too",
    ),
    Bug(
        "a remembered answer is given to the next process of a worker",
        "pslite/node/recorded_requests.py",
        "        known = self._known.get(question)\n",
        "        ids = {id_: answer for (_, id_), answer in self._known.items()}\n"
        "        known = ids.get(question[1])\n",
        f"{FILE}::test_after_its_server_a_worker_may_be_lost_twice",
    ),
    Bug(
        "a request that the lost server has recorded is carried out again",
        "pslite/node/recorded_requests.py",
        "            incoming._respond(incoming, *known)\n        return known is not None\n",
        "            pass\n        return False\n",
        f"{CALLS}[calls-0]",
    ),
    Bug(
        "a request that the lost server has recorded is answered twice",
        "pslite/node/recorded_requests.py",
        "        return known is not None\n",
        "        return False\n",
        f"{FILE}::test_each_request_of_a_worker_gets_one_answer",
    ),
    Bug(
        "later work runs beside work that must be alone",
        "pslite/protocol/replication.py",
        "            while self._waiting and not self._is_alone:\n",
        "            while self._waiting:\n",
        RULES,
    ),
    Bug(
        "a standby does not count the rounds that it has applied",
        "pslite/node/standby.py",
        "            self._plane.copies.repeated(job)\n",
        "",
        SYNC,
    ),
    Bug(
        "a standby counts one round too many",
        "pslite/protocol/rounds.py",
        "        self.version = max((round_ for _, round_ in pairs), default=self.version)\n",
        "        self.version = max(round_ for _, round_ in pairs) + 1\n",
        SYNC,
    ),
    Bug(
        "a standby counts all asynchronous pushes as those of worker 0",
        "pslite/protocol/rounds.py",
        "            rounds = self._ranks[rank] = self._of(rank)\n            rounds.repeated",
        "            rounds = self._ranks[0] = self._of(0)\n            rounds.repeated",
        ASYNC,
    ),
    Bug(
        "a pull that the lost server has not answered is not sent again",
        "pslite/plane/transfer.py",
        "        if self.pulling is not None and not self.pulling[0][0].push:\n            found",
        "        if False:\n            found",
        SYNC,
    ),
    Bug(
        "a push that the lost server has not answered is not sent again",
        "pslite/plane/transfer.py",
        "        found = [(r, request) for r, request in self.inflight.items()]\n",
        "        found: list[tuple[int, Request]] = []\n",
        SYNC,
    ),
    Bug(
        "a request that the lost server has not answered is not sent again",
        "pslite/node/postoffice.py",
        "            self.customers.ask_again(node.node_id)\n",
        "",
        f"{CALLS}[calls-0]",
    ),
    Bug(
        "a request fails if its server is lost, although there is a standby",
        "pslite/node/peer_watch.py",
        "pending.depart(node.node_id, error, for_good=False)\n",
        "pending.depart(node.node_id, error)\n",
        f"{CALLS}[calls-0]",
    ),
    Bug(
        "a server without its standby does not release what waited for it",
        "pslite/node/primary.py",
        "        for then in (*self._journal.end(), *waiting):\n",
        "        self._journal.end()\n        for then in waiting:\n",
        f"{AT}[standby-sync-0]",
    ),
    Bug(
        "a standby goes on hearing its server after it has taken the seat",
        "pslite/node/standby.py",
        "        if self.primary is not None:\n            self._office.links.shut(",
        "        if False:\n            self._office.links.shut(",
        f"{FILE}::test_a_standby_does_not_hear_its_server_after_it_has_taken_the_seat",
    ),
    Bug(
        "a standby that was dismissed gets the seat of its server",
        "pslite/protocol/succession.py",
        "        seat.standby = seat.filling = None\n        seat.takes_none",
        "        seat.takes_none",
        f"{FILE}::test_without_its_standby_a_lost_server_ends_the_job",
    ),
    Bug(
        "a standby that was lost ends as one that is not needed any more",
        "pslite/node/seating.py",
        "            if for_good:\n                self._release(standby)\n",
        "            if True:\n                self._release(standby)\n",
        f"{FILE}::test_a_standby_that_its_server_cannot_reach_ends_with_an_error",
    ),
    Bug(
        "a new standby counts as ready when a late message says so of the one before",
        "pslite/protocol/succession.py",
        " or seat.filling is None or seat.filling.uid != uid:\n",
        " or seat.filling is None:\n",
        f"{AGAIN}::test_a_late_word_about_the_standby_before_does_not_make_the_next_one_ready",
    ),
    Bug(
        "a server runs far ahead of its standby",
        "pslite/protocol/replication.py",
        "limit = min(self._stored, self._limit()) if self.is_crowded else self._stored\n",
        "limit = self._stored\n",
        f"{FILE}::test_a_server_waits_for_a_standby_that_is_far_behind_and_then_goes_on",
    ),
    Bug(
        "a server never forgets the frames of its records",
        "pslite/node/standby.py",
        "        self._replay.has_done(number)\n",
        "",
        f"{FILE}::test_a_standby_has_what_its_server_has_byte_for_byte",
    ),
    Bug(
        "a server with a growing table keeps its standby",
        "kvstore/server/app.py",
        "        elif incoming.head == StoreCall.CREATE_TABLE and self._node",
        "        elif incoming.head < 0 and self._node",
        f"{FILE}::test_a_server_with_a_growing_table_has_no_standby_any_more",
    ),
    Bug(
        "a standby does not keep the steps of workers",
        "kvstore/server/app.py",
        "    StoreCall.KEEP_STEP: False,\n",
        "",
        f"{FILE}::test_a_worker_and_a_server_may_be_lost_one_after_the_other",
    ),
    Bug(
        "a table is made before the standby is dismissed",
        "kvstore/server/app.py",
        "self._node.traffic.primary.when_alone(partial(self._carry_out, incoming))\n",
        "self._carry_out(incoming)\n",
        f"{FILE}::test_a_server_with_a_table_is_not_followed_by_a_standby_without_it",
    ),
    Bug(
        "a step begins before earlier pushes are on the standby",
        "pslite/node/data.py",
        "            if office.config.standbys:\n",
        "            if False:\n",
        f"{FILE}::test_a_worker_and_a_server_may_be_lost_together",
    ),
    Bug(
        "states are taken over when they are read, which no standby sees",
        "kvstore/server/app.py",
        "        self._lanes.run(incoming, mine, _take_states_over, incoming.respond)\n",
        "        incoming.respond()\n",
        f"{FILE}::test_to_read_states_changes_nothing_that_the_standby_would_not_know",
    ),
    Bug(
        "a standby does not watch the scheduler",
        "pslite/node/member.py",
        "            office.watch.add(SCHEDULER, now)\n            office.watch.add(primary",
        "            office.watch.add(primary",
        "tests/faults/test_simulated_losses.py::test_a_lost_scheduler_is_named_on_every_survivor",
    ),
    Bug(
        "a goodbye that comes before the roster is forgotten",
        "pslite/node/message_filter.py",
        "isinstance(message, Leave | Members | Vacant | Seated)",
        "isinstance(message, Members | Vacant | Seated)",
        "tests/faults/test_simulated_losses.py::"
        "test_a_goodbye_that_comes_before_the_roster_counts_once_that_is_there",
    ),
    Bug(
        "the launcher starts a standby again that its server has let go",
        "kvstore/launch/job/restarts.py",
        "exits[index].status != 0 and server not in exits\n",
        "server not in exits\n",
        f"{LAUNCHER}::test_a_new_standby_that_its_server_lets_go_is_not_started_again",
    ),
    Bug(
        "a process that has run for a minute waits longer and longer for its next start",
        "kvstore/launch/job/restarts.py",
        "        if found.at_s - self._started.get(index, -math.inf) < timing.steady_s:\n",
        "        if index in self._started:\n",
        f"{LAUNCHER}::"
        "test_each_further_pause_of_a_standby_is_twice_as_long_unless_it_ran_for_a_minute",
    ),
    Bug(
        "the launcher believes that a new standby could take its server's place at once",
        "kvstore/launch/job/restarts.py",
        "            self.excused.discard(index)\n        return server\n",
        "            self.excused.discard(index)\n"
        "            self._servers[index] = self.unfilled.pop(index)\n"
        "        return server\n",
        f"{LAUNCHER}::test_a_server_that_ends_before_its_new_standby_is_filled_fails_the_job",
    ),
    Bug(
        "the launcher starts standbys that cannot be filled for ever",
        "kvstore/launch/job/restarts.py",
        "            if not self.is_hopeless(index)\n",
        "",
        f"{LAUNCHER}::test_after_three_standbys_that_were_not_filled_the_server_is_left_alone",
    ),
    Bug(
        "the launcher starts a standby beside its server though there is another host",
        "kvstore/launch/job/supervisor.py",
        "for place in (apart + able)[:1]:",
        "for place in able[:1]:",
        "tests/unit/kvstore/launch/job/test_launch_supervisor.py",
    ),
    Bug(
        "a new standby counts the updates of plain optimizers from zero",
        "kvstore/server/dense.py",
        "            part.arena.state(part.store.optimizer)  # it may begin the counts anew\n",
        "",
        f"{FILE}::test_a_new_standby_counts_updates_as_its_server_does",
    ),
    Bug(
        "a server answers when it has applied a round, whether or not its standby has it",
        "pslite/node/primary.py",
        "        if applying.is_stored and applying.outcomes is not None:\n",
        "        if applying.outcomes is not None:\n",
        SEEDS,
    ),
    Bug(
        "a server keeps the frames of records that its standby has done",
        "pslite/protocol/replication.py",
        "            self._undone_bytes -= self._frames.popleft()[2]\n",
        "            self._undone_bytes -= self._frames[0][2]\n            break\n",
        SEEDS,
    ),
    Bug(
        "a standby that is let go waits until its server, which has ended, accepts a message",
        "pslite/node/standby.py",
        "            self._office.links.release(self.primary.uid)\n",
        "            pass\n",
        f"{FILE}::test_a_standby_that_is_let_go_does_not_wait_for_its_server",
    ),
    Bug(
        "a server that has lost its place answers requests with its own error",
        "pslite/node/postoffice.py",
        "elif self.error is not None and self.role is Role.SERVER and self.config.standbys:",
        "elif False:",
        f"{FILE}::test_a_server_that_has_lost_its_place_answers_nothing",
    ),
]
