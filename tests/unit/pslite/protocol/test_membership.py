"""How a cluster gathers: ranks, refusals, who is missing; and who is gone afterwards."""

from __future__ import annotations

import pytest

from pslite.ids import NodeInfo, Role
from pslite.protocol.membership import Gone, LossReports, Membership, Refusal, Rendezvous

VERSION = "1.0"


def node(role: str, number: int, rank: int = -1, host: str = "alpha") -> NodeInfo:
    """A registration; ``number`` tells the processes apart."""
    return NodeInfo(role, rank, f"{role}{number}", 100 + number, "", host, "kernel", 4000 + number)


def gathering(num_workers: int, num_servers: int) -> Rendezvous:
    rendezvous = Rendezvous(num_workers, num_servers, VERSION)
    rendezvous.begin(10.0)
    return rendezvous


def register(rendezvous: Rendezvous, *nodes: NodeInfo) -> list[Refusal | None]:
    return [rendezvous.register(each, 2, 1, VERSION) for each in nodes]


def ranks(rendezvous: Rendezvous) -> list[tuple[str, int, str]]:
    return [(each.role, each.rank, each.uid) for each in rendezvous.roster]


# -- ranks --------------------------------------------------------------------------------


def test_ranks_follow_the_order_of_registration() -> None:
    rendezvous = gathering(2, 1)
    register(rendezvous, node("worker", 2), node("server", 3), node("worker", 1))
    assert ranks(rendezvous) == [
        ("worker", 0, "worker2"),
        ("worker", 1, "worker1"),
        ("server", 0, "server3"),
    ]


def test_a_wanted_rank_is_given_and_others_take_what_is_free() -> None:
    rendezvous = gathering(2, 1)
    register(rendezvous, node("worker", 1), node("worker", 2, rank=0), node("server", 3, rank=0))
    assert ranks(rendezvous) == [
        ("worker", 0, "worker2"),
        ("worker", 1, "worker1"),
        ("server", 0, "server3"),
    ]


def test_host_names_never_decide_the_rank() -> None:
    # ps-lite sorted by host name, so ranks changed from run to run.
    orders = []
    for hosts in (("alpha", "beta"), ("beta", "alpha")):
        rendezvous = gathering(2, 1)
        register(rendezvous, *(node("worker", i, host=host) for i, host in enumerate(hosts)))
        register(rendezvous, node("server", 9))
        orders.append([uid for _, _, uid in ranks(rendezvous)])
    assert orders[0] == orders[1] == ["worker0", "worker1", "server9"]


def test_there_is_no_roster_until_all_are_there() -> None:
    rendezvous = gathering(2, 1)
    register(rendezvous, node("worker", 1), node("server", 2))
    assert (rendezvous.roster, rendezvous.missing()) == ((), ("1 of 2 workers",))
    assert rendezvous.present() == (
        "worker on alpha (pid 4001)",
        "server on alpha (pid 4002)",
    )
    assert [each.uid for each in rendezvous.registered] == ["worker1", "server2"]


def test_a_resent_registration_counts_once() -> None:
    rendezvous = gathering(2, 1)
    verdicts = register(rendezvous, node("worker", 1), node("worker", 1), node("server", 2))
    assert (verdicts, rendezvous.roster) == ([None, None, None], ())


def test_who_is_missing_is_said_in_words() -> None:
    rendezvous = gathering(2, 1)
    assert rendezvous.missing() == ("2 of 2 workers", "1 of 1 server")
    register(rendezvous, node("worker", 1), node("worker", 2), node("server", 3))
    assert (rendezvous.missing(), rendezvous.waited_s(12.5)) == ((), 2.5)


# -- standbys -----------------------------------------------------------------------------


def with_standbys(num_servers: int = 2) -> Rendezvous:
    """A cluster of one worker, and a standby of each server."""
    rendezvous = Rendezvous(1, num_servers, VERSION, standbys=1)
    rendezvous.begin(10.0)
    return rendezvous


def stand_by(rendezvous: Rendezvous, *nodes: NodeInfo) -> list[str | None]:
    """Register standbys; return why each is refused. No refusal may end the job."""
    verdicts = [rendezvous.register(each, 1, 2, VERSION, stands_by=True) for each in nodes]
    assert not any(verdict is not None and verdict.fatal for verdict in verdicts)
    return [verdict and verdict.reason for verdict in verdicts]


def gather(rendezvous: Rendezvous, *nodes: NodeInfo) -> None:
    for each in nodes:
        assert rendezvous.register(each, 1, 2, VERSION) is None


MEMBERS = node("worker", 1), node("server", 2), node("server", 3)
STANDBYS = node("server", 4, rank=1), node("server", 5, rank=0)


