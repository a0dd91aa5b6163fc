"""Runs a job on Kubernetes: writes its manifests, or applies and follows them.

Brings the parts together, on the main thread. Without ``--apply`` the manifests go to standard
output and nothing else happens. With it they go to ``kubectl apply``, the pods are followed to
their end, and everything that carries the job's id is deleted, whatever the end was. Read
``manifest.py`` and ``follow.py`` next.
"""

from __future__ import annotations

import secrets
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from kvstore.launch.backends.kubernetes.check import check, guarded
from kvstore.launch.backends.kubernetes.follow import Followed, Follower
from kvstore.launch.backends.kubernetes.kubectl import Kubectl, find_kubectl
from kvstore.launch.backends.kubernetes.manifest import (
    RENDEZVOUS_NAME,
    ROLES,
    KubeJob,
    kube_job,
    manifests,
    plan_pods,
    role_environment,
    to_yaml,
)
from kvstore.launch.backends.kubernetes.watch import Patience
from kvstore.launch.job.lifecycle import Timing
from kvstore.launch.job.report import (
    exit_code,
    failure_block,
    failures_of,
    make_log_dir,
    remove_logs,
    say,
    write_error,
)
from kvstore.launch.job.signals import ENDING, SignalPipe
from kvstore.launch.options import LaunchError, LaunchOptions

_KEY_BYTES = 32
_KEY_LENGTHS = range(16, 4097)
_MASK = "(the job's key: made anew for each job, and not shown)"
_APPLY_S = 60.0
_CALL_S = 15.0
_RETRY_S = 2.0
_KINDS = "jobs,pods,services,secrets"


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
        return check(options, environ)
    key = _MASK if options.dry_run else _key(environ)
    job = kube_job(options, secrets.token_hex(8), key, options.places.namespace)
    text = _text(options, job, environ)
    for note in options.notes:
        say(note)
    if options.dry_run:
        _write(text + _commands_as_comments(options, job, environ))
        return 0
    if not options.places.apply:
        _write(text)
        say(_what_to_do_with_the_text(job))
        return 0
    return _apply(options, job, environ, patience)


def _write(text: str) -> None:
    """To standard output, in the encoding that YAML has, whatever the terminal's is."""
    try:
        sys.stdout.buffer.write(text.encode())
        sys.stdout.buffer.flush()
    except OSError as error:
        raise LaunchError(f"cannot write the manifests: {error.strerror}", exit_code=1) from error


def _text(options: LaunchOptions, job: KubeJob, environ: Mapping[str, str]) -> str:
    try:
        return to_yaml(manifests(options, job, environ))
    except ValueError as error:
        raise LaunchError(
            "the command or a variable holds bytes that are not UTF-8, which Kubernetes does not "
            "take; pass such values in a file of the image",
            exit_code=2,
        ) from error


def _key(environ: Mapping[str, str]) -> str:
    """The user's key where PS_JOB_KEY_FILE is exported, else a fresh one."""
    path = environ.get("PS_JOB_KEY_FILE")
    if not path or ("PS_JOB_ID" in environ and "DMLC_TASK_ID" in environ):
        return secrets.token_urlsafe(_KEY_BYTES)
    try:
        key = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(
            f"cannot read the key in {path} (PS_JOB_KEY_FILE): {error}; unset it to have one made",
            exit_code=2,
        ) from error
    if len(key.encode()) not in _KEY_LENGTHS:
        raise LaunchError(
            f"the key in {path} (PS_JOB_KEY_FILE) must have {_KEY_LENGTHS.start} to "
            f"{_KEY_LENGTHS.stop - 1} bytes; unset PS_JOB_KEY_FILE to have one made",
            exit_code=2,
        )
    return key


# -- without --apply --------------------------------------------------------------------------


def _look_by_hand(kubectl: Kubectl, job: KubeJob) -> str:
    return shlex.join(kubectl.argv("get", "pods", "-l", job.selector))


def _delete_by_hand(kubectl: Kubectl, job: KubeJob) -> str:
    return shlex.join(kubectl.argv("delete", _KINDS, "-l", job.selector))


def _what_to_do_with_the_text(job: KubeJob) -> str:
    kubectl = Kubectl({}, job.namespace)
    return (
        f"the output holds the job's key in a Secret: keep it to yourself; start the job by "
        f"'kubectl apply -f FILE', look by '{_look_by_hand(kubectl, job)}', "
        f"remove everything by '{_delete_by_hand(kubectl, job)}'"
    )


def _commands_as_comments(options: LaunchOptions, job: KubeJob, environ: Mapping[str, str]) -> str:
    """The commands of ``--apply``, as comments, so that the whole output stays YAML."""
    if not options.places.apply:
        return "# Without --apply no kubectl is called.\n"
    kubectl = find_kubectl(environ, options.places.namespace)
    commands = [
        (kubectl.argv("apply", "--filename=-"), "with the text above"),
        (kubectl.argv("get", "pods,jobs", "-l", job.selector, "--output=json"), "repeatedly"),
        (kubectl.argv("logs", "--follow", "--timestamps", "POD"), "for each pod"),
        (kubectl.argv("delete", _KINDS, "-l", job.selector), "at the end"),
    ]
    return "".join(f"# {shlex.join(argv)}    ({when})\n" for argv, when in commands)


# -- with --apply -----------------------------------------------------------------------------


