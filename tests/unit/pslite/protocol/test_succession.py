"""Seats: which process has which place, who waits for one, and when the job ends instead."""

from __future__ import annotations

import pytest

from pslite.ids import NodeInfo, Role, node_id
from pslite.protocol.succession import MOST_LOSSES, Seats, Succession

WAIT_S = 60.0
FIRST, SECOND = node_id(Role.WORKER, 0), node_id(Role.WORKER, 1)


def process(number: int, rank: int = -1, role: str = "worker") -> NodeInfo:
    """A process; ``number`` tells it from others."""
    return NodeInfo(role, rank, f"{role}{number}", 100 + number, "", "alpha", "k", 4000 + number)


def begun(wait_s: float = WAIT_S, *, may_return: bool = True) -> Seats:
    """The seats of two workers, processes 0 and 1, and of a server."""
    seats = Seats(wait_s)
    seats.begin((process(0, 0), process(1, 1), process(9, 0, "server")))
    for seat in (FIRST, SECOND) if may_return else ():
        seats.may_return(seat, yes=True)
    return seats


def seated(seats: Seats) -> list[tuple[int, str, int]]:
    """Fill the vacant seats; (rank, new process, attempt) of each."""
    return [(each.node.rank, each.node.uid, each.attempt) for each in seats.take()]


def welcoming(seats: Seats, number: int = 2, now: float = 1.0) -> None:
    """The second worker is lost, and this process takes its seat."""
    assert seats.lost(SECOND, "killed", now)
    assert seats.ask(process(number), now) is None
    assert seated(seats) == [(1, f"worker{number}", seats.attempt(SECOND))]


# -- the table ----------------------------------------------------------------------------


def test_a_seat_becomes_vacant_with_its_process_if_that_may_return() -> None:
    seats = begun()
    assert seats.lost(SECOND, "killed", 1.0)
    assert (seats.take(), seats.attempt(SECOND)) == ([], 0)
    assert seats.lost(SECOND, "its connection is lost", 2.0)  # known already
    assert seats.overdue(1.0 + WAIT_S)[0][1].startswith("killed;")


def test_a_lost_process_is_followed_at_once_by_one_that_has_asked() -> None:
    seats = begun()
    assert seats.ask(process(2, 1), 1.0) is None
    assert seats.take() == []  # its seat is taken
    assert seats.lost(SECOND, "killed", 2.0)
    after, before = process(2, 1), process(1, 1)
    assert seats.take() == [Succession(after, 1, before, "killed")]
    assert seats.is_welcoming(SECOND, 1)
    assert seats.asking() == []


def test_the_job_ends_with_a_process_that_may_not_return() -> None:
    seats = begun(may_return=False)
    seats.ask(process(2), 0.0)
    assert not seats.lost(SECOND, "killed", 1.0)
    assert seats.take() == []
    why = "killed; it had not begun a step that another process can repeat"
    assert seats.verdict(SECOND, "killed") == why
    seats.may_return(FIRST, yes=False)
    assert not seats.lost(FIRST, "killed", 1.0)
    assert (
        seats.verdict(FIRST, "killed")
        == "killed; no process can go on in its place (its log says why)"
    )


def test_a_worker_may_take_back_that_it_may_return() -> None:
    seats = begun()
    seats.may_return(SECOND, yes=False)
    assert not seats.lost(SECOND, "killed", 1.0)
    assert seats.lost(FIRST, "killed", 1.0)


def test_a_yes_that_comes_after_a_no_was_said_before_and_does_not_count() -> None:
    seats = begun(may_return=False)
    for yes in (False, True):  # the first message was lost, and is sent again
        seats.may_return(SECOND, yes=yes)
    assert not seats.lost(SECOND, "killed", 1.0)
    after = resumed(seats)
    after.may_return(SECOND, yes=True)
    assert not after.lost(SECOND, "killed", LATER)


def test_a_process_that_asks_for_a_vacant_seat_is_welcomed_with_its_rank() -> None:
    seats = begun()
    seats.lost(SECOND, "killed", 1.0)
    assert seats.ask(process(2), 5.0) is None
    assert seats.take() == [Succession(process(2, 1), 1, process(1, 1), "killed")]
    assert (seats.attempt(FIRST), seats.attempt(SECOND)) == (0, 1)


