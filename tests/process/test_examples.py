"""Each example as a user runs it: by the launcher, with two workers and one server."""

from __future__ import annotations

import collections
import importlib.util
import re
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from job import MARK, ROOT, MakeJob, clean_environment, free_port, needs_proc
from torch_jobs import start_torchrun

LIMIT_S = 240.0
"""Some train for ten seconds on two cores of their own, and other tests run beside them."""

pytestmark = [pytest.mark.process, needs_proc, pytest.mark.timeout(LIMIT_S + 10)]

# Of the examples, push_pull.py, custom_optimizer.py, train_mnist.py and ptdist.py run always.
slow = pytest.mark.slow(reason="an example that trains; the tests of the stores make its calls")
needs_jax = pytest.mark.skipif(
    importlib.util.find_spec("jax") is None, reason="JAX is not installed"
)
needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="PyTorch is not installed"
)


def launch(
    make_job: MakeJob,
    script: str,
    *flags: str,
    options: tuple[str, ...] = (),
    num_workers: int = 2,
    num_servers: int = 1,
) -> dict[int, list[str]]:
    """Run a script to its good end; returns the lines of each worker by its rank."""
    job = make_job(num_workers, num_servers)
    done = subprocess.run(
        [
            *(sys.executable, str(ROOT / "tools" / "launch.py")),
            *("-n", str(num_workers), "-s", str(num_servers)),
            *("--launcher", "local", *options, sys.executable, script, *flags),
        ],
        cwd=ROOT,
        env={**clean_environment(), MARK: job.mark, "TMPDIR": str(job.directory)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines: dict[int, list[str]] = collections.defaultdict(list)
    for line in done.stdout.splitlines():
        begin, _, text = line.partition("] ")
        lines[int(begin.removeprefix("[worker "))].append(text)
    return lines


def alone(script: str, *flags: str) -> list[str]:
    """Run a script without the launcher; returns its lines."""
    done = subprocess.run(
        [sys.executable, script, *flags],
        cwd=ROOT,
        env={**clean_environment(), "MASTER_PORT": str(free_port())},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def test_the_page_of_examples_has_a_command_for_each() -> None:
    page = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    runnable = [
        str(path.relative_to(ROOT))
        for path in (ROOT / "examples").rglob("*.py")
        if 'if __name__ == "__main__":' in path.read_text(encoding="utf-8")
    ]
    assert len(runnable) >= 18
    starters = r"(python|torchrun --nproc-per-node \d)"
    assert [path for path in runnable if not re.search(f"{starters} {path}", page)] == []
    for path in re.findall(r"\]\(([^)]+)\)", page):
        assert (ROOT / "examples" / path).exists()


def everywhere(number: float) -> str:
    return str([[float(number)] * 3] * 2)


PUSH_PULL = "examples/kvstore/push_pull.py"


@pytest.mark.parametrize("name", ["local", "device"])
def test_push_pull_shows_sums_over_devices(name: str) -> None:
    assert alone(PUSH_PULL, name) == [
        f"init: {everywhere(2)}",
        f"push and pull: {everywhere(3)} {everywhere(3)}",
        f"a list of keys: {everywhere(2)} {everywhere(8)}",
        f"pushpull: {everywhere(1)}",
        f"updated: {everywhere(8 - 2 * 2)}",
    ]


def test_push_pull_of_two_workers_shows_sums_over_both(make_job: MakeJob) -> None:
    assert launch(make_job, PUSH_PULL, "dist_sync") == {
        0: [
            f"init: {everywhere(2)}",
            f"push and pull: {everywhere(6)} {everywhere(6)}",
            f"a list of keys: {everywhere(4)} {everywhere(16)}",
            f"pushpull: {everywhere(1 + 2)}",
            f"updated: {everywhere(16 - 2 * 4)}",
        ]
    }


@slow
def test_gradients_with_priorities_train(make_job: MakeJob) -> None:
    lines = launch(make_job, "examples/kvstore/priority.py", "dist_sync")[0]
    first, last = (float(line.rpartition(" ")[2]) for line in (lines[0], lines[-1]))
    assert first > 1.0
    assert last < 0.05


@slow
def test_an_embedding_learns_with_the_rows_of_its_batches_alone() -> None:
    script = "examples/kvstore/embedding.py"
    assert len((ROOT / script).read_text(encoding="utf-8").splitlines()) <= 80
    *epochs, traffic = alone(script, "--users", "20000", "--items", "5000", "--epochs", "4")
    errors = [float(line.split()[-1]) for line in epochs]
    assert len(errors) == 4
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.5 * errors[0]
    assert float(traffic.split()[1]) < 12


@slow
def test_float16_weights_with_masters_learn_like_float32_ones(make_job: MakeJob) -> None:
    script = "examples/kvstore/mixed_precision.py"
    assert len((ROOT / script).read_text(encoding="utf-8").splitlines()) <= 80
    wide, half, lone = [float(line.split()[-1]) for line in alone(script)]
    assert max(wide, half) < 0.05
    assert lone > 1
    flags = ["--steps", "1000", "--rate", "0.008", "--kv-store", "dist_sync"]
    wide, half, lone = [float(line.split()[-1]) for line in launch(make_job, script, *flags)[0]]
    assert max(wide, half) < 0.1
    assert lone > max(wide, half)


COMPRESSION = "examples/kvstore/compression.py"


def check_codecs(lines: list[str]) -> None:
    found = [re.fullmatch(r"(\S+): loss ([\d.]+), ([\d.]+) times fewer .*", line) for line in lines]
    assert [match and match[1] for match in found] == [
        *("none", "fp16", "int8", "2bit", "topk", "topk+fp16")
    ]
    losses = [float(match[2]) for match in found if match]
    ratios = [float(match[3]) for match in found if match]
    assert max(losses) < 1.1 * losses[0] < 0.03
    assert ratios == pytest.approx([1, 2, 3.9, 15.4, 9.8, 12.9], abs=0.1)


@slow
def test_codecs_reach_the_loss_of_float32_with_fewer_bytes() -> None:
    assert len((ROOT / COMPRESSION).read_text(encoding="utf-8").splitlines()) <= 80
    check_codecs(alone(COMPRESSION))


@slow
def test_codecs_of_two_workers_reach_the_loss_of_float32(make_job: MakeJob) -> None:
    check_codecs(launch(make_job, COMPRESSION, "--kv-store", "dist_sync")[0])


@slow
def test_workers_train_an_embedding_whose_rows_lie_on_two_servers(make_job: MakeJob) -> None:
    """The tables are larger than a chunk, so that both servers have rows of them."""
    flags = ("--users", "60000", "--items", "40000", "--epochs", "3", "--ratings", "60000")
    lines = launch(
        make_job,
        "examples/kvstore/embedding.py",
        *(*flags, "--kv-store", "dist_sync"),
        num_servers=2,
    )
    for rank in range(2):
        *epochs, traffic = lines[rank]
        errors = [float(line.split()[-1]) for line in epochs]
        assert len(errors) == 3
        assert errors == sorted(errors, reverse=True)
        assert errors[-1] < 0.9 * errors[0]
        assert float(traffic.split()[1]) < 2


@slow
def test_sparse_keys_reach_the_loss_of_dense_ones_with_few_of_the_bytes(make_job: MakeJob) -> None:
    script = "examples/kvstore/dense_or_sparse.py"
    assert len((ROOT / script).read_text(encoding="utf-8").splitlines()) <= 80
    sizes = ("--users", "60000", "--items", "40000", "--ratings", "8000", "--batch-size", "200")
    lines = launch(make_job, script, *sizes, num_servers=2)
    assert list(lines) == [0]
    found = [re.fullmatch(r"(\S+): error (\S+), (\S+) s, (\S+) MB", line) for line in lines[0]]
    (dense, dense_error, _, dense_mb), (sparse, sparse_error, _, sparse_mb) = [
        match.groups() for match in found if match
    ]
    assert (dense, sparse) == ("dense", "sparse")
    assert float(sparse_error) == float(dense_error) < 1.6
    assert 0 < float(sparse_mb) < 0.02 * float(dense_mb)


@slow
def test_a_growing_table_learns_of_those_who_come_again_and_stays_within_its_limit() -> None:
    script = "examples/kvstore/table.py"
    assert len((ROOT / script).read_text(encoding="utf-8").splitlines()) <= 80
    *quarters, exports, rows, memory = alone(script)
    errors = [float(re.findall(r"error ([\d.]+)", line)[0]) for line in quarters]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.2 * errors[0]
    assert quarters[-1].endswith(" 1200 users")
    whole, changes = (int(number) for number in re.findall(r"\d+", exports))
    assert changes < whole
    made, evicted, *_ = (int(number) for number in re.findall(r"\d+", rows))
    # RejectedConnections, of whom there were 200,000, got no rows.
    assert made < 2000 and made - evicted == 1200
    used, limit = (int(number) for number in re.findall(r"\d+", memory))
    assert used <= limit


@slow
def test_a_growing_table_on_two_servers_learns_from_two_workers(make_job: MakeJob) -> None:
    lines = launch(make_job, "examples/kvstore/table.py", "--kv-store", "dist_sync", num_servers=2)
    for rank in range(2):
        *quarters, rows, memory = lines[rank]
        if rank == 0:
            whole, changes = (int(number) for number in re.findall(r"\d+", quarters.pop()))
            assert 1000 < changes < whole
        errors = [float(re.findall(r"error ([\d.]+)", line)[0]) for line in quarters]
        assert len(errors) == 4
        assert errors[-1] < 0.2 * errors[0]
        made, _ = (int(number) for number in re.findall(r"\d+", rows)[:2])
        assert made < 2000
        used, limit = (int(number) for number in re.findall(r"\d+", memory))
        assert used <= limit


@slow
def test_asynchronous_gradients_are_stale_and_still_find_the_line(make_job: MakeJob) -> None:
    lines = launch(make_job, "examples/kvstore/async_sgd.py")
    num_stale = 0
    for rank in range(2):
        counted, found = lines[rank]
        found_counts = re.findall(r"(\d+) by (\d+)", counted)
        counts = {int(updates): int(count) for count, updates in found_counts}
        assert sum(counts.values()) == 300
        num_stale += sum(count for updates, count in counts.items() if updates > 0)
        before, _, weights = found.partition(" updates ")
        assert before == f"worker {rank}: after 600"
        assert np.allclose(np.array(weights[1:-1].split(", "), float), [2.0, -3.4, 0.7], atol=0.1)
    assert num_stale > 0
    assert lines[0][1].partition(": ")[2] == lines[1][1].partition(": ")[2]


@pytest.mark.slow(reason="test_server_import.py has such an optimizer always")
def test_servers_update_by_an_optimizer_that_they_import(make_job: MakeJob) -> None:
    script, module = "examples/kvstore/custom_optimizer.py", "examples.kvstore.my_optimizer"
    lines = launch(make_job, script, options=("--server-import", module))
    assert lines[0][:2] == ["step 1: [0.02, -0.02, 0.02, 0.0]", "step 100: [1.0, -0.48, 0.24, 0.0]"]
    assert [lines[rank][-1] for rank in range(2)] == [
        f"worker {rank} of 2: 0.020 from the target" for rank in range(2)
    ]
    assert alone(script, "local")[:2] == lines[0][:2]


def test_the_optimizer_of_ones_own_is_the_formula_that_it_cites(make_job: MakeJob) -> None:
    """In a process of its own, since it registers a name."""
    code = f"""
sys.path.insert(0, {str(ROOT / "examples" / "kvstore")!r})
import my_optimizer
lion = mx.optimizer.create("lion", learning_rate=0.1, beta1=0.9, beta2=0.8, wd=0.5, rescale_grad=2)
kv = mx.kvstore.create("local")
kv.set_optimizer(lion)
w, m = np.array([1.0, -2.0, 3.0]), np.zeros(3)
kv.init("w", w)
for grad in np.random.default_rng(0).normal(size=(20, 3)):
    g = 2 * grad
    w = w - 0.1 * (np.sign(0.9 * m + 0.1 * g) + 0.5 * w)
    m = 0.8 * m + 0.2 * g
    kv.push("w", grad)
    assert np.allclose(kv.pull("w"), w, rtol=1e-12), (kv.pull("w"), w)
"""
    worker = make_job(1, 1).worker(None, code)
    assert worker.wait() == 0, worker.text


@pytest.mark.slow(reason="an example that trains; the smallest one runs always")
def test_an_mlp_learns_digits_with_two_workers(make_job: MakeJob) -> None:
    flags = ["--network", "mlp", "--kv-store", "dist_sync", "--num-epochs", "2", "--lr", "0.1"]
    lines = launch(make_job, "examples/image_classification/train_mnist.py", *flags)
    accuracies = {lines[rank][-1] for rank in range(2)}
    assert len(accuracies) == 1
    assert float(accuracies.pop().partition("test accuracy: ")[2]) > 0.8


@slow
@needs_torch
def test_pytorch_with_the_store_as_an_all_reduce_reads_digits(make_job: MakeJob) -> None:
    lines = launch(make_job, "examples/pytorch/sync_sgd_pytorch.py")
    accuracies = [lines[rank][-1].partition(f"worker {rank} of 2: accuracy ")[2] for rank in (0, 1)]
    assert accuracies[0] == accuracies[1]
    assert float(accuracies[0]) >= 0.97


@slow
@needs_torch
def test_pytorch_with_the_optimizer_on_the_servers_reads_digits(make_job: MakeJob) -> None:
    lines = launch(make_job, "examples/pytorch/server_optimizer.py")
    accuracies = [lines[rank][-1].partition(f"worker {rank} of 2: accuracy ")[2] for rank in (0, 1)]
    assert accuracies[0] == accuracies[1]
    assert float(accuracies[0]) >= 0.97


def check_accuracy(line: str) -> None:
    share = re.fullmatch(r"test accuracy (0\.\d+) on 2 ranks", line)
    assert share is not None, line
    assert float(share[1]) >= 0.97


@slow
@needs_torch
def test_a_script_for_horovod_reads_digits(make_job: MakeJob) -> None:
    lines = launch(make_job, "examples/horovod/mnist.py")
    check_accuracy(lines[0][-1])


@slow
@needs_torch
def test_distributed_data_parallel_reads_digits(make_job: MakeJob) -> None:
    lines = launch(make_job, "examples/pytorch/ddp_mnist.py")
    check_accuracy(lines[0][-1])
    assert lines[1] == []


@slow
@needs_torch
def test_distributed_data_parallel_reads_digits_in_ranks_that_it_starts() -> None:
    check_accuracy(alone("examples/pytorch/ddp_mnist.py", "--ranks", "2")[-1])


@slow
@needs_torch
def test_synchronous_sgd_by_all_reduce_reads_digits(make_job: MakeJob) -> None:
    lines = launch(make_job, "examples/pytorch/train_dist.py")
    check_accuracy(lines[0][-1])
    assert [line.partition(":")[0] for line in lines[1]] == [f"rank 1, epoch {n}" for n in range(5)]


@slow
@needs_jax
@pytest.mark.parametrize("flags", [(), ("--on-servers",)], ids=["averaged", "on servers"])
def test_workers_in_jax_read_digits(make_job: MakeJob, flags: tuple[str, ...]) -> None:
    lines = launch(make_job, "examples/jax/mnist.py", *flags)
    found = [re.fullmatch(r"test accuracy (0\.\d+) on worker (\d) of 2", lines[rank][-1])
             for rank in (0, 1)]  # fmt: skip
    accuracies = [match[1] for match in found if match]
    assert len(accuracies) == 2 and accuracies[0] == accuracies[1], lines
    assert float(accuracies[0]) >= 0.97


@needs_torch
@pytest.mark.slow(reason="an example that imports PyTorch; test_torch_jobs.py makes its calls")
def test_the_first_steps_of_torch_distributed(make_job: MakeJob) -> None:
    assert launch(make_job, "examples/pytorch/ptdist.py", num_workers=3) == {
        rank: [
            f"rank {rank} has data {data}",
            f"rank {rank} has the sums 0 of zeros and 3 of ranks",
        ]
        for rank, data in enumerate((1, 1, 0))
    }


@slow
@needs_torch
@pytest.mark.parametrize("script", ["pytorch/ddp_mnist.py", "horovod/mnist.py"])
def test_ranks_of_an_example_that_torchrun_starts(make_job: MakeJob, script: str) -> None:
    torchrun = start_torchrun(make_job(2), str(ROOT / "examples" / script), "--epochs=1")
    assert torchrun.wait(LIMIT_S) == 0, torchrun.text
    [share] = re.findall(r"test accuracy (0\.\d+) on 2 ranks", torchrun.text)
    assert float(share) > 0.9


@slow
@needs_torch
def test_the_all_reduce_script_says_how_to_call_it_and_refuses_no_epochs() -> None:
    """Both in one process, which imports PyTorch once."""
    code = """
import runpy, sys
script = sys.argv[1]
for arguments in ["--help"], ["local", "--epochs", "0"]:
    sys.argv = [script, *arguments]
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as ended:
        print("exit", ended.code)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, ROOT / "examples/pytorch/sync_sgd_pytorch.py"],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=True,
    )
    helped, refused = done.stdout.split("exit ")[:2]
    assert "--epochs EPOCHS" in helped
    assert [line for line in done.stdout.splitlines() if line.startswith("exit")] == [
        "exit 0",
        "exit 2",
    ]
    assert "usage" not in refused
    assert "--epochs must be at least 1" in done.stderr


def test_without_pytorch_the_script_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    script = ROOT / "examples" / "pytorch" / "sync_sgd_pytorch.py"
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit, match="PyTorch is missing; install it: pip install torch"):
        runpy.run_path(str(script), run_name="__main__")
    assert len(script.read_text(encoding="utf-8").splitlines()) <= 80


TWENTY_STEPS = f"""
import sys
sys.path.insert(0, {str(ROOT / "examples" / "pytorch")!r})
import sync_sgd_pytorch as example
training, _ = example.mnist.load()
digits = example.mnist.Digits(training.images[:1280], training.labels[:1280])
def twenty_steps(kv, batch):
    example.BATCH = batch
    example.torch.set_num_threads(1)
    model = example.lenet(seed=3 + kv.rank)
    example.train(kv, model, digits, epochs=1)
    return {{name: value.numpy() for name, value in model.state_dict().items()}}
"""


@slow
@needs_torch
def test_two_synchronous_workers_equal_one_process_with_the_joined_batches(
    make_job: MakeJob,
) -> None:
    job = make_job(2, 1)
    launcher = job.launch(
        TWENTY_STEPS
        + """
with mx.kvstore.create("dist_sync") as kv:
    np.savez(f"two-{kv.rank}.npz", **twenty_steps(kv, batch=32))
"""
    )
    assert launcher.wait(40) == 0, launcher.text
    single = job.worker(
        None,
        TWENTY_STEPS
        + """
with mx.kvstore.create("local") as kv:
    np.savez("one.npz", **twenty_steps(kv, batch=64))
""",
    )
    assert single.wait(40) == 0, single.text
    two, other, one = (
        dict(np.load(job.directory / name)) for name in ("two-0.npz", "two-1.npz", "one.npz")
    )
    assert len(one) == 8
    for name, expected in one.items():
        assert np.array_equal(two[name], other[name])
        assert np.abs(two[name] - expected).max() < 1e-5


TRAIN_CIFAR10 = "examples/image_classification/train_cifar10.py"
SMALL = [
    *("--benchmark", "1", "--num-examples", "320", "--batch-size", "32", "--num-threads", "1"),
    *("--num-epochs", "2", "--disp-batches", "2"),
]


def check_lines(lines: dict[int, list[str]], title: str, shown: list[str]) -> None:
    """Each of two epochs shows these batches; worker 0 adds the network, and the tests."""
    own = [f"epoch {epoch}/2{at}" for epoch in (1, 2) for at in (*shown, "")]
    begins = {rank: [line.partition(": ")[0] for line in lines[rank]] for rank in range(2)}
    assert begins[1] == own
    half = len(own) // 2
    assert begins[0] == [title, *own[:half], "epoch 1/2", *own[half:], "epoch 2/2"]
    assert re.fullmatch(r"epoch 2/2: test accuracy: [01]\.\d{4}", lines[0][-1])


@slow
@needs_torch
@pytest.mark.parametrize(
    ("store", "network", "num_layers", "more"),
    [
        ("dist_device_sync", "resnext", "11", ("--cpus", "2")),
        ("dist_async", "resnet", "8", ()),
    ],
)
def test_a_residual_network_trains_with_two_workers(
    make_job: MakeJob, store: str, network: str, num_layers: str, more: tuple[str, ...]
) -> None:
    flags = ["--kv-store", store, "--network", network, "--num-layers", num_layers, *more]
    lines = launch(make_job, TRAIN_CIFAR10, *SMALL, *flags)
    check_lines(lines, f"{network}-{num_layers}", [" batch 2/5", " batch 4/5"])


@slow
@needs_torch
def test_synchronous_training_repeats_and_goes_on_to_the_last_bit(
    make_job: MakeJob, tmp_path: Path
) -> None:
    flags = ["--kv-store", "dist_sync", "--network", "resnet", "--num-layers", "8"]
    flags += ["--num-batches", "3", "--model-prefix", str(tmp_path / "net")]
    lines = launch(make_job, TRAIN_CIFAR10, *SMALL, *flags)
    saved = [line for line in lines[0] if line.startswith("saved ")]
    assert saved == [f"saved {tmp_path / 'net'}-000{epoch}.params" for epoch in (1, 2)]
    lines[0] = [line for line in lines[0] if line not in saved]
    check_lines(lines, "resnet-8", [" batch 2/3"])
    whole = (tmp_path / "net-0002.params").read_bytes()
    launch(make_job, TRAIN_CIFAR10, *SMALL, *flags, "--load-epoch", "1")
    assert (tmp_path / "net-0002.params").read_bytes() == whole


@slow
@needs_torch
def test_workers_that_would_have_different_batches_do_not_begin(make_job: MakeJob) -> None:
    job = make_job(2, 1)
    launcher = job.launch(
        f"""
sys.path.insert(0, {str(ROOT / "examples" / "image_classification")!r})
import torch_training
kv = mx.kvstore.create("dist_async")
same = {{"images": 320}}
hosts = [torch_training.compare_workers(kv, name, same) for name in ("a", f"host {{kv.rank}}")]
assert hosts == [2, 1], hosts
try:
    torch_training.compare_workers(kv, "a", {{**same, "batches": 5 + kv.rank}})
except PSError as error:
    print(error)
kv.barrier()
"""
    )
    assert launcher.wait(40) == 0, launcher.text
    sentence = "the workers differ in the number of batches: by rank, [5, 6]. Start all with the"
    assert launcher.text.count(sentence) == 2
