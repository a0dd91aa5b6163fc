"""Lost and stalled: what connections, signs of life and time decide about a peer."""

from __future__ import annotations

import math

from pslite.config import Config
from pslite.protocol.liveness import (
    AWAITED_S,
    ENDED_S,
    PROCESS_GONE,
    VAIN_CONNECTIONS,
    Liveness,
    Lost,
    ReconnectLoops,
    Stalled,
)


def watching(*peers: str, fatal_after_s: float = 0.0) -> Liveness:
    """Lost 5 s after the connection, reported after 60 s of silence; watched since 0."""
    liveness = Liveness(5.0, 60.0, fatal_after_s)
    for peer in peers:
        liveness.watch(peer, 0.0)
    return liveness


def test_a_peer_whose_connection_stays_away_is_lost_once() -> None:
    liveness = watching("w0", "w1")
    liveness.disconnected("w0", 10.0)
    verdicts = [liveness.tick(now) for now in (14.9, 15.0, 16.0)]
    assert verdicts == [[], [Lost("w0", "its connection has been gone for 5.0 s")], []]


def test_a_lost_peer_is_noticed_with_the_default_settings() -> None:
    # Defect a of ps-lite: with its defaults nobody was ever dead.
    config = Config()
    liveness = Liveness(config.lost_after_s, config.stall_report_s, config.heartbeat_timeout_s)
    liveness.watch("w0", 0.0)
    liveness.disconnected("w0", 0.0)
    assert [type(verdict) for verdict in liveness.tick(config.lost_after_s)] == [Lost]


def test_a_connection_that_comes_back_in_time_is_forgiven() -> None:
    liveness = watching("w0")
    liveness.disconnected("w0", 0.0)
    liveness.connected("w0")
    assert (liveness.tick(20.0), liveness.suspects()) == ([], [])


def test_attempts_to_connect_that_are_answered_buy_time_and_not_for_ever() -> None:
    liveness = watching("w0", "w1")
    for peer in "w0", "w1":
        liveness.disconnected(peer, 0.0)
    liveness.answered("w0", 3.0)
    assert [lost.peer for lost in liveness.tick(7.9)] == ["w1"]
    for now in range(4, 34):
        liveness.answered("w0", float(now))
        assert liveness.tick(now + 0.9) == []
    liveness.answered("w0", 34.5)
    (lost,) = liveness.tick(5.0 + AWAITED_S)
    assert isinstance(lost, Lost)
    assert "has been gone for 35.0 s. Its address answered" in lost.reason


def test_answers_before_the_connection_was_gone_buy_no_time() -> None:
    liveness = watching("w0")
    liveness.answered("w0", 9.0)
    liveness.disconnected("w0", 10.0)
    assert liveness.tick(14.9) == []
    assert liveness.tick(15.0) == [Lost("w0", "its connection has been gone for 5.0 s")]


def test_who_has_answered_is_lost_when_the_answers_end() -> None:
    liveness = watching("w0")
    liveness.disconnected("w0", 0.0)
    liveness.answered("w0", 4.0)
    liveness.answered("nobody", 4.0)
    assert liveness.tick(8.9) == []
    (lost,) = liveness.tick(9.0)
    assert isinstance(lost, Lost) and "until 5.0 s ago" in lost.reason


def test_a_message_proves_the_connection() -> None:
    liveness = watching("w0")
    liveness.disconnected("w0", 0.0)
    liveness.heard("w0", 1.0)
    assert (liveness.tick(20.0), liveness.suspects()) == ([], [])


def test_a_second_report_of_the_same_loss_buys_no_time() -> None:
    liveness = watching("w0")
    liveness.disconnected("w0", 0.0)
    liveness.disconnected("w0", 4.0)
    assert [type(verdict) for verdict in liveness.tick(5.0)] == [Lost]


def test_a_silent_peer_is_reported_once_each_period_and_not_lost() -> None:
    liveness = watching("s0")
    verdicts = [liveness.tick(now) for now in (59.9, 60.0, 119.9, 120.0, 10_000.0)]
    assert verdicts == [
        [],
        [Stalled("s0", 60.0)],
        [],
        [Stalled("s0", 120.0)],
        [Stalled("s0", 10_000.0)],
    ]


def test_a_sign_of_life_starts_the_silence_anew() -> None:
    liveness = watching("s0")
    liveness.heard("s0", 50.0)
    assert [liveness.tick(now) for now in (109.9, 110.0)] == [[], [Stalled("s0", 60.0)]]


def test_silence_is_fatal_where_a_limit_is_set() -> None:
    liveness = watching("s0", fatal_after_s=30.0)
    verdicts = [liveness.tick(now) for now in (29.9, 30.0, 31.0)]
    assert verdicts == [[], [Lost("s0", "it is connected, but sent no heartbeat for 30 s")], []]


def test_a_dead_process_is_lost_at_once_and_once() -> None:
    liveness = watching("w0")
    first, second = liveness.died("w0", "its process is gone"), liveness.died("w0", "again")
    assert (first, second) == ([Lost("w0", "its process is gone")], [])
    assert liveness.tick(1000.0) == []


