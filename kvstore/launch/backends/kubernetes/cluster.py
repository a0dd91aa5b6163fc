"""Asks and tells a cluster, through the Python client ``kubernetes``.

The one file that imports the client, and only when a cluster is wanted: the import takes a while,
and writing manifests needs none. Context and namespace are looked up once, so switching them
elsewhere while a job runs does not affect it. Answers are parsed JSON with the names of the
Kubernetes API reference, because the client's own classes differ from version to version. Any
thread may call. Used by ``run.py``, ``follow.py`` and ``kvstore/status.py``.
"""

from __future__ import annotations

import json
import shlex
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from kvstore.launch.backends.kubernetes.manifest import ROLE_LABEL
from kvstore.launch.options import LaunchError

KINDS = ("job", "service", "secret")
"""Of what the launcher makes; pods go with their Jobs."""
_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_CALL_S = 15.0
# A log that is silent for so long is asked for anew: its connection may be lost.
_QUIET_LOG_S = 300.0
_READ_BYTES = 64 * 1024
# Each log has one; of those above this number urllib3 writes a warning when they end.
_MOST_CONNECTIONS = 1000
_FORBIDDEN, _NOT_FOUND = 403, 404


class ClusterError(Exception):
    """The cluster refused a call, with an HTTP ``status``, or did not answer: None."""

    def __init__(self, sentence: str, status: int | None = None) -> None:
        super().__init__(sentence)
        self.status = status

    @property
    def is_refusal(self) -> bool:
        return self.status == _FORBIDDEN

    @property
    def is_not_found(self) -> bool:
        return self.status == _NOT_FOUND


