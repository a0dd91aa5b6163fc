"""What is checked before anything is started, so that a typo costs one sentence and no job.

Runs on the main thread; may start one process, which has ended when it returns. Called once,
from ``local.py``. The other side is ``service.py``.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence

from kvstore.launch.child import die_with_launcher
from kvstore.launch.failure import describe_status
from kvstore.launch.options import LaunchError
from kvstore.launch.plan import ProcessSpec

CHECK_IMPORTS = "--check-imports"
"""What a service command is called with, before names, to import these and nothing more."""


def check_server_imports(
    specs: Sequence[ProcessSpec], base_environment: Mapping[str, str], names: Sequence[str]
) -> None:
    """Import ``names`` as the first server of ``specs`` will: its program, variables, directory.

    Raises :class:`LaunchError` (exit code 2) with the last line of what went wrong. Without
    names nothing happens.
    """
    if not names:
        return
    server = next(spec for spec in specs if spec.role == "server")
    done = subprocess.run(
        [*server.argv, CHECK_IMPORTS, ",".join(names)],
        env={**base_environment, **server.environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        preexec_fn=die_with_launcher(),  # safe: the launcher has one thread
        check=False,
    )
    if done.returncode == 0:
        return
    lines = done.stderr.strip().splitlines()
    if done.returncode < 0 or not lines:
        # A module that ends the process (a segmentation fault) leaves no line of ours.
        how = describe_status(done.returncode)
        sentence = f"importing {', '.join(names)} (--server-import) failed: {how}"
    else:
        sentence = lines[-1]
    raise LaunchError(f"{sentence}; nothing was started", exit_code=2)
