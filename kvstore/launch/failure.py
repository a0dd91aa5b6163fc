"""Which of several ended processes was the cause.

Pure. In a distributed job one death brings others: peers notice it and raise. The launcher
therefore waits a little after the first failure (``lifecycle.py``) and then asks here who is
to blame. ``report.py`` puts the answer into words.
"""

from __future__ import annotations

import math
import re
import signal
from collections.abc import Mapping, Sequence

from kvstore.launch.lifecycle import Exit
from kvstore.launch.plan import ProcessSpec

# The last line of a traceback in which a process names another one as the cause of its end.
_NAMES_ANOTHER = re.compile(r"(?:\w+\.)*NodeLostError\b")


def failures_first_cause_first(
    exits: Sequence[Exit],
    specs: Sequence[ProcessSpec],
    last_lines: Mapping[int, Sequence[str]],
) -> list[Exit]:
    """Sort out the failures among ``exits`` and put the most likely cause at the front.

    The rules, in this order: whoever ended with an error of its own comes before a service
    process that ended with 0 too early, and that before one whose log says NodeLostError
    (it names somebody else: a process that raises may take longer to exit than its peers take
    to notice); then whoever was noticed first; of several noticed in one sweep, one killed by
    a signal first, since an error may be the answer to a signal death, never the reverse.
    """
    early = _ended_too_early(exits, specs)

    def is_failure(found: Exit) -> bool:
        return not found.stopped and (found.status != 0 or found.index in early)

    def weight(found: Exit) -> tuple[int, int, bool, int]:
        if found.status == 0:
            kind = 1
        else:
            kind = 2 if _blames_another(last_lines.get(found.index, ())) else 0
        return (kind, found.sweep, found.status > 0, found.index)

    return sorted(filter(is_failure, exits), key=weight)


def exit_code(found: Exit) -> int:
    """The launcher's exit code for this first failure, by the rules of the shell."""
    if found.status == 0:
        return 1
    return found.status if found.status > 0 else 128 - found.status


def describe_status(status: int) -> str:
    """``exit code 7`` or ``signal SIGKILL``."""
    if status >= 0:
        return f"exit code {status}"
    try:
        return f"signal {signal.Signals(-status).name}"
    except ValueError:
        return f"signal {-status}"


def _ended_too_early(exits: Sequence[Exit], specs: Sequence[ProcessSpec]) -> set[int]:
    """Service processes that ended with 0 while workers ran and others of the service stayed.

    When all of the service ended with 0 first, the workers had said goodbye: nothing is wrong.
    Nor is it when the workers succeeded, who would have missed them. A scheduler that failed
    before any server ended is not counted: the servers are the service then.
    """
    by_index = {found.index: found for found in exits}

    def end_of(is_worker: bool) -> float:
        """The sweep that saw the last of them end; infinite if one never did."""
        group = [index for index, spec in enumerate(specs) if (spec.role == "worker") == is_worker]
        if any(index not in by_index for index in group):
            return math.inf
        return max(by_index[index].sweep for index in group)

    def is_good(group: Sequence[Exit]) -> bool:
        return all(found.status == 0 and not found.stopped for found in group)

    workers = [found for found in exits if specs[found.index].role == "worker"]
    servers = [found for found in exits if specs[found.index].role == "server"]
    service = [found for found in exits if specs[found.index].role != "worker"]
    last_worker, last_service = end_of(True), end_of(False)
    first_server = min((found.sweep for found in servers), default=0)
    is_lost = any(not is_good([found]) and found.sweep < first_server for found in service)
    whole = is_good(servers if is_lost else service)
    if whole and (last_service <= last_worker or is_good(workers)):
        return set()
    return {found.index for found in service if found.status == 0 and found.sweep < last_worker}


def _blames_another(lines: Sequence[str]) -> bool:
    return any(_NAMES_ANOTHER.match(line) for line in lines)
