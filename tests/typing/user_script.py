"""What a type checker sees of a user's script: `make types` checks it, and nothing runs it.

Each line that ends in an `ignore` holds an error that a checker has to find: where it finds none,
mypy reports the comment as unused, and `make types` fails.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from typing_extensions import assert_type

import kvstore as mx
import pslite
from kvstore.mxnet.gluon.utils import split_and_load

Floats = npt.NDArray[np.float32]
weight: Floats = np.ones(3, np.float32)

kv = mx.kvstore.create("dist_sync")
assert_type(kv, mx.KVStore)
assert_type(mx.create("local"), mx.KVStore)
assert_type(mx.kv.create("device"), mx.KVStore)
assert_type(kv.rank, int)
kv.init("w", weight)
kv.push(["w", "b"], [weight, weight], priority=-1)
kv.pull("w", out=weight)
kv.barrier()
kv.allreduce(weight, "average", out=weight)
kv.all_reduce(weight, oop="max")  # type: ignore[call-arg]
kv.puhs("w", weight)  # type: ignore[attr-defined]
kv.push("w")  # type: ignore[call-arg]
kv.push("w", weight, prio=1)  # type: ignore[call-arg]
kv.init(1.5, weight)  # type: ignore[arg-type]
mx.create(1)  # type: ignore[arg-type]

sgd = mx.optimizer.create("sgd", learning_rate=0.1)
kv.set_optimizer(sgd)
kv.set_optimizer("sgd")  # type: ignore[arg-type]
mx.optimizer.SDG(learning_rate=0.1)  # type: ignore[attr-defined]

array = mx.nd.ones((2, 3), ctx=mx.cpu(0))
assert_type(array, mx.nd.NDArray)
assert_type(array.shape, tuple[int, ...])
array.asnumpi()  # type: ignore[attr-defined]
mx.nd.onse((2, 3))  # type: ignore[attr-defined]
mx.nd.sparse.row_sparse_arary  # type: ignore[attr-defined]  # noqa: B018

schedule = mx.lr_scheduler.FactorScheduler(step=10, factor=0.5)
mx.lr_scheduler.FactorScheduler(stepp=10)  # type: ignore[call-arg]
batches = mx.io.NDArrayIter(weight, batch_size=1)
mx.io.NDArayIter(weight)  # type: ignore[attr-defined]
mx.metric.Accuracy().get()
mx.metric.Acuracy()  # type: ignore[attr-defined]
mx.callback.Speedometer(32, 10)
mx.random.seed(1)
mx.random.sead(1)  # type: ignore[attr-defined]
mx.init.Xavier()
mx.initializer.Xavier()
mx.init.Xaviar()  # type: ignore[attr-defined]
mx.model.FeedForwrd()  # type: ignore[attr-defined]

parameters = {"w": mx.gluon.Parameter("w", weight)}
trainer = mx.gluon.Trainer(parameters, "sgd", {"learning_rate": 0.1}, kvstore=kv)
trainer.step(32)
trainer.stepp(32)  # type: ignore[attr-defined]
mx.gluon.Trainr(parameters, "sgd")  # type: ignore[attr-defined]
halves = split_and_load(weight, [mx.cpu(0)])
split_and_load(weight)  # type: ignore[call-arg]


def train(store: str) -> float:
    return mx.create(store).rank / 2


mx.run(train, workers=2, args=("dist_sync",))
mx.run(train, wokers=2)  # type: ignore[call-arg]
mx.gluno  # type: ignore[attr-defined]  # noqa: B018
mx.cpu("0")  # type: ignore[arg-type]

with pslite.start() as node:
    worker = pslite.KVWorker(node, app=0)
    worker.psuh  # type: ignore[attr-defined]  # noqa: B018
pslite.strat()  # type: ignore[attr-defined]
