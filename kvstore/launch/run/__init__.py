"""``kvstore.run`` and ``LocalCluster``: functions on workers.

::

    def train(rate):
        kv = kvstore.create("dist_sync")
        ...
        return kv.rank, accuracy

    results = kvstore.run(train, args=(0.1,), workers=4, servers=2)

    with kvstore.LocalCluster(workers=2, servers=1) as cluster:  # its workers run until the end
        cluster.run(load)
        results = cluster.run(train, args=(0.1,))

This module checks all arguments before it starts anything. Importing it has no effect. Any thread
may call. Read ``job.py`` next.
"""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from numbers import Integral, Real
from typing import Any

from kvstore.errors import ArgumentTypeError, ArgumentValueError
from kvstore.errors.hints import did_you_mean
from kvstore.launch.options import LAUNCHERS, RESERVED_NAMES, LaunchError, check_word
from kvstore.launch.run.background import JobOptions, show
from kvstore.launch.run.call_files import dump
from kvstore.launch.run.job import JobCall, RunningJob
from pslite.errors import DeadlineError

START_S = 120.0

SAY_S = 10.0
"""After this time, ``close`` prints for which workers it waits."""


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
    restarts: int = 0,
    standbys: int = 0,
) -> list[Any]:
    """Call a function on each worker of a new job and return the results.

    The results are in the order of the ranks. ``fn`` runs in processes that have joined the job, so
    ``kvstore.create("dist_sync")`` works in it, and ``kv.rank`` is the worker's rank. With
    cloudpickle (``pip install cloudpickle``), ``fn`` may be a lambda, a closure, or from a
    notebook; without, it must be in a module that the workers can import. Arguments and results are
    pickled, so each worker has its own copy. The processes' output appears on the caller's
    ``sys.stdout`` and ``sys.stderr``.

    Args:
        launcher: how to start processes, as ``--launcher`` of ``kvstore-launch``; not
            ``kubernetes``, since pods share no directory with this process.
        timeout_s: limit in seconds for the whole call; None means no limit.
        env: variables for all processes of the job.
        options: further options of the launcher, such as ``("--hostfile=hosts",)``.
        share_dir: a directory that all hosts share under the same path; the job creates its
            directory (mode 0700) for functions and results in it. By default, the directory for
            temporary files with ``local``, else the current directory.
        log_dir: a directory to keep one log file per process; by default no logs are kept.
        python: the path of the workers' Python; by default this one.
        restarts: how many times workers that die may be started again. Such a worker calls ``fn``
            again, and a loop over ``kv.steps`` in it repeats its step (``docs/recovery.md``).
        standbys: 1 for a standby of each server, which takes its place if it dies, else 0. With
            ``restarts``, standbys that die or have taken a place are started again, too.

    Raises the error that a worker raised; its cause is a ``WorkerFailed`` with the worker's
    traceback. The other workers are ended. Raises ``WorkerFailed`` if a worker died, or if its
    error or result cannot be passed on; ``JobFailed`` if the job did not start or a server failed;
    ``DeadlineError`` (a ``TimeoutError``), which names the ranks that had not returned; a
    ``UsageError`` before anything is started. When this returns or raises, even after a Ctrl-C, no
    process of the job runs any more.
    """
    wanted = _checked(workers, servers, env, options, log_dir, python, launcher, share_dir)
    wanted = replace(
        wanted,
        restarts=_as_count("restarts", restarts, least=0),
        standbys=_as_count("standbys", standbys, least=0),
    )
    limit_s = _as_seconds(timeout_s)
    job = RunningJob(wanted, "once", _packed(fn, args, kwargs))
    try:
        results = job.result(job.first, limit_s)
        job.finish()
    finally:
        job.end()
    return results


