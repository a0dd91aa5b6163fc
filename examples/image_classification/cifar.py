"""Reads CIFAR-10's binary files, generates images of the same form, and augments images.

Turns files and seeds into NumPy arrays, without network or threads. The layout (A. Krizhevsky,
https://www.cs.toronto.edu/~kriz/cifar.html, "binary version"): records of one byte of label and
3,072 bytes of pixels, 1,024 of red, then green, then blue, each row by row. Read next:
``train_cifar10.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pslite.errors import UsageError

TRAINING_FILES = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
TEST_FILE = "test_batch.bin"
FOLDER_IN_ARCHIVE = "cifar-10-batches-bin"

SHAPE = (3, 32, 32)
RECORD_BYTES = 1 + 3 * 32 * 32
NUM_CLASSES = 10

WHERE = (
    'the "binary version" of CIFAR-10 from https://www.cs.toronto.edu/~kriz/cifar.html '
    "(cifar-10-binary.tar.gz)"
)

GET = (
    "curl -O https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz && "
    "tar xzf cifar-10-binary.tar.gz"
)

# Of the 50,000 training images.
MEAN = np.array([125.31, 122.95, 113.87], np.float32).reshape(3, 1, 1)
DEVIATION = np.array([62.99, 62.09, 66.70], np.float32).reshape(3, 1, 1)

PADDING = 4


@dataclass(frozen=True)
class Images:
    """``pixels`` (n, 3, 32, 32) uint8, and ``labels`` (n,) int64 in 0..9."""

    pixels: NDArray[np.uint8]
    labels: NDArray[np.int64]


def load(folder: Path) -> tuple[Images, Images]:
    """The training images and the test images, from the six files in ``folder``.

    The files may also be in the archive's own folder inside it. Raises ``UsageError``, which says
    which file is missing and where to get it, or what is wrong with a file.
    """
    home = find(folder)
    parts = [read_file(home / name) for name in TRAINING_FILES]
    sizes = [len(part.labels) for part in parts]
    if len(set(sizes)) > 1:
        raise UsageError(
            f"the files {TRAINING_FILES[0]} to {TRAINING_FILES[-1]} in {home} hold {sizes} "
            f"images and should hold equally many; some were cut off: fetch them again"
        )
    training = Images(
        np.concatenate([part.pixels for part in parts]),
        np.concatenate([part.labels for part in parts]),
    )
    return training, read_file(home / TEST_FILE)


def find(folder: Path) -> Path:
    """The folder with all six files: ``folder`` or the archive's own inside it."""
    inside = folder / FOLDER_IN_ARCHIVE
    home = inside if inside.is_dir() else folder
    missing = [name for name in (*TRAINING_FILES, TEST_FILE) if not (home / name).is_file()]
    if not missing:
        return home
    hint = ""
    if any((home / name).with_suffix("").is_file() for name in missing):
        hint = " (what lies there is the version for Python, which would have to be unpickled)"
    raise UsageError(
        f"{', '.join(missing)} not found in {home}{hint}. Unpack {WHERE} and give its folder as "
        f"--data-dir, or try out the script with --benchmark 1, which makes images up"
    )


def read_file(path: Path) -> Images:
    """The images of one file; its size and all labels are checked."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error}") from error
    if not data or len(data) % RECORD_BYTES:
        raise UsageError(
            f"{path} holds {len(data)} bytes, which is not a number of whole records of "
            f"{RECORD_BYTES} bytes; it was cut off or is another kind of file. Take {WHERE}"
        )
    records = np.frombuffer(data, np.uint8).reshape(-1, RECORD_BYTES)
    labels = records[:, 0]
    if labels.max() >= NUM_CLASSES:
        at = int(labels.argmax())
        raise UsageError(
            f"record {at} of {path} has the label {labels[at]}; CIFAR-10's are 0 to 9. It is "
            f"damaged or another kind of file (CIFAR-100 has two labels). Take {WHERE}"
        )
    return Images(records[:, 1:].reshape(-1, *SHAPE), labels.astype(np.int64))


def synthetic(num_images: int, seed: int) -> Images:
    """Coarse squares of colour, the same for all images of a class, under noise: easy to learn.

    Equal seeds give equal images; the squares are the same for all seeds.
    """
    if num_images < 1:
        raise UsageError(f"--num-examples must be at least 1, got {num_images}")
    squares = np.random.default_rng(0).integers(0, 192, (NUM_CLASSES, 3, 4, 4), dtype=np.uint8)
    patterns = squares.repeat(8, axis=2).repeat(8, axis=3)
    rng = np.random.default_rng((1, seed))
    labels = rng.integers(0, NUM_CLASSES, num_images)
    noise = rng.integers(0, 64, (num_images, *SHAPE), dtype=np.uint8)
    return Images(patterns[labels] + noise, labels)


def augment(pixels: NDArray[np.uint8], rng: np.random.Generator) -> NDArray[np.uint8]:
    """New images: each is padded by 4 zeros on all sides and cropped at a random place, and half of
    them are mirrored (He et al., arXiv 1512.03385, section 4.2)."""
    count = len(pixels)
    padded = np.pad(pixels, ((0, 0), (0, 0), (PADDING, PADDING), (PADDING, PADDING)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, SHAPE[1:], axis=(2, 3))
    rows, columns = rng.integers(0, 2 * PADDING + 1, (2, count))
    images: NDArray[np.uint8] = windows[np.arange(count), :, rows, columns]
    mirrored = rng.random(count) < 0.5
    images[mirrored] = images[mirrored, ..., ::-1]
    return images


def normalised(pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
    """New float32 images whose channels have mean 0 and deviation 1 over the data set."""
    images = pixels.astype(np.float32)
    images -= MEAN
    images /= DEVIATION
    return images
