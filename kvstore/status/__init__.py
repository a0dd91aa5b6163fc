"""``kvstore status``: what the nodes of a running job do, from the job's scheduler.

Asks as an observer (``pslite/apps/observer.py``), which takes no part in the job, and prints what
``text.py`` makes of the answer. Ends with 0; with 1 where no answer comes or the key is
another one; with 2 where the command or a setting makes no sense. What goes wrong is one sentence.
With ``--kubernetes`` the same command runs in the scheduler's pod, which has address and key.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from kvstore.launch.backends.kubernetes.kubectl import kubectl_here, scheduler_pod
from kvstore.launch.job.registry import SHARED_NAME, running_jobs, shared_directory
from kvstore.launch.options import LaunchError
from kvstore.status.text import as_json, as_line, as_table, summarise
from pslite import Config, Observer, Survey, __version__
from pslite.errors import ConfigError, DeadlineError, PSError

RATE_S = 1.0
"""Traffic is measured over so long where the command asks only once."""
WATCH_S = 2.0
LEAST_WATCH_S = 0.5
"""The scheduler gives what is younger again."""
_CLEAR = "\x1b[H\x1b[2J"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvstore status",
        description="Show what the nodes of a running job do: roles, ranks, traffic, queues, "
        "what waits for whom, steps and samples per second. The job does not notice.",
        epilog="Without a key only a job of this machine without a key can be asked. "
        "docs/status.md explains the columns.",
    )
    parser.add_argument(
        "address",
        nargs="?",
        metavar="ADDR",
        help="host:port of the scheduler (default: DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT, or "
        "else your job on this machine or on the cluster); with --kubernetes the job's name",
    )
    parser.add_argument(
        "--key-file",
        metavar="FILE",
        help="the job's key (default: that of PS_JOB_KEY_FILE, or of your job)",
    )
    parser.add_argument(
        "--security",
        choices=("plain", "curve"),
        help="what the job uses its key for (default: PS_SECURITY, or else curve)",
    )
    parser.add_argument(
        "--kubernetes", action="store_true", help="ask a job in the cluster of kubectl"
    )
    parser.add_argument("--namespace", metavar="NAME", help="its namespace (default: kubectl's)")
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument("--json", action="store_true", help="as JSON, with --watch one line each")
    shape.add_argument("--line", action="store_true", help="the job in one line")
    parser.add_argument(
        "--watch",
        nargs="?",
        type=_interval,
        const=WATCH_S,
        metavar="SECONDS",
        help=f"repeat after this many seconds, until the job ends or Ctrl-C (default: {WATCH_S:g})",
    )
    parser.add_argument("--version", action="version", version=__version__)
    return parser


def _interval(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not LEAST_WATCH_S <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"expected at least {LEAST_WATCH_S:g} seconds, got {text}")
    return seconds


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; ``arguments`` are those of this process by default. Returns its code."""
    options = _parser().parse_args(arguments)
    try:
        if options.kubernetes:
            return _ask_in_pod(options)
        return _run(options)
    except LaunchError as error:
        return _said(error, error.exit_code)
    except PSError as error:
        return _said(error, 1)
    except KeyboardInterrupt:
        return 0 if options.watch is not None else 130
    except BrokenPipeError:  # as of `| head`: the reader is gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _run(options: argparse.Namespace) -> int:
    try:
        address, config = _job(options)
        observer = Observer(address, config=config)
    except ConfigError as error:  # no scheduler was asked: it is the command, or a setting
        return _said(error, 2)
    with observer:
        before, survey = None, observer.ask()
        if options.watch is not None:
            return _watch(observer, survey, options)
        if not options.line and survey.state != "gathering":
            time.sleep(RATE_S)
            before, survey = survey, observer.ask()
        print(_shown(survey, before, options, indent=2))
    return 0


def _ask_in_pod(options: argparse.Namespace) -> int:
    """Run this command where the job's scheduler is, by kubectl. Raises ``LaunchError``."""
    kubectl = kubectl_here(options.namespace)
    words = [flag for flag in ("json", "line") if getattr(options, flag)]
    command = ["python", "-m", "kvstore.status", *(f"--{flag}" for flag in words)]
    if options.watch is not None:
        command.append(f"--watch={options.watch:g}")
    pod = scheduler_pod(kubectl, options.address)
    return subprocess.run(kubectl.argv("exec", pod, "--", *command), check=False).returncode


def _said(error: Exception, code: int) -> int:
    print(f"kvstore status: {error}", file=sys.stderr)
    return code


def _job(options: argparse.Namespace) -> tuple[str | None, Config]:
    """Whom to ask, and with which key. Raises ``ConfigError``, and ``DeadlineError`` for no job.

    Where no key is given, a job that the launcher runs here for this user is asked with its own.
    """
    given: dict[str, Any] = {}
    if options.key_file is not None:
        given.update(job_key_file=options.key_file, job_key_fd=None)
    if options.security is not None:
        given.update(security=options.security)
    config, _ = Config.from_env(**given)
    address: str | None = options.address
    if config.job_key_file or config.job_key_fd is not None:
        return address, config
    if address is None and not config.root_uri:
        address = _only_address()
    for job in running_jobs():
        if job.address == address:
            given.setdefault("security", job.security)
            config, _ = Config.from_env(**given, job_key_file=job.key_file)
    return address, config


def _only_address() -> str:
    """That of the one job of this user."""
    addresses = [job.address for job in running_jobs()]
    if len(addresses) > 1:
        raise ConfigError(f"you run {len(addresses)} jobs, say which: {', '.join(addresses)}")
    if not addresses:
        raise DeadlineError(
            f"no job that kvstore-launch runs for you was found below {tempfile.gettempdir()} "
            f"(TMPDIR), nor below {shared_directory()} ({SHARED_NAME}); name "
            "its scheduler as HOST:PORT, or add --kubernetes where it runs there"
        )
    return addresses[0]


def _watch(observer: Observer, survey: Survey, options: argparse.Namespace) -> int:
    before: Survey | None = None
    is_table = not (options.json or options.line)
    while True:
        shown = _shown(survey, before, options, indent=None)
        if is_table:
            shown = _CLEAR + shown if sys.stdout.isatty() else f"{shown}\n"
        print(shown, flush=True)
        time.sleep(options.watch)
        try:
            before, survey = survey, observer.ask()
        except PSError as error:
            return _said(error, 0)


def _shown(
    survey: Survey, before: Survey | None, options: argparse.Namespace, indent: int | None
) -> str:
    if options.json:
        return json.dumps(as_json(survey, before), indent=indent)
    if options.line:
        return as_line(summarise(survey))
    return as_table(survey, before)
