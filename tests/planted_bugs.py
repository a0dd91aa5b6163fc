"""Do the tests find bugs? Plants one at a time in a copy of the project and runs one test.

    python -m tests.planted_bugs            all of them, two at a time
    python -m tests.planted_bugs NAME ...   some of them
    python -m tests.planted_bugs --list

Each bug names the test that must turn red. A bug whose test stays green, or whose place in the
code is not found any more, is a failure of this script (exit code 1).
"""

from __future__ import annotations

import concurrent.futures
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[1]
WITNESS = "tests/faults/test_witness.py"
SEEDS = f"{WITNESS}::test_nothing_is_lost_or_doubled_or_hangs_whatever_the_network_does[0]"


class Bug(NamedTuple):
    """One mistake: in ``file``, ``right`` is replaced by ``wrong``; ``test`` must see it."""

    name: str
    file: str
    right: str
    wrong: str
    test: str


BUGS = [
    Bug(
        "a call that is joined overtakes an earlier one of its key",
        "kvstore/fusing.py",
        "if entry is not None and (pushes or entry.target is not None):",
        "if entry is not None and False:",
        WITNESS,
    ),
    Bug(
        "the directory forgets keys but not their weight",
        "kvstore/directory.py",
        "self._loads[server] -= min(nbytes, DIRECT_BYTES) if entry.is_row_sparse else nbytes",
        "pass",
        "tests/inproc/test_store_keys.py",
    ),
    Bug(
        "a key's update count is not loaded",
        "kvstore/arena.py",
        "        self.count = count\n",
        "",
        "tests/inproc/test_store_files.py",
    ),
    Bug(
        "repeated messages are taken again",
        "pslite/protocol/channel.py",
        "if sequence <= self._low or sequence in self._above:",
        "if False:",
        "tests/faults/test_witness.py::test_other_sizes_of_clusters_keep_the_same_promises",
    ),
    Bug(
        "a repeated contribution counts for an absent rank",
        "pslite/protocol/rounds.py",
        "if contributions is None or not self._expected <= contributions.keys():",
        "if contributions is None or len(contributions) < len(self._expected) - 1:",
        SEEDS,
    ),
    Bug(
        "sums in the order of arrival",
        "pslite/protocol/rounds.py",
        "ranks = sorted(contributions)\n        return Batch(",
        "ranks = list(contributions)\n        return Batch(",
        "tests/inproc/test_bits.py",
    ),
    Bug(
        "the epoch of a request is ignored",
        "pslite/plane/server.py",
        "if epoch < self.epoch:",
        "if False:",
        "tests/unit/pslite/test_plane_server.py",
    ),
    Bug(
        "a pushed buffer is free again when it is accepted, not when it is answered",
        "pslite/plane/worker.py",
        "        message = Exchange(\n            transfer.push,",
        "        if len(parts) == len(transfer.parts):\n"
        "            transfer.frames = ()\n"
        "        message = Exchange(\n            transfer.push,",
        SEEDS,
    ),
    Bug(
        "an asynchronous value is sent from where it is updated",
        "kvstore/dense_stores.py",
        "            if arena.store.ranks is None:\n                copy = ",
        "            if False:\n                copy = ",
        "tests/inproc/test_shared_memory.py",
    ),
    Bug(
        "a free range is joined to the wrong neighbour",
        "pslite/memory/freelist.py",
        "            start = ranges[first][0]\n",
        "            start = ranges[first][0] - 0 * size\n            stop += size\n",
        "tests/unit/pslite/test_memory_freelist.py",
    ),
    Bug(
        "a contribution to a later round is lost",
        "pslite/protocol/rounds.py",
        "        contributions[rank] = payload\n        self._open[round_] = contributions",
        "        if round_ == self.version + 1:\n"
        "            contributions[rank] = payload\n"
        "            self._open[round_] = contributions",
        SEEDS,
    ),
    Bug(
        "asynchronous pushes are applied in the order of arrival",
        "pslite/protocol/rounds.py",
        "            round_ = self._applied.get(rank, 0) + 1\n"
        "            if round_ in self._waiting[rank]:",
        "            round_ = min(self._waiting[rank], default=0)\n"
        "            if round_ in self._waiting[rank]:",
        "tests/unit/pslite/test_rounds.py",
    ),
    Bug(
        "a pull does not wait for its worker's own pushes",
        "pslite/protocol/rounds.py",
        "return self._running is None and after_round <= self._applied.get(rank, 0)",
        "return self._running is None",
        SEEDS,
    ),
    Bug(
        "what was not accepted is never sent again",
        "pslite/protocol/channel.py",
        "        if not at_once and (self._check_at is None or now < self._check_at):\n"
        "            return []\n",
        "        self._check_at = None\n        return []\n",
        SEEDS,
    ),
    Bug(
        "more is acknowledged than has arrived",
        "pslite/protocol/channel.py",
        "            return self._low, ()\n",
        "            return self._low + 1, ()\n",
        SEEDS,
    ),
    Bug(
        "a request does not wait for the result before it",
        "pslite/plane/requested.py",
        "        if self.pulling is not None:\n            return False",
        "        if False:\n            return False",
        SEEDS,
    ),
    Bug(
        "a barrier counts messages",
        "pslite/protocol/barrier.py",
        "        if wait.arrived.keys() >= wait.members:",
        "        if len(wait.arrived) >= len(wait.members) - 1:",
        "tests/unit/pslite/test_barrier.py",
    ),
    Bug(
        "a second answer of one node stands in for another's",
        "pslite/protocol/pending.py",
        "        if entry is None or node not in entry.waiting:\n            return\n"
        "        entry.waiting.discard(node)",
        "        if entry is None:\n            return\n        entry.waiting.pop()",
        "tests/unit/pslite/test_pending.py",
    ),
    Bug(
        "ranks follow the host names",
        "pslite/protocol/membership.py",
        "nodes = [node for node in self._nodes if node.role == role.value]\n            taken",
        "nodes = sorted(\n"
        "                (node for node in self._nodes if node.role == role.value),\n"
        "                key=lambda node: node.host,\n"
        "            )\n            taken",
        "tests/unit/pslite/test_membership.py",
    ),
    Bug(
        "an update runs though its part is being read",
        "pslite/plane/server.py",
        "                unit.finish(batch, None, replies)\n",
        "                self.app.apply([Job(unit.parts, unit.sizes, unit.push_sizes, batch)])\n"
        "                unit.finish(batch, None, replies)\n",
        SEEDS,
    ),
    Bug(
        "a row that came from one server is taken for another one's",
        "kvstore/sparse/stripes.py",
        "rows * self.num_parts + part",
        "rows * self.num_parts",
        "tests/unit/kvstore/test_sparse_stripes.py",
    ),
    Bug(
        "who sends malformed rows never hears of it",
        "pslite/plane/server.py",
        "                if is_push:\n"
        "                    unit.refuse(rank, round_, error, replies)\n"
        "                else:\n",
        "                if not is_push:\n",
        "tests/unit/pslite/test_plane_forms.py",
    ),
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
