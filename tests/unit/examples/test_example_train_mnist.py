"""The training script: what it prints, how it ends, and that it learns."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import mnist
import numpy as np
import pytest
import train_mnist
from progress import ProgressPrinter

from kvstore.model import Progress

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
        (["--cpus", "40"], "leaves none for device"),
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
