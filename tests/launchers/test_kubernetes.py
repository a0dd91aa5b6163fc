"""The launcher for Kubernetes: its manifests against the published schemas, and whole jobs.

The schemas are those of the API itself, from the package ``kubernetes-validate``. Whole jobs run
with the real client and a stand-in for the cluster whose pods are processes of this machine
(``standins/cluster.py``); nothing here has seen a real cluster.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from packages import needed

pytestmark = [
    pytest.mark.process,
    pytest.mark.timeout(90),
    pytest.mark.skipif(sys.platform != "linux", reason="the stand-in gives pods 127.x.y.z"),
]

ROOT = Path(__file__).resolve().parents[2]
STAND_IN = Path(__file__).with_name("standins") / "cluster.py"
VERSIONS = ("1.25.0", "1.29.0", "1.33.0")

# The launcher as it is, with less patience.
LAUNCH = """
import signal, sys
sys.path.insert(0, sys.argv[1])
signal.signal(signal.SIGINT, signal.default_int_handler)
from kvstore.launch import cli
from kvstore.launch.backends.kubernetes import run as kubernetes
from kvstore.launch.backends.kubernetes.pods import Patience
from kvstore.launch.job.restarts import Timing
timing = Timing(drain_s=5, service_s=5, failure_s=1, alone_s=1, step_s=3, killed_s=3)
patience = Patience(
    poll_s=0.2, silent_s=float(sys.argv[2]), first_remark_s=0.5,
    remind_s=1, final_s=1, trouble_s=3, last_output_s=3, delete_s=2, lifecycle=timing,
)
kubernetes.run = lambda options, environ, *rest: kubernetes.run_with(options, environ, patience)
sys.exit(cli.main(sys.argv[3:]))
"""


@dataclass
class Cluster:
    """A stand-in's state, and launchers that use it."""

    directory: Path
    server: subprocess.Popen[str]
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def set_faults(self, **faults: Any) -> None:
        draft = self.directory / "faults.draft"
        draft.write_text(json.dumps(faults))
        draft.rename(self.directory / "faults.json")

    def launch(
        self, *arguments: str, silent_s: float = 60, **environment: str
    ) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", LAUNCH, str(ROOT), str(silent_s), "--launcher", "kubernetes",
             *arguments],
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "KUBECONFIG": str(self.directory / "config"),
                "NO_PROXY": "127.0.0.1",
                "TMPDIR": str(self.directory / "tmp"),
                **environment,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )  # fmt: skip
        self.started.append(process)
        return process

    def run(self, *arguments: str, **more: Any) -> subprocess.CompletedProcess[str]:
        process = self.launch(*arguments, **more)
        output, error = process.communicate(timeout=60)
        return subprocess.CompletedProcess(process.args, process.returncode, output, error)

    def calls(self) -> list[str]:
        """Requests, as in ``GET /version/``."""
        path = self.directory / "calls.log"
        return path.read_text().splitlines() if path.exists() else []

    def looks(self) -> int:
        """How often the Jobs were looked at."""
        return sum(call.startswith("GET") and "/jobs?" in call for call in self.calls())

    def objects(self) -> set[str]:
        """Everything but events that exists in the cluster."""
        kinds = ("Job", "Pod", "Service", "Secret")
        return {
            f"{kind}/{path.stem}"
            for kind in kinds
            for path in (self.directory / kind).glob("*.json")
        }

    def processes(self) -> dict[int, str]:
        """Processes of pods and of the cluster, by the mark in their environment."""
        found = {}
        for path in Path("/proc").iterdir():
            try:
                is_other = path.name.isdigit() and int(path.name) != self.server.pid
                environ = (path / "environ").read_bytes() if is_other else b""
                if str(self.directory).encode() in environ:
                    found[int(path.name)] = (path / "cmdline").read_bytes().decode()
            except OSError:  # it has ended, or is another user's
                continue
        return found

    def remains(self, within_s: float = 5.0) -> list[str]:
        """What is still there of jobs that are over; pods have a moment to end."""
        until_s = time.monotonic() + within_s
        while (self.processes() or self.objects()) and time.monotonic() < until_s:
            time.sleep(0.05)
        logs = [path.name for path in (self.directory / "tmp").iterdir()]
        return [*self.processes().values(), *self.objects(), *logs]

    def end(self) -> None:
        for process in self.started:
            if process.poll() is None:
                process.kill()
            process.communicate()
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    (tmp_path / "tmp").mkdir()
    server = subprocess.Popen(
        [sys.executable, str(STAND_IN), "--serve"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "CLUSTER_STANDIN": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdout is not None
    found = Cluster(tmp_path, server)
    (tmp_path / "config").write_text(config(int(server.stdout.readline())))
    yield found
    found.end()
    server.kill()
    server.communicate()


def config(port: int) -> str:
    """A file of kubectl; JSON is YAML."""
    contexts = [
        {"name": "other", "context": {"cluster": "here", "user": "me", "namespace": "other"}},
        {"name": "here", "context": {"cluster": "here", "user": "me", "namespace": "team"}},
    ]
    server = {"server": f"http://127.0.0.1:{port}"}
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "here",
        "contexts": contexts,
        "clusters": [{"name": "here", "cluster": server}],
        "users": [{"name": "me", "user": {"token": "not a secret"}}],
    }
    return json.dumps(document)


def test_a_missing_package_is_a_failure_where_the_launchers_tests_are_to_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KVSTORE_LAUNCHER_TESTS", "1")
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        needed("no_such_package")
    monkeypatch.delenv("KVSTORE_LAUNCHER_TESTS")
    with pytest.raises(pytest.skip.Exception, match="no_such_package"):
        needed("no_such_package")


def wait_for(what: Callable[[], object], within_s: float = 20.0) -> None:
    until_s = time.monotonic() + within_s
    while not what():
        assert time.monotonic() < until_s, "it did not come about"
        time.sleep(0.05)


def worker(text: str) -> list[str]:
    """A command; ``rank`` is the worker's rank."""
    start = "import os, sys, time; rank = int(os.environ['DMLC_TASK_ID'])\n"
    return ["--", sys.executable, "-uc", start + text]


APPLY = ("-s", "1", "--image", "lab/train:1", "--apply", "--python", sys.executable)

# -- manifests --------------------------------------------------------------------------------


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    "words",
    [
        (),
        ("--worker-gpus", "2", "--worker-cores", "3", "--worker-memory", "4g",
         "--server-cores", "1", "--server-memory", "1g", "--namespace", "team",
         "--jobname", "lenet", "--env", "A=$(B) é\n", "--env-server", "C:1"),
    ],
    ids=["bare", "full"],
)  # fmt: skip
def test_the_manifests_are_valid(cluster: Cluster, version: str, words: tuple[str, ...]) -> None:
    yaml, validate = needed("yaml"), needed("kubernetes_validate").validate
    done = cluster.run("-n", "2", "--image", "lab/train:1", *words, "--", "python", "a b", "$X")
    assert done.returncode == 0, done.stderr
    documents = list(yaml.safe_load_all(done.stdout))
    kinds = ["Secret", "Service", "Service", "Job", "Job", "Job"]
    assert [each["kind"] for each in documents] == kinds
    for document in documents:
        validate(document, version, strict=True)


