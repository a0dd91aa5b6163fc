"""The launcher ``ray`` with real Ray: a cluster of two nodes, and one that the launcher starts."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from common import (
    JOB_S,
    ROOT,
    ROUND,
    SENTENCE_S,
    STAY,
    EveryLauncher,
    Launcher,
    python,
    said,
    two_lines,
)
from services.daemon import free_ports
from services.ray import CPUS, Ray
from services.sweeper import processes_naming


def of_jobs(directory: str | Path) -> list[int]:
    """What launchers and their jobs have running there: not Ray itself, nor its idle workers."""
    return [pid for pid in processes_naming(Path(directory)) if _is_of_a_job(pid)]


def _is_of_a_job(pid: int) -> bool:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes()
        variables = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
    return b"\0PS_JOB_ID=" in variables or any(
        word in words for word in (b"kvstore-agent", b"ray_driver.py", b"guardian.py", b"launch.py")
    )


@pytest.fixture
def launcher(ray_cluster: Ray) -> Launcher:
    directory = ray_cluster.environment["RAY_TMPDIR"]
    return Launcher(
        own=["--launcher", "ray"],
        hosts=[socket.gethostname(), "kv-ray2"],
        processes=lambda: of_jobs(directory),
        environment=ray_cluster.environment,
        agent="kvstore-agent",
    )


class TestRay(EveryLauncher):
    pass


GROUPS = """
import json, ray
from ray.util import placement_group_table
ray.init(log_to_driver=False)
print(json.dumps([[one["name"], one["state"]] for one in placement_group_table().values()]))
"""


def groups(ray_cluster: Ray) -> list[tuple[str, str]]:
    """The names of the placement groups that Ray still has, with their states."""
    said = ray_cluster.run_python(GROUPS).strip().splitlines()[-1]
    return [(name, state) for name, state in json.loads(said) if state != "REMOVED"]


def read_until(job: subprocess.Popen[str], pattern: str, limit_s: float = 60.0) -> str:
    """The launcher's own lines up to the one in which ``pattern`` is found."""
    assert job.stderr is not None
    guard = threading.Timer(limit_s, job.kill)
    guard.start()
    said = ""
    try:
        for line in job.stderr:
            said += line
            if re.search(pattern, line):
                return said
    finally:
        guard.cancel()
    raise AssertionError(f"no line has '{pattern}': {said}")


def test_large_processes_run_on_both_nodes(launcher: Launcher) -> None:
    words = ["--worker-cores", "5", "--server-cores", "2"]
    done = launcher.run("-n", "2", "-s", "1", *words, *python(ROUND))
    assert done.returncode == 0, done.stderr
    found = re.findall(r"^\[worker \d@(\S+)\] sum 3\.0 on (\S+)", done.stdout, re.M)
    assert sorted(found) == sorted((host, host) for host in launcher.hosts)


def test_workers_have_the_threads_and_gpus_that_were_asked_for_and_servers_none(
    launcher: Launcher,
) -> None:
    text = "import os, kvstore; kvstore.create('dist_sync'); "
    text += "print(os.environ['OMP_NUM_THREADS'], os.environ['CUDA_VISIBLE_DEVICES'])"
    words = ["-n", "4", "-s", "1", "--worker-cores", "3"]
    done = launcher.run(*words, "--worker-gpus", "1", *python(text))
    assert done.returncode == 0, done.stderr
    found = re.findall(r"^\[worker \d@(\S+)\] 3 (\S+)$", done.stdout, re.M)
    assert len(set(found)) == 4, "each has a device of its own"
    assert {device for _, device in found} == {"0", "1"}

    done = launcher.run(*words, *python(text))
    assert done.returncode == 0, done.stderr
    assert {line.partition("] ")[2] for line in done.stdout.splitlines()} == {"3 "}