def connect(namespace: str | None, context: str | None = None) -> KubeCluster:
    """Read the configuration and stay with its present context, or with ``context``.

    Within a pod without a configuration the account of the pod is used. Raises
    :class:`LaunchError` when the client is not installed or names no cluster.
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
        contexts, active = config.list_kube_config_contexts()
        if context is not None:
            active = next(each for each in contexts if each["name"] == context)
        context = active["name"]
        namespace = namespace or active["context"].get("namespace") or "default"
        config.load_kube_config(context=context, client_configuration=settings)
    except (config.ConfigException, StopIteration, OSError, ValueError, yaml.YAMLError) as error:
        try:
            config.load_incluster_config(client_configuration=settings)
            namespace = namespace or _NAMESPACE_FILE.read_text()
        except (config.ConfigException, OSError):
            raise LaunchError(f"found no cluster to use: {error}", exit_code=1) from error
    settings.retries = False  # each caller has its own way to try again
    settings.connection_pool_maxsize = _MOST_CONNECTIONS
    return KubeCluster(client.ApiClient(settings), namespace, context)


def delete_job(context: str | None, namespace: str, selector: str) -> None:
    """For a process whose launcher was killed; what goes wrong ends it with an error."""
    connect(namespace, context).delete(selector)


class KubeCluster:
    """One namespace of a cluster, reached by an ``ApiClient``. Calls raise :class:`ClusterError`.

    ``context`` is the name of what the configuration calls so; None within a pod.
    """

    def __init__(self, api_client: Any, namespace: str, context: str | None) -> None:
        from kubernetes import client

        self.namespace = namespace
        self.context = context
        self._api_client = api_client
        self._core = client.CoreV1Api(api_client)
        self._batch = client.BatchV1Api(api_client)

    def kubectl(self, *words: str) -> str:
        """The command by which the user can do the same, as text."""
        where = [f"--context={self.context}"] if self.context is not None else []
        return shlex.join(["kubectl", *where, f"--namespace={self.namespace}", *words])

    # -- what there is ------------------------------------------------------------------------

    def objects(self, kind: str, **filters: str) -> list[dict[str, Any]]:
        """Return those of a kind, such as ``pod``; ``filters`` as the client names them."""
        answer = self._json(self._method("list", kind), self.namespace, **filters)
        return list(answer.get("items") or ())

    def log(self, pod: str, container: str, since_s: int | None) -> LogStream:
        """Follow a log to its end: lines with their times, of the last ``since_s`` seconds."""
        since = {} if since_s is None else {"since_seconds": since_s}
        options = {"container": container, "follow": True, "timestamps": True, **since}
        return LogStream(
            self._call(self._core.read_namespaced_pod_log, pod, self.namespace, **options)
        )

    # -- what there shall be ------------------------------------------------------------------

    def create(self, manifest: Mapping[str, Any]) -> tuple[str, list[str]]:
        """Make an object; return its uid, and what the cluster warns of."""
        create = self._method("create", manifest["kind"].lower())
        response = self._call(create, self.namespace, manifest)
        # As in: 299 - "text"
        quoted = [text.partition('"')[2][:-1] for text in response.headers.getlist("Warning")]
        warnings = [text.replace('\\"', '"') for text in quoted]
        return str(json.loads(response.data)["metadata"]["uid"]), warnings

    def delete(
        self, selector: str, kinds: Sequence[str] = KINDS, grace_s: int | None = None
    ) -> None:
        """Delete everything of these kinds that carries the label ``selector``."""
        grace = {} if grace_s is None else {"grace_period_seconds": grace_s}
        for kind in kinds:
            for each in self.objects(kind, label_selector=selector):
                try:
                    self._json(
                        self._method("delete", kind),
                        each["metadata"]["name"],
                        self.namespace,
                        propagation_policy="Background",
                        **grace,
                    )
                except ClusterError as error:
                    if not error.is_not_found:
                        raise

    # -- before the start ---------------------------------------------------------------------

    def version(self) -> str:
        """As in ``v1.31.2``."""
        from kubernetes import client

        return str(self._json(client.VersionApi(self._api_client).get_code)["gitVersion"])

    def look_up_namespace(self) -> None:
        """Raise :class:`ClusterError` when it does not exist or may not be looked up."""
        self._json(self._core.read_namespace, self.namespace)

    def allows(self, verb: str, resource: str) -> bool:
        """Whether the user may do this; ``resource`` as in ``jobs.batch`` and ``pods/log``."""
        from kubernetes import client

        name, _, subresource = resource.partition("/")
        name, _, group = name.partition(".")
        wanted = {
            "namespace": self.namespace,
            "verb": verb,
            "group": group,
            "resource": name,
            "subresource": subresource,
        }
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": wanted},
        }
        api = client.AuthorizationV1Api(self._api_client)
        answer = self._json(api.create_self_subject_access_review, review)
        return bool(answer["status"]["allowed"])

    # -- a command in the scheduler's pod -----------------------------------------------------

    def scheduler_pod(self, name: str | None) -> str:
        """The pod of the one job there is, or of the job ``name``. Raises :class:`LaunchError`."""
        chosen = f"{ROLE_LABEL}=scheduler"
        try:
            pods = self.objects("pod", label_selector=chosen, field_selector="status.phase=Running")
        except ClusterError as error:
            raise LaunchError(f"cannot ask the cluster: {error}", exit_code=1) from error
        # The controller of Jobs names each pod's Job in a label.
        jobs = {
            each["metadata"]["labels"]["job-name"].removesuffix("-scheduler"): each for each in pods
        }
        found = [each for job, each in jobs.items() if name in (None, job)]
        if len(found) == 1:
            return str(found[0]["metadata"]["name"])
        there = ", ".join(sorted(jobs)) or "none"
        wanted = "one running job" if name is None else f"a running job {name!r}"
        raise LaunchError(
            f"expected {wanted} in namespace {self.namespace}, found: {there}; name one of these, "
            "or another --namespace",
            exit_code=1 if not jobs else 2,
        )

    def run_in(self, pod: str, command: Sequence[str]) -> int:
        """Run a command in a pod, with its output to ours, and return its exit code."""
        from kubernetes.stream import stream

        with _errors():
            session = stream(
                self._core.connect_get_namespaced_pod_exec,
                pod,
                self.namespace,
                command=[*command],
                stdout=True,
                stderr=True,
                stdin=False,
                tty=False,
                _preload_content=False,
            )
            while session.is_open():
                session.update(timeout=None)
                for channel, output in ((1, sys.stdout), (2, sys.stderr)):
                    output.write(session.read_channel(channel))
                    output.flush()
            session.sock.shutdown()  # its close() does nothing once the other end has closed
            return int(session.returncode)

    # -- inner parts --------------------------------------------------------------------------

    def _method(self, verb: str, kind: str) -> Callable[..., Any]:
        api = self._batch if kind == "job" else self._core
        found: Callable[..., Any] = getattr(api, f"{verb}_namespaced_{kind}")
        return found

    def _json(self, method: Callable[..., Any], *arguments: Any, **more: Any) -> Any:
        response = self._call(method, *arguments, **more)
        with _errors():
            return json.loads(response.data)

    def _call(self, method: Callable[..., Any], *arguments: Any, **more: Any) -> Any:
        """Make a call of the client; return the response, whose body has not been read."""
        timeouts = (_CALL_S, _CALL_S)
        with _errors():
            return method(*arguments, _preload_content=False, _request_timeout=timeouts, **more)


class LogStream:
    """A log that is followed: the pieces of a response. Any thread may close it."""

    def __init__(self, response: Any) -> None:
        self._response = response
        with suppress(AttributeError):  # no socket is known where the server is to hang up
            response.connection.sock.settimeout(_QUIET_LOG_S)

    def __iter__(self) -> Iterator[bytes]:
        with _errors():
            yield from self._response.stream(_READ_BYTES, decode_content=False)

    def close(self) -> None:
        """Have the thread that reads it find its end."""
        with suppress(AttributeError, OSError):  # it has come to its end
            self._response.connection.sock.shutdown(socket.SHUT_RDWR)


@contextmanager
def _errors() -> Iterator[None]:
    """What the client raises in the block becomes a :class:`ClusterError`."""
    from kubernetes.client import ApiException
    from kubernetes.config import ConfigException
    from urllib3.exceptions import HTTPError

    try:
        yield
    except ApiException as error:
        raise ClusterError(_sentence(error.reason, error.body), error.status) from error
    except (HTTPError, ConfigException, OSError, ValueError) as error:
        raise ClusterError(str(error).rpartition(">: ")[2]) from error


def _sentence(reason: str, body: str | bytes | None) -> str:
    """What a refusal says: the HTTP reason, and the message of a ``Status`` object."""
    try:
        return f"{reason}: {json.loads(body or '')['message']}"
    except (ValueError, KeyError, TypeError):
        return reason