class LocalCluster:
    """A scheduler, servers and workers on this machine, until closed.

    When the constructor returns, all have joined. If they have not joined within ``timeout_s``
    seconds, it ends all processes and raises ``DeadlineError``. ``env``, ``options``, ``log_dir``
    and ``python`` are those of ``kvstore.run``. The cluster is closed by :meth:`close`, by the end
    of a ``with`` block (at once, if an exception leaves the block), at the end of the interpreter,
    and when no reference to it is left.

    If a function raises an exception, its call raises it too. If all workers have answered, the
    cluster continues. It ends if some workers have not answered within 2 s, since they wait for the
    failed one, or if a worker or server is lost. Later calls then raise ``ClosedError``. Nothing is
    restarted.
    """

    def __init__(
        self,
        workers: int = 4,
        servers: int = 2,
        *,
        timeout_s: float | None = START_S,
        env: Mapping[str, str] | None = None,
        options: Sequence[str] = (),
        log_dir: str | os.PathLike[str] | None = None,
        python: str | os.PathLike[str] | None = None,
    ) -> None:
        wanted = _checked(workers, servers, env, options, log_dir, python)
        limit_s = _as_seconds(timeout_s)
        self._size = wanted.workers, wanted.servers
        # The first call does nothing; it returns when all workers have joined.
        self._job = RunningJob(wanted, "serve", _packed(os.getpid, (), None))
        self._end = weakref.finalize(self, self._job.end)
        try:
            self._job.result(self._job.first, limit_s)
        except BaseException:
            self._end()
            raise

    def __repr__(self) -> str:
        state = f"{self._job.calls_under_way} calls under way"
        if why := self._job.why_closed:
            state = f"ended: {why}"
        return f"<LocalCluster of {self._size[0]} workers and {self._size[1]} servers, {state}>"

    def __enter__(self) -> LocalCluster:
        return self

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        if kind is None:
            self.close()
        else:
            self._job.refuse("an exception left its with block")

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> list[Any]:
        """Call ``fn`` once on each worker and return the results by rank.

        ``timeout_s`` is a limit in seconds, which includes earlier calls that have not finished.
        After this time, and at a Ctrl-C, the cluster ends. Raises the same errors as
        ``kvstore.run``.
        """
        _as_seconds(timeout_s)
        call = self.submit(fn, args, kwargs)
        try:
            return call.result(timeout_s)
        except DeadlineError:
            if not call.done():  # otherwise the function has raised it
                self._job.refuse("a call took longer than its timeout_s")
            raise
        except KeyboardInterrupt:
            self._job.refuse("a call was interrupted")
            raise

    def submit(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Call:
        """Call ``fn`` on each worker after the earlier calls, without waiting."""
        return Call(self, self._job.submit(_packed(fn, args, kwargs)))

    def close(self, timeout_s: float | None = None) -> None:
        """Wait for the calls in flight, then end all processes. May be called again.

        After ``timeout_s`` seconds, calls in flight are ended, and a line on ``sys.stderr`` reports
        it. None means no limit; after some seconds, a line says which workers are missing. Errors
        of calls whose result was not requested are not raised.
        """
        limit_s = _as_seconds(timeout_s)
        try:
            if limit_s == math.inf:
                try:
                    self._job.close(SAY_S)
                except DeadlineError as error:
                    show([(True, f"[launcher] closing the cluster: {error}; waiting on")])
            self._job.close(limit_s)
        except DeadlineError as error:
            show([(True, f"[launcher] closing the cluster: {error}; ending the job")])
            self._job.refuse("closing it took longer than its timeout_s")
        except KeyboardInterrupt:
            self._job.refuse("closing it was interrupted")
            raise
        if self._end.alive and self._job.ending is None:
            self._job.finish()
        self._end()


class Call:
    """A call of :meth:`LocalCluster.submit`, in flight or finished."""

    def __init__(self, cluster: LocalCluster, call: JobCall) -> None:
        self._cluster = cluster  # kept, since an unreferenced cluster ends
        self._call = call

    def done(self) -> bool:
        """Return whether :meth:`result` would return or raise at once."""
        return self._call.is_done

    def __repr__(self) -> str:
        state = "done" if self.done() else "under way"
        if self.done() and (error := self._cluster._job.error_of(self._call)):
            state = f"failed, {type(error).__name__}"
        return f"<Call {self._call.number} of a LocalCluster: {state}>"

    def result(self, timeout_s: float | None = None) -> list[Any]:
        """Return each worker's result by rank; show the workers' output meanwhile.

        Raises the same errors as ``kvstore.run``. After a ``DeadlineError``, the call continues,
        and this may be called again.
        """
        return self._cluster._job.result(self._call, _as_seconds(timeout_s))


# -- arguments ----------------------------------------------------------------------------


def _checked(
    workers: object,
    servers: object,
    env: object,
    options: object,
    log_dir: object,
    python: object,
    launcher: object = "local",
    share_dir: object = None,
) -> JobOptions:
    """Check each argument separately. Raises ``UsageError``."""
    if not isinstance(launcher, str) or launcher not in LAUNCHERS:
        raise ArgumentValueError(
            f"launcher must be one of {', '.join(LAUNCHERS)}, got "
            f"{launcher!r}{did_you_mean(launcher, LAUNCHERS)}"
        )
    if isinstance(options, str):  # a text is also a sequence of letters
        raise ArgumentTypeError(
            f"options must be a sequence of texts, as in options=({options!r},)"
        )
    if not isinstance(options, Sequence) or not all(isinstance(word, str) for word in options):
        raise ArgumentTypeError(f"options must be a sequence of texts, got {options!r}")
    return JobOptions(
        workers=_as_count("workers", workers),
        servers=_as_count("servers", servers),
        launcher=launcher,
        env=_as_environment({} if env is None else env),
        options=tuple(options),
        share_dir=_as_path("share_dir", share_dir),
        log_dir=_as_path("log_dir", log_dir),
        python=_as_path("python", python),
    )


def _as_count(name: str, value: object, least: int = 1) -> int:
    wanted = f"{name} must be an int of at least {least}, got {value!r}"
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ArgumentTypeError(wanted)
    if value < least:
        raise ArgumentValueError(wanted)
    return int(value)


def _as_seconds(timeout_s: object) -> float:
    """Return the limit in seconds: infinite for None, at least 0."""
    if timeout_s is None:
        return math.inf
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, Real):
        raise ArgumentTypeError(
            f"timeout_s must be a number of seconds, or None for no limit, got {timeout_s!r}"
        )
    if math.isnan(timeout_s):
        raise ArgumentValueError(f"timeout_s must be a number of seconds, got {timeout_s}")
    return max(0.0, float(timeout_s))


