"""Launch by ``sge``: one array job of Grid Engine, with a task for each process.

``qsub -sync y`` stays as long as the array does, and reports each task that ends. A task's own
output goes into the job's directory, where the launcher finds it. An array has one request for all
its tasks, so the servers get what the workers ask for. Flags as in dmlc-core's
``tracker/dmlc_tracker/sge.py``; facts from qsub(1), qstat(1), sge_types(5) and parallel_env in
sge_pe(5) of gridengine 8.1. Read first: ``launch/agents/cluster_job.py``.
"""

from __future__ import annotations

import re
import subprocess
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvstore.launch.agents.cluster import Cluster, Habits, find_program, quoted
from kvstore.launch.agents.cluster_job import agent_command, run_carried, servers_then_workers
from kvstore.launch.agents.command import refusal
from kvstore.launch.agents.wire import GREETING
from kvstore.launch.job.lifecycle import Timing
from kvstore.launch.options import LaunchError, LaunchOptions

_NUMBER = re.compile(r"Your job(?:-array)? (\d+)|(\d+)\.\d+-\d+:\d+\Z")  # the latter: -terse
_TASK_OVER = re.compile(r"Job (\d+)\.(\d+) (exited .*?)\.?\Z")
_DELETED = re.compile(r"Unable to run job (\d+)\.\d+")
_REFUSED = ("Unable to run job: ", "Unable to initialize environment because of error: ")
_ERROR_REASON = re.compile(r"^error reason[^:]*:\s*(?:\S+ \S+ \[[^\]]*\]: )?(.*)$", re.MULTILINE)
_OBSTACLE = re.compile(r"^(?:Job \d+ (?:\(.*?\) )?)?(cannot run .*)$", re.MULTILINE)
_JOB_NAME = re.compile(r"(?![0-9.#])[^\s\x00-\x20\x7f-\U0010ffff/:@\\*?'\"\[\]{}|(),%]+\Z")
_SHOWN = 2  # obstacles; there may be one for each host


@dataclass(frozen=True)
class TaskOver:
    """Task ``task`` of the job, from 1, has ended; ``how`` in Grid Engine's words."""

    job: str
    task: int
    how: str


def job_number(line: str) -> str | None:
    """The job's number, of the line by which qsub says that it has it."""
    found = _NUMBER.match(line.strip())
    return None if found is None else found[1] or found[2]


def task_over(line: str) -> TaskOver | None:
    found = _TASK_OVER.match(line.strip())
    return None if found is None else TaskOver(found[1], int(found[2]), found[3])


def deletion(line: str) -> str | None:
    """A sentence of the line by which qsub says that a task will never run."""
    found = _DELETED.match(line.strip())
    if found is None:
        return None
    return f"job {found[1]} was deleted (qdel) before all its tasks had started"


def refusal_of_job(lines: Sequence[str]) -> str | None:
    """Return why the job was not taken, of what qsub said."""
    for index, line in enumerate(lines):
        for start in _REFUSED:
            if line.startswith(start):
                rest = [text.strip() for text in lines[index + 1 :] if text.strip() != "Exiting."]
                return " ".join([line.removeprefix(start).strip(), *rest])
    return None


def task_count(text: str) -> int:
    """Return how many there are in ``3``, ``1,2`` or ``33-40:1``."""
    count = 0
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:-(\d+)(?::(\d+))?)?", part)
        if found is not None:
            first, last, step = int(found[1]), int(found[2] or found[1]), int(found[3] or 1)
            count += len(range(first, last + 1, max(1, step)))
    return count


def states(listed: str, number: str) -> Counter[str]:
    """Return how many tasks of the job are in each state (``qw``, ``r``), of what qstat prints."""
    found: Counter[str] = Counter()
    for line in listed.splitlines():
        words = line.split()
        # job-ID prior name user state date time [queue] slots ja-task-ID
        if len(words) >= 9 and words[0] == number:
            found[words[4]] += task_count(words[-1])
    return found


def error_reason(described: str) -> str | None:
    """Return why tasks are in the state E, of what ``qstat -j`` prints."""
    found = _ERROR_REASON.search(described)
    return None if found is None else found[1].removeprefix("error: ").strip()


def obstacles(verified: str) -> str:
    """Why waiting tasks cannot run now, of what ``qalter -w p`` prints; "" if it does not say."""
    found = list(dict.fromkeys(_OBSTACLE.findall(verified)))
    shown = [
        text.replace("it offers only qc:slots=0.000000", "it has no free slot")
        for text in found[:_SHOWN]
    ]
    if len(found) > _SHOWN:
        shown.append(f"and so on, {len(found)} in all")
    return "; ".join(shown)


def slot_total(queues: str) -> int | None:
    """The slots of all queues together, of what ``qstat -g c`` prints."""
    head, *lines = queues.splitlines() or [""]
    # "CLUSTER QUEUE" is one column of two words.
    titles = head.replace("CLUSTER QUEUE", "QUEUE").split()
    if "TOTAL" not in titles:
        return None
    at = titles.index("TOTAL")
    rows = [words for line in lines if len(words := line.split()) > at and words[at].isdigit()]
    return sum(int(words[at]) for words in rows)