def _apply(
    options: LaunchOptions, job: KubeJob, environ: Mapping[str, str], patience: Patience
) -> int:
    kubectl = find_kubectl(environ, options.places.namespace)
    job = replace(job, namespace=kubectl.namespace)
    patience = _with_rendezvous(options, job, environ, patience)
    log_dir, is_temporary = make_log_dir(options.log_dir)
    with SignalPipe() as signals:
        try:
            # Before anything is made, so that nothing can stay.
            with guarded(kubectl.argv(*_delete_words(job)), environ):
                _call_apply(kubectl, job, _text(options, job, environ), signals, patience)
                followed = _follow(options, kubectl, job, log_dir, patience, signals)
        except LaunchError:
            remove_logs(log_dir, is_temporary)
            raise
    return _conclude(followed, kubectl, job, log_dir, is_temporary)


def _follow(
    options: LaunchOptions,
    kubectl: Kubectl,
    job: KubeJob,
    log_dir: Path,
    patience: Patience,
    signals: SignalPipe,
) -> Followed:
    """Follow the job to its end and delete it, unless the cluster has not been heard for long."""
    specs = plan_pods(options)
    try:
        with closing(
            Follower(
                kubectl, job, specs, log_dir, patience, signals, show_status=options.show_status
            )
        ) as follower:
            follower.say(f"job {job.name}: {len(specs)} pods, label {job.selector}")
            followed = follower.follow()
    except BaseException:
        _delete(kubectl, job, signals, patience.delete_s)
        raise
    if followed.lost_sight is None:
        _delete(kubectl, job, signals, patience.delete_s)
    return followed


def _call_apply(
    kubectl: Kubectl, job: KubeJob, text: str, signals: SignalPipe, patience: Patience
) -> None:
    """Create everything or nothing. Raises :class:`LaunchError` with what kubectl says."""
    answer = kubectl.call("apply", "--filename=-", stdin=text, timeout_s=_APPLY_S)
    if answer.is_good:
        for line in answer.error.splitlines():
            if line.startswith("Warning:"):  # such as of a pod security standard
                say(line)
        return
    # It names what it has made; where it was ended is unknown.
    if answer.output or answer.status < 0:
        _delete(kubectl, job, signals, patience.delete_s)
    raise LaunchError(f"kubectl apply failed: {answer.sentence}", exit_code=1)


def _with_rendezvous(
    options: LaunchOptions, job: KubeJob, environ: Mapping[str, str], patience: Patience
) -> Patience:
    """Pods that wait for each other give up by this setting; waiting longer is useless."""
    text = role_environment(options, job, ROLES[-1], environ)[RENDEZVOUS_NAME]
    try:
        wanted_s = float(text)
    except ValueError:
        raise LaunchError(f"{RENDEZVOUS_NAME} is {text!r}, not a number", exit_code=2) from None
    if wanted_s == Patience.start_s:
        return patience
    return replace(patience, start_s=wanted_s)


def _delete_words(job: KubeJob) -> tuple[str, ...]:
    timeout = f"--request-timeout={_CALL_S:g}s"
    return ("delete", _KINDS, "-l", job.selector, "--ignore-not-found", "--wait=false", timeout)


def _delete(kubectl: Kubectl, job: KubeJob, signals: SignalPipe, within_s: float) -> None:
    """Delete everything that carries the job's id; a silent cluster is asked again for a while."""
    until_s = time.monotonic() + within_s
    while True:
        left_s = min(_CALL_S, max(1.0, until_s - time.monotonic()))
        answer = kubectl.call(*_delete_words(job), timeout_s=left_s)
        if answer.is_good:
            return
        is_hurried = bool(set(signals.arrived()) & set(ENDING))
        if time.monotonic() >= until_s or is_hurried:
            break
        time.sleep(_RETRY_S)
    say(f"could not delete the job: {answer.sentence}; do it by '{_delete_by_hand(kubectl, job)}'")


def _conclude(
    followed: Followed, kubectl: Kubectl, job: KubeJob, log_dir: Path, is_temporary: bool
) -> int:
    """Say how it ended and return the exit code."""
    lifecycle = followed.lifecycle
    if followed.lost_sight is not None:
        say(
            f"{followed.lost_sight}; the job was left alone and may still run: look by "
            f"'{_look_by_hand(kubectl, job)}', end it by "
            f"'{_delete_by_hand(kubectl, job)}'; what was printed so far: {log_dir}"
        )
        return 1
    failures, stopped = failures_of(followed.ended, followed.specs)
    if followed.obstacle is not None:
        remove_logs(log_dir, is_temporary)
        say(f"the job was not started: {followed.obstacle}")
        return 1
    if lifecycle.failed:
        write_error(failure_block(failures, stopped, str(log_dir), start_s=followed.start_s))
        if lifecycle.interrupted_by is None:
            return exit_code(failures[0].exit)
    if lifecycle.interrupted_by is not None:
        if not lifecycle.failed:
            remove_logs(log_dir, is_temporary)
            where = "" if is_temporary else f"; logs of all processes: {log_dir}"
            say(f"ended by {lifecycle.interrupted_by.name}{where}")
        return 128 + lifecycle.interrupted_by
    if lifecycle.drain_expired:
        say(f"the workers succeeded; logs of all processes: {log_dir}")
    else:
        remove_logs(log_dir, is_temporary)
    return 0
