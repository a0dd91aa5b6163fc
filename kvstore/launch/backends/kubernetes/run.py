"""Runs a job on Kubernetes: writes its manifests, or creates and follows it.

Brings the parts together, on the main thread. Without ``--apply`` the manifests go to standard
output and nothing else happens. With it everything is created, the pods are followed to their
end, and all that carries the job's id is deleted, whatever the end was. Read ``manifest.py`` and
``follow.py`` next.
"""

from __future__ import annotations

import json
import secrets
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvstore.launch.backends.kubernetes.cluster import ClusterError, KubeCluster, connect
from kvstore.launch.backends.kubernetes.follow import Follower
from kvstore.launch.backends.kubernetes.manifest import (
    RENDEZVOUS_NAME,
    KubeJob,
    kube_job,
    manifests,
    plan_pods,
    role_environment,
    to_yaml,
)
from kvstore.launch.backends.kubernetes.pods import Patience
from kvstore.launch.job.checks import CheckResult, conclude_check
from kvstore.launch.job.guardian import GuardianProcess
from kvstore.launch.job.lifecycle import Timing
from kvstore.launch.job.registry import new_key
from kvstore.launch.job.report import JobReport, conclude, make_log_dir, remove_logs, say
from kvstore.launch.job.signals import ENDING, SignalPipe
from kvstore.launch.options import LaunchError, LaunchOptions
from kvstore.launch.plan import is_within_a_job
from pslite import Config
from pslite.errors import ConfigError
from pslite.security import read_key

_MASK = "(the job's key: made anew for each job, and not shown)"
_EVERYTHING = "jobs,pods,services,secrets"
_RETRY_S = 2.0
_OLDEST_VERSION = (1, 24)  # Indexed Jobs are stable from here on
_PERMISSIONS = (
    *(
        (verb, kind)
        for kind in ("jobs.batch", "services", "secrets")
        for verb in ("list", "create", "delete")
    ),
    ("list", "pods"),
    ("delete", "pods"),
    ("get", "pods/log"),
    ("list", "events"),
)
# What the guardian runs: the directory of this package, then the arguments of delete_job.
_DELETE = (
    "import json, sys; sys.path.insert(0, sys.argv[1]); "
    "from kvstore.launch.backends.kubernetes.cluster import delete_job; "
    "delete_job(*json.loads(sys.argv[2]))"
)


def run(
    options: LaunchOptions,
    environ: Mapping[str, str],
    service_command: Sequence[str],
    timing: Timing,
) -> int:
    """Do what ``options`` ask for and return the exit code. Must be called on the main thread.

    ``service_command`` and ``timing`` are those of processes on this machine and mean nothing
    for pods. Raises :class:`LaunchError` when nothing could be started.
    """
    del service_command, timing
    return run_with(options, environ, Patience())


def run_with(options: LaunchOptions, environ: Mapping[str, str], patience: Patience) -> int:
    """The same, with the patience to have with the cluster."""
    if options.check:
        return conclude_check(list(_check_rows(options, environ)))
    key = _MASK if options.dry_run else _key(environ)
    job = kube_job(options, secrets.token_hex(8), key, options.places.namespace)
    text = _text(manifests(options, job, environ))
    for note in options.notes:
        say(note)
    if options.places.apply and not options.dry_run:
        return _apply(options, job, environ, patience)
    _write(text + (_what_apply_does(options, job) if options.dry_run else ""))
    if not options.dry_run:
        say(_what_to_do_with_the_text(job))
    return 0


def _write(text: str) -> None:
    """To standard output, in the encoding that YAML has, whatever the terminal's is."""
    try:
        sys.stdout.buffer.write(text.encode())
        sys.stdout.buffer.flush()
    except OSError as error:
        raise LaunchError(f"cannot write the manifests: {error.strerror}", exit_code=1) from error


def _text(documents: Sequence[Mapping[str, Any]]) -> str:
    try:
        return to_yaml(documents)
    except UnicodeEncodeError as error:
        raise LaunchError(
            "the command or a variable holds bytes that are not UTF-8, which Kubernetes does not "
            "take; pass such values in a file of the image",
            exit_code=2,
        ) from error


