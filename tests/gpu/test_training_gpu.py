"""Training on real GPUs, from MXNet's names to PyTorch's and Horovod's; skipped without a GPU.

One GPU is enough: where several devices share the work, they are the same one twice.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvstore as mx
from pslite.errors import PSError

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
SGD = {"learning_rate": 0.1, "momentum": 0.9}


@pytest.fixture
def torch(cupy: Any) -> Any:
    module = pytest.importorskip("torch")
    if not module.cuda.is_available():
        pytest.skip("PyTorch finds no usable GPU")
    return module


# -- MXNet's names --------------------------------------------------------------------------


def test_arrays_on_a_gpu_compute_as_those_on_the_host(cupy: Any) -> None:
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    found = []
    for context in (mx.cpu(), mx.gpu(0)):
        array = mx.nd.array(values, ctx=context)
        assert array.context == context and array.as_in_context(mx.cpu()).context == mx.cpu()
        both = mx.nd.dot(array, array.T) + mx.nd.ones((3, 3), ctx=context)
        both[1] = 7
        found.append((both * 2 - array.sum()).asnumpy())
    np.testing.assert_array_equal(found[0], found[1])
    with pytest.raises(PSError, match=r"gpu\(0\)"):
        mx.nd.ones((2,)) + mx.nd.ones((2,), ctx=mx.gpu(0))


@pytest.mark.parametrize("kvstore", ["local", "device"])
@pytest.mark.parametrize("on_store", [True, False])
def test_a_trainer_on_two_copies_takes_the_steps_of_the_host(
    cupy: Any, kvstore: str, on_store: bool
) -> None:
    random = np.random.default_rng(5)
    shapes = {"weight": (40, 30), "bias": (40,)}
    begin = {name: random.normal(size=shape).astype("f4") for name, shape in shapes.items()}
    gradients = [
        {name: random.normal(size=shape).astype("f4") for name, shape in shapes.items()}
        for _ in range(6)
    ]

    def train(context: Any) -> dict[str, Any]:
        params = {
            name: mx.gluon.Parameter([mx.nd.array(value, ctx=context) for _ in range(2)], name=name)
            for name, value in begin.items()
        }
        trainer = mx.gluon.Trainer(params, "sgd", SGD, kvstore, update_on_kvstore=on_store)
        for step in range(3):
            for name, parameter in params.items():
                pair = gradients[2 * step : 2 * step + 2]
                parameter.grad = [mx.nd.array(each[name], ctx=context) for each in pair]
            trainer.step(8)
        for parameter in params.values():
            assert [each.context for each in parameter.list_data()] == [context] * 2
        return {name: [each.asnumpy() for each in p.list_data()] for name, p in params.items()}

    host, there = train(mx.cpu()), train(mx.gpu(0))
    for name, values in there.items():
        for value in values:
            np.testing.assert_allclose(value, host[name][0], rtol=1e-6, atol=1e-6)


def test_a_batch_is_split_onto_gpus(torch: Any) -> None:
    rows = np.arange(10, dtype=np.float32).reshape(5, 2)
    halves = mx.gluon.utils.split_and_load(rows, [mx.gpu(0), mx.gpu(0)], even_split=False)
    assert [each.device.id for each in halves] == [0, 0]
    np.testing.assert_array_equal(np.concatenate([each.get() for each in halves]), rows)
    [array] = mx.gluon.utils.split_and_load(mx.nd.array(rows), [mx.gpu(0)])
    assert array.context == mx.gpu(0) and array.asnumpy().tolist() == rows.tolist()
    halves = mx.gluon.utils.split_and_load(torch.from_numpy(rows), [mx.gpu(0)])
    assert halves[0].is_cuda and halves[0].tolist() == rows.tolist()


@pytest.mark.parametrize("flags", [["--gpus", "0"], ["--gpus", "0,0", "--kv-store", "device"]])
def test_the_example_learns_digits_on_gpus(cupy: Any, flags: list[str]) -> None:
    script = ROOT / "examples" / "image_classification" / "train_mnist.py"
    assert accuracy([sys.executable, str(script), *flags]) >= 0.97


@pytest.mark.parametrize("kvstore", ["dist_sync", "dist_device_sync"])
def test_workers_of_a_job_learn_digits_on_gpus(cupy: Any, kvstore: str) -> None:
    script = ROOT / "examples" / "image_classification" / "train_mnist.py"
    launcher = [sys.executable, str(ROOT / "tools" / "launch.py"), "-n", "2", "-s", "1"]
    words = [sys.executable, str(script), "--gpus", "0,0", "--kv-store", kvstore]
    assert accuracy([*launcher, "--launcher", "local", *words]) >= 0.97


def accuracy(words: list[str]) -> float:
    """What the last line of a script says, which must end well."""
    done = subprocess.run(words, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    [*_, found] = re.findall(r"test accuracy: ([0-9.]+)", done.stdout)
    return float(found)


# -- PyTorch and Horovod --------------------------------------------------------------------


# A GPU has one thread for the backward passes of a process, so ranks here are processes.
TRAIN = """
import sys
sys.path.insert(0, DIRECTORY)
import numpy as np
import torch
import kvstore.torch as kvt
from torch_models import batch, net, weights
kv = kvt.init()