def test_suspects_are_the_watched_peers_without_a_connection() -> None:
    liveness = watching("w0", "w1", "w2")
    liveness.disconnected("w1", 0.0)
    liveness.disconnected("stranger", 0.0)
    assert liveness.suspects() == ["w1"]


def test_a_peer_that_said_goodbye_is_not_missed() -> None:
    liveness = watching("w0")
    liveness.disconnected("w0", 0.0)
    liveness.forget("w0")
    liveness.forget("w0")
    assert (liveness.tick(1000.0), liveness.suspects()) == ([], [])


def test_watching_twice_does_not_renew_a_peers_time() -> None:
    liveness = watching("w0")
    liveness.watch("w0", 50.0)
    assert liveness.tick(60.0) == [Stalled("w0", 60.0)]


def test_what_strangers_do_changes_nothing() -> None:
    liveness = watching()
    liveness.heard("x", 1.0)
    liveness.connected("x")
    liveness.disconnected("x", 1.0)
    assert liveness.tick(1000.0) == []


def test_a_node_that_did_not_listen_holds_nobodys_silence_against_them() -> None:
    liveness = Liveness(lost_after_s=5.0, stall_report_s=60.0, fatal_after_s=2.0)
    liveness.watch("S1", 0.0)
    liveness.forgive(4.0)
    assert (liveness.tick(4.0), liveness.tick(5.9)) == ([], [])
    assert [verdict.peer for verdict in liveness.tick(6.0)] == ["S1"]


def test_a_peer_that_was_never_reached_is_suspected_at_once_and_lost_in_the_end() -> None:
    liveness = Liveness(5.0, math.inf, 0.0, 60.0)
    liveness.watch("server", 10.0, connected=False)
    liveness.watch("other", 10.0)
    assert liveness.suspects() == ["server"]
    assert liveness.tick(69.0) == []
    assert liveness.tick(70.0) == [
        Lost("server", "it could not be connected within 60 s"),
    ]


def test_a_peer_that_was_reached_late_is_like_any_other() -> None:
    liveness = Liveness(5.0, math.inf, 0.0, 60.0)
    liveness.watch("server", 10.0, connected=False)
    liveness.connected("server")
    assert liveness.suspects() == []
    assert liveness.tick(1000.0) == []


def test_how_long_a_peer_has_been_silent_can_be_asked() -> None:
    liveness = watching("w0")
    liveness.heard("w0", 3.0)
    assert liveness.silent_s("w0", 10.0) == 7.0
    assert liveness.silent_s("w0", 2.0) == 0.0
    assert liveness.silent_s("stranger", 10.0) == 0.0


def test_a_dead_process_whose_children_keep_the_connection_is_lost_after_its_last_words() -> None:
    liveness = watching("w0")
    liveness.ended("w0", 10.0)
    assert liveness.tick(10.0) == []  # what it sent before may still be on its way
    liveness.heard("w0", 10.2)
    liveness.ended("w0", 10.2)
    liveness.ended("w0", 10.6)  # looked at again: the time goes on
    verdicts = [liveness.tick(10.2 + after) for after in (ENDED_S - 0.1, ENDED_S)]
    assert verdicts == [[], [Lost("w0", PROCESS_GONE)]]
    assert liveness.watched() == []


# -- connections that bring nothing to its end ----------------------------------------------


def end_in_vain(
    headway: ReconnectLoops, times: int, every_s: float, progress: int = 7
) -> list[str]:
    """Connections end one after the other; what was said of it."""
    said = [
        headway.disconnected(
            "w0",
            number * every_s,
            progress=progress,
            unaccepted_bytes=80_000_000,
            moved_bytes=2_500_000,
        )
        for number in range(times)
    ]
    return [each for each in said if each is not None]


def test_connections_that_keep_ending_before_a_message_is_through_are_told_with_their_speed() -> (
    None
):
    (sentence,) = end_in_vain(ReconnectLoops(), VAIN_CONNECTIONS + 1, every_s=5.0)
    for part in (
        "10 connections in a row",
        "25000000 bytes moved in 50 s (4.00 Mbit/s)",
        "80000000 bytes wait",
        "PS_CHUNK_BYTES",
    ):
        assert part in sentence


def test_a_burst_of_resets_is_forgiven() -> None:
    assert end_in_vain(ReconnectLoops(), 50, every_s=0.5) == []  # 25 s


def test_anything_that_gets_through_begins_the_count_anew() -> None:
    headway = ReconnectLoops()
    for progress in range(5):
        assert end_in_vain(headway, VAIN_CONNECTIONS, every_s=5.0, progress=progress) == []


def test_connections_that_end_while_nothing_waits_are_not_in_vain() -> None:
    headway = ReconnectLoops()
    for number in range(50):
        nothing = {"progress": 0, "unaccepted_bytes": 0, "moved_bytes": 10}
        assert headway.disconnected("w0", 5.0 * number, **nothing) is None
