"""The simulator itself: stopped processes, slow ones, and connections cut in one direction."""

from __future__ import annotations

import itertools
from collections.abc import Generator
from functools import partial
from typing import Any

import pytest

from pslite import Incoming, Postoffice
from pslite.errors import NodeLostError
from pslite.testing.simulator import SILENCE_S, HangError, Simulation

APP = 77


def ask_each_tenth(simulation: Simulation, answered: list[float], num: int = 100) -> Any:
    """A script that asks server 0 every 0.1 s and notes when the answers come."""

    def script(node: Postoffice) -> Generator[Any, Any, None]:
        yield node.ready
        for _ in range(num):
            yield node.request([8], APP, 1)
            answered.append(simulation.now)
            yield 0.1

    return script


def one_of_each(**settings: Any) -> Simulation:
    """One worker and one server, which answers at once."""

    def answer(incoming: Incoming) -> None:
        incoming.respond()

    def prepare(node: Postoffice) -> None:
        node.customers.add(APP, answer)

    return Simulation(1, 1, 1, prepare=prepare, **settings)


def gap(times: list[float]) -> float:
    """The longest time between two answers."""
    return max(after - before for before, after in itertools.pairwise(times))


def lines_about(simulation: Simulation, text: str) -> list[str]:
    return [line for line in simulation.lines if text in line]


@pytest.mark.parametrize("what", ["worker", "server"])
def test_a_stopped_process_does_nothing_and_then_goes_on(what: str) -> None:
    simulation, answered = one_of_each(), list[float]()
    node = simulation.workers[0] if what == "worker" else simulation.servers[0]
    simulation.at(2.0, partial(simulation.pause, node, 5.0))
    simulation.run(ask_each_tenth(simulation, answered))
    assert not [time for time in answered if 2.0 < time < 5.0]
    assert 3.0 <= gap(answered) < 3.2


def test_the_connections_of_a_stopped_process_stay_until_they_were_silent_for_long() -> None:
    for stopped_s, is_cut in ((SILENCE_S - 0.1, False), (SILENCE_S + 0.1, True)):
        simulation = one_of_each(verbose=1)
        pause = partial(simulation.pause, simulation.servers[0], 2.0 + stopped_s)
        simulation.at(2.0, pause)
        simulation.run(ask_each_tenth(simulation, []))
        assert bool(lines_about(simulation, "connection to server 0")) is is_cut


def test_a_process_that_is_stopped_for_long_counts_as_lost() -> None:
    simulation, answered = one_of_each(), list[float]()
    simulation.at(2.0, partial(simulation.pause, simulation.servers[0], 20.0))
    with pytest.raises(NodeLostError, match=r"server 0 .* is lost"):
        simulation.run(ask_each_tenth(simulation, answered))
    assert 2.0 + SILENCE_S + 5.0 <= simulation.now < 2.0 + SILENCE_S + 7.0


def test_a_cut_in_one_direction_loses_only_what_is_sent_that_way() -> None:
    simulation, answered = one_of_each(), list[float]()
    (worker,), (server,) = simulation.workers, simulation.servers
    arrived = list[float]()
    server.customers.add(APP + 1, lambda incoming: arrived.append(simulation.now))
    simulation.at(2.0, partial(simulation.cut_one_way, server, worker, 4.0))

    def script(node: Postoffice) -> Generator[Any, Any, None]:
        yield from ask_each_tenth(simulation, answered, 18)(node)
        yield 2.5 - simulation.now
        node.request([8], APP + 1, 1)
        yield node.request([8], APP, 1)
        answered.append(simulation.now)

    simulation.run(script)
    assert arrived and 2.5 <= arrived[0] < 2.6
    assert 4.0 <= answered[-1] < 5.0
    assert simulation.counts()["muted"] > 0


def test_a_long_cut_in_one_direction_ends_the_connection_at_both_ends() -> None:
    simulation = one_of_each(verbose=1)
    (worker,), (server,) = simulation.workers, simulation.servers
    simulation.at(2.0, partial(simulation.cut_one_way, worker, server, 10.0))
    simulation.run(ask_each_tenth(simulation, []))
    assert len(lines_about(simulation, "is gone")) >= 2


def test_a_slow_node_needs_time_for_each_message() -> None:
    quick, slow = list[float](), list[float]()
    for factor, answered in ((0.0, quick), (300.0, slow)):
        simulation = one_of_each()
        if factor:
            simulation.slow(simulation.servers[0], factor, 50.0)
        simulation.run(ask_each_tenth(simulation, answered))
    assert quick[-1] < 11.0
    assert slow[-1] > 15.0


def test_what_a_script_waits_for_comes_when_its_process_goes_on() -> None:
    simulation = one_of_each()
    woken = list[float]()

    def script(node: Postoffice) -> Generator[Any, Any, None]:
        yield node.ready
        yield 3.0
        woken.append(simulation.now)

    simulation.at(2.0, partial(simulation.pause, simulation.workers[0], 6.5))
    simulation.run(script)
    assert woken == [6.5]


def test_a_launcher_may_start_the_process_of_a_failed_script_again() -> None:
    simulation, failures = one_of_each(), list[tuple[int, str]]()

    def script(node: Postoffice) -> Generator[Any, Any, None]:
        yield 1.0
        raise NodeLostError("it failed", role="worker", rank=0)

    def start(rank: int, error: BaseException) -> bool:
        failures.append((rank, str(error)))
        return len(failures) == 1

    simulation.launcher = start
    with pytest.raises(HangError):  # it will start another one, but does not
        simulation.run(script, limit_s=5.0)
    with pytest.raises(NodeLostError, match="it failed"):
        simulation.run(script, limit_s=10.0)
    assert failures == [(0, "it failed")] * 2