def test_what_no_node_has_is_named_while_waiting_and_leaves_nothing_when_interrupted(
    launcher: Launcher, ray_cluster: Ray
) -> None:
    words = ["--worker-gpus", "4", "--jobname", "too-large"]
    with launcher.start("-n", "2", "-s", "1", *words, "true") as job:
        try:
            lines = read_until(job, "no node of the Ray cluster")
            assert (
                "waiting for server 0, worker 0, worker 1: no node of the Ray cluster has 4 GPUs, "
                "which a worker needs (the most on one: 2 GPUs)"
            ) in lines
            assert groups(ray_cluster) == [("too-large", "PENDING")]
            job.send_signal(signal.SIGINT)
            assert job.wait(SENTENCE_S) == 130
        finally:
            job.kill()
    assert launcher.nothing_runs()
    assert groups(ray_cluster) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_launcher_that_is_ended_while_it_waits_leaves_nothing(
    launcher: Launcher, ray_cluster: Ray, number: signal.Signals
) -> None:
    words = ["-n", "1", "-s", "1", "--worker-memory", "9000g", "true"]
    with launcher.start(*words) as job:
        try:
            read_until(job, "has 9000.0 GiB of memory, which a worker needs")
            job.send_signal(number)
            code = job.wait(SENTENCE_S)
        finally:
            job.kill()
    assert code == (-number if number is signal.SIGKILL else 128 + number)
    assert launcher.nothing_runs()
    assert groups(ray_cluster) == []


def test_a_job_waits_for_the_room_that_another_uses(launcher: Launcher, tmp_path: Path) -> None:
    go = tmp_path / "go"
    text = "import os, time, kvstore; kvstore.create('dist_sync'); print('here', flush=True)\n"
    text += f"while not os.path.exists({str(go)!r}): time.sleep(0.1)"
    words = ["-n", "1", "-s", "1", *(f"--{one}-cores={CPUS - 1}" for one in ("worker", "server"))]
    with launcher.start(*words, *python(text)) as first:
        try:
            assert first.stdout is not None
            assert "here" in first.stdout.readline()
            with launcher.start(*words, *python(text)) as second:
                try:
                    read_until(
                        second,
                        f"the job needs {2 * CPUS - 2} CPUs, but only 2 CPUs of the Ray "
                        f"cluster's {2 * CPUS} CPUs are free",
                    )
                    go.touch()
                    stdout, stderr = second.communicate(timeout=JOB_S)
                finally:
                    second.kill()
            assert first.wait(JOB_S) == 0
        finally:
            first.kill()
    assert second.returncode == 0, stderr
    assert "here" in stdout


#: Stands for Python: the agent of worker 1 comes late, so that the job does not begin before.
SLOW = """#!/bin/sh
if [ "$4" = "worker 1" ]; then while [ ! -e {go} ]; do sleep 0.1; done; fi
exec {python} "$@"
"""


def test_ray_replaces_an_agent_that_is_lost_before_the_job_begins(
    launcher: Launcher, tmp_path: Path
) -> None:
    slow, go = tmp_path / "python", tmp_path / "go"
    slow.write_text(SLOW.format(go=go, python=sys.executable))
    slow.chmod(0o755)
    with launcher.start("-n", "2", "-s", "1", "--python", str(slow), *python(ROUND)) as job:
        try:
            read_until(job, r"waiting for worker 1 \(2 of 3 are there")
            # Its Ray worker is killed as it is when its node fails, and the agent dies with it.
            os.kill(_parent(_agent_of("worker 0", launcher)), signal.SIGKILL)
            lines = read_until(job, "the agent of worker 0 was lost before the job began")
            assert re.search(CLOSED, lines)
            lines += read_until(job, r"waiting for worker 1 \(2 of 3 are there")
            go.touch()
            stdout, stderr = job.communicate(timeout=JOB_S)
        finally:
            job.kill()
    assert job.returncode == 0, stderr
    assert stdout.count("sum 3.0") == 2
    assert "[launcher] ray: " not in lines + stderr, "Ray's own long words stay in its logs"
    assert launcher.nothing_runs()


# A process that dies before it has read all that it got resets its connections.
CLOSED = r"the connection (was closed|broke: Connection reset by peer)"


