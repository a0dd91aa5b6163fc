"""Every socket on which a real job listens is tried; nobody without the key gets in."""

from __future__ import annotations

import re
import secrets
import signal
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import zmq
from doors import accepts_tcp, curve, knock, other_doors, plain, settings_of, tcp_doors
from job import (
    HOST,
    SHORT,
    TRAIN,
    Job,
    MakeJob,
    Process,
    assert_no_traceback,
    needs_proc,
    wait_until,
)

from pslite.security import Proofs, derive
from pslite.van.zmq.accepted import make_routing_id
from pslite.wire.codec import Envelope, encode
from pslite.wire.messages import Leave

pytestmark = [pytest.mark.process, needs_proc]

JOIN = 'kv = mx.kvstore.create("dist_sync")\nprint("rank", kv.rank, flush=True)\n'
OTHER = b"a key that some other job has"


def members(job: Job) -> list[int]:
    """The processes of the launched job: not the launcher itself, nor its guardian."""
    return [pid for pid in job.left() if "PS_JOB_KEY_FILE" in settings_of(pid)]


def key_file(job: Job) -> Path:
    started_with = map(settings_of, job.left())
    (path,) = {each["PS_JOB_KEY_FILE"] for each in started_with if "PS_JOB_KEY_FILE" in each}
    return Path(path)


def launched(make_job: MakeJob, *, security: str = "", verbose: str = "0") -> tuple[Job, Process]:
    """Two workers and two servers in the middle of their rounds."""
    chosen = {"PS_SECURITY": security} if security else {}
    job = make_job(2, 2, PS_VERBOSE=verbose, **chosen)
    launcher = job.launch(TRAIN)
    for rank in range(2):
        launcher.wait_for(rf"\[worker {rank}\] rank {rank}")
    return job, launcher


def ends_well(job: Job, launcher: Process) -> None:
    job.allow("stop")
    assert launcher.wait() == 0, launcher.text
    assert launcher.text.count("rounds are right") == 2
    assert_no_traceback(launcher)


@pytest.mark.parametrize(
    "security",
    ["curve", pytest.param("", marks=pytest.mark.slow(reason="the other mechanism runs always"))],
)
def test_nobody_gets_into_a_job_without_its_key(make_job: MakeJob, security: str) -> None:
    job, launcher = launched(make_job, security=security)
    doors = tcp_doors(job.left())
    assert len(doors) == 3  # the scheduler's and those of two servers
    assert {settings_of(pid)["DMLC_ROLE"] for pid in doors.values()} == {"scheduler", "server"}
    assert {address for address, _ in doors} == {HOST}
    assert other_doors(job.left()) == []
    key = key_file(job).read_bytes().strip()
    message = [encode(Envelope("", 1, 7, 0, 1, 0, (), (), Leave()))]
    strangers = {
        "no key": {},
        "another key under PLAIN": plain(OTHER),
        "another key under CURVE": curve(OTHER),
        "the other mechanism": plain(key) if security == "curve" else curve(key),
    }
    with ThreadPoolExecutor() as pool:
        tries = {
            f"{who} got in at {door}": pool.submit(knock, door, options, [message])
            for door in doors
            for who, options in strangers.items()
        }
    for what, got_in in tries.items():
        assert not got_in.result(), what
    for door, pid in doors.items():
        assert accepts_tcp(door)
        is_scheduler = settings_of(pid)["DMLC_ROLE"] == "scheduler"
        mine = curve(key) if security == "curve" else plain(key, "scheduler")
        # Under PLAIN each door has a password of its own; this is the scheduler's.
        opens = is_scheduler or security == "curve"
        assert knock(door, mine) is opens, f"the key and {door}: this test proves nothing"
    ends_well(job, launcher)
    assert re.search(r"warning: refused a connection", launcher.text)


