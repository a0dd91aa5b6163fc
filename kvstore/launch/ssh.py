"""The launcher ``ssh``: the scheduler here, servers and workers on the hosts of a file.

One ``ssh`` for each host starts an agent there (``agent.py``), which starts that host's
processes; the job's key and the variables go through its standard input. Flags and places as in
dmlc-core's ``tracker/dmlc_tracker/ssh.py``. Read ``jobrun.py`` and ``remote.py`` next.
"""

from __future__ import annotations

import os
import secrets
import shlex
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvstore.launch.address import listen
from kvstore.launch.agent import LOADER, bootstrap
from kvstore.launch.elsewhere import (
    agent_row,
    common_address,
    core_count,
    for_elsewhere,
    forwarded_variables,
    wished_address,
)
from kvstore.launch.here import checkout_root
from kvstore.launch.hosts import Host, Placement, read_hosts, spread
from kvstore.launch.jobrun import Arrangement, check_plan, run_job
from kvstore.launch.lifecycle import Timing
from kvstore.launch.options import LaunchError, LaunchOptions
from kvstore.launch.places import Place
from kvstore.launch.plan import ProcessSpec
from kvstore.launch.rehearsal import Row, table
from kvstore.launch.remote_shell import check_launcher_args, no_program, refusal, ssh_argv
from kvstore.launch.ssh_place import SshPlace
from kvstore.launch.supervisor import Supervisor
from kvstore.launch.sync import copy_to_hosts, rsync_argv

_CONNECT_S = 14.0


def run(
    options: LaunchOptions,
    environ: Mapping[str, str],
    service_command: Sequence[str],
    timing: Timing,
) -> int:
    """As :func:`kvstore.launch.jobrun.run_job`."""
    if options.hostfile is None:
        raise LaunchError(
            "--launcher ssh needs the hosts: -H FILE, with one host on each line", exit_code=2
        )
    hosts = read_hosts(options.hostfile)
    check_launcher_args(options.places.launcher_args)
    places = spread(hosts, options.num_servers, options.num_workers, options.hostfile)
    used = sorted({host for _, _, host in places})
    wished, wished_port = wished_address(environ)
    if options.dry_run or options.check:
        check_plan(options, environ, service_command)
    if options.dry_run:
        return _print_plan(options, hosts, places)
    if options.check:
        return _check(options, environ, timing, [hosts[index] for index in used])
    if wished_port:  # is it in use? Not after all has been copied
        listen(wished or "0.0.0.0", wished_port).close()
    if options.sync_dst_dir is not None:
        arguments = options.places.launcher_args
        copy_to_hosts(
            [hosts[index] for index in used], os.getcwd(), options.sync_dst_dir, arguments, _say
        )

    def arrange(supervisor: Supervisor) -> Arrangement:
        remote = {index: _reach(supervisor, options, hosts[index]) for index in used}
        supervisor.connect(list(remote.values()), _CONNECT_S)
        greetings = [place.greeting or {} for place in remote.values()]
        wished, port = wished_address(environ)
        seen = [str(one.get("reached_from") or "127.0.0.1") for one in greetings]
        host = wished or common_address(seen)

        def assign(
            job_id: str, key: str, specs: Sequence[ProcessSpec]
        ) -> list[tuple[ProcessSpec, Place]]:
            where = {(role, rank): index for role, rank, index in places}
            for index, place in remote.items():
                place.prepare(job_id, key, _variables(options, environ, hosts[index]))
            return [
                (spec, supervisor.local)
                if spec.role == "scheduler"
                else (for_elsewhere(spec), remote[where[spec.role, spec.rank]])
                for spec in specs
            ]

        return Arrangement(host, port, core_count(greetings), assign)

    return run_job(options, environ, service_command, timing, arrange)


def _reach(supervisor: Supervisor, options: LaunchOptions, host: Host) -> SshPlace:
    python = options.python or sys.executable
    command = ssh_argv(host, options.places.launcher_args, [python, "-c", LOADER])
    directory = options.sync_dst_dir or os.getcwd()
    try:
        place = SshPlace(
            host.label,
            command,
            bootstrap(directory, checkout_root()),
            supervisor.guardian(),
            lambda lines, code: refusal(host, lines, code, python, options.places.launcher_args),
            time.monotonic(),
        )
    except OSError as error:
        raise LaunchError(no_program("ssh", error), exit_code=1) from error
    supervisor.add_place(place)
    return place


def _variables(options: LaunchOptions, environ: Mapping[str, str], host: Host) -> dict[str, str]:
    found = forwarded_variables(options, environ)
    if host.address is not None:
        found["DMLC_NODE_HOST"] = host.address
    return found


def _say(text: str) -> None:
    print(f"[launcher] {text}", file=sys.stderr, flush=True)


def _print_plan(options: LaunchOptions, hosts: Sequence[Host], places: Sequence[Placement]) -> int:
    for host in [hosts[index] for index in sorted({index for _, _, index in places})]:
        if options.sync_dst_dir is not None:
            source = os.getcwd()
            arguments = options.places.launcher_args
            print(shlex.join(rsync_argv(host, source, options.sync_dst_dir, arguments)))
        python = options.python or sys.executable
        print(shlex.join(ssh_argv(host, options.places.launcher_args, [python, "-c", LOADER])))
    print("# scheduler: this machine")
    for role, rank, index in places:
        words = shlex.join(
            options.command if role == "worker" else ("python", "-m", "kvstore.server")
        )
        print(f"# {role} {rank} on {hosts[index].label}: {words}")
    return 0


def _check(
    options: LaunchOptions,
    environ: Mapping[str, str],
    timing: Timing,
    hosts: Sequence[Host],
) -> int:
    """Look at every host and print what was found in a table; 0, or 1 if one is no good."""
    rows: list[Row] = []
    nobody = secrets.token_hex(8)  # the id of a job that has no processes
    with (
        tempfile.TemporaryDirectory() as logs,
        Supervisor(nobody, environ, Path(logs), timing) as one,
    ):
        for host in hosts:
            place = _reach(one, options, host)
            try:
                one.connect([place], _CONNECT_S)
            except LaunchError as error:
                if error.exit_code > 128:  # Ctrl-C
                    raise
                rows.append(Row(host.label, str(error), False))
                continue
            rows.append(agent_row(host.label, place.greeting or {}))
    print(table(rows), end="")
    return 0 if all(row.is_good for row in rows) else 1
