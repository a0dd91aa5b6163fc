"""Reading digits: the embedded ones, plain and compressed files, and damaged ones."""

from __future__ import annotations

import gzip
import hashlib
import struct
from pathlib import Path

import mnist
import numpy as np
import pytest

from pslite.errors import UsageError


def idx(array: np.ndarray) -> bytes:
    header = bytes((0, 0, 8, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape)
    return header + array.astype(np.uint8).tobytes()


def write_digits(folder: Path, count: int = 3) -> None:
    images = np.arange(count * 28 * 28).reshape(count, 28, 28) % 256
    for prefix in ("train", "t10k"):
        (folder / f"{prefix}-images-idx3-ubyte").write_bytes(idx(images))
        (folder / f"{prefix}-labels-idx1-ubyte").write_bytes(idx(np.arange(count)))


def test_the_embedded_digits_are_there_and_in_range() -> None:
    training, test = mnist.load()
    assert (training.images.shape, test.images.shape) == ((8500, 1, 28, 28), (1500, 1, 28, 28))
    assert (training.images.dtype, training.labels.dtype) == (np.float32, np.int64)
    assert (training.images.min(), training.images.max()) == (0, 1)
    assert np.bincount(training.labels, minlength=10).min() > 700
    assert np.bincount(test.labels, minlength=10).sum() == 1500


def test_the_embedded_files_are_those_that_their_readme_names() -> None:
    readme = (mnist.EMBEDDED / "README.md").read_text()
    for path in sorted(mnist.EMBEDDED.glob("*.gz")):
        digest = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
        assert f"`{path.name}`" in readme
        assert f"`{digest}`" in readme


@pytest.mark.parametrize("compressed", [False, True])
def test_plain_and_compressed_files_hold_the_same(tmp_path: Path, compressed: bool) -> None:
    write_digits(tmp_path)
    if compressed:
        for path in list(tmp_path.iterdir()):
            path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
            path.unlink()
    training, _ = mnist.load(tmp_path)
    expected = (np.arange(28 * 28) % 256 / 255).astype(np.float32)
    assert np.array_equal(training.images[0].ravel(), expected)
    assert training.labels.tolist() == [0, 1, 2]


def test_a_missing_file_is_named_with_its_folder(tmp_path: Path) -> None:
    write_digits(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(UsageError, match=r"t10k-labels-idx1-ubyte\.gz is in .*--data-dir"):
        mnist.load(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("train-images-idx3-ubyte", b"", "not an IDX file"),
        ("train-images-idx3-ubyte", b"<html>", "not an IDX file"),
        ("train-images-idx3-ubyte", idx(np.arange(3)), "in 3 dimensions"),
        ("train-images-idx3-ubyte", idx(np.zeros((3, 28, 28)))[:-1], "cut off or damaged"),
        ("train-images-idx3-ubyte", bytes((0, 0, 8, 3)) + b"\xff" * 12, "cut off or damaged"),
        ("train-labels-idx1-ubyte", idx(np.arange(4)), "3 images but .* 4 labels"),
        ("train-labels-idx1-ubyte", idx(np.array([1, 2, 77])), "label 77"),
    ],
)
def test_a_malformed_file_is_named_with_what_is_wrong(
    tmp_path: Path, name: str, content: bytes, sentence: str
) -> None:
    write_digits(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=sentence) as caught:
        mnist.load(tmp_path)
    assert name in str(caught.value)


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-9], lambda data: b"no gzip", lambda d: d[:30]]
)
def test_a_damaged_compressed_file_is_an_error_and_no_crash(tmp_path: Path, damage: object) -> None:
    write_digits(tmp_path)
    plain = tmp_path / "train-images-idx3-ubyte"
    packed = gzip.compress(plain.read_bytes())
    plain.unlink()
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(damage(packed))  # type: ignore[operator]
    with pytest.raises(UsageError, match="cannot read"):
        mnist.load(tmp_path)