def _key(environ: Mapping[str, str]) -> str:
    """The user's key where PS_JOB_KEY_FILE is exported, else a fresh one."""
    path = environ.get("PS_JOB_KEY_FILE")
    if not path or is_within_a_job(environ):
        return new_key()
    try:
        return (read_key(Config(job_key_file=path)) or b"").decode()
    except (ConfigError, UnicodeDecodeError) as error:
        raise LaunchError(
            f"cannot use PS_JOB_KEY_FILE: {error}; unset it to have a key made", exit_code=2
        ) from error


def _what_to_do_with_the_text(job: KubeJob) -> str:
    where = f" --namespace={job.namespace}" if job.namespace is not None else ""
    return (
        "the output holds the job's key in a Secret: keep it to yourself; start the job by "
        f"'kubectl apply -f FILE', look by 'kubectl{where} get pods -l {job.selector}', remove "
        f"everything by 'kubectl{where} delete {_EVERYTHING} -l {job.selector}'"
    )


def _what_apply_does(options: LaunchOptions, job: KubeJob) -> str:
    """For a dry run, as comments, so that the whole output stays YAML."""
    if not options.places.apply:
        return "# Without --apply nothing is created.\n"
    where = job.namespace or "of the present context"
    return (
        f"# With --apply this is created in the namespace {where}, the pods with the label\n"
        f"# {job.selector} are followed, and everything that carries it is deleted at the end.\n"
    )


# -- with --apply -----------------------------------------------------------------------------


def _apply(
    options: LaunchOptions, job: KubeJob, environ: Mapping[str, str], patience: Patience
) -> int:
    """Create the job, follow it to its end, delete it, and return the exit code."""
    cluster = connect(job.namespace)
    job = replace(job, namespace=cluster.namespace)
    patience = _with_rendezvous(options, job, environ, patience)
    log_dir, is_temporary = make_log_dir(options.log_dir)
    outcome: JobReport | str | None = None
    try:
        # The guardian is there before anything is made, so that nothing can stay.
        with SignalPipe() as signals, _guarded(cluster, job, environ):
            _create(cluster, job, manifests(options, job, environ), signals, patience)
            follower = Follower(cluster, job, plan_pods(options), log_dir, patience, signals)
            try:
                outcome = follower.follow(show_status=options.show_status)
            finally:
                if not isinstance(outcome, str):
                    _delete(cluster, job, signals, patience.delete_s)
    except LaunchError:
        remove_logs(log_dir, is_temporary)
        raise
    if isinstance(outcome, str):
        say(
            f"{outcome}; the job was left alone and may still run: look by "
            f"'{cluster.kubectl('get', 'pods', '-l', job.selector)}', end it by "
            f"'{_delete_by_hand(cluster, job)}'; what was printed so far: {log_dir}"
        )
        return 1
    if follower.watch.verdict is not None:
        remove_logs(log_dir, is_temporary)
        say(f"the job was not started: {follower.watch.verdict}")
        return 1
    return conclude(outcome, log_dir, is_temporary)


@contextmanager
def _guarded(cluster: KubeCluster, job: KubeJob, environ: Mapping[str, str]) -> Iterator[None]:
    """Have another process delete the job when this one is killed within the block."""
    guardian = GuardianProcess(job.job_id, environ)
    package = str(Path(__file__).resolve().parents[4])
    arguments = json.dumps([cluster.context, cluster.namespace, job.selector])
    guardian.cancel_at_the_end([sys.executable, "-c", _DELETE, package, arguments])
    try:
        yield
    finally:
        guardian.dismiss()


