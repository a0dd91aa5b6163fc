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
from kvstore.launch.backends.ssh_command import login, shell_line, ssh_argv
from kvstore.launch.backends.ssh_errors import no_program, refusal

PRINT_WORDS = "import json, sys; print(json.dumps(sys.argv[1:]))"


def effective(argv: list[str]) -> dict[str, str]:
    """What ssh makes of a command: ``ssh -G`` prints its settings and connects to nothing."""
    output = subprocess.run([argv[0], "-G", *argv[1:]], capture_output=True, check=True, timeout=20)
    lines = output.stdout.decode().splitlines()
    return dict(reversed([line.split(" ", 1) for line in lines if " " in line]))


needs_ssh = pytest.mark.skipif(shutil.which("ssh") is None, reason="needs ssh")


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


def test_the_command_to_try_has_the_users_options_of_ssh() -> None:
    host, words = Host("node1", port=2222), ["-F", "my config"]
    unknown = ["Host key verification failed."]
    assert "run 'ssh -p 2222 -F 'my config' node1' once" in refusal(
        host, unknown, 255, "/py", words
    )
    said = refusal(host, ["something new"], 255, "/py", words)
    assert said.endswith("try by hand: ssh -o BatchMode=yes -p 2222 -F 'my config' node1 true")
    assert "ssh -p 2222 -F 'my config' node1" in sync_refusal(host, "/x", unknown, 12, words)


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
    said = refusal(host, ended.stderr.decode().splitlines(), ended.returncode, "/py")
    assert said.startswith(f"{host.label} refuses the connection: start sshd there")
