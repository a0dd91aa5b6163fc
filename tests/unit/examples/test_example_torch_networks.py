"""The CIFAR-10 example: its networks, its reader, and its loop on stores of one process."""

from __future__ import annotations

import dataclasses
import io
import os
from pathlib import Path
from typing import Any

import cifar
import numpy as np
import pytest

from pslite.errors import UsageError

pytest.importorskip("torch")

import torch
import torch_resnet
import torch_training
import train_cifar10


def layers(network: torch.nn.Module) -> int:
    """Layers on the longest path: a convolution of a shortcut goes beside others."""
    weighted = (torch.nn.Conv2d, torch.nn.Linear)
    return sum(
        isinstance(module, weighted) and ".shortcut" not in name
        for name, module in network.named_modules()
    )


# -- networks ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_layers", "millions"), [(20, 0.27), (32, 0.46), (44, 0.66), (56, 0.85), (110, 1.7)]
)
def test_resnets_have_the_parameters_that_the_paper_says(num_layers: int, millions: float) -> None:
    """Table 6 of arXiv 1512.03385."""
    network = torch_resnet.resnet(num_layers)
    assert layers(network) == num_layers
    digits = 1 if num_layers == 110 else 2
    assert round(torch_resnet.num_parameters(network) / 1e6, digits) == millions


@pytest.mark.parametrize(("num_group", "millions"), [(8, 34.4), (16, 68.1)])
def test_resnexts_have_the_parameters_that_the_paper_says(num_group: int, millions: float) -> None:
    """Table 7 of arXiv 1611.05431, which cuts 68.155 down to 68.1."""
    with torch.device("meta"):
        network = torch_resnet.resnext(29, num_group=num_group, group_width=64)
    assert layers(network) == 29
    assert torch_resnet.num_parameters(network) // 10**5 / 10 == millions


