"""A stand-in for ``kubectl`` and the cluster behind it: pods are processes of this machine.

Behaves, for the calls that the launcher makes, as the reference pages of kubectl and the API say:
``apply``, ``get``, ``logs``, ``delete``, ``auth can-i``, ``version`` and ``config view``. The
state is a directory, $KUBECTL_STANDIN; ``faults.json`` in it says what goes wrong. The Job
controller (``backoffLimit: 0``) and the kubelet are the process ``--run-pod``, one for each pod,
which ends when its pod does. Pods have addresses in 127.0.0.0/8, the name of a Service stands for
the address of the scheduler's pod, and ``/run/kvstore`` is a directory of each pod. There is no
isolation, and images are names only. Standard library and PyYAML; nothing of this project.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

STATE = Path(os.environ["KUBECTL_STANDIN"])
KINDS = {
    "jobs": "Job",
    "pods": "Pod",
    "services": "Service",
    "secrets": "Secret",
    "events": "Event",
}
INDEX = "batch.kubernetes.io/job-completion-index"
LONGEST_S = 120.0
STEP_S = 0.02


# -- the state --------------------------------------------------------------------------------


def faults() -> dict[str, Any]:
    path = STATE / "faults.json"
    return json.loads(path.read_text()) if path.exists() else {}


def path_of(kind: str, name: str) -> Path:
    return STATE / kind / f"{name}.json"


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(f".{os.getpid()}.draft")
    draft.write_text(text)
    draft.rename(path)


def save(item: dict[str, Any]) -> None:
    write(path_of(item["kind"], item["metadata"]["name"]), json.dumps(item))


def load(kind: str, name: str) -> dict[str, Any] | None:
    try:
        item: dict[str, Any] = json.loads(path_of(kind, name).read_text())
    except FileNotFoundError:
        return None
    if (STATE / "leaving" / name).exists() and kind == "Pod":
        item["metadata"]["deletionTimestamp"] = now()
    return item


def all_of(kind: str) -> list[dict[str, Any]]:
    names = sorted(path.stem for path in (STATE / kind).glob("*.json"))
    return [item for item in (load(kind, name) for name in names) if item is not None]


def selected(kind: str, selector: str | None) -> list[dict[str, Any]]:
    wanted = dict(part.split("=", 1) for part in selector.split(",")) if selector else {}
    return [
        item
        for item in all_of(kind)
        if wanted.items() <= item["metadata"].get("labels", {}).items()
    ]


def now(digits: int = 0) -> str:
    text = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%f")
    return text[:19] + "Z" if not digits else text.rstrip("0").rstrip(".") + "Z"


def fail(text: str) -> int:
    print(text, file=sys.stderr)
    return 1


# -- the commands -----------------------------------------------------------------------------


def apply() -> int:
    import yaml

    status = 0
    for item in yaml.safe_load_all(sys.stdin.read()):
        kind, name = item["kind"], item["metadata"]["name"]
        there = load(kind, name)
        if kind in faults().get("refused_kinds", ()):
            status = fail(f"Error from server (Forbidden): you cannot create resource {kind}")
            continue
        if there is not None:
            there["metadata"].update(item["metadata"])
            save(there)
            print(f"{kind.lower()}/{name} configured")
            continue
        item["metadata"]["uid"] = str(uuid.uuid4())
        item["metadata"]["creationTimestamp"] = now()
        save(item)
        print(f"{kind.lower()}/{name} created")
        if kind == "Job":
            control(item)
    return status


def control(job: dict[str, Any]) -> None:
    """The Job controller: one pod for each index."""
    if quota := faults().get("quota"):
        warn("Job", job["metadata"]["name"], "FailedCreate", f"Error creating: {quota}")
        return
    for index in range(job["spec"]["completions"]):
        template = json.loads(json.dumps(job["spec"]["template"]))
        name = f"{job['metadata']['name']}-{index}-{uuid.uuid4().hex[:5]}"
        template.update(apiVersion="v1", kind="Pod")
        metadata = template["metadata"]
        metadata.update(name=name, uid=str(uuid.uuid4()), creationTimestamp=now())
        metadata.setdefault("annotations", {})[INDEX] = str(index)
        template["job"] = job["metadata"]["name"]
        template["status"] = {"phase": "Pending"}
        save(template)
        subprocess.Popen(
            [sys.executable, __file__, "--run-pod", name],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=open(STATE / "runner.err", "ab"),  # noqa: SIM115
            start_new_session=True,
        )


def warn(kind: str, name: str, reason: str, message: str) -> None:
    save(
        {
            "kind": "Event",
            "metadata": {"name": f"{name}.{uuid.uuid4().hex[:8]}"},
            "involvedObject": {"kind": kind, "name": name},
            "type": "Warning",
            "reason": reason,
            "message": message,
            "lastTimestamp": now(),
        }
    )


def get(words: list[str], options: dict[str, str]) -> int:
    if words[0] == "namespace":
        if words[1] in faults().get("namespaces", [words[1]]):
            print(f"namespace/{words[1]}")
            return 0
        return fail(f'Error from server (NotFound): namespaces "{words[1]}" not found')
    items = [
        item for kind in words[0].split(",") for item in selected(KINDS[kind], options.get("-l"))
    ]
    print(json.dumps({"apiVersion": "v1", "kind": "List", "items": items}))
    return 0


def delete(words: list[str], options: dict[str, str]) -> int:
    for kind in words[0].split(","):
        for item in selected(KINDS[kind], options.get("-l")):
            name = item["metadata"]["name"]
            if kind == "pods":
                delete_pod(item, float(options.get("--grace-period", "-1")))
            else:
                path_of(KINDS[kind], name).unlink(missing_ok=True)
                for pod in all_of("Pod") if kind == "jobs" else ():
                    if pod["job"] == name:
                        delete_pod(pod)
            print(f'{kind} "{name}" deleted')
    return 0


def delete_pod(pod: dict[str, Any], grace_s: float = -1) -> None:
    name = pod["metadata"]["name"]
    if pod["status"]["phase"] in ("Succeeded", "Failed"):
        path_of("Pod", name).unlink(missing_ok=True)
        return
    seconds = pod["spec"]["terminationGracePeriodSeconds"] if grace_s < 0 else grace_s
    write(STATE / "leaving" / name, str(seconds))


def logs(words: list[str], options: dict[str, str]) -> int:
    name, since = words[0], options.get("--since-time", "")[:19]
    pod = load("Pod", name)
    if pod is None:
        return fail(f'Error from server (NotFound): pods "{name}" not found')
    cut = _take_cut()
    path = STATE / "logs" / f"{name}.log"
    shown = 0
    with path.open("rb") as file:
        while True:
            pod = load("Pod", name)
            is_over = pod is None or pod["status"]["phase"] in ("Succeeded", "Failed")
            for line in file.readlines():
                if line[:19].decode() >= since:
                    sys.stdout.buffer.write(line)
                    sys.stdout.flush()
                    shown += 1
                    if cut is not None and shown >= cut:
                        return fail("error: unexpected EOF")
            if is_over or faults().get("silent"):
                return 0
            time.sleep(STEP_S)


def _take_cut() -> int | None:
    """``log_cuts``: after how many lines the first calls for logs end, each number used once."""
    cuts = faults().get("log_cuts", 0)
    for number in range(cuts):
        try:
            os.close(os.open(STATE / f"cut-{number}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            continue
        return 1
    return None


def version(options: dict[str, str]) -> int:
    found = {"clientVersion": {"gitVersion": "v1.32.0"}}
    if "--client" not in options:
        if faults().get("silent"):
            return refuse()
        found["serverVersion"] = {"gitVersion": faults().get("version", "v1.31.2")}
    print(json.dumps(found))
    return 0


def view() -> int:
    context = {"name": "here", "context": {"cluster": "here", "namespace": "team"}}
    print(json.dumps({"current-context": "here", "contexts": [context]}))
    return 0


def can_i(words: list[str], options: dict[str, str]) -> int:
    what = " ".join(words) + (f"/{options['--subresource']}" if "--subresource" in options else "")
    if what in faults().get("forbidden", ()):
        print("no")
        return 1
    print("yes")
    return 0


def refuse() -> int:
    return fail("The connection to the server 10.0.0.1:6443 was refused")


# -- a pod ------------------------------------------------------------------------------------


class PodRun:
    """The kubelet for one pod: runs it and writes its status until it has ended or is gone."""

    def __init__(self, name: str) -> None:
        pod = load("Pod", name)
        assert pod is not None
        self.name, self.pod = name, pod
        self.container = pod["spec"]["containers"][0]
        self.root = STATE / "roots" / name
        self.give_up_at = time.monotonic() + LONGEST_S
        self.killed_at: float | None = None
        pod["status"]["podIP"] = address_of(pod)

    def run(self) -> None:
        (STATE / "logs").mkdir(exist_ok=True)
        (STATE / "logs" / f"{self.name}.log").touch()
        if not self._is_held_up() and self._initialise():
            self._run_container()
        if self.is_leaving:
            path_of("Pod", self.name).unlink(missing_ok=True)
            (STATE / "leaving" / self.name).unlink(missing_ok=True)
        shutil.rmtree(self.root, ignore_errors=True)

    @property
    def is_leaving(self) -> bool:
        return (STATE / "leaving" / self.name).exists()

    def status(self, phase: str, **state: Any) -> None:
        status = {**self.pod["status"], "phase": phase}
        if state:
            status["containerStatuses"] = [{"name": self.container["name"], "state": state}]
        self.pod["status"] = status
        save(self.pod)

    def _is_held_up(self) -> bool:
        """Whether the pod never starts; then until it is deleted."""
        why = faults()
        if role_of(self.pod) in why.get("unschedulable", ()):
            condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
            condition["message"] = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
            self.pod["status"]["conditions"] = [condition]
            self.status("Pending")
        elif self.container["image"] in why.get("missing_images", ()):
            self.pod["spec"]["nodeName"] = "node-1"
            message = f'failed to pull image "{self.container["image"]}": not found'
            self.status("Pending", waiting={"reason": "ErrImagePull", "message": message})
            self._wait(0.3)
            message = f'Back-off pulling image "{self.container["image"]}": {message}'
            self.status("Pending", waiting={"reason": "ImagePullBackOff", "message": message})
        else:
            return False
        while not self.is_leaving and time.monotonic() < self.give_up_at:
            time.sleep(STEP_S)
        return True

    def _wait(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self.is_leaving:
            time.sleep(STEP_S)

    def _initialise(self) -> bool:
        self.pod["spec"]["nodeName"] = f"node-{1 + int(self.pod['metadata']['annotations'][INDEX])}"
        self.status("Pending", waiting={"reason": "PodInitializing"})
        for volume in self.pod["spec"]["volumes"]:
            (self.root / "run/kvstore" / volume["name"]).mkdir(parents=True)
            if "secret" in volume:
                self._mount_secret(volume)
        for container in self.pod["spec"]["initContainers"]:
            argv = [self.here(word) for word in container["command"]]
            status = subprocess.run(argv, check=False).returncode
            if status != 0:
                terminated = {"terminated": {"exitCode": status, "reason": "Error"}}
                statuses = [{"name": container["name"], "state": terminated}]
                self.pod["status"]["initContainerStatuses"] = statuses
                self.status("Failed", waiting={"reason": "PodInitializing"})
                self._fail_job()
                return False
        return True

    def _mount_secret(self, volume: dict[str, Any]) -> None:
        secret = load("Secret", volume["secret"]["secretName"])
        assert secret is not None
        for name, text in secret["stringData"].items():
            path = self.root / "run/kvstore" / volume["name"] / name
            path.write_text(text)
            # With fsGroup the kubelet adds reading by the group.
            path.chmod(volume["secret"]["defaultMode"] | 0o440)

    def here(self, text: str) -> str:
        return text.replace("/run/kvstore/", f"{self.root}/run/kvstore/")

    def _run_container(self) -> None:
        environment = self._environment()
        argv = [self.here(expanded(word, environment)) for word in self.container["args"]]
        try:
            process = subprocess.Popen(
                argv,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            message = f"exec: {argv[0]}: {error.strerror}"
            self._ended({"exitCode": 128, "reason": "StartError", "message": message})
            return
        self.status("Running", running={"startedAt": now()})
        fate = self._attend(process)
        code = process.wait()
        terminated = {"exitCode": code if code >= 0 else 128 - code}
        terminated["reason"] = fate or ("Completed" if code == 0 else "Error")
        self._ended(terminated, evicted=fate == "Evicted")

    def _environment(self) -> dict[str, str]:
        found = {"PATH": os.environ["PATH"], "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
        found["KUBECTL_STANDIN_FATE"] = str(STATE / f"fate-{self.name}")
        found["KUBECTL_STANDIN_MARK"] = str(STATE)
        services = {item["metadata"]["name"] for item in all_of("Service")}
        for variable in self.container["env"]:
            if "value" in variable:
                value = expanded(variable["value"], found)
                if value in services:
                    value = address_of(self.pod, role="scheduler")
            elif variable["valueFrom"]["fieldRef"]["fieldPath"] == "status.podIP":
                value = self.pod["status"]["podIP"]
            else:
                value = self.pod["metadata"]["annotations"][INDEX]
            found[variable["name"]] = self.here(value)
        return found

    def _attend(self, process: subprocess.Popen[bytes]) -> str:
        """Pass output on until the process has ended; returns what befell it, if anything."""
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        fate, rest = "", b""
        with (STATE / "logs" / f"{self.name}.log").open("ab", buffering=0) as log:
            while True:
                is_over = process.poll() is not None
                *lines, rest = (rest + (process.stdout.read() or b"")).split(b"\n")
                for line in lines:
                    log.write(f"{now(9)} ".encode() + line + b"\n")
                if is_over:
                    break
                fate = fate or self._strike(process)
                time.sleep(STEP_S)
            if rest:
                log.write(f"{now(9)} ".encode() + rest)
        process.stdout.close()
        return fate

    def _strike(self, process: subprocess.Popen[bytes]) -> str:
        """End the process where the cluster would: out of memory, evicted, deleted, too old."""
        moment = time.monotonic()
        path = STATE / f"fate-{self.name}"
        fate = path.read_text() if path.exists() else ""  # empty: it is just being written
        if fate or moment > self.give_up_at:
            os.killpg(process.pid, signal.SIGKILL)
            return fate or "TooOld"
        if not self.is_leaving:
            return ""
        if self.killed_at is None:
            os.killpg(process.pid, signal.SIGTERM)
            self.killed_at = moment
        elif moment - self.killed_at >= float((STATE / "leaving" / self.name).read_text()):
            os.killpg(process.pid, signal.SIGKILL)
        return ""

    def _ended(self, terminated: dict[str, Any], *, evicted: bool = False) -> None:
        terminated["finishedAt"] = now()
        is_good = terminated["exitCode"] == 0
        if evicted:
            message = "The node was low on resource: memory."
            self.pod["status"].update(reason="Evicted", message=message)
            terminated["reason"] = "Error"
        self.status("Succeeded" if is_good else "Failed", terminated=terminated)
        if not is_good:
            self._fail_job()

    def _fail_job(self) -> None:
        """``backoffLimit: 0``: the Job has failed, and its other pods are removed."""
        job = load("Job", self.pod["job"])
        if job is None:
            return
        condition = {"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded"}
        condition["message"] = "Job has reached the specified backoff limit"
        job["status"] = {"conditions": [condition]}
        save(job)
        for pod in all_of("Pod"):
            if pod["job"] == self.pod["job"] and pod["status"]["phase"] in ("Pending", "Running"):
                delete_pod(pod)


def role_of(pod: dict[str, Any]) -> str:
    return str(pod["metadata"]["labels"]["kvstore-role"])


def address_of(pod: dict[str, Any], role: str | None = None) -> str:
    """An address for each role and index of each job."""
    labels = pod["metadata"]["labels"]
    index = pod["metadata"]["annotations"][INDEX] if role is None else "0"
    text = f"{labels['kvstore-job']}/{role or role_of(pod)}/{index}"
    a, b, c = hashlib.sha256(text.encode()).digest()[:3]
    return f"127.{a}.{b}.{1 + c % 254}"


def expanded(text: str, variables: dict[str, str]) -> str:
    """``$(NAME)`` and ``$$``, as the API reference says under ``Container.args``."""

    def value(found: re.Match[str]) -> str:
        if found[0] == "$$":
            return "$"
        return variables.get(found[1], found[0])

    return re.sub(r"\$\$|\$\(([^)]*)\)", value, text)


# -- the command line -------------------------------------------------------------------------


def parse(argv: list[str]) -> tuple[list[str], dict[str, str]]:
    words, options = [], {}
    position = 0
    while position < len(argv):
        word = argv[position]
        if word == "-l":
            options["-l"] = argv[position + 1]
            position += 1
        elif word.startswith("--"):
            name, _, value = word.partition("=")
            options[name] = value
        else:
            words.append(word)
        position += 1
    return words, options


def main(argv: list[str]) -> int:
    if argv[:1] == ["--run-pod"]:
        PodRun(argv[1]).run()
        return 0
    with (STATE / "calls.log").open("a") as file:
        file.write(json.dumps(argv) + "\n")
    words, options = parse(argv)
    command, rest = words[0], words[1:]
    if command == "config":
        return view()
    if command == "version":
        return version(options)
    if faults().get("silent"):
        return refuse()
    if command in faults().get("refused_commands", ()):
        return fail(f"Error from server (Forbidden): you cannot {command} here")
    if command == "apply":
        return apply()
    if command == "get":
        return get(rest, options)
    if command == "logs":
        return logs(rest, options)
    if command == "delete":
        return delete(rest, options)
    if command == "auth":
        return can_i(rest[1:], options)
    return fail(f'error: unknown command "{command}" for "kubectl"')


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
