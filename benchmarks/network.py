"""Exchanges between machines whose network is slow: ``sudo python benchmarks/network.py``.

Makes a network namespace for each of ``--workers`` machines, with a worker and a server each, and
joins them by a bridge. What a machine sends and receives is limited to ``--gbit``, and what one
connection gets to ``--flow-gbit``, as in clouds and behind links that are bundled. Prints the time
of an exchange of a model beside the least that the network allows (each machine sends and receives
``2 (n - 1) / n`` models), for one connection to each server and for more (``PS_CONNECTIONS``). The
weights are compared with NumPy's. With several ``--workers`` on each machine, ``--hierarchical
auto,off`` shows what it saves that a server adds up for its machine. Needs root, ``ip`` and ``tc``;
all that it makes is its own.
"""

from __future__ import annotations

import argparse
import itertools
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.compare.figures import Summary, slowest, summary
from benchmarks.compare.jobs import JobFailed, Process, run_task
from benchmarks.compare.loop import Task
from benchmarks.compare.scripts import MODULE

PORT = 9000
_ROUNDED = 1e-5
FLOWS = 256
"""Connections are dealt out to so many limits by a sum of their two ports: two rarely share one."""
# Classic BPF: the ports of source and target of a packet, their exclusive or, its lowest bits, and
# the class 1:1000 (hexadecimal) and those after it. Offsets count from the network header.
BY_FLOW = (
    "7,40 0 0 4293918740,7 0 0 0,40 0 0 4293918742,172 0 0 0,"
    f"84 0 0 {FLOWS - 1},4 0 0 {(1 << 16) + 0x1000},22 0 0 0"
)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--machines", type=int, default=2, help="each with a server (2)")
    parser.add_argument("--workers", type=int, default=1, help="on each machine (1)")
    parser.add_argument("--hierarchical", default="auto", help="auto, off or auto,off (auto)")
    parser.add_argument("--gbit", default="1,2.5,5,10", help="of a machine, each way")
    parser.add_argument("--flow-gbit", type=float, default=0.0, help="of a connection; 0: no limit")
    parser.add_argument("--connections", default="1,4")
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--security", default="plain", choices=("plain", "curve"))
    return parser.parse_args()


def main() -> int:
    options = arguments()
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if os.geteuid() != 0 or missing:
        print(f"needs root, ip and tc (Debian: iproute2); missing: {missing or 'root'}")
        return 1
    count = options.machines
    size = options.workers * count
    task = Task(options.model, workers=size, servers=count, rounds=options.rounds)
    limit = f", {options.flow_gbit:g} a connection" if options.flow_gbit else ""
    print(f"{options.model}, {count} machines with {options.workers} workers and a server each")
    share = 2 * (count - 1) / count
    kinds = itertools.product(
        map(float, options.gbit.split(",")),
        options.connections.split(","),
        options.hierarchical.split(","),
    )
    for gbit, connections, hierarchical in kinds:
        settings = {
            "PS_CONNECTIONS": connections,
            "PS_SECURITY": options.security,
            "KVSTORE_HIERARCHICAL": hierarchical,
        }
        found = measure(task, gbit, options.flow_gbit, settings)
        least_ms = 8 * share * task.nbytes / gbit / 1e6
        print(
            f"{gbit:5g} Gbit/s{limit}, {connections} connections, hierarchical {hierarchical}: "
            f"{found.text()} ms; the network needs {least_ms:.0f} ms "
            f"({least_ms / found.median:.0%})",
            flush=True,
        )
    return 0


def measure(task: Task, gbit: float, flow_gbit: float, settings: dict[str, str]) -> Summary:
    """Time exchanges of a model between machines of their own."""
    network = machines(task.servers, gbit, flow_gbit)
    with network as names, tempfile.NamedTemporaryFile() as key:
        key.write(secrets.token_bytes(32))
        key.flush()
        settings = {"PS_JOB_KEY_FILE": key.name, **settings}
        try:
            reports = run_task(task, lambda task: processes(task, names, settings))
        except JobFailed as failure:
            raise SystemExit(f"a run failed: {failure}") from None
    check = reports[0]["check"]
    # Sums of machines are rounded in between, unlike NumPy's.
    is_relayed = task.workers > task.servers and settings["KVSTORE_HIERARCHICAL"] == "auto"
    if not check["exact"] and not (is_relayed and check["difference"] < _ROUNDED):
        raise SystemExit(f"the weights differ from NumPy's: {check}")
    return summary(slowest([report["times_ms"] for report in reports]))


