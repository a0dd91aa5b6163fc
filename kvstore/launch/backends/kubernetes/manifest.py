"""Make the manifests of a job: a Secret, a Service and three Jobs.

Pure: options and facts in, manifests or their text out. Every object has the label ``kvstore-job``
with the job's id, by which it is found and deleted, and which no other job has. The three Jobs are
Indexed: a pod's index is its rank (Kubernetes API reference, ``batch/v1`` Job). Read next:
``run.py``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvstore.launch.job.checks import check_settings
from kvstore.launch.options import RESERVED_NAMES, LaunchError, LaunchOptions
from kvstore.launch.plan import (
    SERVER_IMPORT_NAME,
    THREAD_COUNT_NAMES,
    ProcessSpec,
    is_within_a_job,
)

JOB_LABEL = "kvstore-job"
ROLE_LABEL = "kvstore-role"
INDEX_ANNOTATION = "batch.kubernetes.io/job-completion-index"
ROLES = ("scheduler", "server", "worker")
RENDEZVOUS_NAME = "PS_RENDEZVOUS_TIMEOUT"
DEFAULT_RENDEZVOUS_S = 600
"""Pulling an image takes minutes, and the first pod waits for the last that has pulled it."""
KEY_NAME = "job.key"

SCHEDULER_PORT = 9091  # every pod has an address of its own: nothing else can hold the port
_USER_ID = 1000
_SECRET_DIRECTORY = "/run/kvstore/secret"
_KEY_DIRECTORY = "/run/kvstore/key"
_KEEP_S = 24 * 3600
_GRACE_S = 10
_LONGEST_JOBNAME = 36  # so that the longest name of a pod's host stays within 63 characters
_JOBNAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?\Z")
# Kubernetes accepts no other names of namespaces (RFC 1123 labels).
_NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?\Z")

# Settings that are passed on from the launcher's environment, as those of a local job are.
_SETTINGS = ("PS_", "KVSTORE_", "MXNET_KVSTORE_", "DMLC_PS_")
# These speak of the launcher's machine.
_NOT_PASSED_ON = frozenset({"PS_JOB_KEY_FILE", "PS_MACHINE", *RESERVED_NAMES})
_HOST_NAMES = ("DMLC_INTERFACE", "DMLC_NODE_HOST")


@dataclass(frozen=True)
class KubeJob:
    """One job's names. ``key`` is the secret itself; ``namespace`` None is that of the context."""

    job_id: str
    name: str
    key: str
    namespace: str | None = None

    @property
    def selector(self) -> str:
        """Finds everything of this job, and nothing else."""
        return f"{JOB_LABEL}={self.job_id}"

    def job_name(self, role: str) -> str:
        return f"{self.name}-{role}"


def kube_job(options: LaunchOptions, job_id: str, key: str, namespace: str | None) -> KubeJob:
    """Names for a new job. Raises :class:`LaunchError` when the user's cannot be used."""
    jobname = options.places.jobname or "kvstore"
    if not _JOBNAME.match(jobname) or len(jobname) > _LONGEST_JOBNAME:
        raise LaunchError(
            f"--jobname '{jobname}': Kubernetes takes small letters, digits and '-', beginning "
            f"with a letter and not ending with '-'; at most {_LONGEST_JOBNAME} characters here",
            exit_code=2,
        )
    if namespace is not None and not _NAMESPACE.match(namespace):
        raise LaunchError(
            f"--namespace '{namespace}' is not a namespace's name: use small letters, "
            "digits and '-', "
            "at most 63 characters",
            exit_code=2,
        )
    return KubeJob(job_id, f"{jobname}-{job_id[:8]}", key, namespace)


def plan_pods(options: LaunchOptions) -> list[ProcessSpec]:
    """All processes of the job in the usual order; their variables are in the manifests."""
    python = options.python or "python"
    service = (python, "-m", "kvstore.server")
    scheduler = (python, "-m", "kvstore.launch.service", "--joined-fd", "1")
    return [
        ProcessSpec("scheduler", 0, scheduler, {}),
        *(ProcessSpec("server", rank, service, {}) for rank in range(options.num_servers)),
        *(ProcessSpec("worker", rank, options.command, {}) for rank in range(options.num_workers)),
    ]


def manifests(
    options: LaunchOptions, job: KubeJob, environ: Mapping[str, str]
) -> list[dict[str, Any]]:
    """The Secret, the Service, and the Jobs of scheduler, servers and workers.

    ``environ`` is the launcher's environment. Raises :class:`LaunchError` (exit code 2) when
    something is missing or cannot be said to Kubernetes.
    """
    if options.places.image is None:
        raise LaunchError(
            "--launcher kubernetes needs --image IMAGE: a container image that has your program, "
            "Python and this package (docs/launchers/kubernetes.md has a Dockerfile)",
            exit_code=2,
        )
    counts = {"scheduler": 1, "server": options.num_servers, "worker": options.num_workers}
    commands = {spec.role: spec.argv for spec in plan_pods(options)}
    return [
        *_secret_and_service(job),
        *(
            _indexed_job(job, role, counts[role], _pod(options, job, role, commands[role], environ))
            for role in ROLES
        ),
    ]


