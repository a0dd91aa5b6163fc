"""Residuals: one for each key and sender, saved and put back, and what they are good for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from compression_cases import CHAINS, DTYPES, chain_of, kind

import kvstore
from kvstore import optimizer
from kvstore.arrays.dtypes import accumulation_dtype
from kvstore.checkpoint.safetensors import TensorSpec, TensorWriter
from kvstore.compression import Draw, Residuals
from kvstore.errors import CheckpointError, ValueMismatchError

F4 = np.dtype(np.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_residual_is_zeros_at_first_in_the_dtype_of_sums(dtype: str) -> None:
    found = Residuals().of("w", 5, kind(dtype))
    assert found.dtype == accumulation_dtype(kind(dtype))
    assert list(found) == [0] * 5


def test_keys_and_senders_have_their_own() -> None:
    residuals = Residuals()
    residuals.of("w", 5, F4)[:] = 1
    residuals.of("w", 5, F4, sender=1)[:] = 2
    residuals.of("v", 3, F4)[:] = 3
    assert residuals.of("w", 5, F4)[0] == 1
    assert residuals.of("w", 5, F4, sender=1)[0] == 2
    assert [len(values) for _, _, values in residuals.export()] == [3, 5, 5]


def test_a_deleted_key_owes_nothing() -> None:
    residuals = Residuals()
    for key in ("w", "v"):
        residuals.of(key, 3, F4)[:] = 1
    residuals.forget(["w"])
    assert [list(residuals.of(key, 3, F4)) for key in ("w", "v")] == [[0, 0, 0], [1, 1, 1]]
    residuals.forget(["w", "v"])
    assert residuals.export() == []


def test_what_was_exported_can_be_put_back() -> None:
    before, after = Residuals(), Residuals()
    before.of("w", 3, F4)[:] = [1, 2, 3]
    before.of("a", 1, np.dtype("f8"), sender=2)[:] = 0.1
    saved = before.export()
    before.of("w", 3, F4)[:] = 0  # copies were given
    assert [(key, sender) for key, sender, _ in saved] == [("a", 2), ("w", 0)]
    after.of("gone", 3, F4)
    after.restore(saved)
    assert list(after.of("w", 3, F4)) == [1, 2, 3]
    assert list(after.of("a", 1, np.dtype("f8"), sender=2)) == [0.1]
    assert len(after.export()) == 2


def test_a_residual_of_another_key_is_refused() -> None:
    residuals = Residuals()
    residuals.of("w", 3, F4)
    with pytest.raises(ValueMismatchError, match="3 elements of float32, expected 4"):
        residuals.of("w", 4, F4)
    with pytest.raises(ValueMismatchError, match="of float64"):
        residuals.of("w", 3, np.dtype("f8"))


@pytest.mark.parametrize("name", [name for name in CHAINS if name != "1bit"])
def test_with_error_feedback_the_mean_of_what_arrives_becomes_right(name: str) -> None:
    """A gradient that stays the same arrives whole in the long run, small as it is in parts."""
    chain, random = chain_of(name, feedback=True), np.random.default_rng(1)
    gradient = (random.normal(size=64) * 0.2).astype(np.float32)
    residual, total, rounds = np.zeros(64, np.float32), np.zeros(64), 400
    for number in range(rounds):
        out = np.empty(64, np.float32)
        draw = Draw(0, number)
        chain.decode(chain.encode(gradient, residual=residual, draw=draw), out)
        total += out
    np.testing.assert_allclose(total / rounds, gradient, atol=0.05)


def test_training_with_two_workers_reaches_the_minimum_by_compressed_gradients() -> None:
    """Least squares by SGD converges; without error feedback 2bit sends nothing in the end."""
    random = np.random.default_rng(2)
    features, wanted = random.normal(size=(2, 50, 8)), random.normal(size=8)

    def distance(feedback: bool) -> float:
        chain, weight = chain_of("2bit", feedback=feedback), np.zeros(8)
        residuals = [np.zeros(8) if feedback else None for _ in range(2)]
        for _ in range(2000):
            total = np.zeros(8)
            for own, residual in zip(features, residuals, strict=True):
                gradient = own.T @ (own @ (weight - wanted)) / 50
                chain.decode(chain.encode(gradient, residual=residual), total, add=True)
            weight -= 0.01 * total
        return float(np.abs(weight - wanted).max())

    assert distance(feedback=True) < 0.02
    assert distance(feedback=False) > 0.1


@pytest.mark.parametrize("metadata", [{}, {"num_workers": "1"}])
def test_a_file_of_residuals_without_its_metadata_is_refused_and_nothing_is_forgotten(
    tmp_path: Path, metadata: dict[str, str]
) -> None:
    kv = kvstore.create("local")
    kv.set_gradient_compression({"type": "2bit", "threshold": 1.0})
    kv.set_optimizer(optimizer.create("test"))
    kv.init("w", np.zeros(3, np.float32))
    kv.push("w", np.full(3, 0.6, np.float32))
    kv.save_optimizer_states(tmp_path / "states")
    path = tmp_path / "states.residuals-0"
    with TensorWriter(path, {"0/w": TensorSpec((3,), F4)}, metadata) as file:
        file.write("0/w", 0, np.zeros(3, np.float32))
    with pytest.raises(CheckpointError, match=r"is not a file of residuals: .*remove the file"):
        kv.load_optimizer_states(tmp_path / "states")
    kv.push("w", np.full(3, 0.6, np.float32))
    assert kv.pull("w").tolist() == [1.0] * 3


def test_a_save_without_compression_removes_files_of_residuals_and_no_others(
    tmp_path: Path,
) -> None:
    kv = kvstore.create("local")
    kv.set_gradient_compression({"type": "2bit", "threshold": 0.5})
    kv.init("w", np.zeros(3, np.float32))
    kv.push("w", np.full(3, 0.1, np.float32))
    kv.save_checkpoint(tmp_path)
    path = tmp_path / "residuals-0.safetensors"
    assert path.exists()
    kv.set_gradient_compression({"type": "none"})
    kv.save_checkpoint(tmp_path)
    assert not path.exists()
    for content in (b"a note", b"\x02\0\0\0\0\0\0\0{}"):
        path.write_bytes(content)
        kv.save_checkpoint(tmp_path)
        assert path.read_bytes() == content