def test_a_field_with_a_wrong_name_would_be_noticed(cluster: Cluster) -> None:
    yaml, validator = needed("yaml"), needed("kubernetes_validate")
    done = cluster.run("-n", "1", "--image", "lab/train:1", "true")
    job = list(yaml.safe_load_all(done.stdout))[-1]
    job["spec"]["backofLimit"] = job["spec"].pop("backoffLimit")
    with pytest.raises(validator.ValidationError):
        validator.validate(job, VERSIONS[-1], strict=True)


def test_yaml_reads_back_every_text_that_was_written(cluster: Cluster) -> None:
    yaml = needed("yaml")
    command = ["é 漢 😀", "\u2028\x85\x7f\ufeff\x01", "yes", "1e3", "", " a: b #c", "\n\t\r", "---"]
    done = cluster.run("-n", "1", "--image", "lab/train:1", "--", *command)
    job = list(yaml.safe_load_all(done.stdout))[-1]
    assert job["spec"]["template"]["spec"]["containers"][0]["args"] == command


def test_without_apply_the_output_is_what_kubectl_takes_and_nothing_is_called(
    cluster: Cluster,
) -> None:
    done = cluster.run("-n", "1", "--image", "lab/train:1", "true")
    assert done.stdout.startswith("---\n")
    assert "the output contains the job's key in a Secret" in done.stderr
    assert "kubectl delete jobs,pods,services,secrets -l kvstore-job=" in done.stderr
    assert cluster.calls() == []


