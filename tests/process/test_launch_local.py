"""The launcher with real processes: whatever happens, the exit code is right and nothing stays.

A small program stands in for scheduler and servers: the scheduler serves on the inherited
socket until every worker has said ``bye``; servers stay connected to it until then. Every
process of a test, also a grandchild, carries the test's mark in its environment.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(sys.platform != "linux", reason="looks for left processes in /proc"),
]

ROOT = Path(__file__).resolve().parents[2]

STAND_IN = """
import os, select, socket, sys, time
role, rank = os.environ["DMLC_ROLE"], os.environ["DMLC_TASK_ID"]
address = (os.environ["DMLC_PS_ROOT_URI"], int(os.environ["DMLC_PS_ROOT_PORT"]))
for rule in os.environ.get("STAND_IN", "").split():     # role:rank:status, at once
    if rule.rpartition(":")[0] == f"{role}:{rank}":
        sys.exit(int(rule.rpartition(":")[2]))
if role == "scheduler" and os.environ.get("STAND_IN") != "alone":
    os.write(int(os.environ["PS_JOINED_FD"]), b"all have joined\\n")
if os.environ.get("STAND_IN") == "stay":
    time.sleep(60)
if role == "server":
    assert "PS_LISTEN_FD" not in os.environ and "PS_JOINED_FD" not in os.environ
    try:
        socket.create_connection(address).recv(1)
    except ConnectionError:     # the scheduler ended before it had accepted us
        pass
    sys.exit(0)
listener = socket.socket(fileno=int(os.environ["PS_LISTEN_FD"]))
byes, peers = 0, []
while byes < int(os.environ["DMLC_NUM_WORKER"]):
    for ready in select.select([listener, *peers], [], [])[0]:
        if ready is listener:
            peers.append(listener.accept()[0])
        else:
            byes += ready.recv(3) == b"bye"
            peers.remove(ready)
            ready.close()
# The launcher holds this socket too: without this, a server that comes later waits for ever.
listener.shutdown(socket.SHUT_RDWR)
"""

LAUNCH = """
import os
import signal
import sys
sys.path.insert(0, sys.argv[1])
# Whoever runs the tests may have been started by nohup, which is inherited.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_IGN if "NOHUP" in os.environ else signal.SIG_DFL)
from kvstore.launch.cli import main
from kvstore.launch.job.restarts import Timing
# Short where most tests wait it out, long where only a busy machine would; a test sets its own.
patience = dict(drain_s=25, service_s=25, failure_s=0.5, alone_s=0.3, step_s=0.5, leftover_s=0.2)
own = (each.split("=") for each in os.environ.get("PATIENCE", "").split())
timing = Timing(**{**patience, **{name: float(seconds) for name, seconds in own}})
service = [sys.executable, "-S", sys.argv[2]]
sys.exit(main(sys.argv[3:], service_command=service, timing=timing))
"""

# What a worker begins with; `bye()` tells the scheduler that it is done, and returns when that has
# heard it: so the scheduler has said before that all have joined.
WORKER = """
import os, signal, socket, subprocess, sys, time
rank = int(os.environ["DMLC_TASK_ID"])
def bye():
    address = (os.environ["DMLC_PS_ROOT_URI"], int(os.environ["DMLC_PS_ROOT_PORT"]))
    scheduler = socket.create_connection(address)
    scheduler.sendall(b"bye")
    scheduler.recv(1)
