"""Reads MNIST, or a sample of it, from files in the IDX layout, plain or gzip-compressed.

Only reads files, without network or threads. The layout (Y. LeCun, "The MNIST database"): two zero
bytes, a type code (8 is unsigned byte), the number of dimensions, one big-endian 32-bit size for
each of them, then the values, the last dimension fastest. Read next: ``train_mnist.py``.
"""

from __future__ import annotations

import gzip
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pslite.errors import UsageError

EMBEDDED = Path(__file__).resolve().parent / "data" / "mnist10k"

UNSIGNED_BYTE = 8


@dataclass(frozen=True)
class Digits:
    """``images`` (n, 1, 28, 28) float32 in [0, 1], and ``labels`` (n,) int64 in 0..9."""

    images: NDArray[np.float32]
    labels: NDArray[np.int64]


def load(folder: Path = EMBEDDED) -> tuple[Digits, Digits]:
    """The training digits and the test digits, from the four standard files in ``folder``.

    Each may end in ``.gz`` or not, as in the full distribution of 60,000 and 10,000 digits.
    Raises ``UsageError`` if a file is missing or malformed.
    """
    return read_digits(folder, "train"), read_digits(folder, "t10k")


def read_digits(folder: Path, prefix: str) -> Digits:
    """One of the two parts: ``prefix`` is ``train`` or ``t10k``."""
    images_path = find(folder, f"{prefix}-images-idx3-ubyte")
    labels_path = find(folder, f"{prefix}-labels-idx1-ubyte")
    images, labels = read_idx(images_path, 3), read_idx(labels_path, 1)
    if len(images) != len(labels):
        raise UsageError(
            f"{images_path} holds {len(images)} images but {labels_path} holds {len(labels)} "
            f"labels; take both files from the same distribution"
        )
    if len(labels) and labels.max() > 9:
        raise UsageError(f"{labels_path} holds the label {labels.max()}; digits are 0 to 9")
    scaled = images[:, None].astype(np.float32)
    scaled /= 255
    return Digits(scaled, labels.astype(np.int64))


def find(folder: Path, name: str) -> Path:
    """The file ``name`` or ``name.gz`` in ``folder``."""
    candidates = [folder / name, folder / f"{name}.gz"]
    for path in candidates:
        if path.is_file():
            return path
    raise UsageError(
        f"neither {name} nor {name}.gz is in {folder}; give --data-dir a folder with the four "
        f"MNIST files, or leave it out to use the embedded digits"
    )


def read_idx(path: Path, num_dimensions: int) -> NDArray[np.uint8]:
    """The array of unsigned bytes in an IDX file; the size is checked against the header."""
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise UsageError(f"cannot read {path}: {error}") from error
    header_bytes = 4 + 4 * num_dimensions
    if len(data) < header_bytes or data[:4] != bytes((0, 0, UNSIGNED_BYTE, num_dimensions)):
        raise UsageError(
            f"{path} is not an IDX file of unsigned bytes in {num_dimensions} dimensions: it "
            f"starts with {data[:4].hex(' ')}"
        )
    shape = struct.unpack(f">{num_dimensions}I", data[4:header_bytes])
    expected = header_bytes + int(np.prod(shape, dtype=object))
    if len(data) != expected:
        raise UsageError(
            f"{path} should hold {expected} bytes by its header (shape {shape}) but holds "
            f"{len(data)}; it was cut off or damaged: fetch it again"
        )
    return np.frombuffer(data, np.uint8, offset=header_bytes).reshape(shape)
