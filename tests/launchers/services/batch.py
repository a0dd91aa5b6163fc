"""What Slurm and Grid Engine have in common: hosts, and commands that give jobs to them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import ClassVar

from services.daemon import command
from services.hosts import Network


@dataclass(frozen=True)
class BatchSystem:
    """A cluster that takes jobs. ``environment`` is what its commands need."""

    own_processes: ClassVar[tuple[str, ...]]
    """How the command lines of its own processes on the hosts begin."""

    environment: dict[str, str]
    network: Network

    def run(self, *words: str, timeout_s: float = 60.0) -> str:
        """What a command of its printed, which must succeed."""
        environment = {**os.environ, **self.environment}
        return command(*words, env=environment, timeout_s=timeout_s)

    def processes(self) -> dict[int, str]:
        """What jobs run on the hosts: process ids and command lines, without the system's own."""
        return {
            pid: words
            for host in self.network.hosts
            for pid, words in host.processes().items()
            if not words.startswith(self.own_processes)
        }