"""


@dataclass
class Job:
    """Starts launchers, and finds whatever they have left running."""

    directory: Path
    started: list[subprocess.Popen[str]] = field(default_factory=list)
    mark: str = field(default_factory=lambda: f"LAUNCH_TEST={uuid.uuid4().hex}")

    def start(
        self, *arguments: str, environment: dict[str, str] | None = None
    ) -> subprocess.Popen[str]:
        stand_in = self.directory / "stand_in.py"
        stand_in.write_text(STAND_IN)
        name, _, value = self.mark.partition("=")
        (self.directory / "tmp").mkdir(exist_ok=True)
        process = subprocess.Popen(
            [sys.executable, "-c", LAUNCH, str(ROOT), str(stand_in), *arguments],
            env={
                **os.environ,
                "TMPDIR": str(self.directory / "tmp"),
                name: value,
                **(environment or {}),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started.append(process)
        return process

    def run(
        self, *arguments: str, environment: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        process = self.start(*arguments, environment=environment)
        out, err = process.communicate(timeout=50)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def left(self) -> list[int]:
        """Living processes of this test, launcher and guardian included."""
        return [
            int(entry.name)
            for entry in Path("/proc").iterdir()
            if entry.name.isdigit() and self._is_ours(entry)
        ]

    def logs(self) -> list[Path]:
        return sorted((self.directory / "tmp").glob("kvstore-launch-*"))

    def _is_ours(self, entry: Path) -> bool:
        try:
            if entry.joinpath("stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return False
            return self.mark.encode() in entry.joinpath("environ").read_bytes().split(b"\0")
        except OSError:
            return False


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    job = Job(tmp_path)
    yield job
    left = job.left()
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    for process in job.started:
        process.communicate()
    assert left == [], "the launcher has left processes running"


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-S", "-c", WORKER + code)


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline_s, f"waited 30 s for: {what}"
        time.sleep(0.02)


def test_success_leaves_neither_processes_nor_logs_and_prefixes_every_line(job: Job) -> None:
    code = "print(*sys.argv[1:], sep='|'); print('note', file=sys.stderr); bye()"
    odd = ["a b", 'it\'s "q"', "$HOME", "*", "--num-workers", "7", ""]
    done = job.run("-n", "2", "-s", "1", *python(code), *odd)
    assert done.returncode == 0, done.stderr
    line = 'a b|it\'s "q"|$HOME|*|--num-workers|7|'
    assert sorted(done.stdout.splitlines()) == [f"[worker 0] {line}", f"[worker 1] {line}"]
    complete, *notes = sorted(done.stderr.splitlines())
    assert notes == ["[worker 0] note", "[worker 1] note"]
    assert complete.startswith(
        "[launcher] all have joined: 2 workers and 1 server on this machine; "
        "scheduler at 127.0.0.1:"
    )
    assert complete.endswith(", kept if the job fails or loses a process")
    assert job.logs() == []
    assert job.left() == []


def test_lines_of_different_workers_are_never_mixed_and_all_arrive(job: Job) -> None:
    code = """
for n in range(300):
    for piece in (f"<{rank} {n} ", "x" * 300, ">", chr(10)):
        sys.stdout.write(piece)
sys.stdout.write("last, without newline")
bye()
"""
    done = job.run("-n", "3", "-s", "1", "--launcher", "local", *python(code))
    lines = done.stdout.splitlines()
    for rank in range(3):
        mine = [line for line in lines if line.startswith(f"[worker {rank}] ")]
        assert mine == [
            *(f"[worker {rank}] <{rank} {n} {'x' * 300}>" for n in range(300)),
            f"[worker {rank}] last, without newline",
        ]
    assert len(lines) == 3 * 301


def test_the_first_failure_gives_the_exit_code_and_is_told_last(job: Job, tmp_path: Path) -> None:
    code = """
path = sys.argv[1]
if rank == 1:
    print("about to fail")
    open(path, "w").write(str(os.getpid()))
    sys.exit(7)
def has_ended(pid):
    return pid and open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] == "Z"
while not os.path.exists(path) or not has_ended(open(path).read()):
    time.sleep(0.01)
