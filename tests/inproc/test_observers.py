"""Observers of a running cluster: what they learn, and that they disturb nobody."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from cluster import LIMIT_S, InprocCluster

import pslite
from kvstore.server import install
from kvstore.stores.dist.store import create_dist
from pslite.errors import ConfigError, DeadlineError, PSError
from pslite.node.links import REPEATED
from pslite.testing.inproc import InprocNetwork, InprocVan
from pslite.van.base import Received
from pslite.wire.base import Message
from pslite.wire.codec import Envelope, decode, encode, pack_value
from pslite.wire.messages import Beat, Refused, StatusQuestion, StatusReport, StatusSurvey
from pslite.wire.survey import NodeStatus

ADDRESS = "127.0.0.1:9091"


def network_of(cluster: InprocCluster) -> InprocNetwork:
    return cluster._network


def observer(cluster: InprocCluster, **config: Any) -> pslite.Observer:
    network = network_of(cluster)
    return pslite.Observer(
        ADDRESS, config=pslite.Config(**config), make_van=lambda uid: InprocVan(network, uid)
    )


def eventually(condition: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < give_up_at
        time.sleep(0.02)


@pytest.fixture
def cluster() -> Iterator[InprocCluster]:
    with InprocCluster(2, 1, prepare=install, job_id="job of the test") as cluster:
        yield cluster


def by_name(survey: pslite.Survey) -> dict[str, NodeStatus]:
    return {node.name: node for node in survey.nodes}


def reports_of(survey: pslite.Survey) -> dict[str, Any]:
    """Those of all nodes, which must have answered."""
    reports = {node.name: node.report for node in survey.nodes}
    assert None not in reports.values()
    return reports


def test_an_observer_learns_of_all_nodes(cluster: InprocCluster) -> None:
    with observer(cluster) as one:
        survey = one.ask(LIMIT_S)
    assert (survey.state, survey.job) == ("running", "job of the test")
    assert (survey.num_workers, survey.num_servers, survey.missing) == (2, 1, ())
    names = ["scheduler", "worker 0", "worker 1", "server 0"]
    assert [node.name for node in survey.nodes] == names
    for node in survey.nodes:
        assert node.state == "running"
        assert node.report is not None
        assert node.report.version == pslite.__version__
        assert node.report.sent_bytes > 0


def test_an_observer_leaves_no_trace(cluster: InprocCluster) -> None:
    scheduler = cluster.scheduler
    before = set(scheduler.links.byte_counts())
    for _ in range(3):
        with observer(cluster) as one:
            one.ask(LIMIT_S)
    assert set(scheduler.links.byte_counts()) == before
    for reached in [node.barrier(pslite.WORKER_GROUP) for node in cluster.workers]:
        reached.result(LIMIT_S)
    assert scheduler.membership.epoch == 1
    assert scheduler.links.dropped.keys() <= {REPEATED}


def test_a_job_that_nobody_asks_pays_nothing() -> None:
    with InprocCluster(1, 1, prepare=install, verbose=2, heartbeat_interval_s=0.05) as cluster:
        eventually(lambda: sum("Beat()" in line for line in cluster.lines) > 20)
        control: Any = cluster.scheduler.control
        assert control._surveyor._timer.due == math.inf
        assert not any("Status" in line for line in cluster.lines)
        with observer(cluster) as one:
            one.ask(LIMIT_S)
        assert sum("=> " in line and "StatusQuestion" in line for line in cluster.lines) == 2


def test_steps_and_waits_of_stores_are_told(cluster: InprocCluster) -> None:
    stores = [create_dist("dist_sync", "dist_sync", node=node) for node in cluster.workers]
    together = [threading.Thread(target=kv.init, args=("w", np.zeros(4))) for kv in stores]
    for thread in together:
        thread.start()
    for thread in together:
        thread.join()
    late = threading.Event()

    def train(rank: int) -> None:
        for step in range(3):
            if rank == 1 and step == 2:
                assert late.wait(LIMIT_S)
            stores[rank].pushpull("w", np.ones(4), out=np.empty(4))

    threads = [threading.Thread(target=train, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    with observer(cluster) as one:

        def waits_are_told() -> bool:
            found = reports_of(one.ask(LIMIT_S))
            return all(found[name].waits for name in ("worker 0", "server 0"))

        try:
            eventually(waits_are_told)
            reports = reports_of(one.ask(LIMIT_S))
        finally:
            late.set()
            for thread in threads:
                thread.join()

        def steps() -> list[int]:
            found = reports_of(one.ask(LIMIT_S))
            return [found[f"worker {rank}"].progress.steps for rank in range(2)]

        eventually(lambda: steps() == [3, 3])
    assert [reports[f"worker {rank}"].progress.steps for rank in range(2)] == [3, 2]
    assert reports["worker 0"].requests == 1
    assert (reports["server 0"].open_rounds, reports["server 0"].requests) == (1, 1)
    [wait] = reports["server 0"].waits
    assert wait[:3] == ("key 'w'", 3, ("worker 1",))
    [wait] = reports["worker 0"].waits
    assert "'w'" in wait.what
    assert reports["scheduler"].progress is None
    for kv in stores:
        kv.close()


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="no memfd here")
def test_bytes_in_shared_memory_are_told_though_no_connection_carries_them() -> None:
    with InprocCluster(1, 1, prepare=install) as cluster, observer(cluster) as one:
        kv = create_dist("dist_sync", "dist_sync", node=cluster.workers[0])
        values = np.ones(250_000, np.float32)
        kv.init("w", values)
        for _ in range(5):
            kv.pushpull("w", values, out=np.empty_like(values))

        def shared() -> list[int]:
            reports = reports_of(one.ask(LIMIT_S))
            return [reports[name].shared_bytes for name in ("worker 0", "server 0")]

        eventually(lambda: min(shared()) >= values.nbytes)
        assert reports_of(one.ask(LIMIT_S))["scheduler"].shared_bytes == 0
        kv.close()


def test_barriers_that_wait_are_told_with_who_is_missing(cluster: InprocCluster) -> None:
    reached = cluster.workers[1].barrier(pslite.WORKER_GROUP)
    with observer(cluster) as one:
        eventually(lambda: bool(reports_of(one.ask(LIMIT_S))["scheduler"].waits))
        [wait] = reports_of(one.ask(LIMIT_S))["scheduler"].waits
    assert wait[:3] == ("the barrier of all workers", 1, ("worker 0",))
    cluster.workers[0].barrier(pslite.WORKER_GROUP).result(LIMIT_S)
    reached.result(LIMIT_S)


def test_a_node_that_hangs_is_silent_and_holds_nobody_up(cluster: InprocCluster) -> None:
    hangs, go_on = threading.Event(), threading.Event()

    def hang() -> None:
        hangs.set()
        go_on.wait(2 * LIMIT_S)

    cluster.workers[1].call(hang)
    try:
        assert hangs.wait(LIMIT_S)
        with observer(cluster) as one:
            found = by_name(one.ask(LIMIT_S))  # raises when it is held up
    finally:
        go_on.set()
    assert {name: node.state for name, node in found.items()} == {
        "scheduler": "running",
        "worker 0": "running",
        "worker 1": "silent",
        "server 0": "running",
    }
    assert found["worker 1"].report is None
    assert found["worker 1"].silent_s >= 2.0


def test_a_job_that_gathers_says_who_has_come(tmp_path: Any) -> None:
    cluster = InprocCluster(2, 1, rendezvous_timeout_s=LIMIT_S)
    cluster.scheduler = cluster._start("scheduler", None)
    cluster.workers.append(cluster._start("worker", 1))
    try:
        with observer(cluster) as one:
            eventually(lambda: len(one.ask(LIMIT_S).nodes) == 2)
            survey = one.ask(LIMIT_S)
        assert survey.state == "gathering"
        assert survey.missing == ("1 of 2 workers", "1 of 1 server")
        assert [(node.name, node.state) for node in survey.nodes] == [
            ("scheduler", "running"),
            ("worker 1", "waiting"),
        ]
    finally:
        cluster.close(goodbye=False)


def test_who_has_left_and_who_is_lost_is_listed(cluster: InprocCluster) -> None:
    cluster.workers[0].close()
    with observer(cluster) as one:
        eventually(lambda: by_name(one.ask(LIMIT_S))["worker 0"].state == "left")
        survey = one.ask(LIMIT_S)
        assert survey.state == "running"
        cluster.kill(cluster.workers[1])
        eventually(lambda: one.ask(LIMIT_S).state == "failed")
        lost = by_name(one.ask(LIMIT_S))["worker 1"]
    assert lost.state == "lost"
    assert lost.reason


def test_another_version_is_told_in_a_sentence(
    cluster: InprocCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pslite.apps.observer.__version__", "0.0.1")
    with (
        observer(cluster) as one,
        pytest.raises(ConfigError, match=rf"version {pslite.__version__}, .* version 0\.0\.1"),
    ):
        one.ask(LIMIT_S)


def test_a_question_for_another_job_is_refused_by_its_id(cluster: InprocCluster) -> None:
    network = network_of(cluster)
    config = pslite.Config(root_uri="127.0.0.1", root_port=9091, job_id="another")
    with (
        pslite.Observer(config=config, make_van=lambda uid: InprocVan(network, uid)) as one,
        pytest.raises(ConfigError, match="does not belong to the job 'another'"),
    ):
        one.ask(LIMIT_S)


def test_silence_is_an_error_in_time() -> None:
    network = InprocNetwork()
    with pslite.Observer(
        ADDRESS, config=pslite.Config(), make_van=lambda uid: InprocVan(network, uid)
    ) as one:
        began = time.monotonic()
        with pytest.raises(DeadlineError, match=r"did not answer within 0\.3 s"):
            one.ask(0.3)
        assert time.monotonic() - began < 2.0


def test_the_end_of_the_job_is_an_error_that_says_so() -> None:
    cluster = InprocCluster(1, 1, prepare=install)
    with cluster, observer(cluster) as one:
        one.ask(LIMIT_S)
        cluster.kill(cluster.scheduler)
        with pytest.raises(DeadlineError, match="has ended"):
            one.ask(LIMIT_S)


@pytest.mark.parametrize("address", ["", "host", "host:", ":1", "host:0", "host:70000", "a b:x"])
def test_what_is_no_address_is_an_error_that_says_so(address: str) -> None:
    with pytest.raises(ConfigError, match="address as host:port"):
        pslite.Observer(address, config=pslite.Config())


def test_without_an_address_the_settings_must_have_one() -> None:
    with pytest.raises(ConfigError, match="DMLC_PS_ROOT_URI"):
        pslite.Observer(config=pslite.Config())


# -- hostile ones -------------------------------------------------------------------------


class Stranger:
    """Sends whatever a test wants to the scheduler."""

    def __init__(self, cluster: InprocCluster) -> None:
        self.van = InprocVan(network_of(cluster), "O1")
        self.van.connect("scheduler", f"tcp://{ADDRESS}")

    def send(self, message: Message, sequence: int = 0, job: str = "") -> None:
        envelope = Envelope(job, 0, 5, 0, sequence, 0, (), (), message)
        self.van.send("scheduler", [encode(envelope)])

    def answer(self) -> Message:
        give_up_at = time.monotonic() + LIMIT_S
        while time.monotonic() < give_up_at:
            for event in self.van.poll(0.1):
                if isinstance(event, Received):
                    return decode(event.frames).message
        raise AssertionError("no answer")


@pytest.fixture
def stranger(cluster: InprocCluster) -> Iterator[Stranger]:
    stranger = Stranger(cluster)
    yield stranger
    stranger.van.close()


def test_many_questions_ask_the_nodes_seldom(cluster: InprocCluster, stranger: Stranger) -> None:
    began = time.monotonic()
    for number in range(2000):
        stranger.send(StatusQuestion(number, pslite.__version__))
    assert isinstance(stranger.answer(), StatusSurvey)
    with observer(cluster) as one:
        one.ask(LIMIT_S)
    control: Any = cluster.scheduler.control
    asked = control._surveyor._surveys._number
    assert asked <= 2 + (time.monotonic() - began) / 0.5


def test_reports_of_strangers_are_not_heard(cluster: InprocCluster, stranger: Stranger) -> None:
    stranger.send(StatusReport(1, b"\xc1"))
    stranger.send(Beat())
    stranger.send(StatusQuestion(3, "x" * 5000))
    refused = stranger.answer()
    assert isinstance(refused, Refused)
    assert len(refused.error) < 300


def test_a_report_that_makes_no_sense_is_ignored(cluster: InprocCluster) -> None:
    worker = cluster.workers[0]
    wrong = [b"\xc1", pack_value([1, 2]), pack_value("x" * 300_000)]

    def send() -> None:
        for body in wrong:
            worker.send(1, StatusReport(1, body))

    worker.call(send)
    with observer(cluster) as one:
        assert one.ask(LIMIT_S).state == "running"
    eventually(lambda: any("invalid message from worker 0" in line for line in cluster.lines))


def test_a_numbered_question_of_a_stranger_begins_no_conversation(
    cluster: InprocCluster, stranger: Stranger
) -> None:
    for number in range(100):
        stranger.send(StatusQuestion(number, pslite.__version__), sequence=number + 1)
    assert isinstance(stranger.answer(), StatusSurvey)
    assert "O1" not in cluster.scheduler.links.byte_counts()


@pytest.mark.parametrize(
    "answer",
    [
        StatusSurvey(1, b"\xc1"),
        StatusSurvey(1, pack_value([])),
        StatusSurvey(1, pack_value(["\x1b[2J"] * 8)),
        Refused("Whatever", "a\x1b[2J" * 1000),
    ],
)
def test_a_scheduler_that_answers_rubbish_is_an_error(answer: Message) -> None:
    network = InprocNetwork()
    van = InprocVan(network, "scheduler")
    van.bind("127.0.0.1", 9091)
    with pslite.Observer(
        ADDRESS, config=pslite.Config(), make_van=lambda uid: InprocVan(network, uid)
    ) as one:

        def reply() -> None:
            while True:
                for event in van.poll(0.1):
                    if isinstance(event, Received):
                        envelope = Envelope("", 0, 1, 0, 0, 0, (), (), answer)
                        van.send(event.peer, [encode(envelope)])
                        return

        thread = threading.Thread(target=reply)
        thread.start()
        with pytest.raises(PSError) as caught:
            one.ask(LIMIT_S)
        thread.join()
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 600
    van.close()
