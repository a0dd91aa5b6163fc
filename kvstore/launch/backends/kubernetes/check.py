"""Deletes a job when its launcher is gone without having done so itself.

A shell that waits at a pipe: only the launcher holds the other end. A line means
that all is well; the end of the pipe without one, which ``kill -9`` brings about, means that the
job is to be deleted. It is in a session of its own, so that a closed terminal does not end it.
Main thread; used by ``run.py``.

``--check`` for Kubernetes: whether the job could run, as a table; nothing is created.

Asks kubectl one question after the other, each with a deadline, and continues after a "no", so
that one call shows all there is to mend. Main thread; called once, from ``run.py``.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from kvstore.launch.backends.kubernetes.kubectl import Kubectl, KubectlResult, find_kubectl
from kvstore.launch.backends.kubernetes.manifest import kube_job, manifests
from kvstore.launch.options import LaunchError, LaunchOptions

# A moment for what was under way; several tries, since the network may be down as well.
_SCRIPT = """
read -r all_is_well && exit 0
for pause in 1 5 10 20 40; do
    sleep "$pause"
    "$@" && exit 0
done
"""
_END_S = 2.0


@contextmanager
def guarded(command: Sequence[str], environ: Mapping[str, str]) -> Iterator[None]:
    """Run ``command`` when this process is killed within the block. Raises :class:`LaunchError`."""
    try:
        shell = subprocess.Popen(
            ["sh", "-c", _SCRIPT, "sh", *command],
            env=dict(environ),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,
        )
    except OSError as error:
        raise LaunchError(f"cannot run sh: {error.strerror}", exit_code=1) from error
    try:
        yield
    finally:
        _dismiss(shell)


def _dismiss(shell: subprocess.Popen[bytes]) -> None:
    assert shell.stdin is not None
    try:
        shell.stdin.write(b"all is well\n")
        shell.stdin.close()
        shell.wait(_END_S)
    except (OSError, subprocess.TimeoutExpired):  # somebody has ended or stopped it
        shell.kill()
        shell.wait()


_OLDEST_VERSION = (1, 24)  # Indexed Jobs are stable from here on
# What kubectl asks for on the way: apply gets, creates and patches, delete lists first.
_PERMISSIONS = (
    *(
        (verb, kind)
        for kind in ("jobs.batch", "services", "secrets")
        for verb in ("get", "list", "create", "patch", "delete")
    ),
    ("get", "pods"),
    ("list", "pods"),
    ("delete", "pods"),
    ("get", "pods/log"),
    ("list", "events"),
)


@dataclass(frozen=True)
class Finding:
    """One row: what was looked at, whether it is as it should be, and what there is to say."""

    subject: str
    is_good: bool
    text: str


def check(options: LaunchOptions, environ: Mapping[str, str]) -> int:
    """Print the table on standard output; 0 when nothing is in the way, else 1."""
    findings = list(_findings(options, environ))
    width = max(len(each.subject) for each in findings)
    for each in findings:
        mark = "ok " if each.is_good else "NO "
        sys.stdout.write(f"{each.subject:<{width}}  {mark} {each.text}".rstrip() + "\n")
    return 0 if all(each.is_good for each in findings) else 1


def _findings(options: LaunchOptions, environ: Mapping[str, str]) -> Iterator[Finding]:
    yield _manifests(options, environ)
    try:
        kubectl = find_kubectl(environ, options.places.namespace)
    except LaunchError as error:
        yield Finding("kubectl", False, str(error))
        return
    client = kubectl.call("version", "--client", "--output=json")
    yield Finding("kubectl", client.is_good, _version(client, "clientVersion"))
    server = kubectl.call("version", "--output=json", "--request-timeout=10s")
    yield _cluster(server)
    if not server.is_good:
        return
    yield _namespace(kubectl)
    for verb, resource in _PERMISSIONS:
        yield _permission(kubectl, verb, resource)


def _manifests(options: LaunchOptions, environ: Mapping[str, str]) -> Finding:
    try:
        manifests(options, kube_job(options, "0" * 16, "", options.places.namespace), environ)
    except LaunchError as error:
        return Finding("options", False, str(error))
    return Finding("options", True, f"image {options.places.image}")


def _cluster(answer: KubectlResult) -> Finding:
    if not answer.is_good:
        return Finding("cluster", False, f"no answer: {answer.sentence}")
    text = _version(answer, "serverVersion")
    if (found := _numbers(text)) is not None and found < _OLDEST_VERSION:
        wanted = ".".join(map(str, _OLDEST_VERSION))
        return Finding("cluster", False, f"{text} is too old: {wanted} or later is needed")
    return Finding("cluster", True, text)


def _namespace(kubectl: Kubectl) -> Finding:
    if kubectl.namespace is None:
        return Finding("namespace", True, "the one of this pod")
    answer = kubectl.call("get", "namespace", kubectl.namespace, "--output=name")
    if answer.is_good:
        return Finding("namespace", True, kubectl.namespace)
    if "Forbidden" in answer.error:
        return Finding("namespace", True, f"{kubectl.namespace} (you may not look it up)")
    return Finding("namespace", False, f"{kubectl.namespace}: {answer.sentence}")


def _permission(kubectl: Kubectl, verb: str, resource: str) -> Finding:
    name, _, subresource = resource.partition("/")
    words = [f"--subresource={subresource}"] if subresource else []
    answer = kubectl.call("auth", "can-i", verb, name, *words)
    said = answer.output.decode(errors="replace").strip()
    subject = f"{verb} {resource}"
    if answer.is_good and said.startswith("yes"):
        return Finding(subject, True, "")
    return Finding(subject, False, "not allowed" if said.startswith("no") else answer.sentence)


def _version(answer: KubectlResult, name: str) -> str:
    try:
        return str(json.loads(answer.output)[name]["gitVersion"])
    except (ValueError, KeyError, TypeError):
        return "version unknown" if answer.is_good else answer.sentence


def _numbers(version: str) -> tuple[int, ...] | None:
    parts = version.removeprefix("v").split(".")[:2]
    return tuple(map(int, parts)) if len(parts) == 2 and all(map(str.isdecimal, parts)) else None
