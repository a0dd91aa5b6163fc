"""The launcher ``yarn``: Hadoop's distributed shell runs an agent in each container.

There is no Java of ours: the application master is the one that ships with Hadoop. It has one
size of containers for servers and workers, and no directory that containers share, so each gets
all it needs in the script that it runs (``yarn_script.py``). Options as in Hadoop's ``Client.java``
(hadoop-yarn-applications-distributedshell). Read ``carried.py`` and ``yarn_client.py`` next.
"""

from __future__ import annotations

import os
import re
import secrets
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from kvstore.launch.carried import run_carried, servers_then_workers
from kvstore.launch.clusters import Cluster, Habits
from kvstore.launch.here import checkout_root
from kvstore.launch.lifecycle import Timing
from kvstore.launch.options import LaunchError, LaunchOptions, Places
from kvstore.launch.ticket import Ticket
from kvstore.launch.yarn_client import ClientWords, submitted_application
from kvstore.launch.yarn_script import FIRST_RANK, RANK_NAME, container_script

_OWN_OPTIONS = ("appname", "num_containers", "shell_script", "shell_command")
_CLIENT = "org.apache.hadoop.yarn.applications.distributedshell.Client"
_JAR = "hadoop-yarn-applications-distributedshell"
_CLASSPATH_S = 20.0
_ENDING_S = 15.0  # the application master, YARN and the client look at each other every second
_SUBMIT_NAME = "submit.sh"
_SCRIPT_NAME = "container.sh"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\Z")

# The client kills what has run for longer, and takes no larger number (24 days).
_LONGEST_MS = 2**31 - 1
# As dmlc-core's; Hadoop's default of 10 MB is as much as the cluster's least, which may be less
# than a Python needs.
_MEMORY_MB = 1024
_CORES = 1

# What it prints must be all of this, also where somebody wants less.
_LOGGERS = {"HADOOP_ROOT_LOGGER": "INFO,console", "YARN_ROOT_LOGGER": "INFO,console"}

# Hadoop lets everybody read what the client uploads, so it is put into a directory of its own.
_SUBMIT = """\
trap : TERM
hadoop fs -D fs.permissions.umask-mode=077 -mkdir -p {name} &&
{command} -shell_script "$1"
code=$?
hadoop fs -rm -r -f -skipTrash {name} >/dev/null 2>&1
exit $code
"""
_CANCEL = 'yarn application -kill "$1"; c=$?; hadoop fs -rm -r -f -skipTrash "$2"; exit $c'


def run(
    options: LaunchOptions,
    environ: Mapping[str, str],
    service_command: Sequence[str],
    timing: Timing,
) -> int:
    """As :func:`kvstore.launch.jobrun.run_job`."""
    refuse_own_options(options.places.launcher_args)
    name = application_name(options.places.jobname)
    for program in ("yarn", "hadoop"):
        if shutil.which(program, path=environ.get("PATH")) is None:
            raise LaunchError(
                f"there is no program '{program}' here: start this on a machine with Hadoop's "
                "client, with its bin directory on the PATH",
                exit_code=1,
            )
    jar = own_jar(options.places.launcher_args) or find_jar(environ)
    words = ClientWords()

    def cancel(line: str) -> list[str] | None:
        found = submitted_application(line)
        return None if found is None else ["sh", "-c", _CANCEL, "cancel", found, name]

    def bundle(ticket: Ticket) -> dict[str, str]:
        python = options.python or sys.executable
        return {_SCRIPT_NAME: container_script(ticket, python, os.getcwd(), checkout_root())}

    def command(directory: Path) -> list[str]:
        return ["sh", str(directory / _SUBMIT_NAME), str(directory / _SCRIPT_NAME)]

    members = servers_then_workers(options)
    cluster = Cluster(
        members=members,
        command=command,
        environment={**environ, **_LOGGERS},
        rank_names=[RANK_NAME],
        worker_cores=container_size(options.places)[1],
        first_rank=FIRST_RANK,
        explain=words.explain,
        state=words.state,
        cancel=cancel,
        bundle=bundle,
        habits=Habits(
            name="yarn",
            is_news=words.is_news,
            is_submitting=words.is_submitting,
            ending_s=_ENDING_S,
            only_wishes=True,
        ),
        files={
            _SUBMIT_NAME: submit_script(client_argv(options.places, jar, name, len(members)), name)
        },
    )
    return run_carried(options, environ, service_command, timing, cluster)