def to_yaml(documents: Sequence[Mapping[str, Any]]) -> str:
    """Write all ``documents`` as JSON, which is YAML, each behind a line ``---``.

    YAML takes no half of a character and fewer unprintable ones than JSON, so these are written as
    escapes. Raises UnicodeEncodeError for text that was made of bytes that are not UTF-8.
    """
    text = "".join(
        f"---\n{json.dumps(document, indent=2, ensure_ascii=False)}\n" for document in documents
    )
    text.encode()
    return "".join(
        one if one.isprintable() or one == "\n" or one > "\uffff" else f"\\u{ord(one):04x}"
        for one in text
    )


def role_environment(
    options: LaunchOptions, job: KubeJob, role: str, environ: Mapping[str, str]
) -> dict[str, str]:
    """The variables of a role whose values are known now; a later source wins over earlier ones."""
    found = {
        # User 1000 has no home and no name in most images; libraries look for both.
        "HOME": "/tmp",
        "USER": "kvstore",
        "PYTHONUNBUFFERED": "1",
        RENDEZVOUS_NAME: str(DEFAULT_RENDEZVOUS_S),
        **_settings(environ),
        **_forwarded(options, environ),
        **dict(options.environment),
    }
    if role == "worker":
        found.update(_threads(options, found))
        found.update(options.worker_environment)
    else:
        found.update(dict.fromkeys(THREAD_COUNT_NAMES, "1"))
        if options.server_imports:
            found[SERVER_IMPORT_NAME] = ",".join(options.server_imports)
    if role == "server":
        found.update(options.server_environment)
    if "PS_JOB_KEY_FILE" in found:
        raise LaunchError(
            "PS_JOB_KEY_FILE cannot be set for pods: each job gets a key of its own; export "
            "PS_JOB_KEY_FILE where you call the launcher to use the key in that file",
            exit_code=2,
        )
    found |= {
        "DMLC_ROLE": role,
        "DMLC_NUM_WORKER": str(options.num_workers),
        "DMLC_NUM_SERVER": str(options.num_servers),
        "DMLC_PS_ROOT_PORT": str(SCHEDULER_PORT),
        "DMLC_JOB_CLUSTER": "kubernetes",
        "PS_JOB_ID": job.job_id,
        "PS_JOB_KEY_FILE": f"{_KEY_DIRECTORY}/{KEY_NAME}",
    }
    check_settings([found])
    return found


def escaped(text: str) -> str:
    """``text`` so that Kubernetes, which replaces ``$(NAME)`` and ``$$``, does not change it."""
    return text.replace("$", "$$")


def _settings(environ: Mapping[str, str]) -> dict[str, str]:
    if is_within_a_job(environ):
        return {}  # they belong to the job around this one
    return {
        name: value
        for name, value in environ.items()
        if name.startswith(_SETTINGS) and name not in _NOT_PASSED_ON
    }


def _forwarded(options: LaunchOptions, environ: Mapping[str, str]) -> dict[str, str]:
    names = [name for name in options.forwarded_names if name not in _NOT_PASSED_ON]
    return {name: environ[name] for name in names if name in environ}


def _threads(options: LaunchOptions, given: Mapping[str, str]) -> dict[str, str]:
    """Libraries count the processors of the whole node; what was asked for is all there is."""
    cores = options.places.worker_cores
    names = {*given, *(name for name, _ in options.worker_environment)}
    if cores is None or any(name in names for name in THREAD_COUNT_NAMES):
        return {}
    return dict.fromkeys(THREAD_COUNT_NAMES, str(cores))


def _metadata(job: KubeJob, name: str, role: str | None = None) -> dict[str, Any]:
    metadata: dict[str, Any] = {"name": name}
    if job.namespace is not None:
        metadata["namespace"] = job.namespace
    metadata["labels"] = _labels(job, role)
    return metadata


def _labels(job: KubeJob, role: str | None = None) -> dict[str, str]:
    labels = {
        "app.kubernetes.io/name": "kvstore",
        "app.kubernetes.io/instance": job.name,
        "app.kubernetes.io/managed-by": "kvstore-launch",
        JOB_LABEL: job.job_id,
    }
    return labels if role is None else {**labels, ROLE_LABEL: role}


def _secret_and_service(job: KubeJob) -> list[dict[str, Any]]:
    return [
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": _metadata(job, f"{job.name}-key"),
            "type": "Opaque",
            "immutable": True,
            "stringData": {KEY_NAME: job.key},
        },
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": _metadata(job, job.job_name("scheduler"), "scheduler"),
            "spec": {
                "clusterIP": "None",
                # The name is to lead to the pod from its start, whatever probes say.
                "publishNotReadyAddresses": True,
                "selector": {JOB_LABEL: job.job_id, ROLE_LABEL: "scheduler"},
                "ports": [{"name": "tcp-scheduler", "port": SCHEDULER_PORT, "protocol": "TCP"}],
            },
        },
    ]