@pytest.mark.slow(reason="tests/inproc/test_lies.py has nodes that lie, always")
def test_a_holder_of_the_key_who_is_not_in_the_roster_changes_nothing(make_job: MakeJob) -> None:
    job, launcher = launched(make_job, security="curve")
    key = key_file(job).read_bytes().strip()
    (job_id,) = {settings_of(pid)["PS_JOB_ID"] for pid in members(job)}
    for door in tcp_doors(job.left()):
        for name in ("stranger", "scheduler", f"W{secrets.randbits(62):016x}"):
            options = {**curve(key), zmq.ROUTING_ID: make_routing_id(name, 1, 1)}
            messages = [
                [encode(Envelope(job_id, 1, 7, 0, number, 0, (), (), Leave()))] for number in (1, 2)
            ]
            assert knock(door, options, messages)
    ends_well(job, launcher)


def test_the_key_of_a_launched_job_is_seen_by_its_user_only_and_goes_with_it(
    make_job: MakeJob,
) -> None:
    job, launcher = launched(make_job, verbose="2")
    path = key_file(job)
    key = path.read_text().strip()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert len(key) >= 32
    derived = {name: derive(key.encode(), name).secret for name in ("plain", "curve")}
    password = Proofs(derived["plain"]).password("scheduler").decode()
    hidden = [key, password, *(secret.hex() for secret in derived.values())]
    for entry in Path("/proc").iterdir():
        try:
            seen = (entry / "cmdline").read_bytes() if entry.name.isdigit() else b""
        except OSError:
            continue
        assert not any(secret.encode() in seen for secret in hidden)
    for pid in job.left():
        assert not any(secret in str(settings_of(pid)) for secret in hidden)
    logs = list(job.directory.rglob("*.log"))
    assert len(logs) == 5
    written = "".join(log.read_text() for log in logs)
    ends_well(job, launcher)
    assert "Register" in launcher.text  # every message was shown
    assert not any(secret in launcher.text + written for secret in hidden)
    assert not path.parent.exists()


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGKILL,
        pytest.param(signal.SIGTERM, marks=pytest.mark.slow(reason="the harder end runs always")),
    ],
)
def test_the_key_is_gone_however_the_launcher_ends(
    make_job: MakeJob, number: signal.Signals
) -> None:
    job, launcher = launched(make_job)
    path = key_file(job)
    launcher.send(number)
    assert launcher.wait() != 0
    wait_until(lambda: not path.parent.exists(), "the key to be removed")
    wait_until(lambda: not job.left(), "all processes to end")


def test_a_key_of_the_users_own_is_used_and_left_alone(make_job: MakeJob, tmp_path: Path) -> None:
    mine = tmp_path / "job.key"
    write_key(mine, b"a key that its user has chosen")
    job = make_job(1, 1, PS_JOB_KEY_FILE=str(mine), PS_SECURITY="curve")
    launcher = job.launch(f'{JOIN}wait_for_file("go")')
    # All have joined then; a process that starts listens for a moment to try out what TCP can do.
    launcher.wait_for("rank 0")
    opened = [
        knock(door, curve(b"a key that its user has chosen")) for door in tcp_doors(job.left())
    ]
    job.allow("go")
    assert launcher.wait() == 0, launcher.text
    assert opened == [True, True]
    assert mine.exists()


# -- jobs that are started by hand ---------------------------------------------------------


def write_key(path: Path, key: bytes, mode: int = 0o600) -> str:
    path.write_bytes(key)
    path.chmod(mode)
    return str(path)


@pytest.mark.parametrize(
    ("ours", "theirs", "sentence"),
    [
        ("plain", ("plain", OTHER), "rejected this node's job key"),
        ("curve", ("curve", OTHER), "closes each connection during the handshake"),
        ("plain", ("curve", None), "closes each connection|uses another PS_SECURITY"),
        ("curve", ("", b""), "closes each connection|uses another PS_SECURITY"),
    ],
    ids=["another key, plain", "another key, curve", "another mechanism", "no key"],
)
def test_a_node_with_another_key_ends_long_before_the_deadline_and_says_what_to_compare(
    make_job: MakeJob,
    tmp_path: Path,
    ours: str,
    theirs: tuple[str, bytes | None],
    sentence: str,
) -> None:
    key = write_key(tmp_path / "job.key", b"the key of this very job")
    job = make_job(1, 1, PS_JOB_KEY_FILE=key, PS_SECURITY=ours)
    scheduler = job.scheduler()
    mechanism, other = theirs
    path = key if other is None else write_key(tmp_path / "other.key", other) if other else None
    worker = job.worker(0, JOIN, {"PS_SECURITY": mechanism, "PS_JOB_KEY_FILE": path})
    assert worker.wait(12) == 1
    line = worker.lines[-1]
    assert line.startswith("pslite.errors.ConfigError: ")
    assert re.search(sentence, line), line
    assert line.endswith(
        "compare the job key (PS_JOB_KEY_FILE) and PS_SECURITY: both must be the same on all nodes"
    )
    assert worker.text.count("compare the job key") == 1
    scheduler.send(signal.SIGINT)
    scheduler.wait()


