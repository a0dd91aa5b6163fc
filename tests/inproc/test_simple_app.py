"""Requests of a number and some bytes between nodes, over in-process clusters."""

from __future__ import annotations

import threading

import pytest
from cluster import LIMIT_S, InprocCluster

import pslite
from pslite import ALL_GROUP, SCHEDULER_GROUP, SERVER_GROUP, WORKER_GROUP, SimpleApp, SimpleData
from pslite.apps.asking import MAX_BODY_BYTES
from pslite.errors import (
    ClosedError,
    DeadlineError,
    NodeLostError,
    RemoteError,
    UsageError,
)

APP = 7


def named(node: pslite.Postoffice) -> SimpleApp:
    """An app that answers with its node's name and what it was asked."""

    def answer(data: SimpleData) -> str:
        return f"{node.role.value} {node.rank}: {data.head} {data.text}"

    return SimpleApp(node, APP, answer)


def test_a_group_answers_with_each_members_own_words() -> None:
    with InprocCluster(1, 2) as cluster:
        for node in [*cluster.servers, cluster.scheduler]:
            named(node)
        asker = SimpleApp(cluster.workers[0], APP)
        answers = asker.wait(asker.request(5, "hello", SERVER_GROUP), LIMIT_S)
        assert answers == {8: b"server 0: 5 hello", 10: b"server 1: 5 hello"}
        both = SERVER_GROUP + SCHEDULER_GROUP
        everybody = asker.wait(asker.request(5, "x", both), LIMIT_S)
        assert [*everybody] == [8, 10, 1]
        one = asker.wait(asker.request(-1, b"\xf0\x9f\x90\x8d", 10), LIMIT_S)
        assert one == {10: b"server 1: -1 \xf0\x9f\x90\x8d"}


def test_the_scheduler_and_servers_can_ask_workers_too() -> None:
    with InprocCluster(2, 1) as cluster:
        for worker in cluster.workers:
            named(worker)
        for node in (cluster.scheduler, cluster.servers[0]):
            asker = SimpleApp(node, APP)
            answers = asker.wait(asker.request(1, "", WORKER_GROUP), LIMIT_S)
            assert answers == {9: b"worker 0: 1 ", 11: b"worker 1: 1 "}


def test_a_node_of_the_group_asks_itself_too() -> None:
    with InprocCluster(1, 1) as cluster:
        asker, *_ = [named(node) for node in cluster.nodes]
        answers = asker.wait(asker.request(0, "all", ALL_GROUP), LIMIT_S)
        assert sorted(answers) == [1, 8, 9]
        assert answers[9] == b"worker 0: 0 all"


def test_a_handle_sees_who_asks_and_may_answer_with_nothing() -> None:
    seen: list[SimpleData] = []
    with InprocCluster(1, 1) as cluster:
        SimpleApp(cluster.servers[0], APP, seen.append)
        asker = SimpleApp(cluster.workers[0], APP, customer=3)
        assert asker.wait(asker.request(2, b"\x00\xff", 8), LIMIT_S) == {8: b""}
    assert [data[:5] for data in seen] == [(2, b"\x00\xff", 9, APP, 3)]


def test_an_app_without_a_handle_answers_with_nothing() -> None:
    with InprocCluster(1, 1) as cluster:
        SimpleApp(cluster.servers[0], APP)
        asker = SimpleApp(cluster.workers[0], APP)
        assert asker.wait(asker.request(0, "anybody?", 8), LIMIT_S) == {8: b""}


