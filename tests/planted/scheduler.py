"""Bugs of a scheduler that goes on in place of a lost one."""

from __future__ import annotations

from tests.planted.bug import Bug

LOSSES = "tests/faults/test_scheduler_losses.py"
NODE = "tests/unit/pslite/node"
PROTOCOL = "tests/unit/pslite/protocol"
JOURNAL = f"{NODE}/test_scheduler_journal.py"
REQUESTS = f"{NODE}/test_recorded_requests.py"
AWAY = f"{NODE}/test_scheduler_away.py"
INSTANTS = f"{LOSSES}::test_the_scheduler_may_be_replaced_before_any_step_of_the_simulation"
CALLS = f"{LOSSES}::test_a_request_that_is_under_way_gets_its_answer"

BUGS = [
    Bug(
        "the journal reads past a record with wrong bytes",
        "pslite/node/scheduler_journal.py",
        "if len(body) < length or zlib.crc32(body) != checksum:",
        "if len(body) < length:",
        JOURNAL,
    ),
    Bug(
        "what is left of a torn record stays in the journal",
        "pslite/node/scheduler_journal.py",
        "        os.ftruncate(self._file, start)\n        os.lseek",
        "        os.lseek",
        JOURNAL,
    ),
    Bug(
        "two schedulers may have one journal",
        "pslite/node/scheduler_journal.py",
        "            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)\n",
        "            pass\n",
        JOURNAL,
    ),
    Bug(
        "a journal that could not be written stays for the next scheduler",
        "pslite/node/scheduler_records.py",
        "            self._journal.empty()\n",
        "",
        f"{LOSSES}::test_training_goes_on_if_the_journal_cannot_be_written",
    ),
    Bug(
        "a process that gets its place from the next scheduler goes on waiting for one",
        "pslite/node/member.py",
        "        self._stop_waiting()\n        self._away.found()\n",
        "        self._stop_waiting()\n",
        "tests/faults/test_told_losses.py::"
        "test_a_process_that_gets_its_place_from_the_next_scheduler_waits_for_no_other",
    ),
    Bug(
        "the standby of a server is not in the charter",
        "pslite/protocol/charter.py",
        "return seat._replace(node=NodeInfo(*seat.node), standby=standby, filling=filling)",
        "return seat._replace(node=NodeInfo(*seat.node), standby=None, filling=filling)",
        f"{PROTOCOL}/test_charter.py",
    ),
    Bug(
        "requests are not recorded",
        "pslite/node/scheduler_records.py",
        "        self._write(REQUEST, request)\n",
        "",
        CALLS,
    ),
    Bug(
        "a request is recorded after it is carried out",
        "pslite/node/recorded_requests.py",
        "            self._record(\n",
        "            self._carry_out(question, incoming)\n            self._record(\n",
        REQUESTS,
    ),
    Bug(
        "a request that comes again is carried out again",
        "pslite/node/recorded_requests.py",
        "if not self._answers.again(question, incoming) and question not in self._open:",
        "if question not in self._open:",
        REQUESTS,
    ),
    Bug(
        "a request that comes again while it is open is carried out twice",
        "pslite/node/recorded_requests.py",
        "if not self._answers.again(question, incoming) and question not in self._open:",
        "if not self._answers.again(question, incoming):",
        REQUESTS,
    ),
    Bug(
        "a replay sends its answers",
        "pslite/node/recorded_requests.py",
        "            if not self._is_replaying:\n",
        "            if True:\n",
        REQUESTS,
    ),
    Bug(
        "the state of the apps in a short journal has no answers",
        "pslite/node/recorded_requests.py",
        "self._answers.note((uid, request_id), response_from(request_id, fields), ())",
        "pass",
        REQUESTS,
    ),
    Bug(
        "barriers that were reached are not told to the next scheduler",
        "pslite/node/member_barriers.py",
        "office.send(SCHEDULER_ID, BarriersReached(tuple(rounds), tuple(rounds.values())))",
        "pass",
        AWAY,
    ),
    Bug(
        "a node does not say again in which barriers it waits",
        "pslite/node/member_barriers.py",
        "            office.send(SCHEDULER_ID, BarrierEnter(group, round_, left_s))\n",
        "            pass\n",
        AWAY,
    ),
    Bug(
        "the time limit of a barrier begins anew with each scheduler",
        "pslite/node/member_barriers.py",
        "left_s = max(until - now, 0.001) if until < math.inf else 0.0",
        "left_s = 8.0 if until < math.inf else 0.0",
        AWAY,
    ),
    Bug(
        "a node that has reached a later barrier is awaited in an earlier one",
        "pslite/protocol/barrier.py",
        "if other == group and open_round <= round_ and node in wait.members:",
        "if other == group and open_round == round_ and node in wait.members:",
        f"{PROTOCOL}/test_barrier.py",
    ),
    Bug(
        "the next scheduler forgets failed barriers",
        "pslite/node/scheduler.py",
        "        self._barriers.resume(charter.failed_barriers)\n",
        "",
        f"{LOSSES}::test_the_time_limit_of_a_barrier_goes_on_without_a_scheduler",
    ),
    Bug(
        "the next scheduler does not tell the launcher which servers have standbys",
        "pslite/node/scheduler.py",
        "            if row.standby is not None and server is not None:\n",
        "            if row.standby is None and server is not None:\n",
        f"{LOSSES}::test_the_next_scheduler_tells_the_launcher_at_once_who_has_which_place",
    ),
    Bug(
        "a member does not ask the next scheduler again what was not answered",
        "pslite/node/member.py",
        "        office.customers.ask_again(SCHEDULER_ID)\n",
        "",
        CALLS,
    ),
    Bug(
        "a member waits for ever for the next scheduler",
        "pslite/node/scheduler_away.py",
        "            self._patience.set(now + office.config.rejoin_timeout_s)\n",
        "",
        AWAY,
    ),
    Bug(
        "members are not told that another process is the scheduler",
        "pslite/node/scheduler.py",
        "            self._office.links.send(peer, Beat(), (), 0, now)\n\n    def disconnected",
        "            pass\n\n    def disconnected",
        INSTANTS,
    ),
    Bug(
        "a message of the next scheduler is not noticed",
        "pslite/node/links.py",
        "                self.on_replaced(event.peer)\n",
        "                pass\n",
        f"{NODE}/test_links.py",
    ),
    Bug(
        "a registration of an earlier channel begins a new one",
        "pslite/node/links.py",
        "if 0 < entry.incarnation < envelope.sender and type(message) is Register:",
        "if 0 < entry.incarnation != envelope.sender and type(message) is Register:",
        f"{NODE}/test_links.py",
    ),
    Bug(
        "a seat that was vacant at the loss of the scheduler is overdue at once",
        "pslite/protocol/succession.py",
        "                row.num_losses,\n                now,\n",
        "                row.num_losses,\n                0.0,\n",
        f"{PROTOCOL}/test_succession.py",
    ),
    Bug(
        "the next scheduler forgets who was being welcomed",
        "pslite/protocol/succession.py",
        "            if seat.standing is Standing.WELCOMING\n        ]",
        "            if False\n        ]",
        f"{PROTOCOL}/test_succession.py",
    ),
    Bug(
        "news of a seat that come before the roster are ignored",
        "pslite/protocol/membership.py",
        "            if before.node_id == node.node_id and attempt > counts[place]:\n",
        "            if False:\n",
        f"{PROTOCOL}/test_membership_seats.py",
    ),
    Bug(
        "members that were lost with the scheduler are never found",
        "pslite/node/seating.py",
        "            office.watch.expect(peer, now)\n",
        "            pass\n",
        f"{NODE}/test_seating_again.py",
    ),
    Bug(
        "a charter is written after others have heard of a vacant seat",
        "pslite/node/seating.py",
        "        self._save()\n        office.watch.vacated(node, reason)\n",
        "        office.watch.vacated(node, reason)\n",
        f"{LOSSES}::test_a_change_is_written_before_others_are_told",
    ),
    Bug(
        "a standby that was let go stands by again for the next scheduler",
        "pslite/node/seating.py",
        "            return True\n        office.links.know",
        "            return False\n        office.links.know",
        f"{NODE}/test_seating_again.py",
    ),
    Bug(
        "the next scheduler welcomes a process before all members are back",
        "pslite/node/seating.py",
        "        is_known = self._back is None or self._back.issuperset(others)\n",
        "        is_known = True\n",
        f"{NODE}/test_seating_again.py",
    ),
    Bug(
        "the next scheduler says nothing to a stopped process whose seat is vacant",
        "pslite/node/seating.py",
        "                self.turn_out(row.node, row.reason)\n",
        "",
        f"{LOSSES}::test_the_next_scheduler_turns_a_process_out_whose_seat_is_still_vacant",
    ),
    Bug(
        "the next scheduler says nothing to a stopped process that its journal does not name",
        "pslite/node/scheduler.py",
        '            self._seating.turn_out(node, "it had lost the scheduler")\n',
        "",
        f"{LOSSES}::test_the_next_scheduler_turns_a_process_out_whose_seat_another_one_has",
    ),
    Bug(
        "the next scheduler says nothing to a stopped process that its journal names",
        "pslite/node/scheduler.py",
        '                self._seating.turn_out(lost, "another process has its place")\n',
        "",
        f"{LOSSES}::test_the_next_scheduler_turns_a_process_out_whose_seat_another_one_has",
    ),
    Bug(
        "the scheduler never forgets what it has sent to a lost standby",
        "pslite/node/seating.py",
        "            self.turn_out(lost, reason)  #",
        "            pass  #",
        "tests/faults/test_standbys.py::test_no_message_waits_for_a_lost_standby",
    ),
    Bug(
        "a worker says goodbye before the answers of servers with standbys",
        "pslite/node/shutdown.py",
        "        is_early = not (node.membership.has_said_goodbye or node.config.standbys)\n",
        "        is_early = not node.membership.has_said_goodbye\n",
        "tests/faults/test_closing.py::"
        "test_a_worker_may_leave_after_its_last_push_while_its_server_is_lost",
    ),
    Bug(
        "a message from before a channel was begun anew is taken for its first one",
        "pslite/node/links.py",
        "is_stray = own != self.incarnation and envelope.sequence and not envelope.receiver",
        "is_stray = False",
        "tests/faults/test_scheduler_losses.py::test_a_message_of_the_next_scheduler_before_it_is_"
        "asked_is_not_of_the_new_channel",
    ),
]
