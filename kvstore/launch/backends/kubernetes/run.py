"""Run a job on Kubernetes: write its manifests, or create it and follow it.

Runs on the main thread. Without ``--apply``, the manifests go to standard output and nothing else
happens. With it, all objects are created, the pods are followed to their end, and all objects with
the job's label are deleted, whatever the result. Read ``manifest.py`` and ``follow.py`` next.
"""

from __future__ import annotations

import json
import re
import secrets
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from kvstore.launch.backends.kubernetes.cluster import ClusterError, connect
from kvstore.launch.backends.kubernetes.follow import EVERYTHING, JobPlace
from kvstore.launch.backends.kubernetes.manifest import (
    RENDEZVOUS_NAME,
    KubeJob,
    kube_job,
    manifests,
    plan_pods,
    to_yaml,
)
from kvstore.launch.backends.kubernetes.pods import Patience
from kvstore.launch.job.checks import CheckResult, conclude_check, read_given_key
from kvstore.launch.job.registry import new_key
from kvstore.launch.job.report import conclude, make_log_dir, remove_logs, say
from kvstore.launch.job.restarts import Timing
from kvstore.launch.job.supervisor import Supervisor
from kvstore.launch.options import LaunchError, LaunchOptions
from kvstore.launch.plan import is_within_a_job

_MASK = "(the job's key: made anew for each job, and not shown)"
_OLDEST_VERSION = (1, 24)  # the first version with stable Indexed Jobs
_PERMISSIONS = (
    *(
        (verb, kind)
        for kind in ("jobs.batch", "services", "secrets")
        for verb in ("list", "create", "delete")
    ),
    *(("list", "pods"), ("delete", "pods"), ("get", "pods/log"), ("list", "events")),
)
# The guardian's command; its arguments: this package's directory, and those of delete_job.
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
    """Run the launcher with ``options`` and return the exit code.

    Call it on the main thread.

    ``service_command`` and ``timing`` are for processes on this machine and have no effect on pods.
    Raises :class:`LaunchError` if the job could not start.
    """
    return run_with(options, environ, Patience())


def run_with(options: LaunchOptions, environ: Mapping[str, str], patience: Patience) -> int:
    """Run the job with these time limits; see :func:`run`."""
    if options.check:
        return conclude_check(list(_check_rows(options, environ)))
    path = "" if is_within_a_job(environ) else environ.get("PS_JOB_KEY_FILE")
    key = read_given_key(path) if path else new_key()
    key = _MASK if options.dry_run else key
    job = kube_job(options, secrets.token_hex(8), key, options.places.namespace)
    try:
        text = to_yaml(manifests(options, job, environ))
    except UnicodeEncodeError as error:
        raise LaunchError(
            "the command and the variables must be valid UTF-8 for Kubernetes; put other values "
            "into a file of the image"
        ) from error
    for note in options.notes:
        say(note)
    if options.places.apply and not options.dry_run:
        return _apply(options, job, environ, patience)
    if options.dry_run:  # comments, so that the whole output stays YAML
        where = job.namespace or "of the present context"
        text += (
            f"# With --apply this is created in the namespace {where}, the pods with the label\n"
            f"# {job.selector} are followed, and everything that carries it is deleted at the "
            "end.\n"
            if options.places.apply
            else "# Without --apply nothing is created.\n"
        )
    try:  # in UTF-8, whatever the terminal's encoding is
        sys.stdout.buffer.write(text.encode())
        sys.stdout.buffer.flush()
    except OSError as error:
        raise LaunchError(f"cannot write the manifests: {error.strerror}", exit_code=1) from error
    if not options.dry_run:
        where = f" --namespace={job.namespace}" if job.namespace is not None else ""
        say(
            "the output contains the job's key in a Secret: keep it to yourself; start the job "
            f"with 'kubectl apply -f FILE', inspect it with 'kubectl{where} get pods -l "
            f"{job.selector}', remove everything with 'kubectl{where} delete {EVERYTHING} -l "
            f"{job.selector}'"
        )
    return 0


def _apply(
    options: LaunchOptions, job: KubeJob, environ: Mapping[str, str], patience: Patience
) -> int:
    """Create the job, follow it to its end, delete it, and return the exit code."""
    cluster = connect(job.namespace)
    job = replace(job, namespace=cluster.namespace)
    specs = plan_pods(options, job, environ)
    # Pods stop waiting for each other after this time, so a longer wait is useless.
    patience = replace(patience, start_s=float(specs[-1].environment[RENDEZVOUS_NAME]))
    log_dir, is_temporary = make_log_dir(options.log_dir)
    place = JobPlace(cluster, job, specs, patience, log_dir if options.show_status else None)
    package = str(Path(__file__).resolve().parents[4])
    arguments = json.dumps([cluster.context, cluster.namespace, job.selector])
    try:
        # With its own id: if pods are processes of this machine, the guardian does not end them.
        supervised = secrets.token_hex(8)
        with Supervisor(supervised, environ, log_dir, patience.lifecycle) as supervisor:
            # The guardian gets its command before any object is created, so that none can stay.
            supervisor.guardian.cancel_at_the_end(
                [sys.executable, "-c", _DELETE, package, arguments]
            )
            supervisor.add_place(place)
            place.create(manifests(options, job, environ))
            supervisor.start([(spec, place) for spec in specs], {})
            report = supervisor.wait()
    except LaunchError as error:
        if place.is_left_alone:
            raise LaunchError(f"{error}; what was printed so far: {log_dir}", exit_code=1) from None
        remove_logs(log_dir, is_temporary)
        raise
    ended = [place.explained(each) for each in report.ended]
    return conclude(replace(report, ended=ended), log_dir, is_temporary)


def _check_rows(options: LaunchOptions, environ: Mapping[str, str]) -> Iterator[CheckResult]:
    """Yield the rows of ``--check``, without creating anything."""
    namespace = options.places.namespace
    try:
        manifests(options, kube_job(options, "0" * 16, "", namespace), environ)
        yield CheckResult("options", f"image {options.places.image}")
    except LaunchError as error:
        yield CheckResult("options", str(error), False)
    try:
        cluster = connect(namespace)
        version = cluster.version()
    except (LaunchError, ClusterError) as error:
        yield CheckResult("cluster", str(error), False)
        return
    numbers = re.match(r"v?(\d+)\.(\d+)", version)
    if numbers and tuple(map(int, numbers.groups())) < _OLDEST_VERSION:
        wanted = ".".join(map(str, _OLDEST_VERSION))
        yield CheckResult("cluster", f"{version} is too old: {wanted} or later is needed", False)
    else:
        yield CheckResult("cluster", version)
    try:
        cluster.look_up_namespace()
        yield CheckResult("namespace", cluster.namespace)
    except ClusterError as error:
        text = "you may not look it up" if error.is_refusal else str(error)
        yield CheckResult("namespace", f"{cluster.namespace} ({text})", error.is_refusal)
    for verb, resource in _PERMISSIONS:
        try:
            is_good = cluster.allows(verb, resource)
            text = "" if is_good else "not allowed"
        except ClusterError as error:
            is_good, text = False, str(error)
        yield CheckResult(f"{verb} {resource}", text, is_good)
