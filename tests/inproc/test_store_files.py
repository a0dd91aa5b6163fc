"""Checkpoints and optimizer states: what is loaded continues as if nothing had happened."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from workers import Workers

import kvstore
import kvstore.stores.local.store
from kvstore import KVStore, optimizer
from kvstore.errors import CheckpointError, OptimizerNotSet
from kvstore.optimizer import states

OPTIMIZERS = {
    "sgd": optimizer.create("sgd", learning_rate=0.1, momentum=0.9, wd=0.01),
    "adam": optimizer.create("adam", learning_rate=0.1),
    "stateless": optimizer.create("sgd", learning_rate=0.5),
}
SHAPES = {"w": (25, 40), "b": (3,), "half": (151,), "scalar": (), "empty": (0,)}
DTYPES = {"half": np.float16}


def first_values() -> list[np.ndarray[Any, Any]]:
    generator = np.random.default_rng(0)
    return [drawn(generator, key) for key in SHAPES]


def drawn(generator: np.random.Generator, key: str) -> np.ndarray[Any, Any]:
    return generator.normal(size=SHAPES[key]).astype(DTYPES.get(key, np.float32))


def gradients(step: int) -> list[np.ndarray[Any, Any]]:
    generator = np.random.default_rng(step + 1)
    return [drawn(generator, key) for key in SHAPES]


def train(kv: KVStore, steps: range) -> None:
    for step in steps:
        kv.push(list(SHAPES), gradients(step))
    kv.wait()
    kv.barrier()


def begin(kv: KVStore, name: str) -> None:
    kv.set_optimizer(OPTIMIZERS[name])
    kv.init(list(SHAPES), first_values())


def assert_same(one: Any, other: Any) -> None:
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("loader", [("dist_sync", 2), ("dist_sync", 1), ("dist_sync", 5)])
def test_training_from_a_checkpoint_equals_training_that_went_on(
    tmp_path: Path, name: str, loader: tuple[str, int]
) -> None:
    def whole(kv: KVStore) -> Any:
        begin(kv, name)
        train(kv, range(3))
        kv.save_checkpoint(tmp_path / "saved")
        kv.barrier()
        train(kv, range(3, 6))
        return kv.pull(list(SHAPES))

    with Workers("dist_sync", 2, 3, chunk_bytes=256, credit_bytes=512) as workers:
        expected = workers.run(whole)[0]

    def resumed(kv: KVStore) -> Any:
        kv.load_checkpoint(tmp_path / "saved")
        assert kv.keys() == list(SHAPES)
        assert kv.current_optimizer() == OPTIMIZERS[name]
        train(kv, range(3, 6))
        return kv.pull(list(SHAPES))

    kind, num_servers = loader
    with Workers(kind, 2, num_servers, chunk_bytes=256, credit_bytes=512) as workers:
        for values in workers.run(resumed):
            assert_same(values, expected)


@pytest.mark.parametrize(
    "kinds", [("local", "local"), ("local", "dist_sync"), ("dist_sync", "device")]
)
def test_a_checkpoint_moves_between_types_of_stores(tmp_path: Path, kinds: tuple[str, str]) -> None:
    def save(kv: KVStore) -> None:
        begin(kv, "adam")
        train(kv, range(3))
        kv.save_checkpoint(tmp_path)
        train(kv, range(3, 5))

    def load(kv: KVStore) -> Any:
        kv.load_checkpoint(tmp_path)
        train(kv, range(3, 5))
        return kv.pull(list(SHAPES))

    with Workers(kinds[0], 1, 2) as workers:
        workers.run(save)
        expected = workers.stores[0].pull(list(SHAPES))
    with Workers(kinds[1], 1, 2) as workers:
        assert_same(workers.run(load)[0], expected)


@pytest.mark.parametrize("kind", ["local", "dist_sync", "dist_async"])
@pytest.mark.parametrize("dump", [True, False])
def test_states_of_an_optimizer_continue_where_they_were(
    tmp_path: Path, kind: str, dump: bool
) -> None:
    file = tmp_path / "states"

    def save(kv: KVStore) -> Any:
        begin(kv, "adam")
        train(kv, range(4))
        kv.save_optimizer_states(file, dump_optimizer=dump)
        kv.barrier()
        return kv.pull(list(SHAPES))

    def load(kv: KVStore, values: Any) -> Any:
        kv.init(list(SHAPES), values)
        if not dump:
            kv.set_optimizer(OPTIMIZERS["adam"])
        kv.load_optimizer_states(file)
        train(kv, range(4, 5))
        return kv.pull(list(SHAPES))

    with Workers(kind, 1, 2) as workers:
        values = workers.run(save)[0]
        train(workers.stores[0], range(4, 5))
        expected = workers.stores[0].pull(list(SHAPES))
    with Workers(kind, 1, 2) as workers:
        assert_same(workers.run(lambda kv: load(kv, values))[0], expected)


@pytest.mark.parametrize("kind", ["local", "dist_sync"])
def test_states_that_do_not_fit_are_refused_and_the_store_goes_on(
    tmp_path: Path, kind: str
) -> None:
    file = tmp_path / "states"
    source = kvstore.create("local")
    begin(source, "adam")
    train(source, range(2))
    source.save_optimizer_states(file)
    (tmp_path / "junk").write_bytes(b"\x08\0\0\0\0\0\0\0{}      ")

    def script(kv: KVStore) -> None:
        if kv.rank == 0:  # nobody else writes
            with pytest.raises(OptimizerNotSet):
                kv.save_optimizer_states(tmp_path / "none")
        kv.init(["w"], [np.zeros((2, 2), np.float32)])
        with pytest.raises(OptimizerNotSet):
            kv.load_optimizer_states(file)
        kv.set_optimizer(OPTIMIZERS["sgd"])
        with pytest.raises(CheckpointError, match="adam"):
            kv.load_optimizer_states(file)
        kv.set_optimizer(OPTIMIZERS["adam"])
        with pytest.raises(CheckpointError, match=r"\(25, 40\)"):
            kv.load_optimizer_states(file)
        with pytest.raises(CheckpointError):
            kv.load_optimizer_states(tmp_path / "missing")
        with pytest.raises(CheckpointError):
            kv.load_optimizer_states(tmp_path / "junk")
        kv.push("w", np.ones((2, 2), np.float32))
        assert np.all(kv.pull("w") < 0)

    with Workers(kind, 2 if kind == "dist_sync" else 1, 2) as workers:
        workers.run(script)


def test_every_worker_is_told_why_loading_failed(tmp_path: Path) -> None:
    with Workers("dist_sync", 3, 1) as workers:

        def script(kv: KVStore) -> str:
            with pytest.raises(CheckpointError) as caught:
                kv.load_checkpoint(tmp_path / "nowhere")
            return str(caught.value)

        for sentence in workers.run(script):
            assert "nowhere" in sentence


def test_a_checkpoint_without_its_manifest_does_not_count(tmp_path: Path) -> None:
    kv = kvstore.create("local")
    begin(kv, "sgd")
    kv.save_checkpoint(tmp_path)
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        kv.load_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "manifest",
    [
        [],
        {},
        {"format": "kvstore checkpoint", "version": 2},
        {"format": "kvstore checkpoint", "version": 1, "files": {}, "sizes": {}},
        {
            "format": "kvstore checkpoint",
            "version": 1,
            "files": {"values": "../values", "states": "states"},
            "sizes": {"values": 0, "states": 0},
        },
    ],
)
def test_a_manifest_that_makes_no_sense_is_refused(tmp_path: Path, manifest: Any) -> None:
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError):
        kvstore.create("local").load_checkpoint(tmp_path)


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    kv = kvstore.create("local")
    begin(kv, "sgd")
    kv.save_checkpoint(tmp_path)
    (values,) = tmp_path.glob("values-*")
    values.write_bytes(values.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="bytes"):
        kv.load_checkpoint(tmp_path)


def test_saving_again_replaces_the_checkpoint_and_leaves_no_old_files(tmp_path: Path) -> None:
    kv = kvstore.create("local")
    begin(kv, "sgd")
    for step in range(3):
        train(kv, range(step, step + 1))
        kv.save_checkpoint(tmp_path)
    assert sorted(path.name.partition("-")[0] for path in tmp_path.iterdir()) == [
        "manifest.json",
        "states",
        "values",
    ]
    other = kvstore.create("local")
    other.load_checkpoint(tmp_path)
    assert_same(other.pull(list(SHAPES)), kv.pull(list(SHAPES)))


def test_an_interrupted_save_leaves_the_checkpoint_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv = kvstore.create("local")
    begin(kv, "sgd")
    kv.save_checkpoint(tmp_path)
    before = kv.pull(list(SHAPES))
    train(kv, range(2))
    for broken in ("pieces_of", "contents_of"):

        def interrupted(*_: Any) -> Any:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(kvstore.stores.local.store, broken, interrupted)
            with pytest.raises(KeyboardInterrupt):
                kv.save_checkpoint(tmp_path)
    other = kvstore.create("local")
    other.load_checkpoint(tmp_path)
    assert_same(other.pull(list(SHAPES)), before)


@pytest.mark.parametrize("kind", ["local", "dist_sync"])
def test_a_key_is_looked_up_without_a_list_of_all_keys(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Workers(kind, 1, 1) as workers:
        kv = workers.stores[0]
        kv.init(["a", "b"], [np.zeros(3), np.zeros(3)])

        def keys(_: Any) -> Any:
            raise AssertionError("all keys are listed for one")

        with monkeypatch.context() as patch:
            patch.setattr(type(kv), "keys", keys)
            found = [key in kv for key in ("a", "c", 3, ["a"], None)]
        assert found == [True, False, False, False, False]


@pytest.mark.parametrize("kind", ["local", "dist_sync"])
def test_what_an_optimizer_keeps_is_asked_once_for_all_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    asked = 0
    without_counting = states.create_state

    def create_state(*arguments: Any) -> Any:
        nonlocal asked
        asked += 1
        return without_counting(*arguments)

    keys = [f"key{number}" for number in range(40)]
    with Workers(kind, 1, 1) as workers:
        kv = workers.stores[0]
        kv.set_optimizer(OPTIMIZERS["adam"])
        kv.init(keys, [np.zeros(3, np.float32)] * len(keys))
        monkeypatch.setattr(states, "create_state", create_state)
        kv.save_checkpoint(tmp_path)
        kv.load_checkpoint(tmp_path)
    assert 0 < asked < 10


@pytest.mark.parametrize("kind", ["local", "dist_sync", "dist_async"])
@pytest.mark.parametrize("what", ["checkpoint", "optimizer_states"])
def test_a_damaged_file_of_residuals_is_refused_by_all_before_anything_changes(
    kind: str, what: str, tmp_path: Path
) -> None:
    """It is the last worker's: with servers not the one that has them take values over."""
    place = tmp_path / "saved"

    def begin(kv: KVStore, rate: float, value: float) -> None:
        kv.set_gradient_compression({"type": "2bit", "threshold": 1.0})
        kv.set_optimizer(optimizer.create("sgd", learning_rate=rate, momentum=0.5))
        kv.init("w", np.full(3, value, np.float32))

    def save(kv: KVStore) -> None:
        begin(kv, 0.5, 0.0)
        kv.push("w", np.full(3, 0.75, np.float32))
        kv.wait()
        kv.barrier()
        getattr(kv, f"save_{what}")(place, *([True] if what == "optimizer_states" else []))

    def load(kv: KVStore) -> tuple[Any, ...]:
        begin(kv, 1.0, 8.0)
        with pytest.raises(CheckpointError, match=rf"{damaged.name} is damaged"):
            getattr(kv, f"load_{what}")(place)
        kv.barrier()
        found = kv.pull("w").tolist(), kv.current_optimizer()
        damaged.write_bytes(content)
        kv.barrier()
        getattr(kv, f"load_{what}")(place)
        return *found, kv.current_optimizer()

    with Workers(kind) as workers:
        workers.run(save)
        (damaged,) = tmp_path.rglob(f"*residuals-{workers.stores[-1].rank}*")
    content = damaged.read_bytes()
    damaged.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    unchanged = optimizer.create("sgd", learning_rate=1.0, momentum=0.5)
    loaded = optimizer.create("sgd", learning_rate=0.5, momentum=0.5)
    with Workers(kind) as workers:
        for found in workers.run(load):
            assert found == ([8.0] * 3, unchanged, loaded)