@pytest.mark.parametrize("is_last", [False, True])
def test_a_cluster_is_complete_with_its_standbys_and_they_are_not_in_the_roster(
    is_last: bool,
) -> None:
    rendezvous = with_standbys()
    gather(rendezvous, *MEMBERS[: 3 if is_last else 2])
    assert stand_by(rendezvous, STANDBYS[0]) == [None]
    assert rendezvous.roster == ()
    assert stand_by(rendezvous, STANDBYS[1]) == [None]
    if not is_last:
        assert rendezvous.roster == ()
        gather(rendezvous, MEMBERS[2])
    assert ranks(rendezvous) == [
        ("worker", 0, "worker1"),
        ("server", 0, "server2"),
        ("server", 1, "server3"),
    ]
    assert rendezvous.standbys == STANDBYS


def test_standbys_are_named_among_those_who_are_there_and_who_are_missing() -> None:
    rendezvous = with_standbys()
    missing = ("1 of 1 worker", "2 of 2 servers", "2 of 2 standbys")
    assert (rendezvous.missing(), rendezvous.present()) == (missing, ())
    gather(rendezvous, *MEMBERS)
    stand_by(rendezvous, STANDBYS[0])
    assert rendezvous.missing() == ("1 of 2 standbys",)
    assert rendezvous.present() == (
        "worker on alpha (pid 4001)",
        "server on alpha (pid 4002)",
        "server on alpha (pid 4003)",
        "standby of server 1 on alpha (pid 4004)",
    )
    stand_by(rendezvous, STANDBYS[1])
    assert rendezvous.missing() == ()


def test_one_missing_standby_of_one_is_said_in_the_singular() -> None:
    assert with_standbys(1).missing() == ("1 of 1 worker", "1 of 1 server", "1 of 1 standby")


def test_a_cluster_without_standbys_does_not_speak_of_them() -> None:
    rendezvous = gathering(2, 1)
    assert rendezvous.missing() == ("2 of 2 workers", "1 of 1 server")
    assert rendezvous.standbys == ()


def test_a_resent_registration_of_a_standby_counts_once() -> None:
    rendezvous = with_standbys()
    gather(rendezvous, *MEMBERS)
    assert stand_by(rendezvous, STANDBYS[0], STANDBYS[0]) == [None, None]
    assert (rendezvous.standbys, rendezvous.roster) == (STANDBYS[:1], ())


def test_a_standby_does_not_take_the_place_of_a_server_that_has_not_come() -> None:
    rendezvous = with_standbys()
    stand_by(rendezvous, *STANDBYS)
    gather(rendezvous, *MEMBERS)
    assert len(rendezvous.roster) == 3


RANKS = "DMLC_TASK_ID of a standby must be the rank of a server without one; got "


@pytest.mark.parametrize("rank", [-1, 2, 1])
def test_a_standby_without_the_rank_of_a_server_that_needs_one_is_refused(rank: int) -> None:
    rendezvous = with_standbys()
    stand_by(rendezvous, STANDBYS[0])
    assert stand_by(rendezvous, node("server", 9, rank=rank)) == [
        f"{RANKS}the standby of server {rank} on alpha (pid 4009)"
    ]
    assert rendezvous.standbys == STANDBYS[:1]


def test_one_standby_too_many_is_refused_and_the_others_go_on() -> None:
    rendezvous = with_standbys()
    stand_by(rendezvous, *STANDBYS)
    (reason,) = stand_by(rendezvous, node("server", 9, rank=0))
    assert reason is not None
    assert "no more than 2 standbys; the standby of server 0 on alpha (pid 4009)" in reason
    gather(rendezvous, *MEMBERS)
    assert len(rendezvous.roster) == 3


def test_a_job_without_standbys_refuses_one() -> None:
    rendezvous = gathering(2, 1)
    refusal = rendezvous.register(node("server", 9, rank=0), 2, 1, VERSION, stands_by=True)
    assert refusal is not None
    assert ("no more than 0 standbys" in refusal.reason, refusal.fatal) == (True, False)
    assert rendezvous.registered == ()


def test_a_standby_that_disagrees_about_the_job_is_refused() -> None:
    refusal = with_standbys().register(STANDBYS[0], 3, 2, VERSION, stands_by=True)
    assert refusal is not None
    assert "DMLC_NUM_WORKER=3" in refusal.reason


def test_a_standby_with_the_name_of_another_process_is_refused() -> None:
    rendezvous = with_standbys()
    gather(rendezvous, MEMBERS[1])
    twin = STANDBYS[0]._replace(uid=MEMBERS[1].uid)
    assert stand_by(rendezvous, twin) == ["another node has the same name"]


