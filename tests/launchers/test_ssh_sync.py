"""Copying a directory to the hosts; a stand-in for ssh runs the remote side on this machine."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore.launch.backends.hosts import Host
from kvstore.launch.backends.rsync import copy_to_hosts, place, rsync_argv, sync_refusal
from kvstore.launch.backends.ssh_command import ssh_options
from kvstore.launch.options import LaunchError

ROOT = Path(__file__).resolve().parents[2]

# Whoever runs the tests may have switched SIGINT off, which is inherited.
LAUNCH = """
import signal, sys
sys.path.insert(0, sys.argv.pop(1))
signal.signal(signal.SIGINT, signal.default_int_handler)
from kvstore.launch.cli import main
sys.exit(main())
"""

needs_rsync = pytest.mark.skipif(shutil.which("rsync") is None, reason="needs rsync")

# Takes ssh's place: drops its options and gives the rest to a login shell, in a home directory.
STAND_IN = """#!/bin/sh
echo "$@" >> {log}
while [ "$1" != -T ]; do shift; done
host=$2; shift 2
cd {home}
case $host in
    slow) exec sleep 60 ;;
    silent) while read -r line; do :; done; exit ;;
    refused) echo "ssh: connect to host refused port 22: Connection refused" >&2; exit 255 ;;
    bare) PATH=/nonexistent; export PATH ;;
    chatty) echo "Welcome to this host, which greets everybody at some length" ;;
esac
exec /bin/sh -c "$*"
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The home directory on the "hosts"."""
    home = tmp_path / "home"
    home.mkdir()
    programs = tmp_path / "bin"
    programs.mkdir()
    ssh = programs / "ssh"
    ssh.write_text(STAND_IN.format(log=tmp_path / "log", home=home))
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", str(programs), prepend=":")
    return home


@pytest.fixture
def source(tmp_path: Path) -> Path:
    source = tmp_path / "my source"
    (source / "data").mkdir(parents=True)
    (source / ".git").mkdir()
    (source / ".git" / "config").write_text("x")
    (source / "data" / "a b.txt").write_text("hello")
    run = source / "run.sh"
    run.write_text("#!/bin/sh\n")
    run.chmod(0o755)
    return source


def copy(source: Path, destination: str, *hosts: str) -> list[str]:
    lines: list[str] = []
    copy_to_hosts([Host(name) for name in hosts], str(source), destination, [], lines.append)
    return lines


def names_in(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))


def test_the_command_archives_and_deletes_nothing() -> None:
    argv = rsync_argv(Host("node1", port=2222, user="ann"), "/home/ann/run", "/some/dir", ["-v"])
    ssh = " ".join(ssh_options(Host("node1", port=2222, user="ann"), ["-v"]))
    assert argv == [
        "rsync",
        "-azs",
        "--timeout=300",
        "--exclude=.git",
        "-e",
        ssh,
        "--rsync-path=mkdir -p -- /some/dir; rsync",
        "--",
        "/home/ann/run/",
        "node1:/some/dir",
    ]


def test_addresses_homes_and_the_root_are_written_as_rsync_wants_them() -> None:
    assert rsync_argv(Host("::1"), "/", "~/my dir", [])[-3:] == ["--", "/", "[::1]:my dir"]
    assert rsync_argv(Host("a"), "/x", "~", [])[-1] == "a:."
    assert rsync_argv(Host("a"), "/x", "~//b", [])[-1] == "a:b"
    assert place(Host("::1", port=1, user="ann"), "~/x") == "ann@[::1]:~/x"


@pytest.mark.parametrize("destination", ["", "a\nb", "a\0b"])
def test_a_destination_that_is_no_name_is_refused(destination: str) -> None:
    with pytest.raises(LaunchError, match="--sync-dst-dir must be a directory") as caught:
        rsync_argv(Host("a"), "/x", destination, [])
    assert caught.value.exit_code == 2


@needs_rsync
def test_rsync_takes_the_options_of_ssh_apart_as_they_were(tmp_path: Path) -> None:
    words = ["-i", "my key", "-o", "ProxyCommand=a 'b' \"c\"", "-F", "back\\slash", "-oUser="]
    argv = rsync_argv(Host("node1"), str(tmp_path), "/x", words)
    seen = tmp_path / "seen"
    shell = tmp_path / "print_words"
    shell.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {seen}\nexit 1\n')
    shell.chmod(0o755)
    index = argv.index("-e") + 1
    argv[index] = str(shell) + argv[index].removeprefix("ssh")
    subprocess.run(argv, capture_output=True, timeout=20)
    expected = ssh_options(Host("node1"), words)[1:]
    assert seen.read_text().splitlines()[: len(expected) + 1] == [*expected, "node1"]


@needs_rsync
@pytest.mark.parametrize("destination", ["{home}/a/b", "{home}/it's $HOME \\ a!", "~/deep/er", "x"])
def test_a_copy_makes_the_directory_and_brings_all_but_git(
    home: Path, source: Path, destination: str
) -> None:
    destination = destination.format(home=home)
    lines = copy(source, destination, "node1")
    landed = home / destination.removeprefix("~/")
    assert names_in(landed) == ["data", "data/a b.txt", "run.sh"]
    assert (landed / "run.sh").stat().st_mode & 0o777 == 0o755
    assert lines[0] == f"copying {source} to node1:{destination}"
    assert lines[1].startswith("copied to node1 in ")
    assert len(lines) == 2


@needs_rsync
def test_what_only_the_host_has_stays(home: Path, source: Path) -> None:
    (home / "x").mkdir()
    (home / "x" / "checkpoint").write_text("1")
    copy(source, "x", "node1")
    assert "checkpoint" in names_in(home / "x")


@needs_rsync
def test_more_hosts_than_go_at_once_all_get_their_copy(home: Path, source: Path) -> None:
    hosts = [f"node{number}" for number in range(10)]
    lines = copy(source, "x", *hosts)
    for host in hosts:
        assert f"copying {source} to {host}:x" in lines
        assert any(line.startswith(f"copied to {host} in ") for line in lines)
    assert len((home.parent / "log").read_text().splitlines()) == 10


@needs_rsync
@pytest.mark.parametrize(
    ("host", "destination", "said"),
    [
        ("refused", "x", "cannot copy to refused:x: refused refuses the connection: start sshd"),
        ("bare", "x", "cannot copy to bare:x: bare has no rsync; install it there"),
        ("chatty", "x", "cannot copy to chatty:x: a start-up file of the shell there prints"),
        ("node1", "/proc/x", 'mkdir "/proc/x" failed: No such file or directory'),
    ],
)
@pytest.mark.usefixtures("home")
def test_a_copy_that_fails_is_told_in_one_sentence(
    source: Path, host: str, destination: str, said: str
) -> None:
    with pytest.raises(LaunchError) as caught:
        copy(source, destination, host)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 1


@needs_rsync
@pytest.mark.usefixtures("home")
def test_the_first_failure_ends_the_other_copies(source: Path) -> None:
    begun_s = time.monotonic()
    with pytest.raises(LaunchError, match="refuses the connection"):
        copy(source, "x", "slow", "refused")
    assert time.monotonic() - begun_s < 20


@needs_rsync
@pytest.mark.skipif(sys.platform != "linux", reason="looks for left processes in /proc")
@pytest.mark.parametrize(
    ("number", "host", "code"),
    [
        (signal.SIGINT, "slow", 130),
        (signal.SIGTERM, "slow", 143),
        (signal.SIGKILL, "silent", -9),  # like a real ssh, which ends with its input
    ],
)
def test_a_launcher_that_is_ended_while_it_copies_leaves_nothing_running(
    home: Path, source: Path, number: signal.Signals, host: str, code: int
) -> None:
    (home.parent / "hosts").write_text(f"{host}\n")
    launcher = subprocess.Popen(
        [
            *(sys.executable, "-c", LAUNCH, str(ROOT), "--launcher", "ssh", "-n", "1"),
            *("-H", str(home.parent / "hosts"), "--sync-dst-dir", "x", "true"),
        ],
        env={**os.environ, "SYNC_TEST": str(home)},
        cwd=source,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_until(lambda: len(marked(home)) >= 3)  # the launcher, rsync and ssh
        wait_until(lambda: (home.parent / "log").exists())
        begun_s = time.monotonic()
        launcher.send_signal(number)
        _, errors = launcher.communicate(timeout=30)
        wait_until(lambda: not marked(home))
        assert time.monotonic() - begun_s < 15
    finally:
        for pid in marked(home):
            os.kill(pid, signal.SIGKILL)
        launcher.communicate()
    assert launcher.returncode == code
    said = errors.splitlines()[1:]  # after "copying ..."
    copied = "files that were already copied stay on the hosts"
    sentence = f"[launcher] interrupted by {number.name} while copying; {copied}"
    assert said == ([] if number is signal.SIGKILL else [sentence])


def marked(home: Path) -> list[int]:
    """Running processes of the test whose home directory this is."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and f"SYNC_TEST={home}".encode() in (
                entry.joinpath("environ").read_bytes().split(b"\0")
            ):
                found.append(int(entry.name))
        except OSError:  # it has ended, or is another user's
            continue
    return found