def test_a_dry_run_says_what_would_be_done_and_shows_no_key(cluster: Cluster) -> None:
    yaml = needed("yaml")
    done = cluster.run("-n", "1", *APPLY, "--dry-run", "true")
    assert done.returncode == 0
    secret = next(iter(yaml.safe_load_all(done.stdout)))
    assert "not shown" in secret["stringData"]["job.key"]
    assert "# With --apply this is created in the namespace of the present context" in done.stdout
    assert cluster.calls() == []


def test_every_job_has_a_key_of_its_own(cluster: Cluster) -> None:
    yaml = needed("yaml")
    keys = set()
    for _ in range(2):
        done = cluster.run("-n", "1", "--image", "lab/train:1", "true")
        keys.add(next(iter(yaml.safe_load_all(done.stdout)))["stringData"]["job.key"])
    assert len(keys) == 2
    assert min(map(len, keys)) >= 40


def test_the_user_s_key_is_used_where_there_is_one(cluster: Cluster) -> None:
    yaml = needed("yaml")
    path = cluster.directory / "own.key"
    path.touch(0o600)
    path.write_text("a key of my own, 123\n")
    words = ("-n", "1", "--image", "lab/train:1", "true")
    done = cluster.run(*words, PS_JOB_KEY_FILE=str(path))
    assert next(iter(yaml.safe_load_all(done.stdout)))["stringData"]["job.key"] == (
        "a key of my own, 123"
    )
    path.write_text("short")
    refused = cluster.run(*words, PS_JOB_KEY_FILE=str(path))
    assert refused.returncode == 1
    assert "must have 16 to 4096" in refused.stderr


def test_without_an_image_one_sentence_says_so(cluster: Cluster) -> None:
    done = cluster.run("-n", "1", "--apply", "python", "train.py")
    assert done.returncode == 2
    assert done.stderr.startswith("[launcher] --launcher kubernetes needs --image IMAGE")
    assert cluster.calls() == []


def test_without_a_configuration_one_sentence_says_so(cluster: Cluster) -> None:
    done = cluster.run("-n", "1", *APPLY, "true", KUBECONFIG=str(cluster.directory / "none"))
    assert done.returncode == 1
    assert "found no cluster to use: Invalid kube-config file" in done.stderr
    assert cluster.remains(0.0) == []


def test_without_the_client_manifests_are_written_and_nothing_is_applied(
    cluster: Cluster,
) -> None:
    (cluster.directory / "kubernetes.py").write_text("raise ImportError\n")
    path = {"PYTHONPATH": f"{cluster.directory}:{ROOT}"}
    assert cluster.run("-n", "1", "--image", "lab/train:1", "true", **path).returncode == 0
    done = cluster.run("-n", "1", *APPLY, "true", **path)
    assert done.returncode == 2
    assert "the Python client for Kubernetes is not installed in " in done.stderr
    assert "pip install 'kubernetes>=" in done.stderr


