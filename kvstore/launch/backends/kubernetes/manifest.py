"""Make the manifests of a job: a Secret, two Services and three Jobs.

This module is pure: it turns options and facts into manifests or their text. Every object has the
label ``kvstore-job`` with the job's id, which finds and deletes the objects of this job only. The
three Jobs are Indexed: a pod's index is its rank (Kubernetes API reference, ``batch/v1`` Job). Read
next: ``run.py``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvstore.launch.job.checks import by_role, check_settings
from kvstore.launch.options import RESERVED_NAMES, LaunchError, LaunchOptions
from kvstore.launch.plan import JobFacts, ProcessSpec, is_within_a_job, plan_job

JOB_LABEL = "kvstore-job"
ROLE_LABEL = "kvstore-role"
INDEX_ANNOTATION = "batch.kubernetes.io/job-completion-index"
RENDEZVOUS_NAME = "PS_RENDEZVOUS_TIMEOUT"
DEFAULT_RENDEZVOUS_S = 600
"""The time in which all pods must start: pulling an image takes minutes, and the first pod waits
for the last one."""
# Every pod has an address of its own, so no other process can use these ports.
SCHEDULER_PORT = 9091
STORE_PORT = 29500
"""The port on worker 0 for a framework's store, such as PyTorch's; torchrun's default."""

_KEY_NAME = "job.key"
_SECRET_DIRECTORY = "/run/kvstore/secret"
_KEY_DIRECTORY = "/run/kvstore/key"
_USER_ID = 1000
_LONGEST_JOBNAME = 36  # keeps the longest host name of a pod within 63 characters
_JOBNAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?\Z")
# Kubernetes accepts no other names of namespaces (RFC 1123 labels).
_NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?\Z")

# In most images, user 1000 has neither a home nor a name, but libraries need both.
_OF_EVERY_POD = {"HOME": "/tmp", "USER": "kvstore", RENDEZVOUS_NAME: str(DEFAULT_RENDEZVOUS_S)}
# Settings of the launcher's environment that are passed on, as for a local job, except those about
# the launcher's machine.
_SETTINGS = ("PS_", "KVSTORE_", "MXNET_KVSTORE_", "DMLC_PS_")
_NOT_PASSED_ON = frozenset({"PS_JOB_KEY_FILE", "PS_MACHINE", *RESERVED_NAMES})
_HOST_NAMES = ("DMLC_INTERFACE", "DMLC_NODE_HOST")
_UNPRIVILEGED = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


@dataclass(frozen=True)
class KubeJob:
    """The names of one job, and its ``key``; ``namespace`` None: the context's."""

    job_id: str
    name: str
    key: str
    namespace: str | None = None

    @property
    def selector(self) -> str:
        """The label that all objects of this job have, and no others."""
        return f"{JOB_LABEL}={self.job_id}"

    def job_name(self, role: str) -> str:
        return f"{self.name}-{role}"

    def worker_host(self, rank: int) -> str:
        """Return the host name of a worker's pod, defined by the workers' Service."""
        return f"{self.job_name('worker')}-{rank}.{self.job_name('worker')}"


def kube_job(options: LaunchOptions, job_id: str, key: str, namespace: str | None) -> KubeJob:
    """Choose names for a new job. Raises :class:`LaunchError` for invalid ones."""
    jobname = options.places.jobname or "kvstore"
    if not _JOBNAME.match(jobname) or len(jobname) > _LONGEST_JOBNAME:
        raise LaunchError(
            "--jobname must have lowercase letters, digits and '-', begin with a letter, not end "
            f"with '-', and have at most {_LONGEST_JOBNAME} characters, got '{jobname}'"
        )
    if namespace is not None and not _NAMESPACE.match(namespace):
        raise LaunchError(
            "--namespace must have lowercase letters, digits and '-', at most 63 characters, got "
            f"'{namespace}'"
        )
    return KubeJob(job_id, f"{jobname}-{job_id[:8]}", key, namespace)