def _create(
    cluster: KubeCluster,
    job: KubeJob,
    documents: Sequence[Mapping[str, Any]],
    signals: SignalPipe,
    patience: Patience,
) -> None:
    """Create everything or nothing. Raises :class:`LaunchError` with what the cluster says.

    The scheduler's Job is first and owns Secret and Service, which vanish with it: Jobs are removed
    some time after their end (``ttlSecondsAfterFinished``), other objects never are.
    """
    secret, service, scheduler, *jobs = documents
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": job.job_name("scheduler")}
    warnings: list[str] = []
    is_reached = False
    try:
        cluster.version()
        is_reached = True
        for each in (scheduler, secret, service, *jobs):
            if each in (secret, service):
                each["metadata"]["ownerReferences"] = [owner]
            uid, said = cluster.create(each)
            owner.setdefault("uid", uid)
            warnings += said
    except ClusterError as error:
        if "uid" in owner or (is_reached and error.status is None):  # something may be there
            _delete(cluster, job, signals, patience.delete_s)
        raise LaunchError(f"cannot create the job: {error}", exit_code=1) from error
    for warning in dict.fromkeys(warnings):  # such as of a pod security standard
        say(f"the cluster warns: {warning}")


def _with_rendezvous(
    options: LaunchOptions, job: KubeJob, environ: Mapping[str, str], patience: Patience
) -> Patience:
    """Pods that wait for each other give up by this setting; waiting longer is useless."""
    text = role_environment(options, job, "worker", environ)[RENDEZVOUS_NAME]
    try:
        wanted_s = float(text)
    except ValueError:
        raise LaunchError(f"{RENDEZVOUS_NAME} is {text!r}, not a number", exit_code=2) from None
    return patience if wanted_s == Patience.start_s else replace(patience, start_s=wanted_s)


def _delete(cluster: KubeCluster, job: KubeJob, signals: SignalPipe, within_s: float) -> None:
    """Delete everything that carries the job's id; a silent cluster is asked again for a while."""
    until_s = time.monotonic() + within_s
    while True:
        try:
            cluster.delete(job.selector)
            return
        except ClusterError as error:
            is_hurried = bool(set(signals.arrived()) & set(ENDING))
            if time.monotonic() >= until_s or is_hurried:
                by_hand = _delete_by_hand(cluster, job)
                say(f"could not delete the job: {error}; do it by '{by_hand}'")
                return
        time.sleep(_RETRY_S)


def _delete_by_hand(cluster: KubeCluster, job: KubeJob) -> str:
    return cluster.kubectl("delete", _EVERYTHING, "-l", job.selector)


# -- with --check -----------------------------------------------------------------------------


def _check_rows(options: LaunchOptions, environ: Mapping[str, str]) -> Iterator[CheckResult]:
    """Whether the job could run; nothing is created. Goes on after a "no" while it can."""
    namespace = options.places.namespace
    try:
        manifests(options, kube_job(options, "0" * 16, "", namespace), environ)
        yield CheckResult("options", f"image {options.places.image}", True)
    except LaunchError as error:
        yield CheckResult("options", str(error), False)
    try:
        cluster = connect(namespace)
        version = cluster.version()
    except (LaunchError, ClusterError) as error:
        yield CheckResult("cluster", str(error), False)
        return
    wanted = ".".join(map(str, _OLDEST_VERSION))
    is_old = _numbers(version) < _OLDEST_VERSION
    text = f"{version} is too old: {wanted} or later is needed" if is_old else version
    yield CheckResult("cluster", text, not is_old)
    yield _namespace_row(cluster)
    for verb, resource in _PERMISSIONS:
        try:
            is_good = cluster.allows(verb, resource)
            text = "" if is_good else "not allowed"
        except ClusterError as error:
            is_good, text = False, str(error)
        yield CheckResult(f"{verb} {resource}", text, is_good)


def _namespace_row(cluster: KubeCluster) -> CheckResult:
    try:
        cluster.look_up_namespace()
    except ClusterError as error:
        if error.is_refusal:
            return CheckResult("namespace", f"{cluster.namespace} (you may not look it up)", True)
        return CheckResult("namespace", f"{cluster.namespace}: {error}", False)
    return CheckResult("namespace", cluster.namespace, True)


def _numbers(version: str) -> tuple[int, ...]:
    """As in ``v1.31.2``; the newest for what is written in another way."""
    with suppress(ValueError):
        return tuple(map(int, version.removeprefix("v").split(".")[:2]))
    return (sys.maxsize,)
