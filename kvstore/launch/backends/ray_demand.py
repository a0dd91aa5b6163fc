"""What a job asks of a Ray cluster, as data, and why the cluster does not give it yet.

Pure: neither Ray nor a file is touched. :class:`RayPlan` is what the launcher hands to the program
that speaks with Ray. Read ``ray.py`` for the one and ``ray_driver.py`` for the other.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

Resources = Mapping[str, float]
"""By Ray's names: "CPU", "GPU", "memory" (bytes)."""

# Files in the job's directory: from the launcher; of the driver, for people; Ray's own words.
PLAN_NAME = "plan.json"
STATE_NAME = "state"
LOG_NAME = "ray.log"

FATAL = "ray: "
"""How the driver's last line begins, which says why it gives up."""

_SHOWN = {"CPU": "CPUs", "GPU": "GPUs"}
_GIB = 1 << 30


@dataclass(frozen=True)
class RayPlan:
    """What is to be started. ``members`` are roles with their ranks, in the order of the agents.

    ``resources`` are those of one process of each role; ``directory`` is where the launcher runs,
    ``root`` its checkout of this package ("" where it is installed); ``python`` and ``address``
    are "", and ``max_retries`` None, where Ray shall decide.
    """

    members: Sequence[tuple[str, int]]
    resources: Mapping[str, Resources]
    name: str
    directory: str
    root: str
    strategy: str = "SPREAD"
    python: str = ""
    address: str = ""
    max_retries: int | None = None
    runtime_env: Mapping[str, Any] = field(default_factory=dict)

    def to_text(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_text(cls, text: str) -> RayPlan:
        return cls(**json.loads(text))

    def bundles(self) -> list[dict[str, float]]:
        """The resources of each member, in their order."""
        return [dict(self.resources[role]) for role, _ in self.members]


def resources_of(cores: int, gpus: int, memory_mb: int | None) -> dict[str, float]:
    found: dict[str, float] = {"CPU": cores}
    if gpus:
        found["GPU"] = gpus
    if memory_mb:
        found["memory"] = memory_mb << 20
    return found


def shortage(plan: RayPlan, nodes: Sequence[Resources]) -> str | None:
    """A sentence if the ``nodes`` could not take all processes even if nothing ran on them."""
    for role in dict.fromkeys(role for role, _ in plan.members):
        wanted = plan.resources[role]
        if any(_fits(wanted, node) for node in nodes):
            continue
        for name, count in wanted.items():
            most = max((node.get(name, 0.0) for node in nodes), default=0.0)
            if most < count:
                return (
                    f"no node of the Ray cluster has {_amount(name, count)}, which a {role} needs "
                    f"(the most on one: {_amount(name, most)})"
                )
        needs = " and ".join(_amount(name, count) for name, count in wanted.items())
        return f"no node of the Ray cluster has {needs} together, which a {role} needs"
    for name, count in _total(plan.bundles()).items():
        total = _total(nodes).get(name, 0.0)
        if total < count:
            return (
                f"the job needs {_amount(name, count)}, and the Ray cluster has "
                f"{_amount(name, total)} (on {len(nodes)} node{'s' if len(nodes) > 1 else ''})"
            )
    return None


def why_waiting(plan: RayPlan, nodes: Sequence[Resources], free: Resources) -> str:
    """Why Ray has no room for all processes; ``free`` are the free resources of all ``nodes``."""
    if (reason := shortage(plan, nodes)) is not None:
        return reason
    for name, count in _total(plan.bundles()).items():
        left = free.get(name, 0.0)
        if left < count:
            return (
                f"the job needs {_amount(name, count)}, and free are {_amount(name, left)} of the "
                f"Ray cluster's {_amount(name, _total(nodes)[name])}"
            )
    return "Ray is placing the processes"


def _total(bundles: Sequence[Resources]) -> dict[str, float]:
    names = dict.fromkeys(name for bundle in bundles for name in bundle)
    return {name: sum(bundle.get(name, 0.0) for bundle in bundles) for name in names}


def _fits(wanted: Resources, node: Resources) -> bool:
    return all(node.get(name, 0.0) >= count for name, count in wanted.items())


def _amount(name: str, count: float) -> str:
    if name == "memory":
        return f"{count / _GIB:.1f} GiB of memory"
    shown = _SHOWN.get(name, name)
    return f"{count:g} {shown.removesuffix('s') if count == 1 else shown}"