time.sleep(0.5)  # for the launcher to see it
sys.exit("worker 0 noticed")
"""
    failing = str(tmp_path / "failing")
    environment = {"PATIENCE": "failure_s=600"}
    done = job.run("-n", "2", "-s", "2", *python(code), failing, environment=environment)
    assert done.returncode == 7
    block = done.stderr.partition("======== the job failed")[2].splitlines()
    assert block[1].startswith("process:  worker 1 (pid ")
    assert block[2].startswith("ended:    exit code 7, ")
    assert block[-5:-1] == [
        "the last line of its log:",
        "    about to fail",
        "other failures: worker 0 (exit code 1)",
        "ended by the launcher: scheduler, server 0, server 1",
    ]
    (logs,) = job.logs()
    assert block[-1] == f"logs of all processes: {logs}"
    assert (logs / "worker-0.log").read_text() == "worker 0 noticed\n"
    assert job.left() == []


def test_a_worker_killed_by_a_signal_gives_128_plus_its_number(job: Job) -> None:
    code = "os.kill(os.getpid(), signal.SIGKILL) if rank == 0 else time.sleep(60)"
    done = job.run("-n", "2", "-s", "1", *python(code))
    assert done.returncode == 137
    assert "worker 0 (pid" in done.stderr
    assert "signal SIGKILL" in done.stderr


def test_a_server_that_ends_alone_with_0_is_a_failure(job: Job) -> None:
    environment = {"STAND_IN": "server:0:0", "PATIENCE": "service_s=0.3"}
    done = job.run("-n", "1", *python("time.sleep(60)"), environment=environment)
    assert done.returncode == 1
    assert "process:  server 0" in done.stderr
    assert "exit code 0, while workers still ran" in done.stderr


def test_a_scheduler_that_fails_gives_its_exit_code(job: Job) -> None:
    done = job.run("-n", "1", *python("time.sleep(60)"), environment={"STAND_IN": "scheduler:0:3"})
    assert done.returncode == 3
    assert "process:  scheduler" in done.stderr


def test_servers_that_stay_are_ended_with_a_warning_and_the_job_succeeds(job: Job) -> None:
    # The worker may have ended before the scheduler has said that all have joined.
    environment = {"STAND_IN": "stay", "PATIENCE": "drain_s=0.5 alone_s=25"}
    done = job.run("-n", "1", *python("pass"), environment=environment)
    assert done.returncode == 0
    assert "scheduler, server 0 did not end within 0.5 s of the last worker" in done.stderr


def test_workers_that_never_joined_end_the_job_at_once_with_a_question(job: Job) -> None:
    done = job.run("-n", "2", *python("print('by myself')"), environment={"STAND_IN": "alone"})
    assert done.returncode == 1
    assert done.stdout.count("by myself") == 2
    assert done.stderr == (
        "[launcher] the workers ended without joining the job, so each ran alone; check that the "
        "script creates a dist_... store\n"
    )
    assert job.logs() == []


def test_workers_that_all_fail_alike_end_the_job_soon_and_are_told_once(job: Job) -> None:
    code = "print(rank, file=sys.stderr); sys.exit('unknown store type')"
    # Longer than ``run`` waits: nobody is left who may have something to say.
    done = job.run("-n", "3", "-s", "1", *python(code), environment={"PATIENCE": "failure_s=600"})
    assert done.returncode == 1
    block = done.stderr.partition("======== the job failed")[2].splitlines()
    first = block[1].removeprefix("process:  ").partition(" (")[0]
    others = [name for name in ("worker 0", "worker 1", "worker 2") if name != first]
    assert sorted(block[-3].removeprefix("the same on ").split(", ")) == others
    assert block[-4] == "    unknown store type"


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_to_the_launcher_ends_all_with_the_code_of_that_signal(
    job: Job, number: signal.Signals, code: int
) -> None:
    worker = """
subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
print("ready", flush=True)
time.sleep(60)
"""
    process = job.start("-n", "2", "-s", "1", *python(worker))
    assert process.stdout is not None
    assert {process.stdout.readline() for _ in range(2)} == {
        "[worker 0] ready\n",
        "[worker 1] ready\n",
    }
    process.send_signal(number)
    _, err = process.communicate(timeout=50)
    assert process.returncode == code
    assert f"ended by {number.name}" in err
    # Whoever pressed Ctrl-C has seen all; of a closed terminal or a batch system, logs remain.
    assert len(job.logs()) == (0 if number is signal.SIGINT else 1)
    assert job.left() == []


def test_a_job_under_nohup_outlives_its_terminal(job: Job) -> None:
    worker = """
