"""The launcher ``ssh``: the scheduler runs here, other processes on the hosts.

One ``ssh`` for each host starts an agent there (``launch/agents/agent.py``), which starts that
host's processes. The job's key and the variables go through its standard input. The command is a
child of the launcher: its standard input and output are the agent's link, and its standard error
says why ssh could not reach the machine. Flags as in dmlc-core's ``tracker/dmlc_tracker/ssh.py``.
Runs on the main thread. Read ``launch/job/run.py`` and ``launch/agents/remote.py`` first.
"""

from __future__ import annotations

import os
import selectors
import shlex
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence

from kvstore.launch.agents.agent import LOADER, bootstrap
from kvstore.launch.agents.cluster import (
    agent_row,
    common_address,
    core_count,
    forwarded_variables,
    print_processes,
    wished_address,
)
from kvstore.launch.agents.remote import AgentPlace
from kvstore.launch.agents.wire import GREET, AgentLink, LinkLost, Message
from kvstore.launch.backends.hosts import Host, Placement, read_hosts, spread
from kvstore.launch.backends.rsync import copy_to_hosts, rsync_argv
from kvstore.launch.backends.ssh_command import check_launcher_args, ssh_argv
from kvstore.launch.backends.ssh_errors import no_program, refusal
from kvstore.launch.environment import checkout_root, listen
from kvstore.launch.job.checks import CheckResult, conclude_check, script_row
from kvstore.launch.job.guardian import GuardianProcess
from kvstore.launch.job.places import Event, LineStream, Note
from kvstore.launch.job.report import say
from kvstore.launch.job.restarts import Timing
from kvstore.launch.job.run import Arrangement, check_plan, checking, run_job
from kvstore.launch.job.supervisor import Supervisor
from kvstore.launch.options import LaunchError, LaunchOptions
from kvstore.launch.plan import script_of

_CONNECT_S = 14.0
_KEPT_LINES = 20
_REAP_S = 2.0