def plan_pods(
    options: LaunchOptions, job: KubeJob, environ: Mapping[str, str]
) -> list[ProcessSpec]:
    """Return all processes in the usual order, with the variables known so far.

    ``environ`` is the launcher's environment. If a variable has several sources, the last of these
    wins: the values for every pod, the launcher's settings, ``--env``, the job's own values. Raises
    :class:`LaunchError` (exit code 2).
    """
    given = (*options.environment, *options.server_environment, *options.worker_environment)
    if any(name == "PS_JOB_KEY_FILE" for name, _ in given):
        raise LaunchError(
            "PS_JOB_KEY_FILE cannot be set for pods: each job gets its own key; export "
            "PS_JOB_KEY_FILE where you call the launcher to use the key in that file"
        )
    # Settings of an enclosing job are not passed on.
    here = [] if is_within_a_job(environ) else [n for n in environ if n.startswith(_SETTINGS)]
    passed_on = {*here, *options.forwarded_names} & environ.keys() - _NOT_PASSED_ON
    base = {**_OF_EVERY_POD, **{name: environ[name] for name in sorted(passed_on)}}
    facts = JobFacts(
        job.job_id,
        checkout_root=None,
        host=job.job_name("scheduler"),
        port=SCHEDULER_PORT,
        # Libraries would count the cores of the whole node, but a worker may use only those
        # requested.
        cpu_count=(options.places.worker_cores or 0) * options.num_workers,
        key_file=f"{_KEY_DIRECTORY}/{_KEY_NAME}",
        joined_fd=1,
        worker_hosts=tuple(map(job.worker_host, range(options.num_workers))),
        store_port=STORE_PORT,
    )
    service = (options.python or "python", "-m", "kvstore.launch.service")
    specs = plan_job(options, facts, base, service)
    specs = [replace(spec, environment={**base, **spec.environment}) for spec in specs]
    check_settings(by_role(specs, {}).values())
    return specs


def manifests(
    options: LaunchOptions, job: KubeJob, environ: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Return the Secret, the Services, and the Jobs of scheduler, servers and workers.

    ``environ`` is the launcher's environment. Raises :class:`LaunchError` (exit code 2) if
    something is missing or invalid for Kubernetes.
    """
    if options.places.image is None:
        raise LaunchError(
            "--launcher kubernetes needs --image IMAGE: a container image that has your program, "
            "Python and this package (docs/launchers/kubernetes.md has a Dockerfile)"
        )
    counts = {"scheduler": 1, "server": options.num_servers, "worker": options.num_workers}
    specs = {spec.role: spec for spec in plan_pods(options, job, environ)}
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": _metadata(job, "key", "scheduler"),
        "type": "Opaque",
        "immutable": True,
        "stringData": {_KEY_NAME: job.key},
    }
    services = [_service(job, "scheduler", SCHEDULER_PORT), _service(job, "worker", STORE_PORT)]
    jobs = [_indexed_job(job, specs[role], counts[role], options) for role in counts]
    return [secret, *services, *jobs]


def to_yaml(documents: Sequence[Mapping[str, Any]]) -> str:
    """Return all ``documents`` as JSON, which is YAML, each after a line ``---``.

    YAML does not allow surrogates, and allows fewer unprintable characters than JSON, so these are
    written as escapes. Raises UnicodeEncodeError for text from bytes that are not UTF-8.
    """
    text = "".join(
        f"---\n{json.dumps(document, indent=2, ensure_ascii=False)}\n" for document in documents
    )
    text.encode()
    return "".join(
        one if one.isprintable() or one == "\n" or one > "\uffff" else f"\\u{ord(one):04x}"
        for one in text
    )


def escaped(text: str) -> str:
    """Escape ``text`` so that Kubernetes does not expand ``$(NAME)`` and ``$$``."""
    return text.replace("$", "$$")


def _metadata(job: KubeJob, end: str, role: str) -> dict[str, Any]:
    namespace = {} if job.namespace is None else {"namespace": job.namespace}
    return {"name": f"{job.name}-{end}", **namespace, "labels": _labels(job, role)}


def _labels(job: KubeJob, role: str) -> dict[str, str]:
    return {
        "app.kubernetes.io/name": "kvstore",
        "app.kubernetes.io/instance": job.name,
        "app.kubernetes.io/managed-by": "kvstore-launch",
        JOB_LABEL: job.job_id,
        ROLE_LABEL: role,
    }


def _service(job: KubeJob, role: str, port: int) -> dict[str, Any]:
    """Return a headless Service, which gives a role's pods host names."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(job, role, role),
        "spec": {
            "clusterIP": "None",
            # The names must work as soon as the pods start, whatever probes report.
            "publishNotReadyAddresses": True,
            "selector": {JOB_LABEL: job.job_id, ROLE_LABEL: role},
            "ports": [{"name": f"tcp-{role}", "port": port, "protocol": "TCP"}],
        },
    }