print("ready", flush=True)
time.sleep(1)
bye()
"""
    process = job.start("-n", "1", *python(worker), environment={"NOHUP": "1"})
    assert process.stdout is not None
    assert process.stdout.readline() == "[worker 0] ready\n"
    process.send_signal(signal.SIGHUP)
    process.communicate(timeout=50)
    assert process.returncode == 0


def test_workers_that_ignore_ctrl_c_are_killed_in_the_end(job: Job) -> None:
    worker = """
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
while True: time.sleep(60)
"""
    process = job.start("-n", "1", *python(worker))
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=50)
    assert process.returncode == 130


def test_when_the_launcher_is_killed_everything_dies_also_a_grandchild_in_its_own_session(
    job: Job,
) -> None:
    worker = """
subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"],
                 start_new_session=rank == 0, stdout=subprocess.DEVNULL,
                 stderr=subprocess.DEVNULL)
print("ready", flush=True)
time.sleep(60)
"""
    process = job.start("-n", "2", "-s", "2", *python(worker))
    assert process.stdout is not None
    for _ in range(2):
        process.stdout.readline()
    # The launcher, its guardian, a scheduler, two servers, two workers, two grandchildren.
    wait_until(lambda: len(job.left()) == 9, "all processes to run")
    process.kill()
    process.communicate(timeout=50)
    wait_until(lambda: job.left() == [], "all processes to end after the launcher's death")


def test_the_children_die_with_the_launcher_even_when_its_guardian_was_killed_before(
    job: Job,
) -> None:
    process = job.start("-n", "1", *python("print('ready', flush=True); time.sleep(60)"))
    assert process.stdout is not None
    process.stdout.readline()
    (guardian,) = [
        pid for pid in job.left() if b"guardian.py" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    os.kill(guardian, signal.SIGKILL)
    process.kill()
    process.communicate(timeout=50)
    wait_until(lambda: job.left() == [], "all processes to end after the launcher's death")


def test_a_job_inside_a_job_ends_with_the_outer_one(job: Job, tmp_path: Path) -> None:
    inner = tmp_path / "inner.py"
    inner.write_text(LAUNCH)
    stand_in = str(tmp_path / "stand_in.py")
    worker = ("sh", "-c", "echo ready; sleep 60")
    nested = (sys.executable, str(inner), str(ROOT), stand_in, "-n", "1", *worker)
    process = job.start("-n", "1", *nested)
    assert process.stdout is not None
    assert process.stdout.readline() == "[worker 0] [worker 0] ready\n"
    process.kill()
    process.communicate(timeout=50)
    wait_until(lambda: job.left() == [], "both jobs to end")


def test_grandchildren_that_outlive_a_successful_worker_are_ended(job: Job) -> None:
    worker = """
for own_session in (False, True):
    subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"],
                     start_new_session=own_session)
