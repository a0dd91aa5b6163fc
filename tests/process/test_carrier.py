"""The command that starts agents: what it says, who is awaited, and what ends the wait."""

from __future__ import annotations

import os
import selectors
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from kvstore.launch.agents.cluster import Cluster
from kvstore.launch.agents.cluster_job import Carrier
from kvstore.launch.agents.remote import AgentPlace
from kvstore.launch.agents.wire import AgentLink
from kvstore.launch.job.guardian import GuardianProcess
from kvstore.launch.job.places import Event, Note
from kvstore.launch.options import parse_arguments

LIMIT_S = 20.0

pytestmark = pytest.mark.process


class Watched:
    """In the place of the guardian."""

    def __init__(self) -> None:
        self.groups: list[int] = []
        self.commands: list[Sequence[str]] = []

    def watch(self, group: int) -> None:
        self.groups.append(group)

    def cancel_at_the_end(self, argv: Sequence[str]) -> None:
        self.commands.append(argv)


class OfShell(Cluster):
    """Jobs that a line of sh starts."""

    program = "sh"

    def __init__(self) -> None:
        super().__init__(parse_arguments(["-n", "1", "true"]), os.environ)
        self.asked: list[str] = []

    def fatal(self, line: str) -> str | None:
        self.asked.append(line)
        return "that is fatal" if "fatal" in line else None

    def poll(self) -> str:
        return "in the queue"

    def explain(self, lines: Sequence[str], code: int) -> str:
        return f"ended with {code} after {list(lines)}"


class Run:
    """A carrier whose command is a line of sh."""

    def __init__(self, script: str, members: int = 2, cluster: OfShell | None = None) -> None:
        self.places = [AgentPlace(f"worker {rank}") for rank in range(members)]
        self.guardian = Watched()
        self.began_s = time.monotonic()
        self.cluster = cluster or OfShell()
        guardian = cast(GuardianProcess, self.guardian)
        self.carrier = Carrier(self.cluster, ["sh", "-c", script], self.places, guardian)
        self.links: list[AgentLink] = []

    def until(self, happened: Callable[[], bool]) -> list[Event]:
        """Serve what the command says until then."""
        events: list[Event] = []
        until_s = time.monotonic() + LIMIT_S
        while not happened() and time.monotonic() < until_s:
            events += self.turn()
        assert happened()
        return events

    def turn(self) -> list[Event]:
        with selectors.PollSelector() as selector:
            self.carrier.adjust(selector, paused=False)
            ready = [key for key, _ in selector.select(0.02)]
        return [event for key in ready for event in key.data(0.0)] + self.carrier.sweep()

    def admit(self, greeting: dict[str, Any]) -> list[Event]:
        here, there = os.pipe()
        link = AgentLink(here, there, 0.0)
        self.links.append(link)
        return self.carrier.admit(link, greeting)

    def close(self) -> None:
        self.carrier.close()
        for link in self.links:
            link.close()


@pytest.fixture
def start() -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def start(script: str, members: int = 2, cluster: OfShell | None = None) -> Run:
        runs.append(Run(script, members, cluster))
        return runs[-1]

    yield start
    for run in runs:
        run.close()


Start = Callable[..., Run]


def texts(events: Sequence[Event]) -> list[str]:
    return [event.text for event in events if isinstance(event, Note)]


def test_an_early_end_is_explained_by_what_was_said(start: Start) -> None:
    run = start("echo out; echo err >&2; echo ------; exit 3")
    run.until(lambda: run.carrier.failure is not None)
    assert run.carrier.failure in (
        "ended with 3 after ['out', 'err']",
        "ended with 3 after ['err', 'out']",
    )


def test_what_was_shown_while_it_ran_still_explains_its_end(start: Start, tmp_path: Path) -> None:
    go = tmp_path / "go"
    os.mkfifo(go)
    run = start(f"echo refused; read line <'{go}'; exit 3")
    run.until(lambda: "refused" in run.carrier._said)
    assert texts(run.carrier.tick(run.began_s + 5.5)[0])[0] == "sh: refused"
    go.write_text("")
    run.until(lambda: run.carrier.failure is not None)
    assert run.carrier.failure == "ended with 3 after ['refused']"


