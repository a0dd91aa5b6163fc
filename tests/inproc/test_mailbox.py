"""Messages from worker to worker by ``send`` and ``recv``, over in-process clusters."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from cluster import LIMIT_S
from collective_groups import SMALL_CHUNKS, cluster_of, errors, groups, results, sit_together

from pslite import Communicator
from pslite.collective.mailbox import WINDOW_BYTES
from pslite.collective.sums import DTYPES
from pslite.errors import ClosedError, NodeLostError, UsageError
from pslite.protocol.mailbox import BOX_BYTES


@pytest.fixture(scope="module", params=["apart", "servers beside two workers"])
def three(request: pytest.FixtureRequest) -> Iterator[list[Communicator]]:
    """A group of three workers on two servers, for the tests that break nothing."""
    with cluster_of(3, 2, **SMALL_CHUNKS) as cluster:
        if request.param != "apart":
            sit_together(cluster)
        yield groups(cluster)


@pytest.mark.parametrize("shape", [(), (0,), (5,), (100, 7)])
@pytest.mark.parametrize("is_early", [True, False])
def test_an_array_arrives_as_it_was_sent(
    three: list[Communicator], shape: tuple[int, ...], is_early: bool
) -> None:
    array = np.random.default_rng(1).standard_normal(shape)
    wanted = three[2].recv(0, 5) if is_early else None
    sent = three[0].send(np.asarray(array), 2, 5)
    got = (wanted or three[2].recv(0, 5)).result(LIMIT_S)
    sent.result(LIMIT_S)
    assert (got.source, got.tag, got.dtype) == (0, 5, "float64")
    assert got.array.shape == shape
    np.testing.assert_array_equal(got.array, array)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_travels(three: list[Communicator], dtype: str) -> None:
    array = np.arange(9).astype(DTYPES[dtype])
    three[1].send(array, 0).result(LIMIT_S)
    got = three[0].recv(1).result(LIMIT_S)
    assert got.array.dtype == array.dtype
    np.testing.assert_array_equal(got.array, array)


def test_messages_of_one_sender_and_tag_stay_in_order(three: list[Communicator]) -> None:
    sent = [three[0].send(np.full(n * 40, n), 1, tag=n % 2) for n in range(20)]
    even = [three[1].recv(0, 0) for _ in range(10)]
    odd = [three[1].recv(None, 1) for _ in range(10)]
    assert [got.array[:1].tolist() for got in results(even)] == [
        [],
        *([n] for n in range(2, 20, 2)),
    ]
    assert [got.array[0] for got in results(odd)] == list(range(1, 20, 2))
    results(sent)


def test_a_message_of_any_sender_says_whose_it_is(three: list[Communicator]) -> None:
    wanted = [three[0].recv() for _ in range(3)]
    for source in (2, 1, 0):
        three[source].send(np.array(source), 0).result(LIMIT_S)
    assert [(got.source, int(got.array)) for got in results(wanted)] == [(2, 2), (1, 1), (0, 0)]


def test_a_message_fills_an_array(three: list[Communicator]) -> None:
    out = np.zeros((3, 50), np.float32)
    sent = three[1].send(np.full((3, 50), 7, np.float32), 2)
    assert three[2].recv(1, out=out).result(LIMIT_S).array is out
    assert set(out.ravel().tolist()) == {7.0}
    sent.result(LIMIT_S)
    three[1].send(np.zeros(4), 2)
    with pytest.raises(UsageError, match=r"shape \(4,\) and dtype float64, as was sent"):
        three[2].recv(1, out=out).result(LIMIT_S)


def test_ranks_are_those_of_the_group() -> None:
    with cluster_of(3, 2) as cluster:
        last, first = (Communicator(cluster.workers[rank], (2, 0)) for rank in (2, 0))
        last.send(np.array(5), 1).result(LIMIT_S)
        got = first.recv().result(LIMIT_S)
        assert (got.source, int(got.array)) == (0, 5)


def test_a_sender_waits_when_the_box_is_full_and_goes_on_when_it_is_emptied() -> None:
    with cluster_of(2, 1) as cluster:
        pair = groups(cluster)
        piece = np.zeros(4 << 20, np.uint8)
        count = (BOX_BYTES + 2 * WINDOW_BYTES) // piece.nbytes
        sent = [pair[0].send(piece + n, 1) for n in range(count)]
        room = BOX_BYTES // (piece.nbytes + 1)
        results(sent[:room])
        got = pair[1].recv(0).result(LIMIT_S)
        sent[room].result(LIMIT_S)
        assert not sent[-1].done()
        found = [got, *results([pair[1].recv(0) for _ in range(count - 1)])]
        assert [int(each.array[0]) for each in found] == list(range(count))
        results(sent)


def test_messages_outlive_the_goodbye_of_their_sender() -> None:
    with cluster_of(2, 1, **SMALL_CHUNKS) as cluster:
        pair = groups(cluster)
        pair[0].send(np.arange(500), 1)
        cluster.workers[0].leave().result(LIMIT_S)
        assert pair[1].recv(0).result(LIMIT_S).array.tolist() == list(range(500))
        for error in errors([pair[1].recv(0), pair[1].recv(), pair[1].send(np.zeros(3), 0)]):
            assert isinstance(error, NodeLostError)
            assert (error.role, error.rank) == ("worker", 0)


def test_a_lost_worker_ends_the_waits_for_its_messages() -> None:
    with cluster_of(3, 2, lost_after_s=0.1) as cluster:
        all_ = groups(cluster)
        wanted = all_[0].recv(1)
        cluster.kill(cluster.workers[1])
        (error,) = errors([wanted])
        assert isinstance(error, NodeLostError)
        assert (error.role, error.rank) == ("worker", 1)


def test_what_cannot_be_sent_or_wanted_is_refused_at_the_caller(three: list[Communicator]) -> None:
    group = three[0]
    refused: list[tuple[str, Callable[[], object]]] = [
        ("to must be a rank of the group, 0 to 2, got 3", lambda: group.send(np.zeros(1), 3)),
        ("source must be a rank of the group", lambda: group.recv(-1)),
        ("C-contiguous", lambda: group.send(np.zeros((2, 2))[:, 0], 1)),
        ("a tag must be a 64-bit integer", lambda: group.send(np.zeros(1), 1, tag=1 << 63)),
        ("read-only", lambda: group.recv(1, out=np.frombuffer(b"12345678"))),
    ]
    for text, call in refused:
        with pytest.raises(UsageError, match=text):
            call()


def test_a_closed_group_sends_nothing() -> None:
    with cluster_of(1, 1) as cluster:
        (group,) = groups(cluster)
        group.close()
        for call in (lambda: group.send(np.zeros(1), 0), lambda: group.recv(0)):
            with pytest.raises(ClosedError):
                call()
