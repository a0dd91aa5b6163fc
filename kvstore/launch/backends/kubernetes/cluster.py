"""Calls to a Kubernetes cluster, through the Python client ``kubernetes``.

Only this file imports the client, and only when it calls a cluster: the import takes a while, and
writing manifests does not need it. Context and namespace are read once, so a later change of the
configuration does not affect a running job. Answers are parsed JSON with the names of the
Kubernetes API reference, because the client's own classes differ from version to version. Any
thread may call. Used by ``run.py``, ``follow.py`` and ``kvstore/status.py``.
"""

from __future__ import annotations

import json
import shlex
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from kvstore.launch.backends.kubernetes.manifest import ROLE_LABEL
from kvstore.launch.options import LaunchError

KINDS = ("job", "service", "secret")
"""The kinds of objects that the launcher creates; pods are deleted with their Jobs."""
_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_CALL_S = 15.0
# A log that is silent for this time is requested again: its connection may be lost.
_QUIET_LOG_S = 300.0
# The most connections, one for each log; urllib3 warns when one above this number ends.
_MOST_CONNECTIONS = 1000


class ClusterError(Exception):
    """The cluster refused a call with an HTTP ``status``, or did not answer (None)."""

    def __init__(self, sentence: str, status: int | None = None) -> None:
        super().__init__(sentence)
        self.status = status
        self.is_refusal = status == 403
        self.is_not_found = status == 404


def connect(namespace: str | None, context: str | None = None) -> KubeCluster:
    """Return the cluster of the configuration's current context, or of ``context``.

    In a pod without a configuration, the pod's account is used. Raises :class:`LaunchError` if the
    client is not installed or no cluster is configured.
    """
    try:
        import yaml
        from kubernetes import client, config
    except ImportError:
        raise LaunchError(
            f"the Python client for Kubernetes is not installed in {sys.executable}: "
            "pip install 'kubernetes>=29.0'; or leave --apply out and give the output to kubectl",
            exit_code=2,
        ) from None
    settings = client.Configuration()
    try:
        if context is None:
            _, active = config.list_kube_config_contexts()
            context = active["name"]
            namespace = namespace or active["context"].get("namespace")
        config.load_kube_config(context=context, client_configuration=settings)
    except (config.ConfigException, OSError, ValueError, yaml.YAMLError) as error:
        try:
            config.load_incluster_config(client_configuration=settings)
            namespace = namespace or _NAMESPACE_FILE.read_text()
        except (config.ConfigException, OSError):
            raise LaunchError(f"found no cluster to use: {error}", exit_code=1) from error
    settings.retries = False  # each caller retries in its own way
    settings.connection_pool_maxsize = _MOST_CONNECTIONS
    return KubeCluster(client.ApiClient(settings), namespace or "default", context)


def delete_job(context: str | None, namespace: str, selector: str) -> None:
    """Delete the job of a killed launcher; an error ends the process."""
    connect(namespace, context).delete(selector)


