"""A stand-in for a cluster: a server of the Kubernetes API whose pods are processes here.

Behaves, for the requests that the launcher makes, as the API reference says: lists, creates and
deletes Jobs, pods, Services and Secrets, lists events, streams logs, reviews access. ``--serve``
writes its port on standard output. The state is a directory, $CLUSTER_STANDIN; ``faults.json`` in
it says what goes wrong. The Job controller (``backoffLimit: 0``) and the kubelet are the process
``--run-pod``, one for each pod, which ends when its pod does. Pods have addresses in 127.0.0.0/8,
the name of a Service stands for the address of its first pod, as does the name of that pod in it,
and ``/run/kvstore`` is a directory of each pod. There is no isolation, and images are names only.
Standard library; nothing of this project.
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
import threading
import time
import uuid
from collections.abc import Iterator
from datetime import datetime, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

STATE = Path(os.environ["CLUSTER_STANDIN"])
KINDS = {
    "jobs": "Job",
    "pods": "Pod",
    "services": "Service",
    "secrets": "Secret",
    "events": "Event",
}
INDEX = "batch.kubernetes.io/job-completion-index"
LOCK = threading.Lock()
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
    draft = path.with_suffix(f".{os.getpid()}.{threading.get_ident()}.draft")
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
    text = stamp(time.time())
    return text if digits else text[:19] + "Z"


def stamp(moment_s: float) -> str:
    text = datetime.fromtimestamp(moment_s, timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%f")
    return text.rstrip("0").rstrip(".") + "Z"


# -- the API ----------------------------------------------------------------------------------


class Refused(Exception):
    """A status that is not good, with its message."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


def create(item: dict[str, Any]) -> dict[str, Any]:
    kind, name = item["kind"], item["metadata"]["name"]
    if kind in faults().get("refused_kinds", ()):
        raise Refused(403, f"you cannot create resource {kind}")
    if load(kind, name) is not None:
        raise Refused(409, f'{kind} "{name}" already exists')
    item["metadata"]["uid"] = str(uuid.uuid4())
    item["metadata"]["creationTimestamp"] = now()
    save(item)
    if kind == "Job":
        control(item)
    return item


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


def delete(kind: str, name: str, grace_s: float) -> dict[str, Any]:
    item = load(kind, name)
    if item is None:
        raise Refused(404, f'{kind} "{name}" not found')
    if kind == "Pod":
        delete_pod(item, grace_s)
    else:
        path_of(kind, name).unlink(missing_ok=True)
        for pod in all_of("Pod") if kind == "Job" else ():
            if pod["job"] == name:
                delete_pod(pod)
    return {"kind": "Status", "status": "Success"}


def delete_pod(pod: dict[str, Any], grace_s: float = -1) -> None:
    name = pod["metadata"]["name"]
    if pod["status"]["phase"] in ("Succeeded", "Failed"):
        path_of("Pod", name).unlink(missing_ok=True)
        return
    seconds = pod["spec"]["terminationGracePeriodSeconds"] if grace_s < 0 else grace_s
    write(STATE / "leaving" / name, str(seconds))


def log(name: str, since_s: float | None) -> Iterator[bytes]:
    """The lines of a log until the pod has ended. Ends with an error where the log is cut."""
    cut = _take_cut()
    since = stamp(time.time() - (since_s or 0))
    shown = 0
    with (STATE / "logs" / f"{name}.log").open("rb") as file:
        while True:
            pod = load("Pod", name)
            is_over = pod is None or pod["status"]["phase"] in ("Succeeded", "Failed")
            for line in file.readlines():
                if since_s is None or line.partition(b" ")[0].decode() >= since:
                    yield line
                    shown += 1
                    if cut is not None and shown >= cut:
                        raise ConnectionAbortedError
            if is_over or faults().get("silent"):
                return
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


