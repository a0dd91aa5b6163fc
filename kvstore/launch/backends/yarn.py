"""The launcher ``yarn``: Hadoop's distributed shell runs an agent per container.

The application master is the one that ships with Hadoop. All its containers, for servers and
workers, have the same size, and they share no directory. So each container runs a script that
contains everything that an agent needs: the programs, and the ticket with the job's key. The script
writes them into the container's own directory, which only its user can read and which YARN removes
with the container.

The client's log is read line by line: a time, a level, a class and a message of one or more lines.
The log contains the application's id once it is submitted, and a report each second. Options and
messages are those of Hadoop's ``Client.java`` (hadoop-yarn-applications-distributedshell) and
``YarnClientImpl.java``, 2.7 to 3.3. Read ``launch/agents/cluster.py`` first.
"""

from __future__ import annotations

import os
import re
import secrets
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path

from kvstore.launch.agents import join_answer
from kvstore.launch.agents.agent import agent_program
from kvstore.launch.agents.cluster import Cluster, are_here, ask
from kvstore.launch.agents.cluster_job import run_on
from kvstore.launch.agents.join import PROGRAM_NAME, TICKET_NAME, AgentTicket
from kvstore.launch.environment import checkout_root
from kvstore.launch.options import LaunchError, LaunchOptions, Places

_RANK_NAME = "YARN_SHELL_ID"  # counted from 1; Hadoop 2.7 does not set it
_JOIN_ANSWER_NAME = "join_answer.py"
_END = "KVSTORE-END"

_SCRIPT = """\
# An agent of kvstore-launch, run by bash in a container. It holds the job's key.
umask 077
files=$PWD/kvstore-agent
mkdir -p "$files" || exit
{files}
# What counts the containers in a Hadoop that does not set it.
export {rank}="${{{rank}:-${{CONTAINER_ID##*_}}}}"
python={python}
cd {directory} 2>/dev/null || true
if command -v "$python" >/dev/null; then exec "$python" "$files/{program}"; fi
for other in python3 python /usr/libexec/platform-python; do
    if command -v "$other" >/dev/null; then
        exec "$other" "$files/{join_answer}" "there is no Python at $python; --python names another"
    fi
done
echo "there is no Python at $python, nor any other" >&2
exit 127
"""

_LOGGED = re.compile(
    r"\d{2,4}[-/]\d\d[-/]\d\d \d\d:\d\d:\d\d(?:[,.]\d+)? (?:\[[^\]]*\] )?([A-Z]+) +\S+: (.*)"
)
_QUIET = ("INFO", "WARN", "DEBUG")
_FRAME = re.compile(r"\s*(?:at [\w.$/<>]+\(|\.\.\. \d+ more)")  # of a Java stack
_GRUMBLE = re.compile(r"(?:SLF4J|WARNING|log4j|Picked up \w+): |OpenJDK ")  # of other programs
_SUBMITTED = re.compile(r"Submitted application (application_\d+_\d+)")
_RETRYING = re.compile(r"Retrying connect to server: (\S+)\. Already")
_BEGINS, _ENDS = "appDiagnostics=", ", appMasterHost="  # around text that may have several lines
_STATE = re.compile(r"yarnAppState=(\w+)")
_DATE = re.compile(r"\A\[[^\]]*\d{4}\]\s*")
_DETAILS = re.compile(r"\s*Details :.*", re.S)
_LONGEST = 400

_OWN_OPTIONS = ("appname", "num_containers", "shell_script", "shell_command")
_CLIENT = "org.apache.hadoop.yarn.applications.distributedshell.Client"
_JAR = "hadoop-yarn-applications-distributedshell"
_CLASSPATH_S = 20.0
_SUBMIT_NAME = "submit.sh"
_SCRIPT_NAME = "container.sh"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\Z")

# The client kills an application after this time, and accepts no larger number (24 days).
_LONGEST_MS = 2**31 - 1
# As in dmlc-core. Hadoop's default of 10 MB means the cluster's minimum, which may be less than a
# Python needs.
_MEMORY_MB = 1024
_CORES = 1

# The launcher needs the client's log at this level, even if the user has set another.
_LOGGERS = {"HADOOP_ROOT_LOGGER": "INFO,console", "YARN_ROOT_LOGGER": "INFO,console"}