# -- whole jobs -------------------------------------------------------------------------------

SUMS = """
import kvstore, numpy as np
kv = kvstore.create("dist_sync")
kv.init("w", np.zeros(3))
kv.push("w", np.full(3, kv.rank + 1.0))
print("sum", kv.pull("w"), sys.argv[1:])
"""


def test_a_job_trains_and_leaves_nothing(cluster: Cluster) -> None:
    done = cluster.run("-n", "2", *APPLY, *worker(SUMS), "$(HOME) $$", "'q'")
    assert done.returncode == 0, done.stderr
    shown = "sum [3. 3. 3.] ['$(HOME) $$', \"'q'\"]"
    assert sorted(done.stdout.splitlines()) == [
        f"[worker 0@node-1] {shown}",
        f"[worker 1@node-2] {shown}",
    ]
    assert "all 4 pods have started" in done.stderr
    [joined] = [line for line in done.stderr.splitlines() if "have joined" in line]
    assert re.fullmatch(
        r"\[launcher\] all have joined: 2 workers and 1 server on node-\d, node-\d(, node-\d)?; "
        r"scheduler at kvstore-\w+-scheduler:9091; logs in /\S+",
        joined,
    )
    assert cluster.remains() == []


TORCH = """
import torch, torch.distributed as dist
import kvstore.torch
dist.init_process_group("kvstore")
kv = kvstore.create("dist")
rank = torch.tensor(float(os.environ["RANK"]) + 1)
dist.all_reduce(rank)
print("torch", rank.item(), os.environ["LOCAL_RANK"], dist.get_rank() == kv.rank)
"""


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs PyTorch")
def test_workers_are_ranks_of_torch_that_meet_at_the_first_pod(cluster: Cluster) -> None:
    done = cluster.run("-n", "2", *APPLY, *worker(TORCH))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        f"[worker {rank}@node-{rank + 1}] torch 3.0 0 True" for rank in range(2)
    ]


def test_a_worker_that_exits_7_ends_the_job_with_7(cluster: Cluster) -> None:
    text = "print('about to fail'); time.sleep(60 * (rank != 1)); sys.exit(7)"
    done = cluster.run("-n", "3", *APPLY, *worker(text))
    assert done.returncode == 7, done.stderr
    lines = done.stderr.splitlines()
    start = lines.index("======== the job failed; this was the first failure ========")
    assert lines[start + 1].startswith("process:  worker 1 (pod kvstore-")
    assert lines[start + 1].endswith("on node node-2)")
    assert lines[start + 2].startswith("ended:    exit code 7, ")
    assert "    about to fail" in lines
    assert "ended by the launcher: scheduler, server 0, worker 0, worker 2" in lines
    log_dir = Path(lines[-1].removeprefix("logs of all processes: "))
    assert (log_dir / "worker-1.log").read_text() == "about to fail\n"
    shutil.rmtree(log_dir)
    assert cluster.remains() == []