def train(model, optimizer, rank):
    for step in range(20):
        x, y = batch(step, rank, 2)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x.cuda()), y.cuda()).backward()
        optimizer.step()
    return weights(model)

def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

alone = net().cuda()
wanted = train(alone, sgd(alone), -1)
makers = {
    "distributed": lambda model: kvt.DistributedOptimizer(
        sgd(model), model.named_parameters(), kv, bucket_bytes=1000),
    "server": lambda model: kvt.ServerOptimizer(
        model, kv, "sgd", lr=0.05, momentum=0.9, bucket_bytes=1000),
}
for name, make in makers.items():
    model = net().cuda()
    for one, other in zip(train(model, make(model), kv.rank), wanted):
        assert one.is_cuda
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
        both = kv.all_gather(one.cpu().numpy())
        assert both[0].tobytes() == both[1].tobytes()
    print(name, "is right", flush=True)

# rows for the servers
table = torch.nn.Embedding(50, 4, sparse=True).cuda()
torch.nn.init.ones_(table.weight)
optimizer = kvt.ServerOptimizer(table, kvt.init(), "sgd", lr=0.5)  # a store of its own
optimizer.zero_grad()
table(torch.tensor([kv.rank, 7], device="cuda")).sum().backward()
optimizer.step()
expected = np.ones((50, 4), np.float32)
expected[[0, 1, 7]] = [[0.75] * 4, [0.75] * 4, [0.5] * 4]  # gradients are averaged
found = table(torch.arange(50, device="cuda")).detach().cpu().numpy()
np.testing.assert_array_equal(found[[0, 1, 7, 9]], expected[[0, 1, 7, 9]])
print("rows are right", flush=True)
"""


def test_ranks_with_models_on_gpus_train_as_one_process_does(torch: Any) -> None:
    script = TRAIN.replace("DIRECTORY", repr(str(ROOT / "tests" / "inproc")))
    launcher = [sys.executable, str(ROOT / "tools" / "launch.py"), "-n", "2", "-s", "1"]
    words = [*launcher, "--launcher", "local", sys.executable, "-c", script]
    done = subprocess.run(words, capture_output=True, text=True, timeout=200, check=False)
    for said in ("distributed is right", "server is right", "rows are right"):
        assert done.stdout.count(said) == 2, done.stdout + done.stderr


def test_horovods_calls_take_tensors_of_a_gpu_and_return_them_there(torch: Any) -> None:
    import kvstore.horovod.torch as hvd
    from horovod_ranks import ranks_of, values

    def run(rank: int) -> Any:
        own = torch.full((2, 3), rank + 1.0, device="cuda")
        inplace = own.clone()
        hvd.allreduce_(inplace, op=hvd.Sum)
        found = [
            hvd.allreduce(own, op=hvd.Sum),
            hvd.allgather(own)[3:],
            hvd.broadcast(own, 1) + 1,
            hvd.alltoall(own, torch.tensor([1, 1]))[0][1:] + 1,
            inplace,
            hvd.grouped_allreduce([own, own], op=hvd.Sum)[1],
        ]
        assert all(each.is_cuda for each in found)
        return [each.tolist() for each in found]

    with ranks_of(2) as on_all:
        both = values(on_all(run))
    for found in both:
        assert [[value for row in each for value in row] for each in found] == [
            [3.0] * 6,
            [2.0] * 3,
            [3.0] * 6,
            [3.0] * 3,
            [3.0] * 6,
            [3.0] * 6,
        ]


HOROVOD = """
import torch
import kvstore.horovod.torch as hvd
hvd.init()
model = torch.nn.Linear(3, 1).cuda()
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
before = model.weight.detach().clone()
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
model(torch.full((1, 3), hvd.rank() + 1.0, device="cuda")).sum().backward()
optimizer.step()
print("moved by", (before - model.weight).round(decimals=3).tolist(), model.weight.device)
"""


def test_horovods_optimizer_averages_gradients_of_gpus(torch: Any) -> None:
    launcher = [sys.executable, str(ROOT / "tools" / "launch.py"), "-n", "2", "--launcher", "local"]
    words = [*launcher, sys.executable, "-c", HOROVOD]
    done = subprocess.run(words, capture_output=True, text=True, timeout=200, check=False)
    assert done.stdout.count("moved by [[1.5, 1.5, 1.5]] cuda:0") == 2, done.stdout + done.stderr