def address(machine: int) -> str:
    return f"10.77.0.{machine + 1}"


def processes(task: Task, names: Sequence[str], settings: dict[str, str]) -> list[Process]:
    """The scheduler on the first machine, a server and equally many workers on each.

    With PS_STANDBYS, the standby of each server is on the next machine.
    """
    common = {
        "DMLC_PS_ROOT_URI": address(0),
        "DMLC_PS_ROOT_PORT": str(PORT),
        "DMLC_NUM_WORKER": str(task.workers),
        "DMLC_NUM_SERVER": str(task.servers),
        "OMP_NUM_THREADS": "1",
        **settings,
    }
    service = (sys.executable, "-m", "kvstore.server")
    worker = (sys.executable, "-m", MODULE, task.to_json())
    ranks, each = range(task.servers), task.workers // task.servers
    roles = [(0, 0, "scheduler", service, {})]
    roles += [(rank, rank, "server", service, {}) for rank in ranks]
    roles += [(rank // each, rank, "worker", worker, {}) for rank in range(task.workers)]
    if settings.get("PS_STANDBYS") == "1":
        stands_by = {"PS_STANDS_BY": "1"}
        roles += [((r + 1) % task.servers, r, "server", service, stands_by) for r in ranks]
    return [
        Process(
            ("ip", "netns", "exec", names[machine], *command),
            {
                **common,
                **variables,
                "DMLC_ROLE": role,
                "DMLC_TASK_ID": str(rank),
                "DMLC_NODE_HOST": address(machine),
                "PS_MACHINE": f"machine {machine}",
            },
        )
        for machine, rank, role, command, variables in roles
    ]


# -- the network ---------------------------------------------------------------------------


@contextmanager
def machines(count: int, gbit: float, flow_gbit: float) -> Iterator[list[str]]:
    """Namespaces that see each other, by name; they and their limits are gone afterwards.

    ``gbit`` of 0: as fast as this machine copies.
    """
    prefix = f"kv{os.getpid()}"
    hub = f"{prefix}-hub"
    names = [f"{prefix}-{machine}" for machine in range(count)]
    made: list[str] = []
    try:
        for name in (hub, *names):
            ip("netns", "add", name)
            made.append(name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("-n", hub, "link", "add", "bridge", "type", "bridge")
        ip("-n", hub, "link", "set", "bridge", "up")
        for machine, name in enumerate(names):
            plug(hub, name, machine)
            if gbit:
                limit(name, "net", gbit, flow_gbit)
                limit(hub, f"port{machine}", gbit, 0.0)
        yield names
    finally:
        for name in made:
            ip("netns", "del", name)


def plug(hub: str, name: str, machine: int) -> None:
    """A cable from a machine to the bridge."""
    port = f"port{machine}"
    cable = ("link", "add", "net", "netns", name, "type", "veth", "peer", "name", port)
    ip(*cable, "netns", hub)
    ip("-n", hub, "link", "set", port, "master", "bridge", "up")
    ip("-n", name, "address", "add", f"{address(machine)}/24", "dev", "net")
    ip("-n", name, "link", "set", "net", "up")


def limit(name: str, device: str, gbit: float, flow_gbit: float) -> None:
    """What leaves by a device, and what each connection of it gets."""
    rate = f"{round(1000 * gbit)}mbit"
    # Room for a millisecond: less makes a fast limit slower than it says.
    size = f"burst {round(gbit * 125)}kb cburst {round(gbit * 125)}kb quantum 60000"
    lines = [
        f"qdisc add dev {device} root handle 1: htb default 1",
        f"class add dev {device} parent 1: classid 1:ffff htb rate {rate} {size}",
        f"class add dev {device} parent 1:ffff classid 1:1 htb rate {rate} {size}",
    ]
    if flow_gbit:
        flow = f"{round(1000 * flow_gbit)}mbit"
        for index in range(FLOWS):
            classid = f"1:{0x1000 + index:x}"
            rates = f"rate {flow} ceil {flow} {size}"
            lines.append(f"class add dev {device} parent 1:ffff classid {classid} htb {rates}")
        lines.append(f'filter add dev {device} parent 1: protocol ip bpf bytecode "{BY_FLOW}"')
    call("ip", "netns", "exec", name, "tc", "-batch", "-", text="\n".join(lines) + "\n")


def ip(*words: str) -> None:
    call("ip", *words)


def call(*words: str, text: str = "") -> None:
    done = subprocess.run(words, input=text, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(words)}: {done.stderr.strip()}")


if __name__ == "__main__":
    sys.exit(main())