def test_a_script_without_a_store_succeeds_and_its_servers_are_ended(cluster: Cluster) -> None:
    done = cluster.run("-n", "1", *APPLY, *worker("print('alone')"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "[worker 0@node-1] alone"
    assert "warning: scheduler, server 0 did not end within 5 s of the last worker" in done.stderr
    log_dir = Path(done.stderr.splitlines()[-1].rpartition(": ")[2])
    assert (log_dir / "worker-0.log").read_text() == "alone\n"
    shutil.rmtree(log_dir)
    assert cluster.remains() == []


def test_a_worker_that_is_killed_for_its_memory_is_named_so(cluster: Cluster) -> None:
    text = (
        "rank or open(os.environ['CLUSTER_STANDIN_FATE'], 'w').write('OOMKilled')\ntime.sleep(60)"
    )
    done = cluster.run("-n", "2", *APPLY, *worker(text))
    assert done.returncode == 137
    assert "ended:    signal SIGKILL (OOMKilled), " in done.stderr


def test_a_pod_that_is_evicted_is_named_so(cluster: Cluster) -> None:
    text = "rank or open(os.environ['CLUSTER_STANDIN_FATE'], 'w').write('Evicted')\ntime.sleep(60)"
    done = cluster.run("-n", "2", *APPLY, *worker(text))
    assert done.returncode == 137
    assert "(Evicted), " in done.stderr
    assert "process:  worker 0 (pod " in done.stderr


def test_a_program_that_is_not_in_the_image_is_named(cluster: Cluster) -> None:
    done = cluster.run("-n", "1", *APPLY, "--", "no-such-program")
    assert done.returncode == 128
    assert "StartError: exec: no-such-program: No such file or directory" in done.stderr


def test_an_image_that_cannot_be_pulled_ends_the_job_with_a_sentence(cluster: Cluster) -> None:
    cluster.set_faults(missing_images=["lab/train:1"])
    done = cluster.run("-n", "1", *APPLY, *worker(""))
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("[launcher] the job was not started: scheduler (pod kvstore-")
    assert 'ImagePullBackOff: Back-off pulling image "lab/train:1"' in last
    assert cluster.remains() == []


def test_a_cluster_without_room_is_named_and_waited_for_until_the_rendezvous_is_over(
    cluster: Cluster,
) -> None:
    cluster.set_faults(unschedulable=["worker"])
    # The worker's alone, which counts for the launcher: the scheduler does not give up first.
    words = ("--env-worker", "PS_RENDEZVOUS_TIMEOUT:6")
    done = cluster.run("-n", "1", *APPLY, *words, *worker(""))
    assert done.returncode == 1
    reason = "worker 0 (Unschedulable: 0/3 nodes are available: 3 Insufficient nvidia.com/gpu.)"
    assert f", waiting for {reason}" in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.endswith(f"not all pods have started within 6 s (PS_RENDEZVOUS_TIMEOUT): {reason}")
    assert cluster.remains() == []


def test_a_quota_that_forbids_pods_is_named(cluster: Cluster) -> None:
    cluster.set_faults(quota='pods "x" is forbidden: exceeded quota: small')
    done = cluster.run("-n", "1", *APPLY, *worker(""))
    assert done.returncode == 1
    assert 'FailedCreate: Error creating: pods "x" is forbidden: exceeded quota' in done.stderr
    assert cluster.remains() == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_deletes_the_job(cluster: Cluster, number: signal.Signals, code: int) -> None:
    process = cluster.launch("-n", "2", *APPLY, *worker("print('up')\ntime.sleep(60)"))
    assert process.stdout is not None
    assert {process.stdout.readline()[:8] for _ in range(2)} == {"[worker "}
    process.send_signal(number)
    _, error = process.communicate(timeout=30)
    assert process.returncode == code, error
    assert f"got {number.name}: ending the job" in error
    last, _, log_dir = error.splitlines()[-1].partition("; logs of all processes: ")
    assert last == f"[launcher] ended by {number.name}"
    assert bool(log_dir) == (number is signal.SIGTERM)  # who pressed Ctrl-C has seen the output
    if log_dir:
        shutil.rmtree(log_dir)
    assert cluster.remains() == []


def test_a_program_that_ignores_sigterm_is_ended_by_a_second_signal(cluster: Cluster) -> None:
    text = "import signal; signal.signal(15, signal.SIG_IGN); print('up'); time.sleep(60)"
    process = cluster.launch("-n", "1", *APPLY, *worker(text))
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    wait_for(lambda: any("DELETE" in call for call in cluster.calls()))
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=30)
    assert process.returncode == 130, error
    hurried = [call for call in cluster.calls() if "gracePeriodSeconds=1" in call]
    assert hurried
    assert all("/pods/" in call for call in hurried)
    assert cluster.remains() == []


def test_a_job_of_somebody_else_is_left_alone(cluster: Cluster) -> None:
    (cluster.directory / "Secret").mkdir()
    other = {"kind": "Secret", "metadata": {"name": "other", "labels": {"kvstore-job": "other"}}}
    (cluster.directory / "Secret" / "other.json").write_text(json.dumps(other))
    assert cluster.run("-n", "1", *APPLY, *worker("sys.exit(3)")).returncode == 3
    wait_for(lambda: cluster.objects() == {"Secret/other"})


def test_lines_come_once_each_also_when_the_connection_breaks(cluster: Cluster) -> None:
    cluster.set_faults(log_cuts=6)
    text = SUMS + "\nfor i in range(40): print('line', i); time.sleep(0.05)"
    done = cluster.run("-n", "2", *APPLY, *worker(text))
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        start = f"[worker {rank}@node-{rank + 1}] line "
        found = [line for line in done.stdout.splitlines() if line.startswith(start)]
        assert found == [f"{start}{number}" for number in range(40)]
    assert sum("/log?" in call for call in cluster.calls()) > 8


def test_a_silent_cluster_ends_no_job(cluster: Cluster) -> None:
    text = SUMS + "\nwhile not os.path.exists(sys.argv[1]): time.sleep(0.05)\nprint('done')"
    flag = cluster.directory / "go-on"
    process = cluster.launch("-n", "1", *APPLY, *worker(text), str(flag))
    assert process.stdout is not None
    assert "sum" in process.stdout.readline()
    cluster.set_faults(silent=True)
    before = cluster.looks()
    # The first may have begun before; when the third begins, the second has had its answer.
    wait_for(lambda: cluster.looks() >= before + 3)
    cluster.set_faults()
    flag.touch()
    output, error = process.communicate(timeout=30)
    assert process.returncode == 0, error
    assert output == "[worker 0@node-1] done\n"
    assert "[launcher] the cluster does not answer (('Connection aborted.'" in error
    assert "[launcher] the cluster answers again, after " in error
    assert cluster.remains() == []


def test_a_cluster_that_stays_silent_is_given_up_with_the_job_left_alone(
    cluster: Cluster,
) -> None:
    process = cluster.launch(
        "-n", "1", *APPLY, *worker("print('up'); time.sleep(60)"), silent_s=1.5
    )
    assert process.stdout is not None
    process.stdout.readline()
    cluster.set_faults(silent=True)
    _, error = process.communicate(timeout=30)
    assert process.returncode == 1
    last = error.splitlines()[-1]
    assert "the job was left alone and may still run" in last
    assert (
        "kubectl --context=here --namespace=team delete jobs,pods,services,secrets -l kvstore-job="
        in last
    )
    assert len(cluster.objects()) == 3 + 3 + 3  # Jobs, pods, and the Services and the Secret


def test_a_cluster_that_cannot_be_reached_is_named(cluster: Cluster) -> None:
    cluster.set_faults(silent=True)
    done = cluster.run("-n", "1", *APPLY, *worker(""))
    assert done.returncode == 1
    assert done.stderr.startswith("[launcher] cannot create the job: ('Connection aborted.'")
    assert len(done.stderr.splitlines()) == 1


def test_a_job_of_which_a_part_is_refused_is_removed_whole(cluster: Cluster) -> None:
    cluster.set_faults(refused_kinds=["Service"])
    done = cluster.run("-n", "1", *APPLY, *worker(""))
    assert done.returncode == 1
    assert "cannot create the job: Forbidden: you cannot create resource Service" in done.stderr
    assert cluster.remains() == []


def test_a_job_that_may_not_be_looked_at_is_removed_at_once(cluster: Cluster) -> None:
    cluster.set_faults(refused=["list pods"])
    done = cluster.run("-n", "1", *APPLY, *worker("time.sleep(60)"))
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "[launcher] cannot follow the job: Forbidden: you cannot list pods"
    )
    assert cluster.remains() == []