class SshPlace(AgentPlace):
    """A host that is reached by ssh; its agent checks ``script`` ("" means none).

    Raises OSError if ssh is missing.
    """

    def __init__(
        self, host: Host, options: LaunchOptions, script: str, guardian: GuardianProcess
    ) -> None:
        super().__init__(host.label)
        self._host = host
        self._options = options
        self._refused: str | None = None  # the reason from the program that was to become the agent
        self._process = subprocess.Popen(
            _command(host, options),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        guardian.watch(self._process.pid)
        assert self._process.stdin and self._process.stdout and self._process.stderr
        self._errors = LineStream(self._process.stderr, self._complain)
        self._link = AgentLink(
            os.dup(self._process.stdout.fileno()),
            os.dup(self._process.stdin.fileno()),
            time.monotonic(),
            finds_greeting=True,
        )
        self._process.stdin.close()
        self._process.stdout.close()
        directory = options.sync_dst_dir or os.getcwd()
        self._link.send_raw(bootstrap(directory, checkout_root(), script))
        self._complaints: deque[str] = deque(maxlen=_KEPT_LINES)
        self._hung_up_s = 0.0

    def adjust(self, selector: selectors.BaseSelector, *, paused: bool) -> None:
        super().adjust(selector, paused=paused)
        self._errors.adjust(selector, paused=False)

    def hang_up(self) -> None:
        """Close the link, which makes the agent kill its processes; note the time."""
        self._hung_up_s = time.monotonic()
        super().hang_up()

    def close(self) -> None:
        """End ssh and the processes that it has started (such as a jump host's ssh)."""
        try:
            self._process.wait(max(0.0, self._hung_up_s + _REAP_S - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._errors.close()

    def _heard(self, message: Message) -> list[Event]:
        if message[0] != GREET:
            return super()._heard(message)
        assert self._link is not None
        found = message[1]
        if "error" in found:
            self._refused = f"{self.label}: {found['error']}"
            raise LinkLost(self._refused)
        self.greet(self._link, found)
        return []

    def _lose(self, how: str) -> list[Event]:
        events = super()._lose(how)
        if self.greeting is not None:
            return events
        code = self._exit_code()  # this also reads the last complaints
        said, arguments = list(self._complaints), self._options.places.launcher_args
        self.failure = self._refused or refusal(
            self._host, said, code, _python(self._options), arguments
        )
        return []  # the failure reports everything

    def _last_words(self) -> str:
        return f" ({self._complaints[-1]})" if self._complaints else ""

    def _complain(self, lines: Sequence[bytes]) -> list[Event]:
        texts = [line.decode(errors="replace") for line in lines]
        self._complaints.extend(texts)
        if self.greeting is None:
            return []  # the reason why there is no agent, which ``failure`` reports
        return [Note(f"{self.label}: {text}") for text in texts if text]

    def _exit_code(self) -> int | None:
        """Return the exit code of the command, which has closed its output."""
        try:
            code = self._process.wait(_REAP_S)
        except subprocess.TimeoutExpired:
            return None
        self._errors.read_rest()
        return code


def run(
    options: LaunchOptions,
    environ: Mapping[str, str],
    service_command: Sequence[str],
    timing: Timing,
) -> int:
    """Run a job on the hosts; see :func:`kvstore.launch.job.run.run_job`."""
    if options.hostfile is None:
        raise LaunchError(
            "--launcher ssh needs a hosts file; pass -H FILE with one host on each line"
        )
    hosts = read_hosts(options.hostfile)
    check_launcher_args(options.places.launcher_args)
    counts = options.num_servers, options.num_workers
    places = spread(hosts, *counts, options.hostfile, options.standbys)
    used = sorted({host for _, _, host in places})
    wished, port = wished_address(environ)
    if options.dry_run or options.check:
        check_plan(options, environ, service_command)
    if options.dry_run:
        return _print_plan(options, hosts, places)
    if options.check:
        return _check(options, environ, timing, [hosts[index] for index in used])
    if port:  # if the port is in use, say so before copying
        listen(wished or "0.0.0.0", port).close()
    if options.sync_dst_dir is not None:
        arguments = options.places.launcher_args
        copy_to_hosts(
            [hosts[index] for index in used], os.getcwd(), options.sync_dst_dir, arguments, say
        )

    def arrange(supervisor: Supervisor, key: str) -> Arrangement:
        remote = {index: _reach(supervisor, options, hosts[index]) for index in used}
        supervisor.connect(list(remote.values()), _CONNECT_S)
        greetings = [place.greeting or {} for place in remote.values()]
        seen = [str(one.get("reached_from") or "127.0.0.1") for one in greetings]
        host = wished or common_address(seen)
        for index, place in remote.items():
            address = hosts[index].address
            node_host = {} if address is None else {"DMLC_NODE_HOST": address}
            variables = {**forwarded_variables(options, environ), **node_host}
            place.prepare(supervisor.job_id, key, variables, {})
        where = {(role, rank): remote[index] for role, rank, index in places}
        names = {
            index: hosts[index].address or str((place.greeting or {}).get("host"))
            for index, place in remote.items()
        }
        workers = [names[index] for role, _, index in sorted(places) if role == "worker"]
        return Arrangement(host, port, core_count(greetings), where, worker_hosts=workers)

    return run_job(options, environ, service_command, timing, arrange)


def _python(options: LaunchOptions) -> str:
    return options.python or sys.executable


def _command(host: Host, options: LaunchOptions) -> list[str]:
    return ssh_argv(host, options.places.launcher_args, [_python(options), "-c", LOADER])


def _reach(
    supervisor: Supervisor, options: LaunchOptions, host: Host, script: str = ""
) -> SshPlace:
    try:
        place = SshPlace(host, options, script, supervisor.guardian)
    except OSError as error:
        raise LaunchError(no_program("ssh", error), exit_code=1) from error
    supervisor.add_place(place)
    return place


def _print_plan(options: LaunchOptions, hosts: Sequence[Host], places: Sequence[Placement]) -> int:
    arguments, destination = options.places.launcher_args, options.sync_dst_dir
    for host in [hosts[index] for index in sorted({index for _, _, index in places})]:
        if destination is not None:
            print(shlex.join(rsync_argv(host, os.getcwd(), destination, arguments)))
        print(shlex.join(_command(host, options)))
    named = [(role, f"{role} {rank} on {hosts[index].label}") for role, rank, index in places]
    print_processes(options, named)
    return 0


def _check(
    options: LaunchOptions,
    environ: Mapping[str, str],
    timing: Timing,
    hosts: Sequence[Host],
) -> int:
    """Check every host, print a table, and return 0, or 1 if one fails."""
    rows: list[CheckResult] = []
    script = script_of(options.command)
    if options.sync_dst_dir is not None:  # the hosts will get this machine's files
        rows.append(script_row(script))
        script = ""
    with checking(environ, timing) as supervisor:
        for host in hosts:
            place = _reach(supervisor, options, host, script)
            try:
                supervisor.connect([place], _CONNECT_S)
            except LaunchError as error:
                if error.exit_code > 128:  # Ctrl-C
                    raise
                rows.append(CheckResult(host.label, str(error), False))
                continue
            rows.append(agent_row(host.label, place.greeting or {}))
    return conclude_check(rows)