def test_a_failing_handle_is_an_error_with_its_traceback_and_the_node_goes_on() -> None:
    def fragile(data: SimpleData) -> bytes:
        if data.head == 0:
            raise ZeroDivisionError("nothing to divide by")
        if data.head == 1:
            raise SystemExit(3)
        return b"fine"

    with InprocCluster(1, 2, pool_threads=1) as cluster:
        SimpleApp(cluster.servers[0], APP, fragile)
        SimpleApp(cluster.servers[1], APP, lambda data: b"fine")
        asker = SimpleApp(cluster.workers[0], APP)
        with pytest.raises(RemoteError, match=r"in fragile[\s\S]*nothing to divide by") as caught:
            asker.wait(asker.request(0, "", SERVER_GROUP), LIMIT_S)
        assert (caught.value.kind, caught.value.where) == ("ZeroDivisionError", "node 8")
        with pytest.raises(RemoteError, match="SystemExit: 3"):
            asker.wait(asker.request(1, "", SERVER_GROUP), LIMIT_S)
        assert asker.wait(asker.request(2, "", SERVER_GROUP), LIMIT_S) == {8: b"fine", 10: b"fine"}


def test_a_handle_that_returns_something_else_is_an_error_that_says_so() -> None:
    with InprocCluster(1, 1) as cluster:
        SimpleApp(cluster.servers[0], APP, lambda data: 5)  # type: ignore[arg-type,return-value]
        asker = SimpleApp(cluster.workers[0], APP)
        with pytest.raises(RemoteError, match="must return bytes, str or None"):
            asker.wait(asker.request(0, "", 8), LIMIT_S)


def test_a_request_waits_for_an_app_that_comes_later() -> None:
    with InprocCluster(1, 1) as cluster:
        asker = SimpleApp(cluster.workers[0], APP)
        request = asker.request(4, "early", SERVER_GROUP)
        with pytest.raises(DeadlineError, match=r"app 7 waits for server 0 \(pid"):
            asker.wait(request, 0.05)
        named(cluster.servers[0])
        assert asker.wait(request, LIMIT_S) == {8: b"server 0: 4 early"}


def test_time_is_up_names_only_those_who_have_not_answered() -> None:
    release = threading.Event()

    def slow(data: SimpleData) -> None:
        release.wait(LIMIT_S)

    with InprocCluster(1, 3) as cluster:
        for server, handle in zip(cluster.servers, [None, slow, None], strict=True):
            SimpleApp(server, APP, handle)
        asker = SimpleApp(cluster.workers[0], APP)
        request = asker.request(0, "", SERVER_GROUP)
        # Answers of the others to a later request come after those to the first.
        for fast in (8, 12):
            asker.wait(asker.request(0, "", fast), LIMIT_S)
        with pytest.raises(DeadlineError, match=r"waits for server 1 \(pid [^,]*$"):
            asker.wait(request, 0.05)
        release.set()
        asker.wait(request, LIMIT_S)


@pytest.mark.parametrize("receiver", [0, -8, 12, 13, 1 << 40])
def test_a_receiver_that_does_not_exist_is_refused(receiver: int) -> None:
    with InprocCluster(1, 1) as cluster:
        asker = SimpleApp(cluster.workers[0], APP)
        with pytest.raises(UsageError, match="must be a node or a group"):
            asker.request(0, "", receiver)


def test_nodes_without_a_connection_are_refused() -> None:
    with InprocCluster(2, 2) as cluster:
        asker = SimpleApp(cluster.workers[0], APP)
        for receiver in (11, WORKER_GROUP, ALL_GROUP):
            with pytest.raises(UsageError, match="cannot send to other workers"):
                asker.request(0, "", receiver)
        server = SimpleApp(cluster.servers[1], APP)
        with pytest.raises(UsageError, match="cannot send to other servers"):
            server.request(0, "", SERVER_GROUP)


def test_what_cannot_travel_is_refused_at_the_caller() -> None:
    with InprocCluster(1, 1) as cluster:
        asker = SimpleApp(cluster.workers[0], APP)
        with pytest.raises(UsageError, match="64-bit integer"):
            asker.request(1 << 63, "", 8)
        with pytest.raises(UsageError, match="64-bit integer"):
            asker.request("stop", "", 8)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="the body must be valid Unicode"):
            asker.request(0, "a\ud800", 8)
        with pytest.raises(UsageError, match="must have at most"):
            asker.request(0, bytes(MAX_BODY_BYTES + 1), 8)
        with pytest.raises(UsageError, match="customer 0"):
            SimpleApp(cluster.workers[0], APP + 1, lambda data: None, customer=1)


