"""What Slurm's queue holds of one launcher's job, which is known by its working directory.

That directory is the job's own (``launch/agents/ticket.py``) and has a name that no other job uses;
so a job is found, and cancelled, also when ``srun`` was killed before it said the job's number.
Standard library only, and no import of this project: the guardian runs this file as a program.
Facts: squeue(1), scancel(1). Read ``slurm.py`` first.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass

_ANSWER_S = 5.0
_FORMAT = "%A|%T|%r|%N|%Z"
# A request that was on its way when srun was killed may become a job a little later.
_PAUSES_S = (0.0, 1.0, 2.0, 4.0)
# Reasons for which a job can wait for ever (squeue(1), "JOB REASON CODES").
_NEVER = frozenset({"BadConstraints", "PartitionConfig"})


@dataclass(frozen=True)
class Queued:
    """One job, or one component of a heterogeneous one, in Slurm's own words."""

    job_id: str
    state: str
    reason: str
    nodes: str


def parse(text: str, directory: str) -> list[Queued]:
    """The jobs of ``directory`` among what squeue has printed."""
    rows = [line.split("|", 4) for line in text.splitlines()]
    return [Queued(*row[:4]) for row in rows if len(row) == 5 and row[4] == directory]


def look(directory: str, environ: Mapping[str, str]) -> list[Queued]:
    """The jobs of ``directory`` now. Raises OSError or subprocess.SubprocessError."""
    done = subprocess.run(
        ["squeue", "--noheader", f"--user={os.getuid()}", f"--format={_FORMAT}"],
        env=_without_wishes(environ),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=_ANSWER_S,
        check=True,
    )
    return parse(done.stdout, directory)


def _without_wishes(environ: Mapping[str, str]) -> dict[str, str]:
    """Drop the user's settings of squeue's and scancel's output and questions."""
    wishes = ("SQUEUE_", "SCANCEL_")
    return {name: value for name, value in environ.items() if not name.startswith(wishes)}


def describe(jobs: list[Queued]) -> str:
    """Return what a job waits for, in a few words; "" for no job."""
    words = []
    for job in jobs:
        why = f" ({job.reason})" if job.reason not in ("", "None") else ""
        if job.reason in _NEVER:
            why = f" ({job.reason}: no nodes of its partition can give what was asked for)"
        where = f" on {job.nodes}" if job.nodes else ""
        words.append(f"Slurm's job {job.job_id} is {job.state}{why}{where}")
    return ", ".join(words)


def cancel(directory: str, environ: Mapping[str, str]) -> bool:
    """Take the jobs of ``directory`` out of the queue, or end them; whether Slurm answered."""
    were_seen = has_answered = False
    for pause_s in _PAUSES_S:
        time.sleep(pause_s)
        try:
            jobs = look(directory, environ)
            has_answered = True
            if were_seen and not jobs:
                break
            were_seen = were_seen or bool(jobs)
            if found := [job.job_id for job in jobs if job.state != "COMPLETING"]:
                subprocess.run(
                    ["scancel", *found],
                    env=_without_wishes(environ),
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    timeout=_ANSWER_S,
                )
        except (OSError, subprocess.SubprocessError):
            continue  # the controller may answer the next time
    return has_answered


if __name__ == "__main__":
    sys.exit(0 if cancel(sys.argv[1], os.environ) else 1)