def test_what_is_fatal_is_not_asked_again(start: Start) -> None:
    run = start("exec sleep 60")
    run.carrier.heard([b"fatal 1", b"fatal 2"])
    assert run.carrier.failure == "that is fatal"
    assert run.cluster.asked == ["fatal 1"]


def test_a_fatal_line_is_not_said_twice(start: Start) -> None:
    run = start("echo fatal; exec sleep 60")
    run.until(lambda: run.carrier.failure is not None)
    [roster] = texts(run.carrier.tick(run.began_s + 5.5)[0])
    assert roster.startswith("waiting for")


def test_a_fatal_line_ends_the_wait_while_the_command_runs(start: Start) -> None:
    run = start("echo fatal; exec sleep 60")
    run.until(lambda: run.carrier.failure == "that is fatal")


def test_who_cannot_become_an_agent_says_why(start: Start) -> None:
    run = start("""echo '0: KVSTORE-AGENT {"error": "too old", "host": "node1"}'; exec sleep 60""")
    run.until(lambda: run.carrier.failure == "node1: too old")


def test_the_roster_tells_who_is_there_and_what_the_queue_says(start: Start) -> None:
    run = start("echo hello; exec sleep 60", members=12)
    run.until(lambda: "hello" in run.carrier._said)
    assert run.admit({"rank": 1, "host": "node1"}) == []
    events, patience_s = run.carrier.tick(run.began_s + 5.5)
    names = ", ".join(f"worker {rank}" for rank in range(12) if rank != 1)
    shown = ", ".join(names.split(", ")[:8])
    assert texts(events) == [
        "sh: hello",
        f"waiting for {shown} and 3 more (1 of 12 are there, on node1): in the queue",
    ]
    assert patience_s is not None and 0 < patience_s <= 10.0
    assert run.carrier.tick(run.began_s + 6.0)[0] == []
    [again] = texts(run.carrier.tick(run.began_s + 16.0)[0])
    assert again.startswith("waiting for"), "what was said is not said again"


def test_time_is_up_when_nobody_has_come_for_so_long(start: Start) -> None:
    cluster = OfShell()
    cluster.connect_s = 20.0
    run = start("echo a hint; exec sleep 60", cluster=cluster)
    run.until(lambda: "a hint" in run.carrier._said)
    run.admit({"rank": 0, "host": "node1"})
    run.carrier.tick(time.monotonic() + 5.5)  # shows the hint
    assert run.carrier.tick(time.monotonic() + 6.0)[1] is not None
    assert run.carrier.failure is None
    run.carrier.tick(time.monotonic() + 20.0)
    assert run.carrier.failure == (
        "no answer from worker 1 within 20 s: in the queue; sh said:\n  a hint"
    )


def test_only_the_last_lines_are_kept_and_the_rest_is_shown_once(start: Start) -> None:
    run = start("seq 1000; echo the end; exec sleep 60")
    run.until(lambda: "the end" in run.carrier._said)
    shown = texts(run.carrier.tick(run.began_s + 5.5)[0])
    assert (shown[0], shown[-2]) == ("sh: 802", "sh: the end")
    assert len(texts(run.carrier.tick(run.began_s + 16.0)[0])) == 1


@pytest.mark.parametrize("rank", [-1, 2, None, "0"])
def test_a_rank_that_is_none_is_sent_away(start: Start, rank: object) -> None:
    run = start("exec sleep 60")
    [note] = texts(run.admit({"rank": rank, "host": "node1"}))
    assert note.startswith("node1: an agent with the rank")
    assert run.carrier.awaited() == ["worker 0", "worker 1"]


def test_a_second_agent_of_a_rank_is_sent_away(start: Start) -> None:
    run = start("exec sleep 60")
    assert run.admit({"rank": 0, "host": "node1"}) == []
    [note] = texts(run.admit({"rank": 0, "host": "node2"}))
    assert note == "node2: a second agent with the rank 0 came and was sent away"
    assert run.places[0].label == "node1"


