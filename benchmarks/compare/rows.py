"""What is compared: one row for each line of the table in benchmarks/README.md. Data only."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from benchmarks.compare.figures import Ask
from benchmarks.compare.loop import Task

ALL_REDUCE = ("gloo", "openmpi")
ALL_REDUCE_TCP = ("gloo", "openmpi-tcp")


@dataclass(frozen=True)
class Row:
    """One piece of work, who does it, and what is asked."""

    name: str
    title: str
    task: Task
    contenders: tuple[str, ...]
    asks: tuple[Ask, ...]
    known_ms: dict[str, float] = field(default_factory=dict)
    """Figures from another machine, shown where a contender is missing."""

    def quick(self) -> Row:
        """The same with just enough rounds to see that everything runs."""
        rounds = 20 if self.task.rounds > 100 else 3
        return replace(self, task=replace(self.task, warmup=1, rounds=rounds))


def _ask(of: str, ratio: float, *to: str) -> Ask:
    return Ask(of, to, ratio)


KV = Task(model="lenet", workers=1, servers=1, warmup=2, rounds=8)
OURS_KV = ("ours-kv", "ours-kv-first", "ours-kv-sum")

ROWS = (
    Row(
        "resnet50",
        "ResNet-50, dist_sync, shared memory",
        Task("resnet50"),
        ("ours", "ours-empty", "ours-views", "mxnet", *ALL_REDUCE),
        (
            _ask("ours", 5, "mxnet"),
            _ask("ours-empty", 6, "mxnet"),
            _ask("ours", 1, *ALL_REDUCE),
            _ask("ours-empty", 1.3, *ALL_REDUCE),
            _ask("ours-views", 1.3, *ALL_REDUCE),
        ),
    ),
    Row(
        "one",
        "one tensor of 100 MB, dist_sync, shared memory",
        Task("one"),
        ("ours", "ours-empty", "ours-views", "mxnet", *ALL_REDUCE),
        (
            _ask("ours", 5, "mxnet"),
            _ask("ours-empty", 7, "mxnet"),
            _ask("ours", 0.9, *ALL_REDUCE),
            _ask("ours-empty", 1.3, *ALL_REDUCE),
            _ask("ours-views", 1.3, *ALL_REDUCE),
        ),
    ),
    Row(
        "resnet110",
        "ResNet-110, dist_sync, shared memory",
        Task("resnet110", warmup=5, rounds=60),
        ("ours", "ours-empty", "ours-views", "mxnet", *ALL_REDUCE),
        (
            _ask("ours", 15, "mxnet"),
            _ask("ours-empty", 18, "mxnet"),
            _ask("ours", 0.8, *ALL_REDUCE),
            _ask("ours-empty", 1, *ALL_REDUCE),
            _ask("ours-views", 1, *ALL_REDUCE),
        ),
    ),
    Row(
        "lenet",
        "LeNet, dist_sync, shared memory",
        Task("lenet", warmup=10, rounds=300),
        ("ours", "ours-empty", "ours-views", "mxnet", *ALL_REDUCE),
        (_ask("ours", 8, "mxnet"),),
    ),
    Row(
        "resnet50-tcp",
        "ResNet-50, dist_sync, TCP only",
        Task("resnet50"),
        ("ours-tcp", "mxnet-tcp", *ALL_REDUCE_TCP),
        (_ask("ours-tcp", 2, "mxnet-tcp"), _ask("ours-tcp", 0.8, *ALL_REDUCE_TCP)),
    ),
    Row(
        "async",
        "ResNet-50, dist_async",
        Task("resnet50", "dist_async"),
        ("ours", "ours-empty", "mxnet"),
        (_ask("ours", 4.5, "mxnet"), _ask("ours-empty", 6, "mxnet")),
    ),
    Row(
        "local50",
        "ResNet-50, local, 4 devices",
        Task("resnet50", "local", workers=1, servers=0, devices=4),
        ("ours-local", "mxnet-local"),
        (_ask("ours-local", 3, "mxnet-local"),),
    ),
    Row(
        "local110",
        "ResNet-110, local, 4 devices",
        Task("resnet110", "local", workers=1, servers=0, devices=4, warmup=5, rounds=60),
        ("ours-local", "mxnet-local"),
        (_ask("ours-local", 5, "mxnet-local"),),
    ),
    Row(
        "four",
        "ResNet-50, dist_sync, 4 workers, 2 servers",
        Task("resnet50", workers=4, servers=2, rounds=10),
        ("ours", "mxnet"),
        (_ask("ours", 6, "mxnet"),),
    ),
    Row(
        "loop",
        "ResNet-50, dist_sync, a loop over keys with priorities into mx.nd arrays",
        Task("resnet50", by_key=True),
        ("ours", "mxnet-loop"),
        (_ask("ours", 3, "mxnet-loop"),),
    ),
    Row(
        "rows",
        "row-sparse push and pull of 50,000 ids of 1,000,000 x 64 by each worker, dist_sync",
        Task("one", rounds=25, settings={"rows": "1000000", "width": "64", "ids": "50000"}),
        ("ours-rows", "ours-rows-numpy", "mxnet-rows"),
        (_ask("ours-rows-numpy", 4, "mxnet-rows"), _ask("ours-rows", 8, "mxnet-rows")),
    ),
    Row(
        "kv",
        "KVWorker, push and pull of 10,000,000 sorted keys",
        replace(KV, settings={"keys": "10000000"}),
        (*OURS_KV, "ps-lite"),
        (_ask("ours-kv", 3, "ps-lite"),),
        {"ps-lite": 210.0 + 290.0},
    ),
    Row(
        "kv-anew",
        "KVWorker, push and pull of 1,000,000 sorted keys, drawn anew each time",
        replace(KV, rounds=20, settings={"keys": "1000000", "anew": "yes"}),
        (*OURS_KV, "ps-lite"),
        (_ask("ours-kv", 2, "ps-lite"),),
        {"ps-lite": (210.0 + 290.0) / 10},
    ),
)


def chosen(names: str | None) -> list[Row]:
    """The rows named in a list with commas, in the order of the table; all for None.

    Raises ValueError with a sentence for a name that no row has.
    """
    if names is None:
        return list(ROWS)
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    known = [row.name for row in ROWS]
    for name in wanted:
        if name not in known:
            raise ValueError(f"there is no row {name!r}; the rows are {', '.join(known)}")
    return [row for row in ROWS if row.name in wanted]
