"""Members that lie: they know the key and are in the roster, and end nobody but themselves."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
from cluster import LIMIT_S, InprocCluster

import pslite
from kvstore.protocol.requests import DIRECTORY_APP, STORE_APP, DirectoryCall, StoreCall, pack
from kvstore.server import app, install
from kvstore.stores.dist.store import create_dist
from pslite import WORKER_GROUP
from pslite.errors import NodeLostError, UsageError
from pslite.ids import SCHEDULER_ID, NodeInfo
from pslite.node.message_filter import OUT_OF_ROLE
from pslite.protocol.barrier import MAX_OPEN
from pslite.wire.base import Message
from pslite.wire.messages import (
    Answer,
    BarrierEnter,
    BarrierLeave,
    BarrierWaits,
    Exchange,
    LongWait,
    Members,
    PartsFailed,
    Roster,
    RoundWaits,
    StaleEpoch,
    StatusQuestion,
    Waiting,
)
from pslite.wire.recovery import Recorded, RequestRecord, Seated, StandsBy, Vacant


@pytest.fixture
def cluster() -> Iterator[InprocCluster]:
    with InprocCluster(2, 2, prepare=install, lost_after_s=0.1) as cluster:
        yield cluster


def wait_until(condition: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < give_up_at
        time.sleep(0.005)


def ids(nodes: Sequence[pslite.Postoffice]) -> list[int]:
    return [node.info.node_id for node in nodes if node.info is not None]


def tell(liar: pslite.Postoffice, receivers: Sequence[int], message: Message) -> None:
    """Send as the node does."""

    def send() -> None:
        for receiver in receivers:
            liar.send(receiver, message)

    liar.io_queue.perform(send).result(LIMIT_S)


def rounds_go_on(cluster: InprocCluster) -> None:
    for _ in range(2):
        for future in [worker.barrier(WORKER_GROUP) for worker in cluster.workers]:
            future.result(LIMIT_S)
    assert [node.error for node in cluster.nodes] == [None] * 5
    assert all(node.membership.gone == {} for node in cluster.nodes)


@pytest.mark.parametrize("left", [0, 1], ids=["lost", "left"])
@pytest.mark.parametrize("role", ["server", "worker"])
def test_a_member_cannot_declare_another_one_lost_or_gone(
    cluster: InprocCluster, role: str, left: int
) -> None:
    liar = cluster.workers[1]
    victims = cluster.servers if role == "server" else cluster.workers
    news = Members(9, (ids(victims)[0],), (left,), ("says worker 1",))
    tell(liar, [SCHEDULER_ID, *ids(cluster.servers)], news)
    rounds_go_on(cluster)


def test_a_server_cannot_declare_a_worker_lost_or_gone(cluster: InprocCluster) -> None:
    liar, victim = cluster.servers[1], ids(cluster.workers)[0]
    for left in 0, 1:
        news = Members(9, (victim,), (left,), ("says server 1",))
        tell(liar, [SCHEDULER_ID, *ids(cluster.workers)], news)
    tell(liar, ids(cluster.workers), Vacant(victim, 0, "says server 1"))
    rounds_go_on(cluster)
    assert all(node.membership.vacant == {} for node in cluster.nodes)


def test_who_says_of_itself_that_it_has_lost_another_is_the_one_that_ends(
    cluster: InprocCluster,
) -> None:
    """As a worker does that a broken network has cut off from one server."""
    teller, server = cluster.workers[1], ids(cluster.servers)[0]
    cluster._killed = True
    teller_id = ids([teller])[0]
    tell(teller, [SCHEDULER_ID], Members(1, (server, teller_id), (0, 0), ("no cable", "")))
    others = [cluster.workers[0], *cluster.servers]
    wait_until(lambda: all(node.error is not None for node in others))
    for node in others:
        assert isinstance(node.error, NodeLostError)
        assert (node.error.role, node.error.rank) == ("worker", 1)
        assert "it has lost server 0" in str(node.error)
        assert "no cable" in str(node.error)


OF_THE_SCHEDULER: list[Message] = [
    Roster(9, (), ()),
    Waiting((), ("nobody",), 1.0),
    BarrierLeave(WORKER_GROUP, 1, "", ""),
    BarrierWaits(WORKER_GROUP, 1, (), 60.0),
    StatusQuestion(1, "1.0"),
    Seated((NodeInfo("worker", 0, "W1", 1, "", "host", "machine", 4711),), 1),
]
OF_SERVERS: list[Message] = [
    Answer(True, (1,), (1,), (1,), (0,)),
    PartsFailed(True, False, (1,), (1,), "UsageError", "no", "", -1),
    StaleEpoch(2, True, (1,), (1,)),
    RoundWaits(1, 1, (0,), 60.0),
    StandsBy((), True, 0),
    Recorded(1, 1),
    RequestRecord(1, True, 9, "W1", 1, 0, 1, 1, b""),
]
OF_WORKERS: list[Message] = [LongWait()]


def test_what_is_not_for_a_members_role_to_say_is_counted_and_dropped(
    cluster: InprocCluster,
) -> None:
    worker, server = cluster.workers[0], cluster.servers[0]
    for message in [*OF_THE_SCHEDULER, *OF_SERVERS]:
        tell(worker, ids([server]), message)
    for message in OF_THE_SCHEDULER:
        tell(server, ids([worker]), message)
    wait_until(lambda: server.links.dropped[OUT_OF_ROLE] >= len(OF_THE_SCHEDULER + OF_SERVERS))
    wait_until(lambda: worker.links.dropped[OUT_OF_ROLE] >= len(OF_THE_SCHEDULER))
    for message in OF_WORKERS:
        tell(server, [SCHEDULER_ID], message)
    dropped = cluster.scheduler.links.dropped
    wait_until(lambda: dropped[OUT_OF_ROLE] >= len(OF_WORKERS))
    cluster._killed = True  # nobody accepts them, so a goodbye would wait for that


def test_open_barriers_of_one_member_are_bounded_and_it_is_told(cluster: InprocCluster) -> None:
    liar, other = cluster.workers
    waiting = [liar.barrier(WORKER_GROUP) for _ in range(MAX_OPEN + 10)]
    for future in waiting[MAX_OPEN:]:
        with pytest.raises(UsageError, match=f"worker 0 .*waits in {MAX_OPEN} barriers"):
            future.result(LIMIT_S)
    for future in [*(other.barrier(WORKER_GROUP) for _ in range(MAX_OPEN)), *waiting[:MAX_OPEN]]:
        future.result(LIMIT_S)


def test_a_member_that_enters_barriers_out_of_turn_is_bounded_too(cluster: InprocCluster) -> None:
    liar = cluster.workers[0]
    barriers = cluster.scheduler.control._barriers  # type: ignore[attr-defined]
    for number in range(1, 3 * MAX_OPEN):
        tell(liar, [SCHEDULER_ID], BarrierEnter(WORKER_GROUP, 10 * number, 0.0))
    wait_until(liar.links.everything_accepted)
    assert len(barriers._open) == MAX_OPEN
    cluster._killed = True


def test_pushes_that_a_member_says_are_of_an_earlier_epoch_are_bounded_and_rounds_go_on(
    cluster: InprocCluster,
) -> None:
    stores = [create_dist("dist_sync", "dist_sync", node=node) for node in cluster.workers]
    for future in [store.init_async("w", np.arange(4.0)) for store in stores]:
        future.result(LIMIT_S)
    liar = cluster.workers[1]
    planes = {server.van.uid: server.traffic._server for server in cluster.servers}

    def lie() -> None:
        for uid, plane in planes.items():
            assert plane is not None
            for part in *plane._parts.units, 10**9:
                for first in range(1, 3000, 3):
                    rounds = (first, first + 1, first + 2)
                    message = Exchange(True, False, (part,) * 3, rounds, (8,) * 3)
                    liar.links.send(uid, message, [bytes(24)], 0, liar.clock())

    liar.io_queue.perform(lie).result(LIMIT_S)
    wait_until(lambda: liar.links.everything_accepted(list(planes)))
    noted = [sum(map(len, plane._stale.values())) for plane in planes.values() if plane]
    assert sorted(noted) == [0, 3], "three for the one part that there is, on its server"
    wrong = [line for line in cluster.lines if "invalid message from worker 1" in line]
    assert ["pushes of earlier epochs are open" in line for line in wrong] == [True, True]
    for future in [store.push_async("w", np.ones(4)) for store in stores]:
        future.result(LIMIT_S)
    assert stores[0].pull("w").tolist() == [2.0, 2.0, 2.0, 2.0]
    rounds_go_on(cluster)


LIES: dict[StoreCall, tuple[bytes, list[bytes]]] = {
    StoreCall.DELETE: (pack(1, [0, 1]), []),
    StoreCall.CLOSE: (pack(1, [0, 1]), []),
    StoreCall.WRITE: (pack([0], [7], True), [np.full(4, 666.0).tobytes()]),
    StoreCall.INIT: (pack(1, True, [[0, "w", True, 4, "<f8"]], [-1], [1]), [bytes(32)]),
    StoreCall.SET_OPTIMIZER: (pack(1, True, False, ["sgd", b"\x90"]), []),
}


@pytest.mark.parametrize("call", LIES, ids=lambda call: call.name)
def test_what_one_worker_does_for_all_no_other_can_ask_of_a_server(
    cluster: InprocCluster, call: StoreCall, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "GOODBYE_S", 0.1)
    stores = [create_dist("dist_sync", "dist_sync", node=node) for node in cluster.workers]
    for future in [store.init_async("w", np.arange(4.0)) for store in stores]:
        future.result(LIMIT_S)
    body, frames = LIES[call]
    servers = ids(cluster.servers)
    asked = cluster.workers[1].request(
        servers, STORE_APP, call, body, dict.fromkeys(servers, frames)
    )
    with pytest.raises(
        UsageError, match=f"{call.name} came from worker 1, .* worker 0, the lowest rank"
    ):
        asked.result(LIMIT_S)
    assert stores[0].pull("w").tolist() == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("call", "body"),
    [
        (DirectoryCall.INITIALISED, pack(1, ["w"], "UsageError", "gone")),
        (DirectoryCall.OPTIMIZER_IS_SET, pack(1, "sync", [], "", "")),
        (DirectoryCall.DONE_TOGETHER, pack(1, 1, ["w"], "", "")),
    ],
    ids=lambda part: part.name if isinstance(part, DirectoryCall) else "",
)
def test_what_the_deciding_rank_reports_no_other_can_report(
    cluster: InprocCluster, call: DirectoryCall, body: bytes
) -> None:
    stores = [create_dist("dist_sync", "dist_sync", node=node) for node in cluster.workers]
    for future in [store.init_async("w", np.arange(4.0)) for store in stores]:
        future.result(LIMIT_S)
    told = cluster.workers[1].request([SCHEDULER_ID], DIRECTORY_APP, call, body)
    with pytest.raises(UsageError, match=f"{call.name} came from worker 1, .* worker 0 "):
        told.result(LIMIT_S)
    assert stores[0].pull("w").tolist() == [0.0, 1.0, 2.0, 3.0]


def test_the_next_rank_does_it_once_the_first_has_left(cluster: InprocCluster) -> None:
    stores = [create_dist("dist_sync", "dist_sync", node=node) for node in cluster.workers]
    for future in [store.init_async("w", np.zeros(4)) for store in stores]:
        future.result(LIMIT_S)
    cluster.workers[0].close()
    stores[1].init("v", np.ones(2))
    assert stores[1].pull("v").tolist() == [1.0, 1.0]
    stores[1].delete(["w"])
    stores[1].close()