def test_an_answer_that_cannot_travel_is_an_error_at_the_asker() -> None:
    with InprocCluster(1, 1) as cluster:
        SimpleApp(cluster.servers[0], APP, lambda data: bytes(MAX_BODY_BYTES + data.head))
        asker = SimpleApp(cluster.workers[0], APP)
        with pytest.raises(UsageError, match="send a shorter answer"):
            asker.wait(asker.request(1, "", 8), LIMIT_S)
        largest = asker.wait(asker.request(0, "", 8), LIMIT_S)
        assert len(largest[8]) == MAX_BODY_BYTES


def test_two_apps_of_one_number_are_refused_and_closing_frees_the_number() -> None:
    with InprocCluster(1, 1) as cluster:
        first = SimpleApp(cluster.servers[0], APP, lambda data: b"first")
        second = SimpleApp(cluster.servers[0], APP, lambda data: b"second")
        with pytest.raises(UsageError, match="already has an app 7"):
            second.registered.result(LIMIT_S)
        assert "already has an app 7" in cluster.lines[-1]
        asker = SimpleApp(cluster.workers[0], APP)
        second.close()
        assert asker.wait(asker.request(0, "", 8), LIMIT_S) == {8: b"first"}
        first.close()
        SimpleApp(cluster.servers[0], APP, lambda data: b"third").registered.result(LIMIT_S)
        assert asker.wait(asker.request(0, "", 8), LIMIT_S) == {8: b"third"}


def test_a_handle_on_a_worker_that_waits_for_an_answer_is_told_not_to() -> None:
    with InprocCluster(1, 1) as cluster:
        named(cluster.servers[0])
        worker = cluster.workers[0]
        inner = SimpleApp(worker, APP)
        asked: list[pslite.Future[dict[int, bytes]]] = []

        def impatient(data: SimpleData) -> bytes:
            asked.append(inner.request(0, "", 8))
            return inner.wait(asked[0])[8]

        SimpleApp(worker, APP + 1, impatient)
        asker = SimpleApp(cluster.scheduler, APP + 1)
        with pytest.raises(UsageError, match="must not wait"):
            asker.wait(asker.request(0, "", 9), LIMIT_S)
        assert inner.wait(asked[0], LIMIT_S) == {8: b"server 0: 0 "}


def test_a_lost_server_ends_its_requests_with_its_name() -> None:
    with InprocCluster(1, 2, lost_after_s=0.1) as cluster:
        asker = SimpleApp(cluster.workers[0], APP)
        request = asker.request(0, "", 10)  # nobody there will ever answer
        cluster.kill(cluster.servers[1])
        with pytest.raises(NodeLostError, match="server 1") as caught:
            asker.wait(request, LIMIT_S)
        assert (caught.value.role, caught.value.rank) == ("server", 1)
        with pytest.raises(NodeLostError, match="server 1"):
            asker.wait(asker.request(0, "", 10), LIMIT_S)


def test_a_request_after_close_ends_at_once() -> None:
    with InprocCluster(1, 1) as cluster:
        asker = SimpleApp(cluster.workers[0], APP)
        cluster.workers[0].close()
        with pytest.raises(ClosedError):
            asker.wait(asker.request(0, "", 8), LIMIT_S)


def test_nothing_is_asked_before_the_cluster_is_complete() -> None:
    refused: list[BaseException] = []

    def too_early(node: pslite.Postoffice) -> None:
        try:
            SimpleApp(node, APP).request(0, "", SCHEDULER_GROUP)
        except UsageError as error:
            refused.append(error)

    with InprocCluster(1, 1, prepare=too_early):
        pass
    assert ["wait for node.ready" in str(error) for error in refused] == [True, True]