def test_after_the_start_its_lines_and_its_end_are_notes(start: Start) -> None:
    run = start("read line; echo fatal now; exit 4")
    run.admit({"rank": 0, "host": "node1"})
    run.admit({"rank": 1, "host": "node2"})
    run.carrier.start([], {})
    events: list[Event] = []
    while len(texts(events)) < 2:
        events += run.turn()
    assert sorted(texts(events)) == ["sh ended with exit code 4", "sh: fatal now"]
    assert run.carrier.failure is None


def test_closing_ends_a_command_that_does_not_want_to(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.launch.agents.cluster_job._ENDING_S", 0.2)
    run = start("trap '' TERM; echo there; exec sleep 60")
    run.until(lambda: bool(run.carrier._said))
    run.carrier.close()
    [group] = run.guardian.groups
    with pytest.raises(ProcessLookupError):
        os.killpg(group, signal.SIG_DFL)


def test_where_ranks_are_wishes_an_agent_gets_a_free_one(start: Start) -> None:
    cluster = OfShell()
    cluster.only_wishes = True
    run = start("exec sleep 60", 3, cluster)
    assert run.admit({"rank": 1, "host": "node1"}) == []
    assert run.admit({"rank": 1, "host": "node2"}) == []
    assert run.admit({"rank": 7, "host": "node3"}) == []
    assert [place.label for place in run.places] == ["node2", "node1", "node3"]
    [note] = texts(run.admit({"rank": 2, "host": "node4"}))
    assert note == "node4: a second agent with the rank 2 came and was sent away"


def test_an_agent_that_comes_to_say_why_there_is_none_is_the_reason(start: Start) -> None:
    run = start("exec sleep 60")
    assert run.admit({"error": "no Python", "host": "node1"}) == []
    assert run.carrier.failure == "node1: no Python"


def test_what_is_no_news_is_kept_from_people_under_another_name(start: Start) -> None:
    class Yarn(OfShell):
        program = "yarn"

        def is_news(self, line: str) -> bool:
            return line != "INFO"

    run = start("echo INFO; echo ERROR; exec sleep 60", cluster=Yarn())
    run.until(lambda: "ERROR" in run.carrier._said)
    events, _ = run.carrier.tick(run.began_s + 5.5)
    assert texts(events)[0] == "yarn: ERROR"


def test_closing_waits_until_it_is_known_how_to_cancel(start: Start) -> None:
    heard: list[str] = []

    class Slow(OfShell):
        def is_news(self, line: str) -> bool:
            heard.append(line)
            return True

        def is_submitting(self) -> bool:
            return heard != ["asked", "submitted"]

    run = start("echo asked; sleep 0.5; echo submitted; exec sleep 60", cluster=Slow())
    run.until(lambda: heard == ["asked"])
    run.carrier.close()
    assert heard == ["asked", "submitted"]


def test_a_command_that_clears_up_is_asked_to_before_its_job_is_cancelled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("kvstore.launch.agents.cluster_job._ENDING_S", 0.5)
    mark = tmp_path / "cancelled"
    cancel = ["sh", "-c", f"echo >> {mark}"]

    class Tidy(OfShell):
        clears_up = True

        def cancel(self, line: str) -> list[str]:
            return cancel

    for script, is_cancelled in (("", False), ("trap '' TERM; ", True)):
        run = Run(f"{script}echo there; exec sleep 60", 1, Tidy())
        assert run.guardian.commands == [cancel], "before the command could be killed"
        run.until(lambda one=run: bool(one.carrier._said))
        run.close()
        assert mark.exists() == is_cancelled


def test_the_commands_name_is_in_front_of_what_it_says_once(start: Start) -> None:
    run = start("echo sh: queued; echo granted; exec sleep 60")
    run.until(lambda: len(run.carrier._said) == 2)
    said = texts(run.carrier.tick(run.began_s + 5.5)[0])
    assert said[:2] == ["sh: queued", "sh: granted"]