class KubeCluster:
    """One namespace of a cluster. Calls raise :class:`ClusterError`.

    ``context`` is the name of the configuration's context, or None in a pod.
    """

    def __init__(self, api_client: Any, namespace: str, context: str | None) -> None:
        from kubernetes import client

        self.namespace = namespace
        self.context = context
        kinds = (client.CoreV1Api, client.BatchV1Api, client.VersionApi, client.AuthorizationV1Api)
        self._apis = [kind(api_client) for kind in kinds]

    def kubectl(self, *words: str) -> str:
        """Return the kubectl command for ``words`` in this namespace, as text."""
        where = [f"--context={self.context}"] if self.context is not None else []
        return shlex.join(["kubectl", *where, f"--namespace={self.namespace}", *words])

    def objects(self, kind: str, **filters: str) -> list[dict[str, Any]]:
        """Return the objects of a kind, such as ``pod``; ``filters`` are the client's."""
        answer = self._json(f"list_namespaced_{kind}", self.namespace, **filters)
        return list(answer.get("items") or ())

    def log(self, pod: str, container: str) -> LogStream:
        """Follow a log from its beginning to its end; its lines have timestamps."""
        options = {"container": container, "follow": True, "timestamps": True}
        return LogStream(self._call("read_namespaced_pod_log", pod, self.namespace, **options))

    def create(self, manifest: Mapping[str, Any]) -> tuple[str, list[str]]:
        """Create an object; return its uid and the cluster's warnings."""
        name = f"create_namespaced_{manifest['kind'].lower()}"
        response = self._call(name, self.namespace, manifest)
        # The form of a warning: 299 - "text"
        quoted = [text.partition('"')[2][:-1] for text in response.headers.getlist("Warning")]
        warnings = [text.replace('\\"', '"') for text in quoted]
        return str(json.loads(response.data)["metadata"]["uid"]), warnings

    def delete(
        self, selector: str, kinds: Sequence[str] = KINDS, grace_s: int | None = None
    ) -> None:
        """Delete all objects of these kinds that have the label ``selector``."""
        options: dict[str, Any] = {"propagation_policy": "Background"}
        if grace_s is not None:
            options["grace_period_seconds"] = grace_s
        for kind in kinds:
            for each in self.objects(kind, label_selector=selector):
                name = each["metadata"]["name"]
                try:
                    self._call(f"delete_namespaced_{kind}", name, self.namespace, **options)
                except ClusterError as error:
                    if not error.is_not_found:
                        raise

    def version(self) -> str:
        """Return the cluster's version, such as ``v1.31.2``."""
        return str(self._json("get_code")["gitVersion"])

    def look_up_namespace(self) -> None:
        """Raise :class:`ClusterError` if the namespace is missing or may not be looked up."""
        self._call("read_namespace", self.namespace)

    def allows(self, verb: str, resource: str) -> bool:
        """Return whether the user may do this; ``resource`` is such as ``jobs.batch``."""
        name, _, subresource = resource.partition("/")
        name, _, group = name.partition(".")
        wanted = {"verb": verb, "group": group, "resource": name, "subresource": subresource}
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": {"namespace": self.namespace, **wanted}},
        }
        answer = self._json("create_self_subject_access_review", review)
        return bool(answer["status"]["allowed"])

    def scheduler_pod(self, name: str | None) -> str:
        """Return the scheduler's pod of job ``name``, or of the only job if None.

        Raises :class:`LaunchError`.
        """
        chosen = f"{ROLE_LABEL}=scheduler"
        try:
            pods = self.objects("pod", label_selector=chosen, field_selector="status.phase=Running")
        except ClusterError as error:
            raise LaunchError(f"cannot ask the cluster: {error}", exit_code=1) from error
        # The controller of Jobs names each pod's Job in a label.
        metadata = [each["metadata"] for each in pods]
        jobs = {each["labels"]["job-name"].removesuffix("-scheduler"): each for each in metadata}
        found = [each["name"] for job, each in jobs.items() if name in (None, job)]
        if len(found) == 1:
            return str(found[0])
        there = ", ".join(sorted(jobs)) or "none"
        remedy = "name one of these" if jobs else "start a job"
        wanted = "one running job" if name is None else f"a running job {name!r}"
        raise LaunchError(
            f"expected {wanted} in namespace {self.namespace}, found: {there}; {remedy}, "
            "or give another --namespace",
            exit_code=1 if not jobs else 2,
        )

    def run_in(self, pod: str, command: Sequence[str]) -> int:
        """Run a command in a pod, pass its output on, and return its exit code."""
        from kubernetes.stream import stream

        method = self._method("connect_get_namespaced_pod_exec")
        outputs = {"stdout": True, "stderr": True, "stdin": False, "tty": False}
        with _errors():
            session = stream(
                method, pod, self.namespace, command=[*command], _preload_content=False, **outputs
            )
            while session.is_open():
                session.update(timeout=None)
                for channel, output in ((1, sys.stdout), (2, sys.stderr)):
                    output.write(session.read_channel(channel))
                    output.flush()
            session.sock.shutdown()  # close() does nothing after the other end has closed
            return int(session.returncode)

    def _method(self, name: str) -> Any:
        return next(getattr(api, name) for api in self._apis if hasattr(api, name))

    def _json(self, name: str, *arguments: Any, **more: Any) -> Any:
        response = self._call(name, *arguments, **more)
        with _errors():
            return json.loads(response.data)

    def _call(self, name: str, *arguments: Any, **more: Any) -> Any:
        """Call a method of the client; return the response with its body unread."""
        more |= {"_preload_content": False, "_request_timeout": (_CALL_S, _CALL_S)}
        with _errors():
            return self._method(name)(*arguments, **more)


class LogStream:
    """A log that is followed, in pieces. Any thread may close it."""

    def __init__(self, response: Any) -> None:
        self._response = response
        with suppress(AttributeError):  # the socket is unknown if the server will close it
            response.connection.sock.settimeout(_QUIET_LOG_S)

    def __iter__(self) -> Iterator[bytes]:
        with _errors():
            yield from self._response.stream(64 * 1024, decode_content=False)

    def close(self) -> None:
        """End the log for the thread that reads it."""
        with suppress(AttributeError, OSError):  # the log has ended
            self._response.connection.sock.shutdown(socket.SHUT_RDWR)


@contextmanager
def _errors() -> Iterator[None]:
    """Turn the client's errors in the block into :class:`ClusterError`."""
    from kubernetes.client import ApiException
    from kubernetes.config import ConfigException
    from urllib3.exceptions import HTTPError

    try:
        yield
    except ApiException as error:
        sentence = error.reason
        with suppress(ValueError, KeyError, TypeError):  # the error has no further text
            sentence = f"{error.reason}: {json.loads(error.body or '')['message']}"
        raise ClusterError(sentence, error.status) from error
    except (HTTPError, ConfigException, OSError, ValueError) as error:
        raise ClusterError(str(error).rpartition(">: ")[2]) from error