def test_a_seat_that_stays_vacant_for_too_long_is_overdue_and_says_what_to_set() -> None:
    seats = begun(wait_s=2.5)
    seats.lost(SECOND, "killed", 10.0)
    seats.ask(process(2, 0), 10.0)  # it does not want this seat
    assert (seats.take(), seats.overdue(12.4)) == ([], [])
    text = "killed; no process has taken its place within 2.5 s (PS_REJOIN_TIMEOUT)"
    assert seats.overdue(12.5) == [(SECOND, text)]


def test_a_seat_is_taken_when_all_members_know_its_process() -> None:
    seats = begun()
    welcoming(seats)
    assert seats.overdue(1000.0) == []
    assert (seats.is_welcoming(SECOND, 1), seats.welcomed(SECOND, 1)) == (True, True)
    assert (seats.is_welcoming(SECOND, 1), seats.welcomed(SECOND, 1)) == (False, False)
    seats.ask(process(3), 2.0)
    assert seats.take() == []


def test_a_process_that_is_lost_while_it_is_welcomed_makes_the_seat_vacant_again() -> None:
    seats = begun()
    welcoming(seats)
    assert seats.lost(SECOND, "killed too", 50.0)
    assert not seats.is_welcoming(SECOND, 1)
    assert not seats.welcomed(SECOND, 1)
    assert seats.overdue(49.0 + WAIT_S) == []  # the time begins anew
    assert seats.overdue(50.0 + WAIT_S)[0][1].startswith("killed too; no process")


def test_another_process_follows_one_that_is_lost_while_it_is_welcomed() -> None:
    seats = begun()
    welcoming(seats)
    seats.ask(process(3), 2.0)
    assert seats.take() == []  # the seat has a process
    seats.lost(SECOND, "killed too", 3.0)
    assert seats.take() == [Succession(process(3, 1), 2, process(2, 1), "killed too")]


def test_the_welcome_of_an_earlier_process_is_not_that_of_a_later_one() -> None:
    seats = begun()
    welcoming(seats)
    welcoming(seats, 3, 2.0)
    assert (seats.welcomed(SECOND, 1), seats.is_welcoming(SECOND, 1)) == (False, False)
    assert (seats.is_welcoming(SECOND, 2), seats.welcomed(SECOND, 2)) == (True, True)


# -- a step that kills every process ------------------------------------------------------


def lose_and_replace(seats: Seats, number: int) -> None:
    welcoming(seats, number)
    assert seats.welcomed(SECOND, seats.attempt(SECOND))


def test_the_job_ends_if_a_step_has_killed_so_many_processes() -> None:
    seats = begun()
    for number in range(MOST_LOSSES - 1):
        lose_and_replace(seats, 10 + number)
    assert seats.verdict(SECOND, "killed") == "killed"
    assert not seats.lost(SECOND, "killed", 9.0)
    assert seats.verdict(SECOND, "killed") == "killed; it was lost 3 times in the same step"
    assert seats.verdict(FIRST, "killed") == "killed"


@pytest.mark.parametrize("is_welcomed", [False, True])
def test_losses_count_whether_or_not_all_members_knew_the_process(is_welcomed: bool) -> None:
    seats = begun()
    for number in range(MOST_LOSSES - 1):
        welcoming(seats, 10 + number)
        if is_welcomed:
            seats.welcomed(SECOND, number + 1)
    assert not seats.lost(SECOND, "killed", 9.0)


def test_one_loss_that_is_noted_twice_counts_once() -> None:
    seats = begun()
    for _ in range(MOST_LOSSES + 1):
        assert seats.lost(SECOND, "killed", 1.0)
    assert seats.verdict(SECOND, "killed") == "killed"


def test_losses_are_counted_anew_in_each_step() -> None:
    seats = begun()
    for number in range(3 * MOST_LOSSES):
        lose_and_replace(seats, 10 + number)
        seats.may_return(SECOND, yes=True)
    assert seats.lost(SECOND, "killed", 9.0)


def test_losses_of_other_workers_do_not_count() -> None:
    seats = begun()
    for number in range(MOST_LOSSES - 1):
        lose_and_replace(seats, 10 + number)
    assert seats.lost(FIRST, "killed", 1.0)


