"""``kvstore.run`` and ``LocalCluster`` in a real Jupyter kernel, cell by cell."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from packages import needed

ROOT = Path(__file__).resolve().parents[2]
CELL_S = 50.0

needed("ipykernel")
manager = needed("jupyter_client.manager")
pytestmark = [
    pytest.mark.process,
    pytest.mark.timeout(180),
    # The kernel's client makes sockets and loops of its own, and closes them late.
    pytest.mark.filterwarnings("ignore"),
]


class Notebook:
    """A kernel and its client; :meth:`cell` runs code and returns what it shows."""

    def __init__(self, directory: Path) -> None:
        names = ("DMLC_", "PS_", "KVSTORE_")
        environment = {n: text for n, text in os.environ.items() if not n.startswith(names)}
        environment |= {"PYTHONPATH": str(ROOT), "TMPDIR": str(directory)}
        self.manager: Any = manager.KernelManager()
        # Not by a kernel's specification, which may name another Python.
        self.manager.kernel_spec.argv[0] = sys.executable
        self.manager.start_kernel(env=environment, cwd=str(directory))
        self.client: Any = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=CELL_S)

    def cell(self, code: str) -> list[str]:
        """The lines on standard output, and the last of an error."""
        lines: list[str] = []

        def hear(message: Any) -> None:
            if message["msg_type"] == "stream":
                lines.extend(message["content"]["text"].splitlines())
            if message["msg_type"] == "error":
                lines.append(f"{message['content']['ename']}: {message['content']['evalue']}")

        self.client.execute_interactive(code, timeout=CELL_S, output_hook=hear)
        return lines

    def close(self, *, now: bool = False) -> None:
        """End the kernel, by ``kill -9`` where ``now``; idempotent."""
        if self.client.context.closed:
            return
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=now)
        self.client.context.destroy(linger=0)


@pytest.fixture
def make_notebook(tmp_path: Path) -> Iterator[Callable[[], Notebook]]:
    made: list[Notebook] = []

    def make() -> Notebook:
        made.append(Notebook(tmp_path))
        return made[-1]

    yield make
    for notebook in made:
        notebook.close()


def test_cells_run_functions_show_their_output_and_can_be_interrupted(
    make_notebook: Callable[[], Notebook], tmp_path: Path
) -> None:
    notebook = make_notebook()
    notebook.cell("import os, time, kvstore as mx\nfactor = 3")
    notebook.cell("def work():\n    print('at work')\n    return factor * (kv().rank + 1)")
    notebook.cell("def kv():\n    return mx.create('dist_sync')")
    shown = notebook.cell("print(mx.run(work, workers=2, servers=1))")
    assert sorted(shown) == ["[3, 6]", "[worker 0] at work", "[worker 1] at work"]

    assert notebook.cell("cluster = mx.LocalCluster(workers=2, servers=1)") == []
    shown = notebook.cell("print(cluster.run(work))")
    assert sorted(shown) == ["[3, 6]", "[worker 0] at work", "[worker 1] at work"]
    assert notebook.cell("cluster.run(lambda: 1 / 0)") == ["ZeroDivisionError: division by zero"]

    shown = notebook.cell(
        "import threading\n"
        "threading.Timer(1.0, lambda: os.kill(os.getpid(), 2)).start()  # the button 'interrupt'\n"
        "cluster.run(time.sleep, (50,))"
    )
    assert [line.partition(":")[0] for line in shown] == ["KeyboardInterrupt"]
    assert notebook.cell("cluster.run(work)") == [
        "ClosedError: this cluster has ended: a call was interrupted; create a new one"
    ]


def test_a_kernel_that_is_killed_leaves_nothing(
    make_notebook: Callable[[], Notebook], tmp_path: Path
) -> None:
    notebook = make_notebook()
    notebook.cell("import os, kvstore as mx\ncluster = mx.LocalCluster(workers=2, servers=1)")
    [shown] = notebook.cell("print(*cluster.run(os.getpid))")
    workers = [Path("/proc") / pid for pid in shown.split()]
    assert all(worker.exists() for worker in workers)
    notebook.close(now=True)
    give_up_at = time.monotonic() + 20
    while time.monotonic() < give_up_at and (
        any(worker.exists() for worker in workers) or list(tmp_path.glob("kvstore-*"))
    ):
        time.sleep(0.05)
    assert not any(worker.exists() for worker in workers)
    assert list(tmp_path.glob("kvstore-*")) == []