def test_a_scheduler_that_waits_in_vain_says_that_it_refused_connections(
    make_job: MakeJob, tmp_path: Path
) -> None:
    key = write_key(tmp_path / "job.key", b"the key of this very job")
    other = write_key(tmp_path / "other.key", OTHER)
    job = make_job(1, 1, PS_JOB_KEY_FILE=key, PS_SECURITY="plain", **SHORT)
    scheduler, worker = job.scheduler(), job.worker(0, JOIN, {"PS_JOB_KEY_FILE": other})
    assert [scheduler.wait(), worker.wait()] == [1, 1]
    assert f"refused a connection from {HOST}: it does not know the job key" in scheduler.text
    assert re.search(r"missing 1 of 1 worker.*; 1 connections were refused: compare the job key",
                     scheduler.lines[-1])  # fmt: skip


def own_address() -> str | None:
    """An IPv4 address of this machine that is not loopback."""
    from pslite.node.address import local_addresses

    found = [one for each in local_addresses().values() for one in each if ":" not in one]
    return next((address for address in found if not address.startswith("127.")), None)


@pytest.mark.skipif(own_address() is None, reason="this machine has loopback addresses only")
@pytest.mark.parametrize(
    "security",
    [
        "plain",
        pytest.param("curve", marks=pytest.mark.slow(reason="the other mechanism runs always")),
    ],
)
def test_with_a_key_a_job_may_use_the_network(
    make_job: MakeJob, tmp_path: Path, security: str
) -> None:
    key = write_key(tmp_path / "job.key", b"the key of this very job")
    settings = {"PS_JOB_KEY_FILE": key, "PS_SECURITY": security}
    job = make_job(1, 1, DMLC_PS_ROOT_URI=own_address() or "", **settings)
    job.service()
    worker = job.worker(0, JOIN + "kv.init(1, vector(1, 2))\nassert kv.pull(1).tolist() == [1, 2]")
    assert job.wait_all() == [0, 0, 0], job.output()
    assert worker.lines == ["rank 0"]


@pytest.mark.skipif(own_address() is None, reason="this machine has loopback addresses only")
def test_without_a_key_nobody_leaves_this_machine(make_job: MakeJob) -> None:
    address = own_address() or ""
    job = make_job(1, 1, DMLC_PS_ROOT_URI=address)
    job.service()
    job.worker(0, JOIN)
    assert job.wait_all() == [1, 1, 1]
    for process in job.processes:
        assert (
            f"the scheduler is at {address}:{job.port}: a node without a job key"
            in process.lines[-1]
        )
        assert "set PS_JOB_KEY_FILE" in process.lines[-1]
    everywhere = make_job(1, 1, DMLC_USE_KUBERNETES="1")
    scheduler = everywhere.scheduler()
    assert scheduler.wait() == 1
    assert "cannot listen on 0.0.0.0" in scheduler.lines[-1]
    assert "PS_JOB_KEY_FILE" in scheduler.lines[-1]


def test_a_key_that_others_can_read_ends_the_process_with_the_command_to_mend_it(
    make_job: MakeJob, tmp_path: Path
) -> None:
    key = write_key(tmp_path / "job.key", b"the key of this very job", 0o644)
    scheduler = make_job(1, 1, PS_JOB_KEY_FILE=key).scheduler()
    assert scheduler.wait() == 1
    assert scheduler.lines[-1].startswith(
        "ConfigError: other users can read or change the job key "
    )
    assert f"chmod 600 {key}" in scheduler.lines[-1]