# -- who gets which seat ------------------------------------------------------------------


def test_a_process_without_a_rank_gets_any_vacant_seat() -> None:
    for lost in (FIRST, SECOND):
        seats = begun()
        seats.ask(process(2), 0.0)
        seats.lost(lost, "killed", 1.0)
        assert [each.node.node_id for each in seats.take()] == [lost]


def test_a_process_with_a_rank_gets_the_seat_of_this_rank_only() -> None:
    seats = begun()
    seats.ask(process(2, 1), 0.0)
    seats.lost(FIRST, "killed", 1.0)
    assert seated(seats) == []
    seats.lost(SECOND, "killed", 2.0)
    assert seated(seats) == [(1, "worker2", 1)]


def test_those_who_come_first_get_the_seats() -> None:
    seats = begun()
    for number in (5, 3, 4):
        seats.ask(process(number), float(number))
    for seat in (SECOND, FIRST):
        seats.lost(seat, "killed", 9.0)
    assert seated(seats) == [(0, "worker5", 1), (1, "worker3", 1)]
    assert [node.uid for node, _, _ in seats.asking()] == ["worker4"]


def test_a_process_that_waits_for_another_rank_does_not_hold_up_those_behind_it() -> None:
    seats = begun()
    seats.ask(process(2, 0), 0.0)
    seats.ask(process(3, 1), 0.0)
    seats.lost(SECOND, "killed", 1.0)
    assert seated(seats) == [(1, "worker3", 1)]


def test_a_process_that_has_withdrawn_gets_no_seat() -> None:
    seats = begun()
    seats.ask(process(2), 0.0)
    assert (seats.withdraw("worker2"), seats.withdraw("worker2")) == (True, False)
    seats.lost(SECOND, "killed", 1.0)
    assert (seats.take(), seats.asking()) == ([], [])


def test_what_a_process_says_of_its_return_holds_for_the_next_one() -> None:
    seats = begun()
    lose_and_replace(seats, 2)
    assert seats.lost(SECOND, "killed", 5.0)


# -- what those who wait are told ---------------------------------------------------------


def test_a_process_is_told_whose_place_it_waits_for() -> None:
    seats = begun()
    any_seat, second = process(2), process(3, 1)
    seats.ask(any_seat, 1.0)
    seats.ask(second, 2.0)
    assert seats.asking() == [
        (any_seat, 1.0, "a worker to be lost, whose place this process could take"),
        (
            second,
            2.0,
            "the end of worker 1 (pid 4001 on alpha), whose place this process asks for",
        ),
    ]


def test_a_process_that_has_asked_for_too_long_is_told_why_and_forgotten() -> None:
    seats = begun(wait_s=2.5)
    seats.ask(process(2), 1.0)
    seats.ask(process(3, 1), 2.0)
    assert seats.in_vain(3.4) == []
    text = "no seat became free within 2.5 s (PS_REJOIN_TIMEOUT): this process waited for "
    assert seats.in_vain(3.5) == [
        ("worker2", text + "a worker to be lost, whose place this process could take")
    ]
    assert [node.uid for node, _, _ in seats.asking()] == ["worker3"]
    title = "worker 1 (pid 4001 on alpha)"
    whom = f"the end of {title}, whose place this process asks for"
    assert seats.in_vain(4.5) == [("worker3", text + whom)]
    seats.lost(SECOND, "killed", 5.0)
    assert (seats.in_vain(1e9), seats.take()) == ([], [])


# -- who cannot have a seat ---------------------------------------------------------------

COMPLETE = "this job is complete and does not accept further nodes"


def test_without_time_to_wait_a_loss_ends_the_job_and_no_process_is_taken_in() -> None:
    seats = begun(wait_s=0.0)
    assert seats.ask(process(2), 0.0) == COMPLETE
    assert not seats.lost(SECOND, "killed", 1.0)
    assert (seats.asking(), seats.take(), seats.overdue(1e9)) == ([], [], [])


