"""The training script: what it prints, how it ends, and that it learns."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from pathlib import Path

import mnist
import numpy as np
import pytest
import train_mnist
from progress import ProgressPrinter

from kvstore.mxnet.model import Progress, load_checkpoint

SCRIPT = Path(train_mnist.__file__).resolve()


@pytest.fixture(autouse=True)
def few_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading takes longer than training on as few digits as these tests need."""
    training, test = mnist.load()
    parts = (
        mnist.Digits(training.images[:600], training.labels[:600]),
        mnist.Digits(test.images[:100], test.labels[:100]),
    )
    monkeypatch.setattr(mnist, "load", lambda folder: parts)


def test_lenet_learns_and_the_last_line_is_the_test_accuracy(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert train_mnist.main(["--num-epochs", "3", "--disp-batches", "10", "--lr", "0.1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        "epoch 1/3 batch 10/19",
        "epoch 1/3",
        "epoch 2/3 batch 10/19",
        "epoch 2/3",
        "epoch 3/3 batch 10/19",
        "epoch 3/3",
        "test accuracy",
    ]
    label, accuracy = lines[-1].split(": ")
    assert label == "test accuracy"
    assert len(accuracy) == 6
    assert float(accuracy) > 0.75


@pytest.mark.parametrize(
    "flags",
    [
        ["--network", "mlp", "--kv-store", "device", "--cpus", "2"],
        ["--network", "mlp", "--optimizer", "adam", "--lr", "0.003"],
    ],
)
def test_other_stores_devices_and_optimizers_learn_too(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert train_mnist.main([*flags, "--num-epochs", "5"]) == 0
    assert float(capsys.readouterr().out.splitlines()[-1].split()[-1]) > 0.7


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--kv-store", "nowhere"], "unknown store type"),
        (["--optimizer", "adma"], "no optimizer is named"),
        (["--gpus", "zero"], "--gpus takes numbers"),
        (["--cpus", "0"], "--cpus must be at least 1"),
        (["--cpus", "40"], "leaves device"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_1(
    flags: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train_mnist.main(flags) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert sentence in captured.err


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--monitor", "10"], "--monitor 10 is not possible here: networks show their loss"),
        (["--test-io", "1"], "--test-io 1 is not possible here"),
        (["--macrobatch-size", "64"], "a larger --batch-size"),
        (["--profile-worker-suffix", "x.json"], "not possible here"),
        (["--load-epoch", "3"], "--load-epoch needs the --model-prefix"),
        (["--load-epoch", "0", "--model-prefix", "m"], "must be at least 1"),
        (["--num-epochs", "0"], "must be at least 1"),
        (["--disp-batches", "0"], "must be at least 1"),
        (["--dtype", "int8"], "invalid choice: 'int8'"),
    ],
)
def test_a_flag_that_cannot_be_is_refused_before_anything_is_read(
    flags: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        train_mnist.main(flags)
    assert caught.value.code == 2
    assert sentence in capsys.readouterr().err.splitlines()[-1]


def test_flags_of_the_original_are_taken_at_their_defaults() -> None:
    args = train_mnist.parse(["--monitor", "0", "--test-io", "0", "--profile-server-suffix", ""])
    assert (args.monitor, args.network, args.batch_size) == (0, "lenet", 32)


QUICK = ["--network", "mlp", "--num-epochs", "4", "--disp-batches", "100"]


def test_training_that_goes_on_ends_with_the_bits_of_training_that_never_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [*QUICK, "--mom", "0.9", "--lr-step-epochs", "1,3", "--warmup-epochs", "1"]
    saved = ["--model-prefix", str(tmp_path / "m"), "--save-period", "2"]
    assert train_mnist.main([*flags, *saved]) == 0
    whole = capsys.readouterr().out.splitlines()
    assert sorted(os.listdir(tmp_path)) == [
        f"m-000{epoch}.{kind}" for epoch in (2, 4) for kind in ("params", "states")
    ]
    first = load_checkpoint(tmp_path / "m", 4)[1]
    assert train_mnist.main([*flags, *saved, "--load-epoch", "2"]) == 0
    resumed = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in resumed] == [
        "epoch 3/4",
        "epoch 4/4",
        "test accuracy",
    ]
    assert resumed[-1] == whole[-1]
    second = load_checkpoint(tmp_path / "m", 4)[1]
    assert all(np.array_equal(first[name], value) for name, value in second.items())


def test_a_checkpoint_that_is_missing_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train_mnist.main(["--model-prefix", str(tmp_path / "m"), "--load-epoch", "2"]) == 1
    assert f"cannot read {tmp_path}/m-0002.params: No such file" in capsys.readouterr().err


def test_more_metrics_are_shown_when_they_are_asked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert train_mnist.main([*QUICK, "--top-k", "3", "--loss", "ce"]) == 0
    line = capsys.readouterr().out.splitlines()[-2]
    shown = re.fullmatch(
        r"epoch 4/4: [\d,]+ samples/s, loss ([\d.]+), accuracy ([\d.]+), top_k_accuracy_3 "
        r"([\d.]+), cross-entropy ([\d.]+), on test digits [\d.]+, top_k_accuracy_3 [\d.]+, "
        r"cross-entropy [\d.]+",
        line,
    )
    assert shown is not None, line
    loss, accuracy, among_three, entropy = map(float, shown.groups())
    assert loss == pytest.approx(entropy, abs=1e-3)
    assert accuracy < among_three <= 1.0


@pytest.mark.parametrize(
    "flags",
    [
        ["--dtype", "float64"],
        pytest.param(
            ["--dtype", "float16"],
            marks=pytest.mark.slow(reason="NumPy computes float16 slowly; float64 runs always"),
        ),
        ["--initializer", "xavier"],
        ["--initializer", "orthogonal", "--lr", "0.02"],
        ["--lr-step-epochs", "pow1", "--lr", "0.1"],
        ["--lr-step-epochs", "cosine", "--warmup-epochs", "1", "--warmup-strategy", "constant"],
        ["--optimizer", "adagrad", "--lr", "0.03"],
    ],
)
def test_other_dtypes_initializers_and_schedules_learn_too(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert train_mnist.main([*QUICK, *flags]) == 0
    assert float(capsys.readouterr().out.splitlines()[-1].split()[-1]) > 0.65


def test_a_folder_for_models_that_is_not_there_is_said_before_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train_mnist.main([*QUICK, "--model-prefix", str(tmp_path / "no" / "m")]) == 1
    captured = capsys.readouterr()
    assert f"there is no folder {tmp_path}/no; create it first" in captured.err
    assert captured.out == ""


def test_a_plot_of_the_epochs_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert train_mnist.main([*QUICK, "--plot", str(tmp_path / "run.png")]) == 0
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")


def test_a_plot_that_cannot_be_drawn_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    for path, reason in (
        ("no/run.png", f"there is no folder {tmp_path}/no"),
        ("run.jpgg", "its end must be one of ."),
    ):
        assert train_mnist.main([*QUICK, "--plot", str(tmp_path / path)]) == 1
        captured = capsys.readouterr()
        assert f"cannot draw into {tmp_path}/{path}: {reason}" in captured.err
        assert captured.out == ""  # before training
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert train_mnist.main([*QUICK, "--plot", str(tmp_path / "run.png")]) == 1
    assert "--plot needs matplotlib: pip install matplotlib" in capsys.readouterr().err


def test_ctrl_c_exits_with_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(printer: ProgressPrinter, progress: Progress) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ProgressPrinter, "on_batch", interrupted)
    assert train_mnist.main(["--network", "mlp"]) == 130
    assert capsys.readouterr().err == "train_mnist: interrupted\n"


@pytest.mark.process
def test_the_script_runs_from_any_folder_without_being_installed(tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--network", "mlp", "--num-epochs", "1"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1].startswith("test accuracy: 0.")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def at(nbatch: int, eval_accuracy: float | None = None) -> Progress:
    return Progress(0, nbatch, 4, 1234.5, 0.5, 0.875, eval_accuracy)


def test_a_terminal_gets_a_bar_that_is_drawn_over(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(np.arange(10, 20))
    columns = 79
    size = os.terminal_size((columns + 1, 24))
    monkeypatch.setattr("progress.shutil.get_terminal_size", lambda: size)
    monkeypatch.setattr("progress.time.monotonic", lambda: next(clock))
    stream = Terminal()
    printer = ProgressPrinter(stream, rank=0, num_epochs=2, disp_batches=1)
    printer.on_batch(at(1))
    printer.on_batch(at(2))
    printer.on_epoch(at(4, 0.75))
    numbers = "1,234 samples/s, loss 0.5000, accuracy 0.8750"
    first = f"epoch 1/2 [#####---------------] {numbers}"
    second = f"epoch 1/2 [##########----------] {numbers}"
    last = f"epoch 1/2: {numbers}, on test digits 0.7500\n"
    assert stream.getvalue() == (
        "\r"
        + first[:columns]
        + "\r"
        + second[:columns]
        + "\r"
        + " " * len(second[:columns])
        + "\r"
        + last
    )


def test_a_bar_is_not_drawn_more_often_than_one_can_see(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("progress.time.monotonic", lambda: 10.0)
    stream = Terminal()
    printer = ProgressPrinter(stream, rank=0, num_epochs=1, disp_batches=1)
    for nbatch in (1, 2, 3, 4):
        printer.on_batch(at(nbatch))
    assert stream.getvalue().count("\r") == 1
    printer.leave_line()
    printer.leave_line()
    assert stream.getvalue().endswith("\n")
    assert stream.getvalue().count("\n") == 1


@pytest.mark.parametrize(("stream", "rank"), [(io.StringIO(), 0), (Terminal(), 1)])
def test_pipes_and_other_ranks_get_plain_lines(stream: io.StringIO, rank: int) -> None:
    printer = ProgressPrinter(stream, rank, num_epochs=1, disp_batches=2)
    for nbatch in (1, 2, 3, 4):
        printer.on_batch(at(nbatch))
    printer.leave_line()
    assert stream.getvalue() == (
        "epoch 1/1 batch 2/4: 1,234 samples/s, loss 0.5000, accuracy 0.8750\n"
    )