# Submits the script that is its argument, waits for the end, and leaves nothing in HDFS. Hadoop
# makes the client's uploads readable by all users, so they go into a private directory.
_SUBMIT = """\
trap : TERM
hadoop fs -D fs.permissions.umask-mode=077 -mkdir -p {name} &&
{command} -shell_script "$1"
code=$?
hadoop fs -rm -r -f -skipTrash {name} >/dev/null 2>&1
exit $code
"""
_CANCEL = 'yarn application -kill "$1"; c=$?; hadoop fs -rm -r -f -skipTrash "$2"; exit $c'


class YarnApplication(Cluster):
    """A YARN application, whose id, state and diagnostics the client's log contains.

    Its name is also the name of the directory in HDFS that no other user can read. Raises
    :class:`LaunchError` for an invalid name or option.
    """

    program = "yarn"
    rank_names = (_RANK_NAME,)
    first_rank = 1
    only_wishes = True
    ending_s = 15.0  # application master, YARN and client poll each other each second

    def __init__(self, options: LaunchOptions, environ: Mapping[str, str]) -> None:
        super().__init__(options, {**environ, **_LOGGERS})
        _refuse_own_options(self.places.launcher_args)
        self.worker_cores = container_size(self.places)[1]
        self.name = application_name(self.places.jobname)
        self.jar = ""
        self.application = ""
        self.app_state = ""
        self.diagnostics = ""
        self._unreachable = ""
        self._is_submitting = False
        self._message = ""  # the last message; diagnostics may have several lines

    def submit(self, directory: Path) -> list[str]:
        return ["sh", str(directory / _SUBMIT_NAME), str(directory / _SCRIPT_NAME)]

    def texts(self, ticket: AgentTicket) -> dict[str, str]:
        python = self.options.python or sys.executable
        client = client_argv(self.places, self.jar, self.name, len(self.members))
        return {
            _SUBMIT_NAME: submit_script(client, self.name),
            _SCRIPT_NAME: container_script(ticket, python, os.getcwd(), checkout_root()),
        }

    def is_news(self, line: str) -> bool:
        """Evaluate a line of the client's log; return whether to show it to the user."""
        logged = _LOGGED.match(line)
        if logged is not None:
            self._message = logged[2]
        elif _BEGINS in self._message and _ENDS not in self._message:
            self._message += f"\n{line}"
        else:
            return not _FRAME.match(line) and not _GRUMBLE.match(line)
        self._take_in(self._message)
        return logged is not None and logged[1] not in _QUIET

    def is_submitting(self) -> bool:
        return self._is_submitting and not self.application

    def cancel(self, line: str) -> list[str] | None:
        found = _SUBMITTED.search(line)
        return None if found is None else ["sh", "-c", _CANCEL, "cancel", found[1], self.name]

    def poll(self) -> str:
        if self._unreachable:
            return f"yarn cannot connect to {self._unreachable}"
        if not self.app_state:
            return ""
        found = f"{self.application} is {self.app_state}"
        if self.app_state == "RUNNING":
            return f"{found}; {self._logs()} shows what its containers say"
        return f"{found}: {self.diagnostics}" if self.diagnostics else found

    def refusal(self, lines: Sequence[str]) -> str | None:
        if self.app_state not in ("FINISHED", "FAILED", "KILLED"):
            return None
        why = f": {self.diagnostics}" if self.diagnostics else ""
        found = f"{self.application} is {self.app_state} before all processes had started{why}"
        return f"{found} ({self._logs()} may say more)"

    def _logs(self) -> str:
        return f"'yarn logs -applicationId {self.application}'"

    def _take_in(self, message: str) -> None:
        retrying = _RETRYING.search(message)
        self._unreachable = "" if retrying is None else retrying[1]
        if message.startswith("Submitting application to ASM"):
            self._is_submitting = True
        if submitted := _SUBMITTED.search(message):
            self.application = submitted[1]
        if state := _STATE.search(message):
            self.app_state = state[1]
        diagnostics, ends, _ = message.partition(_BEGINS)[2].partition(_ENDS)
        if ends:
            self.diagnostics = short(diagnostics)


def short(diagnostics: str) -> str:
    """Return diagnostics on one line, without date, stacks and details; "" for none."""
    lines = [line for line in _DATE.sub("", diagnostics).splitlines() if not _FRAME.match(line)]
    text = _DETAILS.sub("", " ".join(" ".join(lines).split()))
    if text in ("null", "N/A"):
        return ""
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."