def test_a_server_cannot_have_a_seat_and_its_own_is_not_given_away() -> None:
    seats = begun()
    server = node_id(Role.SERVER, 0)
    assert seats.ask(process(2, 0, "server"), 0.0) == COMPLETE
    seats.may_return(server, yes=True)
    assert not seats.lost(server, "killed", 1.0)
    assert (seats.asking(), seats.take(), seats.attempt(server)) == ([], [], 0)
    assert seats.verdict(server, "killed") == "killed; it had no standby"


def test_the_seat_of_a_worker_that_has_left_is_not_given_away() -> None:
    seats = begun()
    seats.left(SECOND)
    seats.left(SECOND)
    assert not seats.lost(SECOND, "its process is gone", 1.0)
    refused = "worker 1 has left this job, so no process can take the place"
    assert seats.ask(process(2, 1), 1.0) == refused
    assert seats.ask(process(3), 1.0) is None
    assert [node.uid for node, _, _ in seats.asking()] == ["worker3"]


def test_a_vacant_seat_that_is_given_up_is_neither_overdue_nor_taken() -> None:
    seats = begun()
    seats.lost(SECOND, "killed", 1.0)
    seats.left(SECOND)
    seats.ask(process(2), 2.0)
    assert (seats.overdue(1e9), seats.take()) == ([], [])


def test_nobody_waits_when_all_workers_have_left() -> None:
    seats = begun()
    for seat in (FIRST, SECOND):
        seats.left(seat)
    refused = "all workers have left this job, so no process can take the place"
    assert seats.ask(process(2), 1.0) == refused


def test_a_rank_that_the_job_does_not_have_is_refused() -> None:
    seats = begun()
    refused = seats.ask(process(2, 7), 1.0)
    assert refused is not None
    assert refused == "this job has 2 workers, so none has the rank 7"
    assert seats.asking() == []


def test_a_seat_that_is_not_there_welcomes_nobody() -> None:
    seats = begun()
    assert not seats.welcomed(99, 0)
    assert not seats.is_welcoming(99, 0)
    assert seats.attempt(99) == 0


# -- servers and their standbys -----------------------------------------------------------

SERVERS = [node_id(Role.SERVER, rank) for rank in (0, 1)]


def standby(number: int, rank: int) -> NodeInfo:
    """The process that stands by for the server with this rank."""
    return process(number, rank, "server")


def guarded(*ranks: int, wait_s: float = WAIT_S) -> Seats:
    """The seats of a worker and two servers; those with these ranks have standbys 20 and 21."""
    seats = Seats(wait_s)
    roster = (process(0, 0), process(8, 0, "server"), process(9, 1, "server"))
    seats.begin(roster, [standby(20 + rank, rank) for rank in ranks])
    return seats


@pytest.mark.parametrize("wait_s", [0.0, WAIT_S])
def test_a_standby_takes_the_seat_of_its_server_at_once(wait_s: float) -> None:
    seats = guarded(0, 1, wait_s=wait_s)
    assert seats.take() == []
    assert seats.lost(SERVERS[1], "killed", 1.0)
    taken = Succession(standby(21, 1), 1, process(9, 1, "server"), "killed")
    assert seats.take() == [taken]
    assert [seats.attempt(server) for server in SERVERS] == [0, 1]
    assert seats.is_welcoming(SERVERS[1], 1)
    assert seats.overdue(1e9) == []


def test_a_server_is_followed_although_it_never_said_that_it_may_return() -> None:
    seats = guarded(0)
    seats.may_return(SERVERS[0], yes=False)
    assert seats.lost(SERVERS[0], "killed", 1.0)
    assert seated(seats) == [(0, "server20", 1)]


def test_the_loss_of_a_server_without_a_standby_ends_the_job() -> None:
    seats = guarded(0)
    assert not seats.lost(SERVERS[1], "killed", 1.0)
    assert (seats.take(), seats.overdue(1e9)) == ([], [])
    assert seats.verdict(SERVERS[1], "killed") == "killed; it had no standby"


