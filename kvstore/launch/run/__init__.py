"""``kvstore.run``: a function on every worker of a job of its own, for notebooks and tests.

::

    def train(rate):
        kv = kvstore.create("dist_sync")
        ...
        return kv.rank, accuracy

    results = kvstore.run(train, args=(0.1,), workers=4, servers=2)

Importing has no effect. Any thread may call. Read ``job.py`` next; ``cluster.py``
for several calls on one job.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvstore.launch.run.checks import (
    as_count,
    as_environment,
    as_launcher,
    as_path,
    as_seconds,
    as_words,
)
from kvstore.launch.run.job import JobOptions, RunningJob, packed

_CALL = 1


def run(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    workers: int = 4,
    servers: int = 2,
    launcher: str = "local",
    timeout_s: float | None = None,
    env: Mapping[str, str] | None = None,
    options: Sequence[str] = (),
    share_dir: str | os.PathLike[str] | None = None,
    log_dir: str | os.PathLike[str] | None = None,
    python: str | os.PathLike[str] | None = None,
) -> list[Any]:
    """Call ``fn(*args, **kwargs)`` once on each worker of a new job; return what they returned.

    The list is in the order of the ranks. ``fn`` runs in a process that has joined the job, so
    ``kvstore.create("dist_sync")`` works in it; ``kv.rank`` tells who it is. With cloudpickle
    (``pip install cloudpickle``) it may be a lambda, a closure, or from a notebook; without, it
    must be in a module that the workers can import. Arguments and results are pickled: each
    worker has its own copy. What the processes print appears on ``sys.stdout`` and
    ``sys.stderr`` of the caller.

    Args:
        launcher: how processes are started, as ``--launcher`` of ``kvstore-launch``; not
            ``kubernetes``, whose pods share no directory with this process.
        timeout_s: seconds for everything together; None waits for as long as it takes.
        env: variables for all processes of the job.
        options: further options of the launcher, such as ``("--hostfile=hosts",)``.
        share_dir: where the directory (mode 0700) is made through which function and results
            go, on which all hosts must look under the same name. By default that for temporary
            files with ``local``, else the current directory.
        log_dir: keep one log file per process there; by default none is kept.
        python: the path of the workers' Python; by default this one.

    Raises what a worker raised, with ``WorkerFailed`` and its traceback there as the cause; the
    other workers are ended. ``WorkerFailed`` when one died, or when what it raised or returned
    cannot be handed over; ``JobFailed`` when the job did not start or a server failed;
    ``DeadlineError`` (a ``TimeoutError``), which names the ranks that had not returned; a
    ``UsageError`` before anything is started. When this returns or raises, also by a Ctrl-C,
    nothing of the job runs any more.
    """
    wanted = JobOptions(
        workers=as_count("workers", workers),
        servers=as_count("servers", servers),
        launcher=as_launcher(launcher),
        env=as_environment(env),
        options=as_words(options),
        share_dir=as_path("share_dir", share_dir),
        log_dir=as_path("log_dir", log_dir),
        python=as_path("python", python),
    )
    timeout_s = as_seconds(timeout_s)
    body = packed(fn, args, kwargs)
    job = RunningJob(wanted, "once")
    try:
        job.leave_call(_CALL, body)
        job.start()
        results = job.gather(_CALL, timeout_s).values()
        job.finish()
    finally:
        job.end()
    return results