bye()
"""
    done = job.run("-n", "1", *python(worker))
    assert done.returncode == 0
    assert "ended 2 process(es)" in done.stderr
    assert job.left() == []


def test_a_missing_program_gives_127_and_one_that_cannot_be_executed_126(
    job: Job, tmp_path: Path
) -> None:
    done = job.run("-n", "2", "-s", "1", "no-such-program-anywhere", "x")
    assert done.returncode == 127
    assert done.stderr.splitlines()[-1] == (
        "[launcher] cannot start worker 0: 'no-such-program-anywhere': "
        "there is no such program on the PATH"
    )
    script = tmp_path / "train.py"
    script.write_text("print('never')")
    done = job.run("-n", "2", "-s", "1", str(script))
    assert done.returncode == 126
    assert "Permission denied" in done.stderr
    assert f"as in: python {script}\n" in done.stderr
    assert job.logs() == []


@pytest.mark.parametrize(
    ("command", "advice"),
    [
        (
            ["python  train.py --lr 0.1"],
            "write the command without the quotes around it: python train.py --lr 0.1",
        ),
        (["train.py", "a b"], "give it to its interpreter, as in: python train.py 'a b'"),
    ],
)
def test_a_command_that_is_no_program_is_answered_with_what_to_type(
    job: Job, command: list[str], advice: str
) -> None:
    done = job.run("-n", "1", *command)
    assert done.returncode == 127
    assert done.stderr.splitlines()[-1].endswith(advice)


def test_a_busy_port_that_the_user_exported_ends_at_once(job: Job) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        done = job.run("-n", "1", *python("bye()"), environment={"DMLC_PS_ROOT_PORT": port})
    assert done.returncode == 1
    assert f"port {port} on 127.0.0.1 is in use" in done.stderr
    assert job.logs() == []


def test_logs_are_kept_where_the_user_wants_them(job: Job, tmp_path: Path) -> None:
    logs = tmp_path / "my logs" / "run 1"
    done = job.run("-n", "1", "--log-dir", str(logs), *python("print('hello'); bye()"))
    assert done.returncode == 0
    assert sorted(path.name for path in logs.iterdir()) == [
        "scheduler.log",
        "server-0.log",
        "worker-0.log",
    ]
    assert (logs / "worker-0.log").read_text() == "hello\n"


def test_a_reader_that_stops_reading_does_not_hold_up_a_signal(job: Job) -> None:
    worker = "print('ready', flush=True)\nwhile True: print('x' * 1000)"
    process = job.start("-n", "1", *python(worker))
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(0.3)  # nobody reads now: pipe, launcher's buffer and the worker's pipe fill up
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=50) == 143


#: No single worker is started again.
AS_A_WHOLE = {"PS_REJOIN_TIMEOUT": "0"}


def test_a_job_that_fails_is_started_again_until_it_succeeds(job: Job) -> None:
    code = """
attempt = int(os.environ["DMLC_NUM_ATTEMPT"])
print("attempt", attempt, flush=True)
if rank == 1 and attempt < 2:
    sys.exit(5)
bye()
"""
    environment = {"PATIENCE": "restart_s=0.01", "DMLC_NUM_ATTEMPT": "7", **AS_A_WHOLE}
    done = job.run("-n", "2", "-s", "1", "--restarts", "3", *python(code), environment=environment)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("[worker 1]")]
    assert lines == [f"[worker 1] attempt {number}" for number in range(3)]
    said = [line for line in done.stderr.splitlines() if line.startswith("[launcher] restart")]
    assert said == [
        f"[launcher] restart {number} of the job: starting all processes again in {wait_s} s "
        f"({number} of 3 restarts are used)"
        for number, wait_s in ((1, 0.01), (2, 0.02))
    ]
    (logs,) = job.logs()
    said = f"[launcher] the job succeeded after 2 restarts; logs of all attempts: {logs}"
    assert done.stderr.splitlines()[-1] == said
    assert done.stderr.count("ended:    exit code 5") == 2


def test_after_the_last_restart_the_job_has_failed_and_each_attempt_has_its_logs(job: Job) -> None:
    code = "print(os.environ['DMLC_NUM_ATTEMPT']); sys.exit(3)"
    done = job.run(
        *("-n", "1", "--restarts", "1", *python(code)),
        environment={"PATIENCE": "restart_s=0.01", **AS_A_WHOLE},
    )
    assert done.returncode == 3
    (logs,) = job.logs()
    assert done.stderr.splitlines()[-1] == f"logs of all processes: {logs}/restart-1"
    assert (logs / "worker-0.log").read_text() == "0\n"
    assert (logs / "restart-1" / "worker-0.log").read_text() == "1\n"


def test_a_worker_that_is_started_again_and_gets_no_place_leads_to_a_restart_of_the_job(
    job: Job,
) -> None:
    code = """
attempt = int(os.environ["DMLC_NUM_ATTEMPT"])
print("attempt", attempt, "pid", os.getpid(), flush=True)
if rank == 1 and not os.path.exists(sys.argv[1]):
    if attempt == 1:
        open(sys.argv[1], "w").close()
        sys.exit(3)
    time.sleep(0.2)     # for the scheduler to say that all have joined
    os.kill(os.getpid(), signal.SIGKILL)