@pytest.mark.parametrize(
    ("num_layers", "num_grouped"), [(20, 0), (50, 0), (110, 0), (29, 9), (164, 54), (56, 0)]
)
def test_resnexts_of_the_original_have_groups_in_units_of_three_layers(
    num_layers: int, num_grouped: int
) -> None:
    with torch.device("meta"):
        network = torch_resnet.resnext(num_layers)
    convolutions = [module for module in network.modules() if isinstance(module, torch.nn.Conv2d)]
    assert layers(network) == num_layers
    assert [module.groups for module in convolutions if module.groups > 1] == [32] * num_grouped
    assert [module.in_channels for module in convolutions if module.groups > 1] == [
        channels for channels in (32, 64, 128) for _ in range(num_grouped // 3)
    ]


def test_resnext_110_is_resnet_110_with_convolutions_in_three_shortcuts() -> None:
    extra = sum(
        inputs * outputs + 2 * outputs for inputs, outputs in [(16, 16), (16, 32), (32, 64)]
    )
    with torch.device("meta"):
        sizes = [torch_resnet.num_parameters(make(110)) for make in torch_resnet.NETWORKS.values()]
    assert sizes[1] - sizes[0] == extra


@pytest.mark.parametrize(
    ("network", "num_layers"), [("resnet", 8), ("resnext", 8), ("resnext", 11)]
)
def test_a_network_gives_a_score_for_each_class_and_a_gradient_for_each_parameter(
    network: str, num_layers: int
) -> None:
    module = torch_resnet.create(network, num_layers, 32, seed=1)
    sizes = []
    for stage in module.stages:
        stage.register_forward_hook(lambda _, __, maps: sizes.append(tuple(maps.shape[2:])))
    scores = module(torch.randn(2, 3, 32, 32))
    assert (scores.shape, scores.dtype) == ((2, 10), torch.float32)
    assert sizes == [(32, 32), (16, 16), (8, 8)]
    gradients = torch.autograd.grad(scores.square().sum(), list(module.parameters()))
    assert all(gradient.abs().sum() > 0 for gradient in gradients)


def test_a_padded_shortcut_keeps_every_second_pixel_and_adds_zeros() -> None:
    maps = torch.arange(2 * 4 * 4, dtype=torch.float32).reshape(1, 2, 4, 4)
    result = torch_resnet.PaddedShortcut(3, 2)(maps)
    assert result.shape == (1, 5, 2, 2)
    assert result[0, 0].tolist() == [[0, 2], [8, 10]]
    assert result[0, 2:].abs().sum() == 0


@pytest.mark.parametrize(
    ("network", "num_layers", "sentence"),
    [
        ("resnet", 29, "6n . 2 layers .* --num-layers 29"),
        ("resnet", 2, "--num-layers 2"),
        ("resnext", 30, "9n . 2 layers .* or 6n . 2 .* --num-layers 30"),
        ("resnext", 2, "--num-layers 2"),
    ],
)
def test_a_depth_that_no_formula_gives_is_an_error(
    network: str, num_layers: int, sentence: str
) -> None:
    with pytest.raises(UsageError, match=sentence):
        torch_resnet.create(network, num_layers, 32, seed=0)


def test_groups_that_do_not_divide_the_channels_are_an_error() -> None:
    with pytest.raises(UsageError, match=r"32 channels .* into 5 groups"):
        torch_resnet.resnext(29, num_group=5)


def test_equal_seeds_give_equal_networks_and_leave_other_random_numbers_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    first, second, other = (
        torch_resnet.create("resnet", 8, 32, seed).classifier.weight for seed in (1, 1, 2)
    )
    assert torch.rand(1) == expected
    assert torch.equal(first, second)
    assert not torch.equal(first, other)


def test_only_filters_and_matrices_decay() -> None:
    network = torch_resnet.resnet(8)
    factors = torch_resnet.decay_factors(network)
    weighted = (torch.nn.Conv2d, torch.nn.Linear)
    filters = {
        f"{name}.weight" for name, module in network.named_modules() if isinstance(module, weighted)
    }
    assert set(factors.values()) == {0.0}
    assert factors.keys() == {name for name, _ in network.named_parameters()} - filters


# -- images --------------------------------------------------------------------------------


def records(labels: list[int], seed: int = 0) -> bytes:
    """A file's content: each label, then random pixels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (len(labels), 3072), dtype=np.uint8)
    return np.column_stack([np.array(labels, np.uint8), pixels]).tobytes()


def write_cifar(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for number, name in enumerate((*cifar.TRAINING_FILES, cifar.TEST_FILE)):
        (folder / name).write_bytes(records([number, 9], seed=number))


@pytest.mark.parametrize("inside", ["", cifar.FOLDER_IN_ARCHIVE])
def test_the_six_files_are_read_in_order(tmp_path: Path, inside: str) -> None:
    write_cifar(tmp_path / inside)
    training, test = cifar.load(tmp_path)
    assert training.labels.tolist() == [0, 9, 1, 9, 2, 9, 3, 9, 4, 9]
    assert test.labels.tolist() == [5, 9]
    assert (training.pixels.shape, training.pixels.dtype.name) == ((10, 3, 32, 32), "uint8")
    second = (tmp_path / inside / cifar.TRAINING_FILES[1]).read_bytes()
    assert training.pixels[2].tobytes() == second[1:3073]


def test_a_pixel_stands_at_its_colour_row_and_column(tmp_path: Path) -> None:
    data = bytearray(3073)
    data[1 + 1024 * 2 + 32 * 5 + 7] = 200  # blue, row 5, column 7
    (tmp_path / "one.bin").write_bytes(data)
    assert np.argwhere(cifar.read_file(tmp_path / "one.bin").pixels).tolist() == [[0, 2, 5, 7]]


def test_missing_files_are_named_with_where_to_get_them(tmp_path: Path) -> None:
    write_cifar(tmp_path)
    (tmp_path / "data_batch_3.bin").unlink()
    with pytest.raises(
        UsageError, match=r"^data_batch_3.bin not found in .*kriz/cifar.*--data-dir"
    ):
        cifar.load(tmp_path)
    (tmp_path / "data_batch_3").touch()
    with pytest.raises(UsageError, match="the version for Python"):
        cifar.load(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("data_batch_2.bin", b"", "0 bytes, which is not a number of whole records"),
        ("data_batch_2.bin", records([1, 2])[:-1], "6145 bytes, .* cut off"),
        ("test_batch.bin", b"<html>", "not a number of whole records"),
        ("data_batch_2.bin", records([1]), r"hold \[2, 1, 2, 2, 2\] images"),
        ("test_batch.bin", records([1, 10]), "record 1 of .*test_batch.bin has the label 10"),
    ],
)
def test_a_damaged_file_is_named_with_what_is_wrong(
    tmp_path: Path, name: str, content: bytes, sentence: str
) -> None:
    write_cifar(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=sentence):
        cifar.load(tmp_path)


def test_varied_images_are_pieces_of_the_padded_ones_and_half_are_mirrored() -> None:
    pixels = np.random.default_rng(0).integers(1, 256, (200, 3, 32, 32), dtype=np.uint8)
    varied = cifar.augment(pixels, np.random.default_rng((1, 2, 3)))
    again = cifar.augment(pixels, np.random.default_rng((1, 2, 3)))
    assert np.array_equal(varied, again)
    assert not np.array_equal(varied, cifar.augment(pixels, np.random.default_rng((1, 2, 4))))
    padded = np.pad(pixels, ((0, 0), (0, 0), (4, 4), (4, 4)))
    places, mirrored = set(), 0
    for image, wide in zip(varied, padded, strict=True):
        found = [
            (row, column, is_mirrored)
            for row in range(9)
            for column in range(9)
            for is_mirrored in (False, True)
            if np.array_equal(
                image[..., ::-1] if is_mirrored else image,
                wide[:, row : row + 32, column : column + 32],
            )
        ]
        assert len(found) == 1
        places.add(found[0][:2])
        mirrored += found[0][2]
    assert {row for row, _ in places} == {column for _, column in places} == set(range(9))
    assert 70 < mirrored < 130


def test_normalised_images_are_new_and_float32() -> None:
    pixels = np.full((1, 3, 32, 32), 255, np.uint8)
    images = cifar.normalised(pixels)
    assert images.dtype == np.float32
    assert images[0, :, 0, 0].tolist() == pytest.approx([2.059, 2.127, 2.116], abs=1e-3)
    assert pixels.min() == 255


def test_images_that_are_made_up_repeat_with_their_seed() -> None:
    first, again, other = cifar.synthetic(50, 1), cifar.synthetic(50, 1), cifar.synthetic(50, 2)
    assert np.array_equal(first.pixels, again.pixels)
    assert not np.array_equal(first.pixels, other.pixels)
    assert (first.pixels.shape, first.pixels.dtype.name) == ((50, 3, 32, 32), "uint8")
    assert set(first.labels) <= set(range(10))


# -- training ------------------------------------------------------------------------------

SMALL = ["--benchmark", "1", "--num-examples", "320", "--batch-size", "32", "--num-layers", "8"]


def run(*flags: str) -> int:
    return train_cifar10.main([*SMALL, "--num-threads", "1", *flags])


@pytest.mark.parametrize("flags", [["--kv-store", "local"], ["--cpus", "2"]])
@pytest.mark.slow(reason="it trains for six epochs; a run that goes on from a file runs always")
def test_a_resnet_learns_what_is_easy(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--num-epochs", "6", "--disp-batches", "5", "--lr", "0.1", *flags) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(": ")[0] for line in lines[:5]] == [
        "resnet-8",
        "epoch 1/6 batch 5/10",
        "epoch 1/6",
        "epoch 1/6",
        "epoch 2/6 batch 5/10",
    ]
    assert " img/s, loss " in lines[1]
    assert float(lines[-1].partition("test accuracy: ")[2]) > 0.8


def test_a_run_goes_on_from_what_it_has_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prefix = str(tmp_path / "net")
    flags = ["--num-batches", "2", "--model-prefix", prefix, "--lr-step-epochs", "1"]
    assert run("--num-epochs", "4", "--save-period", "2", *flags) == 0
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {f"net-000{epoch}.{kind}" for epoch in (2, 4) for kind in ("params", "states")}
    saved = (tmp_path / "net-0004.params").read_bytes()
    assert run("--num-epochs", "4", "--load-epoch", "2", *flags) == 0
    assert capsys.readouterr().out.count(f"saved {prefix}-0004.params") == 2
    assert (tmp_path / "net-0004.params").read_bytes() == saved


class Screen(io.StringIO):
    """A terminal."""

    def isatty(self) -> bool:
        return True


def test_on_a_terminal_a_bar_is_there_before_the_first_batch_is_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    screen = Screen()
    monkeypatch.setattr("sys.stdout", screen)
    seen: list[str] = []
    step = torch_training.Trainer.step

    def watched(self: Any, *batch: Any) -> Any:
        seen.append(screen.getvalue())
        return step(self, *batch)

    monkeypatch.setattr(torch_training.Trainer, "step", watched)
    monkeypatch.setattr("progress.REDRAW_EVERY_S", 0.0)
    assert run("--num-epochs", "1", "--num-batches", "4", "--disp-batches", "1") == 0
    bars = [each.rpartition("\r")[2] for each in seen]
    assert bars[0] == f"epoch 1/1 [{'-' * 20}] batch 1/4 under way"
    assert bars[1].startswith(f"epoch 1/1 batch 1/4 [{'#' * 5}{'-' * 15}] ")
    lines = screen.getvalue().split("\n")
    assert lines[1].rpartition("\r")[2].startswith("epoch 1/1: ")
    assert "batch 3/4: " not in screen.getvalue()


def test_num_batches_ends_each_epoch(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--num-epochs", "1", "--num-batches", "3", "--disp-batches", "1") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines[1:3]] == [
        "epoch 1/1 batch 1/3",
        "epoch 1/1 batch 2/3",
    ]


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--benchmark", "0"], "--data-dir is missing. --benchmark 1 needs no data"),
        (["--benchmark", "0"], "tar xzf cifar-10-binary.tar.gz, and give --data-dir cifar-10-b"),
        (["--benchmark", "0", "--data-dir", "nowhere"], "not found in nowhere"),
        (["--num-layers", "9"], "there is no n for --num-layers 9"),
        (["--kv-store", "nowhere"], "unknown store type"),
        (["--cpus", "40"], "leaves device"),
        (["--cpus", "0"], "--cpus must be at least 1"),
        (["--gpus", "zero"], "--gpus takes numbers"),
        (["--gpus", "0,-1"], "--gpus takes numbers"),
        (["--gpus", "99"], "--gpus names number 99"),
        (["--num-examples", "0"], "--num-examples must be at least 1"),
        (["--model-prefix", "gone/net", "--load-epoch", "7"], "gone/net-0007.params"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_1(
    flags: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*flags) == 1
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert sentence in captured.err


def test_a_checkpoint_of_another_network_is_refused(tmp_path: Path) -> None:
    prefix = str(tmp_path / "net")
    saved = torch_resnet.resnet(8)
    saved(torch.randn(4, 3, 32, 32))  # the batch norms now have statistics
    torch_training.save_network(saved, prefix, 1)
    loaded = torch_resnet.resnet(8)
    torch_training.load_network(loaded, prefix, 1)
    expected = saved.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in loaded.state_dict().items())
    with pytest.raises(UsageError, match="another network"):
        torch_training.load_network(torch_resnet.resnet(14), prefix, 1)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--dtype", "float16"], "--dtype is not possible with networks of PyTorch"),
        (["--top-k", "5"], "--top-k is not possible"),
        (["--seed", "-1"], "--seed, --num-batches and --num-threads must be at least 0"),
        (["--load-epoch", "1"], "--load-epoch needs the --model-prefix"),
    ],
)
def test_flags_that_make_no_sense_are_refused(
    flags: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        train_cifar10.parse(flags)
    assert sentence in capsys.readouterr().err


def test_the_defaults_are_those_of_the_original() -> None:
    args = train_cifar10.parse([])
    assert (args.network, args.num_layers, args.kv_store) == ("resnet", 110, "device")
    assert (args.batch_size, args.num_epochs, args.disp_batches) == (128, 300, 20)
    assert (args.lr, args.mom, args.wd, args.lr_step_epochs) == (0.05, 0.9, 1e-4, "200,250")


@dataclasses.dataclass
class Worker:
    """What ``compare_workers`` asks of a store of one process."""

    rank: int = 0
    num_workers: int = 1


def test_a_worker_alone_agrees_with_itself() -> None:
    assert torch_training.compare_workers(Worker(), "host", {"images": 1}) == 1  # type: ignore[arg-type]


def test_threads_are_this_computations_share_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    results = [torch_training.use_threads(*pair) for pair in [(0, 2), (0, 3), (0, 20), (5, 2)]]
    assert results == chosen == [4, 2, 1, 5]