def refuse_own_options(launcher_args: Sequence[str]) -> None:
    """Raise :class:`LaunchError` for what the launcher has to say itself.

    The name is also that of the directory in HDFS that nobody else can read.
    """
    for word in launcher_args:
        if word.startswith("-") and word.lstrip("-").split("=")[0] in _OWN_OPTIONS:
            raise LaunchError(
                f"{word} in --launcher-args is for the launcher to say: the name is --jobname, "
                "and -n and -s are how many containers there are",
                exit_code=2,
            )


def application_name(jobname: str | None) -> str:
    """A name of its own, for YARN's lists and for a directory in HDFS. Raises LaunchError."""
    if jobname is not None and not _NAME.match(jobname):
        raise LaunchError(
            f"--jobname '{jobname}' is also the name of a directory in HDFS: use letters, digits, "
            "'.', '_' and '-'",
            exit_code=2,
        )
    return f"{jobname or 'kvstore'}-{secrets.token_hex(4)}"


def container_size(places: Places) -> tuple[int, int]:
    """MiB and processors of every container: the larger of what servers and workers shall have."""
    memory = max(places.worker_memory_mb or 0, places.server_memory_mb or 0)
    cores = max(places.worker_cores or 0, places.server_cores or 0)
    return memory or _MEMORY_MB, cores or _CORES


def client_argv(places: Places, jar: str, name: str, count: int) -> list[str]:
    """All but the script. Of an option that is given twice the client takes the first."""
    memory, cores = container_size(places)
    queue = [] if places.queue is None else ["-queue", places.queue]
    return [
        *("yarn", "jar", jar, _CLIENT),
        *places.launcher_args,
        *("-jar", jar),
        *("-appname", name),
        *queue,
        *("-num_containers", str(count)),
        *("-container_memory", str(memory)),
        *("-container_vcores", str(cores)),
        *("-timeout", str(_LONGEST_MS)),
    ]


def own_jar(launcher_args: Sequence[str]) -> str | None:
    """The jar that the user names by ``-jar``."""
    for option, value in pairwise(launcher_args):
        if option.lstrip("-") == "jar" and option.startswith("-"):
            return value
    return None


def find_jar(environ: Mapping[str, str]) -> str:
    """The distributed shell of the Hadoop that is installed here. Raises :class:`LaunchError`."""
    homes = [environ[name] for name in ("HADOOP_YARN_HOME", "HADOOP_HOME") if environ.get(name)]
    program = shutil.which("yarn", path=environ.get("PATH"))
    assert program is not None
    homes.append(str(Path(program).resolve().parents[1]))
    for home in homes:
        for below in ("share/hadoop/yarn", ".", "lib/hadoop-yarn"):
            if found := _jar_in(Path(home) / below):
                return found
    for directory in _class_path(program, environ):
        if found := _jar_in(directory):
            return found
    raise LaunchError(
        f"there is no {_JAR}-*.jar in {', '.join(homes)}, nor on the path of 'yarn classpath': "
        "set HADOOP_HOME, or name it with --launcher-args='-jar FILE'",
        exit_code=1,
    )


def _jar_in(directory: Path) -> str | None:
    found = [
        str(path)
        for path in sorted(directory.glob(f"{_JAR}*.jar"))
        if not path.stem.endswith(("-sources", "-tests", "-javadoc"))
    ]
    return found[-1] if found else None


def _class_path(program: str, environ: Mapping[str, str]) -> Iterator[Path]:
    """The directories with jars that ``yarn classpath`` names; none if it does not say."""
    try:
        found = subprocess.run(
            [program, "classpath"],
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_CLASSPATH_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return
    for entry in found.stdout.strip().split(os.pathsep):
        if entry.endswith("*"):
            yield Path(entry).parent


def submit_script(argv: Sequence[str], name: str) -> str:
    """Submits the script that is its argument, waits for the end, and leaves nothing in HDFS."""
    return _SUBMIT.format(name=shlex.quote(name), command=shlex.join(argv))