def gives_slots_of_one_host(environment: str) -> bool:
    """Of a parallel environment, as ``qconf -sp`` prints it."""
    return re.search(r"^allocation_rule\s+\$pe_slots\s*$", environment, re.MULTILINE) is not None


def is_job_name(name: str) -> bool:
    return _JOB_NAME.match(name) is not None


_ASKING_S = 5.0  # for all that is asked of the cluster at one time
_LAST_WORDS_S = 2.0  # for a shared file system to show what a task has said
_SHOWN_LINES = 20
_SCRIPT_NAME = "task.sh"
_ENDED = "ended."
_NO_DIRECTORY = 66

# Called with the agent's command. What it says is not the task's output (qsub -o), because Grid
# Engine holds a job for ever, in an error state, when that file cannot be made.
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


def slots_of_a_task(options: LaunchOptions) -> int:
    """As --worker-cores or ``-pe NAME N`` ask for; one without."""
    words = options.places.launcher_args
    for index, word in enumerate(words[:-2]):
        if word == "-pe" and words[index + 2].isdecimal():
            return int(words[index + 2])
    return options.places.worker_cores or 1


def run(
    options: LaunchOptions,
    environ: Mapping[str, str],
    service_command: Sequence[str],
    timing: Timing,
) -> int:
    """As :func:`kvstore.launch.job.run.run_job`."""
    remedy = (
        "start the job on a submit host of Grid Engine, after its settings.sh, or use "
        "--launcher ssh"
    )
    is_here = find_program("qsub", options, environ, remedy) is not None
    name = options.places.jobname
    if name is not None and not is_job_name(name):
        raise LaunchError(
            f"--jobname '{name}' is not a name for Grid Engine: it may not begin with a "
            "digit, '.' or "
            "'#', and may not hold spaces or any of / : @ \\ * ? ' \" [ ] { } | ( ) , %",
            exit_code=2,
        )
    job = ArrayJob(options, environ, can_ask=is_here)
    cluster = Cluster(
        members=job.members,
        command=job.command,
        environment=environ,
        rank_names=("SGE_TASK_ID",),
        first_rank=1,
        worker_cores=slots_of_a_task(options),
        files={_SCRIPT_NAME: _SCRIPT},
        explain=job.explain,
        fatal=job.fatal,
        state=job.state,
        trouble=job.trouble,
        cancel=job.cancel,
        habits=Habits(is_submitting=job.is_submitting, has_terminal=True),
    )
    return run_carried(options, environ, service_command, timing, cluster)