def _agent_of(member: str, launcher: Launcher) -> int:
    words = f"kvstore-agent\0{member}\0".encode()
    found = [pid for pid in launcher.processes() if words in _command_line(int(str(pid)))]
    [agent] = [pid for pid in found if b"/bin/sh" not in _command_line(int(str(pid)))]
    return int(str(agent))


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[1])


def test_a_worker_that_is_lost_later_ends_the_job_and_is_named(launcher: Launcher) -> None:
    with launcher.start("-n", "2", "-s", "1", *python(STAY)) as job:
        try:
            two_lines(job)
            began = time.monotonic()
            os.kill(_parent(_agent_of("worker 1", launcher)), signal.SIGKILL)
            assert job.stderr is not None
            lines = job.stderr.read()
            code = job.wait(SENTENCE_S)
        finally:
            job.kill()
    assert code != 0
    assert re.search(r"process:  worker 1 \(pid \d+ on \S+\)", lines)
    assert re.search(rf"was lost: {CLOSED}", lines), lines
    assert time.monotonic() - began < SENTENCE_S
    assert launcher.nothing_runs()


def test_policies_and_places_arrive_at_ray(launcher: Launcher) -> None:
    """STRICT_PACK puts all on one node, however little room is left there."""
    words = ["--worker-cores", "3", "--launcher-args=--strategy STRICT_PACK --max-retries 0"]
    done = launcher.run("-n", "2", "-s", "1", *words, *python(ROUND))
    assert done.returncode == 0, done.stderr
    assert len(set(re.findall(r"sum 3\.0 on (\S+)", done.stdout))) == 1


def test_a_working_directory_is_shipped(launcher: Launcher, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("WORD = 'shipped'\n")
    text = "import os, mine, kvstore; kvstore.create('dist_sync'); print(mine.WORD, os.getcwd())"
    words = ["-n", "2", "-s", "1", "--worker-cores", "5", "--launcher-args=--working-dir ."]
    done = launcher.run(*words, *python(text), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"shipped \S*/working_dir_files/_ray_pkg_", done.stdout)) == 2