def test_logs_that_may_not_be_read_are_said_to_be_missing_once(cluster: Cluster) -> None:
    cluster.set_faults(refused=["log"])
    done = cluster.run("-n", "1", *APPLY, *worker(SUMS + "\ntime.sleep(1)"))
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    said = "[launcher] no log of worker 0: Forbidden: you cannot read logs"
    assert done.stderr.splitlines().count(said) == 1


def test_secret_and_services_belong_to_the_job_of_the_scheduler(cluster: Cluster) -> None:
    """So that they vanish with it some time after its machine was switched off."""
    process = cluster.launch("-n", "1", *APPLY, *worker("print('up'); time.sleep(60)"))
    assert process.stdout is not None
    process.stdout.readline()

    def owners() -> list[str]:
        paths = [path for kind in ("Secret", "Service")
                 for path in (cluster.directory / kind).glob("*.json")]  # fmt: skip
        found = [json.loads(path.read_text())["metadata"] for path in paths]
        return [each["ownerReferences"][0]["name"] for each in found if "ownerReferences" in each]

    wait_for(lambda: len(owners()) == 3)
    assert {name.partition("-")[2].partition("-")[2] for name in owners()} == {"scheduler"}
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)


def test_a_launcher_that_is_killed_takes_its_job_with_it(cluster: Cluster) -> None:
    process = cluster.launch("-n", "2", *APPLY, *worker("print('up'); time.sleep(60)"))
    assert process.stdout is not None
    process.stdout.readline()
    process.kill()
    process.communicate()
    (log_dir,) = (name for name in cluster.remains(20) if name.startswith("kvstore-launch-"))
    shutil.rmtree(cluster.directory / "tmp" / log_dir)
    assert cluster.remains() == []


