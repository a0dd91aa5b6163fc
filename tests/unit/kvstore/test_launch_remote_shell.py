"""How ssh and rsync are called, and what their words are turned into."""

from __future__ import annotations

import shlex

import pytest

from kvstore.launch.hosts import Host
from kvstore.launch.remote_shell import refusal, rsync_argv, ssh_argv

HOST = Host("node1", 2222, "ada")


def test_what_runs_there_is_one_word_that_a_shell_takes_apart_as_it_was() -> None:
    words = ["/a b/python", "-c", 'print("it\'s $HOME")']
    argv = ssh_argv(HOST, ["-F", "my config"], words)
    assert shlex.split(argv[-1]) == words
    assert argv[-5:-1] == ["-l", "ada", "--", "node1"]
    assert argv[argv.index("-p") + 1] == "2222"


def test_nobody_is_asked_and_the_users_options_come_before_ours() -> None:
    argv = ssh_argv(HOST, ["-o", "ConnectTimeout=3"], ["true"])
    assert argv.index("BatchMode=yes") < argv.index("ConnectTimeout=3")
    assert argv.index("ConnectTimeout=3") < argv.index("ConnectTimeout=10")


def test_rsync_gets_ssh_with_the_same_options() -> None:
    argv = rsync_argv(HOST, "/from here", "/to there/", ["-F", "my config"])
    assert argv[-3:] == ["--", "/from here/", "ada@node1:/to there/"]
    ssh = shlex.split(argv[argv.index("-e") + 1])
    assert ssh[0] == "ssh" and "my config" in ssh and "BatchMode=yes" in ssh
    assert rsync_argv(Host("fd00::7"), "/a", "/", [])[-1] == "[fd00::7]:/"


# As OpenSSH 9.2 says them.
@pytest.mark.parametrize(
    ("line", "meaning"),
    [
        ("ada@node1: Permission denied (publickey,password).", "without a password"),
        ("Host key verification failed.", "log in once by hand (ssh node1)"),
        ("ssh: Could not resolve hostname node1: Name or service not known", "no host of this"),
        ("ssh: connect to host node1 port 22: Connection refused", "no ssh server listens"),
        ("ssh: connect to host node1 port 22: Connection timed out", "does not answer"),
        ("ssh: connect to host node1 port 22: No route to host", "there is no route to node1"),
        ("kex_exchange_identification: read: Connection reset", "kex_exchange_identification"),
    ],
)
def test_what_ssh_complains_of_is_said_in_a_sentence(line: str, meaning: str) -> None:
    sentence = refusal(HOST, ["Warning: added to known hosts", line, ""], 255, "python3")
    assert meaning in sentence
    assert "node1" in sentence
    assert "\n" not in sentence


def test_a_python_that_is_missing_is_named() -> None:
    sentence = refusal(HOST, ["sh: 1: /p: not found"], 127, "/p")
    assert sentence == "there is no /p on node1: name its Python with --python"


def test_silence_is_said_too() -> None:
    assert refusal(HOST, [], 1, "p") == "node1 closed the connection without a word (exit code 1)"
