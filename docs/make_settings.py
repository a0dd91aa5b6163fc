"""Writes docs/settings.md from ``pslite.config.Config``: ``python docs/make_settings.py``.

The tables have one row for each field of ``Config``. Run this after changing ``Config``; a test
fails if the page is out of date (``tests/unit/test_docs_examples.py``).
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

A setting comes from an argument of `Config.from_env`, or else from an environment variable, or else
from its default. A process reads the variables once, when it joins its job; later changes have no
effect. Switches take `1`, `true`, `yes`, `on` or `0`, `false`, `no`, `off`; an empty variable
counts as not set. `DMLC_*` names, and the `PS_*` names that ps-lite has, mean the same as in
ps-lite. When a node starts, it warns of each `PS_*` name that is not on this page and suggests the
most similar one. It warns of a `DMLC_*` or `KVSTORE_*` name only if that is almost equal to one on
this page.

The launcher sets the names with a star; `--env` cannot set them. (An exported `DMLC_PS_ROOT_URI` or
`DMLC_PS_ROOT_PORT` tells it where the scheduler should listen.) Every process of a job, on other
hosts too, inherits all other variables: `PS_VERBOSE=1 kvstore-launch -n 2 ...`. To set a variable
only for servers or only for workers, use `--env-server NAME=VALUE` or `--env-worker NAME=VALUE`.
Times may be `inf`, which means 10⁹ seconds; other numbers have limits, which an error names.
"""

LAUNCHER = """\
## Read by the launcher

`kvstore-launch` reads these from its own environment. For every process of a job it sets
`DMLC_JOB_CLUSTER` to the launcher's name (`local`, `ssh`, ...), for scripts that need it, and
`DMLC_NUM_ATTEMPT` to 0, and to 1, 2, ... when it starts the job, or this process, again.

| variable | default | meaning |
| --- | --- | --- |
"""
READ_BY_LAUNCHER = (
    (
        "`KVSTORE_JOB_DIR`",
        "`~/.kvstore/jobs`",
        "directory in which `mpi`, `slurm`, `sge`, `ray` and `yarn` create one for each job and "
        "remove it when the job ends. For `mpi`, `slurm` and `sge` all hosts of the job must share "
        "it; other users must not be able to write to it",
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
        "directory for the job's key and, without `--log-dir`, for the logs of its processes",
    ),
)

WITHOUT = """\
## Names of the original that change nothing

They are accepted; with `PS_VERBOSE=1` a node logs one line for each that is set. `PS_RESEND` is
accepted too: resending is always on.

| variable | why |
| --- | --- |
"""


def page() -> str:
    """Return the whole page."""
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
    """Return a table with one row for each field."""
    rows = ["| variable | argument | default | meaning |", "| --- | --- | --- | --- |"]
    for field in fields:
        name = field.metadata["name"]
        star = " *" if name in RESERVED_NAMES else ""
        default = written(field.default, field.metadata["parse"])
        text = field.metadata["help"].replace("|", "\\|")
        rows.append(f"| `{name}`{star} | `{field.name}` | {default} | {text} |")
    return "\n".join(rows) + "\n"


def written(default: Any, parse: Callable[[str], Any]) -> str:
    """Return the default as a user would write it in the environment, in the variable's unit."""
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