bye()
"""
    done = job.run(
        *("-n", "2", "-s", "1", "--restarts", "1", *python(code), str(job.directory / "mark")),
        environment={"PATIENCE": "restart_s=0.01 worker_restart_s=0.01"},
    )
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("[worker 1]")]
    assert [words[3] for words in lines] == ["0", "1", "1"]
    first = f"worker 1 (pid {lines[0][-1]})"
    _, *told = [line for line in done.stderr.splitlines() if line.startswith("[launcher]")]
    (logs,) = job.logs()
    assert told[0] == (
        f"[launcher] {first} ended with signal SIGKILL: starting it again (1 of 1 restart)"
    )
    assert f"process:  {first}\nended:    signal SIGKILL" in done.stderr
    assert "other failures: worker 1 (exit code 3)" in done.stderr
    assert told[-1] == f"[launcher] the job succeeded after 1 restart; logs of all attempts: {logs}"


@pytest.mark.parametrize("code", ["pass", "os.kill(os.getppid(), signal.SIGINT); time.sleep(60)"])
def test_a_script_that_does_not_join_and_a_job_that_is_ended_are_not_started_again(
    job: Job, code: str
) -> None:
    done = job.run(
        *("-n", "1", "--restarts", "3", *python(code)),
        environment={"STAND_IN": "alone", "PATIENCE": "alone_s=0.1"},
    )
    assert done.returncode == (1 if code == "pass" else 130)
    assert "restart" not in done.stderr


def test_ctrl_c_between_two_attempts_ends_the_launcher(job: Job) -> None:
    process = job.start(
        *("-n", "1", "--restarts", "1", *python("sys.exit(3)")),
        environment={"PATIENCE": "restart_s=30"},
    )
    assert process.stderr is not None
    line = ""
    while "restart 1 of the job" not in line:
        line = process.stderr.readline()
        assert line, "the launcher has ended"
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 130
    (logs,) = job.logs()
    assert (logs / "worker-0.log").exists(), "the report has named them"


def test_ctrl_c_while_the_rest_of_a_failed_attempt_is_ended_is_not_lost(job: Job) -> None:
    code = """
if os.fork() == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(60)
os.write(2, b"failing\\n")
os._exit(3)
"""
    process = job.start(
        *("-n", "1", "--restarts", "2", *python(code)),
        environment={"PATIENCE": "leftover_s=3 restart_s=0.01 alone_s=0.1"},
    )
    assert process.stderr is not None
    while "failing" not in process.stderr.readline():
        pass
    time.sleep(1.5)  # all processes of the job have ended, their child has not
    process.send_signal(signal.SIGINT)
    err = process.communicate(timeout=30)[1]
    assert process.returncode in (3, 130), err  # 130 where it came a little early
    assert "restart 1" not in err


def test_a_host_that_does_not_answer_at_once_is_tried_again(job: Job, tmp_path: Path) -> None:
    """With ssh in the place of the second attempt's host: refused once, then there."""
    programs = tmp_path / "bin"
    programs.mkdir()
    count = tmp_path / "count"
    (programs / "ssh").write_text(
        f"""#!/bin/sh
for word in "$@"; do last=$word; done
echo x >> {count}
[ $(wc -l < {count}) = 2 ] && {{ echo refused >&2; exit 255; }}
exec sh -c "$last"
"""
    )
    (programs / "ssh").chmod(0o755)
    (tmp_path / "hosts").write_text("one\n")
    code = "sys.exit(5) if os.environ['DMLC_NUM_ATTEMPT'] == '0' else bye()"
    done = job.run(
        *("-n", "1", "-s", "1", "-H", str(tmp_path / "hosts"), "--restarts", "5", *python(code)),
        environment={
            "PATH": f"{programs}:{os.environ['PATH']}",
            "PATIENCE": "restart_s=0.01 drain_s=1",
            **AS_A_WHOLE,
        },
    )
    assert done.returncode == 0, done.stderr
    assert "the job succeeded after 2 restarts" in done.stderr
    assert "refused" in done.stderr