# -- refusals -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_workers", "num_servers", "version", "words"),
    [
        (3, 1, VERSION, ("DMLC_NUM_WORKER=3", "scheduler has 2", "pid 4001")),
        (2, 4, VERSION, ("DMLC_NUM_SERVER=4", "scheduler has 1", "pid 4001")),
        (2, 1, "0.9", ("version 0.9", "scheduler 1.0", "pid 4001")),
    ],
)
def test_nodes_that_disagree_about_the_job_make_it_impossible(
    num_workers: int, num_servers: int, version: str, words: tuple[str, ...]
) -> None:
    refusal = gathering(2, 1).register(node("worker", 1), num_workers, num_servers, version)
    assert refusal is not None
    assert refusal.fatal
    assert all(word in refusal.reason for word in words)


@pytest.mark.parametrize(
    ("late", "words"),
    [
        (node("worker", 9), "this job already has all its 2 workers"),
        (node("worker", 9, rank=0), "this job already has all its 2 workers"),
        (node("scheduler", 9), "this job already has a scheduler"),
        (node("server", 9, rank=1), "DMLC_TASK_ID=1 of the server on alpha is too high"),
    ],
)
def test_a_node_that_has_no_place_is_refused_and_the_others_go_on(
    late: NodeInfo, words: str
) -> None:
    rendezvous = gathering(2, 1)
    register(rendezvous, node("worker", 1), node("worker", 2))
    (refusal,) = register(rendezvous, late)
    assert refusal is not None
    assert (words in refusal.reason, refusal.fatal) == (True, False)
    register(rendezvous, node("server", 3))
    assert len(rendezvous.roster) == 3


@pytest.mark.parametrize("rank", [0, 1])
def test_two_nodes_that_want_one_rank_cannot_both_have_it(rank: int) -> None:
    rendezvous = gathering(2, 1)
    verdicts = register(rendezvous, node("worker", 1, rank), node("worker", 2, rank))
    reason = (
        f"two workers have DMLC_TASK_ID={rank} (pid 4001 on alpha, pid 4002 on alpha); "
        "give each its own number"
    )
    assert verdicts == [None, Refusal(reason, fatal=True)]


# -- afterwards ---------------------------------------------------------------------------

ROSTER = (node("scheduler", 0, 0), node("worker", 1, 0), node("worker", 2, 1), node("server", 3, 0))


def members() -> Membership:
    membership = Membership(Role.WORKER)
    membership.begin(ROSTER)
    return membership


def test_a_server_on_a_thread_of_a_worker_is_named_with_it() -> None:
    worker, server = node("worker", 2, 1), node("server", 3, 0)._replace(pid=4002)
    elsewhere = server._replace(machine="another kernel")
    membership = members()
    assert membership.worker_of(ROSTER[3]) is None
    for present, title in [
        (server, f"server 0 in the process of worker 1 (pid 4002 on {worker.host})"),
        (elsewhere, f"server 0 (pid 4002 on {worker.host})"),
    ]:
        membership.begin((*ROSTER[:3], present))
        assert membership.title(8) == membership.peer_title(present.uid) == title
        gone = membership.depart(8, left=False, reason="killed")
        assert gone is not None
        assert gone.sentence == f"{title} is lost: killed"
        membership.gone.clear()
    assert membership.worker_of(worker) is None


def test_processes_with_all_nodes_of_a_job_say_only_the_role() -> None:
    alone = tuple(each._replace(pid=1) for each in ROSTER)
    membership = Membership(Role.WORKER)
    membership.begin(alone)
    assert membership.worker_of(alone[3]) is None


def test_a_complete_cluster_is_in_epoch_one() -> None:
    membership = members()
    assert (membership.epoch, membership.live(Role.WORKER), membership.live(Role.SERVER)) == (
        1,
        (0, 1),
        (0,),
    )
    assert [membership.node(node_id) for node_id in (1, 9, 11, 8, 13)] == [*ROSTER, None]


def test_members_are_known_by_their_ids_and_by_the_vans_names() -> None:
    membership = members()
    assert membership.uids == {1: "scheduler0", 9: "worker1", 11: "worker2", 8: "server3"}
    assert [membership.node_ids.get(uid) for uid in ("server3", "server4")] == [8, None]


def test_everybody_has_a_name_for_people() -> None:
    before, membership = Membership(Role.WORKER), members()
    assert [membership.title(node_id) for node_id in (8, 13)] == [
        ROSTER[3].title,
        "worker (node 13)",
    ]
    assert (before.title(8), before.peer_title("server3")) == ("server (node 8)", "server3")
    assert [membership.peer_title(uid) for uid in ("server3", "x")] == [ROSTER[3].title, "x"]