def test_the_end_of_a_job_tells_why_no_standby_has_taken_the_place() -> None:
    seats = guarded(0, 1)
    assert seats.verdict(SERVERS[0], "killed") == "killed"  # the job ends for another reason
    seats.dismiss(SERVERS[0])
    assert seats.verdict(SERVERS[0], "killed") == "killed; it had no standby any more"
    assert seats.offer(standby(30, 0)) is None
    assert len(seats.pairs()) == 1
    why = "killed; its new standby did not have its state yet"
    assert seats.verdict(SERVERS[0], "killed") == why
    seats.dismiss(SERVERS[1], for_good=True)
    why = "killed; it could not have a standby any more"
    assert seats.verdict(SERVERS[1], "killed") == why


def test_without_another_process_to_expect_a_verdict_is_the_reason_alone() -> None:
    seats = begun(wait_s=0.0, may_return=False)
    for node in (FIRST, node_id(Role.SERVER, 0)):
        assert not seats.lost(node, "killed", 1.0)
        assert seats.verdict(node, "killed") == "killed"


def test_each_standby_takes_the_seat_of_its_own_server_only() -> None:
    seats = guarded(1)
    assert not seats.lost(SERVERS[0], "killed", 1.0)
    assert (seats.take(), seats.standbys()) == ([], [standby(21, 1)])


def test_two_servers_that_are_lost_are_both_followed() -> None:
    seats = guarded(0, 1)
    for server in SERVERS:
        assert seats.lost(server, "killed", 1.0)
    assert seated(seats) == [(0, "server20", 1), (1, "server21", 1)]
    for server in SERVERS:
        assert seats.welcomed(server, 1)


def test_a_standby_that_is_dismissed_takes_no_seat() -> None:
    seats = guarded(0, 1)
    assert seats.dismiss(SERVERS[0]) == standby(20, 0)
    assert seats.dismiss(SERVERS[0]) is None
    assert seats.standbys() == [standby(21, 1)]
    assert not seats.lost(SERVERS[0], "killed", 1.0)
    assert seats.take() == []


@pytest.mark.parametrize("seat", [FIRST, 99, SERVERS[1]])
def test_where_no_process_stands_by_there_is_none_to_dismiss(seat: int) -> None:
    seats = guarded(0)
    assert seats.dismiss(seat) is None
    assert seats.standbys() == [standby(20, 0)]


def test_a_process_that_has_taken_a_seat_stands_by_no_longer() -> None:
    seats = guarded(0)
    seats.lost(SERVERS[0], "killed", 1.0)
    assert seats.standbys() == [standby(20, 0)]
    seats.take()
    assert (seats.standbys(), seats.dismiss(SERVERS[0])) == ([], None)


@pytest.mark.parametrize("is_welcomed", [False, True])
def test_the_job_ends_if_the_former_standby_is_lost_too(is_welcomed: bool) -> None:
    seats = guarded(0)
    seats.lost(SERVERS[0], "killed", 1.0)
    seats.take()
    if is_welcomed:
        assert seats.welcomed(SERVERS[0], 1)
    assert not seats.lost(SERVERS[0], "killed too", 2.0)
    assert seats.take() == []


def test_workers_that_ask_do_not_get_the_seats_of_servers() -> None:
    seats = guarded(0, 1)
    for number, rank in ((2, -1), (3, 0)):
        assert seats.ask(process(number, rank), 0.0) is None
    seats.lost(SERVERS[0], "killed", 1.0)
    assert seated(seats) == [(0, "server20", 1)]
    assert [node.uid for node, _, _ in seats.asking()] == ["worker2", "worker3"]
    assert not seats.lost(SERVERS[0], "killed too", 2.0)
    seats.lost(SERVERS[1], "killed", 3.0)
    seats.dismiss(SERVERS[1])
    assert seats.take() == []


def test_a_server_started_again_by_hand_is_told_that_its_standby_has_the_place() -> None:
    reason = guarded(0).ask(process(2, 0, "server"), 0.0)
    assert reason is not None and "needs PS_STANDS_BY=1" in reason


def test_a_standby_does_not_get_the_seat_of_a_worker() -> None:
    seats = guarded(0)
    seats.may_return(FIRST, yes=True)
    seats.lost(FIRST, "killed", 1.0)
    assert seats.take() == []
    assert seats.overdue(1.0 + WAIT_S)[0][0] == FIRST


