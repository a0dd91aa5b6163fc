"""Calls of a cluster through the real client: a server of the API on this machine answers them."""

from __future__ import annotations

import base64
import hashlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from kvstore import status
from kvstore.launch.backends.kubernetes import cluster as kubernetes
from kvstore.launch.backends.kubernetes.cluster import ClusterError, KubeCluster, connect
from kvstore.launch.options import LaunchError

pytestmark = [pytest.mark.process]
pytest.importorskip("kubernetes")

PODS = "/api/v1/namespaces/team/pods"


class ApiServer(ThreadingHTTPServer):
    """Answers each path with what ``answers`` holds: a document, or a status and a document."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: dict[str, Any] = {}
        self.asked: list[str] = []
        self.is_over = threading.Event()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: ApiServer

    def log_message(self, *arguments: object) -> None:
        pass

    def _serve(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.asked.append(f"{self.command} {self.path}")
        path = urlsplit(self.path).path
        if path.endswith("/exec"):
            self._run_command()
        elif path.endswith("/log"):
            self._follow_log()
        elif path not in self.server.answers:
            self.server.is_over.wait(20)  # it hangs
        else:
            answer = self.server.answers[path]
            self._send(*(answer if isinstance(answer, tuple) else (200, answer)))

    do_GET = do_POST = do_DELETE = _serve  # noqa: N815 - names of the base class

    def _send(self, code: int, document: object) -> None:
        data = json.dumps(document).encode()
        self.send_response(code)
        self.send_header("Warning", '299 - "would violate PodSecurity \\"restricted\\""')
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _follow_log(self) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.wfile.write(b"4\r\none\n\r\n")
        self.server.is_over.wait(20)

    def _run_command(self) -> None:
        """By RFC 6455 and ``v4.channel.k8s.io``: a frame begins with the number of its channel."""
        proof = self.headers["Sec-WebSocket-Key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
        accept = base64.b64encode(hashlib.sha1(proof.encode()).digest()).decode()
        self.send_response(101)
        self.send_header("Upgrade", "websocket")
        self.send_header("Connection", "Upgrade")
        self.send_header("Sec-WebSocket-Accept", accept)
        self.send_header("Sec-WebSocket-Protocol", "v4.channel.k8s.io")
        self.end_headers()
        words = " ".join(parse_qs(urlsplit(self.path).query)["command"])
        failure = {"status": "Failure", "details": {"causes": [{"message": "3"}]}}
        for payload in (f"\1{words}\n", "\2oh\n", f"\3{json.dumps(failure)}"):
            self.wfile.write(bytes([0x82, len(payload)]) + payload.encode())
        self.wfile.write(bytes([0x88, 0]))
        self.close_connection = True


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    found = ApiServer()
    contexts = [
        {"name": "here", "context": {"cluster": "c", "user": "u", "namespace": "team"}},
        {"name": "bare", "context": {"cluster": "c", "user": "u"}},
    ]
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "here",
        "contexts": contexts,
        "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{found.server_port}"}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
    }
    path = tmp_path / "config"
    path.write_text(json.dumps(document))
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(path))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    thread = threading.Thread(target=found.serve_forever, args=(0.05,))
    thread.start()
    yield found
    found.is_over.set()
    found.shutdown()
    found.server_close()
    thread.join()


def scheduler_pods(*jobs: str) -> dict[str, Any]:
    names = {job: {"name": f"{job}-scheduler-x7"} for job in jobs}
    labels = {job: {"labels": {"job-name": f"{job}-scheduler"}} for job in jobs}
    return {"items": [{"metadata": {**names[job], **labels[job]}} for job in jobs]}


def test_context_and_namespace_are_looked_up_and_may_be_named(server: ApiServer) -> None:
    here = connect(None)
    assert (here.context, here.namespace) == ("here", "team")
    assert connect("mine").namespace == "mine"
    bare = connect(None, "bare")
    assert (bare.context, bare.namespace) == ("bare", "default")
    assert bare.kubectl("get", "pods") == "kubectl --context=bare --namespace=default get pods"


def test_without_a_cluster_one_sentence_says_so(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(LaunchError, match="found no cluster to use: ") as caught:
        connect(None, "no such context")
    assert caught.value.exit_code == 1
    name = "kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION"
    monkeypatch.setattr(name, "/no/such/file")
    with pytest.raises(LaunchError, match="found no cluster to use: Invalid kube-config"):
        connect(None)


def test_without_the_client_one_sentence_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    with pytest.raises(LaunchError, match=r"not installed in .*: pip install 'kub") as caught:
        connect(None)
    assert caught.value.exit_code == 2


def test_only_a_wanted_cluster_imports_the_client() -> None:
    code = "import sys, kvstore.launch.cli, kvstore.status; "
    code += "import kvstore.launch.backends.kubernetes.run; print('kubernetes' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_a_call_that_hangs_ends(server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes, "_CALL_S", 0.3)
    cluster = connect(None)  # imports the client, which takes seconds on a busy machine
    began_s = time.monotonic()
    with pytest.raises(ClusterError, match="Read timed out") as caught:
        cluster.version()
    assert time.monotonic() - began_s < 10
    assert caught.value.status is None


def test_a_cluster_that_is_not_there_is_named(server: ApiServer) -> None:
    cluster = connect(None)
    server.shutdown()
    server.server_close()
    with pytest.raises(ClusterError, match="Failed to establish a new connection"):
        cluster.version()


def test_a_refusal_is_said_with_the_message_of_the_cluster(server: ApiServer) -> None:
    server.answers[PODS] = (403, {"kind": "Status", "message": "you cannot list pods"})
    with pytest.raises(ClusterError, match=r"^Forbidden: you cannot list pods$") as caught:
        connect(None).objects("pod")
    assert caught.value.is_refusal


def test_what_is_created_has_a_uid_and_maybe_warnings(server: ApiServer) -> None:
    server.answers["/apis/batch/v1/namespaces/team/jobs"] = (201, {"metadata": {"uid": "u1"}})
    uid, warnings = connect(None).create({"kind": "Job", "metadata": {"name": "x"}})
    assert uid == "u1"
    assert warnings == ['would violate PodSecurity "restricted"']


def test_what_carries_the_label_is_deleted_and_what_is_gone_is_no_error(server: ApiServer) -> None:
    server.answers[PODS] = {"items": [{"metadata": {"name": name}} for name in ("a", "b")]}
    server.answers[f"{PODS}/a"] = (404, {"message": "gone"})
    server.answers[f"{PODS}/b"] = {}
    connect(None).delete("kvstore-job=1f", ("pod",), grace_s=1)
    assert server.asked[0] == f"GET {PODS}?labelSelector=kvstore-job%3D1f"
    deleted = "?gracePeriodSeconds=1&propagationPolicy=Background"
    assert server.asked[1:] == [f"DELETE {PODS}/a{deleted}", f"DELETE {PODS}/b{deleted}"]


def test_a_log_that_hangs_is_ended_by_another_thread(server: ApiServer) -> None:
    stream = connect(None).log("x-0", "worker")
    closer = threading.Timer(0.3, stream.close)
    read = []
    closer.start()
    with pytest.raises(ClusterError):
        read += stream
    closer.join()
    assert "follow=true&timestamps=true" in server.asked[0]


def test_the_schedulers_pod_of_the_only_job_or_of_the_one_that_is_named(server: ApiServer) -> None:
    def pod(name: str | None, *jobs: str) -> str:
        server.answers[PODS] = scheduler_pods(*jobs)
        cluster: KubeCluster = connect(None)
        return cluster.scheduler_pod(name)

    assert pod(None, "lenet-1f") == "lenet-1f-scheduler-x7"
    assert pod("b-2", "a-1", "b-2") == "b-2-scheduler-x7"
    with pytest.raises(LaunchError, match="one running job in namespace team, found: a-1, b-2;"):
        pod(None, "a-1", "b-2")
    with pytest.raises(LaunchError, match="a running job 'c' in namespace team, found: a-1, b-2;"):
        pod("c", "a-1", "b-2")
    with pytest.raises(LaunchError, match="found: none; start a job, or give another"):
        pod(None)
    server.answers[PODS] = (503, {"message": "no room"})
    with pytest.raises(LaunchError, match="cannot ask the cluster: Service Unavailable: no room"):
        connect(None).scheduler_pod(None)


def test_status_runs_in_the_schedulers_pod_and_ends_with_its_code(
    server: ApiServer, capfd: pytest.CaptureFixture[str]
) -> None:
    server.answers[PODS] = scheduler_pods("lenet-1f")
    code = status.main(["--kubernetes", "--namespace", "team", "--json", "--watch", "5"])
    assert code == 3
    shown = capfd.readouterr()
    assert shown.out == "python -m kvstore.status --json --watch=5\n"
    assert shown.err == "oh\n"
    assert "/pods/lenet-1f-scheduler-x7/exec?" in server.asked[-1]