class Handler(BaseHTTPRequestHandler):
    """One request: its path says what is wanted."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: object) -> None:
        pass

    def _serve(self) -> None:
        with LOCK, (STATE / "calls.log").open("a") as file:
            file.write(f"{self.command} {self.path}\n")
        size = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(size) or b"null")
        if faults().get("silent"):
            self.close_connection = True
            return
        parts = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        words = parts.path.strip("/").split("/")
        try:
            self._answer(words, query, body)
        except Refused as error:
            reason = {403: "Forbidden", 404: "NotFound", 409: "AlreadyExists"}[error.code]
            status = {"kind": "Status", "status": "Failure", "reason": reason}
            self._send({**status, "message": str(error), "code": error.code}, error.code)

    do_GET = do_POST = do_DELETE = _serve  # noqa: N815 - names of the base class

    def _answer(self, words: list[str], query: dict[str, str], body: Any) -> None:
        if words == ["version"]:
            return self._send({"gitVersion": faults().get("version", "v1.31.2")})
        if words[-1] == "selfsubjectaccessreviews":
            wanted = body["spec"]["resourceAttributes"]
            names = [wanted["resource"], wanted["group"]]
            what = f"{wanted['verb']} {'.'.join(filter(None, names))}"
            what += f"/{wanted['subresource']}" if wanted["subresource"] else ""
            body["status"] = {"allowed": what not in faults().get("forbidden", ())}
            return self._send(body)
        namespace, *rest = words[words.index("namespaces") + 1 :]
        if not rest:
            if namespace not in faults().get("namespaces", [namespace]):
                raise Refused(404, f'namespaces "{namespace}" not found')
            return self._send({"kind": "Namespace", "metadata": {"name": namespace}})
        if rest[2:] == ["log"]:
            return self._send_log(rest[1], query)
        kind, name = KINDS[rest[0]], (rest[1] if len(rest) > 1 else "")
        if self.command == "POST":
            return self._send(create(body), 201)
        if self.command == "DELETE":
            return self._send(delete(kind, name, float(query.get("gracePeriodSeconds", "-1"))))
        if f"list {rest[0]}" in faults().get("refused", ()):
            raise Refused(403, f"you cannot list {rest[0]}")
        items = selected(kind, query.get("labelSelector"))
        for item in items:
            item.pop("kind")  # as in lists of the API
        return self._send({"kind": f"{kind}List", "items": items})

    def _send(self, document: dict[str, Any], code: int = 200) -> None:
        data = json.dumps(document).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _send_log(self, name: str, query: dict[str, str]) -> None:
        if "log" in faults().get("refused", ()):
            raise Refused(403, "you cannot read logs")
        if load("Pod", name) is None:
            raise Refused(404, f'pods "{name}" not found')
        since = query.get("sinceSeconds")
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        try:
            for line in log(name, None if since is None else float(since)):
                self.wfile.write(f"{len(line):x}\r\n".encode() + line + b"\r\n")
            self.wfile.write(b"0\r\n\r\n")
        except (ConnectionError, TimeoutError):
            self.close_connection = True


def serve() -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_port, flush=True)
    server.serve_forever()


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
        # The kubelet tries again, as long as there is a pod: it may be earlier than its Secret.
        while (secret := load("Secret", volume["secret"]["secretName"])) is None:
            assert time.monotonic() < self.give_up_at
            if self.is_leaving:
                return
            time.sleep(STEP_S)
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
        found["CLUSTER_STANDIN_FATE"] = str(STATE / f"fate-{self.name}")
        found["CLUSTER_STANDIN_MARK"] = str(STATE)
        services = {item["metadata"]["name"] for item in all_of("Service")}
        for variable in self.container["env"]:
            if "value" in variable:
                value = expanded(variable["value"], found)
                *pod, service = value.split(".")
                if service in services and pod in ([], [f"{service}-0"]):
                    value = address_of(self.pod, role=service.rpartition("-")[2])
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


if __name__ == "__main__":
    if sys.argv[1] == "--run-pod":
        PodRun(sys.argv[2]).run()
    else:
        serve()
