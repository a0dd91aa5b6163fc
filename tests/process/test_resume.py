"""Training that goes on in a new job: new processes, another number of servers, the same bits."""

from __future__ import annotations

import signal
import time

import pytest
from job import MakeJob, assert_no_traceback, needs_proc

from kvstore.mxnet.model import load_checkpoint

pytestmark = [pytest.mark.process, needs_proc]

MODEL = """
import zlib
from kvstore.model import FeedForward

class Softmax:
    def init_params(self, shape, rng):
        return {"weight": rng.normal(0, 0.1, (3, *shape)).astype("f4"), "bias": np.zeros(3, "f4")}

    def predict(self, params, x):
        scores = np.exp(x @ params["weight"].T + params["bias"])
        return scores / scores.sum(axis=1, keepdims=True)

    def loss_and_gradients(self, params, x, y):
        wrong = self.predict(params, x)
        rows = np.arange(len(y))
        loss, right = -np.log(wrong[rows, y]).sum(), (wrong.argmax(axis=1) == y).sum()
        wrong[rows, y] -= 1
        return loss, right, {"weight": wrong.T @ x, "bias": wrong.sum(axis=0)}

rng = np.random.default_rng(1)
y = rng.integers(0, 3, 90)
x = (rng.normal(0, 0.5, (90, 4)) + 2 * np.eye(4)[y]).astype("f4")
settings = dict(numpy_batch_size=8, optimizer=OPTIMIZER, learning_rate=0.1, NUMBERS)

def show(model):
    print(f"accuracy {model.score(x, y):.2f}")
    for name in sorted(model.arg_params):
        print(name, zlib.crc32(model.arg_params[name].tobytes()))
"""

WHOLE = """
model = FeedForward(Softmax(), num_epoch=4, **settings)
model.fit(x, y, kvstore="dist_sync")
show(model)
model = FeedForward(Softmax(), num_epoch=3, **settings)
save = mx.callback.do_checkpoint(PREFIX, period=2)
model.fit(x, y, kvstore="dist_sync", epoch_end_callback=save)
"""

RESUMED = """
model = FeedForward.load(PREFIX, 2, symbol=Softmax(), num_epoch=4, **settings)
model.fit(x, y, kvstore="dist_sync")
show(model)
"""


SAVING = """
from kvstore.model import save_checkpoint
values = np.zeros(300_000, "f4")
while True:
    save_checkpoint(PREFIX, 1, None, {"a": values, "b": values})
    print("saved", flush=True)
    values += 1
"""


def test_whoever_is_killed_while_saving_leaves_a_whole_file(make_job: MakeJob) -> None:
    """Each time at another moment; the file is that of the last save or the one before."""
    job = make_job(1, 1)
    prefix = job.directory / "model"
    for turn in range(6):
        saver = job.worker(0, f"PREFIX = {str(prefix)!r}\n{SAVING}")
        saver.wait_for("saved")
        time.sleep(0.0061 * turn)
        saver.send(signal.SIGKILL)
        saver.wait()
        saved = saver.text.count("saved")
        _, params, _ = load_checkpoint(prefix, 1)
        assert set(params["a"].tolist()) == set(params["b"].tolist())
        assert set(params["a"].tolist()) <= {saved - 1, saved}


@pytest.mark.parametrize(
    ("optimizer", "numbers"),
    [
        ("sgd", "momentum=0.9, lr_scheduler=mx.lr_scheduler.FactorScheduler(step=7, factor=0.8)"),
        pytest.param(
            "adam", "wd=0.001", marks=pytest.mark.slow(reason="another optimizer runs always")
        ),
    ],
)
def test_a_new_job_with_more_servers_goes_on_to_the_bits_of_the_one_that_never_stopped(
    make_job: MakeJob, optimizer: str, numbers: str
) -> None:
    model = MODEL.replace("OPTIMIZER", repr(optimizer)).replace("NUMBERS", numbers)
    first, second = make_job(2, 1), make_job(2, 2)
    prefix = repr(str(first.directory / "model"))
    model = f"PREFIX = {prefix}\n{model}"
    lines = []
    for job, code in ((first, WHOLE), (second, RESUMED)):
        job.service()
        workers = job.workers(model + code)
        assert set(job.wait_all(40)) == {0}, job.output()
        assert_no_traceback(*job.processes)
        lines.append(sorted(line for worker in workers for line in worker.lines))
    files = sorted(path.name for path in first.directory.glob("model*"))
    assert files == ["model-0002.params", "model-0002.states"]
    whole, resumed = lines
    assert whole == resumed
    assert sum("weight" in line for line in whole) == 2
    assert len(set(whole)) == 3, "both workers end with the same weights"
    assert float(whole[0].split()[-1]) > 0.9