def _indexed_job(job: KubeJob, role: str, count: int, pod: dict[str, Any]) -> dict[str, Any]:
    """No pod is started again: a process that returns finds no place in a job that went on."""
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _metadata(job, job.job_name(role), role),
        "spec": {
            "completionMode": "Indexed",
            "completions": count,
            "parallelism": count,
            "backoffLimit": 0,
            "ttlSecondsAfterFinished": _KEEP_S,
            "template": {
                "metadata": {
                    "labels": _labels(job, role),
                    "annotations": {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false"},
                },
                "spec": pod,
            },
        },
    }


def _pod(
    options: LaunchOptions,
    job: KubeJob,
    role: str,
    command: tuple[str, ...],
    environ: Mapping[str, str],
) -> dict[str, Any]:
    is_worker = role == "worker"
    places = options.places
    resources = _resources(
        places.worker_cores if is_worker else places.server_cores,
        places.worker_memory_mb if is_worker else places.server_memory_mb,
    )
    variables = role_environment(options, job, role, environ)
    container = {
        "name": role,
        "image": places.image,
        "args": [escaped(word) for word in command],
        "env": [
            *_downward_variables(job, role, has_host=not variables.keys().isdisjoint(_HOST_NAMES)),
            *({"name": name, "value": escaped(value)} for name, value in variables.items()),
        ],
        "resources": _with_gpus(resources, places.worker_gpus if is_worker else None),
        "securityContext": _unprivileged(),
        "volumeMounts": [
            {"name": "key", "mountPath": _KEY_DIRECTORY, "readOnly": True},
            {"name": "shared-memory", "mountPath": "/dev/shm"},
        ],
    }
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": _GRACE_S,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        # Process 1 ignores signals that it does not handle; with this, the program is not 1.
        "shareProcessNamespace": True,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": _USER_ID,
            "runAsGroup": _USER_ID,
            "fsGroup": _USER_ID,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "initContainers": [_key_container(places.image, resources)],
        "containers": [container],
        "volumes": [
            {
                "name": "secret",
                "secret": {"secretName": f"{job.name}-key", "defaultMode": 0o400},
            },
            {"name": "key", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}},
            {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
        ],
    }


def _key_container(image: str | None, resources: dict[str, Any]) -> dict[str, Any]:
    """Makes the key a file that only its user can read, as nodes demand.

    Files of a Secret belong to root; with ``fsGroup``, without which no other user could read
    them, the kubelet adds reading by the group to any mode (kubernetes issue 57923).
    """
    copy = f"umask 0277 && cat {_SECRET_DIRECTORY}/{KEY_NAME} > {_KEY_DIRECTORY}/{KEY_NAME}"
    return {
        "name": "key",
        "image": image,
        "command": ["sh", "-c", copy],
        "resources": resources,
        "securityContext": _unprivileged(),
        "volumeMounts": [
            {"name": "secret", "mountPath": _SECRET_DIRECTORY, "readOnly": True},
            {"name": "key", "mountPath": _KEY_DIRECTORY},
        ],
    }


def _downward_variables(job: KubeJob, role: str, *, has_host: bool) -> list[dict[str, Any]]:
    """Return what each pod learns of itself; ``has_host``: the user says which address it takes."""
    address = {"fieldRef": {"fieldPath": "status.podIP"}}
    index = {"fieldRef": {"fieldPath": f"metadata.annotations['{INDEX_ANNOTATION}']"}}
    root: dict[str, Any] = {"name": "DMLC_PS_ROOT_URI", "value": job.job_name("scheduler")}
    if role == "scheduler":
        # The scheduler listens at its own address, before its name can be looked up.
        root = {"name": "DMLC_PS_ROOT_URI", "valueFrom": address}
    found = [{"name": "DMLC_TASK_ID", "valueFrom": index}, root]
    if not has_host:
        found.append({"name": "DMLC_NODE_HOST", "valueFrom": address})
    return found


def _resources(cores: int | None, memory_mb: int | None) -> dict[str, Any]:
    """Memory is a limit too; processors are not, which would only halt the program at times."""
    requests: dict[str, str] = {}
    if cores is not None:
        requests["cpu"] = str(cores)
    if memory_mb is not None:
        requests["memory"] = f"{memory_mb}Mi"
    found: dict[str, Any] = {"requests": requests} if requests else {}
    if memory_mb is not None:
        found["limits"] = {"memory": f"{memory_mb}Mi"}
    return found


def _with_gpus(resources: dict[str, Any], gpus: int | None) -> dict[str, Any]:
    if not gpus:
        return resources
    limits = {**resources.get("limits", {}), "nvidia.com/gpu": str(gpus)}
    return {**resources, "limits": limits}


def _unprivileged() -> dict[str, Any]:
    return {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
