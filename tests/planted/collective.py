"""Mistakes in collective calls and mailboxes: matching, sums, messages."""

from __future__ import annotations

from tests.planted.bug import Bug

_MATCHING = "tests/unit/pslite/protocol/test_collective_matching.py"
_MAILBOX = "tests/unit/pslite/protocol/test_mailbox_rules.py"
_CALLS = "tests/inproc/test_collective.py"
_MACHINES = "tests/inproc/test_collective_machines.py"
_LENT = "tests/inproc/test_collective_lent.py"
_AGAIN = (
    "tests/process/test_torch_jobs.py::test_a_group_is_made_again_and_again_in_a_store_that_stays"
)

BUGS = [
    Bug(
        "a server in a worker's process sends on what the worker may change",
        "pslite/collective/kept_frames.py",
        "if is_lent or _is_mapped(frame)",
        "if _is_mapped(frame)",
        _LENT,
    ),
    Bug(
        "a rank gets its array back before the others have accepted the sum that is in it",
        "pslite/collective/server.py",
        "self._respond_when_free(message.incoming, body, asked, others[0].obj)",
        "message.incoming.respond(body, asked)",
        _LENT,
    ),
    Bug(
        "a sum is written over values that its rank keeps",
        "pslite/collective/server_route.py",
        "for piece in pieces if not may_write else ():",
        "for piece in pieces[1:] if not may_write else ():",
        _LENT,
    ),
    Bug(
        "the sum of three ranks is written over the third one's values",
        "pslite/collective/server.py",
        "enumerate(incoming[:2])",
        "enumerate(incoming)",
        _LENT,
    ),
    Bug(
        "all chunks of an array go to one server",
        "pslite/collective/server_route.py",
        "count = servers * -(-nbytes // (servers * most))",
        "count = -(-nbytes // most)",
        "tests/inproc/test_collective.py",
    ),
    Bug(
        "values of a collective call are combined in the order of arrival",
        "pslite/protocol/collective.py",
        "messages = tuple(arrived[rank] for rank in ranks if rank in arrived)",
        "messages = tuple(arrived.values())",
        _MATCHING,
    ),
    Bug(
        "a rank that comes late to a collective call that failed waits for ever",
        "pslite/protocol/collective.py",
        "failure = self._failed.get(key)",
        "failure = None",
        _MATCHING,
    ),
    Bug(
        "a collective call that begins after a rank has gone waits for it",
        "pslite/protocol/collective.py",
        "errors = [self._gone[rank] for rank in missing if rank in self._gone]",
        "errors = list(self._gone.values())[:0]",
        _MATCHING,
    ),
    Bug(
        "ranks of different operations are combined by the first one's",
        "pslite/protocol/collective.py",
        "if call != found.call:",
        "if call._replace(op=found.call.op) != found.call:",
        f"{_CALLS}::test_different_calls_end_on_all_ranks_with_both_named",
    ),
    Bug(
        "the servers are not asked who is missing in a call that waits long",
        "pslite/collective/waits.py",
        "if any(wait.waited_s >= wait.ask_after_s for wait in waits):",
        "if any(wait.waited_s < 0 for wait in waits):",
        f"{_CALLS}::test_a_long_wait_names_the_call_and_the_ranks_that_have_not_made_it",
    ),
    Bug(
        "a machine's sum is sent before all of it is there",
        "pslite/collective/server_route.py",
        "while next_ < len(requests) and stops[next_] <= nbytes:",
        "while next_ < len(requests):",
        f"{_MACHINES}::test_sums_are_in_the_order_of_machines_bit_by_bit",
    ),
    Bug(
        "the error of one machine's ranks does not reach the other machines",
        "pslite/collective/machines_route.py",
        "                under_way.fail(error)\n",
        "                pass\n",
        f"{_MACHINES}::test_calls_that_differ_end_on_all_ranks_with_two_named",
    ),
    Bug(
        "an average over machines divides by the workers of each",
        "pslite/collective/machines_route.py",
        "reducing(added, self._size)",
        "reducing(added)",
        f"{_MACHINES}::test_operations",
    ),
    Bug(
        "calls that the servers carry out have no place on a machine's ring",
        "pslite/collective/machines_route.py",
        "            self._down.begin(key.text(call), steps, None).on_done(lambda _: None)\n",
        "",
        f"{_MACHINES}::test_calls_that_differ_end_on_all_ranks_with_two_named",
    ),
    Bug(
        "a leader hands down what has not come from the servers",
        "pslite/collective/shared_memory_algorithms.py",
        "if self._ready < min(upto, len(self.data)):",
        "if self._ready < 0:",
        f"{_MACHINES}::test_sums_are_in_the_order_of_machines_bit_by_bit",
    ),
    Bug(
        "who waits for a member that failed takes that member for the cause",
        "pslite/collective/shared_memory_driver.py",
        "left = [rank for rank, has_failed in sorted(given_up.items()) if not has_failed]",
        "left = sorted(given_up)",
        "tests/unit/pslite/collective/test_shared_memory_driver.py",
    ),
    Bug(
        "a group that is made again in torch's store finds what the first one wrote there",
        "kvstore/frameworks/torch/cluster.py",
        """PrefixStore(f"kvstore/{store.add(f'kvstore/joined/{rank}', 1)}", store)""",
        'PrefixStore("kvstore", store)',
        _AGAIN,
    ),
    Bug(
        "a part of a torch group whose ranks differ from rank to rank is made",
        "kvstore/frameworks/torch/process_group.py",
        "if ranks == members:",
        "if len(ranks) == len(members):",
        _AGAIN,
    ),
    Bug(
        "a forked child that closes a group ends the calls of its parent",
        "pslite/collective/communicator.py",
        "if self.node.io_queue.is_forked:  # the rings are still its parent's",
        "if False:",
        f"{_CALLS}::test_a_forked_child_that_closes_a_group_leaves_it_to_its_parent",
    ),
    Bug(
        "a ring is closed by one thread while another tells of the end by it",
        "pslite/collective/shared_memory_driver.py",
        "            with self._ending:\n                self.ring.close()\n",
        "            self.ring.close()\n",
        "tests/unit/pslite/collective/test_shared_memory_driver.py",
    ),
    Bug(
        "an average divides by the ranks that have not joined",
        "pslite/collective/server.py",
        "arrays, out, size)",
        "arrays, out)",
        f"{_CALLS}::test_ranks_without_data_count_as_zeros_until_all_have_joined",
    ),
    Bug(
        "calls are not numbered anew after all have joined",
        "pslite/collective/communicator.py",
        "self._counts.clear()",
        "pass",
        f"{_CALLS}::test_ranks_without_data_count_as_zeros_until_all_have_joined",
    ),
    Bug(
        "a call that fails at one rank is not given up at the others",
        "pslite/collective/pending_call.py",
        "            give_up(self._asker, self._key, error)\n",
        "",
        "tests/inproc/test_collective_moves.py"
        "::test_an_array_to_fill_that_does_not_fit_ends_the_call_on_all_ranks",
    ),
    Bug(
        "large calls with names begin in the order in which a rank hears that all are ready",
        "pslite/collective/ready_order.py",
        "while (first := self._early.pop(self._next, None)) is not None:",
        "for first in [self._early.pop(number)]:",
        "tests/unit/pslite/collective/test_ready_order.py",
    ),
    Bug(
        "a call without the values of a rank that has joined goes by shared memory",
        "pslite/protocol/collective.py",
        "0 if absent else self._num_ready[key.group]",
        "self._num_ready[key.group]",
        _MATCHING,
    ),
    Bug(
        "bfloat16 sums are cut off instead of rounded",
        "pslite/collective/sums.py",
        "bias = np.uint32(0x7FFF) +",
        "bias = np.uint32(0) *",
        "tests/unit/pslite/collective/test_collective_wire.py",
    ),
    Bug(
        "averages of negative integers are rounded down",
        "pslite/collective/sums.py",
        "wide -= np.fmod(wide, wide.dtype.type(number))",
        "pass",
        "tests/unit/pslite/collective/test_collective_wire.py",
    ),
    Bug(
        "messages that overtake others are taken before them",
        "pslite/protocol/mailbox.py",
        "for letter in stream.in_turn(address.message, (address, nbytes, content)):",
        "for letter in [(address, nbytes, content)]:",
        "tests/faults/test_collective_faults.py",
    ),
    Bug(
        "a rank that has joined counts as zeros in calls that are on their way",
        "pslite/protocol/collective.py",
        "self.last.get(key.name, self.begin) < key.number",
        "self.begin < key.number",
        "tests/faults/test_collective_faults.py",
    ),
    Bug(
        "a mailbox gives its latest letter first",
        "pslite/protocol/mailbox.py",
        "slot.letters.append(letter)",
        "slot.letters.insert(0, letter)",
        _MAILBOX,
    ),
    Bug(
        "a mailbox keeps all that comes",
        "pslite/protocol/mailbox.py",
        "if box.kept_bytes and box.kept_bytes + letter.nbytes > BOX_BYTES:",
        "if not box.waiting:",
        _MAILBOX,
    ),
    Bug(
        "what is received from a mailbox makes no room in it",
        "pslite/protocol/mailbox.py",
        "box.kept_bytes -= letter.nbytes",
        "pass",
        _MAILBOX,
    ),
    Bug(
        "a tuple in an object arrives as a list",
        "kvstore/protocol/objects.py",
        'tuple: "t"',
        'tuple: "l"',
        "tests/unit/kvstore/protocol/test_objects.py",
    ),
]
