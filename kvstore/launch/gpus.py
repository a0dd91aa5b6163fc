"""Which GPUs a worker may use where the cluster shows all of a host's to each process.

Pure, but for :func:`visible_gpus`, which looks at this machine. Used by ``agent.py`` on the hosts
and by ``carried.py`` on the launcher's side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvstore.launch.options import LaunchError
from kvstore.launch.rehearsal import gpu_count

VISIBLE = "CUDA_VISIBLE_DEVICES"


def visible_gpus(environ: Mapping[str, str]) -> list[str]:
    """The GPUs that a process may use, as CUDA_VISIBLE_DEVICES names them."""
    if VISIBLE not in environ:
        return [str(number) for number in range(gpu_count())]
    names = [name.strip() for name in environ[VISIBLE].split(",")]
    return [name for name in names if name and name not in ("-1", "NoDevFiles")]


def share_gpus(
    members: Sequence[tuple[str, int]], greetings: Sequence[Mapping[str, Any]], each: int
) -> dict[tuple[str, int], dict[str, str]]:
    """The variables that give ``each`` GPUs of its host to every worker, and none to a server.

    ``greetings`` are those of the members' agents. Raises :class:`LaunchError` where a host has
    too few.
    """
    found: dict[tuple[str, int], dict[str, str]] = {}
    given: dict[str, int] = {}
    for member, greeting in zip(members, greetings, strict=True):
        if member[0] != "worker":
            found[member] = {VISIBLE: ""}
            continue
        host = str(greeting.get("host"))
        names = [str(name) for name in greeting.get("gpu_names", ())]
        first = given.get(host, 0)
        given[host] = first + each
        if given[host] > len(names):
            raise LaunchError(
                f"the GPUs that this job has on {host}: {len(names)}; each of its workers there "
                f"needs {each} (--worker-gpus): ask for more GPUs, or for more hosts",
                exit_code=1,
            )
        found[member] = {VISIBLE: ",".join(names[first : given[host]])}
    return found
