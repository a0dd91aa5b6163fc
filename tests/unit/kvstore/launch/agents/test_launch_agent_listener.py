"""Who is let in: agents that know the job's key, and nobody else."""

from __future__ import annotations

import errno
import os
import selectors
import socket
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from kvstore.launch.agents import agent_listener, join
from kvstore.launch.agents.agent_listener import AgentListener
from kvstore.launch.agents.join import (
    PROGRAM_NAME,
    TICKET_NAME,
    AgentTicket,
    job_directory,
    write_ticket,
)
from kvstore.launch.agents.join_answer import (
    HELLO,
    NONCE_BYTES,
    Handshake,
    join_answer,
)
from kvstore.launch.agents.wire import GREET, AgentLink, frame
from kvstore.launch.options import LaunchError

KEY = "a-key-of-one-job"
OTHER = b"x" * NONCE_BYTES


class Door:
    """A listener on loopback, turned by hand; the time is what the test says."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = self.listener.getsockname()
        self.admitted: list[tuple[AgentLink, Mapping[str, Any]]] = []
        self.agent_listener = AgentListener(self.listener, KEY, self._admit)

    def _admit(self, link: AgentLink, greeting: Mapping[str, Any]) -> list[Any]:
        self.admitted.append((link, greeting))
        return []

    def turn(self, timeout_s: float = 5.0) -> None:
        """Until something has happened, and it has been served."""
        for key in self.ready(timeout_s):
            key.data(0.0)

    def ready(self, timeout_s: float = 5.0) -> list[selectors.SelectorKey]:
        with selectors.PollSelector() as selector:
            self.agent_listener.adjust(selector, paused=False)
            return [key for key, _ in selector.select(timeout_s)]

    def is_open(self) -> bool:
        with selectors.PollSelector() as selector:
            self.agent_listener.adjust(selector, paused=False)
            return self.listener.fileno() in selector.get_map()

    def visit(self) -> socket.socket:
        visitor = socket.create_connection(self.address, 5.0)
        self.turn()
        return visitor

    def close(self) -> None:
        for link, _ in self.admitted:
            link.close()
        self.agent_listener.close()


@pytest.fixture
def door() -> Iterator[Door]:
    door = Door()
    yield door
    door.close()


def received(visitor: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = visitor.recv(size - len(data))
        assert part, "closed"
        data += part
    return data


def is_closed(visitor: socket.socket) -> bool:
    try:
        while visitor.recv(4096):
            pass
    except ConnectionResetError:
        pass
    return True


NONCE = b"n" * NONCE_BYTES


def agreed(door: Door, visitor: socket.socket, key: str = KEY) -> Handshake:
    """Prove to the agent_listener that ``key`` is known."""
    head = received(visitor, len(HELLO) + NONCE_BYTES)
    assert head.startswith(HELLO)
    handshake = Handshake(key, head[len(HELLO) :], NONCE)
    visitor.sendall(NONCE + handshake.agent_proof())
    door.turn()
    return handshake


def agents_link(handshake: Handshake, visitor: socket.socket) -> AgentLink:
    fd = visitor.detach()
    seals = handshake.seal_to_agent(), handshake.seal_to_launcher()
    return AgentLink(fd, fd, 0.0, seals=seals)


def test_who_knows_the_key_and_greets_is_let_in(door: Door) -> None:
    with door.visit() as visitor:
        handshake = agreed(door, visitor)
        assert received(visitor, 32) == handshake.launcher_proof()
        link = agents_link(handshake, visitor)
        link.send(GREET, {"rank": 3})
        door.turn()
        [(other, greeting)] = door.admitted
        assert greeting == {"rank": 3}
        other.send("start", 1)
        selectors_wait(link.read_fd)
        assert link.receive(0.0) == [["start", 1]]
        link.close()


def selectors_wait(fd: int) -> None:
    with selectors.PollSelector() as selector:
        selector.register(fd, selectors.EVENT_READ)
        assert selector.select(5.0)


def test_a_proof_may_come_in_pieces(door: Door) -> None:
    with door.visit() as visitor:
        head = received(visitor, len(HELLO) + NONCE_BYTES)
        handshake = Handshake(KEY, head[len(HELLO) :], NONCE)
        words = NONCE + handshake.agent_proof()
        for part in (words[:1], words[1:40], words[40:]):
            visitor.sendall(part)
            door.turn()
        assert received(visitor, 32) == handshake.launcher_proof()


@pytest.mark.parametrize("words", [b"x" * 64, b"GET / HTTP/1.1\r\n" + b"h" * 100])
def test_who_does_not_know_the_key_is_closed_without_a_word(door: Door, words: bytes) -> None:
    with door.visit() as visitor:
        received(visitor, len(HELLO) + NONCE_BYTES)
        visitor.sendall(words)
        door.turn()
        assert is_closed(visitor)
    assert door.admitted == []


def test_another_jobs_agent_is_closed(door: Door) -> None:
    with door.visit() as visitor:
        agreed(door, visitor, key="a-key-of-another-job")
        assert is_closed(visitor)


def test_the_gates_own_proof_lets_nobody_in(door: Door) -> None:
    """Sent back, as by somebody who has two connections and knows no key."""
    with door.visit() as visitor:
        head = received(visitor, len(HELLO) + NONCE_BYTES)
        handshake = Handshake(KEY, head[len(HELLO) :], NONCE)
        visitor.sendall(NONCE + handshake.launcher_proof())
        door.turn()
        assert is_closed(visitor)


def test_who_greets_with_something_else_is_closed(door: Door) -> None:
    with door.visit() as visitor:
        handshake = agreed(door, visitor)
        received(visitor, 32)
        link = agents_link(handshake, visitor)
        link.send("Started", 1, 2)
        door.turn()
        with socket.socket(fileno=link.read_fd) as again:
            again.settimeout(5.0)
            assert is_closed(again)
    assert door.admitted == []


def test_who_says_nothing_is_closed_after_a_while(door: Door) -> None:
    with door.visit() as visitor:
        received(visitor, len(HELLO) + NONCE_BYTES)
        assert door.agent_listener.tick(1.0) == ([], agent_listener.VISIT_S - 1.0)
        assert door.agent_listener.tick(agent_listener.VISIT_S) == ([], None)
        assert is_closed(visitor)


def test_strangers_keep_nobody_out(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is room for two: the first stranger goes, and not who has proved who it is."""
    monkeypatch.setattr(agent_listener, "MOST_VISITORS", 2)
    with door.visit() as agent:
        handshake = agreed(door, agent)
        assert received(agent, 32) == handshake.launcher_proof()
        with door.visit() as stranger, door.visit() as another:
            assert received(another, len(HELLO)) == HELLO
            assert is_closed(stranger)
        link = agents_link(handshake, agent)
        link.send(GREET, {"rank": 0})
        while not door.admitted:
            door.turn()
        link.close()


