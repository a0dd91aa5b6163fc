"""The launcher ``sge``: one array job of Grid Engine, a task for each process.

``qsub -sync y`` runs as long as the array and reports each task that ends. A task writes its own
output into the job's directory, where the launcher finds it. All tasks of an array have the same
request, so the servers get the same resources as the workers. Flags as in dmlc-core's
``tracker/dmlc_tracker/sge.py``; facts from qsub(1), qstat(1), sge_types(5) and parallel_env in
sge_pe(5) of gridengine 8.1. Read ``launch/agents/cluster.py`` first.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from kvstore.launch.agents.cluster import Cluster, are_here, ask
from kvstore.launch.agents.cluster_job import refusal as refusal_of_agent
from kvstore.launch.agents.cluster_job import run_on
from kvstore.launch.agents.join import AgentTicket
from kvstore.launch.agents.wire import GREETING
from kvstore.launch.options import LaunchError, LaunchOptions

_NUMBER = re.compile(r"Your job(?:-array)? (\d+)|(\d+)\.\d+-\d+:\d+\Z")  # the second form: -terse
_TASK_OVER = re.compile(r"Job \d+\.(\d+) (exited .*?)\.?\Z")
_DELETED = re.compile(r"Unable to run job (\d+)\.\d+")
_REFUSED = re.compile(r"Unable to (?:run job|initialize environment because of error): (.*)")
_ERROR_REASON = re.compile(
    r"^error reason[^:]*:\s*(?:\S+ \S+ \[[^\]]*\]: )?(?:error: )?(.*)$", re.MULTILINE
)
_OBSTACLE = re.compile(r"^(?:Job \d+ (?:\(.*?\) )?)?(cannot run .*)$", re.MULTILINE)
_SLOTS_OF_ONE_HOST = re.compile(r"^allocation_rule\s+\$pe_slots\s*$", re.MULTILINE)
_JOB_NAME = re.compile(r"(?![0-9.#])[^\s\x00-\x20\x7f-\U0010ffff/:@\\*?'\"\[\]{}|(),%]+\Z")
_SHOWN = 2  # the number of obstacles shown; each host may have one
_ASKING_S = 5.0  # for all questions to the cluster in one poll
_LAST_WORDS_S = 2.0  # for a shared file system to show a task's output
_SHOWN_LINES = 20
_SCRIPT_NAME = "task.sh"
_ENDED = "ended."
_NO_DIRECTORY = 66

# Each task calls this script with the agent's command. The output goes to a file of its own instead
# of the task's (qsub -o): if that file cannot be created, Grid Engine holds the job for ever, in an
# error state.
_SCRIPT = f"""\
#!/bin/sh
directory=${{2%/*}}
[ -d "$directory" ] || exit {_NO_DIRECTORY}
said=$directory/said.$SGE_TASK_ID
"$@" >"$said" 2>&1
code=$?
[ -d "$directory" ] || exit $code
[ $code -eq 0 ] || echo "(exit code $code on $(uname -n))" >>"$said"
mv "$said" "$directory/{_ENDED}$SGE_TASK_ID"
exit $code
"""


class ArrayJob(Cluster):
    """An array job of Grid Engine; ``can_ask`` is whether its commands exist here.

    Raises :class:`LaunchError` for an invalid name, and for cores that the cluster cannot provide.
    """

    program = "qsub"
    rank_names = ("SGE_TASK_ID",)
    first_rank = 1
    has_terminal = True

    def __init__(
        self, options: LaunchOptions, environ: Mapping[str, str], *, can_ask: bool = True
    ) -> None:
        super().__init__(options, environ)
        name = self.places.jobname
        if name is not None and not _JOB_NAME.match(name):
            raise LaunchError(
                "--jobname must be printable ASCII for Grid Engine, not begin with a digit, '.' or "
                "'#', and not have spaces or any of "
                f"/ : @ \\ * ? ' \" [ ] {{ }} | ( ) , %, got '{name}'"
            )
        self.worker_cores = slots_of_a_task(options)
        self._slots = self._wanted_slots(can_ask)
        self._directory = Path()
        self._number: str | None = None
        self._error: str | None = None

    def submit(self, directory: Path) -> list[str]:
        self._directory = directory
        places = self.places
        return [
            *("qsub", "-sync", "y", "-t", f"1-{len(self.members)}", "-w", "w", "-r", "n"),
            *("-N", places.jobname or "kvstore", "-S", "/bin/sh", "-wd", "/"),
            *("-j", "y", "-o", "/dev/null"),
            *(() if places.queue is None else ("-q", places.queue)),
            *self._slots,
            *(("-l", f"gpu={places.worker_gpus}") if places.worker_gpus else ()),
            *places.launcher_args,
            str(directory / _SCRIPT_NAME),
            *self.agent(directory),
        ]

    def texts(self, ticket: AgentTicket) -> dict[str, str]:
        return {_SCRIPT_NAME: _SCRIPT}

    def cancel(self, line: str) -> list[str] | None:
        found = _NUMBER.match(line.strip())
        if found is None:
            return None
        self._number = found[1] or found[2]
        return ["qdel", self._number]

    def is_submitting(self) -> bool:
        return self._number is None

    def fatal(self, line: str) -> str | None:
        if deleted := _DELETED.match(line.strip()):
            return f"job {deleted[1]} was deleted (qdel) before all its tasks had started"
        over = _TASK_OVER.match(line.strip())
        if over is None or not 1 <= int(over[1]) <= len(self.members):
            return None
        task, how = int(over[1]), over[2]
        until_s = time.monotonic() + _LAST_WORDS_S
        while (why := self._last_words(task)) is None and time.monotonic() < until_s:
            time.sleep(0.1)
        if why is not None:
            return why
        if how.endswith(f"code {_NO_DIRECTORY}"):
            return (
                f"the host of task {task} does not see {self._directory}: set "
                "KVSTORE_JOB_DIR to a directory that all hosts of the job share"
            )
        return f"{self._name(task)} {how} before it had reached the launcher"

    def trouble(self) -> str | None:
        """Return why a task ended before its agent connected, or the job's error."""
        try:
            names = [path.name for path in self._directory.iterdir()]
        except OSError:  # the file system is not available at the moment
            return self._error
        ended = sorted(name.removeprefix(_ENDED) for name in names if name.startswith(_ENDED))
        found = (self._last_words(int(task)) for task in ended if task.isdigit())
        return next((why for why in found if why is not None), self._error)

    def poll(self) -> str:
        number = self._number
        if number is None:
            return "qsub has not printed the number of the job yet"
        until_s = time.monotonic() + _ASKING_S
        found = states(self._ask(until_s, "qstat", "-g", "d"), number)
        if any("E" in state for state in found):
            reason = _ERROR_REASON.search(self._ask(until_s, "qstat", "-j", number))
            why = reason[1].strip() if reason else f"qstat -j {number} did not say why"
            self._error = (
                f"Grid Engine cannot run job {number}, which is in an error state (E): {why}"
            )
        shown = ", ".join(f"{count} {state}" for state, count in sorted(found.items()))
        parts = [f"tasks of job {number} by state: {shown}" if shown else f"job {number}"]
        if any("qw" in state for state in found):
            parts.append(obstacles(self._ask(until_s, "qalter", "-w", "p", number)))
            parts.append(self._shortage(until_s))
        return "; ".join(part for part in parts if part)

    def refusal(self, lines: Sequence[str]) -> str | None:
        for index, line in enumerate(lines):
            if found := _REFUSED.match(line):
                rest = [text.strip() for text in lines[index + 1 :] if text.strip() != "Exiting."]
                why = " ".join([found[1].strip(), *rest])
                hint = ""
                if self.places.worker_gpus and '"gpu"' in why:
                    hint = (
                        ": --worker-gpus asks for it; use --launcher-args='-l NAME=COUNT' instead"
                    )
                return f"Grid Engine does not take the job: {why}{hint}"
        return None

    def _last_words(self, task: int) -> str | None:
        """Return a sentence from the output of task ``task``, or None if it has none yet."""
        try:
            said = (self._directory / f"{_ENDED}{task}").read_bytes()
        except OSError:
            return None
        lines = said.splitlines()
        for line in lines:
            if GREETING in line:
                return refusal_of_agent(line)
        texts = [line.decode(errors="replace").strip() for line in lines[-_SHOWN_LINES:]]
        shown = "".join(f"\n  {text}" for text in texts)
        if texts and texts[-1].startswith(("(exit code 126 ", "(exit code 127 ")):
            python = self.agent(self._directory)[0]
            host = texts[-1].rpartition(" on ")[2].rstrip(")")
            why = texts[0].rpartition(": ")[2]  # the last part of the shell's message
            return f"{host}: '{python}' cannot be run there ({why}); --python names another"
        return f"{self._name(task)} ended before it had reached the launcher; it said:{shown}"

    def _name(self, task: int) -> str:
        role, rank = self.members[task - 1]
        return f"{role} {rank} (task {task} of job {self._number})"

    def _shortage(self, until_s: float) -> str:
        """Return why the cluster can never run all tasks at the same time, or ""."""
        queue = self.places.queue
        chosen = () if queue is None else ("-q", queue)
        total = slot_total(self._ask(until_s, "qstat", "-g", "c", *chosen))
        needed = (self.worker_cores or 1) * len(self.members)
        if total is None or needed <= total:
            return ""
        where = "the cluster" if queue is None else f"queue {queue}"
        return f"{where} has {total} slots in all, and {needed} are needed at the same time"

    def _wanted_slots(self, can_ask: bool) -> list[str]:
        """Return the options for each task's cores. Raises :class:`LaunchError`."""
        cores = self.places.worker_cores
        if cores is None or cores == 1 or "-pe" in self.places.launcher_args:
            return []
        if not can_ask:
            return ["-pe", "NAME", str(cores)]
        until_s = time.monotonic() + _ASKING_S
        found = [
            name
            for name in self._ask(until_s, "qconf", "-spl").split()
            if _SLOTS_OF_ONE_HOST.search(self._ask(until_s, "qconf", "-sp", name))
        ]
        if not found:
            raise LaunchError(
                f"--worker-cores {cores} needs a parallel environment with allocation_rule "
                "$pe_slots, which this cluster does not have; ask its administrator for one, or "
                "remove --worker-cores",
                exit_code=1,
            )
        return ["-pe", "smp" if "smp" in found else found[0], str(cores)]

    def _ask(self, until_s: float, *words: str) -> str:
        """Return a command's output, or "" if it does not end before ``until_s``."""
        return ask(words, self.environ, max(0.0, until_s - time.monotonic()))[0]


def slots_of_a_task(options: LaunchOptions) -> int:
    """Return the slots that --worker-cores or ``-pe NAME N`` request; 1 by default."""
    words = options.places.launcher_args
    for index, word in enumerate(words[:-2]):
        if word == "-pe" and words[index + 2].isdecimal():
            return int(words[index + 2])
    return options.places.worker_cores or 1


def states(listed: str, number: str) -> Counter[str]:
    """Return the number of tasks in each state, from ``qstat -g d``."""
    # job-ID prior name user state date time [queue] slots ja-task-ID
    rows = (line.split() for line in listed.splitlines())
    return Counter(words[4] for words in rows if len(words) >= 9 and words[0] == number)


def obstacles(verified: str) -> str:
    """Return why tasks wait, from the output of ``qalter -w p``, or ""."""
    found = list(dict.fromkeys(_OBSTACLE.findall(verified)))
    shown = [
        text.replace("it offers only qc:slots=0.000000", "it has no free slot")
        for text in found[:_SHOWN]
    ]
    if len(found) > _SHOWN:
        shown.append(f"and so on, {len(found)} in all")
    return "; ".join(shown)


def slot_total(queues: str) -> int | None:
    """Return the number of slots of all queues, from the output of ``qstat -g c``."""
    head, *lines = queues.splitlines() or [""]
    # "CLUSTER QUEUE" is one column of two words.
    titles = head.replace("CLUSTER QUEUE", "QUEUE").split()
    if "TOTAL" not in titles:
        return None
    at = titles.index("TOTAL")
    rows = [words for line in lines if len(words := line.split()) > at and words[at].isdigit()]
    return sum(int(words[at]) for words in rows)


def cluster_of(options: LaunchOptions, environ: Mapping[str, str]) -> ArrayJob:
    """Return an array job. Raises :class:`LaunchError`."""
    remedy = (
        "start the job on a submit host of Grid Engine, after its settings.sh, or use "
        "--launcher ssh"
    )
    is_here = are_here(["qsub"], options, environ, remedy)
    return ArrayJob(options, environ, can_ask=is_here)


run = partial(run_on, cluster_of)