@pytest.fixture
def only_here() -> Iterator[Path]:
    """A directory that this machine has and the other node has not."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        yield Path(directory)


def test_within_a_submitted_job_the_directory_is_the_one_that_ray_has_shipped(
    launcher: Launcher, only_here: Path
) -> None:
    (only_here / "mine.py").write_text("WORD = 'submitted'\n")
    text = "import mine, kvstore; kvstore.create('dist_sync'); print(mine.WORD)"
    # What the command of `ray job submit --working-dir` finds in its environment.
    submitted = {"runtime_env": {"working_dir": str(only_here)}, "metadata": {}}
    done = launcher.run(
        *("-n", "2", "-s", "1", "--worker-cores", "5", *python(text)),
        cwd=only_here,
        RAY_JOB_CONFIG_JSON_ENV_VAR=json.dumps(submitted),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("submitted") == 2


def test_a_directory_that_a_node_has_not_is_a_sentence(
    launcher: Launcher, ray_cluster: Ray, only_here: Path
) -> None:
    (host,) = ray_cluster.network.hosts
    began = time.monotonic()
    done = launcher.run("-n", "2", "-s", "1", "--worker-cores", "5", "true", cwd=only_here)
    assert time.monotonic() - began < SENTENCE_S
    assert done.returncode == 1
    [line] = said(done)
    assert f"{host.name}: there is no directory {only_here}" in line
    assert "--working-dir ." in line
    assert launcher.nothing_runs()


def test_a_python_that_a_node_has_not_is_a_sentence(launcher: Launcher) -> None:
    done = launcher.run("-n", "1", "-s", "1", "--python", "/no/python", "true", limit_s=SENTENCE_S)
    assert done.returncode == 1
    [line] = said(done)
    assert "the agent of " in line
    assert (
        "ended with exit code 127; its last line of output: /no/python: No such file or directory; "
        "check --python"
    ) in line


@pytest.mark.parametrize(
    ("address", "sentence"),
    [
        ("127.0.0.1:{port}", "there is no Ray at 127.0.0.1:{port} (Connection refused)"),
        ("ray://127.0.0.1:{port}", "run the launcher on a node of the cluster"),
        ("http://127.0.0.1:{port}", "run the launcher on a node of the cluster"),
    ],
)
def test_where_there_is_no_ray_it_says_so(launcher: Launcher, address: str, sentence: str) -> None:
    (port,) = free_ports(1)
    done = launcher.run(
        *("-n", "1", "true"), limit_s=SENTENCE_S, RAY_ADDRESS=address.format(port=port)
    )
    assert done.returncode == 1
    [line] = said(done)
    assert sentence.format(port=port) in line


def test_without_ray_it_says_what_to_install(tmp_path: Path) -> None:
    hide = tmp_path / "sitecustomize.py"
    hide.write_text(
        "import importlib.util as util\nfind = util.find_spec\n"
        "util.find_spec = lambda name, *rest: None if name == 'ray' else find(name, *rest)\n"
    )
    without = Launcher(["--launcher", "ray"], (), list)
    done = without.run("-n", "2", "true", PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    assert done.returncode == 2
    [line] = said(done)
    assert "pip install 'ray>=2.9'" in line


def test_a_dry_run_prints_what_is_asked_of_ray(launcher: Launcher) -> None:
    words = ["--dry-run", "--worker-gpus", "1", "--worker-memory", "2g", "--jobname", "mine"]
    done = launcher.run("-n", "2", "-s", "1", *words, "python", "train.py")
    assert done.returncode == 0
    assert "ray_driver.py JOBDIR" in done.stdout
    assert '"memory": 2147483648' in done.stdout
    assert '"name": "mine"' in done.stdout
    assert "# agent 2, worker 1: python train.py" in done.stdout


@pytest.fixture
def alone() -> Iterator[Launcher]:
    """A machine on which no Ray runs, as far as the launcher can see."""
    with tempfile.TemporaryDirectory(prefix="kv-ray-", dir="/tmp") as directory:
        yield Launcher(
            own=["--launcher", "ray"],
            hosts=[socket.gethostname()],
            processes=lambda: processes_naming(Path(directory)),
            environment={"RAY_TMPDIR": directory, "RAY_ADDRESS": "", "HOME": directory},
        )
        assert not Path(directory, ".ray").exists(), "Ray's later clusters would want its token"


def test_without_a_cluster_one_is_started_here_for_more_processes_than_processors(
    alone: Launcher,
) -> None:
    count = (os.cpu_count() or 1) + 1
    done = alone.run("-n", str(count), "-s", "1", *python(ROUND))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"sum {count * (count + 1) / 2} on {socket.gethostname()}") == count
    assert alone.nothing_runs()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_cluster_that_was_started_here_ends_with_the_launcher(
    alone: Launcher, number: signal.Signals
) -> None:
    with alone.start("-n", "2", "-s", "1", *python(STAY)) as job:
        try:
            two_lines(job)
            job.send_signal(number)
            job.wait(SENTENCE_S)
        finally:
            job.kill()
    assert alone.nothing_runs()


def test_what_this_machine_alone_cannot_give_is_an_error(alone: Launcher) -> None:
    done = alone.run("-n", "1", "-s", "1", "--worker-gpus", "64", "true")
    assert done.returncode == 1
    assert "no node of the Ray cluster has 64 GPUs" in done.stderr
    assert "set RAY_ADDRESS to another one" in done.stderr
    assert alone.nothing_runs()


def test_an_autoscaler_sees_what_the_job_needs_and_adds_nodes(growing_ray_cluster: Ray) -> None:
    own = Launcher(["--launcher", "ray"], (), list, growing_ray_cluster.environment)
    done = own.run("-n", "2", "-s", "1", "--worker-cores", "3", *python(ROUND))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("sum 3.0") == 2