def test_who_was_sent_away_in_the_same_turn_is_not_heard(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_listener, "MOST_VISITORS", 1)
    with door.visit() as first:
        first.sendall(b"x")
        with socket.create_connection(door.address, 5.0) as second:
            until = door.ready()
            while len(until) < 2:
                until = door.ready()
            for key in sorted(until, key=lambda key: key.data != door.agent_listener.let_in):
                assert key.data(0.0) == []
            assert received(second, len(HELLO)) == HELLO


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_without_files_it_pauses_and_says_so_once(
    door: Door, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refused() -> None:
        raise OSError(number, os.strerror(number))

    class Full:
        fileno, close, getsockname = (
            door.listener.fileno, door.listener.close, door.listener.getsockname,
        )  # fmt: skip
        accept = staticmethod(refused)

    monkeypatch.setattr(door.agent_listener, "_listener", Full())
    [note] = door.agent_listener.let_in(10.0)
    assert "raise 'ulimit -n'" in str(note)
    assert not door.is_open()
    assert door.agent_listener.tick(10.5) == ([], 0.5)
    door.agent_listener.tick(11.0)
    assert door.is_open()
    assert door.agent_listener.let_in(12.0) == []


def test_who_says_more_than_a_greeting_is_closed(door: Door) -> None:
    with door.visit() as visitor:
        handshake = agreed(door, visitor)
        received(visitor, 32)
        seal = handshake.seal_to_launcher()
        visitor.sendall(frame([GREET, {"rank": 0}], seal) + frame(["Note", "hello"], seal))
        door.turn()
        assert is_closed(visitor)
    assert door.admitted == []


def test_a_closed_gate_lets_nobody_in(door: Door) -> None:
    with door.visit() as visitor:
        door.agent_listener.close()
        assert is_closed(visitor)
        with pytest.raises(OSError):
            socket.create_connection(door.address, 0.2)


# -- the handshake -------------------------------------------------------------------------


def test_proofs_and_seals_are_of_one_connection_and_one_side() -> None:
    connections = [
        Handshake(KEY, NONCE, NONCE),
        Handshake("another", NONCE, NONCE),
        Handshake(KEY, OTHER, NONCE),
        Handshake(KEY, NONCE, OTHER),
    ]
    found = [one.agent_proof() for one in connections]
    found += [one.launcher_proof() for one in connections]
    found += [one.seal_to_agent().next(b"") for one in connections]
    found += [one.seal_to_launcher().next(b"") for one in connections]
    assert len(set(found)) == len(found)


# -- the ticket ----------------------------------------------------------------------------


def test_a_ticket_is_for_its_user_only(tmp_path: Path) -> None:
    directory = job_directory({"KVSTORE_JOB_DIR": str(tmp_path / "jobs")})
    assert directory.parent == tmp_path / "jobs" and not directory.exists()
    sent = AgentTicket(["10.0.0.1"], 4711, KEY, ["RANK"], 1, ["end", "$JOB"])
    write_ticket(directory, sent, "/work", {"hosts": "one\n"})
    assert directory.stat().st_mode & 0o777 == 0o700
    names = {path.name: path.stat().st_mode & 0o777 for path in directory.iterdir()}
    assert names == {TICKET_NAME: 0o600, PROGRAM_NAME: 0o600, "hosts": 0o600}
    assert AgentTicket.from_text((directory / TICKET_NAME).read_text()) == sent


def test_two_jobs_have_two_directories() -> None:
    assert job_directory({}) != job_directory({})
    assert job_directory({}).parent == Path("~/.kvstore/jobs").expanduser()


@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_a_directory_in_which_others_may_rename_is_refused(tmp_path: Path, mode: int) -> None:
    parent = tmp_path / "shared"
    parent.mkdir()
    parent.chmod(mode)
    for directory in (parent / "job", parent / "mine" / "job"):
        with pytest.raises(LaunchError, match=f"other users can rename files in {parent};"):
            write_ticket(directory, AgentTicket([], 1, KEY), "/", {})
        assert not directory.exists()
    parent.chmod(mode | 0o1000)  # as /tmp is
    write_ticket(parent / "job2", AgentTicket([], 1, KEY), "/", {})


def test_without_a_home_it_asks_for_a_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    with pytest.raises(LaunchError, match="cannot find a home directory"):
        job_directory({})


def test_a_directory_that_cannot_be_made_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LaunchError, match="set KVSTORE_JOB_DIR to a directory that all hosts"):
        write_ticket(tmp_path / "file" / "job", AgentTicket([], 1, KEY), "/", {})


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"port": 1}'])
def test_what_is_no_ticket_is_an_error(text: str) -> None:
    with pytest.raises(ValueError):
        AgentTicket.from_text(text)