def _as_environment(env: object) -> dict[str, str]:
    if not isinstance(env, Mapping):
        raise ArgumentTypeError(f"env must map names to texts, got {type(env).__name__}")
    for name, text in env.items():
        if not isinstance(name, str) or not isinstance(text, str):
            raise ArgumentTypeError(f"env must map names to texts, got {name!r}: {text!r}")
        if name in RESERVED_NAMES:
            raise ArgumentValueError(
                f"env cannot set {name}, since the launcher sets it; remove it"
            )
        if not (name.isascii() and name.isidentifier()):
            raise ArgumentValueError(f"env has an invalid variable, {name!r}: {text!r}")
        _check_word(f"env[{name!r}]", text)
    return dict(env)


def _check_word(name: str, text: str) -> None:
    try:
        check_word(text)
    except LaunchError as error:
        raise ArgumentValueError(f"{name}: {error}") from None


def _as_path(name: str, path: object) -> str | None:
    if path is None:
        return None
    text = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(text, str):
        raise ArgumentTypeError(f"{name} must be a path, got {path!r}")
    _check_word(name, text)
    return text


def _packed(function: object, args: object, kwargs: object) -> bytes:
    """Return a call as bytes. Raises ``UsageError`` if it cannot be sent."""
    if not callable(function):
        raise ArgumentTypeError(f"fn must be a function, got {type(function).__name__}")
    if not isinstance(args, Iterable) or isinstance(args, str | bytes | bytearray | Mapping):
        raise ArgumentTypeError(
            "args must be a sequence of the function's arguments, as in args=(2,); "
            f"got {type(args).__name__}"
        )
    named = {} if kwargs is None else kwargs
    if not isinstance(named, Mapping) or not all(isinstance(name, str) for name in named):
        raise ArgumentTypeError(
            f"kwargs must map names to values, as in kwargs={{'rate': 0.1}}; got {kwargs!r:.60}"
        )
    what = f"the function {getattr(function, '__name__', type(function).__name__)}"
    return dump((function, tuple(args), dict(named)), what)
