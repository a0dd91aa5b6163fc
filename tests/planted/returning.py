"""Bugs of processes that take the place of lost workers."""

from __future__ import annotations

from tests.planted.bug import Bug

INSTANTS = (
    "tests/faults/test_returning.py::test_a_worker_may_be_killed_before_any_step_of_the_simulation"
)
SEEDS = "tests/faults/test_returning.py::test_several_may_be_killed_whatever_the_network_does"

BUGS = [
    Bug(
        "a process that comes back counts its pushes from zero",
        "pslite/plane/worker.py",
        "self._resumed, self._gate.refuses_pushes = dict(counts), True",
        "self._resumed, self._gate.refuses_pushes = {}, True",
        INSTANTS,
    ),
    Bug(
        "a process that comes back pulls the values of a later round",
        "pslite/plane/unit.py",
        "if not self.rounds.knows(rank, after_round + 1):",
        "if True:",
        INSTANTS,
    ),
    Bug(
        "the values before the last round are those before the last but one",
        "kvstore/server/part_table.py",
        "            arena.previous[whole] = weight\n",
        "            if arena.changes % 2:\n                arena.previous[whole] = weight\n",
        INSTANTS,
    ),
    Bug(
        "the rows before the last round are not kept",
        "kvstore/server/sparse.py",
        "            self._before = RowsBefore(self.table, touched)\n",
        "            self._before = None\n",
        INSTANTS,
    ),
    Bug(
        "rows of a dense key change without a copy of the values before",
        "kvstore/server/sparse.py",
        "        arena.previous[part.start : part.stop] = part.weight\n",
        "        pass\n",
        INSTANTS,
    ),
    Bug(
        "rows that the last round has added are seen before it",
        "kvstore/sparse/table.py",
        "        return now[~np.isin(now, self._absent, assume_unique=True)]\n",
        "        return now\n",
        "tests/unit/kvstore/sparse/test_rows_before.py",
    ),
    Bug(
        "a step is kept before the pushes of the last one have arrived",
        "pslite/node/data.py",
        "has_arrived = has_arrived and office.links.everything_accepted(servers)",
        "has_arrived = True",
        "tests/faults/test_returning.py::"
        "test_a_step_begins_only_when_the_pushes_of_the_last_one_have_arrived",
    ),
    Bug(
        "the first push of a step does not wait until the step is kept",
        "pslite/plane/worker.py",
        "        self._gate.held_back = []\n",
        "        self._gate.held_back = None\n",
        INSTANTS,
    ),
    Bug(
        "a worker that cannot be replaced is, if an earlier message of it comes late",
        "pslite/protocol/succession.py",
        "        if seat is not None and not seat.takes_none:\n",
        "        if seat is not None:\n",
        "tests/unit/pslite/protocol/test_succession.py::"
        "test_a_yes_that_comes_after_a_no_was_said_before_and_does_not_count",
    ),
    Bug(
        "a process is welcome before the servers know it",
        "pslite/node/seating.py",
        "        if not (is_known and office.links.everything_accepted(others)):\n"
        "            return False\n",
        "",
        SEEDS,
    ),
    Bug(
        "the push of a lost process is answered to the next one without a value",
        "pslite/plane/unit.py",
        "self.orphans |= {pair for pair in self.rounds.waiting() if pair[0] == rank}",
        "self.orphans |= set()",
        "tests/unit/pslite/plane/test_plane_returning.py"
        "::test_a_push_of_a_lost_process_is_applied_and_not_answered",
    ),
    Bug(
        "a push that comes again is not answered",
        "pslite/plane/unit.py",
        "            self.orphans.discard((rank, round_))\n            if pull:\n",
        "            if pull:\n",
        "tests/unit/pslite/plane/test_plane_returning.py",
    ),
    Bug(
        "a process that comes back numbers its barriers from one",
        "kvstore/stores/dist/kept_steps.py",
        "            node.control.set_barriers(kept.barriers)\n",
        "            node.control.set_barriers({})\n",
        INSTANTS,
    ),
    Bug(
        "a barrier that is over is not answered again",
        "pslite/protocol/barrier.py",
        '            return [(node, BarrierLeave(group, round_, "", ""))]\n        given_up',
        "            return []\n        given_up",
        INSTANTS,
    ),
    Bug(
        "a repeated call of the deciding rank counts once more",
        "kvstore/stores/dist/control_client.py",
        "is_over = unpack(body, list, int)[1] >= call",
        "is_over = False",
        "tests/faults/test_returning.py::test_a_call_that_is_repeated_changes_nothing",
    ),
    Bug(
        "a report about a lost process removes the one in its place",
        "pslite/node/scheduler.py",
        "is_current = message.attempt == membership.attempts.get(node, 0)",
        "is_current = True",
        SEEDS,
    ),
    Bug(
        "a process that was declared lost is believed about others",
        "pslite/node/scheduler.py",
        "if is_current and not is_over and reporter in membership.listeners():",
        "if is_current and not is_over:",
        "tests/faults/test_standbys.py::test_a_cut_between_a_worker_and_a_server_costs_one_seat",
    ),
    Bug(
        "a standby that takes a seat does not learn which seats are vacant",
        "pslite/node/seating.py",
        "        for vacant, reason in membership.vacant.items():",
        "        for vacant, reason in dict[int, str]().items():",
        "tests/faults/test_standbys.py::test_a_standby_that_takes_a_seat_learns_which_workers_are_lost",
    ),
    Bug(
        "an answer to a lost process reaches the one in its place",
        "pslite/node/customer.py",
        "if self._replaced and incoming.attempt != self._replaced[incoming.sender]:",
        "if False:",
        "tests/unit/pslite/node/test_turned_out.py",
    ),
    Bug(
        "a second in which two places are vacant counts twice",
        "pslite/protocol/lost_time.py",
        "        if not self.places:\n",
        "        if True:\n",
        "tests/unit/pslite/protocol/test_lost_time.py",
    ),
    Bug(
        "a process that was replaced goes on without being told",
        "pslite/node/links.py",
        "        if refusal is not None:\n",
        "        if False:\n",
        "tests/faults/test_returning.py::"
        "test_a_process_that_wakes_up_after_it_was_replaced_changes_nothing_and_is_told",
    ),
    Bug(
        "all devices of a process that comes back have the arrays of the first",
        "kvstore/mxnet/fit/loop.py",
        'itertools.cycle(saved["aux"])',
        'itertools.cycle(saved["aux"][:1])',
        "tests/inproc/test_fit_returning.py",
    ),
    Bug(
        "the sums of an epoch begin again in a process that comes back",
        "kvstore/mxnet/fit/loop.py",
        "            self._loss_sum, self._correct_count, counts = saved",
        "            _, _, counts = saved",
        "tests/inproc/test_fit_returning.py",
    ),
    Bug(
        "a process that comes back pushes its rows of the data again",
        "kvstore/mxnet/fit/store.py",
        "    if isinstance(store, DistKVStore) and store.catches_up:\n",
        "    if False:\n",
        "tests/inproc/test_fit_returning.py",
    ),
    Bug(
        "a worker that ends well is started again",
        "kvstore/launch/job/lifecycle.py",
        "for index in failures:",
        "for index in statuses:",
        "tests/unit/kvstore/launch/job/test_launch_returns.py",
    ),
    Bug(
        "a step is kept with the barriers that were entered after it had begun",
        "kvstore/stores/dist/kept_steps.py",
        'KeptStep(loop, step, counts, barriers, calls, b"")',
        'KeptStep(loop, step, counts, node.control.barriers(), calls, b"")',
        "tests/faults/test_returning.py::"
        "test_a_barrier_that_is_entered_before_the_step_is_kept_is_entered_again",
    ),
]