def container_script(ticket: AgentTicket, python: str, directory: str, root: str | None) -> str:
    """Return the script that makes a container an agent with ``python``.

    Processes run in ``directory`` if the container's host has it, else in the container's own
    directory. ``root`` is that of :func:`agent_program`.
    """
    programs = {
        TICKET_NAME: ticket.to_text(),
        PROGRAM_NAME: agent_program(".", root, "agents.join", _JOIN_ANSWER_NAME),
        _JOIN_ANSWER_NAME: Path(join_answer.__file__).read_text(encoding="utf-8"),
    }
    return _SCRIPT.format(
        files="".join(
            f"cat >\"$files/{name}\" <<'{_END}'\n{text.rstrip()}\n{_END}\n"
            for name, text in programs.items()
        ),
        rank=_RANK_NAME,
        python=shlex.quote(python),
        directory=shlex.quote(directory),
        program=PROGRAM_NAME,
        join_answer=_JOIN_ANSWER_NAME,
    )


def submit_script(argv: Sequence[str], name: str) -> str:
    return _SUBMIT.format(name=shlex.quote(name), command=shlex.join(argv))


def _refuse_own_options(launcher_args: Sequence[str]) -> None:
    for word in launcher_args:
        if word.startswith("-") and word.lstrip("-").split("=")[0] in _OWN_OPTIONS:
            raise LaunchError(
                f"{word} in --launcher-args is not allowed, since the launcher sets it; use "
                "--jobname for the name, and -n and -s for the number of containers"
            )


def application_name(jobname: str | None) -> str:
    """Return a unique name for YARN's lists and for a directory in HDFS."""
    if jobname is not None and not _NAME.match(jobname):
        raise LaunchError(
            "--jobname must begin with a letter or digit and have only letters, digits, '.', '_' "
            "and '-', since it also names a "
            f"directory in HDFS, got '{jobname}'"
        )
    return f"{jobname or 'kvstore'}-{secrets.token_hex(4)}"


def container_size(places: Places) -> tuple[int, int]:
    """Return each container's MiB and cores: the largest that any role needs."""
    memory = max(places.worker_memory_mb or 0, places.server_memory_mb or 0)
    cores = max(places.worker_cores or 0, places.server_cores or 0)
    return memory or _MEMORY_MB, cores or _CORES


def client_argv(places: Places, jar: str, name: str, count: int) -> list[str]:
    """Return the client's command without the script; its first ``-jar`` wins."""
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
    """Return the jar that the user names with ``-jar``, or None."""
    return next(
        (jar for option, jar in pairwise(launcher_args) if option in ("-jar", "--jar")), None
    )


def find_jar(environ: Mapping[str, str]) -> str:
    """Return the jar of Hadoop's distributed shell. Raises :class:`LaunchError`."""
    homes = [environ[name] for name in ("HADOOP_YARN_HOME", "HADOOP_HOME") if environ.get(name)]
    program = shutil.which("yarn", path=environ.get("PATH"))
    assert program is not None
    homes.append(str(Path(program).resolve().parents[1]))
    for directory in _directories_of_jars(homes, program, environ):
        found = [
            str(path)
            for path in sorted(directory.glob(f"{_JAR}*.jar"))
            if not path.stem.endswith(("-sources", "-tests", "-javadoc"))
        ]
        if found:
            return found[-1]
    raise LaunchError(
        f"there is no {_JAR}-*.jar in {', '.join(homes)}, nor on the path of 'yarn classpath': "
        "set HADOOP_HOME, or name it with --launcher-args='-jar FILE'",
        exit_code=1,
    )


def _directories_of_jars(
    homes: Sequence[str], program: str, environ: Mapping[str, str]
) -> Iterator[Path]:
    """Return the directories below ``homes``, then those of ``yarn classpath``."""
    for home in homes:
        for below in ("share/hadoop/yarn", ".", "lib/hadoop-yarn"):
            yield Path(home) / below
    for entry in ask([program, "classpath"], environ, _CLASSPATH_S)[0].strip().split(os.pathsep):
        if entry.endswith("*"):
            yield Path(entry).parent


def cluster_of(options: LaunchOptions, environ: Mapping[str, str]) -> YarnApplication:
    """Return the application of this job. Raises :class:`LaunchError`."""
    application = YarnApplication(options, environ)
    remedy = "start this on a machine with Hadoop's client, with its bin directory on the PATH"
    is_here = are_here(["yarn", "hadoop"], options, environ, remedy)
    jar = own_jar(options.places.launcher_args)
    application.jar = jar or (find_jar(environ) if is_here else f"{_JAR}.jar")
    return application


run = partial(run_on, cluster_of)