def test_a_server_without_a_standby_has_one_again_when_that_has_its_state() -> None:
    seats = guarded(0)
    seats.dismiss(SERVERS[0])
    assert seats.offer(standby(30, 0)) is None
    assert seats.pairs() == [(process(8, 0, "server"), standby(30, 0))]
    assert (seats.pairs(), seats.spares()) == ([], [])
    assert seats.standby_of(SERVERS[0]) == standby(30, 0)
    assert seats.filled(SERVERS[0], "server20") is None  # that is late: it was dismissed
    assert not seats.has_ready_standby(SERVERS[0])
    assert seats.filled(SERVERS[0], "server30") == standby(30, 0)
    assert seats.filled(SERVERS[0], "server30") is None  # that was known
    assert seats.lost(SERVERS[0], "killed", 1.0)
    assert seated(seats) == [(0, "server30", 1)]


@pytest.mark.parametrize("is_being_filled", [False, True])
def test_the_job_ends_with_a_server_whose_next_standby_lacks_its_state(
    is_being_filled: bool,
) -> None:
    seats = guarded(0)
    seats.dismiss(SERVERS[0])
    seats.offer(standby(30, 0))
    if is_being_filled:
        seats.pairs()
    assert not seats.lost(SERVERS[0], "killed", 1.0)
    assert seats.take() == []


def test_a_spare_is_filled_when_the_standby_before_it_is_gone() -> None:
    seats = guarded(0)
    for number in (30, 31):
        assert seats.offer(standby(number, 0)) is None
    assert seats.pairs() == []
    assert seats.standbys() == [standby(20, 0), standby(30, 0), standby(31, 0)]
    for before, after in ((20, 30), (30, 31)):  # the second time, one that is being filled
        assert seats.dismiss(SERVERS[0]) == standby(before, 0)
        assert seats.pairs() == [(process(8, 0, "server"), standby(after, 0))]
    assert seats.spares() == []


def test_a_spare_is_filled_once_the_former_standby_is_welcomed_as_the_server() -> None:
    seats = guarded(0)
    seats.offer(standby(30, 0))
    seats.lost(SERVERS[0], "killed", 1.0)
    assert seated(seats) == [(0, "server20", 1)]
    assert seats.pairs() == []
    assert seats.welcomed(SERVERS[0], 1)
    assert seats.pairs() == [(standby(20, 0), standby(30, 0))]


def test_a_spare_that_is_lost_stands_by_for_no_server() -> None:
    seats = guarded(0)
    seats.offer(standby(30, 0))
    assert (seats.withdraw_offer("server30"), seats.withdraw_offer("server30")) == (True, False)
    seats.dismiss(SERVERS[0])
    assert (seats.pairs(), seats.standbys()) == ([], [])


def test_a_server_that_does_what_no_standby_repeats_takes_none_any_more() -> None:
    seats = guarded(0, 1)
    seats.offer(standby(30, 0))
    assert seats.dismiss(SERVERS[0], for_good=True) == standby(20, 0)
    assert seats.offer(standby(31, 0)) == "server 0 takes no standby"
    assert seats.offer(standby(32, 1)) is None
    seats.dismiss(SERVERS[1])
    assert seats.pairs() == [(process(9, 1, "server"), standby(32, 1))]


@pytest.mark.parametrize("rank", [1, 7])
def test_a_standby_of_a_server_that_has_no_seat_is_refused(rank: int) -> None:
    seats = guarded(0)
    assert seats.offer(standby(30, rank)) == f"server {rank} takes no standby"
    assert (seats.standby_of(SERVERS[1]), seats.filled(SERVERS[1], "server30")) == (None, None)


def test_a_server_that_is_still_vacant_at_the_next_scheduler_has_its_standby_to_follow() -> None:
    seats = guarded(0)
    seats.lost(SERVERS[0], "killed", 1.0)
    after = resumed(seats)
    assert seated(after) == [(0, "server20", 1)]


def test_the_seats_of_servers_do_not_count_as_those_of_workers() -> None:
    seats = guarded(0, 1)
    seats.left(FIRST)
    refused = "all workers have left this job, so no process can take the place"
    assert seats.ask(process(2), 1.0) == refused
    refused = "this job has 1 workers, so none has the rank 1"
    assert seats.ask(process(3, 1), 1.0) == refused


