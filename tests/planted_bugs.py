"""Do the tests find bugs? Plants one at a time in a copy of the project and runs one test.

    python -m tests.planted_bugs            all of them, two at a time
    python -m tests.planted_bugs NAME ...   some of them
    python -m tests.planted_bugs --list

The bugs stand in ``tests/planted``. Each names the test that must turn red. A bug whose test stays
green, or whose place in the code is not found any more, is a failure of this script (exit code 1).
"""

from __future__ import annotations

import concurrent.futures
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

from tests.planted import (
    arithmetic,
    collective,
    horovod,
    optimizers,
    relays,
    returning,
    runtime,
    scheduler,
    standbys,
    stores,
    structure,
)
from tests.planted.bug import Bug

ROOT = pathlib.Path(__file__).resolve().parents[1]
BUGS = [
    *runtime.BUGS,
    *returning.BUGS,
    *relays.BUGS,
    *standbys.BUGS,
    *scheduler.BUGS,
    *collective.BUGS,
    *horovod.BUGS,
    *stores.BUGS,
    *arithmetic.BUGS,
    *optimizers.BUGS,
    *structure.BUGS,
]


def plant_and_test(bug: Bug) -> tuple[bool, str]:
    """Whether the bug's test is red with it, and a line about that."""
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        copy = pathlib.Path(folder) / "project"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv*", ".*_cache"))
        path = copy / bug.file
        text = path.read_text()
        if text.count(bug.right) != 1:
            return False, f"NOT PLANTED  {bug.name}: its place in {bug.file} has changed"
        path.write_text(text.replace(bug.right, bug.wrong))
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", bug.test]
        env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
        ran = subprocess.run(
            command, cwd=copy, env=env, capture_output=True, text=True, check=False, timeout=600
        )
    if ran.returncode == 1:
        return True, f"found        {bug.name}  ({bug.test.partition('::')[0]})"
    if ran.returncode == 0:
        return False, f"NOT FOUND    {bug.name}: {bug.test} stays green"
    return (
        False,
        f"NOT RUN      {bug.name}: pytest ended with {ran.returncode}\n{ran.stdout[-800:]}",
    )


def main(arguments: list[str]) -> int:
    if arguments == ["--list"]:
        for bug in BUGS:
            print(f"{bug.name}\n    {bug.file}  ->  {bug.test}")
        return 0
    unknown = set(arguments) - {bug.name for bug in BUGS}
    if unknown:
        print(f"no bug is named {', '.join(sorted(unknown))}; see --list", file=sys.stderr)
        return 2
    chosen = [bug for bug in BUGS if not arguments or bug.name in arguments]
    with concurrent.futures.ThreadPoolExecutor(max_workers=2) as threads:
        outcomes = []
        for outcome in threads.map(plant_and_test, chosen):
            outcomes.append(outcome[0])
            print(outcome[1], flush=True)
    print(f"{sum(outcomes)} of {len(outcomes)} planted bugs were found")
    return 0 if all(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