def _indexed_job(
    job: KubeJob, spec: ProcessSpec, count: int, options: LaunchOptions
) -> dict[str, Any]:
    """Return an indexed Job that never restarts a pod.

    Kubernetes would also restart those that end because the job has failed.
    """
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _metadata(job, spec.role, spec.role),
        "spec": {
            "completionMode": "Indexed",
            "completions": count,
            "parallelism": count,
            "backoffLimit": 0,
            "ttlSecondsAfterFinished": 24 * 3600,
            "template": {
                "metadata": {
                    "labels": _labels(job, spec.role),
                    "annotations": {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false"},
                },
                "spec": _pod(job, spec, options),
            },
        },
    }


def _pod(job: KubeJob, spec: ProcessSpec, options: LaunchOptions) -> dict[str, Any]:
    image, places = options.places.image, options.places
    resources = _resources(places.server_cores, places.server_memory_mb)
    with_gpus = resources
    if spec.role == "worker":
        resources = _resources(places.worker_cores, places.worker_memory_mb)
        with_gpus = _resources(places.worker_cores, places.worker_memory_mb, places.worker_gpus)
    # Copies the key into a file that only its user can read, as nodes require. Files of a Secret
    # belong to root. With fsGroup, without which no other user could read them, the kubelet makes
    # them readable for the group, whatever their mode (kubernetes issue 57923).
    copy = f"umask 0277 && cat {_SECRET_DIRECTORY}/{_KEY_NAME} > {_KEY_DIRECTORY}/{_KEY_NAME}"
    key_container = {
        "name": "key",
        "image": image,
        "command": ["sh", "-c", copy],
        "resources": resources,
        "securityContext": _UNPRIVILEGED,
        "volumeMounts": [
            {"name": "secret", "mountPath": _SECRET_DIRECTORY, "readOnly": True},
            {"name": "key", "mountPath": _KEY_DIRECTORY},
        ],
    }
    container = {
        "name": spec.role,
        "image": image,
        "args": [escaped(word) for word in spec.argv],
        "env": _variables(spec),
        "resources": with_gpus,
        "securityContext": _UNPRIVILEGED,
        "volumeMounts": [
            {"name": "key", "mountPath": _KEY_DIRECTORY, "readOnly": True},
            {"name": "shared-memory", "mountPath": "/dev/shm"},
        ],
    }
    return {
        **({"subdomain": job.job_name("worker")} if spec.role == "worker" else {}),
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 10,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        # Process 1 ignores signals without a handler; with this, the program is not process 1.
        "shareProcessNamespace": True,
        "securityContext": {
            "runAsNonRoot": True,
            **dict.fromkeys(("runAsUser", "runAsGroup", "fsGroup"), _USER_ID),
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "initContainers": [key_container],
        "containers": [container],
        "volumes": [
            {"name": "secret", "secret": {"secretName": f"{job.name}-key", "defaultMode": 0o400}},
            {"name": "key", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}},
            {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
        ],
    }


def _variables(spec: ProcessSpec) -> list[dict[str, Any]]:
    """Return the variables of ``spec``, with each pod's own rank and address."""
    address = {"valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    rank = {"fieldRef": {"fieldPath": f"metadata.annotations['{INDEX_ANNOTATION}']"}}
    found: dict[str, dict[str, Any]] = {
        name: {"value": escaped(value)} for name, value in spec.environment.items()
    }
    ranks = ("DMLC_TASK_ID", "RANK", "GROUP_RANK") if spec.role == "worker" else ("DMLC_TASK_ID",)
    found.update({name: {"valueFrom": rank} for name in ranks})
    if spec.role == "scheduler":
        # The scheduler listens at its own address, since its name may not resolve yet.
        found["DMLC_PS_ROOT_URI"] = address
    if found.keys().isdisjoint(_HOST_NAMES):  # the user has not chosen an address
        found["DMLC_NODE_HOST"] = address
    return [{"name": name, **value} for name, value in found.items()]


def _resources(cores: int | None, memory_mb: int | None, gpus: int | None = 0) -> dict[str, Any]:
    """Return the requests and limits; memory is limited, cores are not."""
    memory = {"memory": f"{memory_mb}Mi"} if memory_mb else {}
    requests = {**({"cpu": str(cores)} if cores else {}), **memory}
    limits = {**memory, **({"nvidia.com/gpu": str(gpus)} if gpus else {})}
    found = {"requests": requests, "limits": limits}
    return {name: value for name, value in found.items() if value}
