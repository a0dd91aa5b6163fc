"""How ssh is called, and what is made of what it writes; the texts are those of OpenSSH 9.2."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys

import pytest

from kvstore.launch.backends.hosts import Host
from kvstore.launch.backends.rsync import sync_refusal
from kvstore.launch.backends.ssh_login import (
    check_launcher_args,
    login,
    no_program,
    refusal,
    shell_line,
    ssh_argv,
)
from kvstore.launch.options import LaunchError

PRINT_WORDS = "import json, sys; print(json.dumps(sys.argv[1:]))"
CHANGED_KEY = """\
@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@
@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @
@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@
It is also possible that a host key has just been changed.
Add correct host key in /home/ann/.ssh/known_hosts to get rid of this message.
Host key for [node1]:2222 has changed and you have requested strict checking.
Host key verification failed."""
OPEN_KEY = """\
Permissions 0644 for 'uk' are too open.
This private key will be ignored.
Load key "uk": bad permissions
ann@node1: Permission denied (publickey,password,keyboard-interactive)."""


def effective(argv: list[str]) -> dict[str, str]:
    """What ssh makes of a command: ``ssh -G`` prints its settings and connects to nothing."""
    output = subprocess.run([argv[0], "-G", *argv[1:]], capture_output=True, check=True, timeout=20)
    lines = output.stdout.decode().splitlines()
    return dict(reversed([line.split(" ", 1) for line in lines if " " in line]))


needs_ssh = pytest.mark.skipif(shutil.which("ssh") is None, reason="needs ssh")


def test_the_command_has_our_batch_mode_first_and_the_host_behind_all_options() -> None:
    host = Host("node1", port=2222, user="ann")
    argv = ssh_argv(host, ["-F", "my config"], ["python3", "-m", "kvstore.x"])
    assert argv[:9] == ["ssh", "-o", "BatchMode=yes", "-p", "2222", "-l", "ann", "-F", "my config"]
    assert argv[-4:] == ["-T", "--", "node1", "python3 -m kvstore.x"]
    assert ssh_argv(Host("node1"), [], ["true"])[:5] == [
        "ssh",
        "-o",
        "BatchMode=yes",
        "-o",
        "ConnectTimeout=10",
    ]


@needs_ssh
def test_ssh_understands_every_option() -> None:
    seen = effective(ssh_argv(Host("node1", port=2222, user="ann"), ["-F", "none"], ["true"]))
    assert seen["user"] == "ann"
    assert seen["port"] == "2222"
    assert seen["hostname"] == "node1"
    assert seen["batchmode"] == "yes"
    assert seen["connecttimeout"] == "10"
    assert seen["serveraliveinterval"] == "15"
    assert seen["serveralivecountmax"] == "4"
    assert seen["forwardagent"] == seen["forwardx11"] == "no"
    assert seen["clearallforwardings"] == "yes"
    assert seen["controlmaster"] == "false"
    assert seen["requesttty"] == "false"


@needs_ssh
def test_the_users_options_come_before_ours_but_passwords_stay_forbidden() -> None:
    words = [
        "-F",
        "none",
        "-o",
        "BatchMode=no",
        "-o",
        "ConnectTimeout=3",
        "-p",
        "99",
        "-lbob",
        "-vA",
    ]
    seen = effective(ssh_argv(Host("node1", user="ann"), words, ["true"]))
    assert seen["batchmode"] == "yes"
    assert seen["connecttimeout"] == "3"
    assert seen["loglevel"] == "DEBUG"
    assert seen["forwardagent"] == "yes"
    assert seen["port"] == "99"
    assert seen["user"] == "ann"  # for this host alone, so it counts more
    assert effective(ssh_argv(Host("node1"), words, ["true"]))["user"] == "bob"


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["node9"], "'node9' is not one"),
        (["-p", "22", "node9"], "'node9' is not one"),
        (["-p22", "node9"], "'node9' is not one"),
        (["--"], "'--' is not one"),
        (["-"], "'-' is not one"),
        ([""], "'' is not one"),
        (["-f"], "ssh's -f"),
        (["-vN"], "ssh's -N"),
        (["-t"], "ssh's -t"),
        (["-W", "a:1"], "ssh's -W"),
        (["-vp"], "ends with -vp"),
        (["-o"], "ends with -o"),
    ],
)
def test_further_options_that_cannot_be_meant_are_refused(words: list[str], complaint: str) -> None:
    with pytest.raises(LaunchError, match=complaint) as caught:
        ssh_argv(Host("node1"), words, ["true"])
    assert caught.value.exit_code == 2


def test_options_with_values_are_told_from_a_host() -> None:
    check_launcher_args(["-vvp", "2222", "-oUser=ann", "-i", "-key", "-J", "a,b", "-C", "-4"])


@pytest.mark.parametrize("shell", ["sh", "bash", "csh", "zsh", "fish"])
def test_a_login_shell_takes_the_line_apart_into_the_same_words(shell: str) -> None:
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"{shell} is not installed")
    words = [
        *("", " ", "a b", "'", '"', "it's", "a'b\"c", "\\", "a\\\\b\\n", "\\'", "!", "a!b", "!!"),
        *("$HOME", "`id`", "$(id)", "~", "~/x", "*", "?", "[a]", "{a,b}", "%self", "=ls", "A=b"),
        *("#", ";", "&", "|", "<", ">", "(", ")", "-x", "--", "^a^b", "100%", "n\u00f6de"),
    ]
    line = shell_line([sys.executable, "-c", PRINT_WORDS, *words])
    ended = subprocess.run([program, "-c", line], capture_output=True, check=True, timeout=20)
    assert json.loads(ended.stdout) == words


@pytest.mark.parametrize("word", ["a\nb", "a\rb", "\x1b[0m", "a\tb", "\0"])
def test_control_characters_never_reach_a_login_shell(word: str) -> None:
    with pytest.raises(ValueError, match="control characters"):
        shell_line(["echo", word])


def test_plain_words_stay_as_they_are() -> None:
    assert shell_line(["/usr/bin/python3.11", "-m", "kvstore.launch.x"]) == (
        "/usr/bin/python3.11 -m kvstore.launch.x"
    )


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        (
            "ann@node1: Permission denied (publickey,password).",
            "ssh-copy-id -p 2222 ann@node1",
        ),
        ("Received disconnect from 10.0.0.1: Too many authentication failures", "ssh-copy-id"),
        (OPEN_KEY, "chmod 600"),
        (
            "ssh: Could not resolve hostname node1: Name or service not known",
            "does not resolve: correct the name in the hosts file",
        ),
        ("Host key verification failed.", "run 'ssh -p 2222 ann@node1' once"),
        (
            "No ED25519 host key is known for [node1]:2222 and you have requested strict checking."
            "\r\nHost key verification failed.\r",
            "run 'ssh -p 2222 ann@node1' once",
        ),
        (CHANGED_KEY, "ssh-keygen -R"),
        ("ssh: connect to host node1 port 2222: Connection refused", "start sshd there"),
        ("ssh: connect to host node1 port 2222: Connection timed out", "did not answer within"),
        (
            "Connection timed out during banner exchange\nConnection to 10.0.0.1 port 22 timed out",
            "did not answer within",
        ),
        ("ssh: connect to host node1 port 22: No route to host", "a route leads there"),
        (
            "kex_exchange_identification: read: Connection reset by peer\n"
            "Connection reset by 127.0.0.1 port 22772",
            "MaxStartups",
        ),
        ("kex_exchange_identification: Connection closed by remote host", "MaxStartups"),
        ("Timeout, server node1 not responding.", "was lost while the job ran"),
        ("Connection to node1 closed by remote host.", "was lost while the job ran"),
        ("command-line: line 0: Bad configuration option: nonsense", "correct them"),
        (
            "Unable to negotiate with 10.0.0.1 port 22: no matching host key type found. "
            "Their offer: ssh-rsa",
            "update the older one",
        ),
        ("something new", "ended with exit code 255: something new; try by hand: ssh -o BatchMode"),
        ("", "ended with exit code 255 and said nothing"),
    ],
)
def test_a_refusal_is_one_sentence_that_says_what_to_do(text: str, advice: str) -> None:
    said = refusal(Host("node1", port=2222, user="ann"), text.split("\n"), 255)
    assert advice in said
    assert said.startswith(("ann@node1:2222 ", "ssh to ann@node1:2222 "))
    assert "\n" not in said
    assert "LOGIN" not in said


def test_the_command_to_try_has_the_users_options_of_ssh() -> None:
    host, words = Host("node1", port=2222), ["-F", "my config"]
    unknown = ["Host key verification failed."]
    assert "run 'ssh -p 2222 -F 'my config' node1' once" in refusal(host, unknown, 255, None, words)
    said = refusal(host, ["something new"], 255, None, words)
    assert said.endswith("try by hand: ssh -o BatchMode=yes -p 2222 -F 'my config' node1 true")
    assert "ssh -p 2222 -F 'my config' node1" in sync_refusal(host, "/x", unknown, 12, words)


def test_what_ssh_said_is_quoted_without_what_could_move_the_cursor() -> None:
    said = refusal(Host("a"), ["\x1b[2Jssh: connect to host a port 22: Connection refused\r"], 255)
    assert said.endswith("([2Jssh: connect to host a port 22: Connection refused)")


@pytest.mark.parametrize(
    ("text", "exit_code"),
    [
        ("bash: /opt/python: No such file or directory", 127),
        ("bash: python9: command not found", 127),
        ("sh: 1: /opt/python: not found", 127),
        ("bash: /etc/passwd: Permission denied", 126),
        ("python9: Command not found.", 1),  # csh
        ("/etc/passwd: Permission denied.", 1),  # csh
        ("", 127),
    ],
)
def test_a_missing_python_is_told_from_a_refused_login(text: str, exit_code: int) -> None:
    said = refusal(Host("node1"), [text], exit_code)
    assert said.startswith("node1 has no such Python, or you may not run it")
    assert "--python" in said
    assert text in said
    assert refusal(Host("node1"), [text], exit_code, "/opt/py").startswith("node1 has no /opt/py, ")


def test_a_python_without_this_package_is_named_as_that() -> None:
    line = (
        "/usr/bin/python3: Error while finding module specification for 'kvstore.launch.x' "
        "(ModuleNotFoundError: No module named 'kvstore')"
    )
    said = refusal(Host("node1"), [line], 1)
    assert said.startswith("the Python on node1 does not find this package: install it there")


def test_another_end_is_told_with_its_status_and_last_line() -> None:
    assert "exit code 3: boom; try by hand" in refusal(Host("a"), ["x", "boom", ""], 3)
    assert "signal 9 and said nothing" in refusal(Host("a"), [], -9)
    assert "ssh to a closed its output: boom; try" in refusal(Host("a"), ["boom"], None)


def test_a_missing_ssh_is_one_sentence() -> None:
    assert no_program("ssh", FileNotFoundError(2, "No such file or directory")) == (
        "cannot run ssh: No such file or directory; install it (Debian: apt install "
        "openssh-client) and put it on the PATH"
    )


def test_what_to_type_names_port_and_user() -> None:
    assert login(Host("::1", port=22, user="ann")) == "-p 22 ann@::1"
    assert login(Host("node1")) == "node1"


@needs_ssh
def test_a_port_where_nobody_listens_is_told_as_that() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: refused, and nobody else's
        host = Host("127.0.0.1", port=taken.getsockname()[1])
        argv = ssh_argv(host, ["-F", "none"], ["true"])
        ended = subprocess.run(argv, capture_output=True, timeout=20, stdin=subprocess.DEVNULL)
    said = refusal(host, ended.stderr.decode().splitlines(), ended.returncode)
    assert said.startswith(f"{host.label} refuses the connection: start sshd there")