def test_a_node_talks_to_those_of_other_roles_that_are_there() -> None:
    membership = members()
    assert Membership(Role.WORKER).neighbours() == []
    assert membership.neighbours() == [ROSTER[0], ROSTER[3]]
    membership.depart(1, left=False, reason="killed")
    assert membership.neighbours() == [ROSTER[3]]


def test_a_departure_is_noted_once_and_for_members_only() -> None:
    membership = members()
    first = membership.depart(9, left=False, reason="killed")
    again = membership.depart(9, left=True, reason="")
    stranger = membership.depart(99, left=True, reason="")
    assert (first, again, stranger) == (Gone(ROSTER[1], False, "killed"), None, None)
    assert membership.live(Role.WORKER) == (1,)
    assert membership.gone == {9: first}


def test_a_node_that_leaves_hears_of_losses_until_it_has_ended() -> None:
    membership = members()
    server = ROSTER[3]
    membership.depart(server.node_id, left=True, reason="")
    assert membership.is_leaving(server.node_id)
    assert (server in membership.neighbours(), server in membership.listeners()) == (False, True)
    assert not membership.has_gone(server.uid)
    membership.ended.add(server.node_id)
    assert not membership.is_leaving(server.node_id)
    assert server not in membership.listeners()
    assert membership.has_gone(server.uid)


def test_a_node_that_is_lost_hears_nothing_more() -> None:
    membership = members()
    server = ROSTER[3]
    membership.depart(server.node_id, left=False, reason="killed")
    assert not membership.is_leaving(server.node_id)
    assert server not in membership.listeners()
    assert membership.has_gone(server.uid)


@pytest.mark.parametrize(
    ("left", "reason", "sentence"),
    [
        (True, "", "worker 0 (pid 4001 on alpha) has left the job"),
        (False, "killed", "worker 0 (pid 4001 on alpha) is lost: killed"),
    ],
)
def test_a_departure_reads_as_a_sentence(left: bool, reason: str, sentence: str) -> None:
    assert Gone(ROSTER[1], left, reason).sentence == sentence


def test_an_error_about_a_worker_that_has_left_says_what_all_workers_must_do() -> None:
    left, lost = Gone(ROSTER[1], True, ""), Gone(ROSTER[1], False, "killed")
    assert str(left.error) == (
        "worker 0 (pid 4001 on alpha) has left the job; others wait for its next push or "
        "collective call, and all workers must make equally many (kv.shard and FeedForward.fit "
        "ensure it for pushes)"
    )
    assert str(lost.error) == lost.sentence
    server = Gone(ROSTER[3], True, "")
    assert str(server.error) == server.sentence


@pytest.mark.parametrize("change", [{"uid": "other"}, {"incarnation": 1}])
def test_two_nodes_cannot_go_by_one_name(change: dict[str, object]) -> None:
    rendezvous = gathering(2, 1)
    first = node("worker", 1)
    again = first._replace(**change)  # type: ignore[arg-type]
    taken, refused, same = register(rendezvous, first, again, first)
    assert (taken, same) == (None, None)
    assert refused == Refusal("another node has the same name")
    assert rendezvous.registered == (first,)


# -- what members say of others -----------------------------------------------------------


def test_a_members_word_about_another_ends_nobody() -> None:
    hearsay = LossReports()
    hearsay.note(9, 8, "no cable", "server 0", until=10.0)
    assert hearsay.ended(1000.0) == []


def test_the_end_of_who_has_lost_another_waits_until_that_may_have_come_true() -> None:
    hearsay = LossReports()
    hearsay.note(9, 8, "no cable", "server 0", until=10.0)
    assert hearsay.puts_off(9, "its process is gone", 5.0)
    assert hearsay.puts_off(9, "said twice", 6.0)
    assert hearsay.ended(9.9) == []
    reason = "its process is gone; it has lost server 0: no cable"
    assert hearsay.ended(10.0) == [(9, reason)]
    assert hearsay.ended(11.0) == []


def test_an_end_is_not_put_off_for_an_old_word_or_for_that_of_another() -> None:
    hearsay = LossReports()
    hearsay.note(9, 8, "no cable", "server 0", until=10.0)
    assert not hearsay.puts_off(9, "its process is gone", 10.0)
    assert not hearsay.puts_off(11, "its process is gone", 1.0)


def test_a_later_word_takes_the_place_of_an_earlier_one_until_its_speaker_ends() -> None:
    hearsay = LossReports()
    hearsay.note(9, 8, "first", "server 0", until=10.0)
    hearsay.note(9, 10, "second", "server 1", until=20.0)
    assert hearsay.puts_off(9, "", 15.0)
    hearsay.note(9, 8, "third", "server 0", until=1000.0)
    assert hearsay.ended(20.0) == [(9, "it has lost server 1: second")]