class ArrayJob:
    """What the launcher knows of the job until all its tasks are there."""

    def __init__(
        self, options: LaunchOptions, environ: Mapping[str, str], *, can_ask: bool = True
    ) -> None:
        self.members = servers_then_workers(options)
        self._options = options
        self._environ = dict(environ)
        self._slots = _slots(options, self._environ, can_ask=can_ask)
        self._directory: Path | None = None
        self._number: str | None = None
        self._error: str | None = None

    def command(self, directory: Path) -> list[str]:
        self._directory = directory
        places = self._options.places
        return [
            *("qsub", "-sync", "y", "-t", f"1-{len(self.members)}", "-w", "w", "-r", "n"),
            *("-N", places.jobname or "kvstore", "-S", "/bin/sh", "-wd", "/"),
            *("-j", "y", "-o", "/dev/null"),
            *(() if places.queue is None else ("-q", places.queue)),
            *self._slots,
            *(("-l", f"gpu={places.worker_gpus}") if places.worker_gpus else ()),
            *places.launcher_args,
            str(directory / _SCRIPT_NAME),
            *agent_command(self._options, directory),
        ]

    def cancel(self, line: str) -> list[str] | None:
        """The command that deletes the job, once ``line`` of qsub's names it."""
        self._number = job_number(line)
        return None if self._number is None else ["qdel", self._number]

    def is_submitting(self) -> bool:
        """Return whether there may be a job of which no number is known yet."""
        return self._number is None

    def fatal(self, line: str) -> str | None:
        over = task_over(line)
        if over is None or not 1 <= over.task <= len(self.members):
            return deletion(line)
        until_s = time.monotonic() + _LAST_WORDS_S
        while (why := self._last_words(over.task)) is None and time.monotonic() < until_s:
            time.sleep(0.1)
        if why is not None:
            return why
        if over.how.endswith(f"code {_NO_DIRECTORY}"):
            return (
                f"the host of task {over.task} does not see {self._directory}: set "
                "KVSTORE_JOB_DIR to a directory that all hosts of the job share"
            )
        return f"{self._name(over.task)} {over.how} before it had reached the launcher"

    def trouble(self) -> str | None:
        """Whether a task has ended that would have become an agent, or the job is in error."""
        assert self._directory is not None
        try:
            names = [path.name for path in self._directory.iterdir()]
        except OSError:  # a file system that is away for the moment
            return self._error
        ended = sorted(name.removeprefix(_ENDED) for name in names if name.startswith(_ENDED))
        found = (self._last_words(int(task)) for task in ended if task.isdigit())
        return next((why for why in found if why is not None), self._error)

    def state(self) -> str:
        """Return what Grid Engine has to say of tasks that are not there."""
        number = self._number
        if number is None:
            return "qsub has not said yet which number the job has"
        until_s = time.monotonic() + _ASKING_S
        found = states(self._ask(until_s, "qstat"), number)
        if any("E" in state for state in found):
            self._error = self._error_state(until_s)
        shown = ", ".join(f"{count} {state}" for state, count in sorted(found.items()))
        parts = [f"tasks of job {number} by state: {shown}" if shown else f"job {number}"]
        if any("qw" in state for state in found):
            parts.append(obstacles(self._ask(until_s, "qalter", "-w", "p", number)))
            parts.append(self._shortage(until_s))
        return "; ".join(part for part in parts if part)

    def explain(self, lines: Sequence[str], code: int) -> str:
        """``qsub`` has ended before all agents had come."""
        why = refusal_of_job(lines)
        if why is not None:
            hint = ""
            if self._options.places.worker_gpus and '"gpu"' in why:
                hint = ": --worker-gpus asks for it; use --launcher-args='-l NAME=COUNT' instead"
            return f"Grid Engine does not take the job: {why}{hint}"
        how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        said = quoted(lines)
        return f"qsub ended ({how}) before all processes had started" + (
            f"; it said:{said}" if said else ""
        )

    def _last_words(self, task: int) -> str | None:
        """A sentence of what task ``task`` has left behind, None as long as there is nothing."""
        assert self._directory is not None
        try:
            said = (self._directory / f"{_ENDED}{task}").read_bytes()
        except OSError:
            return None
        lines = said.splitlines()
        for line in lines:
            if GREETING in line:
                return refusal(line)
        texts = [line.decode(errors="replace").strip() for line in lines[-_SHOWN_LINES:]]
        shown = "".join(f"\n  {text}" for text in texts)
        if texts and texts[-1].startswith(("(exit code 126 ", "(exit code 127 ")):
            python = agent_command(self._options, self._directory)[0]
            host = texts[-1].rpartition(" on ")[2].rstrip(")")
            why = texts[0].rpartition(": ")[2]  # of the shell's words
            return f"{host}: '{python}' cannot be run there ({why}); --python names another"
        return f"{self._name(task)} ended before it had reached the launcher; it said:{shown}"

    def _name(self, task: int) -> str:
        role, rank = self.members[task - 1]
        return f"{role} {rank} (task {task} of job {self._number})"

    def _error_state(self, until_s: float) -> str:
        number = str(self._number)
        reason = error_reason(self._ask(until_s, "qstat", "-j", number))
        return f"Grid Engine cannot run job {number}, which is in an error state (E): " + (
            reason or f"qstat -j {number} did not say why"
        )

    def _shortage(self, until_s: float) -> str:
        """Whether the tasks can never be there all at the same time, as the cluster is now."""
        queue = self._options.places.queue
        chosen = () if queue is None else ("-q", queue)
        total = slot_total(self._ask(until_s, "qstat", "-g", "c", *chosen))
        each = int(self._slots[-1]) if self._slots else 1
        needed = each * len(self.members)
        if total is None or needed <= total:
            return ""
        where = "the cluster" if queue is None else f"queue {queue}"
        return f"{where} has {total} slots in all, and {needed} are needed at the same time"

    def _ask(self, until_s: float, *words: str) -> str:
        return _answer(words, self._environ, until_s)


def _slots(options: LaunchOptions, environ: Mapping[str, str], *, can_ask: bool) -> list[str]:
    """The words that give each task its processors. Raises :class:`LaunchError`."""
    cores, given = options.places.worker_cores, options.places.launcher_args
    if cores is None or cores == 1 or "-pe" in given:
        return []
    if not can_ask:
        return ["-pe", "NAME", str(cores)]
    until_s = time.monotonic() + _ASKING_S
    found = [
        name
        for name in _answer(["qconf", "-spl"], environ, until_s).split()
        if gives_slots_of_one_host(_answer(["qconf", "-sp", name], environ, until_s))
    ]
    if not found:
        raise LaunchError(
            f"--worker-cores {cores} needs a parallel environment that gives a task slots of one "
            "host (allocation_rule $pe_slots), and this cluster has none: ask who runs it for "
            "one, or leave --worker-cores out",
            exit_code=1,
        )
    return ["-pe", "smp" if "smp" in found else found[0], str(cores)]


def _answer(words: Sequence[str], environ: Mapping[str, str], until_s: float) -> str:
    """Return what a command of Grid Engine's prints; "" when it does not do well until then."""
    left_s = until_s - time.monotonic()
    if left_s <= 0:
        return ""
    try:
        done = subprocess.run(
            list(words),
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=left_s,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout + done.stderr