# -- an agent that comes -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variables", "rank"), [({"A": "3"}, 2), ({"B": "1"}, 0), ({"A": "2", "B": "1"}, 1)]
)
def test_an_agent_has_its_rank_from_the_first_variable_that_is_set(
    variables: dict[str, str], rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert join.own_rank(AgentTicket([], 1, KEY, ["A", "B"], first_rank=1)) == rank


def test_an_agent_without_a_rank_says_what_it_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(join.NotEnlisted, match="none of A, B is set"):
        join.own_rank(AgentTicket([], 1, KEY, ["A", "B"]))
    monkeypatch.setenv("A", "undefined")  # as Grid Engine says outside of an array
    with pytest.raises(join.NotEnlisted, match="A must be a number, got 'undefined'"):
        join.own_rank(AgentTicket([], 1, KEY, ["A", "B"]))


def test_an_agent_tells_whom_it_tried_and_why_it_failed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        port = stranger.getsockname()[1]

        def answer() -> None:
            connected, _ = stranger.accept()
            with connected:
                connected.sendall(b"SSH-2.0-OpenSSH_9.2p1 and some more so that it is enough\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(join.NotEnlisted) as found:
            join.enlist(AgentTicket(["127.0.0.1", "127.0.0.2"], port, KEY), 0)
        thread.join(5.0)
    assert "127.0.0.1: the program that answers is not a launcher" in str(found.value)
    assert "127.0.0.2: Connection refused" in str(found.value)


def test_an_agent_that_was_sent_away_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(join, "_PAUSE_S", 0.001)
    with socket.create_server(("127.0.0.1", 0)) as busy:

        def answer() -> None:
            for words in (b"", HELLO, b"x" * 100):
                connected, _ = busy.accept()
                with connected:
                    connected.sendall(words)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(join.NotEnlisted, match="the program that answers is not a launcher"):
            join.enlist(AgentTicket(["127.0.0.1"], busy.getsockname()[1], KEY), 0)
        thread.join(5.0)


def test_an_agent_forgets_what_started_it() -> None:
    environ = {
        "OMPI_COMM_WORLD_RANK": "1",
        "PMI_FD": "7",
        "PMIX_RANK": "1",
        "MPI_LOCALRANKID": "0",
        "DMLC_NODE_HOST": "10.0.0.1",
        "DMLC_ROLE": "worker",
        "PS_JOB_KEY_FILE": "/x",
        "PATH": "/bin",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "DMLC_INTERFACE": "eth0",
    }
    join.forget_outside(environ)
    assert set(environ) == {"PATH", "OMPI_ALLOW_RUN_AS_ROOT", "DMLC_INTERFACE"}


def test_an_agent_does_not_trust_who_does_not_know_the_key() -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:

        def answer() -> None:
            connected, _ = stranger.accept()
            with connected:
                connected.sendall(HELLO + b"n" * NONCE_BYTES + b"p" * 32)
                connected.recv(4096)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(join.NotEnlisted, match="launcher of another job"):
            join.enlist(AgentTicket(["127.0.0.1"], stranger.getsockname()[1], KEY), 0)
        thread.join(5.0)


def test_who_cannot_become_an_agent_tells_why_at_the_gate(door: Door) -> None:
    """With the standard library alone, by what hosts without this package get."""
    host, port = door.address
    ticket = {"addresses": ["127.0.0.254", host], "port": port, "key": KEY}
    told: list[bool] = []
    thread = threading.Thread(target=lambda: told.append(join_answer(ticket, "no msgpack: \u00e4")))
    thread.start()
    while not door.admitted and thread.is_alive():
        door.turn(0.2)
    [(link, greeting)] = door.admitted
    link.close()
    thread.join(5.0)
    assert greeting == {"host": socket.gethostname(), "error": "no msgpack: \u00e4"}
    assert told == [True]


def test_a_join_answer_is_not_told_to_another_jobs_launcher(door: Door) -> None:
    host, port = door.address
    told: list[bool] = []
    ticket = {"addresses": [host], "port": port, "key": "a-key-of-another-job"}
    thread = threading.Thread(target=lambda: told.append(join_answer(ticket, "none of yours")))
    thread.start()
    while thread.is_alive():
        door.turn(0.1)
    assert told == [False]
    assert door.admitted == []