def test_no_key_is_on_a_command_line_or_shown(cluster: Cluster) -> None:
    path = cluster.directory / "own.key"
    path.touch(0o600)
    path.write_text("a-key-that-is-easy-to-find")
    done = cluster.run("-n", "1", *APPLY, *worker(SUMS), PS_JOB_KEY_FILE=str(path))
    assert done.returncode == 0, done.stderr
    shown = done.stdout + done.stderr + json.dumps(cluster.calls())
    assert "a-key-that-is-easy-to-find" not in shown


# -- before the start -------------------------------------------------------------------------


def test_the_check_lists_everything_and_starts_nothing(cluster: Cluster) -> None:
    done = cluster.run("-n", "1", *APPLY, "--check", *worker(""))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {line[4:].partition("  ")[0]: line for line in done.stdout.splitlines()}
    assert rows["options"].endswith("  image lab/train:1")
    assert rows["cluster"].endswith("  v1.31.2")
    assert rows["namespace"].endswith("  team")
    assert all(row.startswith("ok ") for row in rows.values())
    assert {"create jobs.batch", "get pods/log", "delete secrets"} <= rows.keys()
    assert cluster.remains(0.0) == []


def test_the_check_names_what_is_in_the_way(cluster: Cluster) -> None:
    cluster.set_faults(
        forbidden=["create secrets", "get pods/log"], namespaces=["other"], version="v1.21.3"
    )
    done = cluster.run("-n", "1", "--check", *worker(""))
    assert done.returncode == 1
    rows = [line[4:].partition("  ")[0] for line in done.stdout.splitlines() if line[:2] == "NO"]
    assert rows == ["options", "cluster", "namespace", "create secrets", "get pods/log"]
    assert "1.24 or later is needed" in done.stdout


def test_the_check_of_a_silent_cluster_ends_with_that(cluster: Cluster) -> None:
    cluster.set_faults(silent=True)
    done = cluster.run("-n", "1", *APPLY, "--check", *worker(""))
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1].startswith("NO  cluster  ('Connection aborted.'")