# -- in place of a lost scheduler ----------------------------------------------------------

SERVER = node_id(Role.SERVER, 0)
LATER = 1000.0


def resumed(seats: Seats) -> Seats:
    """The seats of the next scheduler, much later."""
    after = Seats(seats.wait_s)
    after.resume(seats.rows(), 2, LATER)
    assert after.rows() == seats.rows()
    return after


def with_standby() -> Seats:
    seats = Seats(WAIT_S)
    roster = (process(0, 0), process(1, 1), process(9, 0, "server"))
    seats.begin(roster, (process(19, 0, "server"),))
    for seat in (FIRST, SECOND):
        seats.may_return(seat, yes=True)
    return seats


def test_the_next_scheduler_waits_anew_for_a_process_in_a_vacant_seat() -> None:
    seats = begun()
    seats.lost(SECOND, "killed", 1.0)
    after = resumed(seats)
    assert after.overdue(LATER + WAIT_S - 1.0) == []
    assert after.overdue(LATER + WAIT_S)[0][1].startswith("killed; no process")
    assert after.ask(process(2), LATER) is None
    assert after.take() == [Succession(process(2, 1), 1, process(1, 1), "killed")]


def test_the_time_since_a_loss_is_that_of_the_last_one_or_counts_from_the_next_scheduler() -> None:
    seats = begun()
    welcoming(seats, now=1.0)
    assert seats.since_loss_s(SECOND, 4.0) == 3.0
    assert seats.lost(SECOND, "killed too", 6.0)
    assert seats.since_loss_s(SECOND, 6.5) == 0.5
    assert resumed(seats).since_loss_s(SECOND, LATER + 2.0) == 2.0
    assert seats.since_loss_s(node_id(Role.WORKER, 7), 9.0) == 0.0


def test_the_next_scheduler_still_welcomes_a_process_of_which_it_cannot_know_who_knows_it() -> None:
    seats = begun()
    welcoming(seats)
    after = resumed(seats)
    assert after.take() == []
    assert after.welcoming() == [Succession(process(2, 1), 1, None, "killed")]
    assert after.is_welcoming(SECOND, 1)
    assert after.welcomed(SECOND, 1)
    assert after.welcoming() == []


def test_the_next_scheduler_knows_who_may_return_and_how_often_a_step_has_failed() -> None:
    seats = begun()
    seats.may_return(FIRST, yes=False)
    for number in range(MOST_LOSSES - 1):
        lose_and_replace(seats, 10 + number)
    after = resumed(seats)
    assert not after.lost(FIRST, "killed", LATER)
    assert not after.lost(SECOND, "killed", LATER)
    assert "3 times in the same step" in after.verdict(SECOND, "killed")


def test_a_standby_takes_the_seat_of_its_server_from_the_next_scheduler() -> None:
    after = resumed(with_standby())
    assert after.standby_of(SERVER) == process(19, 0, "server")
    assert after.lost(SERVER, "killed", LATER)
    (succession,) = after.take()
    assert (succession.node.uid, succession.attempt) == ("server19", 1)
    assert resumed(after).standby_of(SERVER) is None


def test_a_standby_that_is_being_filled_is_not_taken_for_one_that_is_full() -> None:
    seats = with_standby()
    seats.dismiss(SERVER)
    assert seats.offer(process(20, 0, "server")) is None
    assert len(seats.pairs()) == 1
    after = resumed(seats)
    assert after.standby_of(SERVER) == process(20, 0, "server")
    assert not resumed(seats).lost(SERVER, "killed", LATER)
    assert after.filled(SERVER, "server20") == process(20, 0, "server")
    assert resumed(after).lost(SERVER, "killed", LATER)


def test_a_server_that_takes_no_standby_takes_none_from_the_next_scheduler() -> None:
    seats = with_standby()
    seats.dismiss(SERVER, for_good=True)
    refused = resumed(seats).offer(process(20, 0, "server"))
    assert refused == "server 0 takes no standby"


def test_a_rank_that_the_job_does_not_have_is_refused_by_the_next_scheduler() -> None:
    refused = resumed(begun()).ask(process(2, 7), LATER)
    assert refused == "this job has 2 workers, so none has the rank 7"