def wait_until(condition: Callable[[], bool]) -> None:
    give_up_at_s = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < give_up_at_s, "it did not come about"
        time.sleep(0.02)


@needs_rsync
@pytest.mark.usefixtures("home")
def test_a_long_copy_says_that_it_goes_on(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.launch.backends.rsync._TELL_EVERY_S", 0.2)

    class Enough(Exception):
        pass

    def say(line: str) -> None:
        if line.startswith("still copying after 0 s: slow, ann@[::1]:7"):
            raise Enough

    hosts = [Host("slow"), Host("::1", port=7, user="ann")]
    monkeypatch.setattr("kvstore.launch.backends.rsync._AT_ONCE", 1)
    with pytest.raises(Enough):
        copy_to_hosts(hosts, str(source), "x", [], say)


def test_a_missing_rsync_is_one_sentence(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match="cannot run rsync: No such file or directory; install"):
        copy(source, "x", "node1")


def test_the_last_line_that_tells_something_is_quoted() -> None:
    lines = [
        'rsync: [receiver] write failed on "/x/big": No space left on device (28)',
        "rsync error: error in file IO (code 11) at receiver.c(657) [receiver=3.5.0]",
        "",
    ]
    assert "No space left on device (28); check" in sync_refusal(Host("a"), "/x", lines, 11)
    assert "code 11" in sync_refusal(Host("a"), "/x", lines[1:], 11)
    assert "ended with exit code -9 and printed nothing" in sync_refusal(Host("a"), "/x", [], -9)


def test_files_that_vanish_while_they_are_copied_are_no_failure(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rsync = tmp_path / "rsync"
    rsync.write_text(f"#!{sys.executable}\nraise SystemExit(24)\n")
    rsync.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert copy(source, "x", "node1")[1].startswith("copied to node1")


@pytest.mark.parametrize(
    "line",
    [
        "sh: 1: rsync: not found",
        "bash: line 1: rsync: command not found",
        "rsync: Command not found.",
        "fish: Unknown command: rsync",
        "zsh:1: command not found: rsync",
    ],
)
def test_a_host_without_rsync_is_told_in_every_shell(line: str) -> None:
    assert "a has no rsync; install it there" in sync_refusal(Host("a"), "/x", [line], 12)
