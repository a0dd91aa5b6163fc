"""Writes docs/settings.md from ``pslite.config.Config``: ``python docs/make_settings.py``.

The tables of settings have one row for each field, so running this brings
them up to date; a test notices when it was forgotten (``tests/unit/test_docs_examples.py``).
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kvstore.launch.options import RESERVED_NAMES
from pslite.config import WITHOUT_EFFECT, Config

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "settings.md"

INTRODUCTION = """\
# Settings

<!-- Written by docs/make_settings.py from pslite/config.py: change that, not this. -->

A setting is an argument of `Config.from_env`, else an environment variable, else its default.
The variables are read once, when a process joins its job; changing them later has no effect.
What is on or off takes `1`, `true`, `yes`, `on` or `0`, `false`, `no`, `off`; an empty variable is
as good as none. `DMLC_*` names, and those `PS_*` names that ps-lite has, mean what they mean there.
A `PS_*` name that is not on this page is reported when a node starts, with the name that was
probably meant; a `DMLC_*` or `KVSTORE_*` name only when it is all but equal to one on this page.

The launcher decides the names with a star, and `--env` cannot set them. (An exported
`DMLC_PS_ROOT_URI` or `DMLC_PS_ROOT_PORT` tells it where the scheduler is to listen.) All others
are inherited by every process of a job, on other hosts too: `PS_VERBOSE=1 kvstore-launch -n 2 ...`.
Times may be `inf`, which is 10⁹ seconds; other numbers have bounds, which an error names.
To set one for servers or workers only: `--env-server NAME=VALUE`, `--env-worker NAME=VALUE`.
"""

LAUNCHER = """\
## Read by the launcher

`kvstore-launch` reads these where it is called. It sets `DMLC_JOB_CLUSTER` on every process of a
job: its own name (`local`, `ssh`, ...), for scripts that want to know.

| variable | default | meaning |
| --- | --- | --- |
"""
READ_BY_LAUNCHER = (
    (
        "`KVSTORE_JOB_DIR`",
        "`~/.kvstore/jobs`",
        "directory in which `mpi`, `slurm`, `sge`, `ray` and `yarn` make one for each job, which "
        "they remove at its end. For `mpi`, `slurm` and `sge` all hosts of the job must share it; "
        "other users must not be able to write to it",
    ),
    (
        "`RAY_ADDRESS`",
        "none",
        "the cluster for `ray`: `HOST:PORT`, `auto` or `local` ([ray](launchers/ray.md))",
    ),
    (
        "`RAY_TMPDIR`",
        "`TMPDIR`",
        "where `ray start` has left the address of the cluster on this machine",
    ),
    (
        "`HADOOP_YARN_HOME`, `HADOOP_HOME`",
        "where the program `yarn` is",
        "where `yarn` looks for the jar of the distributed shell ([yarn](launchers/yarn.md))",
    ),
    (
        "`TMPDIR`",
        "`/tmp`",
        "where the job's key is, and the logs of its processes unless `--log-dir` names a place",
    ),
)

WITHOUT = """\
## Names of the original that change nothing

They are accepted; `PS_VERBOSE=1` says so once for each that is set. `PS_RESEND` is accepted, too:
what it asks for is always on.

| variable | why |
| --- | --- |
"""


def page() -> str:
    """The whole page."""
    fields = dataclasses.fields(Config)
    job = [field for field in fields if not field.metadata["name"].startswith("PS_")]
    runtime = [field for field in fields if field.metadata["name"].startswith("PS_")]
    rows = "\n".join(f"| `{name}` | {reason} |" for name, reason in WITHOUT_EFFECT.items())
    read = "\n".join(f"| {' | '.join(row)} |" for row in READ_BY_LAUNCHER)
    return (
        f"{INTRODUCTION}\n"
        f"## The job and its addresses\n\n{table(job)}\n"
        f"## The runtime\n\n{table(runtime)}\n"
        f"{LAUNCHER}{read}\n\n"
        f"{WITHOUT}{rows}\n"
    )


def table(fields: Iterable[dataclasses.Field[Any]]) -> str:
    """One row for each field."""
    rows = ["| variable | argument | default | meaning |", "| --- | --- | --- | --- |"]
    for field in fields:
        name = field.metadata["name"]
        star = " *" if name in RESERVED_NAMES else ""
        default = written(field.default, field.metadata["parse"])
        text = field.metadata["help"].replace("|", "\\|")
        rows.append(f"| `{name}`{star} | `{field.name}` | {default} | {text} |")
    return "\n".join(rows) + "\n"


def written(default: Any, parse: Callable[[str], Any]) -> str:
    """The default as one would write it in the environment, in the unit of the variable."""
    if default is None or default == "":
        return "none"
    if isinstance(default, str):
        return f"`{default}`"
    for number in (default, default * 1000):
        text = f"{number:.12g}"
        if parse(text) == default:
            return f"`{text}`"
    raise ValueError(f"no text is read as the default {default!r}")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")
