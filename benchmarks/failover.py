"""How long training stands still when a process is killed (``python benchmarks/failover.py``).

A job on this machine with two workers, a server and its standby. The server holds keys of
``--gigabytes`` together; the workers exchange a small key in each step. Again and again one
process is killed (``--victim server``, or ``worker``). Measured is the time from the kill to the
end of the first step that both workers have completed after it. Before the next kill, the server
has a new standby with its state. A worker has also time for its imports: with ``--victim worker``
that is most of what is measured. The launcher waits longer before each start of the same process,
so there are several jobs, with ``--kills-per-job`` kills in each. Figures: docs/recovery.md.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 60.0
_MARK = "FAILOVER_MARK"
_PART_FLOATS = 1 << 22


def train(folder: Path, gigabytes: float) -> None:
    """A worker: steps until there is a file that ends them; each writes when it was over."""
    import numpy as np

    import kvstore as mx

    kv = mx.create("dist_sync")
    kv.set_optimizer(mx.optimizer.create("sgd", learning_rate=0.1, momentum=0.9))
    value = np.zeros(_PART_FLOATS, np.float32)
    for number in range(round(gigabytes * 2**30 / value.nbytes)):
        kv.init(f"held {number}", value)
    kv.init("small", np.ones(1000, np.float32))
    weights = kv.pull("small")
    with (folder / f"steps{kv.rank}").open("a", buffering=1) as log:
        for _ in kv.steps(10_000_000):
            kv.pushpull("small", weights / 2, out=weights)
            log.write(f"{time.monotonic():.6f}\n")
            if (folder / "enough").exists():
                break
            time.sleep(0.002)
    os._exit(0)  # the others stop at other steps


def ends_of_steps(folder: Path, rank: int) -> list[float]:
    """When a worker's steps were over, also those of its earlier processes."""
    path = folder / f"steps{rank}"
    text = path.read_text() if path.exists() else ""
    return [float(line) for line in text.splitlines() if re.fullmatch(r"\d+\.\d{6}", line)]


def processes(mark: str, **wanted: str) -> list[int]:
    """The processes of the job with these variables, the oldest first."""
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            pairs = Path(f"/proc/{entry}/environ").read_bytes().decode(errors="replace")
            began = int(Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[19])
        except (OSError, ValueError):
            continue
        variables = dict(pair.partition("=")[::2] for pair in pairs.split("\0"))
        if {_MARK: mark, **wanted}.items() <= variables.items():
            found.append((began, int(entry)))
    return [pid for _, pid in sorted(found)]


def wait_for(path: Path, pattern: str, start: int) -> int:
    """Wait for a line of the launcher after ``start``; return where it ends."""
    until = time.monotonic() + LIMIT_S
    while time.monotonic() < until:
        found = re.compile(pattern).search(path.read_text(), start)
        if found:
            return found.end()
        time.sleep(0.05)
    raise SystemExit(f"no line {pattern!r} within {LIMIT_S:g} s:\n{path.read_text()[-3000:]}")


def stands_still(folder: Path, killed_at: float) -> float:
    """Wait until both workers go on; return the seconds from the kill to the end of the gap."""
    until = time.monotonic() + LIMIT_S
    while time.monotonic() < until:
        time.sleep(0.3)
        ends = []
        for rank in (0, 1):
            times = [at for at in ends_of_steps(folder, rank)[-3000:] if at > killed_at - 1.0]
            gaps = [(later - at, later) for at, later in pairwise(times)]
            later = [gap for gap in gaps if gap[1] > killed_at]
            if len(later) < 20:
                break
            ends.append(max(later)[1])
        if len(ends) == 2:
            return max(ends) - killed_at
    raise SystemExit("the workers did not go on")


def kill_again_and_again(
    mark: str, victim: str, kills: int, folder: Path, output: Path
) -> list[float]:
    """Kill one process after the other; return the seconds without steps."""
    wanted = {"DMLC_ROLE": victim} | ({"DMLC_TASK_ID": "1"} if victim == "worker" else {})
    wait_for(output, "all have joined", 0)
    while min(len(ends_of_steps(folder, rank)) for rank in (0, 1)) < 50:
        time.sleep(0.1)
    seconds, start = [], 0
    for _ in range(kills):
        pid = processes(mark, **wanted)[0]
        killed_at = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        seconds.append(stands_still(folder, killed_at))
        if victim == "server":
            start = wait_for(output, "has a standby again", start)
        time.sleep(0.5)
    return seconds


def run(victim: str, kills: int, gigabytes: float, output: IO[bytes], folder: Path) -> list[float]:
    """Run the job."""
    mark = secrets.token_hex(8)
    command = [sys.executable, str(ROOT / "tools" / "launch.py"), "--launcher", "local"]
    command += ["-n", "2", "-s", "1", "--standbys", "1", "--restarts", str(2 * kills + 5)]
    command += [sys.executable, __file__, "--train", str(folder), "--gigabytes", str(gigabytes)]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, _MARK: mark, "PYTHONPATH": path}
    launcher = subprocess.Popen(
        command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
    )
    try:
        return kill_again_and_again(mark, victim, kills, folder, Path(output.name))
    finally:
        (folder / "enough").touch()
        launcher.terminate()
        launcher.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--victim", choices=("server", "worker"), default="server")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--kills-per-job", type=int, default=8)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train is not None:
        train(options.train, options.gigabytes)
    seconds: list[float] = []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the job of this moment ends, too
    while len(seconds) < options.kills:
        kills = min(options.kills_per_job, options.kills - len(seconds))
        with tempfile.TemporaryDirectory() as folder, tempfile.NamedTemporaryFile() as output:
            seconds += run(options.victim, kills, options.gigabytes, output.file, Path(folder))
        print(f"{len(seconds)} kills, the longest {max(seconds):.3f} s", flush=True)
    seconds.sort()
    p99 = seconds[math.ceil(0.99 * len(seconds)) - 1]
    print(
        f"{len(seconds)} kills of a {options.victim}, {options.gigabytes:g} GB: median "
        f"{statistics.median(seconds):.3f} s, 99th percentile {p99:.3f} s, longest "
        f"{seconds[-1]:.3f} s"
    )


if __name__ == "__main__":
    main()
