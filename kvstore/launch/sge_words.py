"""What Grid Engine's commands print, read.

Pure: text in, facts and sentences out. Facts: the manual pages qsub(1), qstat(1), sge_types(5) and
parallel_env in sge_pe(5) of gridengine 8.1, and what its commands print. Used by ``sge.py``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

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
    """Why the job was not taken, of what qsub said."""
    for index, line in enumerate(lines):
        for start in _REFUSED:
            if line.startswith(start):
                rest = [text.strip() for text in lines[index + 1 :] if text.strip() != "Exiting."]
                return " ".join([line.removeprefix(start).strip(), *rest])
    return None


def task_count(text: str) -> int:
    """How many there are in ``3``, ``1,2`` or ``33-40:1``."""
    count = 0
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:-(\d+)(?::(\d+))?)?", part)
        if found is not None:
            first, last, step = int(found[1]), int(found[2] or found[1]), int(found[3] or 1)
            count += len(range(first, last + 1, max(1, step)))
    return count


def states(listed: str, number: str) -> Counter[str]:
    """How many tasks of the job are in each state (``qw``, ``r``), of what qstat prints."""
    found: Counter[str] = Counter()
    for line in listed.splitlines():
        words = line.split()
        # job-ID prior name user state date time [queue] slots ja-task-ID
        if len(words) >= 9 and words[0] == number:
            found[words[4]] += task_count(words[-1])
    return found


def error_reason(described: str) -> str | None:
    """Why tasks are in the state E, of what ``qstat -j`` prints."""
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
